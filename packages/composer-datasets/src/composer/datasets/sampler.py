"""Each rank's share of a dataset, in an order that depends only on the seed and the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data.distributed import DistributedSampler

from composer.utils import check_finite, dist, plain_int

_HOST = torch.device("cpu")


def derived_seed(*parts: int) -> int:
    """Return a 32-bit seed derived from non-negative integers; different integers give unrelated seeds."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


class ShardSampler(DistributedSampler[Any]):
    """Sampler of this rank's share: every sample goes to exactly one rank, and none is repeated.

    Rank r takes the samples r, r + world_size, ... of the epoch's order. So the k-th batches of all ranks together are
    the k-th part of the order, whatever the number of ranks.

    Every iteration is a new epoch: the first is epoch 0 or the one set by `set_epoch`, and each further one is the
    next. Loaders that iterate in batches use `begin`, `batch_bounds` and `position`.

    Args:
        num_samples: Samples of the whole dataset.
        shuffle: Use a random order; otherwise 0, 1, 2, ...
        drop_last: Give all ranks the same number of samples by dropping up to world_size - 1 samples. Otherwise shares
            differ by at most one sample.
        seed: Seed of the order; the same on all ranks.
        rank: Index of the share. None: this process's rank.
        world_size: Number of shares. None: the number of processes.

    Raises:
        ValueError: `num_samples` is not positive, `rank` is not below `world_size`, or `seed` is negative.

    Example:
        >>> [list(ShardSampler(5, shuffle=False, rank=rank, world_size=2)) for rank in (0, 1)]
        [[0, 2, 4], [1, 3]]

    Differs: torch's `DistributedSampler` repeats samples until all shares are equal, so an evaluation counts them
    twice, and has the same order in every epoch unless `set_epoch` is called.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if num_samples < 1:
            raise ValueError(f"A dataset must have at least one sample, got {num_samples!r}.")
        check_finite(seed=seed, least=0)
        super().__init__(
            range(num_samples),  # type: ignore[arg-type]  # only its length is used
            num_replicas=dist.get_world_size() if world_size is None else world_size,
            rank=dist.get_global_rank() if rank is None else rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )
        self.whole = num_samples
        self.total_size = num_samples // self.num_replicas * self.num_replicas if drop_last else num_samples
        self.num_samples = len(range(self.rank, self.total_size, self.num_replicas))
        self.position = (0, 0)  # epoch, samples of this rank's share that were yielded
        self._next_epoch: int | None = 0  # None: the one after `self.epoch`
        self._loaded: tuple[int, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. A loaded position within this epoch is preserved.

        Args:
            epoch: Zero-based index.
        """
        if self._loaded is not None and self._loaded[0] == epoch:
            return
        super().set_epoch(epoch)
        self._loaded, self._next_epoch = None, epoch

    def begin(self) -> tuple[int, int]:
        """Begin an iteration.

        Returns:
            Its epoch, and the number of samples of this rank's share to skip.
        """
        if self._loaded is not None:
            epoch, start = self._loaded
        else:
            epoch, start = self.epoch + 1 if self._next_epoch is None else self._next_epoch, 0
        self.epoch, self._loaded, self._next_epoch = epoch, None, None
        self.position = (epoch, start)
        return epoch, start

    def share(self, epoch: int, device: torch.device = _HOST) -> torch.Tensor:
        """Return this rank's indices in an epoch, shape (num_samples,), int64.

        Args:
            epoch: Zero-based index.
            device: Device that draws and holds them; different device types draw different orders.
        """
        if self.shuffle:
            generator = torch.Generator(device).manual_seed(derived_seed(self.seed, epoch))
            order = torch.randperm(self.whole, generator=generator, device=device)
        else:
            order = torch.arange(self.whole, device=device)
        return order[self.rank : self.total_size : self.num_replicas].contiguous()

    def batch_bounds(self, start: int, batch_size: int | Callable[[int], int]) -> list[tuple[int, int]]:
        """Return begin and end of the batches of this rank's share.

        Args:
            start: Number of samples to skip.
            batch_size: Samples per batch of this rank, or a function that returns them by the samples before the batch.

        Raises:
            ValueError: The function returned anything but an integer of at least 1.

        Example:
            >>> ShardSampler(7, rank=0, world_size=1).batch_bounds(2, batch_size=2)
            [(2, 4), (4, 6), (6, 7)]
        """
        bounds, begin = [], start
        while begin < self.num_samples:
            size = batch_size(begin) if callable(batch_size) else batch_size
            number = plain_int(size)
            if number is None or number < 1:
                raise ValueError(f"`batch_sizes` must return integers of at least 1, got {size!r} for {begin} samples.")
            end = begin + number
            if end > self.num_samples and self.drop_last:
                break
            bounds.append((begin, min(end, self.num_samples)))
            begin = end
        return bounds

    def check_batch_size(self, batch_size: int) -> None:
        """Raise an error for a batch size that would give no batch.

        Raises:
            ValueError: It is below 1, or above this rank's share while `drop_last` is set.
        """
        check_finite(batch_size=batch_size, least=1)
        if self.drop_last and batch_size > self.num_samples:
            raise ValueError(
                f"`batch_size` must be at most {self.num_samples}, the samples of each rank ({self.whole} over "
                f"{self.num_replicas}), got {batch_size}: every batch would be dropped. Use a smaller one, or "
                f"`drop_last=False`."
            )

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.begin()
        return iter(self.share(epoch)[start:].tolist())

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch that was yielded."""
        epoch, samples = self.position
        return {"epoch": epoch, "samples": samples, "seed": self.seed, "num_samples": self.whole}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position in the next iteration, with the seed it was saved with.

        Args:
            state: The result of `state_dict`.

        Raises:
            ValueError: It was saved for a dataset with another number of samples.
        """
        if state["num_samples"] != self.whole:
            raise ValueError(
                f"The loader's state was saved for {state['num_samples']} samples, but this dataset has {self.whole}, "
                f"so its position is not valid here. Load it into a loader over the same data."
            )
        self.seed = state["seed"]
        self.position = self._loaded = (state["epoch"], min(state["samples"], self.num_samples))
        self.epoch, self._next_epoch = state["epoch"], None


class ShardLoader:
    """Base of the loaders that iterate over this rank's share in batches, and resume after any of them.

    Attributes:
        sampler: The `ShardSampler`.
        batch_size: Samples per batch of this rank.
        batch_sizes: Returns the size of a batch by the samples of this rank's share before it in the epoch, for batches
            whose size is not `batch_size`, as with `BatchSizeWarmup`. None: all have `batch_size`.
    """

    sampler: ShardSampler
    batch_size: int
    batch_sizes: Callable[[int], int] | None = None

    def __len__(self) -> int:
        """Return the number of batches in an epoch, or in the next one if they are of different sizes."""
        return len(self._bounds(0))

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.sampler.begin()  # now, not when the first batch is requested
        return self._iterate(epoch, start)

    def _bounds(self, start: int) -> list[tuple[int, int]]:
        return self.sampler.batch_bounds(start, self.batch_sizes or self.batch_size)

    def _iterate(self, epoch: int, start: int) -> Iterator[Any]:
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, a zero-based index."""
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch that was yielded."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a position in the next iteration.

        Args:
            state: The result of `state_dict` on the same rank of the same number of ranks.

        Raises:
            ValueError: It was saved for a dataset with another number of samples.
        """
        self.sampler.load_state_dict(state)
