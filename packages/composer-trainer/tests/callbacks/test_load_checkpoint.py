"""The parts of a checkpoint with a Trainer: its position in the data, and the callback that loads at an event."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from composer.callbacks import LoadCheckpoint
from composer.checkpoint import (
    save_checkpoint,
)
from composer.checkpoint.load import (
    CheckpointLoadOptions,
    load_checkpoint,
)
from composer.checkpoint.save import (
    save_checkpoint_to_disk,
)
from composer.core import Callback, Event, State
from composer.loggers import Logger


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_whoever_runs_the_loop_keeps_the_place_in_the_data(make_trainer: Any, tmp_path: Path) -> None:
    def finished(folder: Path | None) -> Any:
        trainer = make_trainer(train_dataloader=make_trainer.loader(shuffle=True))
        if folder is not None:
            everything = CheckpointLoadOptions(load_optimizer=True, load_resumption_state=True)
            load_checkpoint(folder, everything, state=trainer.state)
        trainer.fit()
        return trainer.state

    class Saver(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch == 3:
                save_checkpoint_to_disk(tmp_path, state)

    make_trainer(train_dataloader=make_trainer.loader(shuffle=True), callbacks=[Saver()]).fit()

    assert same_weights(finished(None).model, finished(tmp_path / "ep0-ba3").model)


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
