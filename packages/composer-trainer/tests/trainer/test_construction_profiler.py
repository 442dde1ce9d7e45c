"""Tests of a Trainer with a profiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shared_runs import Profiler, make_profiled
from torch.utils.data import DataLoader

from composer import Trainer
from composer.core import Callback
from composer.loggers import FileLogger
from composer.testing import RandomClassificationDataset, SimpleModel


def test_a_profiler_is_bound_and_stands_behind_the_callbacks(tmp_path: Path) -> None:
    profiler, callback = Profiler(), Callback()
    trainer = make_profiled(profiler, callbacks=callback, save_folder=str(tmp_path))

    assert trainer.state.profiler is profiler
    assert profiler.bound == [trainer.state]
    assert [type(each).__name__ for each in trainer.state.callbacks] == ["Callback", "CheckpointSaver", "Profiler"]
    trainer.close()


def test_it_warns_that_training_is_slower() -> None:
    model = SimpleModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="profiler is enabled. Profiling adds overhead"):
        Trainer(model=model, optimizers=optimizer, profiler=Profiler(), progress_bar=False, device="cpu").close()


def test_every_event_of_a_run_is_marked_and_nested() -> None:
    profiler = Profiler()
    trainer = make_profiled(profiler, eval_dataloader=DataLoader(RandomClassificationDataset(size=4), batch_size=2))
    trainer.fit()
    trainer.eval()
    trainer.predict(DataLoader(RandomClassificationDataset(size=2), batch_size=2))
    trainer.close()

    opened: list[str] = []
    for call in profiler.calls:
        if call.startswith("<"):
            opened.append(call[1:])
        else:
            assert opened.pop() == call[:-1]
    assert opened == []
    count = {name: profiler.calls.count(f"<event/{name}") for name in ("fit", "epoch", "batch", "dataloader", "eval")}
    assert count == {"fit": 1, "epoch": 2, "batch": 8, "dataloader": 10, "eval": 3}
    exhausted = profiler.calls.index("event/epoch>")
    assert profiler.calls[exhausted - 2 : exhausted] == ["<event/dataloader", "event/dataloader>"]


def test_the_microbatch_size_is_not_searched_while_profiling() -> None:
    message = "`profiler` cannot be used with `device_train_microbatch_size='auto'`"
    with pytest.raises(ValueError, match=message):
        make_profiled(Profiler(), device_train_microbatch_size="auto")
    trainer = make_profiled(Profiler())
    with pytest.raises(ValueError, match=message):
        trainer.fit(device_train_microbatch_size="auto")
    trainer.close()


@pytest.mark.parametrize("profiler", [Profiler, "profiler"])
def test_something_else_is_refused(profiler: Any) -> None:
    with pytest.raises(TypeError, match=r"`profiler` must be a `composer\.profiler\.Profiler`"):
        make_profiled(profiler)


def test_a_logger_among_the_callbacks_is_not_asked_for_its_name_too_early(tmp_path: Path) -> None:
    trainer = make_profiled(None, callbacks=[FileLogger(str(tmp_path / "log.txt"))])
    trainer.fit()
    trainer.close()
    assert (tmp_path / "log.txt").exists()
