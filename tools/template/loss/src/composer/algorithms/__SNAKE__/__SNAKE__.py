"""The function, then the class. Symbols: q are the predicted probabilities, w is the weight of the term."""

from __future__ import annotations

import torch

from composer.core import INTERPOLATES_LOSS, Algorithm, Event, Placement, State
from composer.loggers import Logger

def __FUNCTION__(loss: torch.Tensor, logits: torch.Tensor, weight: float = 0.1) -> torch.Tensor:
    """Add to a loss a penalty for confident predictions: their negative entropy.

    With q = softmax(logits): `loss + w * mean(sum(q * log(q)))`; the sum is over classes, the mean over examples.

    Args:
        loss: A mean over examples, shape ().
        logits: Shape (N, C, ...), floating.
        weight: The weight w of the penalty, at least 0.

    Returns:
        Shape (); the dtype of `loss`.

    Raises:
        ValueError: `weight` is negative.

    Example:
        >>> __FUNCTION__(torch.tensor(1.0), torch.zeros(4, 2), weight=1.0)
        tensor(0.3069)

    Source: name the authors, the title, the arXiv id and the section.
    Differs: none.
    """
    _check_weight(weight)
    log_q = logits.log_softmax(dim=1)
    penalty = (log_q.exp() * log_q).sum(dim=1).mean()
    return loss + weight * penalty.to(loss.dtype)


class __CLASS__(Algorithm):
    """Trains with a penalty for confident predictions.

    At AFTER_LOSS the penalty is added to the loss of the microbatch; see `__FUNCTION__`.
    It is a mean over examples, so microbatches equal one batch.

    **Compilation** static: no shape depends on time or data.

    Args:
        weight: The weight of the penalty, at least 0. 0 changes nothing.

    Raises:
        ValueError: `weight` is negative.
        TypeError: In training, if outputs or loss are not one tensor.

    Example:
        >>> __CLASS__(weight=0.5)
        __CLASS__(weight=0.5)

    Source: name the authors, the title, the arXiv id and the section.
    Differs: none.
    """

    events = frozenset({Event.AFTER_LOSS})
    placement = Placement(after={INTERPOLATES_LOSS})  # the penalty is added to the loss that is trained

    def __init__(self, weight: float = 0.1) -> None:
        _check_weight(weight)
        self.weight = weight

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Add the penalty to the loss."""
        if not isinstance(state.outputs, torch.Tensor) or not isinstance(state.loss, torch.Tensor):
            raise TypeError(
                f"`__CLASS__` needs the model's outputs and its loss to be one tensor each, got "
                f"{type(state.outputs).__name__} and {type(state.loss).__name__}. Let the model return its logits."
            )
        state.loss = __FUNCTION__(state.loss, state.outputs, self.weight)


def _check_weight(weight: float) -> None:
    if not weight >= 0:
        raise ValueError(f"`weight` must not be negative, got {weight!r}. Use 0 to add no penalty.")
