"""The function, then the class. Symbol: e is the noise."""

from __future__ import annotations

from typing import Any

import torch

from composer.core import TRANSFORMS_BATCH, Algorithm, Event, Placement, State
from composer.loggers import Logger

__all__ = ["__CLASS__", "__SNAKE___batch"]


def __SNAKE___batch(
    input: torch.Tensor,
    strength: float = 0.1,
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Add Gaussian noise to a batch.

    With e ~ N(0, 1): `noisy = input + strength * e`.

    Args:
        input: Shape (N, ...), floating; not modified.
        strength: The standard deviation of the noise, at least 0.
        generator: Draws the noise; on the device of `input`. None: the device's default generator.

    Returns:
        The noisy input; shape, dtype and device of `input`.

    Raises:
        ValueError: `strength` is negative.
        TypeError: `input` is not floating.

    Example:
        >>> __SNAKE___batch(torch.zeros(4, 3), strength=0.0).sum()
        tensor(0.)

    Source: name the authors, the title, the arXiv id and the section.
    Differs: none.
    """
    _check_strength(strength)
    if not input.is_floating_point():
        raise TypeError(f"`input` must be floating, got {input.dtype}. Noise does not suit integers such as token ids.")
    e = torch.empty_like(input).normal_(generator=generator)
    return input + strength * e


class __CLASS__(Algorithm):
    """Trains on inputs with Gaussian noise.

    At BEFORE_FORWARD noise is added to the inputs of the microbatch.

    Microbatches: each draws its own noise, so several microbatches do not equal one batch.

    Args:
        strength: The standard deviation of the noise, at least 0. 0 changes nothing.
        input_key: Where the inputs are in the batch; see `State.batch_get_item`.

    Raises:
        ValueError: `strength` is negative.

    Example:
        >>> __CLASS__(strength=0.5)
        __CLASS__(strength=0.5,input_key=0)

    Source: name the authors, the title, the arXiv id and the section.
    Differs: none.
    """

    events = frozenset({Event.BEFORE_FORWARD})
    placement = Placement(provides={TRANSFORMS_BATCH})

    def __init__(self, strength: float = 0.1, input_key: Any = 0) -> None:
        _check_strength(strength)
        self.strength = strength
        self.input_key = input_key

    def match(self, event: Event, state: State) -> bool:
        """At each of `events`."""
        return event in self.events

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the inputs by noisy ones."""
        input = state.batch_get_item(self.input_key)
        state.batch_set_item(self.input_key, __SNAKE___batch(input, self.strength))


def _check_strength(strength: float) -> None:
    if strength < 0:
        raise ValueError(f"`strength` must not be negative, got {strength!r}. Use `strength=0` to switch it off.")
