"""What changes when several processes train one model: the seams of the loop, here for a single process.

The loop asks these questions instead of asking `torch.distributed`, so a run on many ranks is another object with the
same methods and not another loop.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from composer.utils import dist

__all__ = ["SingleProcess", "parallel_of_this_process"]


class SingleProcess:
    """One process: nothing to wrap, synchronise or sum."""

    world_size = 1

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model that the loop calls, once all surgery is done."""
        return model

    def backward_context(self, last_microbatch: bool, sync: bool) -> AbstractContextManager[None] | None:
        """Around forward and backward of one microbatch, to keep gradients from being exchanged; None: nothing."""
        return None

    def total(self, samples: float, tokens: int) -> tuple[float, int]:
        """Samples and tokens of one step, summed over ranks."""
        return samples, tokens

    def mean_count(self, count: float) -> float:
        """A rank's batch size, averaged over ranks, which weighs its microbatches."""
        return count

    def any_finished(self, finished: bool) -> bool:
        """Whether the loader of any rank is exhausted."""
        return finished

    def mean_losses(self, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The logged losses, averaged over ranks."""
        return losses

    def barrier(self) -> None:
        """Wait for the other ranks."""


def parallel_of_this_process() -> SingleProcess:
    """What this process is part of.

    Raises:
        RuntimeError: The environment describes more than one process.
    """
    world_size: Any = dist.get_world_size()
    if world_size > 1:
        raise RuntimeError(
            f"`Trainer` trains in one process, but `WORLD_SIZE` is {world_size}. Start the program without a "
            f"distributed launcher, or train in a loop of your own with `Engine` and `DistributedDataParallel`."
        )
    return SingleProcess()
