"""The optimizers against the formulas of the paper with x, y and z side by side, and their modes."""

from __future__ import annotations

import copy
import io
from operator import is_
from typing import Any

import pytest
import schedulefree
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer.algorithms.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD, build_schedule_free
from composer.algorithms.schedule_free.optimizers import ExactModes, restore_exactly
from composer.testing import deep_compare

STEPS = 60


class Reference:
    """Algorithm 1 with three buffers: x, y and z are computed as they are written.

    Attributes:
        zs: z after each step.
        average: The mean of these, weighed by the squared learning rate and k**r.
    """

    def __init__(self, x: Tensor, lr: float, beta1: float, beta2: float | None = None, **options: Any) -> None:
        self.x = self.y = self.z = x.clone()
        self.v = torch.zeros_like(x)
        self.lr, self.beta1, self.beta2 = lr, beta1, beta2
        self.decay, self.warmup = options.get("weight_decay", 0.0), options.get("warmup_steps", 0)
        self.r, self.power = options.get("r", 0.0), options.get("weight_lr_power", 2.0)
        self.k, self.total, self.highest = 0, 0.0, 0.0
        self.zs: list[Tensor] = []

    def step(self, grad: Tensor) -> None:
        self.k += 1
        lr = self.lr * (min(1.0, self.k / self.warmup) if self.warmup else 1.0)
        self.highest = max(self.highest, lr)
        direction = grad
        if self.beta2 is not None:
            self.v = self.beta2 * self.v + (1 - self.beta2) * grad**2
            direction = grad / ((self.v / (1 - self.beta2**self.k)).sqrt() + 1e-8)
        self.z = self.z - lr * (direction + self.decay * self.y)
        weight = self.k**self.r * self.highest**self.power
        self.total += weight
        share = weight / self.total
        self.x = (1 - share) * self.x + share * self.z
        self.y = (1 - self.beta1) * self.z + self.beta1 * self.x
        self.zs.append(self.z)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "warmup and decay": {"warmup_steps": 20, "weight_decay": 0.1},
    "late steps": {"r": 1.0, "weight_lr_power": 1.0},
}


def start() -> Tensor:
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def loss_of(weight: Tensor, step: int) -> Tensor:
    target = torch.randn(7, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return (weight.to(torch.float64) - target).square().sum() + weight.sin().sum()


def gradient_at(weight: Tensor, step: int) -> Tensor:
    at = weight.detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(at, step), at)
    return grad


