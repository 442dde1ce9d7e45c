"""Seeds for the parts of a run: an epoch's order, a batch's random choices."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["check_seed", "derived_seed", "epoch_order"]


def check_seed(seed: int) -> int:
    """The seed, if it is one.

    Raises:
        ValueError: It is negative.
    """
    if seed < 0:
        raise ValueError(f"`seed` must not be negative, got {seed!r}.")
    return seed


def derived_seed(*parts: int) -> int:
    """A seed of 32 bits from several non-negative numbers; different numbers give unrelated seeds."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])


def epoch_order(count: int, seed: int, epoch: int, device: torch.device) -> torch.Tensor:
    """The order of an epoch: a permutation that depends on the seed, the epoch and the kind of device alone.

    Args:
        count: Number of samples.
        seed: The seed of the run.
        epoch: The epoch, from 0.
        device: Where it is drawn and stays.
    """
    generator = torch.Generator(device).manual_seed(derived_seed(seed, epoch))
    return torch.randperm(count, generator=generator, device=device)
