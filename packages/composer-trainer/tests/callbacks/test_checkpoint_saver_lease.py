"""Trainers with one save folder: the second is refused, and the lease ends with the run."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from fsspec.implementations.memory import MemoryFileSystem

from composer.testing import deep_compare, run_on_ranks
from composer.testing._processes import _context

LOCK, NAME = ".composer.lock", ".composer.owner"


@pytest.fixture(autouse=True)
def _clean_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def _second_launch(folder: str) -> None:
    from conftest import MakeTrainer

    MakeTrainer()(run_name="other", save_folder=folder, save_overwrite=True)


def test_a_second_launch_leaves_the_files_of_the_first_alone(make_trainer: Any, tmp_path: Path) -> None:
    def hashes(folder: Path) -> dict[str, str]:
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.pt")}

    options = {"run_name": "first", "save_interval": "2ba", "save_overwrite": True}
    undisturbed = make_trainer(save_folder=str(tmp_path / "alone"), **options)
    undisturbed.fit()
    trainer = make_trainer(save_folder=str(tmp_path / "alone"), **options)
    in_flight = tmp_path / "alone" / ".ep0-ba2-rank0.pt.0123abcd.saving"
    in_flight.write_text("being written")
    before = hashes(tmp_path / "alone")
    with pytest.raises(RuntimeError, match="FolderInUseError: `save_folder` must not be in use by another run"):
        run_on_ranks(_second_launch, 1, str(tmp_path / "alone"), backend=None)

    assert in_flight.exists()
    assert before == hashes(tmp_path / "alone")
    trainer.fit()
    assert deep_compare(undisturbed.state.state_dict()["model"], trainer.state.state_dict()["model"]) is None
    assert before.keys() == hashes(tmp_path / "alone").keys()
    assert not in_flight.exists()  # of nobody, as it turned out: left over


def test_the_lease_is_there_while_a_run_trains_and_gone_after_it(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer(save_folder=str(tmp_path))
    assert [LOCK, NAME] == sorted(os.listdir(tmp_path))
    trainer.fit()
    assert not {LOCK, NAME} & set(os.listdir(tmp_path))
    with FileLock(tmp_path / LOCK):  # held by another object, as by another process
        (tmp_path / NAME).write_text(json.dumps({"host": socket.gethostname()}))
        with pytest.raises(RuntimeError, match="`save_folder` must not be in use by another run"):
            trainer.save_checkpoint_to_save_folder()
    trainer.save_checkpoint_to_save_folder()
    assert not {LOCK, NAME} & set(os.listdir(tmp_path))
    trainer.fit(duration="1ep")
    trainer.close()
    assert not {LOCK, NAME} & set(os.listdir(tmp_path))


def test_a_notebook_makes_a_second_trainer_without_closing_the_first(make_trainer: Any, tmp_path: Path) -> None:
    make_trainer(save_folder=str(tmp_path), run_name="one")
    second = make_trainer(save_folder=str(tmp_path), run_name="two")
    second.fit()

    assert 8 == second.state.timestamp.batch


def test_runs_whose_file_names_hold_their_names_share_a_folder(make_trainer: Any, tmp_path: Path) -> None:
    pattern = {"save_filename": "{run_name}-ba{batch}.pt", "save_latest_filename": "{run_name}-latest.pt"}
    one = make_trainer(save_folder=str(tmp_path), run_name="one", **pattern)
    two = make_trainer(save_folder=str(tmp_path), run_name="two", **pattern)
    foreign, own = (tmp_path / f".{name}-ba1.pt.0123abcd.saving" for name in ("two", "one"))
    foreign.touch()
    own.touch()
    one.fit()

    assert (True, False) == (foreign.exists(), own.exists())
    two.fit()
    assert not foreign.exists()


def _train_on_ranks(folder: str) -> tuple[list[str], str]:
    from conftest import MakeTrainer

    make = MakeTrainer()
    loader = make.loader(sampler=_sampler())
    trainer = make(save_folder=folder, save_async=True, train_dataloader=loader)
    during = sorted(name for name in os.listdir(folder) if name.startswith(".composer"))
    trainer.fit()
    trainer.close()
    from composer.utils import dist

    lock = FileLock(Path(folder) / LOCK)  # held by another object, as by another process
    if dist.get_global_rank() == 0:
        lock.acquire()
        (Path(folder) / NAME).write_text(json.dumps({"host": socket.gethostname()}))
    dist.barrier()
    try:
        make(save_folder=folder, train_dataloader=loader)
    except RuntimeError as error:
        return during, str(error).rpartition("FolderInUseError: ")[2][:60]
    return during, "not refused"


def _sampler() -> Any:
    from composer.testing import RandomClassificationDataset
    from composer.utils import dist

    return dist.get_sampler(RandomClassificationDataset(size=16), shuffle=False)


def test_all_ranks_are_refused_together(tmp_path: Path) -> None:
    expected = ([LOCK, NAME], f"`save_folder` must not be in use by another run, got {str(tmp_path)!r}"[:60])

    assert [expected, expected] == run_on_ranks(_train_on_ranks, 2, str(tmp_path))


def _launched(folder: str, signs: Path, number: int) -> Any:
    """Start the program in a process of a fork server, which has imported everything; its output is in a file."""
    arguments = (dict(os.environ), folder, str(signs), str(signs / f"output{number}"))
    process = _context().Process(target=_program, args=arguments)
    process.start()
    return process


def _program(environment: dict[str, str], folder: str, signs: str, output: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with Path(output).open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    sys.argv = ["leased.py", folder, signs]
    runpy.run_path(str(Path(__file__).with_name("leased.py")), run_name="__main__")


@pytest.mark.parametrize("kind", ["folder", "remote store"])
def test_a_second_launch_is_refused_and_a_relaunch_follows_the_death_of_the_first_at_once(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "remote store":
        pytest.importorskip("s3fs")
    folder = f"{request.getfixturevalue('s3')}/run" if kind == "remote store" else str(tmp_path / "saved")
    first = _launched(folder, tmp_path, 1)
    while not (tmp_path / "waits").exists():
        assert first.is_alive(), (tmp_path / "output1").read_text()
        time.sleep(0.02)
    _launched(folder, tmp_path, 2).join(60)

    refused = f"the run 'run' on host {socket.gethostname()!r} (process {first.pid}, since"
    assert refused in (tmp_path / "output2").read_text()
    first.kill()
    first.join()
    (tmp_path / "go").touch()
    third = _launched(folder, tmp_path, 3)
    third.join(60)
    text = (tmp_path / "output3").read_text()
    assert 0 == third.exitcode, text
    assert f"Took over {folder} from a run that has ended" in text
    began, ended = json.loads((tmp_path / "ended").read_text())
    assert 6 == ended
    assert began == 2 if kind == "folder" else began < 3, began  # the kill may have cut off uploads
