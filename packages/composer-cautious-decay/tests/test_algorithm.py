"""`CautiousDecay` at its events, against a slow reference, and on several ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from composer.algorithms.cautious_decay import CautiousDecay
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Engine, State
from composer.testing import deep_compare, run_on_ranks


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def compute_gradients(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(16, 4, generator=generator).double(), torch.randint(3, (16,), generator=generator)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def start(optimizer: Any, model: nn.Module, algorithm: Any = None) -> tuple[State, Engine]:
    algorithm = CautiousDecay(2.0) if algorithm is None else algorithm
    state = State(model=model, max_duration="9ba", dataloader=[0], optimizers=optimizer, algorithms=algorithm)
    engine = Engine(state)
    engine.run_event("init")
    return state, engine


def train(state: State, engine: Engine, steps: range, skipped: int = -1) -> None:
    """Train as every loop does; the schedulers step before BATCH_END."""
    engine.run_event("fit_start")
    for number in steps:
        engine.run_event("batch_start")

        def passes(number: int = number) -> Tensor:
            engine.run_event("before_train_batch")
            with torch.enable_grad():
                loss = compute_gradients(state.model, number)
            engine.run_event("after_train_batch")
            return loss

        before = copy.deepcopy(state.model.state_dict())
        if isinstance(state.optimizers[0], torch.optim.LBFGS):
            state.optimizers[0].step(passes)
        else:
            passes()
            if number != skipped:
                state.optimizers.step()
        for scheduler in state.schedulers:
            scheduler.step()
        state.timestamp = state.timestamp.to_next_batch()
        engine.run_event("batch_end")
        if number == skipped:
            deep_compare(before, state.model.state_dict())


MAKERS = {
    "momentum": lambda params, decay: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=decay),
    "adamw": lambda params, decay: torch.optim.AdamW(params, lr=0.1, weight_decay=decay),
    "closure": lambda params, decay: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_run_equals_a_slow_reference(kind: str) -> None:
    model = make_model()
    optimizer: Any = MAKERS[kind](model.parameters(), 0.0)
    state, engine = start(optimizer, model)
    state.schedulers = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train(state, engine, range(5))

    expected = make_model()
    optimizer = MAKERS[kind](expected.parameters(), 0.0)
    for number in range(5):
        optimizer.param_groups[0]["lr"] = eta = 0.1 / (1 + number)
        before = [p.tolist() for p in expected.parameters()]

        def passes(number: int = number) -> Tensor:
            return compute_gradients(expected, number)

        if kind != "closure":
            passes()
        optimizer.step(passes if kind == "closure" else None)
        for parameter, old_rows in zip(expected.parameters(), before, strict=True):
            if parameter.dim() == 2:
                parameter.data = torch.tensor(
                    [
                        [w * (1 - eta * 2.0) if (old - w) * w > 0 else w for old, w in zip(olds, row, strict=True)]
                        for olds, row in zip(old_rows, parameter.tolist(), strict=True)
                    ],
                    dtype=torch.float64,
                )
    deep_compare(dict(expected.state_dict()), dict(model.state_dict()), atol=1e-12, rtol=1e-10)


# ---- the decay of the optimizers


def test_it_replaces_the_decay_of_matrices_and_the_others_keep_theirs() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3)
    _, engine = start(optimizer, model, CautiousDecay(include=["^0.bias"], exclude=["^4"]))

    names = {id(p): name for name, p in model.named_parameters()}
    decays = {names[id(p)]: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    taken = ["0.weight", "0.bias", "2.weight"]
    assert {name: 0.0 if name in taken else 0.3 for name, _ in model.named_parameters()} == decays
    text = str(engine.explain())
    assert "0.weight  cautious   instead of 0.3\n0.bias    cautious   instead of 0.3\n" in text
    assert "2.bias    optimizer  not a matrix\n4.weight  optimizer  excluded\n" in text


def test_groups_that_need_no_change_stay_and_may_have_schedulers() -> None:
    model = make_model()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    state, engine = start(optimizer, model)
    state.schedulers = scheduler
    engine.run_event("fit_start")
    assert [0.0, 0.0] == [group["weight_decay"] for group in optimizer.param_groups]

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    state, engine = start(optimizer, model)
    state.schedulers = scheduler
    with pytest.raises(ValueError, match="but LambdaLR has 1 and AdamW 2, since `CautiousDecay` has given parameters"):
        engine.run_event("fit_start")


def test_an_optimizer_without_its_parameters_gets_a_warning() -> None:
    model = make_model()
    with pytest.warns(NoEffectWarning, match="the optimizers have no parameter that it decays"):
        start(torch.optim.SGD([model[0].bias], lr=0.1), model)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weight_decay": -1.0}, ValueError, "`weight_decay` must not be negative"),
        ({"include": "head"}, TypeError, "`include` must be a sequence of regular expressions"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        CautiousDecay(**arguments)


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="`exclude` must match trainable parameters, but none contains 'head'"):
        start(torch.optim.SGD(model.parameters(), lr=0.1), model, CautiousDecay(exclude=["head"]))


# ---- runs


def test_a_step_that_a_scaler_skips_moves_nothing() -> None:
    model = make_model()
    train(*start(torch.optim.AdamW(model.parameters(), lr=0.1), model), range(3), skipped=1)


def train_on_rank() -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(make_model())
    train(*start(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1), model), range(4))
    return [p.full_tensor().detach() for p in model.parameters()]


# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
def test_two_ranks_of_a_sharded_model_equal_one_process() -> None:
    model = make_model()
    train(*start(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1), model), range(4))

    for weights in run_on_ranks(train_on_rank, 2):
        for expected, found in zip(model.parameters(), weights, strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
