"""What changes when several processes train one model: the seams of the loop, here for a single process.

The loop asks these questions instead of asking `torch.distributed`, so a run on many ranks is another object with the
same methods and not another loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch

from composer.core import Algorithm, Precision, State
from composer.devices import Device

__all__ = ["SingleProcess"]

T = TypeVar("T")


class SingleProcess:
    """One process: nothing to wrap, synchronise or sum."""

    world_size = 1
    collective_forward = False  # whether all ranks must run a forward pass together

    # ---- at construction ----

    def agreed(self, value: T) -> T:
        """A value of rank 0."""
        return value

    def shortest(self, length: int | None) -> int | None:
        """The length of the shortest loader of all ranks; None: no rank knows its length."""
        return length

    def to_device(self, model: torch.nn.Module, device: Device) -> torch.nn.Module:
        """The model where it will be trained."""
        return device.module_to_device(model)

    def equalize(self, model: torch.nn.Module) -> None:
        """Give the model the weights and buffers that it has on rank 0."""

    def describe(self, state: State) -> None:
        """Tell the state how the model will be divided."""

    def divide(self, state: State) -> None:
        """Divide the model and its optimizers among ranks, after surgery and before anything is loaded."""

    def check_loader(self, dataloader: Any, argument: str) -> None:
        """Check that a loader divides its data as the ranks need it."""

    def check_precision(self, precision: Precision) -> None:
        """Check that the run can go on in another precision."""

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

    def any_finished(self, finished: bool, stopped: bool = False) -> tuple[bool, bool]:
        """Before each batch, and when a rank alone is told to stop training instead of going on to the next one.

        Args:
            finished: Whether the loader of this rank is exhausted.
            stopped: Whether this rank was told to stop.

        Returns:
            Whether the loader of any rank is exhausted, and whether any rank was told to stop.
        """
        return finished, stopped

    def mean_losses(self, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The logged losses, averaged over ranks, on their device."""
        return losses

    def free_gathered(self) -> None:
        """Forget the weights gathered for a forward pass that no backward pass follows."""

    # ---- in a step whose microbatch size is searched ----

    def prepare_lone_passes(self) -> None:
        """Exchange what passes exchange at their start; until the next step no pass without `sync` communicates."""

    def of_all_ranks(self, numbers: Sequence[float]) -> list[list[float]]:
        """Numbers of each rank, by rank; equally many on all of them."""
        return [list(numbers)]

    def average_gradients(self) -> None:
        """Average the gradients that each rank computed without exchanging them."""

    # ---- around many steps ----

    def watched(self) -> AbstractContextManager[None]:
        """Around what exchanges something with other ranks: if that fails, the error says which rank is missing."""
        return nullcontext()

    # ---- between steps ----

    def equalize_buffers(self, model: torch.nn.Module) -> None:
        """Give the model the buffers that it has on rank 0."""

    def close(self) -> None:
        """Wait for the other ranks, and leave them. Safe to call twice."""
