"""`SOAP` at its events, against the library's optimizer used by hand, and on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_optimizer import SOAP as SOAPOptimizer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from composer import functional as cf
from composer.algorithms.soap import SOAP, build_soap
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Engine, Event, State
from composer.testing import deep_compare, run_on_ranks


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def make_state(optimizers: Any, model: nn.Module, algorithm: SOAP) -> State:
    return State(model=model, max_duration="1ep", dataloader=[0], optimizers=optimizers, algorithms=algorithm)


def started(optimizers: Any, model: nn.Module, algorithm: SOAP) -> State:
    state = make_state(optimizers, model, algorithm)
    Engine(state).run_event(Event.INIT)
    return state


def train(model: nn.Module, optimizers: Any, steps: int, rows: slice = slice(None)) -> float:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4, generator=generator, dtype=torch.float64)
    y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    loss = torch.zeros(())
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return loss.item()


def by_hand(model: Any, **options: Any) -> list[torch.optim.Optimizer]:
    rest = [*model[0].parameters(), model[2].bias, *model[4].parameters()]
    adamw = torch.optim.AdamW(rest, lr=0.02, weight_decay=0.2)
    return [SOAPOptimizer([model[2].weight], lr=0.02, weight_decay=0.2, **options), adamw]


@pytest.mark.parametrize(
    "options", [{}, {"betas": (0.9, 0.99), "shampoo_beta": 0.8, "precondition_frequency": 2, "eps": 1e-4}]
)
def test_it_trains_like_the_optimizer_of_the_library(options: dict[str, Any]) -> None:
    model, other = make_model(), make_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.2)
    train(model, started(adamw, model, SOAP(**options)).optimizers, 12)
    train(other, by_hand(other, **options), 12)

    deep_compare(model.state_dict(), other.state_dict())
    assert not torch.equal(model[2].weight, make_model()[2].weight)


def slow(weight: torch.Tensor, grads: list[torch.Tensor], lr: float, decay: float) -> torch.Tensor:
    """Algorithm 3 of the paper for one matrix, with b1 = b2 = 0.95, a new basis every 2 steps, and no first update."""
    left, right = 0.05 * grads[0] @ grads[0].T, 0.05 * grads[0].T @ grads[0]
    q_left, q_right = (torch.linalg.eigh(each).eigenvectors.flip(1) for each in (left, right))
    mean, squares = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, grad in enumerate(grads[1:], start=1):
        mean = 0.95 * mean + 0.05 * grad
        squares = 0.95 * squares + 0.05 * (q_left.T @ grad @ q_right) ** 2
        rotated = (q_left.T @ mean @ q_right) / (squares.sqrt() + 1e-8)
        size = lr * (1 - 0.95**step) ** 0.5 / (1 - 0.95**step)
        weight = (weight - size * q_left @ rotated @ q_right.T) * (1 - lr * decay)
        left, right = 0.95 * left + 0.05 * grad @ grad.T, 0.95 * right + 0.05 * grad.T @ grad
        if step % 2 == 0:
            for side, (statistics, basis) in enumerate(((left, q_left), (right, q_right))):
                order = (basis * (statistics @ basis)).sum(0).argsort(descending=True)
                squares = squares.index_select(side, order)
                # The library decomposes in float32.
                basis = torch.linalg.qr((statistics @ basis)[:, order].float()).Q.double()
                q_left, q_right = (basis, q_right) if side == 0 else (q_left, basis)
    return weight


def test_steps_follow_the_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    model = make_model()
    soap, _ = started(torch.optim.AdamW(model.parameters(), lr=0.1), model, SOAP(precondition_frequency=2)).optimizers
    weight: Any = model[2].weight
    grads = [torch.randn(16, 16, generator=generator, dtype=torch.float64) for _ in range(7)]
    expected = slow(weight.detach().clone(), grads, 0.1, 0.01)
    for grad in grads:
        weight.grad = grad.clone()
        soap.step()

    torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-11)


def test_hidden_matrices_leave_the_optimizer_with_its_settings() -> None:
    model = make_model()
    rate = torch.tensor(3e-3)
    adamw = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.2)
    algorithm = SOAP()
    soap, other = started(adamw, model, algorithm).optimizers

    assert other is adamw
    assert isinstance(soap, SOAPOptimizer)
    (group,) = soap.param_groups
    assert group["params"] == [model[2].weight]
    assert {"lr": rate.item(), "weight_decay": 0.2, "step": None} == {
        name: group.get(name) for name in ("lr", "weight_decay", "step")
    }
    assert isinstance(group["lr"], float)
    assert algorithm.explain().startswith("2.weight  hidden  16 x 16\n0.weight  other   first layer\n")


def test_a_matrix_with_a_long_side_stays() -> None:
    model = make_model()
    algorithm = SOAP(max_size=15)
    adamw = torch.optim.AdamW(model.parameters())

    with pytest.warns(NoEffectWarning, match=r"2\.weight  other   a side above 15"):
        state = started(adamw, model, algorithm)
    assert [adamw] == state.optimizers


def test_optimizers_of_build_soap_are_left() -> None:
    model = make_model()
    pair = list(cf.build_soap(model, lr=0.01, weight_decay=0.3, precondition_frequency=2))
    state = started(pair, model, SOAP())

    assert pair == state.optimizers
    assert [2] == [group["precondition_frequency"] for group in pair[0].param_groups]
    assert [0.3, 0.0] == [group["weight_decay"] for group in pair[1].param_groups]


def test_another_soap_is_named() -> None:
    kind = type("SOAP", (torch.optim.AdamW,), {})
    model = make_model()
    with pytest.raises(ValueError, match=r"\.SOAP trains matrices of the model already\. Leave out one"):
        started(kind(model.parameters()), model, SOAP())


def test_a_rate_that_is_a_tensor_is_read_once() -> None:
    rate = torch.tensor(0.01)
    soap, adamw = build_soap(make_model(), lr=rate)
    assert isinstance(soap.param_groups[0]["lr"], float)
    assert adamw.param_groups[0]["lr"] is rate


def test_the_builder_needs_both_kinds_of_parameters() -> None:
    with pytest.raises(ValueError, match=r"must have hidden matrices and other parameters, got\n(.|\n)*first layer"):
        build_soap(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))


def test_a_scheduler_of_the_other_parameters_alone_is_refused() -> None:
    model = make_model()
    adamw = torch.optim.AdamW(model.parameters())
    state = make_state(adamw, model, SOAP())
    engine = Engine(state)
    engine.run_event(Event.INIT)
    state.schedulers = LambdaLR(adamw, lambda step: 1.0)

    with pytest.raises(ValueError, match="must change the learning rate of `SOAP` too, but they belong to AdamW"):
        engine.run_event(Event.FIT_START)
    state.schedulers = [LambdaLR(optimizer, lambda step: 1.0) for optimizer in state.optimizers]
    engine.run_event(Event.FIT_START)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "`lr` must not be negative"),
        ({"weight_decay": float("inf")}, "`weight_decay` must be finite"),
        ({"betas": (0.9, 1.0)}, "`betas` must be"),
        ({"shampoo_beta": -0.1}, "`shampoo_beta` must"),
        ({"precondition_frequency": 0}, "`precondition_frequency` must be at least 1"),
        ({"max_size": 0}, "`max_size` must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SOAP(**arguments)
    with pytest.raises(TypeError, match=r"`betas` must be two numbers, got 0\.9"):
        SOAP(betas=0.9)  # type: ignore[arg-type]


def test_a_resumed_optimizer_continues_identically() -> None:
    model = make_model()
    optimizers = build_soap(model, lr=0.01, precondition_frequency=3)
    train(model, optimizers, 4)
    resumed = copy.deepcopy(model)
    others = build_soap(resumed, lr=0.5, precondition_frequency=3)
    for optimizer, other in zip(optimizers, others, strict=True):
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizers, 4)
    train(resumed, others, 4)

    deep_compare(model.state_dict(), resumed.state_dict())


def test_a_matrix_whose_first_gradients_are_zero_moves_nothing_and_recovers() -> None:
    """Behind a head of zeros, the first gradients of all hidden matrices are zero."""
    model = make_model()
    nn.init.zeros_(model[4].weight)
    soap, adamw = build_soap(model, lr=0.01, weight_decay=0.0)
    before = model[2].weight.detach().clone()
    train(model, [soap], 3)
    assert torch.equal(before, model[2].weight)

    train(model, [soap, adamw], 20)
    assert not torch.equal(before, model[2].weight)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


# ---- ranks


def train_on_rank() -> list[torch.Tensor]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model: Any = make_model()
    optimizers = build_soap(model, lr=0.01, precondition_frequency=2)
    model = DistributedDataParallel(model)
    train(model, optimizers, 5, slice(dist.get_rank(), None, dist.get_world_size()))
    return [parameter.detach() for parameter in model.parameters()]


def test_two_ranks_equal_each_other_and_one_process_up_to_rounding() -> None:
    """The gradients have rank 2 of 16: rounding decides 14 directions of each basis, and steps of 0.01 lie in it."""
    model = make_model()
    train(model, build_soap(model, lr=0.01, precondition_frequency=2), 5)
    first, second = run_on_ranks(train_on_rank, 2)

    deep_compare(first, second)
    for expected, actual in zip(model.parameters(), first, strict=True):
        torch.testing.assert_close(actual, expected.detach(), rtol=0, atol=2e-4)


def refused_on_rank() -> None:
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(make_model())
    state = make_state(torch.optim.AdamW(model.parameters()), model, SOAP())
    engine = Engine(state)
    engine.run_event(Event.INIT)
    with pytest.raises(ValueError, match="`SOAP` must have whole matrices, but the model is sharded"):
        engine.run_event(Event.FIT_START)
    with pytest.raises(RuntimeError, match="DTensor"):  # the reason
        train(model, state.optimizers, 2)


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
def test_a_sharded_model_is_refused_since_the_library_cannot_train_it() -> None:
    run_on_ranks(refused_on_rank, 2)


MAKERS: list[Callable[[], SOAP]] = [SOAP, lambda: SOAP(precondition_frequency=1)]


@pytest.mark.parametrize("make", MAKERS)
def test_it_learns(make: Callable[[], SOAP]) -> None:
    model = make_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.01)
    before = train(make_model(), [], 1)

    assert train(model, started(adamw, model, make()).optimizers, 60) < before / 4
