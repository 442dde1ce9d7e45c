"""Makes numbers an image that can be shown."""

from __future__ import annotations

import numpy as np

__all__ = ["in_unit_range"]


def in_unit_range(image: np.ndarray) -> np.ndarray:
    """Scale an image of floats to [0, 1] if it goes beyond, as a normalized one does; NaN becomes 0.

    Args:
        image: Of any shape. Integers are from 0 to 255 and become `uint8`; booleans are returned as they are.
    """
    if np.issubdtype(image.dtype, np.integer):
        return image if image.dtype == np.uint8 else np.clip(image, 0, 255).astype(np.uint8)
    if not np.issubdtype(image.dtype, np.floating):
        return image
    finite = image[np.isfinite(image)]
    if finite.size == 0:
        return np.zeros_like(image)
    low, high = float(finite.min()), float(finite.max())
    if low < 0 or high > 1:
        width = high - low
        image = (image - low) / (width if width > 0 else 1)
    shown: np.ndarray = np.nan_to_num(image, nan=0.0, posinf=1.0, neginf=0.0)
    return shown
