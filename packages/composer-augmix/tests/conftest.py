"""A picture, and datasets of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Dataset


class Pictures(Dataset[Any]):
    """The same picture eight times, with a transform."""

    def __init__(self, picture: Image.Image, transform: Any = None) -> None:
        self.picture, self.transform = picture, transform

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return (self.picture if self.transform is None else self.transform(self.picture)), 0


@pytest.fixture
def picture() -> Image.Image:
    values = np.random.default_rng(0).integers(30, 220, (32, 40, 3), dtype=np.uint8)
    values[..., 0] = np.linspace(40, 200, 40)
    return Image.fromarray(values)


@pytest.fixture
def pictures(picture: Image.Image) -> Any:
    return lambda transform=None: Pictures(picture, transform)
