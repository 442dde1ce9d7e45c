"""The Trainer with a profiler: what it tells it, what it refuses, and where remote files go."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader

from composer import Trainer
from composer.core import Callback, State
from composer.loggers import FileLogger, Logger
from composer.testing import RandomClassificationDataset, SimpleModel
from composer.trainer.remote_files import RemoteFiles


class Marker:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def start(self) -> None:
        self.calls.append(f"<{self.name}")

    def finish(self) -> None:
        self.calls.append(f"{self.name}>")


class Profiler(Callback):
    """Records what its markers are told."""

    def __init__(self, *remote_filenames: str) -> None:
        self.calls: list[str] = []
        self.remote_filenames = remote_filenames
        self.bound: list[State] = []

    def bind_to_state(self, state: State) -> None:
        self.bound.append(state)
        state.callbacks.append(self)

    def marker(self, name: str, *args: Any, **kwargs: Any) -> Marker:
        return Marker(name, self.calls)


def make(profiler: Any, **kwargs: Any) -> Trainer:
    model = SimpleModel()
    arguments: dict[str, Any] = {
        "model": model,
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "train_dataloader": DataLoader(RandomClassificationDataset(size=8), batch_size=2),
        "max_duration": "2ep",
        "progress_bar": False,
        "device": "cpu",
        "run_name": "run",
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The profiler is enabled")
        return Trainer(profiler=profiler, **(arguments | kwargs))


def test_a_profiler_is_bound_and_stands_behind_the_callbacks(tmp_path: Path) -> None:
    profiler, callback = Profiler(), Callback()
    trainer = make(profiler, callbacks=callback, save_folder=str(tmp_path))

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
    trainer = make(profiler, eval_dataloader=DataLoader(RandomClassificationDataset(size=4), batch_size=2))
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
        make(Profiler(), device_train_microbatch_size="auto")
    trainer = make(Profiler())
    with pytest.raises(ValueError, match=message):
        trainer.fit(device_train_microbatch_size="auto")
    trainer.close()


@pytest.mark.parametrize("profiler", [Profiler, "profiler"])
def test_something_else_is_refused(profiler: Any) -> None:
    with pytest.raises(TypeError, match=r"`profiler` must be a `composer\.profiler\.Profiler`"):
        make(profiler)


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


class Writes(Callback):
    """Writes a file at the end of each epoch, for a URI."""

    def __init__(self, folder: Path, remote_file_name: str | None, overwrite: bool = False) -> None:
        self.folder, self.remote_file_name, self.overwrite = folder, remote_file_name, overwrite

    def epoch_end(self, state: State, logger: Logger) -> None:
        path = self.folder / "file.txt"
        path.unlink(missing_ok=True)
        path.write_text(f"epoch {state.timestamp._epoch}")
        if self.remote_file_name is not None:
            logger.upload_file(self.remote_file_name, path, overwrite=self.overwrite)
            logger.upload_file("somewhere/else.txt", path, overwrite=True)
            logger.upload_file("memory://another/bucket.txt", path, overwrite=True)


def test_files_named_by_a_uri_are_uploaded(tmp_path: Path, memory: Any) -> None:
    trainer = make(None, callbacks=Writes(tmp_path, "memory://bucket/{run_name}/file.txt", overwrite=True))
    trainer.fit()

    assert memory.cat("/bucket/run/file.txt") == b"epoch 2"
    assert [path for path in memory.find("/") if "file" in path or "else" in path] == ["/bucket/run/file.txt"]
    assert not memory.exists("/another")
    trainer.fit(duration="1ep")
    assert memory.cat("/bucket/run/file.txt") == b"epoch 3"
    trainer.close()


def test_a_profilers_files_have_an_uploader_and_others_none(tmp_path: Path) -> None:
    trainers = [make(Profiler("memory://bucket/{run_name}/{epoch}.json")), make(Profiler()), make(None)]
    kinds = [[type(destination) for destination in trainer.logger.destinations] for trainer in trainers]
    for trainer in trainers:
        trainer.close()

    assert kinds == [[RemoteFiles], [], []]


def test_an_upload_that_fails_is_warned_of_and_training_goes_on(tmp_path: Path, memory: Any) -> None:
    trainer = make(None, callbacks=Writes(tmp_path, "memory://bucket/{run_name}/file.txt"))
    with pytest.warns(RuntimeWarning, match="Not everything was uploaded: .*already exists"):
        trainer.fit()
    trainer.close()

    assert trainer.state.timestamp.epoch == "2ep"
    assert memory.cat("/bucket/run/file.txt") == b"epoch 1"


def test_a_logger_among_the_callbacks_is_not_asked_for_its_name_too_early(tmp_path: Path) -> None:
    trainer = make(None, callbacks=[FileLogger(str(tmp_path / "log.txt"))])
    trainer.fit()
    trainer.close()
    assert (tmp_path / "log.txt").exists()
