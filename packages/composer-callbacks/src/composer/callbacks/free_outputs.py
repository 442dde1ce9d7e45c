"""Frees the model's outputs before the backward pass."""

from __future__ import annotations

import torch

from composer.core import Callback, State
from composer.loggers import Logger

__all__ = ["FreeOutputs"]


class FreeOutputs(Callback):
    """Lets go of the model's outputs once the loss is computed, to save memory in the backward pass.

    What the backward pass needs of them is kept by autograd all the same, so this helps where outputs are large and the
    loss keeps something smaller.

    **Events** AFTER_LOSS; FIT_START, which checks.
    **Writes** `state.outputs`: an empty tensor.
    **When not to use it** with training metrics, which are computed from the outputs.

    Raises:
        ValueError: The model has training metrics.

    Differs: training metrics are refused at once; they would fail in the first batch.
    """

    def fit_start(self, state: State, logger: Logger) -> None:
        if state._train_metrics:
            raise ValueError(
                f"`FreeOutputs` must not be used with training metrics, which need the outputs, but the model has "
                f"{', '.join(state._train_metrics)}. Leave one of the two out."
            )

    def after_loss(self, state: State, logger: Logger) -> None:
        state.outputs = torch.empty(0)
