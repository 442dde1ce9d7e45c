"""Format hyperparameters as YAML and tables as JSON."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_STARS = "*" * 30
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./+-]*(?: [A-Za-z0-9_./+-]+)*")
_RESERVED = frozenset("true false null yes no on off y n".split())


def config_block(hparams: Mapping[str, Any]) -> str:
    """Format hyperparameters as YAML between two lines of stars, to print once at the start of a run."""
    return f"{_STARS}\nConfig:\n{to_yaml(hparams)}\n{_STARS}\n"


def to_yaml(data: Any) -> str:
    """Format nested mappings and sequences as YAML with sorted keys.

    Args:
        data: Mappings and sequences of None, bools, numbers and strings; anything else is written as its `str`. YAML
            limits keys to 1024 characters; one beyond ASCII counts as up to ten.

    Example:
        >>> print(to_yaml({"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "seed": 3}), end="")
        optimizer:
          betas:
          - 0.9
          - 0.95
          lr: 0.1
        seed: 3
    """
    if isinstance(data, Mapping) and data:
        return "".join(_entry(f"{_scalar(key)}:", data[key]) for key in sorted(data, key=str))
    if isinstance(data, (list, tuple)) and data:
        return "".join(_entry("-", value) for value in data)
    return f"{_scalar(data)}\n"


def _entry(start: str, value: Any) -> str:
    text = to_yaml(value)
    if not isinstance(value, (Mapping, list, tuple)) or not value:
        return f"{start} {text}"
    if start == "-" or isinstance(value, Mapping):
        text = "".join(f"  {line}" for line in text.splitlines(keepends=True))
    return f"- {text[2:]}" if start == "-" else f"{start}\n{text}"


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (Mapping, list, tuple)):  # empty ones; others are not scalars
        return "{}" if isinstance(value, Mapping) else "[]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return _float(float(value))
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    return f'"{"".join(map(_escaped, text))}"'


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\U{code:08x}" if code == 0x7F or code > 0xFFFF else json.dumps(character)[1:-1]


def _float(value: float) -> str:
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    text = repr(value)
    # YAML 1.1 reads `1e-05` as a string.
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def table_json(columns: list[str], rows: list[list[Any]]) -> str:
    """Format a table as JSON: `{"columns": [...], "data": [[...], ...]}`, which pandas reads with `orient="split"`.

    Args:
        columns: The names of the columns.
        rows: One list per row, as long as `columns`. NaN becomes null; other types are written as their `str`.

    Raises:
        ValueError: A row has another length than `columns`.

    Example:
        >>> table_json(["prompt", "length"], [["a", 1]])
        '{"columns":["prompt","length"],"data":[["a",1]]}'
    """
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"`rows` must each have {len(columns)} values, one per column, got {row!r}.")
    table = {"columns": list(columns), "data": [[_jsonable(cell) for cell in row] for row in rows]}
    return json.dumps(table, separators=(",", ":"))


def _jsonable(value: Any) -> Any:
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
