"""The function, then the class. Symbols: g is the gradient of one output, s the strength."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from composer.core import CLIPS_GRADIENTS, Algorithm, Event, Placement, State
from composer.loggers import Logger

def __FUNCTION__(parameters: Iterable[torch.Tensor], strength: float = 1.0) -> None:
    """Subtract from the gradient of each weight its mean over the inputs, in place.

    For each output, the first dimension of a weight: `g <- g - s * mean(g)`. Vectors, such as biases, stay as they are.

    Args:
        parameters: Parameters after the backward pass. Those without a gradient are ignored.
        strength: The share s of the mean that is subtracted, in [0, 1].

    Raises:
        ValueError: `strength` is outside [0, 1].

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(1, 2))
        >>> weight.grad = torch.tensor([[1.0, 3.0]])
        >>> __FUNCTION__([weight])
        >>> weight.grad
        tensor([[-1.,  1.]])

    Source: name the authors, the title, the arXiv id and the section.
    Differs: none.
    """
    _check_strength(strength)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.dim() > 1:
            inputs = tuple(range(1, gradient.dim()))
            gradient.sub_(gradient.mean(dim=inputs, keepdim=True), alpha=strength)


class __CLASS__(Algorithm):
    """Trains with gradients whose mean is zero.

    At AFTER_TRAIN_BATCH the gradients of all microbatches are added up and unscaled, and are changed by
    `__FUNCTION__`; so microbatches equal one batch.

    **Compilation** static: no shape depends on time or data.

    Args:
        strength: The share of the mean that is subtracted, in [0, 1]. 0 changes nothing.

    Raises:
        ValueError: `strength` is outside [0, 1].

    Example:
        >>> __CLASS__(strength=0.5)
        __CLASS__(strength=0.5)

    Source: name the authors, the title, the arXiv id and the section.
    Differs: none.
    """

    events = frozenset({Event.AFTER_TRAIN_BATCH})
    placement = Placement(before={CLIPS_GRADIENTS})  # the clipped gradients are those of the step

    def __init__(self, strength: float = 1.0) -> None:
        _check_strength(strength)
        self.strength = strength

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the gradients."""
        __FUNCTION__(state.model.parameters(), self.strength)


def _check_strength(strength: float) -> None:
    if not 0 <= strength <= 1:
        raise ValueError(f"`strength` must be in [0, 1], got {strength!r}. Use 0 to leave gradients as they are.")
