"""Where an epoch's batches begin and end."""

from __future__ import annotations

from composer.datasets.sampler import ShardSampler
from composer.utils import dist

__all__ = ["batch_bounds", "check_batch_size", "per_rank"]


def batch_bounds(start: int, count: int, size: int, drop_last: bool) -> list[tuple[int, int]]:
    """Begin and end of the batches of the samples from `start` to `count`.

    Args:
        start: Samples that are left out at the beginning.
        count: Samples there are.
        size: Samples per batch.
        drop_last: Whether what does not fill a batch is left out.

    Example:
        >>> batch_bounds(2, 7, 2, drop_last=False)
        [(2, 4), (4, 6), (6, 7)]
    """
    last = count - size if drop_last else count - 1
    return [(begin, min(begin + size, count)) for begin in range(start, last + 1, size)]


def check_batch_size(batch_size: int, shard: ShardSampler) -> None:
    """Refuse a size with which there would be no batch.

    Raises:
        ValueError: It is below 1, or above this rank's share although the last batch is to be dropped.
    """
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size!r}.")
    if shard.drop_last and batch_size > shard.num_samples:
        raise ValueError(
            f"`batch_size` must be at most {shard.num_samples}, the samples of each rank ({shard.whole} over "
            f"{shard.num_replicas}), got {batch_size}: every batch would be dropped. Use a smaller one, or "
            f"`drop_last=False`."
        )


def per_rank(global_batch_size: int) -> int:
    """Samples per batch of each rank.

    Args:
        global_batch_size: Samples per batch of all ranks together.

    Raises:
        ValueError: It is not a positive multiple of the number of ranks.
    """
    world_size = dist.get_world_size()
    if global_batch_size < 1 or global_batch_size % world_size:
        raise ValueError(
            f"`global_batch_size` must be a positive multiple of the number of ranks, {world_size}, got "
            f"{global_batch_size!r}."
        )
    return global_batch_size // world_size
