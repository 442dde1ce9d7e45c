"""Ways to bring a loader's iterator to a place inside an epoch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from tqdm import tqdm

from composer.loggers.terminal import bar_file, open_stream
from composer.utils import dist

__all__ = [
    "advance_sampler",
    "batch_size_of",
    "by_samples",
    "can_advance_sampler",
    "draw",
    "has_state",
    "left_in_sampler",
    "progress",
]

_log = logging.getLogger(__name__)

_PATIENCE_SECONDS = 2.0  # what takes no longer is not worth a progress bar


def has_state(loader: Any) -> bool:
    """Whether a loader keeps its own position."""
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def batch_size_of(loader: Any) -> int | None:
    """Samples in each of a loader's batches; None if they are not told, or not alike."""
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) if sampler is None else getattr(sampler, "batch_size", None)
    return size if isinstance(size, int) and size > 0 else None


def left_in_sampler(loader: Any, samples: int) -> int | None:
    """Batches that are left after a number of samples; None if only the loader's end will tell."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, BatchSampler):
        return None
    try:
        left = max(len(sampler.sampler) - samples, 0)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    return left // sampler.batch_size if sampler.drop_last else -(-left // sampler.batch_size)


def can_advance_sampler(loader: Any) -> bool:
    """Whether `advance_sampler` works: torch's own loader, in this process, over a data set with indices."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.num_workers == 0
        and not isinstance(loader.dataset, IterableDataset)
    )


def by_samples(loader: Any) -> bool:
    """Whether `advance_sampler` can stop inside a batch."""
    return type(getattr(loader, "batch_sampler", None)) is BatchSampler


def advance_sampler(loader: DataLoader[Any], batches: int, samples: int | None) -> Iterator[Any]:
    """An iterator over the rest of an epoch; what comes before is sampled, but neither loaded nor transformed.

    Random numbers are drawn in the order in which a plain iteration draws them.

    Args:
        loader: One for which `can_advance_sampler` holds.
        batches: What to skip.
        samples: What to skip, where a `BatchSampler` makes the batches; None: go by `batches`.
    """
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if samples is not None and by_samples(loader):
        skipped, number = iter(sampler.sampler), samples
        indices = iter(BatchSampler(skipped, sampler.batch_size, sampler.drop_last))
    else:
        skipped = indices = iter(sampler)
        number = batches
    # First: it draws the seed of the workers that it does not have.
    iterator: Iterator[Any] = iter(_with_indices(loader, indices))
    for _ in itertools.islice(skipped, number):
        pass
    return iterator


def _with_indices(loader: DataLoader[Any], indices: Iterator[Any]) -> DataLoader[Any]:
    """The same loader over other indices."""
    chosen: dict[str, Any] = {"batch_sampler": indices}
    if loader.batch_sampler is None:
        chosen = {"sampler": indices, "batch_size": None}
    if getattr(loader, "pin_memory_device", ""):
        chosen["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(
        loader.dataset,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
        **chosen,
    )


def draw(
    loader: Any, batches: int, samples: float | None = None, count: Callable[[Any], float] | None = None
) -> tuple[Iterator[Any], int, float]:
    """An iterator over the rest of an epoch; what comes before is loaded and thrown away, with progress shown.

    Args:
        loader: Any iterable of batches.
        batches: What to skip.
        samples: What to skip instead, where `count` tells how many a batch has: the batches may have another size now.
        count: `batch -> number of samples`.

    Returns:
        The iterator, and how many batches and samples were skipped; 0 samples if they were not counted.
    """
    if batches and dist.get_global_rank() == 0:
        _log.warning(
            "Loading %d batches once more to reach the place where the epoch goes on. A loader with `state_dict` and "
            "`load_state_dict` (such as torchdata's `StatefulDataLoader`) goes there at once; `spin_dataloaders=False` "
            "skips this too, but then starts the epoch's data from its beginning.",
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
    """The items, with a progress bar on rank 0 if they take long."""
    return tqdm(
        items,
        desc=label,
        total=total,
        delay=_PATIENCE_SECONDS,
        leave=False,
        disable=dist.get_global_rank() != 0,
        file=bar_file(open_stream("stderr")),
    )
