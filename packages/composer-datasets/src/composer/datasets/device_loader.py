"""Batches of a data set that lies on the training device, made there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from composer.datasets._batching import batch_bounds, check_batch_size
from composer.datasets._device import AnyDevice, as_torch
from composer.datasets._seeds import derived_seed
from composer.datasets.sampler import ShardSampler

__all__ = ["DeviceLoader", "DeviceTransform"]


class DeviceTransform(Protocol):
    """What `DeviceLoader` makes a batch with; everything happens on the device, for all samples at once."""

    def draw(self, shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Random numbers for a batch, or () if there is nothing to choose.

        Args:
            shape: Of the inputs of all ranks together, (N, ...): the numbers are drawn for all of them alike, and each
                rank gets its own.
            generator: To draw from, on the device.

        Returns:
            Tensors on the device whose first dimension is N.
        """
        ...

    def __call__(self, inputs: Tensor, targets: Tensor | None, drawn: tuple[Tensor, ...]) -> Any:
        """The batch.

        Args:
            inputs: As they are stored; new memory, which may be changed.
            targets: Theirs.
            drawn: This rank's part of what `draw` returned.
        """
        ...


class DeviceLoader:
    """A whole data set on the training device, for sets that fit in its memory.

    A batch is one `index_select` of the stored samples, and what the transform makes of it there: no worker
    processes, no copies from the host, nothing read back. The Trainer passes such batches on as they are.

    The order comes from (seed, epoch), the random choices of a batch from (seed, epoch, place), whatever else draws
    random numbers. So a run that is resumed from any batch equals one that was not interrupted, and several ranks
    together see the samples, transformed alike, that one would.

    Every iteration is the next epoch; `set_epoch` names one. The Trainer does so, and saves the place in its
    checkpoints.

    Args:
        inputs: All samples, shape (N, ...), best as stored: images as bytes. Moved to `device`.
        targets: Theirs, shape (N,) or (N, ...). None: the transform makes batches of inputs alone.
        batch_size: Samples per batch of this rank.
        transform: Makes the batch; `ImageTransform` is for images. None: `(inputs, targets)` as stored.
        device: Where the set is kept, the training device: a `Device`, a torch device, "cpu", or "gpu" for the one with
            this process's local rank. None: where the inputs are.
        shuffle: Whether the order is a random one, another in every epoch.
        drop_last: Whether what does not fill a batch on every rank is left out. None: only if it is shuffled.
        seed: Of all that is random; the same on all ranks.
        rank: The share wanted. None: this process's rank.
        world_size: Number of shares. None: the number of processes; ranks that share layers need the same share.

    Attributes:
        inputs: All samples, on the device.
        targets: Theirs.
        batch_size: Samples per batch of this rank.
        transform: What makes the batch.
        sampler: Says which samples are whose; `sampler.seed` is the seed.

    Raises:
        ValueError: There are not as many targets as inputs, `batch_size` is below 1 or above this rank's share
            although the last batch is to be dropped, `seed` is negative, or there is no such device.

    Example:
        >>> images = torch.randint(256, (10, 3, 8, 8), dtype=torch.uint8)
        >>> loader = DeviceLoader(images, torch.arange(10), batch_size=4)
        >>> [(tuple(x.shape), x.dtype, len(y)) for x, y in loader]
        [((4, 3, 8, 8), torch.uint8, 4), ((4, 3, 8, 8), torch.uint8, 4)]
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor | None,
        batch_size: int,
        *,
        transform: DeviceTransform | None = None,
        device: AnyDevice | None = None,
        shuffle: bool = True,
        drop_last: bool | None = None,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if targets is not None and len(targets) != len(inputs):
            raise ValueError(f"There must be as many `targets` as `inputs`, got {len(targets)} and {len(inputs)}.")
        self.drop_last = shuffle if drop_last is None else drop_last
        self.sampler = ShardSampler(
            len(inputs), shuffle=shuffle, drop_last=self.drop_last, seed=seed, rank=rank, world_size=world_size
        )
        check_batch_size(batch_size, self.sampler)
        where = inputs.device if device is None else as_torch(device)
        self.inputs = inputs.to(where).contiguous()
        self.targets = None if targets is None else targets.to(where).contiguous()
        self.batch_size, self.transform = batch_size, transform

    def __len__(self) -> int:
        return len(batch_bounds(0, self.sampler.num_samples, self.batch_size, self.drop_last))

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.sampler.begin()  # now, not when the first batch is asked for
        return self._iterate(epoch, start)

    def _iterate(self, epoch: int, start: int) -> Iterator[Any]:
        sampler, device = self.sampler, self.inputs.device
        share = sampler.share(epoch, device)
        # Class indices are few bytes: in the epoch's order once, a batch of them is a piece.
        targets = self.targets
        ordered = targets.index_select(0, share) if targets is not None and targets.dim() == 1 else None
        generator = torch.Generator(device)
        for begin, end in batch_bounds(start, len(share), self.batch_size, self.drop_last):
            chosen = share[begin:end]
            theirs: Tensor | None = None
            if ordered is not None:
                theirs = ordered[begin:end]
            elif targets is not None:
                theirs = targets.index_select(0, chosen)
            batch = self._make(self.inputs.index_select(0, chosen), theirs, generator, epoch, begin)
            sampler.position = (epoch, end)
            yield batch

    def _make(self, inputs: Tensor, targets: Tensor | None, generator: torch.Generator, epoch: int, begin: int) -> Any:
        if self.transform is None:
            return inputs if targets is None else (inputs, targets)
        sampler = self.sampler
        first, ranks = begin * sampler.num_replicas, sampler.num_replicas
        count = min(self.batch_size * ranks, sampler.total_size - first)  # of all ranks
        generator.manual_seed(derived_seed(sampler.seed, epoch, first))
        drawn = self.transform.draw(torch.Size((count, *inputs.shape[1:])), generator)
        if ranks > 1:
            drawn = tuple(part[sampler.rank :: ranks] for part in drawn)
        return self.transform(inputs, targets, drawn)

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that the next iteration is.

        Args:
            epoch: From 0.
        """
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The place after the batch that was yielded last."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a place with the next iteration.

        Args:
            state: What `state_dict` returned, on this rank of as many.

        Raises:
            ValueError: It is of a data set with another number of samples.
        """
        self.sampler.load_state_dict(state)
