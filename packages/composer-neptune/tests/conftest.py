"""A run, and what is in the folder of an offline run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from composer.testing import LoggedRun

_QUIET: dict[str, Any] = {"capture_stdout": False, "capture_stderr": False, "capture_hardware_metrics": False}
_QUIET |= {"source_files": [], "git_ref": False}  # to read git's state, Neptune starts processes that it does not end


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # warnings of Neptune's own
        item.add_marker(pytest.mark.filterwarnings("ignore:jsonschema.RefResolver is deprecated"))
        item.add_marker(pytest.mark.filterwarnings("ignore:pkg_resources is deprecated"))
        item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:neptune.*"))
        item.add_marker(pytest.mark.filterwarnings("ignore::DeprecationWarning:bravado.*"))


class Stored:
    """The operations in the folder of an offline run."""

    def __init__(self, folder: Path) -> None:
        lines = [line for file in sorted(folder.glob("data-*.log")) for line in file.read_text().splitlines()]
        self._operations = [json.loads(line)["obj"] for line in lines]

    def of(self, path: str) -> list[dict[str, Any]]:
        return [operation for operation in self._operations if "/".join(operation["path"]) == path]

    def value(self, path: str) -> Any:
        return self.of(path)[-1]["value"]

    def series(self, path: str) -> list[tuple[int, Any]]:
        return [(value["step"], value["value"]) for operation in self.of(path) for value in operation["values"]]


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    """Reads the offline runs of the test back, oldest first."""
    folders = ".neptune/offline/*"
    return lambda: [Stored(f) for f in sorted(tmp_path.glob(folders), key=lambda f: f.stat().st_ctime_ns)]


@pytest.fixture
def start() -> Any:
    """Begins a run, which is closed at the end of the test."""
    runs: list[LoggedRun] = []

    def begin(*args: Any, **kwargs: Any) -> LoggedRun:
        runs.append(LoggedRun(*args, **kwargs))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture
def make() -> Any:
    """Makes a logger of the real client, offline."""
    from composer.loggers.neptune_logger import NeptuneLogger

    return lambda **kwargs: NeptuneLogger(**{"mode": "offline", **_QUIET, **kwargs})


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("NEPTUNE_PROJECT", "NEPTUNE_API_TOKEN", "NEPTUNE_MODE"):
        monkeypatch.delenv(name, raising=False)
