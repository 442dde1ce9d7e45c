"""Processes of a node that wait for a file of local rank 0."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from composer.testing._processes import run_on_ranks
from composer.utils import dist


def test_signal_file_names_are_hidden_and_differ_whatever_the_seed() -> None:
    random.seed(0)
    state = random.getstate()
    names = [dist.get_node_signal_file_name()]
    assert state == random.getstate()

    random.seed(0)
    names.append(dist.get_node_signal_file_name())

    assert all(re.fullmatch(r"\._signal_file_node0_[A-Za-z0-9]{6}", name) for name in names)
    assert names[0] != names[1]


def test_a_signal_file_name_follows_a_given_generator() -> None:
    first, second = (dist.get_node_signal_file_name(random.Random(3)) for _ in range(2))

    assert first == second


def test_local_rank_zero_writes_the_signal_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    written = dist.write_signal_file("here")
    elsewhere = dist.write_signal_file("there", str(tmp_path / "new" / "folder"))

    assert [str(tmp_path / "here"), str(tmp_path / "new" / "folder" / "there")] == [written, elsewhere]
    assert ["here"] == [path.name for path in tmp_path.iterdir() if path.is_file()]
    assert Path(elsewhere).exists()


def test_other_ranks_only_get_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")

    assert str(tmp_path / "here") == dist.write_signal_file("here", str(tmp_path))
    assert [] == list(tmp_path.iterdir())


def test_the_context_managers_just_run_the_body_in_a_single_process(tmp_path: Path) -> None:
    entered: list[str] = []

    with dist.local_rank_zero_download_and_wait(str(tmp_path / "never")):
        entered.append("download")
    with dist.busy_wait_for_local_rank_zero(str(tmp_path)):
        entered.append("busy")

    assert ["download", "busy"] == entered
    assert [] == list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the functions below on two ranks, which call them one after the other."""
    by_rank = run_on_ranks(call_all, 2, str(tmp_path_factory.mktemp("ranks")))
    return {name: tuple(results[name] for results in by_rank) for name in by_rank[0]}


def call_all(folder: str) -> dict[str, Any]:
    calls = (
        download,
        leave_after_local_rank_zero,
        fail_while_others_wait,
        name_a_signal_file,
        enter_one_after_the_other,
        fail_first,
    )
    results = {}
    for call in calls:
        own = Path(folder, call.__name__)
        own.mkdir(exist_ok=True)
        results[call.__name__] = call(str(own))
        dist.barrier()
    return results


def download(folder: str) -> bool:
    target = Path(folder, "data")
    with dist.local_rank_zero_download_and_wait(str(target)):
        if dist.get_local_rank() == 0:
            time.sleep(0.3)
            target.touch()
        return target.exists()


def test_the_others_wait_for_the_download_of_local_rank_zero(ranks: dict[str, Any]) -> None:
    assert (True, True) == ranks["download"]


def leave_after_local_rank_zero(folder: str) -> tuple[bool, list[str]]:
    done = Path(folder, "done")
    with dist.busy_wait_for_local_rank_zero(folder):
        if dist.get_local_rank() == 0:
            time.sleep(0.3)
            done.touch()
    is_done = done.exists()
    dist.barrier()
    return is_done, sorted(os.listdir(folder))


def test_no_rank_leaves_before_local_rank_zero_and_the_signal_file_is_removed(ranks: dict[str, Any]) -> None:
    assert ((True, ["done"]),) * 2 == ranks["leave_after_local_rank_zero"]


def fail_while_others_wait(folder: str) -> str:
    try:
        with dist.busy_wait_for_local_rank_zero(folder):
            if dist.get_local_rank() == 0:
                raise ValueError("disk full")
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_the_others_hear_that_local_rank_zero_failed(ranks: dict[str, Any]) -> None:
    expected = (
        "ValueError: disk full",
        "RuntimeError: Local rank 0 failed while this process waited for it. ValueError: disk full",
    )

    assert expected == ranks["fail_while_others_wait"]


def name_a_signal_file(folder: str) -> str:
    return dist.get_node_signal_file_name()


def test_all_processes_of_a_node_use_one_signal_file(ranks: dict[str, Any]) -> None:
    first, second = ranks["name_a_signal_file"]

    assert first == second


def test_local_rank_zero_alone_just_runs_the_body() -> None:
    entered: list[str] = []

    with dist.run_local_rank_zero_first():
        entered.append("first")
    assert ["first"] == entered


def enter_one_after_the_other(folder: str) -> float:
    is_first = dist.get_local_rank() == 0
    with dist.run_local_rank_zero_first():
        if is_first:
            time.sleep(0.3)
            Path(folder, "built").touch()
        return float(Path(folder, "built").exists())


def test_local_rank_zero_runs_first(ranks: dict[str, Any]) -> None:
    assert (1.0, 1.0) == ranks["enter_one_after_the_other"]


def fail_first(folder: str) -> str:
    later = Path(folder, "later")
    try:
        with dist.run_local_rank_zero_first():
            if dist.get_local_rank() == 0:
                raise KeyError("no data")
            return "entered late" if later.exists() else "entered"
    except KeyError:
        time.sleep(1.0)
        later.touch()
        return "failed"


def test_a_failing_local_rank_zero_does_not_hold_up_the_others(ranks: dict[str, Any]) -> None:
    assert ("failed", "entered") == ranks["fail_first"]
