"""A run, and what is in the file of an offline run."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from composer.testing import LoggedRun

_BLOCK, _HEADER = 32768, 7


class Stored:
    """The content of a run's file."""

    def __init__(self, file: Path) -> None:
        self.records = list(read(file))
        self.history: list[dict[str, Any]] = []
        self.config: dict[str, Any] = {}
        self.artifacts = [record.artifact for record in self.records if record.HasField("artifact")]
        self.exit_codes = [record.exit.exit_code for record in self.records if record.HasField("exit")]
        for record in self.records:
            self.history += [items(record.history.item)] if record.HasField("history") else []
            for source in (record.run.config, record.config):
                self.config |= items(source.update)
        [self.run] = [record.run for record in self.records if record.HasField("run")][-1:]

    def curve(self, key: str) -> list[tuple[int, Any]]:
        return [(row["_step"], row[key]) for row in self.history if key in row]


def items(pairs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        *outer, last = pair.nested_key or [pair.key]
        inner = found
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(pair.value_json)
    return found


def read(file: Path) -> Iterator[Any]:
    """The records of a file: a header, then the log format of LevelDB."""
    data, position, record = file.read_bytes(), _HEADER, b""
    while position < len(data):
        left = _BLOCK - position % _BLOCK
        if left < _HEADER:
            position += left
            continue
        if position + _HEADER > len(data):
            return  # it is being written
        _, length, kind = struct.unpack("<IHB", data[position : position + _HEADER])
        if position + _HEADER + length > len(data):
            return
        record += data[position + _HEADER : position + _HEADER + length]
        position += _HEADER + length
        if kind in (1, 4):  # a whole record, or the last part of one
            parsed = Record()
            parsed.ParseFromString(record)
            yield parsed
            record = b""


def ended(file: Path) -> bool:
    return any(record.HasField("exit") for record in read(file))


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    """Reads the runs of the test back, oldest first. They have ended, but W&B's process may still be writing."""

    def find() -> list[Stored]:
        files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.parent.stat().st_ctime)
        for file in files:
            deadline = time.monotonic() + 30
            while not ended(file) and time.monotonic() < deadline:
                time.sleep(0.02)
        return [Stored(file) for file in files]

    return find


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
def offline(tmp_path: Path) -> dict[str, Any]:
    return {"project": "tests", "init_kwargs": {"mode": "offline", "dir": str(tmp_path)}}


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    for name in ("WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "cache"))
