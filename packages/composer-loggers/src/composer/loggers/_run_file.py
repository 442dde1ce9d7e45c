"""The file of a recorded run: one JSON object per line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from composer.loggers import format_log_data_value
from composer.loggers._sender import Logged

__all__ = ["RunFile", "plain"]

_LONGEST_TEXT = 4000
_SECRET = re.compile(
    r"(^|[^a-z])(api_?key|secrets?|secret_?key|password|passwd|passphrase|credentials?|private_?key"
    r"|(access|auth|api|bearer|hf|hub|wandb)_?token)$",
    re.IGNORECASE,
)
_USER_IN_URI = re.compile(r"(?<=://)[^/@\s]+@")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class RunFile:
    """Appends records to a file. All but the constructor runs in the thread that writes.

    Args:
        path: The file. If it exists, it is continued; a line that a killed process left unfinished is ended.
        started: Seconds since 1970 from which the seconds of metrics count.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path, started: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._started = started
        self._epoch = 0
        if self._file.tell() and not _ends_with_newline(path):
            self._file.write(b"\n")

    def write(self, record: dict[str, Any]) -> None:
        """Write a record."""
        if record["type"] == "epoch":
            self._epoch = record["epoch"]
        self._write([record])

    def write_metrics(self, records: Sequence[Logged]) -> None:
        """Write metrics; what was logged in the same step, in one line."""
        lines: list[dict[str, Any]] = []
        for metrics, step, seconds in records:
            line = lines[-1] if lines else None
            if line is None or line["step"] != step or not line["values"].keys().isdisjoint(metrics):
                line = {"type": "metrics", "step": step, "epoch": self._epoch}
                line |= {"seconds": round(seconds - self._started, 3), "values": {}}
                lines.append(line)
            for key, value in metrics.items():
                line["values"][str(key)] = _number(value)
        for line in lines:
            values = line["values"]
            texts = {key: values.pop(key)[0] for key in [key for key in values if type(values[key]) is tuple]}
            if texts:
                line["texts"] = texts
        self._write(lines)

    def _write(self, records: Sequence[dict[str, Any]]) -> None:
        text = "".join(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n" for record in records)
        self._file.write(text.encode("ascii"))
        self._file.flush()  # to the system, so that it survives the process

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def plain(value: Any, key: str = "") -> Any:
    """A value that JSON can hold: numbers, text, None, lists and dictionaries; of anything else its text.

    Args:
        value: What was logged.
        key: Its name. What is named like a secret is hidden, and so are names and passwords in URIs.
    """
    if _SECRET.search(key):
        return "(hidden)"
    if isinstance(value, np.generic | np.ndarray | torch.Tensor) and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    text = value if isinstance(value, str) else format_log_data_value(value)
    return _short(_USER_IN_URI.sub("", _ADDRESS.sub("", text)))


def _number(value: Any) -> Any:
    """A metric as JSON; what is no number as a tuple with its text."""
    kind = type(value)
    if kind is float:
        return _float(value)
    if kind is int or kind is bool:
        return int(value)
    if isinstance(value, np.ndarray | torch.Tensor) and math.prod(value.shape) == 1:
        return _number(value.item())
    if isinstance(value, float):
        return _float(float(value))
    if isinstance(value, int):
        return int(value)
    return (_short(value if isinstance(value, str) else format_log_data_value(value)),)


def _float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} ... ({len(text)} characters)"


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
