from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer.optim import DecoupledAdamW

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


def slow(
    rates: list[float], *, betas: tuple[float, float], eps: float, weight_decay: float, amsgrad: bool
) -> list[Tensor]:
    """The formula of the paper, one parameter and one line at a time."""
    out = []
    for index, p in enumerate(q.detach().clone() for q in parameters()):
        m, v, largest = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
        for t, rate in enumerate(rates, 1):
            g = gradients(t - 1)[index]
            p = (1 - rate / RATES[0] * weight_decay) * p
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            largest = torch.maximum(largest, v)
            root = (largest if amsgrad else v) ** 0.5 / (1 - betas[1] ** t) ** 0.5
            p = p - rate / (1 - betas[0] ** t) * m / (root + eps)
        out.append(p)
    return out


SETTINGS: list[dict[str, Any]] = [
    {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False},
    {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False},
    {"betas": (0.5, 0.6), "eps": 1e-2, "weight_decay": 0.1, "amsgrad": True},
    {"betas": (0.0, 0.999), "eps": 1e-8, "weight_decay": 0.5, "amsgrad": True},
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", SETTINGS)
def test_every_path_computes_the_formula(path: dict[str, Any], options: dict[str, Any]) -> None:
    actual = train(DecoupledAdamW(parameters(), lr=RATES[0], **options, **path))

    torch.testing.assert_close(actual, slow(RATES, **options), rtol=1e-10, atol=1e-10)


@settings(max_examples=25, deadline=None)
@given(
    beta1=st.floats(0.0, 0.99),
    beta2=st.floats(0.0, 0.999),
    weight_decay=st.floats(0.0, 0.5),
    amsgrad=st.booleans(),
    path=st.sampled_from(PATHS),
)
def test_any_setting_computes_the_formula(
    beta1: float, beta2: float, weight_decay: float, amsgrad: bool, path: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"betas": (beta1, beta2), "eps": 1e-3, "weight_decay": weight_decay, "amsgrad": amsgrad}
    actual = train(DecoupledAdamW(parameters(), lr=RATES[0], **options, **path))

    torch.testing.assert_close(actual, slow(RATES, **options), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", SETTINGS)
def test_without_decay_it_is_adamw_bit_by_bit(path: dict[str, Any], options: dict[str, Any]) -> None:
    options = {**options, "weight_decay": 0.0}
    ours = train(DecoupledAdamW(parameters(torch.float32), lr=RATES[0], **options, **path))
    path = path or {"fused": True}  # the default, where torch supports it
    theirs = train(torch.optim.AdamW(parameters(torch.float32), lr=RATES[0], **options, **path))

    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("path", PATHS)
def test_the_decay_is_that_of_adamw_divided_by_the_initial_rate(path: dict[str, Any]) -> None:
    ours = train(DecoupledAdamW(parameters(), lr=0.5, betas=(0.9, 0.999), weight_decay=0.1, **path))
    theirs = train(torch.optim.AdamW(parameters(), lr=0.5, weight_decay=0.2, **path))

    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_the_state_has_the_keys_of_torch(path: dict[str, Any], amsgrad: bool) -> None:
    optimizer = DecoupledAdamW(parameters(), amsgrad=amsgrad, **path)
    train(optimizer, [0.5, 0.5])
    expected = ["step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else [])]
    states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]

    assert [expected] * 3 == [list(state) for state in states]
    assert [torch.tensor(2.0)] * 3 == [state["step"] for state in states]
    assert [torch.float32] * 3 == [state["step"].dtype for state in states]
    assert [tuple(state["exp_avg"].shape) for state in states] == SHAPES


def test_parameters_that_need_no_gradient_are_skipped() -> None:
    frozen, still, free = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = DecoupledAdamW([frozen, still, free], lr=0.5, weight_decay=1e-4)
    frozen.grad, free.grad = torch.ones(2), torch.ones(2)
    frozen.requires_grad_(False)
    optimizer.step()

    assert torch.equal(frozen, torch.ones(2))
    assert torch.equal(still, torch.ones(2))
    assert not torch.equal(free, torch.ones(2))
    assert [free] == list(optimizer.state)


def test_the_defaults_are_those_of_the_public_api() -> None:
    group = DecoupledAdamW(parameters()).param_groups[0]

    assert tuple(group[name] for name in ("lr", "betas", "eps", "weight_decay", "amsgrad")) == (
        1e-3,
        (0.9, 0.95),
        1e-8,
        1e-5,
        False,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "Invalid learning rate: -0.1"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecoupledAdamW(parameters(), **options)


@pytest.mark.parametrize("step", [2, 2.0, torch.tensor(2.0)])
def test_checkpoints_whose_step_is_a_number_load(step: Any) -> None:
    whole = DecoupledAdamW(parameters(), lr=0.5)
    train(whole, [0.5] * 4)
    half = DecoupledAdamW(parameters(), lr=0.5)
    train(half, [0.5] * 2)
    saved = half.state_dict()
    for state in saved["state"].values():
        state["step"] = copy.deepcopy(step)
    resumed = DecoupledAdamW([torch.nn.Parameter(p.detach()) for p in half.param_groups[0]["params"]], lr=0.1)
    resumed.load_state_dict(saved)
    train(resumed, [0.5] * 2, first_step=2)

    assert all(
        torch.equal(a, b)
        for a, b in zip(resumed.param_groups[0]["params"], whole.param_groups[0]["params"], strict=True)
    )


@pytest.mark.parametrize("weight_decay", [0.0, 0.25])
def test_gradient_scaling_reaches_the_fused_kernel(weight_decay: float) -> None:
    options: dict[str, Any] = {"lr": 0.5, "weight_decay": weight_decay}
    plain = DecoupledAdamW(parameters(torch.float32), **options)
    scaled = DecoupledAdamW(parameters(torch.float32), **options, fused=True)
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
    # The update alone would not tell: it hardly depends on the scale of the gradients.
    torch.testing.assert_close(
        [scaled.state[p]["exp_avg"] for p in scaled.param_groups[0]["params"]],
        [plain.state[p]["exp_avg"] for p in plain.param_groups[0]["params"]],
    )


@pytest.mark.parametrize("lr", [0.5, 0.0])
def test_a_step_that_overflows_changes_nothing(lr: float) -> None:
    optimizer = DecoupledAdamW(parameters(torch.float32), lr=lr, weight_decay=0.25, fused=True)
    before = parameters(torch.float32)
    params = optimizer.param_groups[0]["params"]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for p in params:
        p.grad = torch.full_like(p, float("inf"))
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    scaler.update()

    torch.testing.assert_close(params, before, rtol=0, atol=0)
    assert [optimizer.state[p]["step"].item() for p in params] == [0.0] * 3


@pytest.mark.parametrize("path", PATHS[:3])  # torch's fused kernels take no complex tensors
def test_complex_parameters_are_updated_like_pairs(path: dict[str, Any]) -> None:
    value, grad = torch.randn(3, dtype=torch.complex128), torch.randn(3, dtype=torch.complex128)
    number, pair = torch.nn.Parameter(value), torch.nn.Parameter(torch.view_as_real(value).clone())
    number.grad, pair.grad = grad, torch.view_as_real(grad).clone()
    for p in (number, pair):
        DecoupledAdamW([p], lr=0.5, weight_decay=1e-4, **path).step()

    torch.testing.assert_close(torch.view_as_real(number.detach()), pair.detach())


def test_the_static_step_works_on_lists() -> None:
    p, g = torch.ones(2, dtype=torch.float64), torch.full((2,), 2.0, dtype=torch.float64)
    m, v, step = torch.zeros_like(p), torch.zeros_like(p), torch.tensor(0.0)
    DecoupledAdamW.adamw(
        [p],
        [g],
        [m],
        [v],
        [],
        [step],
        amsgrad=False,
        beta1=0.9,
        beta2=0.95,
        lr=0.1,
        initial_lr=0.2,
        weight_decay=0.5,
        eps=0.0,
    )

    torch.testing.assert_close(p, torch.full((2,), 0.75 - 0.1, dtype=torch.float64))
    torch.testing.assert_close(m, 0.1 * g)
    torch.testing.assert_close(v, 0.05 * g**2)
    assert step == 1
