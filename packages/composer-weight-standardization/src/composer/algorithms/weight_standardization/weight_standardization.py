"""The parametrization, the function that adds it, then the algorithm. Weights are (out channels, ...)."""

from __future__ import annotations

import functools
import logging
import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from composer.algorithms.warnings import warn_no_effect
from composer.core import (
    FACTORIZES_WEIGHTS,
    REPLACES_BLOCKS,
    REPLACES_CONVS,
    STANDARDIZES_WEIGHTS,
    WRAPS_CONVS,
    Algorithm,
    Event,
    Placement,
)
from composer.utils import check_integers, module_surgery, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_log = logging.getLogger(__name__)

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class WeightStandardizer(nn.Module):
    """A parametrization that gives each filter of a weight mean 0 and variance 1.

    For filter i, over all its elements j: `(W[i, j] - mean(W[i])) / sqrt(var(W[i]) + 1e-10)`, with the biased variance.

    Example:
        >>> WeightStandardizer()(torch.tensor([[1.0, 3.0], [5.0, 5.0]]))
        tensor([[-1.,  1.],
                [ 0.,  0.]])

    Source: Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization",
        arXiv:1903.10520, the definition of weight standardization.
    """

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Standardize a weight of shape (out channels, ...); dtype and strides do not change."""
        # Layer normalization without affine parameters is one kernel. The dimensions are permuted to their order in
        # memory, so that the result has the memory format of the weight, which determines that of the feature maps.
        # Of two dimensions with equal strides, the one of size 1 is the inner one.
        strides, shape = weight.stride(), weight.shape
        order = [0, *sorted(range(1, weight.dim()), key=lambda dim: (-strides[dim], shape[dim] == 1))]
        filters = weight.permute(order)
        standardized = F.layer_norm(filters, filters.shape[1:], eps=1e-10)
        return standardized.permute([order.index(dim) for dim in range(weight.dim())])


def apply_weight_standardization(module: nn.Module, n_last_layers_ignore: int = 0) -> int:
    """Standardize the weights of the convolutions of a model, in place.

    The weight of each `torch.nn.Conv1d`, `Conv2d` and `Conv3d` becomes a function of the original parameter, which
    stays the same object under another name (`parametrizations.weight.original`), so optimizers do not change.
    Convolutions with standardized weights or with filters of one element are left as they are.

    Args:
        module: The model, or one convolution.
        n_last_layers_ignore: The number of convolutions at the end of the model to leave as they are. The order is that
            of execution, according to symbolic tracing; if the model cannot be traced, the order of definition.

    Returns:
        The number of convolutions with standardized weights, including those of earlier calls.

    Raises:
        ValueError: `n_last_layers_ignore` is negative.

    Warns:
        NoEffectWarning: The model has no such convolution, or `n_last_layers_ignore` leaves out all of them.
        UserWarning: The model has convolutions that cannot be standardized: lazy convolutions without a shape,
            convolutions inside LoRA adapters, and those whose weight is complex or computed by a hook, as by
            `torch.nn.utils.weight_norm`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, kernel_size=3), nn.ReLU(), nn.Conv2d(8, 8, kernel_size=1))
        >>> apply_weight_standardization(model, n_last_layers_ignore=1)
        1
        >>> model[0].weight.detach().mean().abs() < 1e-6
        tensor(True)

    Source: Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization",
        arXiv:1903.10520, the definition of weight standardization.
    Differs: the constant in the denominator is 1e-10, inside the square root.
    """
    check_integers("Use 0 for none.", n_last_layers_ignore=n_last_layers_ignore, least=0)
    convs = [m for m in module.modules() if isinstance(m, _CONVS)]
    unsupported = _find_unsupported(module, convs)
    module_surgery.warn_about_kept_modules("apply_weight_standardization", module, unsupported)
    convs = [m for m in convs if m not in unsupported and _filter_size(m) > 1]  # a single element would become 0
    if not convs:
        warn_no_effect(
            "`apply_weight_standardization` had no effect: the model has no `Conv1d`, `Conv2d` or `Conv3d` with "
            "filters of more than one element that can be standardized."
        )
    elif n_last_layers_ignore >= len(convs):
        warn_no_effect(
            f"`apply_weight_standardization` had no effect: `n_last_layers_ignore={n_last_layers_ignore}` leaves out "
            f"all {len(convs)} convolutions of the model."
        )
        return 0
    if n_last_layers_ignore > 0:
        convs = _in_execution_order(module, convs)[:-n_last_layers_ignore]
    for conv in convs:
        if not _is_standardized(conv):
            parametrize.register_parametrization(conv, "weight", WeightStandardizer())
            conv.composer_plain_state = functools.partial(_plain_state, conv)  # type: ignore[assignment]
    return len(convs)


class WeightStandardization(Algorithm):
    """Standardizes the weights of convolutions: each filter has mean 0 and variance 1.

    At INIT the weights of the convolutions of the model are standardized; see `apply_weight_standardization`. They do
    not depend on the batch, so microbatches equal one batch.

    **Events** INIT. **Reads** nothing. **Writes** weights of modules of `state.model`. **Cost** one normalization of
    each weight in each forward pass, and memory for a copy of the weights. **Compilation** static.

    **Logs** the hyperparameter `WeightStandardization/num_weights_standardized`, once.

    Args:
        n_last_layers_ignore: The number of convolutions at the end of the model to leave as they are.

    Raises:
        ValueError: `n_last_layers_ignore` is negative.

    Example:
        >>> WeightStandardization(n_last_layers_ignore=1)
        WeightStandardization(n_last_layers_ignore=1)

    Source: Qiao et al., "Micro-Batch Training with Batch-Channel Normalization and Weight Standardization",
        arXiv:1903.10520, the definition of weight standardization.
    Differs: as `apply_weight_standardization`.
    """

    events = frozenset({Event.INIT})
    placement = Placement(
        provides={STANDARDIZES_WEIGHTS}, after={REPLACES_BLOCKS, WRAPS_CONVS, REPLACES_CONVS, FACTORIZES_WEIGHTS}
    )

    def __init__(self, n_last_layers_ignore: int = 0) -> None:
        check_integers("Use 0 for none.", n_last_layers_ignore=n_last_layers_ignore, least=0)
        self.n_last_layers_ignore = plain_number(n_last_layers_ignore)

    @staticmethod
    def required_on_load() -> bool:
        """Return True: standardized weights have other names in checkpoints."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Standardize the weights and log their number."""
        count = apply_weight_standardization(state.model, self.n_last_layers_ignore)
        logger.log_hyperparameters({"WeightStandardization/num_weights_standardized": count})


