"""Augmentation and normalisation of a batch of images on their device, for all images at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from composer.datasets.utils import NormalizationFn

__all__ = ["ImageTransform", "crop_and_flip", "cut_out"]

_MODES = ("constant", "edge", "reflect", "symmetric")


def crop_and_flip(
    images: Tensor, top: Tensor, left: Tensor, mirrored: Tensor, padding: int, padding_mode: str, fill: float = 0
) -> Tensor:
    """Pad images, crop each at a place of its own to its old size, and mirror it or not: one gather for all.

    Args:
        images: Shape (N, C, H, W), any dtype; not modified.
        top: First row of each crop in the padded image, from 0 to 2 `padding`, shape (N,), int64.
        left: First column, likewise.
        mirrored: Whether the crop is mirrored, left to right, shape (N,), bool.
        padding: Pixels on each side; below H and W.
        padding_mode: What is there, as in `torchvision.transforms.functional.pad`: "constant", "edge", "reflect" or
            "symmetric".
        fill: What "constant" is; 0 is black.

    Returns:
        Shape (N, C, H, W).
    """
    count, channels, height, width = images.shape
    columns = torch.arange(width, device=images.device)
    columns = torch.where(mirrored[:, None], width - 1 - columns, columns) + left[:, None]
    rows = torch.arange(height, device=images.device) + top[:, None]
    if padding_mode == "constant":
        images = torch.nn.functional.pad(images, (padding,) * 4, value=fill)
    else:  # nothing is copied: the places lead back into the image
        rows, columns = (
            _inside(places - padding, size, padding_mode) for places, size in ((rows, height), (columns, width))
        )
    flat = images.reshape(count, channels, -1)
    places = ((rows * images.shape[3])[:, :, None] + columns[:, None]).view(count, 1, -1)
    return flat.gather(2, places.expand(-1, channels, -1)).view(count, channels, height, width)


def cut_out(images: Tensor, top: Tensor, left: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Overwrite a square of each image, at a place of its own, in place.

    Args:
        images: Shape (N, C, H, W).
        top: First row of the square, shape (N,); may be outside of the image.
        left: First column, likewise.
        size: Its side in pixels.
        value: What is written.

    Source: DeVries, Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout",
        arXiv:1708.04552, section 3.
    """
    rows = torch.arange(images.shape[2], device=images.device) - top[:, None]
    columns = torch.arange(images.shape[3], device=images.device) - left[:, None]
    inside = ((rows >= 0) & (rows < size))[:, :, None] & ((columns >= 0) & (columns < size))[:, None]
    return images.masked_fill_(inside[:, None], value)


def _inside(places: Tensor, size: int, padding_mode: str) -> Tensor:
    """Where the pixel that stands for a place inside or outside of [0, size) is."""
    if padding_mode == "reflect":
        return (size - 1) - ((size - 1) - places.abs()).abs()
    if padding_mode == "symmetric":
        places = torch.where(places < 0, -1 - places, places)
        return torch.where(places >= size, 2 * size - 1 - places, places)
    return places.clamp(0, size - 1)