def train(optimizer: torch.optim.Optimizer, weight: Tensor, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        weight.grad = gradient_at(weight, step)
        optimizer.step()


class Plain(torch.optim.Optimizer):
    """Gradient descent that is no `torch.optim.SGD`."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("kind", ["adamw", "sgd", "around"])
def test_it_equals_the_formulas_with_three_buffers(kind: str, foreach: bool, case: str) -> None:
    options = CASES[case]
    weight = torch.nn.Parameter(start())
    optimizer: ExactModes
    if kind == "adamw":
        optimizer = ScheduleFreeAdamW([weight], lr=0.01, betas=(0.9, 0.99), foreach=foreach, **options)
        reference = Reference(weight.detach(), 0.01, 0.9, 0.99, **options)
    elif kind == "sgd":
        optimizer = ScheduleFreeSGD([weight], lr=0.05, momentum=0.8, foreach=foreach, **options)
        reference = Reference(weight.detach(), 0.05, 0.8, **options)
    else:
        options = {name: value for name, value in options.items() if name != "weight_decay"}
        optimizer = build_schedule_free(Plain([weight], lr=0.05), momentum=0.8, **options)
        reference = Reference(weight.detach(), 0.05, 0.8, **options)
    for step in range(STEPS):
        # At the reference's y, so that rounding does not add up through the gradients.
        grad = gradient_at(reference.y, step)
        weight.grad = grad.clone()
        optimizer.step()
        reference.step(grad)
    scale = reference.x.abs().max()

    torch.testing.assert_close(weight.detach(), reference.y, rtol=0, atol=2e-15 * scale)
    torch.testing.assert_close(optimizer.state[weight]["z"], reference.z, rtol=0, atol=2e-15 * scale)
    optimizer.eval()
    torch.testing.assert_close(weight.detach(), reference.x, rtol=0, atol=2e-15 * scale)


def test_without_warmup_x_of_sgd_is_the_mean_of_z() -> None:
    weight = torch.nn.Parameter(start())
    optimizer = ScheduleFreeSGD([weight], lr=0.05)
    zs = []
    for step in range(STEPS):
        train(optimizer, weight, 1, step)
        zs.append(optimizer.state[weight]["z"].clone())
    optimizer.eval()

    torch.testing.assert_close(weight.detach(), torch.stack(zs).mean(0), rtol=0, atol=2e-15 * weight.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hundred_evaluations_do_not_change_training(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = torch.randn(11, 10_000, generator=generator).to(dtype)
    ours, library = (torch.nn.Parameter(grads[0].clone()) for _ in range(2))
    optimizers = [ScheduleFreeAdamW([ours], lr=0.1), schedulefree.AdamWScheduleFree([library], lr=0.1)]
    optimizers[1].train()
    for grad in grads[1:]:
        for weight, optimizer in zip((ours, library), optimizers, strict=True):
            weight.grad = grad.clone()
            optimizer.step()
    before = ours.detach().clone()

    assert torch.equal(before, library)
    for _ in range(100):
        for optimizer in optimizers:
            optimizer.eval()
            optimizer.train()
    assert torch.equal(before, ours)
    assert not torch.equal(before, library)  # why this is needed
    assert "y" not in optimizers[0].state[ours]


def test_modes_may_be_set_twice() -> None:
    weight = torch.nn.Parameter(start())
    optimizer = ScheduleFreeSGD([weight], lr=0.05)
    train(optimizer, weight, 3)
    before = weight.detach().clone()
    optimizer.train()
    optimizer.eval()
    average = weight.detach().clone()
    optimizer.eval()

    assert torch.equal(average, weight)
    assert not torch.equal(before, weight)
    optimizer.train()
    optimizer.train()
    assert torch.equal(before, weight)


def test_weights_that_no_longer_require_gradients_are_restored_too() -> None:
    weight = torch.nn.Parameter(start())
    optimizer = ScheduleFreeSGD([weight], lr=0.05)
    train(optimizer, weight, 3)
    weight.requires_grad_(False)
    weight.grad, before = None, weight.detach().clone()
    optimizer.eval()

    assert not torch.equal(before, weight)
    optimizer.train()
    assert torch.equal(before, weight)


def around_rmsprop(parameters: Any, **options: Any) -> ExactModes:
    rate = options.pop("lr")
    return build_schedule_free(torch.optim.RMSprop(parameters, lr=rate, weight_decay=0.1, momentum=0.5), **options)


def test_around_another_optimizer_it_equals_the_wrapper_of_the_library() -> None:
    ours, library = torch.nn.Parameter(start()), torch.nn.Parameter(start())
    # The wrapper needs an optimizer that makes its state at once.
    base, other = (torch.optim.Adagrad([each], lr=0.05, weight_decay=0.1) for each in (ours, library))
    optimizer, wrapper = build_schedule_free(base), schedulefree.ScheduleFreeWrapper(other, momentum=0.9)
    wrapper.train()
    for step in range(STEPS):
        library.grad = gradient_at(library, step)
        ours.grad = library.grad.clone()
        optimizer.step()
        wrapper.step()

    torch.testing.assert_close(ours, library, rtol=0, atol=1e-13)  # some 50 roundings of 1e-15
    optimizer.eval()
    wrapper.eval()
    torch.testing.assert_close(ours, library, rtol=0, atol=1e-13)
    assert (type(optimizer).__qualname__, isinstance(optimizer, torch.optim.Adagrad)) == ("Adagrad", True)


def test_a_scheduler_of_the_optimizer_that_is_made_schedule_free_still_sets_its_rate() -> None:
    weight = torch.nn.Parameter(start())
    given = torch.optim.RMSprop([weight], lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1.0 if step < 2 else 2.0)
    optimizer = build_schedule_free(given)
    for step in range(3):
        train(optimizer, weight, 1, first=step)
        scheduler.step()

    assert "z" in optimizer.state[weight]
    assert [group["lr"] for group in optimizer.param_groups] == [0.02]


def test_a_closure_is_called_at_y_and_steps_in_eval_mode_are_refused() -> None:
    weight = torch.nn.Parameter(start())
    optimizer = around_rmsprop([weight], lr=0.01)
    train(optimizer, weight, 3)
    before, seen = weight.detach().clone(), []

    def closure() -> Tensor:
        seen.append(weight.detach().clone())
        return loss_of(weight, 3)

    assert optimizer.step(closure).requires_grad
    assert torch.equal(before, seen[0])
    optimizer.eval()
    with pytest.raises(RuntimeError, match=r"Call `train\(\)`"):
        optimizer.step()


@pytest.mark.parametrize("saved_in_eval_mode", [True, False])
@pytest.mark.parametrize("kind", [ScheduleFreeAdamW, ScheduleFreeSGD, around_rmsprop])
def test_a_saved_optimizer_continues_identically(kind: Any, saved_in_eval_mode: bool) -> None:
    whole, begun, resumed = (torch.nn.Parameter(start().float()) for _ in range(3))
    uninterrupted, optimizer, other = (kind([w], lr=0.01, warmup_steps=7) for w in (whole, begun, resumed))
    train(uninterrupted, whole, 10)
    train(optimizer, begun, 5)
    if saved_in_eval_mode:
        optimizer.eval()
    file = io.BytesIO()
    torch.save((begun.detach(), optimizer.state_dict()), file)
    file.seek(0)
    value, state = torch.load(file, weights_only=True)
    with torch.no_grad():
        resumed.copy_(value)
    other.load_state_dict(state)
    other.train()
    train(other, resumed, 5, first=5)

    assert torch.equal(whole, resumed)
    deep_compare(uninterrupted.state_dict(), other.state_dict())


def test_a_copy_in_eval_mode_continues_identically() -> None:
    weight = torch.nn.Parameter(start())
    optimizer = ScheduleFreeSGD([weight], lr=0.05)
    train(optimizer, weight, 3)
    before = weight.detach().clone()
    optimizer.eval()
    twin, double = copy.deepcopy((weight, optimizer))
    double.train()

    assert torch.equal(before, twin)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"lr": -1.0}, "`lr` must not be negative, got -1"),
        ({"weight_decay": -1.0}, "`weight_decay` must not be negative"),
        ({"betas": (0.0, 0.9)}, "`momentum` must be between 0 and 1, got 0"),
        ({"betas": (1.0, 0.9)}, "`momentum` must be between 0 and 1, got 1"),
        ({"betas": (0.9, 1.0)}, r"`betas\[1\]` must be below 1, got 1"),
        ({"betas": (0.9, -0.1)}, "`beta2` must not be negative"),
        ({"eps": -1.0}, "`eps` must not be negative"),
        ({"warmup_steps": -1}, "`warmup_steps` must not be negative"),
        ({"r": -1.0}, "`r` must not be negative"),
        ({"weight_lr_power": float("nan")}, "`weight_lr_power` must be"),
    ],
)
def test_settings_out_of_range_are_refused(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ScheduleFreeAdamW([torch.nn.Parameter(start())], **arguments)


@settings(max_examples=50, deadline=None)
@given(momentum=st.floats(), lr=st.floats(-1, 1))
def test_sgd_takes_a_momentum_between_0_and_1(momentum: float, lr: float) -> None:
    weight = torch.nn.Parameter(start())
    if 0 < momentum < 1 and lr >= 0:
        assert ScheduleFreeSGD([weight], lr=lr, momentum=momentum).param_groups[0]["momentum"] == momentum
    else:
        with pytest.raises(ValueError, match=r"`(momentum|lr)` must"):
            ScheduleFreeSGD([weight], lr=lr, momentum=momentum)


# ---- optimizers of the user ----


def two_groups() -> list[dict[str, Any]]:
    weights = [torch.nn.Parameter(start()) for _ in range(2)]
    return [{"params": weights[:1], "name": "first", "lr": 0.5}, {"params": weights[1:], "weight_decay": 0.25}]


def test_adamw_keeps_its_groups() -> None:
    adamw = torch.optim.AdamW(two_groups(), lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.5)
    held = list(adamw.param_groups)
    made = build_schedule_free(adamw, 5, r=1.0, weight_lr_power=0.0)
    first, second = made.param_groups

    assert isinstance(made, ScheduleFreeAdamW)
    assert all(map(is_, made.param_groups, held))  # schedulers of the given optimizer change them
    assert (first["name"], first["lr"], first["weight_decay"]) == ("first", 0.5, 0.5)
    assert (second["lr"], second["weight_decay"]) == (0.1, 0.25)
    for group in (first, second):
        assert (group["betas"], group["eps"]) == ((0.8, 0.95), 1e-6)
        assert (group["warmup_steps"], group["r"], group["weight_lr_power"]) == (5, 1.0, 0.0)
        assert (group["train_mode"], group["foreach"]) == (True, True)
        assert "amsgrad" not in group


def test_sgd_keeps_its_groups_and_gets_a_momentum() -> None:
    sgd = torch.optim.SGD(two_groups(), lr=torch.tensor(0.1), weight_decay=0.5)
    made = build_schedule_free(sgd)

    assert isinstance(made, ScheduleFreeSGD)
    assert [group["lr"] for group in made.param_groups] == [0.5, pytest.approx(0.1)]
    assert all(isinstance(group["lr"], float) for group in made.param_groups)
    assert [group["momentum"] for group in made.param_groups] == [0.9, 0.9]
    assert "nesterov" not in made.param_groups[0]


def test_settings_may_be_replaced() -> None:
    adamw = torch.optim.AdamW(two_groups(), lr=0.1)
    made = build_schedule_free(adamw, lr=2.0, weight_decay=0.0, momentum=0.7)

    for group in made.param_groups:
        assert (group["lr"], group["weight_decay"], group["betas"]) == (2.0, 0.0, (0.7, 0.999))


class Decoupled(torch.optim.AdamW):
    """Defines weight decay in its own way."""


@pytest.mark.parametrize(
    ("make", "arguments", "error", "match"),
    [
        (torch.optim.LBFGS, {}, TypeError, "a `step` without a closure and no modes of its own, got LBFGS"),
        (torch.optim.RMSprop, {"momentum": 1.0}, ValueError, "`momentum` must be between 0 and 1, got 1.0"),
        (lambda p: torch.optim.SGD(p, maximize=True), {}, ValueError, r"must not use `maximize`, got SGD\(max"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), {}, ValueError, "must not use `amsgrad`"),
        (
            lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
            {},
            ValueError,
            r"must not use `nesterov`, got SGD\(nesterov=True\)",
        ),
        (
            lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.5),
            {},
            ValueError,
            r"must not use `dampening`, got SGD\(dampening=0\.5\)",
        ),
        (Decoupled, {}, ValueError, "`weight_decay` must be given to replace Decoupled"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), {}, ValueError, "to replace Adam,"),
        (torch.optim.SGD, {"momentum": 1.0}, ValueError, "`momentum` must be between 0 and 1, got 1.0"),
        (torch.optim.SGD, {"warmup_steps": -1}, ValueError, "`warmup_steps` must not be negative"),
        (torch.optim.SGD, {"warmup_steps": 1.5}, TypeError, "`warmup_steps` must be an integer"),
        (torch.optim.SGD, {"lr": float("inf")}, ValueError, "`lr` must be"),
    ],
)
def test_what_cannot_be_replaced_stays_as_it_is(make: Any, arguments: Any, error: type[Exception], match: str) -> None:
    optimizer = make([torch.nn.Parameter(start())])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error, match=match):
        build_schedule_free(optimizer, **arguments)

    assert before == optimizer.state_dict()


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree"])
def test_optimizers_of_the_library_get_exact_modes_and_keep_their_name(name: str) -> None:
    weight = torch.nn.Parameter(start().float())
    optimizer = getattr(schedulefree, name)([weight], lr=0.01)
    optimizer.train()
    train(optimizer, weight, 8)
    before = weight.detach().clone()

    assert restore_exactly(optimizer)
    assert type(optimizer).__qualname__ == name
    for _ in range(20):
        optimizer.eval()
        assert not torch.equal(before, weight)
        optimizer.train()
    assert torch.equal(before, weight)
    assert restore_exactly(optimizer)


def test_other_optimizers_are_not_schedule_free() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(start())], lr=0.1)

    assert not restore_exactly(optimizer)
    assert type(optimizer) is torch.optim.SGD
