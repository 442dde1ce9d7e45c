"""`apply_blurpool` and the algorithm `BlurPool`. The layers are in `blurpool_layers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from composer.algorithms.blurpool.blurpool_layers import BlurConv2d, BlurMaxPool2d
from composer.algorithms.warnings import warn_no_effect
from composer.core import REPLACES_BLOCKS, REPLACES_CONVS, WRAPS_CONVS, Algorithm, Event, Placement
from composer.utils import check_flags, check_integers, module_surgery, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


def apply_blurpool(
    model: nn.Module,
    replace_convs: bool = True,
    replace_maxpools: bool = True,
    blur_first: bool = True,
    min_channels: int = 16,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> None:
    """Replace strided convolutions and max pooling in a model, in place, by layers that blur before they subsample.

    The new layers wrap the convolutions: convolutions, parameters and hooks stay the same objects, and a subclass of
    `torch.nn.Conv2d` keeps its own `forward`.

    Args:
        model: The model. A convolution that is the model itself is not replaced.
        replace_convs: Replace each `torch.nn.Conv2d` with a stride above 1 by a `BlurConv2d`.
        replace_maxpools: Replace each `torch.nn.MaxPool2d` by a `BlurMaxPool2d`, unless it returns indices.
        blur_first: True if convolutions blur their input instead of their output.
        min_channels: Convolutions with fewer input channels are not replaced. Blurring the image itself would lose
            detail.
        optimizers: The optimizer of the model, if there is one. It keeps all parameters and their state.

    Warns:
        NoEffectWarning: The model has no blurring layer afterwards.
        UserWarning: A layer that subsamples is not replaced, because its class overrides `forward`: pooling, a
            convolution with `blur_first=False`, or one whose `forward` takes more than the input. Convolutions inside
            LoRA adapters are not replaced either.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(16, 32, kernel_size=3, stride=2), nn.MaxPool2d(2))
        >>> apply_blurpool(model)
        >>> [type(layer).__name__ for layer in model]
        ['BlurConv2d', 'BlurMaxPool2d']

    Source: Zhang, "Making Convolutional Networks Shift-Invariant Again", arXiv:1904.11486, section 3.2.
    Differs: the blur of a convolution comes right before or after it, not after the nonlinearity that follows.
    """
    adapters = module_surgery.find_adapter_layers(model)
    skipped: dict[nn.Module, str] = {}

    def blurred_conv(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.Conv2d)
        if (
            max(module.stride) == 1
            or module.in_channels < min_channels
            or getattr(module, "_already_blurpooled", False)
        ):
            return None
        if module in adapters:
            skipped[module] = "an adapter reads its weight. Blur before you add adapters"
        elif not module_surgery.takes_one_input(module):
            skipped[module] = "its `forward` takes more than the input, which a layer around it would not pass on"
        elif not blur_first and module_surgery.overrides_forward(module, nn.Conv2d):
            skipped[module] = "its class overrides `forward`. Use `blur_first=True`"
        else:
            return BlurConv2d.from_conv2d(module, index, blur_first)
        return None

    def blurred_maxpool(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.MaxPool2d)
        if module.return_indices:
            return None
        if module_surgery.overrides_forward(module, nn.MaxPool2d):
            skipped[module] = "its class overrides `forward`"
            return None
        return BlurMaxPool2d.from_maxpool2d(module, index)

    policies: dict[type[nn.Module], module_surgery.ReplacementFunction] = {}
    if replace_maxpools:
        policies[nn.MaxPool2d] = blurred_maxpool
    if replace_convs:
        policies[nn.Conv2d] = blurred_conv
    module_surgery.replace_module_classes(model, policies, optimizers=optimizers)
    module_surgery.warn_about_kept_modules("apply_blurpool", model, skipped)
    if not module_surgery.count_module_instances(model, (BlurConv2d, BlurMaxPool2d)):
        warn_no_effect(
            f"`apply_blurpool` changed nothing: the model has no replaceable `MaxPool2d`, and no replaceable `Conv2d` "
            f"with a stride above 1 and at least {min_channels} input channels."
        )


class BlurPool(Algorithm):
    """Blurs feature maps where the model subsamples them.

    At INIT strided convolutions and max-pooling layers of the model are replaced; see `apply_blurpool`. The layers work
    on examples one by one, so microbatches equal one batch.

    **Events** INIT. **Reads** nothing. **Writes** modules of `state.model`.
    **Cost** one depthwise 3 by 3 convolution for each replaced layer; with `blur_first=False` the convolution is also
    computed at every position, which is 4 times the work for a stride of 2. **Compilation**
    static: no shape depends on time or data.

    **Logs** the hyperparameters `blurpool/num_blurpool_layers` and `blurpool/num_blurconv_layers`, once.

    Args:
        replace_convs: Replace strided convolutions.
        replace_maxpools: Replace max pooling.
        blur_first: True if convolutions blur their input instead of their output.
        min_channels: Convolutions with fewer input channels are not replaced.

    Raises:
        ValueError: Both `replace_convs` and `replace_maxpools` are False.

    Example:
        >>> BlurPool(min_channels=32)
        BlurPool(replace_convs=True,replace_maxpools=True,blur_first=True,min_channels=32)

    Source: Zhang, "Making Convolutional Networks Shift-Invariant Again", arXiv:1904.11486, section 3.2.
    Differs: the blur of a convolution comes right before or after it, not after the nonlinearity that follows.
    """

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_CONVS}, after={REPLACES_BLOCKS, WRAPS_CONVS})

    def __init__(
        self,
        replace_convs: bool = True,
        replace_maxpools: bool = True,
        blur_first: bool = True,
        min_channels: int = 16,
    ) -> None:
        check_flags(replace_convs=replace_convs, replace_maxpools=replace_maxpools, blur_first=blur_first)
        check_integers("Use 0 for every convolution.", min_channels=min_channels, least=0)
        if not (replace_convs or replace_maxpools):
            raise ValueError(
                "`replace_convs` or `replace_maxpools` must be True, got False for both. Leave `BlurPool` out instead."
            )
        self.replace_convs, self.replace_maxpools = replace_convs, replace_maxpools
        self.blur_first = blur_first
        self.min_channels = plain_number(min_channels)

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the parameters of replaced layers have other names in a checkpoint."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers and log their number."""
        apply_blurpool(
            state.model,
            replace_convs=self.replace_convs,
            replace_maxpools=self.replace_maxpools,
            blur_first=self.blur_first,
            min_channels=self.min_channels,
            optimizers=state.optimizers,
        )
        logger.log_hyperparameters(
            {
                "blurpool/num_blurpool_layers": module_surgery.count_module_instances(state.model, BlurMaxPool2d),
                "blurpool/num_blurconv_layers": module_surgery.count_module_instances(state.model, BlurConv2d),
            }
        )
