"""The function that wraps convolutions, then the algorithm. The layers are in `squeeze_excite_layers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from composer.algorithms.squeeze_excite.squeeze_excite_layers import SqueezeExcite2d as SqueezeExcite2d
from composer.algorithms.squeeze_excite.squeeze_excite_layers import SqueezeExciteConv2d as SqueezeExciteConv2d
from composer.algorithms.squeeze_excite.squeeze_excite_layers import check_latent_channels
from composer.algorithms.warnings import warn_no_effect
from composer.core import REPLACES_BLOCKS, REPLACES_FEEDFORWARD, WRAPS_CONVS, Algorithm, Event, Placement
from composer.utils import check_integers, module_surgery, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

__all__ = ["SqueezeExcite", "SqueezeExcite2d", "SqueezeExciteConv2d", "apply_se", "apply_squeeze_excite"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def apply_squeeze_excite(
    model: nn.Module,
    latent_channels: float = 64,
    min_channels: int = 128,
    optimizers: Optimizers | None = None,
) -> None:
    """Add squeeze-and-excitation to the convolutions of a model, in place.

    Each `torch.nn.Conv2d` is wrapped in a `SqueezeExciteConv2d`, unless it is wrapped already or has too few channels.
    The convolution stays the same object; two small linear layers are added.

    Args:
        model: The model. A convolution that is the model itself is not wrapped.
        latent_channels: The hidden width of the new layers: below 1 a fraction of the channels, otherwise a number.
        min_channels: Convolutions with fewer input or output channels are not wrapped.
        optimizers: The optimizer of the model, to which the new parameters are added. Not needed if it is created
            afterwards.

    Raises:
        ValueError: `latent_channels` is not positive.

    Warns:
        NoEffectWarning: The model has no `SqueezeExciteConv2d` afterwards.
        UserWarning: A convolution was not wrapped because it is inside a LoRA adapter, or of a subclass whose `forward`
            takes more arguments than the input.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(16, 32, kernel_size=3), nn.Conv2d(32, 8, kernel_size=3))
        >>> apply_squeeze_excite(model, latent_channels=4, min_channels=16)
        >>> [type(layer).__name__ for layer in model]
        ['SqueezeExciteConv2d', 'Conv2d']

    Source: Hu et al., "Squeeze-and-Excitation Networks", arXiv:1709.01507, section 3.
    Differs: channels are weighted after each convolution instead of once per block, and before the normalization.
    """
    check_latent_channels(latent_channels)
    # Another method may have replaced the convolution inside a wrapper.
    wrappers = [module for module in model.modules() if isinstance(module, SqueezeExciteConv2d)]
    wrapped = {module for wrapper in wrappers for module in wrapper.modules()}
    adapters = module_surgery.find_adapter_layers(model)
    skipped: dict[nn.Module, str] = {}

    def wrap(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.Conv2d)
        if (
            min(module.in_channels, module.out_channels) < min_channels
            or module in wrapped
            or getattr(module, "_already_squeeze_excited", False)
        ):
            return None
        if module in adapters:
            skipped[module] = "an adapter reads its weight. Wrap convolutions before you add adapters"
            return None
        if not module_surgery.takes_one_input(module):
            skipped[module] = "its `forward` takes more than the input, which a wrapper would not pass on"
            return None
        return SqueezeExciteConv2d.from_conv2d(module, index, latent_channels)

    module_surgery.replace_module_classes(model, {nn.Conv2d: wrap}, optimizers=optimizers)
    module_surgery.warn_about_kept_modules("apply_squeeze_excite", model, skipped)
    if not module_surgery.count_module_instances(model, SqueezeExciteConv2d):
        warn_no_effect(
            f"`apply_squeeze_excite` had no effect: the model has no `Conv2d` with at least {min_channels} input and "
            f"output channels that can be wrapped."
        )


apply_se = apply_squeeze_excite  # an earlier name


class SqueezeExcite(Algorithm):
    """Adds squeeze-and-excitation: the model learns to weight the channels of its feature maps.

    At INIT convolutions of the model are wrapped; see `apply_squeeze_excite`. The layers process each example
    separately, so microbatches equal one batch.

    **Events** INIT. **Reads** nothing. **Writes** modules of `state.model`, parameters of `state.optimizers`.
    **Cost** two reads and one write of each wrapped layer's output; `2 * latent_channels * C` parameters for C output
    channels. **Compilation** static: no shape depends on time or data.

    **Logs** the hyperparameter `squeeze_excite/num_squeeze_excite_layers`, once.

    Args:
        latent_channels: The hidden width of the new layers: below 1 a fraction of the channels, otherwise a number.
        min_channels: Convolutions with fewer input or output channels are not wrapped.

    Raises:
        ValueError: `latent_channels` is not positive.

    Example:
        >>> SqueezeExcite(min_channels=512)
        SqueezeExcite(latent_channels=64,min_channels=512)

    Source: Hu et al., "Squeeze-and-Excitation Networks", arXiv:1709.01507, section 3.
    Differs: as `apply_squeeze_excite`.
    """

    events = frozenset({Event.INIT})
    placement = Placement(provides={WRAPS_CONVS}, after={REPLACES_BLOCKS, REPLACES_FEEDFORWARD})

    def __init__(self, latent_channels: float = 64, min_channels: int = 128) -> None:
        check_latent_channels(latent_channels)
        check_integers("Use 0 for every convolution.", min_channels=min_channels, least=0)
        self.latent_channels = plain_number(latent_channels)
        self.min_channels = plain_number(min_channels)

    @staticmethod
    def required_on_load() -> bool:
        """Return True: checkpoints have other names for wrapped layers, and new parameters."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Wrap the convolutions and log their number."""
        apply_squeeze_excite(state.model, self.latent_channels, self.min_channels, state.optimizers)
        count = module_surgery.count_module_instances(state.model, SqueezeExciteConv2d)
        logger.log_hyperparameters({"squeeze_excite/num_squeeze_excite_layers": count})
