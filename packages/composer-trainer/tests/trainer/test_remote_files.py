"""Tests of uploads of files that callbacks and profilers name by URIs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from shared_runs import Profiler, make_profiled

from composer.core import Callback, State
from composer.loggers import Logger
from composer.testing import run_on_ranks
from composer.trainer.remote_files import RemoteFiles, check_uris
from composer.utils import dist


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
        path.write_text(f"epoch {state.timestamp.epochs}")
        if self.remote_file_name is not None:
            logger.upload_file(self.remote_file_name, path, overwrite=self.overwrite)
            logger.upload_file("somewhere/else.txt", path, overwrite=True)
            logger.upload_file("memory://another/bucket.txt", path, overwrite=True)


def test_files_named_by_a_uri_are_uploaded(tmp_path: Path, memory: Any) -> None:
    trainer = make_profiled(None, callbacks=Writes(tmp_path, "memory://bucket/{run_name}/file.txt", overwrite=True))
    trainer.fit()

    assert memory.cat("/bucket/run/file.txt") == b"epoch 2"
    assert [path for path in memory.find("/") if "file" in path or "else" in path] == ["/bucket/run/file.txt"]
    assert not memory.exists("/another")
    trainer.fit(duration="1ep")
    assert memory.cat("/bucket/run/file.txt") == b"epoch 3"
    trainer.close()


def test_a_profilers_files_have_an_uploader_and_others_none(tmp_path: Path) -> None:
    trainers = [
        make_profiled(Profiler("memory://bucket/{run_name}/{epoch}.json")),
        make_profiled(Profiler()),
        make_profiled(None),
    ]
    kinds = [[type(destination) for destination in trainer.logger.destinations] for trainer in trainers]
    for trainer in trainers:
        trainer.close()

    assert kinds == [[RemoteFiles], [], []]


def test_an_upload_that_fails_is_warned_of_and_training_goes_on(tmp_path: Path, memory: Any) -> None:
    trainer = make_profiled(None, callbacks=Writes(tmp_path, "memory://bucket/{run_name}/file.txt"))
    with pytest.warns(RuntimeWarning, match="Not everything was uploaded: .*already exists"):
        trainer.fit()
    trainer.close()

    assert trainer.state.timestamp.epoch == "2ep"
    assert memory.cat("/bucket/run/file.txt") == b"epoch 1"


def _check(uris: list[str]) -> str:
    try:
        check_uris(uris, "run")
        return f"in step: {dist.all_gather_object(dist.get_global_rank())}"
    except Exception as error:  # noqa: BLE001 - the test compares it
        return f"{type(error).__name__}: {error}"


def _check_all(launches: list[dict[int, list[str]]]) -> list[str]:
    return [_check(uris.get(dist.get_global_rank(), [])) for uris in launches]


def test_ranks_may_name_different_files_and_learn_that_the_first_one_cannot_upload(tmp_path: Path) -> None:
    named = [{0: ["{run_name}/a"]}, {1: ["a"]}, {rank: ["{rank}/a", "1/b"] for rank in (0, 1)}]
    uris = [{rank: [f"file://{tmp_path}/{name}/f" for name in names] for rank, names in each.items()} for each in named]
    first, second = run_on_ranks(_check_all, 2, [*uris, {0: ["file:///dev/null/folder/file.txt"]}])

    assert ["in step: [0, 1]"] * 3 == first[:3] == second[:3]
    assert "/dev/null/folder" in first[3]
    assert second[3] == f"RuntimeError: Files cannot be uploaded: rank 0: {first[3]}"
