"""Augmentation and normalization of a whole batch of images on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from composer.algorithms.utils.augmentation_common import moves_with_pixels
from composer.datasets.utils import NormalizationFn
from composer.utils import check_finite

_MODES = ("constant", "reflect")


def crop_and_flip(
    images: Tensor, top: Tensor, left: Tensor, mirrored: Tensor, padding: int, padding_mode: str, fill: float = 0
) -> Tensor:
    """Pad images, crop each at its own position to its old size, and mirror some: one gather for all.

    Args:
        images: Shape (N, C, H, W), any dtype; not modified.
        top: First row of each crop in the padded image, in [0, 2 * padding], shape (N,), int64.
        left: First column of each crop, likewise.
        mirrored: True where the crop is mirrored left to right, shape (N,), bool.
        padding: Pixels on each side; below H and W.
        padding_mode: "constant" or "reflect", as in `torchvision.transforms.functional.pad`.
        fill: Value of "constant"; 0 is black.

    Returns:
        Shape (N, C, H, W).
    """
    count, channels, height, width = images.shape
    columns = torch.arange(width, device=images.device)
    columns = torch.where(mirrored[:, None], width - 1 - columns, columns) + left[:, None]
    rows = torch.arange(height, device=images.device) + top[:, None]
    if padding_mode == "constant":
        images = torch.nn.functional.pad(images, (padding,) * 4, value=fill)
    else:  # gather from the image itself; no padded copy is needed
        rows, columns = (
            (size - 1) - ((size - 1) - (places - padding).abs()).abs()
            for places, size in ((rows, height), (columns, width))
        )
    flat = images.reshape(count, channels, -1)
    places = ((rows * images.shape[3])[:, :, None] + columns[:, None]).view(count, 1, -1)
    return flat.gather(2, places.expand(-1, channels, -1)).view(count, channels, height, width)


def cut_out(images: Tensor, top: Tensor, left: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Overwrite a square of each image, at its own position, in place.

    Args:
        images: Shape (N, C, H, W).
        top: First row of the square, shape (N,); may be outside of the image.
        left: First column of the square, likewise.
        size: Side of the square in pixels.
        value: The new value of its pixels.

    Source: DeVries, Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout",
        arXiv:1708.04552, section 3.
    """
    rows = torch.arange(images.shape[2], device=images.device) - top[:, None]
    columns = torch.arange(images.shape[3], device=images.device) - left[:, None]
    inside = ((rows >= 0) & (rows < size))[:, :, None] & ((columns >= 0) & (columns < size))[:, None]
    return images.masked_fill_(inside[:, None], value)


class ImageTransform:
    """Transform of a `DeviceLoader` that shifts, mirrors, normalizes and cuts images, each with its own random draws.

    A shift is a crop of the padded image: `padding=4` equals `RandomCrop(32, padding=4)` on images of 32 pixels.
    Squares are cut after normalization, so that they have the mean color. Targets with a value
    per pixel, of indices (N, H, W) or one per class (N, C, H, W), are shifted and mirrored with their images; class
    targets are unchanged, and other targets with positions, such as boxes (N, K, 4), are refused.

    Args:
        flip: Mirror images left to right with probability 0.5.
        padding: Shift images by up to this many pixels in each direction.
        padding_mode: Values beyond the border: "constant" (black) or "reflect", as in torchvision.
        cutout: Side in pixels of the square that is cut from each image, centered anywhere in it. 0: none.
        mean: Mean per channel on the scale of the images (0 to 255 for uint8). None: no normalization.
        std: Standard deviation per channel on the same scale.
        dtype: The dtype of the images in a batch. None: float32 with `mean`, otherwise the stored dtype.
        memory_format: Memory format of the images in a batch, such as `torch.channels_last`.
        ignore_index: Value beyond the border of targets with a class index per pixel, if `padding_mode` is "constant".
            Targets with a value per class are 0 there.

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
        check_finite("Use 0 to switch it off.", padding=padding, cutout=cutout, least=0)
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
        """Return random integers for each image: row, column and mirroring of its crop, row and column of its square.

        Args:
            shape: Shape of the images, (N, C, H, W).
            generator: Generator on the device of the images.

        Returns:
            Three tensors of shape (N,), int64, with `padding` or `flip`, then two with `cutout`.

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
        """Return `(images, targets)`, or only the images if there are no targets.

        Args:
            inputs: Images of shape (N, C, H, W).
            targets: Shape (N, ...); integer targets of shape (N, H, W) become int64.
            drawn: The result of `draw`.
        """
        if targets is not None and targets.dim() == 3 and not targets.is_floating_point():
            targets = targets.long()
        if self._moves:
            crop = (drawn[0], drawn[1], drawn[2].bool(), self.padding, self.padding_mode)
            inputs = crop_and_flip(inputs, *crop)
            if moves_with_pixels(targets, inputs, "ImageTransform"):
                assert targets is not None
                is_dense = targets.dim() > 3
                maps = targets if is_dense else targets[:, None]
                targets = crop_and_flip(maps, *crop, fill=0 if is_dense else self.ignore_index).view(targets.shape)
        inputs = inputs.contiguous(memory_format=self.memory_format)
        if self._normalize is not None:
            inputs = self._normalize.normalize(inputs)
        elif self.dtype is not None:
            inputs = inputs.to(self.dtype)
        if self.cutout:
            top, left = (center - self.cutout // 2 for center in drawn[-2:])
            inputs = cut_out(inputs, top, left, self.cutout)
        return inputs if targets is None else (inputs, targets)

    @property
    def _moves(self) -> bool:
        return self.flip or self.padding > 0
