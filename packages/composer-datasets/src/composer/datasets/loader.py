"""A DataLoader that resumes at once, and whose random transforms do not depend on who runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from composer.datasets._batching import batch_bounds, check_batch_size
from composer.datasets._seeds import derived_seed
from composer.datasets.sampler import ShardSampler
from composer.utils.reproducibility import seed_context

__all__ = ["ResumableDataLoader"]

_PASSED = frozenset(
    {
        "num_workers",
        "pin_memory",
        "prefetch_factor",
        "persistent_workers",
        "timeout",
        "worker_init_fn",
        "multiprocessing_context",
    }
)


class ResumableDataLoader(DataLoader[Any]):
    """A `torch.utils.data.DataLoader` that can be stopped after any batch and goes on there at once.

    The order comes from (seed, epoch); each batch's random transforms from (seed, epoch, place, rank), whatever else
    draws random numbers and however many worker processes there are. So what is resumed equals what was not
    interrupted, and nothing that was trained already is loaded again. Each rank has its share, without repetitions.

    Every iteration is the next epoch; `set_epoch` names one. The Trainer does so, and saves the place in its
    checkpoints.

    Args:
        dataset: Has a length and is indexed by integers; its samples may be random, drawn from the global generators.
        batch_size: Samples per batch of this rank.
        shuffle: Whether the order is a random one, another in every epoch.
        drop_last: Whether what does not fill a batch on every rank is left out. None: only if it is shuffled.
        seed: Of all that is random; the same on all ranks.
        collate_fn: Makes a batch of a list of samples; may draw random numbers, too. None: torch's.
        rank: The share wanted. None: this process's rank.
        world_size: Number of shares. None: the number of processes; ranks that share layers need the same share.
        **kwargs: Of `DataLoader`: `num_workers`, `pin_memory`, `prefetch_factor`, `persistent_workers`, `timeout`,
            `worker_init_fn`, `multiprocessing_context`.

    Raises:
        TypeError: An argument of `DataLoader` is one that this loader decides itself, such as `sampler`.
        ValueError: `batch_size` is below 1, or above this rank's share although the last batch is to be dropped.

    Example:
        >>> loader = ResumableDataLoader(range(6), batch_size=2, seed=1)
        >>> whole = [batch.tolist() for batch in loader]
        >>> iterator = iter(ResumableDataLoader(range(6), batch_size=2, seed=1))
        >>> first = next(iterator)
        >>> other = ResumableDataLoader(range(6), batch_size=2)
        >>> other.load_state_dict({"epoch": 0, "samples": 2, "seed": 1, "num_samples": 6})
        >>> [first.tolist(), *(batch.tolist() for batch in other)] == whole
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
        **kwargs: Any,
    ) -> None:
        unknown = sorted(kwargs.keys() - _PASSED)
        if unknown:
            raise TypeError(
                f"`ResumableDataLoader` takes {', '.join(sorted(_PASSED))} of the arguments of `DataLoader`, got "
                f"{', '.join(unknown)}. Its order and its seeds are its own."
            )
        drop_last = shuffle if drop_last is None else drop_last
        self._shard = ShardSampler(
            len(dataset), shuffle=shuffle, drop_last=drop_last, seed=seed, rank=rank, world_size=world_size
        )
        check_batch_size(batch_size, self._shard)
        self._keys = _Keys()
        self._inner: DataLoader[Any] | None = None
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=self._shard,
            drop_last=drop_last,
            collate_fn=default_collate if collate_fn is None else collate_fn,
            # Of the workers' own seeds, which no batch uses: the global generator is left alone.
            generator=torch.Generator(),
            **kwargs,
        )
        self._passed = kwargs

    def __len__(self) -> int:
        return len(batch_bounds(0, self._shard.num_samples, self.batch_size or 1, self.drop_last))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a class of its own
        epoch, start = self._shard.begin()  # now, not when the first batch is asked for
        return self._iterate(epoch, start)

    def _iterate(self, epoch: int, start: int) -> Iterator[Any]:
        shard = self._shard
        share = shard.share(epoch).tolist()
        bounds = batch_bounds(start, len(share), self.batch_size or 1, self.drop_last)
        self._keys.of_epoch = [
            (derived_seed(shard.seed, epoch, begin, shard.rank), share[begin:end]) for begin, end in bounds
        ]
        for (_, end), batch in zip(bounds, self._batches(), strict=True):
            shard.position = (epoch, end)
            yield batch

    def _batches(self) -> Iterator[Any]:
        # Persistent workers are kept, unless whoever changed the data set has asked for new ones by taking `_iterator`.
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

    def set_epoch(self, epoch: int) -> None:
        """Name the epoch that the next iteration is.

        Args:
            epoch: From 0.
        """
        self._shard.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The place after the batch that was yielded last."""
        return self._shard.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a place with the next iteration.

        Args:
            state: What `state_dict` returned, on this rank of as many.

        Raises:
            ValueError: It is of a data set with another number of samples.
        """
        self._shard.load_state_dict(state)


class _Keys:
    """What an epoch's batches are made of: the seed and the indices of each."""

    def __init__(self) -> None:
        self.of_epoch: list[tuple[int, list[int]]] = []

    def __len__(self) -> int:
        return len(self.of_epoch)

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return iter(self.of_epoch)


class _Batches(Dataset[Any]):
    """The batches as a data set, so that the worker that makes one knows its seed."""

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
