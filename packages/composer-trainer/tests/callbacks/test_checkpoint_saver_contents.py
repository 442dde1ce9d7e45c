"""The content of a checkpoint, and its size."""

from __future__ import annotations

import errno
import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeTrainer

from composer.checkpoint import CorruptCheckpointError
from composer.checkpoint.durable import atomic_write
from composer.checkpoint.safe_load import load_plain
from composer.checkpoint.shards import read_index
from composer.core import Callback, Time
from composer.loggers import InMemoryLogger


def test_files_load_without_permission_for_any_type(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(
        save_folder=tmp_path, save_interval="2ba", save_metrics=True, eval_dataloader=make_trainer.loader()
    )
    trainer.fit()
    with torch.serialization.safe_globals([]):  # other frameworks allow none
        contents = [torch.load(path, weights_only=True) for path in sorted(tmp_path.glob("ep*"))]

    assert [2, 4, 6, 8] == [content["state"]["timestamp"]["Timestamp"]["batch"] for content in contents]
    clocks = contents[-1]["state"]["timestamp"]["Timestamp"]
    seconds = trainer.state.timestamp.total_wct.total_seconds()  # in whole microseconds
    assert clocks["total_wct"] == pytest.approx(seconds, abs=1e-6)


def test_files_do_not_grow_with_the_number_of_saves(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    sizes = {}

    def size_of_newest(trainer: Any) -> None:
        newest = (tmp_path / "latest-rank0.pt").resolve()
        sizes[trainer.state.timestamp.batch.value] = newest.stat().st_size

    trainer = make_trainer(
        save_folder=tmp_path,
        save_interval="1ba",
        save_filename="ba{batch:05d}.pt",
        save_num_checkpoints_to_keep=2,
        train_dataloader=make_trainer.loader(size=400),
        max_duration="10ba",
    )
    trainer.fit()
    size_of_newest(trainer)
    trainer.fit(duration="50ba")
    size_of_newest(trainer)

    assert [10, 60] == list(sizes)
    assert sizes[60] - sizes[10] < 200  # counts get longer, by some bytes in all


class Counting(Callback):
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter("aab")

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_dicts_of_other_classes_come_back_as_they_were(
    make_trainer: MakeTrainer, tmp_path: Path, asynchronous: bool
) -> None:
    arguments = {"save_folder": tmp_path, "autoresume": True, "run_name": "run", "save_async": asynchronous}
    make_trainer(callbacks=Counting(), max_duration="1ba", **arguments).fit()
    callback = Counting()
    callback.counts.clear()
    make_trainer(callbacks=callback, max_duration="2ba", **arguments)

    assert Counter(a=2, b=1) == callback.counts
    assert Counter is type(callback.counts)


def test_a_relaunch_logs_the_seed_of_the_run(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def launch(duration: str) -> tuple[Any, InMemoryLogger]:
        log = InMemoryLogger()
        arguments = {"save_folder": tmp_path, "run_name": "run", "autoresume": True, "loggers": log}
        return make_trainer(seed=None, max_duration=duration, **arguments), log

    first, first_log = launch("1ep")
    first.fit()
    first.close()
    second, second_log = launch("2ep")

    assert first.state.rank_zero_seed == second.state.rank_zero_seed
    assert first_log.hyperparameters["rank_zero_seed"] == second_log.hyperparameters["rank_zero_seed"]


@pytest.mark.parametrize("interval", [Time(2, "ba"), Time(1, "ep"), 1])
def test_an_interval_may_be_a_time_of_any_unit(make_trainer: MakeTrainer, tmp_path: Path, interval: Any) -> None:
    make_trainer(save_folder=tmp_path, save_interval=interval, max_duration="1ep").fit()

    assert len([*tmp_path.glob("ep*-ba4-rank0.pt")]) == 1


def test_a_disk_that_becomes_read_only_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    with (
        pytest.raises(OSError, match=r"Could not save .* are unchanged"),
        atomic_write(tmp_path / "a"),
    ):
        refuse()


def test_an_index_that_cannot_be_read_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / ".metadata"
    path.write_bytes(b"\x80\x04ctorch.serialization\n_get_layout\nX\x01\x00\x00\x00a\x85R.")
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):  # torch raises a RuntimeError
        read_index(path)


def test_an_entry_of_shards_that_cannot_be_read_is_damaged() -> None:
    for entry in (b"", b"PK\x03\x04 torn"):
        with pytest.raises(CorruptCheckpointError, match=r"not a complete|cannot be read"):
            load_plain(io.BytesIO(entry), "the entry 'a'")
