"""`GradientClipping` at its events, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.algorithms.gradient_clipping import GradientClipping, gradient_clipping
from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import Engine, State


def make(algorithm: GradientClipping, model: torch.nn.Module | None = None) -> tuple[State, Engine]:
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2) if model is None else model
    state = State(model=model, max_duration="1ep", dataloader=[0], algorithms=algorithm)
    return state, Engine(state)


@pytest.mark.parametrize(("kind", "expected"), [("norm", 0.05), ("value", 0.1)])
def test_gradients_are_clipped_after_the_batch(kind: str, expected: float) -> None:
    state, engine = make(GradientClipping(kind, 0.1), torch.nn.Linear(2, 2, bias=False))
    weight: Any = state.model.weight
    weight.grad = torch.ones(2, 2)
    for event in ("init", "fit_start", "batch_start", "after_backward"):
        engine.run_event(event)
    assert torch.equal(torch.ones(2, 2), weight.grad)
    engine.run_event("after_train_batch")

    torch.testing.assert_close(torch.full((2, 2), expected), weight.grad)


def test_eps_is_passed_on() -> None:
    state, engine = make(GradientClipping("adaptive", 0.5, eps=1e-3), torch.nn.LayerNorm(2, bias=False))
    weight: Any = state.model.weight
    weight.data.zero_()
    weight.grad = torch.tensor([3.0, 4.0])
    engine.run_event("init")
    engine.run_event("after_train_batch")

    torch.testing.assert_close(torch.tensor([0.0003, 0.0004]), weight.grad)


def test_the_function_is_called_once_where_it_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def replacement(model: torch.nn.Module, clipping_type: str, clipping_threshold: float, fsdp_enabled: bool) -> None:
        calls.append((model, clipping_type, clipping_threshold, fsdp_enabled))

    monkeypatch.setattr(gradient_clipping, "apply_gradient_clipping", replacement)
    state, engine = make(GradientClipping("norm", 0.1))
    engine.run_event("init")
    engine.run_event("after_train_batch")

    assert calls == [(state.model, "norm", 0.1, False)]


def test_zero_initialized_parameters_train_by_default() -> None:
    state, engine = make(GradientClipping("adaptive", 0.01), torch.nn.Linear(2, 2))
    layer: Any = state.model
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for weight in layer.parameters():
        weight.data.zero_()
    engine.run_event("init")
    layer(torch.ones(1, 2)).sum().backward()
    engine.run_event("after_train_batch")
    optimizer.step()

    torch.testing.assert_close(torch.full((2, 2), -1e-5 / 2**0.5), layer.weight.detach())
    torch.testing.assert_close(torch.full((2,), -1e-5 / 2**0.5), layer.bias.detach())


def test_zero_weights_that_would_stay_zero_get_a_warning() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    _, engine = make(GradientClipping("adaptive", 0.1, eps=0), model)
    with pytest.warns(NotIntendedUseWarning, match=r"1 are, such as '1\.bias'\. Use `eps=1e-3`"):
        engine.run_event("init")


@pytest.mark.parametrize("algorithm", [GradientClipping("adaptive", 0.1), GradientClipping("norm", 0.1)])
def test_there_is_no_warning_if_zero_weights_train(algorithm: GradientClipping) -> None:
    make(algorithm, torch.nn.BatchNorm1d(2))[1].run_event("init")


def test_wrong_arguments_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`clipping_type` must be 'norm', 'value' or 'adaptive', got 'cubic'"):
        GradientClipping("cubic", 0.1)
    with pytest.raises(ValueError, match=r"`clipping_threshold` must be positive, got -0\.1"):
        GradientClipping("norm", -0.1)
    with pytest.raises(ValueError, match=r"`eps` must not be negative, got -1"):
        GradientClipping("adaptive", 0.1, eps=-1)
