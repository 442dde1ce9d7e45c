"""`apply_channels_last` and the algorithm `ChannelsLast`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from composer.algorithms.warnings import warn_no_effect
from composer.core import CHANGES_LAYERS, CHANGES_MEMORY_FORMAT, REPLACES_MODEL, Algorithm, Event, Placement
from composer.utils import module_surgery

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def apply_channels_last(model: torch.nn.Module) -> None:
    """Store the weights and buffers of a model channels last, in place: NHWC with four dimensions, NDHWC with five.

    Values and shapes do not change and parameters stay the same objects, so optimizers and checkpoints are unaffected.
    Convolutions then produce channels-last feature maps for inputs of any layout, and the layers after them keep the
    layout. Tensors with another number of dimensions, such as the weights of 1-D convolutions, do not change.

    Args:
        model: The model.

    Warns:
        NoEffectWarning: The model has no tensor with four or five dimensions.
        UserWarning: The model has lazy modules, which are skipped because their shapes are not known yet; or it is on a
            CPU and has a convolution that torch cannot train in this layout, see "When not to use it" in the README.

    Example:
        >>> conv = torch.nn.Conv2d(2, 4, kernel_size=3)
        >>> apply_channels_last(conv)
        >>> conv.weight.is_contiguous(memory_format=torch.channels_last)
        True

    Source: the PyTorch tutorial "Channels Last Memory Format in PyTorch". Differs: none.
    """
    lazy = [m for m in model.modules() if isinstance(m, LazyModuleMixin) and m.has_uninitialized_params()]
    reason = "its shape is not known yet. Run the model on one batch first"
    module_surgery.warn_about_kept_modules("apply_channels_last", model, dict.fromkeys(lazy, reason))
    module_surgery.warn_about_narrow_convolutions(model, "`apply_channels_last` chooses", "leave `ChannelsLast` out")
    model._apply(_channels_last)  # type: ignore[no-untyped-call]
    tensors = (tensor for tensor in (*model.parameters(), *model.buffers()) if not is_lazy(tensor))
    if not any(tensor.dim() in _FORMATS for tensor in tensors):
        warn_no_effect(
            "`apply_channels_last` changed nothing: the model has no parameter or buffer with four or five dimensions, "
            "such as the weight of a `Conv2d` or `Conv3d`."
        )


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Convert one tensor. `Module.to` applies one format, which does not fit both 4 and 5 dimensions."""
    if is_lazy(tensor) or tensor.dim() not in _FORMATS:
        return tensor
    return tensor.to(memory_format=_FORMATS[tensor.dim()])


class ChannelsLast(Algorithm):
    """Stores the model's weights in the memory layout that is fastest for convolutions.

    At INIT, after all methods that change layers of the model, `apply_channels_last` converts the weights. The
    computation is the same, so microbatches equal one batch; rounding may differ because other kernels are used.

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

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Store the weights channels last."""
        apply_channels_last(state.model)