class ImageTransform:
    """Shift, mirror, normalise and cut images of a `DeviceLoader`, each at random on its own.

    A shift is a crop of the padded image: `padding=4` does what `RandomCrop(32, padding=4)` does to images of 32
    pixels. Squares are cut after normalisation, so that they have the mean's colour. Targets stay as they are; those
    with a class index per pixel, of shape (N, H, W), are shifted and mirrored like their images.

    Args:
        flip: Whether to mirror every second image, left to right, at random.
        padding: Images are shifted by up to this many pixels in each direction.
        padding_mode: What comes in: "constant" (black), "edge", "reflect" or "symmetric", as torchvision names them.
        cutout: Side of the square that is cut from each image, in pixels; its centre is anywhere in the image. 0: none.
        mean: Per channel, on the scale of the images, 0 to 255 for bytes: `(image - mean) / std`. None: not normalised.
        std: Per channel, likewise.
        dtype: Of the images in the batch. None: float32 if they are normalised, otherwise that of the stored ones.
        memory_format: `torch.channels_last` for convolutions that want it.
        ignore_index: What comes in at the border of targets with a class per pixel, if `padding_mode` is "constant".

    Raises:
        ValueError: `padding` or `cutout` is negative, `padding_mode` is unknown, only one of `mean` and `std` is given,
            or they differ in length.

    Example:
        >>> transform = ImageTransform(flip=True, padding=1, mean=[128.0], std=[64.0])
        >>> generator = torch.Generator().manual_seed(0)
        >>> images = torch.full((2, 1, 4, 4), 192, dtype=torch.uint8)
        >>> drawn = transform.draw(images.shape, generator)
        >>> inputs, targets = transform(images, torch.tensor([3, 1]), drawn)
        >>> inputs.shape, inputs.max()
        (torch.Size([2, 1, 4, 4]), tensor(1.))
    """

    def __init__(
        self,
        *,
        flip: bool = False,
        padding: int = 0,
        padding_mode: str = "constant",
        cutout: int = 0,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        dtype: torch.dtype | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        ignore_index: int = -100,
    ) -> None:
        for name, value in (("padding", padding), ("cutout", cutout)):
            if value < 0:
                raise ValueError(f"`{name}` must not be negative, got {value!r}. Use 0 to switch it off.")
        if padding_mode not in _MODES:
            raise ValueError(f"`padding_mode` must be one of {', '.join(_MODES)}, got {padding_mode!r}.")
        if (mean is None) != (std is None):
            raise ValueError(f"`mean` and `std` must be given together, got {mean!r} and {std!r}.")
        self.flip, self.padding, self.padding_mode, self.cutout = flip, padding, padding_mode, cutout
        self.memory_format, self.ignore_index, self.dtype = memory_format, ignore_index, dtype
        self._normalize: NormalizationFn | None = None
        if mean is not None and std is not None:
            self._normalize = NormalizationFn(mean, std, dtype=torch.float32 if dtype is None else dtype)

    def draw(self, shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Integers for each image: where its crop begins and whether it is mirrored, then where its square begins.

        Args:
            shape: Of the images, (N, C, H, W).
            generator: To draw from; its device is that of the images.

        Returns:
            Three tensors of shape (N,), int64, if images are moved, and two if squares are cut.

        Raises:
            ValueError: The images are too small for `padding`.
        """
        count, (height, width) = shape[0], shape[2:]
        if self.padding >= min(height, width):
            raise ValueError(f"`padding` must be below the size of the images, {height} x {width}, got {self.padding}.")

        def below(limit: int) -> Tensor:
            return torch.randint(limit, (count,), generator=generator, device=generator.device)

        drawn: list[Tensor] = []
        if self._moves:
            shifts = 2 * self.padding + 1
            drawn += [below(shifts), below(shifts), below(1 + self.flip)]
        if self.cutout:
            drawn += [below(height), below(width)]
        return tuple(drawn)

    def __call__(self, inputs: Tensor, targets: Tensor | None, drawn: tuple[Tensor, ...]) -> Any:
        """The batch: `(images, targets)`, or the images alone if there are no targets.

        Args:
            inputs: Images of shape (N, C, H, W).
            targets: Shape (N, ...); class indices of any integer type per pixel, of shape (N, H, W), become int64.
            drawn: What `draw` returned.
        """
        if targets is not None and targets.dim() == 3 and not targets.is_floating_point():
            targets = targets.long()
        if self._moves:
            how = (drawn[0], drawn[1], drawn[2].bool(), self.padding, self.padding_mode)
            inputs = crop_and_flip(inputs, *how)
            if targets is not None and targets.dim() == 3:
                targets = crop_and_flip(targets[:, None], *how, fill=self.ignore_index)[:, 0]
        inputs = inputs.contiguous(memory_format=self.memory_format)
        if self._normalize is not None:
            inputs = self._normalize.normalize(inputs)
        elif self.dtype is not None:
            inputs = inputs.to(self.dtype)
        if self.cutout:
            top, left = (centre - self.cutout // 2 for centre in drawn[-2:])
            inputs = cut_out(inputs, top, left, self.cutout)
        return inputs if targets is None else (inputs, targets)

    @property
    def _moves(self) -> bool:
        return self.flip or self.padding > 0
