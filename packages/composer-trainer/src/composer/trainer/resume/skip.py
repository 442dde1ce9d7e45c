"""Advance a loader's iterator to a position inside an epoch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from tqdm import tqdm

from composer.utils import dist
from composer.utils.terminal import bar_file, open_stream

__all__ = [
    "advance_sampler",
    "batch_size_of",
    "by_samples",
    "can_advance_sampler",
    "has_state",
    "left_in_sampler",
    "progress",
    "skip_batches",
]

_log = logging.getLogger(__name__)

_PROGRESS_DELAY_SECONDS = 2.0  # shorter waits show no progress bar


def has_state(loader: Any) -> bool:
    """Return True if a loader saves its own position, as torchdata's `StatefulDataLoader` does."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def batch_size_of(loader: Any) -> int | None:
    """Return the samples per batch of a loader; None if they are unknown or vary."""
    if getattr(loader, "batch_sizes", None) is not None:  # of a loader of `composer.datasets`
        return None
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) if sampler is None else getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def left_in_sampler(loader: Any, samples: int) -> int | None:
    """Return the batches left after a number of samples; None if they are unknown."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, BatchSampler):
        return None
    try:
        left = max(len(sampler.sampler) - samples, 0)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    return left // sampler.batch_size if sampler.drop_last else -(-left // sampler.batch_size)


def can_advance_sampler(loader: Any) -> bool:
    """Return True if `advance_sampler` works: torch's own loader, in this process, over a map-style dataset."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.num_workers == 0
        and not isinstance(loader.dataset, IterableDataset)
    )


def by_samples(loader: Any) -> bool:
    """Return True if `advance_sampler` can stop inside a batch."""
    return type(getattr(loader, "batch_sampler", None)) is BatchSampler


def advance_sampler(loader: DataLoader[Any], batches: int, samples: int | None) -> Iterator[Any]:
    """Return an iterator over the rest of an epoch; skipped samples are drawn, but neither loaded nor transformed.

    Random numbers are drawn in the same order as by a plain iteration.

    Args:
        loader: A loader for which `can_advance_sampler` is True.
        batches: The number of batches to skip.
        samples: The number of samples to skip instead, if a `BatchSampler` makes the batches; None: use `batches`.
    """
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if samples is not None and by_samples(loader):
        skipped, number = iter(sampler.sampler), samples
        indices = iter(BatchSampler(skipped, sampler.batch_size, sampler.drop_last))
    else:
        skipped = indices = iter(sampler)
        number = batches
    # Before the sampler advances: this draws the base seed for worker processes, even when there are none.
    iterator: Iterator[Any] = iter(_with_indices(loader, indices))
    for _ in itertools.islice(skipped, number):
        pass
    return iterator


def _with_indices(loader: DataLoader[Any], indices: Iterator[Any]) -> DataLoader[Any]:
    """Return a copy of the loader over other indices."""
    source: dict[str, Any] = {"batch_sampler": indices}
    if loader.batch_sampler is None:
        source = {"sampler": indices, "batch_size": None}
    if getattr(loader, "pin_memory_device", ""):
        source["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(
        loader.dataset,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
        **source,
    )


def skip_batches(
    loader: Any, batches: int, samples: float | None = None, count: Callable[[Any], float] | None = None
) -> tuple[Iterator[Any], int, float]:
    """Return an iterator over the rest of an epoch; skipped batches are loaded and dropped, with a progress bar.

    Args:
        loader: Any iterable of batches.
        batches: The number of batches to skip.
        samples: The number of samples to skip instead, if `count` is given: the batch size may have changed.
        count: `batch -> number of samples`.

    Returns:
        The iterator, and how many batches and samples were skipped; 0 samples if they were not counted.
    """
    if batches and dist.get_global_rank() == 0:
        _log.warning(
            "Loading %d batches again to reach the position where the epoch continues. A loader with `state_dict` and "
            "`load_state_dict` (such as torchdata's `StatefulDataLoader`) does not need this; `spin_dataloaders=False` "
            "avoids it, but then starts the data of the epoch from the beginning.",
            batches,
        )
    iterator: Iterator[Any] = iter(loader)
    drawn, seen = 0, 0.0
    skipped = iterator if count is not None else itertools.islice(iterator, batches)
    for batch in progress(skipped, "Skipping batches", batches):
        drawn += 1
        if count is not None:
            seen += count(batch)
            if samples is not None and seen >= samples:
                break
    return iterator, drawn, seen


def progress(items: Any, label: str, total: int) -> Any:
    """Iterate over the items, with a progress bar on rank 0 if that takes long."""
    return tqdm(
        items,
        desc=label,
        total=total,
        delay=_PROGRESS_DELAY_SECONDS,
        leave=False,
        disable=dist.get_global_rank() != 0,
        file=bar_file(open_stream("stderr")),
    )
