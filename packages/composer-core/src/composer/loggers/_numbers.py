"""Says which logged values are numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["as_number"]


def as_number(value: Any) -> float | None:
    """A value as a float if it is a single number, else None. An integer beyond all floats becomes infinite.

    Args:
        value: As a snapshot of `Sender` holds it: a number, a NumPy array, or anything else.
    """
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
