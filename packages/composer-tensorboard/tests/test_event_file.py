from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

from composer.loggers._event_file import EventFile

Scalars = list[tuple[str, float]]


def written(folder: Path, calls: list[tuple[Scalars, int, float]]) -> list[Any]:
    """The events after the first one, as TensorBoard reads them, checksums included."""
    file = EventFile(str(folder))
    for call in calls:
        file.add_scalars(*call)
    file.close()
    return list(EventFileLoader(file.path).Load())[1:]


def as_protobuf(scalars: Scalars, step: int, seconds: float) -> bytes:
    values = [Summary.Value(tag=tag, simple_value=number) for tag, number in scalars]
    return bytes(Event(wall_time=seconds, step=step, summary=Summary(value=values)).SerializeToString())


floats = st.floats(allow_nan=False)
scalar_lists = st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"]), max_size=200), floats), max_size=5)


@given(scalar_lists, st.integers(-(2**63), 2**63 - 1), st.floats(0, 1e10))
def test_events_are_those_that_protobuf_makes(scalars: Scalars, step: int, seconds: float) -> None:
    class Kept(EventFile):
        def __init__(self) -> None:
            self._prefixes: dict[str, bytes] = {}

        def _write(self, data: bytes) -> None:
            self.data = data

    file = Kept()
    for _ in range(2):  # the second time, tags are known
        file.add_scalars(scalars, step, seconds)
        assert Event.FromString(file.data) == Event.FromString(as_protobuf(scalars, step, seconds))


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_them(tmp_path: Path) -> None:
    calls = [([("loss", 0.5), ("a/b", math.nan)], 0, 1.0), ([("loss", 1e300), ("loss", -math.inf)], 300, 2.5)]
    events = written(tmp_path, calls)
    assert [(event.step, event.wall_time) for event in events] == [(0, 1.0), (300, 2.5)]
    found = [[(value.tag, value.tensor.float_val[0]) for value in event.summary.value] for event in events]
    assert found[0][0] == ("loss", 0.5)
    assert math.isnan(found[0][1][1])
    assert found[1] == [("loss", math.inf), ("loss", -math.inf)]
