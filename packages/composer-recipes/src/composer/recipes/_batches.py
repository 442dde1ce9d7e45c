"""Batches of images that are in memory, made on the device that trains on them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["EvalBatches", "TrainBatches"]


class TrainBatches:
    """Batches in a random order, each image shifted, and mirrored if that is allowed, at random.

    Every pass over the batches goes on with the same generator: two loaders with the same seed yield the same batches,
    epoch by epoch, whatever else draws random numbers. Nothing is read from the device. Images that do not fill a batch
    are left out of the epoch. Several ranks with the same seed share each batch: together they train on the images on
    which one would.

    Args:
        images: Shape (N, C, H, W), uint8, on the device.
        labels: Shape (N,), int64, on the device.
        batch_size: Images per batch, of all ranks together.
        mean: Per channel, shape (C,): `(image - mean) / std` is what is yielded.
        std: Per channel, shape (C,).
        shift: Images are moved by up to this many pixels in each direction; what comes in is black.
        flip: Whether to mirror every second image, left to right, at random.
        seed: Of the generator.
        rank: This process, from 0.
        world_size: Number of processes.

    Raises:
        ValueError: `batch_size` is not from `world_size` to N, or `shift` is negative or not below the size of the
            images.

    Example:
        >>> images, labels = torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.arange(5)
        >>> loader = TrainBatches(images, labels, batch_size=2, mean=torch.zeros(1), std=torch.ones(1), seed=0)
        >>> [tuple(x.shape) for x, y in loader]
        [(2, 1, 8, 8), (2, 1, 8, 8)]
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        mean: Tensor,
        std: Tensor,
        shift: int = 0,
        flip: bool = False,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        size = min(images.shape[2:])
        if not world_size <= batch_size <= len(images):
            least = "1" if world_size == 1 else f"the number of processes, {world_size},"
            most = f"the number of training images, {len(images)}"
            raise ValueError(f"`batch_size` must be from {least} to {most}, got {batch_size!r}.")
        if not 0 <= shift < size:
            raise ValueError(f"`shift` must be from 0 to below the size of the images, {size}, got {shift!r}.")
        self.batch_size, self.shift, self.flip = batch_size, shift, flip
        self._share = slice(rank, None, world_size)
        self._labels, self._num_samples, self._size = labels, len(images), images.shape[2:]
        self._padded = torch.nn.functional.pad(images, (shift,) * 4).permute(0, 2, 3, 1).contiguous()  # NHWC
        self._mean, self._std = _column(mean), _column(std)
        self._generator = torch.Generator(images.device).manual_seed(seed)

    def __len__(self) -> int:
        return self._num_samples // self.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = self._draw_order()
        for batch in range(len(self)):
            chosen = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            yield (self._cut(chosen) - self._mean) / self._std, self._labels[chosen[self._share]]

    def _draw_order(self) -> Tensor:
        return torch.randperm(self._num_samples, generator=self._generator, device=self._labels.device)

    def _cut(self, chosen: Tensor) -> Tensor:
        """This rank's images at a place of their own each, as floats; one gather, so nothing waits for the device."""
        height, width = self._size
        rows, columns = self._places(len(chosen), height), self._places(len(chosen), width)
        if self.flip:
            mirrored = self._integers(2, len(chosen)).bool()
            columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        # Drawn for all ranks alike.
        chosen, rows, columns = chosen[self._share], rows[self._share], columns[self._share]
        cut = self._padded[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        return cut.permute(0, 3, 1, 2).contiguous().float()

    def _places(self, count: int, size: int) -> Tensor:
        """For each image the `size` places, from a start of its own on: shape (count, size)."""
        starts = self._integers(2 * self.shift + 1, count)
        return starts[:, None] + torch.arange(size, device=starts.device)

    def _integers(self, below: int, count: int) -> Tensor:
        return torch.randint(below, (count,), generator=self._generator, device=self._labels.device)


class EvalBatches:
    """All images in their order, as they are; of several ranks, each has its share.

    Args:
        images: Shape (N, C, H, W), uint8, on the device.
        labels: Shape (N,), int64, on the device.
        batch_size: Images per batch, of all ranks together; the last one may be smaller.
        mean: Per channel, shape (C,): `(image - mean) / std` is what is yielded.
        std: Per channel, shape (C,).
        rank: This process, from 0.
        world_size: Number of processes.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        mean: Tensor,
        std: Tensor,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.batch_size = math.ceil(batch_size / world_size)
        share = slice(rank, None, world_size)
        self._images, self._labels = images[share], labels[share]
        self._mean, self._std = _column(mean), _column(std)

    def __len__(self) -> int:
        return math.ceil(len(self._images) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in zip(
            torch.split(self._images, self.batch_size), torch.split(self._labels, self.batch_size), strict=True
        ):
            yield (images.float() - self._mean) / self._std, labels


def _column(values: Tensor) -> Tensor:
    return values[:, None, None]
