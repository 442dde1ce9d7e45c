"""The seed of a run."""

from __future__ import annotations

import operator
from typing import SupportsIndex

from composer.trainer._parallel import SingleProcess
from composer.utils import reproducibility

__all__ = ["seed_run"]


def seed_run(seed: SupportsIndex | None, deterministic_mode: bool, parallel: SingleProcess) -> int:
    """Seed the construction of a run, the same on every rank, so that surgery makes the same choices everywhere.

    Args:
        seed: As asked for; None draws one.
        deterministic_mode: Whether to use deterministic operations only.
        parallel: What other processes do.

    Returns:
        The seed of rank 0. Rank r trains with `r` more.

    Raises:
        ValueError: The seed, or that of another rank, is out of range.
    """
    if deterministic_mode:
        reproducibility.configure_deterministic_mode()
    largest = reproducibility.MAX_SEED - (parallel.world_size - 1)
    drawn = reproducibility.get_random_seed() % (largest + 1) if seed is None else seed
    chosen = parallel.agreed(operator.index(drawn))
    if not 0 <= chosen <= largest:
        raise ValueError(f"`seed` must be from 0 to {largest}, so that every rank gets one, got {chosen!r}.")
    reproducibility.seed_all(chosen)
    return chosen