def _find_unsupported(module: nn.Module, convs: list[Conv]) -> dict[nn.Module, str]:
    """Find convolutions whose weights cannot be standardized, with the reasons."""
    adapters = module_surgery.find_adapter_layers(module)
    reasons: dict[nn.Module, str] = {}
    for conv in convs:
        if isinstance(conv, LazyModuleMixin) and conv.has_uninitialized_params():
            reasons[conv] = "its shape is not known yet. Run the model on one batch first"
        elif conv in adapters:
            reasons[conv] = "an adapter changes its weight. Standardize weights before you add adapters"
        elif not (parametrize.is_parametrized(conv, "weight") or "weight" in conv._parameters):
            reasons[conv] = (
                "its weight is computed by a hook. Use the norms in `torch.nn.utils.parametrizations` instead, whose "
                "weights can be standardized"
            )
        elif conv.weight.is_complex():
            reasons[conv] = "its weight is complex"
    return reasons


def _plain_state(conv: Conv, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a convolution with the standardized weight: for `composer.export.plain_state_dict`.

    Raises:
        ValueError: The weight has other parametrizations, too, whose parameters are not known from it.
    """
    if not _is_standardized(conv):
        return state  # its parametrization has been removed
    if len(conv.parametrizations.weight) > 1:  # type: ignore[union-attr, arg-type]
        raise ValueError("its weight has other parametrizations besides. Remove them first")
    others = {name: value for name, value in state.items() if not name.startswith("parametrizations.weight.")}
    return {"weight": conv.weight.detach(), **others}


def _filter_size(conv: Conv) -> int:
    return conv.in_channels // conv.groups * math.prod(conv.kernel_size)


def _is_standardized(conv: Conv) -> bool:
    if not parametrize.is_parametrized(conv, "weight"):
        return False
    return any(isinstance(step, WeightStandardizer) for step in conv.parametrizations.weight)  # type: ignore[union-attr]


class _ConvTracer(fx.Tracer):
    """Tracer that enters only modules that contain convolutions.

    Other modules need not be traceable. Layers that other algorithms wrap around convolutions are not entered.
    """

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            isinstance(m, _CONVS)
            or type(m).__module__.startswith("composer.algorithms.")
            or not any(isinstance(part, _CONVS) for part in m.modules())
            or super().is_leaf_module(m, module_qualified_name)
        )


def _in_execution_order(module: nn.Module, convs: list[Conv]) -> list[Conv]:
    """Sort convolutions by their last call; those that are not called come first."""
    try:
        nodes = _ConvTracer().trace(module).nodes
    except Exception as error:  # noqa: BLE001  # tracing runs the model, which may raise anything
        _log.warning(
            "`apply_weight_standardization` could not trace the model to find the convolutions that run last (%s: %s), "
            "and leaves out those that are defined last.",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return convs
    called = [
        part for node in nodes if node.op == "call_module" for part in module.get_submodule(str(node.target)).modules()
    ]
    last_call = {part: position for position, part in enumerate(called)}
    return sorted(convs, key=lambda conv: last_call.get(conv, -1))
