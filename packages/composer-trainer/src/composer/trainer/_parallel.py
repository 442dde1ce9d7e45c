"""What changes when several processes train one model: the seams of the loop, here for a single process.

The loop asks these questions instead of asking `torch.distributed`, so a run on many ranks is another object with the
same methods and not another loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch

from composer.core import Algorithm

__all__ = ["SingleProcess"]

T = TypeVar("T")


class SingleProcess:
    """One process: nothing to wrap, synchronise or sum."""

    world_size = 1

    # ---- at construction ----

    def agreed(self, value: T) -> T:
        """A value of rank 0."""
        return value

    def shortest(self, length: int | None) -> int | None:
        """The length of the shortest loader of all ranks; None: no rank knows its length."""
        return length

    def equalize(self, model: torch.nn.Module) -> None:
        """Give the model the weights and buffers that it has on rank 0."""

    def adopt_metrics(self, metrics: Iterable[Any]) -> None:
        """Prepare metrics of the run for being computed over ranks."""

    def wrap(self, model: torch.nn.Module, algorithms: Iterable[Algorithm]) -> torch.nn.Module:
        """The model that the loop calls, once all surgery is done."""
        return model

    # ---- in a step ----

    def backward_context(self, last_microbatch: bool, sync: bool) -> AbstractContextManager[None] | None:
        """Around forward and backward of one microbatch, to keep gradients from being exchanged; None: nothing."""
        return None

    def total(
        self, samples: float, tokens: int, interrupted: bool = False, lap: timedelta = timedelta()
    ) -> tuple[float, int, bool, timedelta]:
        """Samples and tokens of one step, summed over ranks.

        Args:
            samples: Of this rank.
            tokens: Of this rank.
            interrupted: Whether this rank was asked to stop.
            lap: Wall-clock time of the step.

        Returns:
            The sums; whether any rank was asked to stop; the wall-clock time of rank 0.
        """
        return samples, tokens, interrupted, lap

    def mean_count(self, count: float, microbatches: int) -> float:
        """A rank's batch size, averaged over ranks, which weighs its microbatches.

        Args:
            count: The batch size of this rank.
            microbatches: How many there are on this rank.
        """
        return count

    def any_finished(self, finished: bool) -> bool:
        """Whether the loader of any rank is exhausted."""
        return finished

    def mean_losses(self, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The logged losses, averaged over ranks, on their device."""
        return losses

    # ---- between steps ----

    def equalize_buffers(self, model: torch.nn.Module) -> None:
        """Give the model the buffers that it has on rank 0."""

    def close(self) -> None:
        """Wait for the other ranks, and leave them. Safe to call twice."""
