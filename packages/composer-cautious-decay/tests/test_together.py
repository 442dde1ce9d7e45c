"""`CautiousDecay` after `Hyperball`, with optimizers, averages and wrappers of other packages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from composer.algorithms.cautious_decay import CautiousDecay, apply_cautious_decay
from composer.algorithms.ema import EMA
from composer.algorithms.hyperball import Hyperball, apply_hyperball, matrix_norms
from composer.algorithms.muon import Muon, build_muon
from composer.algorithms.sam import SAM, SAMOptimizer
from composer.core import Algorithm, Engine, Event, State
from composer.testing import deep_compare, run_on_ranks

HIDDEN = "2.weight"


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


def start(algorithms: list[Algorithm], model: nn.Module) -> tuple[State, Engine]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    state = State(model=model, max_duration="9ba", dataloader=[0], optimizers=optimizer, algorithms=algorithms)
    engine = Engine(state)
    for event in ("init", "before_load", "after_load"):
        engine.run_event(event)
    return state, engine


def train(state: State, engine: Engine, steps: range) -> None:
    engine.run_event("fit_start")
    for number in steps:
        engine.run_event("batch_start")

        def passes(number: int = number) -> Tensor:
            engine.run_event("before_train_batch")
            loss = compute_gradients(state.model, number)
            engine.run_event("after_train_batch")
            return loss

        if isinstance(state.optimizers[0], SAMOptimizer):
            state.optimizers[0].step(passes)
        else:
            passes()
            for optimizer in state.optimizers:
                optimizer.step()
        state.timestamp = state.timestamp.to_next_batch()
        engine.run_event("batch_end")


def expected_weights(model: nn.Module, optimizers: list[Any], steps: int) -> list[dict[str, Tensor]]:
    """Return the weights after each step: norms of the hidden matrix first, then the decay of all matrices."""
    named = dict(model.named_parameters())
    radii, found = matrix_norms([named[HIDDEN]]), []
    matrices = [p for p in named.values() if p.dim() > 1]
    for number in range(steps):
        before = {name: p.detach().clone() for name, p in named.items()}

        def passes(number: int = number) -> Tensor:
            return compute_gradients(model, number)

        if isinstance(optimizers[0], SAMOptimizer):
            optimizers[0].step(passes)
        else:
            passes()
            for optimizer in optimizers:
                optimizer.step()
        apply_hyperball([named[HIDDEN]], [before[HIDDEN]], radii, 0.05)
        apply_cautious_decay(matrices, [before[n] for n, p in named.items() if p.dim() > 1], 0.05, 0.5)
        found.append({name: p.detach().clone() for name, p in named.items()})
    return found


def undecayed(model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups in which matrices do not decay, since `CautiousDecay` decays them."""
    parts = [[p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False)]
    return [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.0, 0.1), strict=True)]


@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("kind", ["AdamW", "Muon", "SAM"])
def test_norms_are_pinned_then_weights_decay_then_they_are_averaged(kind: str, is_reversed: bool) -> None:
    others: dict[str, list[Algorithm]] = {"AdamW": [], "Muon": [Muon(cautious=True)], "SAM": [SAM(rho=0.5)]}
    ema = EMA(smoothing=0.5, half_life=None, update_interval="1ba")
    algorithms = [Hyperball(), CautiousDecay(0.5), ema, *others[kind]]
    model = make_model()
    state, engine = start(algorithms[::-1] if is_reversed else algorithms, model)
    train(state, engine, range(4))

    expected = make_model()
    optimizers: list[Any] = [torch.optim.AdamW(undecayed(expected), lr=0.05)]
    if kind == "Muon":
        optimizers = list(build_muon(expected, lr=0.05, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8))
        optimizers[1].param_groups[1]["weight_decay"] = 0.1
    if kind == "SAM":
        optimizers = [SAMOptimizer(optimizers[0], rho=0.5)]
    steps = expected_weights(expected, optimizers, 4)
    deep_compare(steps[-1], dict(model.state_dict()), atol=1e-10, rtol=1e-10)

    average = steps[0]
    for k, weights in enumerate(steps):
        average = {name: torch.lerp(weights[name], average[name], k / (k + 9)) for name in weights}  # the warmup
    ema.get_ema_model(expected)
    deep_compare(average, dict(expected.state_dict()), atol=1e-10, rtol=1e-10)


def test_an_average_without_warmup_begins_with_weights_that_are_pinned_and_decayed() -> None:
    ema = EMA(smoothing=0.5, half_life=None, ema_start="2ba", warmup=False)
    state, engine = start([ema, Hyperball(), CautiousDecay(0.5)], make_model())
    train(state, engine, range(2))

    found = dict(ema.get_ema_model(copy.deepcopy(state.model)).state_dict())
    deep_compare(dict(state.model.state_dict()), found, atol=1e-15, rtol=1e-15)


def test_the_plan_says_why_the_order_is_what_it_is() -> None:
    _, engine = start([EMA(), CautiousDecay(), Hyperball()], make_model())

    assert ["Hyperball", "CautiousDecay", "EMA"] == [row.name for row in engine.explain().at(Event.BATCH_END)]
    text = str(engine.explain())
    assert "Hyperball pins norms, which CautiousDecay follows" in text


def test_a_resumed_run_continues_bit_for_bit() -> None:
    model = make_model()
    train(*start([Hyperball(), CautiousDecay(0.5)], model), range(4))

    begun, engine = start([Hyperball(), CautiousDecay(0.5)], make_model())
    train(begun, engine, range(2))
    saved = copy.deepcopy(begun.state_dict())
    resumed, engine = start([Hyperball(), CautiousDecay(0.5)], make_model())
    resumed.load_state_dict(saved)
    train(resumed, engine, range(2, 4))
    deep_compare(dict(model.state_dict()), dict(resumed.model.state_dict()))


def train_on_rank() -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(make_model())
    train(*start([Hyperball(), CautiousDecay(0.5), Muon()], model), range(4))
    return [p.full_tensor().detach() for p in model.parameters()]


# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
def test_two_ranks_of_a_sharded_model_equal_one_process() -> None:
    model = make_model()
    train(*start([Hyperball(), CautiousDecay(0.5), Muon()], model), range(4))

    for weights in run_on_ranks(train_on_rank, 2):
        for expected, found in zip(model.parameters(), weights, strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
