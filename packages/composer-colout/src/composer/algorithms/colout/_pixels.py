"""Sizes, draws and selection of pixels, of tensors and of Pillow images. Sizes are (height, width)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from composer.algorithms.utils.augmentation_common import is_pillow_image

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["draw", "select", "size_of"]


def size_of(image: Any) -> tuple[int, int] | None:
    """The size of an image or of a batch of images; None if it is neither."""
    if is_pillow_image(image):
        return image.height, image.width
    if isinstance(image, torch.Tensor) and image.dim() >= 2:
        return image.shape[-2], image.shape[-1]
    return None


def draw(size: int, p: float, device: torch.device, generator: torch.Generator | None) -> torch.Tensor:
    """Which rows or columns to keep, in ascending order."""
    kept = max(int((1 - p) * size), 1)
    return torch.randperm(size, device=device, generator=generator)[:kept].sort().values


def select(image: Any, rows: torch.Tensor, columns: torch.Tensor) -> Any:
    """The given rows and columns of an image or of a batch of images."""
    if not isinstance(image, torch.Tensor):
        return _select_of_pillow(image, rows, columns)
    rows, columns = rows.to(image.device), columns.to(image.device)
    fewer = image.index_select(-2, rows)
    if fewer.requires_grad:  # on CUDA the gradient of `gather` is not deterministic
        return fewer.index_select(-1, columns)
    # What `index_select` does, which along the last dimension is several times as slow on a CPU.
    return fewer.gather(-1, columns.expand(*fewer.shape[:-1], -1))


def _select_of_pillow(image: Image, rows: torch.Tensor, columns: torch.Tensor) -> Image:
    from PIL import Image

    array = np.asarray(image)[rows.cpu().numpy()[:, None], columns.cpu().numpy()]
    if image.mode == "1":
        return Image.fromarray(array)
    smaller = Image.frombytes(image.mode, (len(columns), len(rows)), array.tobytes())
    palette = image.getpalette()
    if palette is not None:
        smaller.putpalette(palette)
    return smaller
