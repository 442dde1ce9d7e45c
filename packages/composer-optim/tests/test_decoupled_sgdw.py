from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer.optim import DecoupledSGDW

PATHS: list[dict[str, Any]] = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}]
SHAPES = [(3, 2), (4,), ()]
RATES = [0.5, 0.25, 0.0, 0.4, 0.1]


def parameters(dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES]


def train(optimizer: torch.optim.Optimizer, rates: list[float] = RATES, first_step: int = 0) -> list[Tensor]:
    """Take a step at each of the rates; the parameters afterwards."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step, rate in enumerate(rates, first_step):
        for p, grad in zip(params, gradients(step, params[0].dtype), strict=True):
            p.grad = grad
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return [p.detach().clone() for p in params]


def slow(rates: list[float], *, momentum: float, dampening: float, weight_decay: float, nesterov: bool) -> list[Tensor]:
    """The formula of the paper, one parameter and one line at a time."""
    out = []
    for index, p in enumerate(q.detach().clone() for q in parameters()):
        b = None
        for step, rate in enumerate(rates):
            g = gradients(step)[index]
            b = g.clone() if b is None else momentum * b + (1 - dampening) * g
            d = g + momentum * b if nesterov else b
            p = (1 - rate / RATES[0] * weight_decay) * p
            p = p - rate * (d if momentum else g)
        out.append(p)
    return out


SETTINGS = [
    {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
    {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False},
    {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False},
    {"momentum": 0.9, "dampening": 0.0, "weight_decay": 0.1, "nesterov": True},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1, "nesterov": False},
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", SETTINGS)
def test_every_path_computes_the_formula(path: dict[str, Any], options: dict[str, Any]) -> None:
    actual = train(DecoupledSGDW(parameters(), lr=RATES[0], **options, **path))

    torch.testing.assert_close(actual, slow(RATES, **options), rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    momentum=st.just(0.0) | st.floats(1e-30, 0.99),  # the first fused step divides by it
    dampening=st.floats(0.0, 1.0),
    weight_decay=st.floats(0.0, 0.5),
    path=st.sampled_from(PATHS),
)
def test_any_setting_computes_the_formula(
    momentum: float, dampening: float, weight_decay: float, path: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
    actual = train(DecoupledSGDW(parameters(), lr=RATES[0], **options, **path))

    torch.testing.assert_close(actual, slow(RATES, nesterov=False, **options), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", [o for o in SETTINGS if not o["dampening"]])
def test_without_decay_it_is_sgd_bit_by_bit(path: dict[str, Any], options: dict[str, Any]) -> None:
    options = {**options, "weight_decay": 0.0}
    ours = train(DecoupledSGDW(parameters(torch.float32), lr=RATES[0], **options, **path))
    path = path or {"fused": True}  # the default, where torch supports it
    theirs = train(torch.optim.SGD(parameters(torch.float32), lr=RATES[0], **options, **path))

    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("path", PATHS)
def test_at_the_initial_rate_without_momentum_it_is_sgd_with_a_scaled_decay(path: dict[str, Any]) -> None:
    ours = train(DecoupledSGDW(parameters(), lr=0.5, weight_decay=0.1, **path), [0.5] * 3)
    theirs = train(torch.optim.SGD(parameters(), lr=0.5, weight_decay=0.2, **path), [0.5] * 3)

    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_state_holds_the_momentum_buffer_alone() -> None:
    optimizer = DecoupledSGDW(parameters(), lr=0.5, momentum=0.9)
    train(optimizer, [0.5])

    assert [list(optimizer.state[p]) for p in optimizer.param_groups[0]["params"]] == [["momentum_buffer"]] * 3
    torch.testing.assert_close(
        [optimizer.state[p]["momentum_buffer"] for p in optimizer.param_groups[0]["params"]], gradients(0)
    )


@pytest.mark.parametrize("path", PATHS)
def test_without_momentum_the_buffer_is_none(path: dict[str, Any]) -> None:
    optimizer = DecoupledSGDW(parameters(), lr=0.5, **path)
    train(optimizer, [0.5])

    assert [optimizer.state[p] for p in optimizer.param_groups[0]["params"]] == [{"momentum_buffer": None}] * 3


@pytest.mark.parametrize("path", PATHS)
def test_the_buffer_is_no_alias_of_the_gradient(path: dict[str, Any]) -> None:
    optimizer = DecoupledSGDW(parameters(), lr=0.5, momentum=0.9, **path)
    train(optimizer, [0.5])
    param = optimizer.param_groups[0]["params"][0]
    param.grad.zero_()

    torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], gradients(0)[0])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dampening", [0.0, 0.3])
def test_a_parameter_whose_gradients_begin_later_starts_its_own_buffer(path: dict[str, Any], dampening: float) -> None:
    early, late = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = DecoupledSGDW([early, late], lr=0.1, momentum=0.5, dampening=dampening, **path)
    early.grad = torch.ones(2)
    optimizer.step()
    early.grad, late.grad = torch.ones(2), torch.full((2,), 3.0)
    optimizer.step()

    torch.testing.assert_close(optimizer.state[early]["momentum_buffer"], torch.full((2,), 1.5 - dampening))
    torch.testing.assert_close(optimizer.state[late]["momentum_buffer"], torch.full((2,), 3.0))


@pytest.mark.parametrize("path", PATHS)
def test_maximizing_is_minimizing_with_the_opposite_gradient(path: dict[str, Any]) -> None:
    options: dict[str, Any] = {"lr": 0.5, "momentum": 0.5, "dampening": 0.5, "weight_decay": 0.1, **path}
    down, up = DecoupledSGDW(parameters(), **options), DecoupledSGDW(parameters(), **options)
    up.param_groups[0]["maximize"] = True
    for optimizer, sign in ((down, 1), (up, -1)):
        for step in range(3):
            for p, grad in zip(optimizer.param_groups[0]["params"], gradients(step), strict=True):
                p.grad = sign * grad
            optimizer.step()

    torch.testing.assert_close(down.param_groups[0]["params"], up.param_groups[0]["params"])


@pytest.mark.parametrize("path", [{"foreach": True}, {"fused": True}])
def test_parameters_of_several_dtypes_share_a_group(path: dict[str, Any]) -> None:
    params = [torch.nn.Parameter(torch.ones(2, dtype=d)) for d in (torch.float32, torch.float64, torch.bfloat16)]
    for p in params:
        p.grad = torch.ones_like(p)
    DecoupledSGDW(params, lr=0.25, weight_decay=0.5, **path).step()

    assert [p[0].item() for p in params] == [0.25] * 3


def test_the_learning_rate_is_required() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'lr'"):
        DecoupledSGDW(parameters())  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "Invalid learning rate: -0.1"),
        ({"lr": 0.1, "momentum": -1.0}, "Invalid momentum value: -1.0"),
        ({"lr": 0.1, "weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        ({"lr": 0.1, "nesterov": True}, "Nesterov momentum requires a momentum and zero dampening"),
        ({"lr": 0.1, "nesterov": True, "momentum": 0.9, "dampening": 0.1}, "Nesterov momentum requires"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoupledSGDW(parameters(), **options)


def test_the_positional_order_is_that_of_sgd() -> None:
    optimizer = DecoupledSGDW(parameters(), 0.1, 0.9, 0.0, 1e-4, True)
    group = optimizer.param_groups[0]

    assert tuple(group[name] for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov")) == (
        0.1,
        0.9,
        0.0,
        1e-4,
        True,
    )


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_gradient_scaling_reaches_the_fused_kernel(dampening: float) -> None:
    options: dict[str, Any] = {"lr": 0.5, "momentum": 0.5, "dampening": dampening, "weight_decay": 0.25}
    plain = DecoupledSGDW(parameters(torch.float32), **options)
    scaled = DecoupledSGDW(parameters(torch.float32), **options, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        for optimizer, scale in ((plain, 1.0), (scaled, 1024.0)):
            for p, grad in zip(optimizer.param_groups[0]["params"], gradients(step, torch.float32), strict=True):
                p.grad = grad * scale
        plain.step()
        scaler.scale(torch.zeros(()))
        scaler.step(scaled)
        scaler.update()

    torch.testing.assert_close(scaled.param_groups[0]["params"], plain.param_groups[0]["params"])


@pytest.mark.parametrize("dampening", [0.0, 0.5])
def test_a_step_that_overflows_changes_neither_parameters_nor_the_next_step(dampening: float) -> None:
    """Torch's own fused SGD leaves uninitialized momentum behind here."""
    optimizer = DecoupledSGDW(
        parameters(torch.float32), lr=0.5, momentum=0.5, dampening=dampening, weight_decay=0.25, fused=True
    )
    params = optimizer.param_groups[0]["params"]
    before = copy.deepcopy(params)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for p in params:
        p.grad = torch.full_like(p, float("inf"))
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()

    torch.testing.assert_close(params, before, rtol=0, atol=0)
    assert [optimizer.state[p]["momentum_buffer"].abs().sum().item() for p in params] == [0.0] * 3


def test_the_static_step_works_on_lists() -> None:
    p, g = torch.ones(2, dtype=torch.float64), torch.full((2,), 2.0, dtype=torch.float64)
    buffers: list[Tensor | None] = [None]
    DecoupledSGDW.sgdw(
        [p],
        [g],
        buffers,
        weight_decay=0.5,
        momentum=0.9,
        lr=0.1,
        initial_lr=0.2,
        dampening=0.0,
        nesterov=True,
    )

    torch.testing.assert_close(p, torch.full((2,), 0.75 - 0.1 * (2 + 0.9 * 2), dtype=torch.float64))
    assert buffers[0] is not None
    torch.testing.assert_close(buffers[0], g)
