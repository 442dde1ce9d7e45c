from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.callbacks import nan_monitor
from composer.callbacks.nan_monitor import NaNMonitor
from composer.core import Callback, Engine, State
from composer.loggers import DeferredValue

NAN = float("nan")


def engine_with(loss: Any, monitor: NaNMonitor | None = None) -> Engine:
    state = State(torch.nn.Linear(1, 1), max_duration="9ba", dataloader=[0], callbacks=monitor or NaNMonitor())
    state.loss = loss
    return Engine(state)


class Spoils(Callback):
    def after_loss(self, state: Any, logger: Any) -> None:
        if state.timestamp.batch == "2ba":
            state.loss = state.loss * NAN


def test_a_run_ends_at_the_first_nan(run: Any) -> None:
    begun = run([Spoils(), NaNMonitor()])
    with pytest.raises(RuntimeError, match=r"Train loss contains a NaN. It appeared in batch 2, counted from 0."):
        begun.fit()
    weights = begun.state.model.state_dict()

    assert begun.state.timestamp.batch == "2ba"
    assert all(weight.isfinite().all() for weight in weights.values())


@pytest.mark.parametrize(
    "loss", [torch.tensor(1.0), torch.tensor([1.0, NAN])[:1], {"a": torch.tensor(1.0)}, (torch.zeros(2),)]
)
def test_numbers_pass(loss: Any) -> None:
    engine_with(loss).run_event("after_loss")


@pytest.mark.parametrize(
    ("loss", "which"),
    [
        (torch.tensor(NAN), "NaN. It appeared"),
        (torch.tensor([1.0, NAN]), "NaN. It appeared"),
        ((torch.tensor(NAN),), "NaN. It appeared"),
        ((torch.tensor(0.0), torch.tensor(NAN)), "It is the loss 'loss1'"),
        ({"total": torch.tensor(0.0), "aux": torch.tensor(NAN)}, "It is the loss 'aux'"),
    ],
)
def test_a_nan_is_found_in_every_kind_of_loss(loss: Any, which: str) -> None:
    with pytest.raises(RuntimeError, match=rf"Train loss contains a NaN.*{which}|{which}"):
        engine_with(loss).run_event("after_loss")


@pytest.mark.parametrize("loss", [1.0, "no", [1.0], {"a": 1.0}, None])
def test_other_losses_are_refused(loss: Any) -> None:
    with pytest.raises(TypeError, match=r"`state.loss` must be a tensor, or a sequence or mapping of tensors, got"):
        engine_with(loss).run_event("after_loss")


class Late(DeferredValue):
    """A value that is not ready before somebody waits for it."""

    arrived = False

    @property
    def ready(self) -> bool:
        return Late.arrived


@pytest.fixture
def slow_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nan_monitor, "DeferredValue", Late)
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda tensor: False), raising=False)
    Late.arrived = False


def test_a_step_never_waits_for_the_device(slow_device: None) -> None:
    engine = engine_with(torch.tensor(NAN))
    for _ in range(3):
        engine.run_event("after_loss")
        engine.state.loss = torch.tensor(1.0)
        engine.run_event("batch_end")
        engine.state.timestamp = engine.state.timestamp.to_next_batch()
    Late.arrived = True
    with pytest.raises(RuntimeError, match="in batch 0"):
        engine.run_event("after_loss")


@pytest.mark.parametrize("event", ["eval_start", "epoch_end", "fit_end"])
def test_what_is_on_its_way_is_waited_for_at_the_end(slow_device: None, event: str) -> None:
    engine = engine_with(torch.tensor(NAN))
    engine.run_event("after_loss")
    with pytest.raises(RuntimeError, match="Train loss contains a NaN"):
        engine.run_event(event)


def test_no_checkpoint_is_saved_after_a_nan(slow_device: None) -> None:
    monitor = NaNMonitor()
    engine = engine_with(torch.tensor(NAN), monitor)
    assert monitor.state_dict() == {}
    engine.run_event("after_loss")
    with pytest.raises(RuntimeError, match="Train loss contains a NaN"):
        engine.state.state_dict()


def test_a_new_run_forgets_the_old_one(slow_device: None) -> None:
    monitor = NaNMonitor()
    engine_with(torch.tensor(NAN), monitor).run_event("after_loss")
    again = engine_with(torch.tensor(1.0), monitor)
    again.run_event("init")
    again.run_event("after_loss")
    again.run_event("fit_end")
    assert monitor.state_dict() == {}
