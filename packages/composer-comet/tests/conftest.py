"""A run, and what is in the zip file of an offline experiment."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

os.environ["COMET_DISABLE_AUTO_LOGGING"] = "1"  # else the client patches torch when it is imported

from composer.loggers.cometml_logger import CometMLLogger
from composer.testing import LoggedRun


class Stored:
    """The content of an experiment's zip file."""

    def __init__(self, file: Path) -> None:
        self._archive = zipfile.ZipFile(file)
        messages = [json.loads(line) for line in self._archive.read("messages.json").splitlines()]
        self._messages = [(message["type"], message["payload"]) for message in messages]
        self.about = json.loads(self._archive.read("experiment.json"))
        self.others = {p["key"]: p["value"] for kind, p in self._messages if kind == "log_other"}
        params = [p.get("param") or p["params"] for kind, p in self._messages if kind == "parameter_msg"]
        self.parameters = {p["paramName"]: p["paramValue"] for p in params if p["source"] == "manual"}
        self._files = [p for kind, p in self._messages if kind == "file_upload"]

    def curve(self, key: str) -> list[tuple[int, Any]]:
        metrics = [p["metric"] for kind, p in self._messages if kind == "metric_msg"]
        return [(m["step"], m["metricValue"]) for m in metrics if m["metricName"] == key]

    @property
    def images(self) -> dict[str, np.ndarray]:
        pictures = [p for p in self._files if p["upload_type"] == "visualization"]
        return {p["additional_params"]["figName"]: self._pixels(p["file_path"]) for p in pictures}

    @property
    def image_metadata(self) -> dict[str, Any]:
        return {p["additional_params"].get("figName"): p["metadata"] for p in self._files}

    @property
    def assets(self) -> dict[str, tuple[int, Any]]:
        named = [(p["additional_params"], p["file_path"]) for p in self._files if p["upload_type"] != "visualization"]
        return {p["fileName"]: (p["step"], json.loads(self._archive.read(path))) for p, path in named}

    def _pixels(self, path: str) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(self._archive.read(path))))


@pytest.fixture
def stored(tmp_path: Path) -> Any:
    """Reads the experiments of the test back, oldest first."""
    return lambda: [Stored(file) for file in sorted(tmp_path.glob("comet/*.zip"), key=lambda f: f.stat().st_mtime_ns)]


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
def offline(tmp_path: Path) -> Any:
    """Makes a logger that writes to a zip file."""
    quiet = {
        "offline_directory": str(tmp_path / "comet"),
        "log_env_details": False,
        "auto_output_logging": False,
        "parse_args": False,
        "display_summary_level": 0,
    }

    def make(*args: Any, exp_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> CometMLLogger:
        return CometMLLogger(*args, exp_kwargs=quiet | (exp_kwargs or {}), **{"offline": True, **kwargs})

    return make


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("COMET_API_KEY", "COMET_WORKSPACE", "COMET_PROJECT_NAME", "COMET_MODE"):
        monkeypatch.delenv(name, raising=False)
