from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.loggers.run_recorder import _ActionCounter

KEY = "algorithm_traces/MixUp/Event.BEFORE_FORWARD"


def counted(batches: list[int]) -> list[dict[str, object]]:
    counter = _ActionCounter()
    for batch in batches:
        counter.add(KEY, batch)
    return counter.take()


def test_acts_in_a_row_are_one_span() -> None:
    record = {"algorithm": "MixUp", "event": "before_forward", "count": 7, "spans": [[3, 5, 4], [9, 11, 3]]}

    assert [record] == counted([3, 4, 4, 5, 9, 10, 11])


def test_what_was_taken_is_not_counted_again() -> None:
    counter = _ActionCounter()
    counter.add(KEY, 1)
    counter.take()

    assert counter.take() == []


def test_an_event_with_a_slash_is_not_split() -> None:
    counter = _ActionCounter()
    counter.add("algorithm_traces/Mine/Event.A/B", 0)

    assert counter.take()[0]["event"] == "a/b"


@pytest.mark.parametrize("stride", [1, 2, 7, 1000])
def test_many_acts_take_little_room(stride: int) -> None:
    (record,) = counted(list(range(0, 100_000 * stride, stride)))

    assert record["count"] == 100_000
    assert len(json.dumps(record)) < 4000


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=600).map(sorted))
def test_spans_hold_every_act_in_order_and_few_are_needed(batches: list[int]) -> None:
    (record,) = counted(batches)
    spans = record["spans"]

    assert isinstance(spans, list)
    assert len(spans) <= 128
    assert sum(span[2] for span in spans) == len(batches) == record["count"]
    assert (spans[0][0], spans[-1][1]) == (batches[0], batches[-1])
    assert all(before[1] < after[0] for before, after in pairwise(spans))
    assert all(any(first <= batch <= last for first, last, _ in spans) for batch in batches)
