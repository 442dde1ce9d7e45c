from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.profiler import json_trace_merger
from composer.profiler.json_trace_merger import merge_traces

START = 1_700_000_000_000_000  # microseconds since 1970


def fact(name: str, rank: int, tid: int = 5, /, **args: Any) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": tid, "args": args}


def about(rank: int, sync: int | None = None, number: int = 0) -> list[dict[str, Any]]:
    facts = [fact("process_name", rank, name=f"Rank {rank}"), fact("global_rank", rank, value=rank)]
    return facts + ([] if sync is None else [fact("clock_sync_timestamp_us", rank, value=sync, number=number)])


def span(name: str, rank: int, begin: float, end: float, tid: int = 5) -> list[dict[str, Any]]:
    both = {"name": name, "pid": rank, "tid": tid, "cat": "", "args": {}}
    return [{**both, "ph": "B", "ts": begin}, {**both, "ph": "E", "ts": end}]


def torch_trace(rank: int, events: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"traceEvents": events, "global_rank": rank, "baseTimeNanoseconds": START * 1000, **more}


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def merged(folder: Path, *contents: Any) -> list[dict[str, Any]]:
    files = [write(folder / f"{number}.json", content) for number, content in enumerate(contents)]
    merge_traces(folder / "merged.json", *files)
    events: list[dict[str, Any]] = json.loads((folder / "merged.json").read_text())
    return events


def spans_of(events: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(e["pid"], e["name"], e["ph"], e["ts"]) for e in events if e["ph"] in "BE"]


def test_clocks_are_aligned_to_that_of_the_lowest_rank(tmp_path: Path, check_trace: Callable[[Any], None]) -> None:
    behind = START - 7_000_000
    events = merged(
        tmp_path,
        about(1, behind) + span("work", 1, behind + 10, behind + 30),
        about(0, START) + span("work", 0, START + 5, START + 25),
    )

    check_trace(events)
    assert spans_of(events) == [(0, "work", "B", 0), (1, "work", "B", 5), (0, "work", "E", 20), (1, "work", "E", 25)]


def test_cycles_are_paired_by_the_number_of_their_barrier(tmp_path: Path) -> None:
    ahead = 90_000_000
    contents = [
        about(rank, START + rank * ahead + number * 1_000_000, number)
        + span(f"cycle{number}", rank, START + rank * ahead + number * 1_000_000, START + rank * ahead + 5_000_000)
        for number in (0, 1)
        for rank in (0, 1)
    ]
    begins = {(pid, name): ts for pid, name, phase, ts in spans_of(merged(tmp_path, *contents)) if phase == "B"}

    assert begins == {(0, "cycle0"): 0, (1, "cycle0"): 0, (0, "cycle1"): 1_000_000, (1, "cycle1"): 1_000_000}


def test_merging_one_after_the_other_is_merging_at_once(tmp_path: Path, check_trace: Callable[[Any], None]) -> None:
    first = [
        about(0, START) + span("epoch", 0, START + 100, START + 200),
        about(1, START + 50) + span("epoch", 1, START + 150, START + 250),
        torch_trace(1, [{"name": "op", "ph": "X", "ts": 200.125, "dur": 5.5, "pid": 5, "tid": 5}]),
    ]
    second = [
        about(0, START + 1000, 1) + span("fit", 0, START + 10, START + 1200),
        about(1, START + 1057, 1) + span("fit", 1, START + 60, START + 1260),
        torch_trace(1, [{"name": "op", "ph": "X", "ts": 900, "dur": 5, "pid": 5, "tid": 5}]),
    ]
    at_once = merged(tmp_path, *first, *second)
    files = [write(tmp_path / f"{n}.json", content) for n, content in enumerate([*first, *second])]
    merge_traces(tmp_path / "m.json", *files[:3])
    merge_traces(tmp_path / "m.json", tmp_path / "m.json", *files[3:])
    in_turn = json.loads((tmp_path / "m.json").read_text())

    check_trace(at_once)
    check_trace(in_turn)
    timed = [[e for e in events if e["ph"] != "M"] for events in (at_once, in_turn)]
    assert timed[0] == timed[1]
    assert spans_of(at_once)[:3] == [(0, "fit", "B", 0), (1, "fit", "B", 0), (0, "epoch", "B", 90)]


