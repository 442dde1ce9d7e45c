"""Logged values as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from composer.loggers import DeferredValue


def format_log_data_value(data: Any) -> str:
    """Format a logged value as text.

    Args:
        data: None, a string, number, tensor, or mappings and iterables of them. Anything else is `str(data)`.

    Returns:
        Floats with four decimals, strings in double quotes, tensors of one element as that element and others by
        their shape.

    Example:
        >>> format_log_data_value({"lr": 0.1, "shape": [1, 2]})
        '{ "lr": 0.1000, "shape": [1, 2], }'
    """
    if isinstance(data, DeferredValue):
        data = data.plain
    if data is None:
        return "None"
    if isinstance(data, str):
        return f'"{data}"'
    if isinstance(data, int):
        return str(data)
    if isinstance(data, float):
        return f"{data:.4f}"
    if isinstance(data, torch.Tensor):
        if data.ndim == 0 or data.shape == (1,):
            return format_log_data_value(data.item())
        return f"Tensor of shape {data.shape}"
    if isinstance(data, np.generic) or (isinstance(data, np.ndarray) and data.ndim == 0):
        return format_log_data_value(data.item())
    if isinstance(data, Mapping):
        items = "".join(f'"{key}": {format_log_data_value(value)}, ' for key, value in data.items())
        return f"{{ {items}}}"
    if isinstance(data, Iterable):
        return f"[{', '.join(format_log_data_value(value) for value in data)}]"
    return str(data)
