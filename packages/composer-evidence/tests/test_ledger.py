from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.evidence import Ledger, LedgerError, merge


def test_lines_are_read_back(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    first = ledger.add("entry", {"about": "tuning", "task": "a", "values": [1, 2.5, None]})
    ledger.add("run", {"score": 0.1})

    again = Ledger(tmp_path)
    assert again.entry(first)["values"] == [1, 2.5, None]
    assert [entry["id"] for entry in again.entries("tuning", "a")] == [first]
    assert again.entries("tuning", "b") == again.entries("stack") == []
    assert len(list(again.lines("run"))) == 1


def test_an_entry_is_added_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)

    assert ledger.add("entry", {"about": "x"}) == ledger.add("entry", {"about": "x"})
    assert len(ledger.path.read_text().splitlines()) == 1


def test_a_line_that_was_changed_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.add("entry", {"about": "x", "effect": 0.5})
    ledger.path.write_text(ledger.path.read_text().replace("0.5", "0.9"))

    with pytest.raises(LedgerError, match="must not change"):
        Ledger(tmp_path)


@settings(deadline=None)  # it waits for the disk
@given(cut=st.integers(2, 40))  # without the last line break alone, the line is whole
def test_a_line_that_a_kill_cut_off_is_ignored_and_lost_alone(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    ledger = Ledger(folder)
    kept = ledger.add("entry", {"about": "first"})
    ledger.add("entry", {"about": "second, which a kill cuts off"})
    content = ledger.path.read_bytes()
    ledger.path.write_bytes(content[:-cut])

    again = Ledger(folder)
    assert [entry["id"] for entry in again.entries()] == [kept]
    third = again.add("entry", {"about": "third"})
    assert [entry["id"] for entry in Ledger(folder).entries()] == [kept, third]


def add_many(folder: Path, name: str) -> None:
    ledger = Ledger(folder)
    for i in range(20):
        ledger.add("run", {"name": name, "i": i, "text": "x" * 5000})


def test_processes_that_add_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["composer.evidence._preload"])
    processes = [context.Process(target=add_many, args=(tmp_path, name)) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()

    assert len(list(Ledger(tmp_path).lines("run"))) == 40


@settings(deadline=None)  # it waits for the disk
@given(st.lists(st.sets(st.integers(0, 9)), min_size=1, max_size=4))
def test_merging_gives_the_union_in_any_order(tmp_path_factory: pytest.TempPathFactory, shards: list[set[int]]) -> None:
    root = tmp_path_factory.mktemp("shards")
    for i, values in enumerate(shards):
        ledger = Ledger(root / str(i))
        ledger.path.parent.mkdir()
        ledger.path.touch()
        for value in values:
            ledger.add("run", {"value": value})
    folders = [root / str(i) for i in range(len(shards))]
    one, two = Ledger(root / "one"), Ledger(root / "two")

    added = merge(one, folders)
    merge(two, folders[::-1])
    assert added == len(set().union(*shards))
    assert {line["value"] for line in one.lines("run")} == {line["value"] for line in two.lines("run")}
    assert merge(one, folders) == 0


def test_problems_are_named(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with pytest.raises(LedgerError, match="It has none"):
        ledger.entry("abc")
    first = ledger.add("entry", {"about": "x"})
    assert ledger.entry(first[:6])["about"] == "x"
    with pytest.raises(LedgerError, match="got ''"):
        ledger.entry("")
    with pytest.raises(LedgerError, match=r"without ledger\.jsonl"):
        merge(ledger, [tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="`kind` must be"):
        ledger.add("note", {})
    with pytest.raises(ValueError, match="JSON"):
        ledger.add("run", {"score": float("nan")})


def test_a_line_is_json_with_its_hash(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    name = ledger.add("run", {"score": 1})

    assert json.loads(ledger.path.read_text()) == {"kind": "run", "score": 1, "id": name}


def test_runs_of_one_place_share_its_line(tmp_path: Path) -> None:
    ledger, place = Ledger(tmp_path / "a"), {"hardware": "a CPU", "versions": {"torch": "2"}}
    for seed in range(3):
        ledger.add("run", {"seed": seed, "environment": place})
    other = Ledger(tmp_path / "b")

    assert merge(other, [tmp_path / "a"]) == 4
    assert [line["environment"] for line in Ledger(tmp_path / "b").lines("run")] == [place] * 3
    assert merge(other, [tmp_path / "a"]) == 0
