"""Format hyperparameters as YAML and tables as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_STARS = "*" * 30


def config_block(hparams: Mapping[str, Any]) -> str:
    """Format hyperparameters as YAML between two lines of stars, to print once at the start of a run."""
    return f"{_STARS}\nConfig:\n{to_yaml(hparams)}\n{_STARS}\n"


def to_yaml(data: Any) -> str:
    """Format nested mappings and sequences as YAML with sorted keys.

    Args:
        data: Mappings and sequences of None, bools, numbers and strings; anything else is written as its `str`.

    Example:
        >>> print(to_yaml({"optimizer": {"lr": 0.1, "betas": [0.9, 0.95]}, "seed": 3}), end="")
        optimizer:
          betas:
          - 0.9
          - 0.95
          lr: 0.1
        seed: 3
    """
    import yaml  # its import takes as long as that of the rest

    return str(yaml.safe_dump(_plain(data), default_flow_style=False, width=10**9))


def _plain(value: Any) -> Any:
    """Convert to the types that YAML has; subclasses, such as NumPy's numbers, to their bases."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    return float(value) if isinstance(value, float) else str(value)


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
