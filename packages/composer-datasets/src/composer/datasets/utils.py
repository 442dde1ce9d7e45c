"""Helpers for image datasets: normalize on the device, collate Pillow images, add a transform."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from composer.utils import add_vision_dataset_transform as add_vision_dataset_transform

__all__ = ["NormalizationFn", "add_vision_dataset_transform", "pil_image_collate"]


class NormalizationFn:
    """Normalize a batch of uint8 images: `(image - mean) / std` per channel.

    Use it as `batch_transforms` of a `DataSpec`, or as `microbatch_transforms`: then images move to the device as
    uint8, a quarter of the bytes of float32. It works on any device, and caches the constants there.

    Args:
        mean: Mean per channel on the scale of the images: 0 to 255 for uint8.
        std: Standard deviation per channel on the same scale.
        ignore_background: Subtract 1 from the targets, so that class 0 becomes -1 and the loss can ignore it.
        dtype: The dtype of the result.

    Raises:
        ValueError: `mean` and `std` differ in length or are empty, or a `std` is not positive.

    Example:
        >>> normalize = NormalizationFn(mean=[100.0], std=[50.0])
        >>> images, targets = normalize((torch.full((1, 1, 1, 2), 200, dtype=torch.uint8), torch.tensor([3])))
        >>> images, targets
        (tensor([[[[2., 2.]]]]), tensor([3]))
    """

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        ignore_background: bool = False,
        *,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if len(mean) != len(std) or not mean:
            raise ValueError(f"`mean` and `std` must have one value per channel each, got {mean!r} and {std!r}.")
        if not all(value > 0 for value in std):
            raise ValueError(f"`std` must be positive, got {std!r}. Use 1 for a channel that is constant.")
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        self.ignore_background, self.dtype = ignore_background, dtype
        self._constants: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return a batch with normalized images; the input is not modified.

        Args:
            batch: Images of shape (N, C, ...) and targets.
        """
        images, targets = batch
        if self.ignore_background:
            targets = targets - 1
        return self.normalize(images), targets

    def normalize(self, images: Tensor) -> Tensor:
        """Return normalized images of shape (N, C, ...) in `dtype`, with their memory format preserved.

        Raises:
            ValueError: The number of channels does not match `mean`.
        """
        if images.shape[1] != len(self.mean):
            raise ValueError(
                f"The images must have {len(self.mean)} channels, like `mean`, got shape {tuple(images.shape)}."
            )
        if images.device not in self._constants:
            self._constants[images.device] = _filled(self.mean, images.device), _filled(self.std, images.device)
        shape = (-1, *[1] * (images.dim() - 2))
        mean, std = (each.view(shape) for each in self._constants[images.device])
        values = images.to(torch.float32, copy=True)  # a 16-bit dtype would round twice
        return values.sub_(mean).div_(std).to(self.dtype)

    def __repr__(self) -> str:
        return f"NormalizationFn(mean={self.mean}, std={self.std}, ignore_background={self.ignore_background})"


def _filled(values: Sequence[float], device: torch.device) -> Tensor:
    """Fill a tensor on the device; a copy from the host would synchronize with it."""
    return torch.stack([torch.full((), value, device=device) for value in values])


def pil_image_collate(
    batch: Sequence[tuple[Any, Any]], memory_format: torch.memory_format = torch.contiguous_format
) -> tuple[Tensor, Tensor]:
    """Collate Pillow images and their targets into uint8 images and int64 targets.

    This is cheaper than `ToTensor` for each image: the bytes are copied once, and `NormalizationFn` converts them to
    floats later.

    Args:
        batch: Pairs of an image and a target. All images must have the same size and mode. Targets are numbers, or
            images of class indices.
        memory_format: Memory format of the images.

    Returns:
        Images of shape (N, C, H, W), uint8, and targets of shape (N,) or (N, H, W), int64.

    Raises:
        ValueError: The batch is empty, or the images or targets differ in shape.

    Example:
        >>> from PIL import Image
        >>> images, targets = pil_image_collate([(Image.new("RGB", (4, 3)), 7), (Image.new("RGB", (4, 3)), 1)])
        >>> images.shape, targets
        (torch.Size([2, 3, 3, 4]), tensor([7, 1]))
    """
    if not batch:
        raise ValueError("`batch` must have at least one pair of an image and a target, got an empty one.")
    arrays = [_array(image) for image, _ in batch]
    targets = [np.asarray(target) for _, target in batch]
    for name, values in (("images", arrays), ("targets", targets)):
        shapes = sorted({array.shape for array in values})
        if len(shapes) > 1:
            raise ValueError(
                f"The {name} of a batch must have the same shape, got {shapes}. Resize or crop them to one size, and "
                f"convert them to one mode."
            )
    images = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
    return images, torch.from_numpy(np.stack(targets).astype(np.int64))


def pil_image(image: Tensor) -> Any:
    """Return a Pillow image.

    Args:
        image: Shape (C, H, W), uint8, with 1 or 3 channels.
    """
    from PIL import Image

    pixels = image.permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _array(image: Any) -> np.ndarray:
    """Return the pixels, shape (H, W, C), uint8."""
    array = np.asarray(image, dtype=np.uint8)
    return array[:, :, None] if array.ndim == 2 else array
