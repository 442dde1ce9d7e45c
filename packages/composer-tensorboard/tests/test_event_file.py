from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from composer.loggers._event_file import EventFile

Scalars = list[tuple[str, float]]


def written(folder: Path, calls: list[tuple[Scalars, int, float]]) -> list[Any]:
    """The events after the first one, as TensorBoard reads them, checksums included."""
    file = EventFile(str(folder))
    for call in calls:
        file.add_scalars(*call)
    file.close()
    return list(EventFileLoader(file.path).Load())[1:]


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_them(tmp_path: Path) -> None:
    calls = [([("loss", 0.5), ("a/b", math.nan)], 0, 1.0), ([("loss", 1e300), ("loss", -math.inf)], 300, 2.5)]
    events = written(tmp_path, calls)
    assert [(event.step, event.wall_time) for event in events] == [(0, 1.0), (300, 2.5)]
    found = [[(value.tag, value.tensor.float_val[0]) for value in event.summary.value] for event in events]
    assert found[0][0] == ("loss", 0.5)
    assert math.isnan(found[0][1][1])
    assert found[1] == [("loss", math.inf), ("loss", -math.inf)]