def test_merged_files_of_nodes_are_shifted_together(tmp_path: Path) -> None:
    nodes = [
        [about(rank, sync) + span("work", rank, sync, sync + 9) for rank, sync in ranks]
        for ranks in ([(0, START), (1, START + 1)], [(2, START + 500), (3, START + 502)])
    ]
    contents = [merged(tmp_path, *node) for node in nodes]
    events = merged(tmp_path, *contents)

    assert sorted({(pid, ts) for pid, _, phase, ts in spans_of(events) if phase == "B"}) == [
        (rank, 0) for rank in range(4)
    ]


def test_threads_of_torch_get_rows_of_their_own(tmp_path: Path, check_trace: Callable[[Any], None]) -> None:
    def op(name: str, tid: Any, ts: float, dur: float) -> dict[str, Any]:
        return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": 1234, "tid": tid}

    events = merged(
        tmp_path,
        about(3) + span("batch", 3, START + 10, START + 20),
        torch_trace(
            3,
            [
                op("ProfilerStep#1", 5, 15, 10),
                op("MulBackward0", 6, 16, 1),
                op("lost", None, 16, 1),
                op("PyTorch Profiler (0)", "PyTorch Profiler", 16, 1),
                {"name": "Record Window End", "ph": "i", "s": "g", "pid": "", "tid": "", "ts": 99},
                {"name": "process_name", "ph": "M", "pid": 1234, "tid": 0, "args": {"name": "python"}},
                {"name": "thread_name", "ph": "M", "pid": 1234, "tid": 6, "args": {"name": "thread 6"}},
            ],
        ),
    )

    check_trace(events)
    facts = {(e["name"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert {e["pid"] for e in events} == {3}
    assert {e["name"] for e in events if e["ph"] == "X"} == {"ProfilerStep#1", "MulBackward0"}
    assert len({e["tid"] for e in events if e["ph"] in "XB"}) == 3
    backward = next(e["tid"] for e in events if e["name"] == "MulBackward0")
    other = next(e["tid"] for e in events if e["name"] == "ProfilerStep#1")
    assert facts[("thread_sort_index", backward)] == {"sort_index": 1}
    assert facts[("thread_sort_index", other)] == {"sort_index": 99999}
    assert facts[("thread_name", backward)] == {"name": "thread 6"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["Rank 3"]


def test_flows_of_different_files_are_not_connected(tmp_path: Path, check_trace: Callable[[Any], None]) -> None:
    def flow(rank: int) -> dict[str, Any]:
        begin = {"name": "fwdbwd", "cat": "fwdbwd", "ph": "s", "id": 1, "pid": 9, "tid": 9, "ts": 1}
        return torch_trace(rank, [begin, {**begin, "ph": "f", "bp": "e", "ts": 2}])

    once = merged(tmp_path, flow(0), flow(1))
    events = merged(tmp_path, once, flow(0))

    check_trace(events)
    assert sorted(e["id"] for e in events if e["ph"] in "sf") == [1, 1, 2, 2, 3, 3]


def test_torch_times_keep_their_nanoseconds(tmp_path: Path) -> None:
    far = 4_447_879_370_468.446
    ops = [{"name": "op", "ph": "X", "ts": far + i / 1000, "dur": 0.001, "pid": 1, "tid": 1} for i in range(3)]
    events = merged(tmp_path, about(0) + span("work", 0, START + int(far), START + int(far) + 9), torch_trace(0, ops))

    assert [e["ts"] for e in events if e["ph"] == "X"] == [0.446, 0.447, 0.448]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no trace", "it is not JSON"),
        ('{"a": 1}', "has no 'traceEvents'"),
        ("[1, 2]", "must hold a list of events"),
        ('{"traceEvents": 3}', "must hold a list of events"),
        ('{"traceEvents": []}', "does not say which rank it is from: it has no 'global_rank'"),
        ("[]", "does not say which rank it is from: no event has a number"),
    ],
)
def test_what_is_no_trace(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        merge_traces(tmp_path / "out.json", tmp_path / "bad.json")
    assert not (tmp_path / "out.json").exists()


def test_there_must_be_something_to_merge(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one trace"):
        merge_traces(tmp_path / "out.json")


def test_the_rank_of_torchs_own_traces_is_known_too(tmp_path: Path) -> None:
    trace = {"traceEvents": span("work", 77, 1, 2), "distributedInfo": {"rank": 4}}

    assert {pid for pid, *_ in spans_of(merged(tmp_path, trace))} == {4}


def test_the_command(tmp_path: Path, check_trace: Callable[[Any], None]) -> None:
    write(tmp_path / "a.json", about(0) + span("work", 0, START, START + 1))
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        json.dump(about(1) + span("work", 1, START, START + 1), file)
    command = [sys.executable, "-W", "error", "-m", "composer.profiler.json_trace_merger", "-o", "out.json"]
    subprocess.run([*command, "a.json", "b.json.gz"], cwd=tmp_path, check=True, timeout=120)

    events = json.loads((tmp_path / "out.json").read_text())
    check_trace(events)
    assert {pid for pid, *_ in spans_of(events)} == {0, 1}


def test_the_command_answers_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        json_trace_merger.main(["-o", str(tmp_path / "out.json"), str(tmp_path / "none.json")])

    assert exit_.value.code == 2
    assert "none.json" in capsys.readouterr().err


Tree = list[Any]
TREES = st.recursive(
    st.just([]), lambda inner: st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=3), max_leaves=8
)


def walk(tree: Tree, data: st.DataObject, now: list[int], rank: int, tid: int) -> list[dict[str, Any]]:
    """Nested spans with random, also no, time between them."""
    events = []
    for name, inner in tree:
        begin, end = span(name, rank, 0, 0, tid)
        begin["ts"] = now[0] = now[0] + data.draw(st.integers(0, 3))
        events += [begin, *walk(inner, data, now, rank, tid)]
        end["ts"] = now[0] = now[0] + data.draw(st.integers(0, 3))
        events.append(end)
    return events


@settings(max_examples=25)
@given(
    st.lists(st.tuples(TREES, TREES), min_size=1, max_size=3),
    st.lists(st.integers(-1000, 1000), min_size=3, max_size=3),
    st.data(),
)
def test_nested_spans_stay_nested_and_keep_their_distances(
    tmp_path_factory: pytest.TempPathFactory,
    check_trace: Callable[[Any], None],
    ranks: list[tuple[Tree, Tree]],
    clocks: list[int],
    data: st.DataObject,
) -> None:
    contents, true_times = [], {}
    for rank, trees in enumerate(ranks):
        events = about(rank, START + clocks[rank])
        for tid, tree in enumerate(trees, start=5):
            own = walk(tree, data, [START], rank, tid)
            true_times[(rank, tid)] = [(e["ph"], e["name"], e["ts"]) for e in own]
            events += [{**e, "ts": e["ts"] + clocks[rank]} for e in own]
        contents.append(events)
    found = merged(tmp_path_factory.mktemp("merge"), *data.draw(st.permutations(contents)))

    check_trace(found)
    (origin,) = (e["args"]["unix_time_us"] for e in found if e["name"] == "trace_origin")
    for (rank, tid), expected in true_times.items():
        own = [e for e in found if (e["pid"], e["tid"]) == (rank, tid) and e["ph"] != "M"]
        assert [(e["ph"], e["name"], e["ts"] + origin - clocks[0]) for e in own] == expected
