"""A DataLoader that resumes immediately, with random transforms that do not depend on the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from composer.datasets.device_loader import AnyDevice, DeviceTransform, draw_for_batch, to_torch_device
from composer.datasets.sampler import ShardLoader, ShardSampler, derived_seed
from composer.utils.reproducibility import seed_context


class ResumableDataLoader(ShardLoader, DataLoader[Any]):  # type: ignore[misc]  # narrower types than torch's
    """A `torch.utils.data.DataLoader` that can stop after any batch and resume there immediately.

    The order depends on (seed, epoch) and each batch's random transforms on (seed, epoch, position, rank), but not on
    other random draws or the number of workers. So a resumed run equals an uninterrupted one, and batches that were
    trained already are not loaded again. Each rank has its share, without repetitions.

    Every iteration is the next epoch, or the one set by `set_epoch`. The Trainer sets it, and saves the position in
    its checkpoints.

    Args:
        dataset: Map-style dataset; random samples must draw from the global generators.
        batch_size: Samples per batch of this rank.
        shuffle: Use a new random order in every epoch.
        drop_last: Drop samples that do not fill a batch on every rank. None: the value of `shuffle`.
        seed: Seed of the order and all random transforms; the same on all ranks.
        collate_fn: Makes a batch of a list of samples; may draw random numbers. None: torch's default.
        rank: Index of the share. None: this process's rank.
        world_size: Number of shares. None: the number of processes. Ranks of one tensor parallel group need the same
            share.
        device_transform: The transform of a `DeviceLoader`, such as `ImageTransform`, with the random numbers that it
            would get there. Batches must be an input tensor or a pair of inputs and targets. None: batches stay on the
            host, and the Trainer moves them.
        device: Device to move batches to for `device_transform`. With `pin_memory=True`, copies to a GPU overlap with
            its work.
        **kwargs: Arguments of `DataLoader` about workers and memory, such as `num_workers`.

    Attributes:
        batch_sizes: Returns the size of a batch by the samples of this rank's share before it in the epoch, for batches
            whose size is not `batch_size`, as with `BatchSizeWarmup`. None: all have `batch_size`.

    Raises:
        TypeError: `kwargs` has an unknown argument, or one that this loader sets itself, such as `sampler`.
        ValueError: `batch_size` is below 1, or above this rank's share while `drop_last` is set; or only one of
            `device_transform` and `device` is given.

    Example:
        >>> loader = ResumableDataLoader(range(6), batch_size=2, seed=1)
        >>> uninterrupted = [batch.tolist() for batch in loader]
        >>> iterator = iter(ResumableDataLoader(range(6), batch_size=2, seed=1))
        >>> first = next(iterator)
        >>> other = ResumableDataLoader(range(6), batch_size=2)
        >>> other.load_state_dict({"epoch": 0, "samples": 2, "seed": 1, "num_samples": 6})
        >>> [first.tolist(), *(batch.tolist() for batch in other)] == uninterrupted
        True
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool | None = None,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        device_transform: DeviceTransform | None = None,
        device: AnyDevice | None = None,
        **kwargs: Any,
    ) -> None:
        drop_last = shuffle if drop_last is None else drop_last
        self._shard = ShardSampler(
            len(dataset), shuffle=shuffle, drop_last=drop_last, seed=seed, rank=rank, world_size=world_size
        )
        self._shard.check_batch_size(batch_size)
        if (device is None) != (device_transform is None):
            raise ValueError(
                f"`device_transform` and `device` must be given together, got {device_transform!r} and {device!r}."
            )
        self._device = None if device is None else to_torch_device(device)
        self._device_transform = device_transform
        self._keys = _EpochKeys()
        self._inner: DataLoader[Any] | None = None
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=self._shard,
            drop_last=drop_last,
            collate_fn=default_collate if collate_fn is None else collate_fn,
            generator=torch.Generator(),  # seeds the workers without drawing from the global generator
            **kwargs,
        )
        self._passed = kwargs

    def _iterate(self, epoch: int, start: int) -> Iterator[Any]:
        shard, transform, device = self._shard, self._device_transform, self._device
        share = shard.share(epoch).tolist()
        bounds = self._bounds(start)
        self._keys.keys = [
            (derived_seed(shard.seed, epoch, begin, shard.rank), share[begin:end]) for begin, end in bounds
        ]
        for (begin, end), batch in zip(bounds, self._batches(), strict=True):
            shard.position = (epoch, end)
            if transform is None:
                yield batch
                continue
            size = self.batch_size if self.batch_sizes is None else self.batch_sizes(begin)
            inputs, targets = (batch, None) if isinstance(batch, Tensor) else batch
            inputs = inputs.to(device, non_blocking=True)
            targets = None if targets is None else targets.to(device, non_blocking=True)
            drawn = draw_for_batch(transform, shard, size, inputs.shape, torch.Generator(device), epoch, begin)
            yield transform(inputs, targets, drawn)

    def _batches(self) -> Iterator[Any]:
        # Reuse persistent workers, unless `_iterator` was reset because the dataset changed.
        if self._inner is None or self._iterator is None:
            self._inner = DataLoader(
                _Batches(self.dataset, self.collate_fn),
                sampler=self._keys,
                batch_size=None,
                collate_fn=_unchanged,
                generator=self.generator,
                **self._passed,
            )
        iterator = iter(self._inner)
        if self.persistent_workers:
            self._iterator = iterator
        return iterator


class _EpochKeys:
    """Sampler of the epoch's keys for `_Batches`. The inner loader keeps it over epochs if workers are persistent."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, list[int]]] = []

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return iter(self.keys)


class _Batches(Dataset[Any]):
    """Dataset of batches, indexed by seed and sample indices, so that the worker that makes a batch knows its seed."""

    def __init__(self, dataset: Any, collate_fn: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate_fn = dataset, collate_fn

    def __getitem__(self, key: tuple[int, list[int]]) -> Any:
        seed, indices = key
        with seed_context(seed):
            take = getattr(self._dataset, "__getitems__", None)
            samples = [self._dataset[index] for index in indices] if take is None else take(indices)
            return self._collate_fn(samples)


def _unchanged(batch: Any) -> Any:
    return batch
