"""Tests of the callback that loads a checkpoint at an event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shared_runs import same_weights

from composer.callbacks import LoadCheckpoint
from composer.checkpoint import (
    save_checkpoint,
)
from composer.core import Event


def test_callback_loads_another_checkpoint_before_the_runs_own(make_trainer: Any, tmp_path: Path) -> None:
    first = make_trainer(run_name="first")
    first.fit(duration="1ep")
    path = save_checkpoint(first.state, str(tmp_path / "first.pt"))
    second = make_trainer(run_name="second", callbacks=[LoadCheckpoint(str(path), load_weights_only=True)], seed=9)

    assert same_weights(first.state.model, second.state.model)
    assert second.state.timestamp.batch == 0
    assert second.state.run_name == "second"
    whole = make_trainer(run_name="third", callbacks=[LoadCheckpoint(str(path), ignore_keys=["state/optimizers"])])
    assert whole.state.timestamp.batch == 4
    assert whole.state.run_name == "third"


def test_callback_loads_at_its_event_all_weights_and_strictly(make_trainer: Any, tmp_path: Path) -> None:
    first = make_trainer()
    path = str(save_checkpoint(first.state, str(tmp_path / "first.pt"), weights_only=True))
    other = make_trainer.model()
    with torch.no_grad():
        next(other.parameters()).add_(1)
    other.should_save_peft_only = True
    callback = LoadCheckpoint(path, load_weights_only=True, event="fit_start")
    second = make_trainer(model=other, callbacks=[callback], seed=9)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    second.engine.run_event(Event.FIT_START)

    assert other.should_save_peft_only
    assert not torch.equal(next(iter(before.values())), next(other.parameters()))
    assert same_weights(first.state.model, other)
    other.extra = torch.nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match="Missing key"):
        second.engine.run_event(Event.FIT_START)
    with pytest.raises(ValueError, match="never"):
        LoadCheckpoint(path, event="never")
