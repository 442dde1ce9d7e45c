"""The function, then the class. Symbols: p is the probability, i an example, k the example in its place."""

from __future__ import annotations

from typing import Any

import torch

from composer.core import TRANSFORMS_BATCH, Algorithm, Event, Placement, State
from composer.loggers import Logger

def __FUNCTION__(
    input: torch.Tensor,
    target: torch.Tensor,
    probability: float = 0.1,
    *,
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace some examples of a batch by other examples of the same batch.

    With probability p, the example i becomes the example k, drawn uniformly: `input[i] = input[k]`,
    `target[i] = target[k]`.

    Args:
        input: Shape (N, ...); not modified.
        target: Shape (N, ...); not modified.
        probability: The probability p that an example is replaced, in [0, 1].
        generator: Draws the examples; on the device of `input`. None: the device's default generator.

    Returns:
        The new input and target; shapes, dtypes and devices are unchanged.

    Raises:
        ValueError: `probability` is outside [0, 1].

    Example:
        >>> x, y = torch.zeros(4, 3), torch.arange(4)
        >>> __FUNCTION__(x, y, probability=0.0)[1]
        tensor([0, 1, 2, 3])

    Source: name the authors, the title, the arXiv id and the section.
    Differs: none.
    """
    _check_probability(probability)
    size, device = input.shape[0], input.device
    k = torch.randint(size, (size,), generator=generator, device=device)
    is_replaced = torch.rand(size, generator=generator, device=device) < probability
    indices = torch.where(is_replaced, k, torch.arange(size, device=device))
    return input[indices], target[indices]


class __CLASS__(Algorithm):
    """Trains on batches in which some examples are replaced by others.

    At BEFORE_FORWARD examples of the microbatch are replaced, inputs and targets alike.

    Microbatches: each draws its own examples, so several microbatches do not equal one batch.

    **Compilation** static: no shape changes.

    Args:
        probability: The probability that an example is replaced, in [0, 1]. 0 changes nothing.
        input_key: Where the inputs are in the batch; see `State.batch_get_item`.
        target_key: Where the targets are.

    Raises:
        ValueError: `probability` is outside [0, 1].

    Example:
        >>> __CLASS__(probability=0.5)
        __CLASS__(probability=0.5,input_key=0,target_key=1)

    Source: name the authors, the title, the arXiv id and the section.
    Differs: none.
    """

    events = frozenset({Event.BEFORE_FORWARD})
    placement = Placement(provides={TRANSFORMS_BATCH})

    def __init__(self, probability: float = 0.1, input_key: Any = 0, target_key: Any = 1) -> None:
        _check_probability(probability)
        self.probability = probability
        self.input_key, self.target_key = input_key, target_key

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace examples of the batch."""
        input, target = state.batch_get_item(self.input_key), state.batch_get_item(self.target_key)
        input, target = __FUNCTION__(input, target, self.probability)
        state.batch_set_item(self.input_key, input)
        state.batch_set_item(self.target_key, target)


def _check_probability(probability: float) -> None:
    if not 0 <= probability <= 1:
        raise ValueError(f"`probability` must be in [0, 1], got {probability!r}. Use 0 to replace no example.")
