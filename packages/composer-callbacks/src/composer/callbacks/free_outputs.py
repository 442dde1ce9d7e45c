"""Free the outputs of the model before the backward pass."""

from __future__ import annotations

import torch

from composer.core import Callback, State
from composer.loggers import Logger


class FreeOutputs(Callback):
    """Frees the outputs of the model after the loss is computed, to save memory in the backward pass.

    Autograd keeps the tensors that the backward pass needs, so this helps if the outputs are large and the loss saves
    only smaller tensors.

    **Events** FIT_START (checks), AFTER_LOSS.
    **Writes** `state.outputs`: an empty tensor.
    **When not to use it** with training metrics, which are computed from the outputs.

    Raises:
        ValueError: At FIT_START, if the model has training metrics.

    Differs: training metrics are refused at the start; they would fail in the first batch.
    """

    def fit_start(self, state: State, logger: Logger) -> None:
        if state._train_metrics:
            raise ValueError(
                f"`FreeOutputs` must not be used with training metrics, which need the outputs, but the model has "
                f"{', '.join(state._train_metrics)}. Remove one of the two."
            )

    def after_loss(self, state: State, logger: Logger) -> None:
        state.outputs = torch.empty(0)
