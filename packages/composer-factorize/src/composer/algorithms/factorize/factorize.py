"""`apply_factorization` and the algorithm `Factorize`. The layers are in `factorize_modules`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from composer.algorithms.factorize.factorize_modules import (
    FactorizedConv2d,
    FactorizedLinear,
    _FactorizedModule,
    factorizing_could_speedup,
)
from composer.algorithms.warnings import warn_no_effect
from composer.core import (
    FACTORIZES_WEIGHTS,
    REPLACES_ATTENTION,
    REPLACES_BLOCKS,
    REPLACES_CONVS,
    REPLACES_FEEDFORWARD,
    WRAPS_CONVS,
    Algorithm,
    Event,
    Placement,
)
from composer.utils import check_finite, check_flags, check_integers, module_surgery, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_FRACTION_HINT = "A value below 1, such as 0.25, is a fraction of the smaller size."

LOG_NUM_CONV2D_REPLACEMENTS_KEY = "factorize/num_conv2d_replacements"
"""The hyperparameter under which `Factorize` logs the number of factorized convolutions."""
LOG_NUM_LINEAR_REPLACEMENTS_KEY = "factorize/num_linear_replacements"
"""The hyperparameter under which `Factorize` logs the number of factorized linear layers."""


def apply_factorization(
    model: nn.Module,
    factorize_convs: bool = True,
    factorize_linears: bool = True,
    min_channels: int = 512,
    latent_channels: int | float = 0.25,
    min_features: int = 512,
    latent_features: int | float = 0.25,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> None:
    """Replace convolutions and linear layers in a model, in place, by two layers of lower rank, newly initialized.

    Args:
        model: The model. A layer that is the model itself is not replaced.
        factorize_convs: Replace each `torch.nn.Conv2d` by a `FactorizedConv2d`.
        factorize_linears: Replace each `torch.nn.Linear` by a `FactorizedLinear`. The output projection of
            `torch.nn.MultiheadAttention` is not replaced, because its weight is read without calling the layer.
        min_channels: Convolutions with fewer input or output channels are not replaced.
        latent_channels: Channels between the two convolutions; below 1, a fraction of the smaller of the numbers of
            input and output channels. Convolutions for which this saves no multiplications are not replaced.
        min_features: Linear layers with fewer input or output features are not replaced.
        latent_features: The same as `latent_channels`, for linear layers.
        optimizers: The optimizer of the model, in which new parameters replace the old ones. Required unless it is
            created afterwards.

    Raises:
        ValueError: A latent size is not positive.

    Warns:
        NoEffectWarning: The model has no factorized layer afterwards, although one of the flags is True.
        UserWarning: Large layers are not replaced because they cannot be initialized again: frozen layers, layers that
            share a parameter with another layer (such as tied embeddings), layers inside LoRA adapters, layers with a
            parametrized weight, and layers whose class overrides `forward`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(512, 512, 3), nn.ReLU(), nn.Linear(512, 10))
        >>> apply_factorization(model)
        >>> [type(layer).__name__ for layer in model]
        ['FactorizedConv2d', 'ReLU', 'Linear']

    Source: Zhang, Zou, He, Sun, "Accelerating Very Deep Convolutional Networks for Classification and Detection",
        arXiv:1505.06798, section 3.1: the shape of the layers.
    Differs: the paper approximates a trained model; here the factors are trained from their initialization.
    """
    check_finite(_FRACTION_HINT, latent_channels=latent_channels, latent_features=latent_features, above=0)
    products = [module for module in model.modules() if isinstance(module, _FactorizedModule)]
    factors = {factor for product in products for factor in product.children()}
    adapters = module_surgery.find_adapter_layers(model)
    holders = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    skipped: dict[nn.Module, str] = {}

    def is_skipped(module: nn.Module, base: type[nn.Module]) -> bool:
        reason = (
            "an adapter reads its weight. Factorize before you add adapters"
            if module in adapters
            else _reason_to_skip(module, base, holders)
        )
        if reason is not None:
            skipped[module] = reason
        return reason is not None

    def factorized_conv(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.Conv2d)
        wide_enough = min(module.in_channels, module.out_channels) >= min_channels
        if module in factors or not (wide_enough and factorizing_could_speedup(module, latent_channels)):
            return None
        if is_skipped(module, nn.Conv2d):
            return None
        return FactorizedConv2d.from_conv2d(module, index, latent_channels=latent_channels)

    def factorized_linear(module: nn.Module, index: int) -> nn.Module | None:
        assert isinstance(module, nn.Linear)
        wide_enough = min(module.in_features, module.out_features) >= min_features
        if module in factors or not (wide_enough and factorizing_could_speedup(module, latent_features)):
            return None
        if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            return None  # multi-head attention reads its weight without calling the layer
        if is_skipped(module, nn.Linear):
            return None
        return FactorizedLinear.from_linear(module, index, latent_features=latent_features)

    policies: dict[type[nn.Module], module_surgery.ReplacementFunction] = {}
    if factorize_convs:
        policies[nn.Conv2d] = factorized_conv
    if factorize_linears:
        policies[nn.Linear] = factorized_linear
    module_surgery.replace_module_classes(model, policies, optimizers=optimizers)
    module_surgery.warn_about_kept_modules("apply_factorization", model, skipped)
    if policies and not module_surgery.count_module_instances(model, _FactorizedModule):
        warn_no_effect(
            f"`apply_factorization` changed nothing: the model has no replaceable `Conv2d` with at least "
            f"{min_channels} channels and no replaceable `Linear` with at least {min_features} features."
        )


class Factorize(Algorithm):
    """Trains a model whose large layers are products of two thinner ones.

    At INIT convolutions and linear layers of the model are replaced by newly initialized ones; see
    `apply_factorization`. The layers work on examples one by one, so microbatches equal one batch.

    **Events** INIT. **Reads** nothing. **Writes** modules of `state.model`, parameters of `state.optimizers`.
    **Cost** saves multiplications and weights: instead of f inputs times o outputs, (f + o) * latent size. Stores one
    more activation per replaced layer. **Compilation** static: no shape depends on time or data.

    **Logs** the hyperparameters `factorize/num_conv2d_replacements` and `factorize/num_linear_replacements`, once, for
    the enabled types.

    Args:
        factorize_convs: Replace convolutions.
        factorize_linears: Replace linear layers.
        min_channels: Convolutions with fewer input or output channels are not replaced.
        latent_channels: Channels between the two convolutions; below 1, a fraction of the smaller of the numbers of
            input and output channels.
        min_features: Linear layers with fewer input or output features are not replaced.
        latent_features: The same as `latent_channels`, for linear layers.

    Raises:
        ValueError: A latent size is not positive.

    Example:
        >>> Factorize(min_channels=512).latent_features
        128

    Source: Zhang, Zou, He, Sun, "Accelerating Very Deep Convolutional Networks for Classification and Detection",
        arXiv:1505.06798, section 3.1: the shape of the layers.
    Differs: the paper approximates a trained model; here the factors are trained from their initialization.
    """

    events = frozenset({Event.INIT})
    placement = Placement(
        provides={FACTORIZES_WEIGHTS},
        after={REPLACES_BLOCKS, WRAPS_CONVS, REPLACES_CONVS, REPLACES_ATTENTION, REPLACES_FEEDFORWARD},
    )

    def __init__(
        self,
        factorize_convs: bool = True,
        factorize_linears: bool = True,
        min_channels: int = 256,
        latent_channels: int | float = 0.25,
        min_features: int = 256,
        latent_features: int | float = 128,
    ) -> None:
        check_flags(factorize_convs=factorize_convs, factorize_linears=factorize_linears)
        if not (factorize_convs or factorize_linears):
            raise ValueError(
                "`factorize_convs` or `factorize_linears` must be True, got False for both. Leave `Factorize` out "
                "instead."
            )
        check_integers("Use 0 for every layer.", min_channels=min_channels, min_features=min_features, least=0)
        check_finite(_FRACTION_HINT, latent_channels=latent_channels, latent_features=latent_features, above=0)
        self.factorize_convs, self.factorize_linears = factorize_convs, factorize_linears
        self.min_channels, self.latent_channels = plain_number(min_channels), plain_number(latent_channels)
        self.min_features, self.latent_features = plain_number(min_features), plain_number(latent_features)

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the parameters of replaced layers have other names in a checkpoint."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers and log their number."""
        apply_factorization(
            state.model,
            factorize_convs=self.factorize_convs,
            factorize_linears=self.factorize_linears,
            min_channels=self.min_channels,
            latent_channels=self.latent_channels,
            min_features=self.min_features,
            latent_features=self.latent_features,
            optimizers=state.optimizers,
        )
        if self.factorize_convs:
            number = module_surgery.count_module_instances(state.model, FactorizedConv2d)
            logger.log_hyperparameters({LOG_NUM_CONV2D_REPLACEMENTS_KEY: number})
        if self.factorize_linears:
            number = module_surgery.count_module_instances(state.model, FactorizedLinear)
            logger.log_hyperparameters({LOG_NUM_LINEAR_REPLACEMENTS_KEY: number})


def _reason_to_skip(layer: nn.Module, base: type[nn.Module], holders: Counter[nn.Parameter]) -> str | None:
    """Return the reason why a layer cannot be replaced by two newly initialized factors, or None."""
    parameters = [p for p in layer._parameters.values() if p is not None]
    if module_surgery.overrides_forward(layer, base):
        return f"its `forward` is not that of `{base.__name__}`"
    if "weight" not in layer._parameters:
        return "its weight is computed from other parameters"
    if not all(p.requires_grad for p in parameters):
        return "it is frozen, and new weights would never be trained"
    if any(holders[p] > 1 for p in parameters):
        return "another layer has the same parameter"
    return None
