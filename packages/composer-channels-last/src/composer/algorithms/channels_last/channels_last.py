"""The function, then the class."""

from __future__ import annotations

import torch

from composer.core import CHANGES_LAYERS, CHANGES_MEMORY_FORMAT, REPLACES_MODEL, Algorithm, Event, Placement, State
from composer.loggers import Logger

__all__ = ["ChannelsLast", "apply_channels_last"]


def apply_channels_last(model: torch.nn.Module) -> None:
    """Store the four-dimensional weights and buffers of a model channels last (NHWC), in place.

    Values, shapes and the parameters themselves stay: optimizers and checkpoints see no change. Convolutions then
    produce channels-last feature maps whatever the layout of the input, and layers that follow keep the layout.

    Args:
        model: The model.

    Raises:
        RuntimeError: The model has five-dimensional weights (3-D convolutions), for which torch has another layout.

    Example:
        >>> conv = torch.nn.Conv2d(2, 4, kernel_size=3)
        >>> apply_channels_last(conv)
        >>> conv.weight.is_contiguous(memory_format=torch.channels_last)
        True

    Source: the PyTorch tutorial "Channels Last Memory Format in PyTorch". Differs: none.
    """
    model.to(memory_format=torch.channels_last)


class ChannelsLast(Algorithm):
    """Stores the model's weights in the memory layout that is fastest for convolutions.

    At INIT, after all methods that bring layers into the model, see `apply_channels_last`. The mathematics stay the
    same, so microbatches equal one batch; rounding may differ, because kernels do.

    **Events** INIT. **Reads** nothing. **Writes** the strides of the weights of `state.model`.
    **Cost** none; memory stays the same. **Compilation** static: strides do not change after INIT.

    Example:
        >>> ChannelsLast()
        ChannelsLast()

    Source: the PyTorch tutorial "Channels Last Memory Format in PyTorch". Differs: none.
    """

    events = frozenset({Event.INIT})
    placement = Placement(
        provides={CHANGES_MEMORY_FORMAT},
        after={REPLACES_MODEL, CHANGES_LAYERS},
    )

    def __init__(self) -> None:
        super().__init__()

    def match(self, event: Event, state: State) -> bool:
        """At INIT."""
        return event in self.events

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Store the weights channels last."""
        apply_channels_last(state.model)
