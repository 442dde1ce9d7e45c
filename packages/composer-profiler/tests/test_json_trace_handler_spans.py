"""However spans begin and end, each part that is taken holds whole spans, properly nested."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from composer.core import Timestamp
from composer.profiler.json_trace_handler import _Spans

ACTS = st.tuples(st.sampled_from(["start", "end", "take", "instant"]), st.sampled_from("abc"), st.integers(-2, 3))


def named(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With a process of a name, as in a file."""
    return [{"name": "process_name", "ph": "M", "pid": 0, "tid": 0}, *events]


@given(st.lists(ACTS, max_size=40))
def test_taken_spans_are_complete_and_nested(
    check_trace: Callable[[Any], None], acts: list[tuple[str, str, int]]
) -> None:
    spans, now, parts = _Spans(), 10**18, []
    started: list[str] = []
    ended: Counter[str] = Counter()
    for act, name, microseconds in acts:
        now += 1000 * microseconds  # clocks are set back, too
        if act == "take":
            parts.append(spans.take())
        elif act == "instant":
            spans.instant(name, ["x"], Timestamp(), now)
        else:
            spans.duration(name, ["x", name], act == "start", Timestamp(), now)
            if act == "start":
                started.append(name)
            elif name in started:
                while True:  # the innermost of the name, and what is in it
                    inner = started.pop()
                    ended[inner] += 1
                    if inner == name:
                        break
    parts.append(spans.take())

    for part in parts:
        check_trace(named(part))
    check_trace(named([event for part in parts for event in part]))
    assert Counter(event["name"] for part in parts for event in part if event["ph"] == "B") == ended
    times = [(event["tid"], event["ts"]) for part in parts for event in part if event["ph"] in "BE"]
    assert len(set(times)) == len(times)
    spans.end_all(Timestamp(), now)
    rest = spans.take()
    check_trace(named(rest))
    check_trace(named([event for part in (*parts, rest) for event in part]))
    assert Counter(event["name"] for event in rest if event["ph"] == "B") == Counter(started)


def test_a_category_can_be_forgotten() -> None:
    spans = _Spans()
    for name, category in (("fit", "run"), ("last", "fit_end")):
        spans.duration(name, [category], True, Timestamp(), 5000)
    spans.drop_open("fit_end")
    spans.duration("last", ["fit_end"], False, Timestamp(), 6000)
    spans.duration("fit", ["run"], False, Timestamp(), 7000)

    assert [(event["name"], event["ph"]) for event in spans.take()] == [("fit", "B"), ("fit", "E")]


def test_threads_have_rows_of_their_own(check_trace: Callable[[Any], None]) -> None:
    spans = _Spans()

    def work() -> None:
        spans.duration("work", [], True, Timestamp(), 2000)

    spans.duration("batch", [], True, Timestamp(), 1000)
    thread = threading.Thread(target=work, name="loader")
    thread.start()
    thread.join()
    spans.duration("batch", [], False, Timestamp(epoch=1, batch=7), 3000)
    begin, end = spans.take()

    assert begin["tid"] == end["tid"]
    assert end["args"] == {"epoch": 1, "batch": 7}
    assert sorted(spans.threads.values()) == ["Training loop", "loader"]
    spans.end_all(Timestamp(), 1000)
    late = spans.take()
    assert [(event["name"], event["tid"] == begin["tid"]) for event in late] == [("work", False)] * 2
    assert late[1]["ts"] > late[0]["ts"]
