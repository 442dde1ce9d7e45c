"""`apply_gated_linear_units` and the algorithm. The layer is in `gated_linear_unit_layers`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer.algorithms.gated_linear_units.gated_linear_unit_layers import BERTGatedFFOutput
from composer.algorithms.warnings import warn_no_effect
from composer.core import ADDS_NORMS, REPLACES_FEEDFORWARD, Algorithm, Event, Placement
from composer.utils import MissingConditionalImportError, check_flags, module_surgery

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

Activation = Callable[[torch.Tensor], torch.Tensor]


def from_BertOutput(
    layer: nn.Module,
    module_index: int,
    act_fn: Activation,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
) -> BERTGatedFFOutput:
    """Return the gated layer that replaces a `BertOutput`, newly initialized, in the dtype of the old weights.

    Args:
        layer: The layer to replace.
        module_index: Its index among the replaced layers; unused.
        act_fn: The activation of the gate; a module is copied, so that layers do not share weights.
        gated_layer_bias: True if the gate has a bias.
        non_gated_layer_bias: True if the linear layer of the gated values has a bias.
    """
    old: Any = layer
    new = BERTGatedFFOutput(
        d_embed=old.dense.out_features,
        d_ff=old.dense.in_features,
        dropout_rate=old.dropout.p,
        act_fn=copy.deepcopy(act_fn) if isinstance(act_fn, nn.Module) else act_fn,
        layernorm_eps=old.LayerNorm.eps,
        gated_layer_bias=gated_layer_bias,
        non_gated_layer_bias=non_gated_layer_bias,
    )
    return new.to(old.dense.weight.dtype)


def from_BertIntermediate(layer: nn.Module, module_index: int) -> nn.Identity:
    """Return the replacement of a `BertIntermediate`: an identity, because the gated layer does its work.

    Args:
        layer: The layer to replace.
        module_index: Its index among the replaced layers; unused.
    """
    return nn.Identity()


def apply_gated_linear_units(
    model: nn.Module,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    act_fn: Activation | None = None,
    gated_layer_bias: bool = False,
    non_gated_layer_bias: bool = False,
) -> None:
    """Replace the feed-forward layers of a BERT, in place, by gated ones: `(act(x W1) * x W3) W2`.

    The new layers are as wide as the old ones and newly initialized. A model that already has gated layers is not
    changed.

    Args:
        model: A BERT of `transformers`, or a module that contains one, such as a `ComposerModel`.
        optimizers: The optimizer of the model, in which the new parameters replace the old ones. None if it is created
            afterwards.
        act_fn: The activation of the gate. None: the activation of the model.
        gated_layer_bias: True if the gate has a bias.
        non_gated_layer_bias: True if the linear layer of the gated values has a bias.

    Raises:
        MissingConditionalImportError: `transformers` is not installed.
        TypeError: The model contains no `BertPreTrainedModel`.
        ValueError: `act_fn` is None, and the layers have different activations or none.

    Warns:
        NoEffectWarning: The model has no gated layer afterwards.
        UserWarning: Layers are not replaced because they are frozen, have LoRA adapters, or belong to a class that
            overrides `forward`.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> model = BertModel(
        ...     BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
        ... )
        >>> apply_gated_linear_units(model, optimizers=None)
        >>> type(model.encoder.layer[0].output).__name__
        'BERTGatedFFOutput'

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, section 2.
    Differs: the paper reduces the width to 2/3, so that the number of parameters does not grow.
    """
    bert = _import_bert()
    if not any(isinstance(module, bert.BertPreTrainedModel) for module in model.modules()):
        raise TypeError(
            f"`model` must be or contain a `BertPreTrainedModel` of `transformers`, got {type(model).__name__}. Gated "
            f"linear units support no other models."
        )
    skipped = _find_skipped_layers(model, bert)
    layers = [m for m in model.modules() if isinstance(m, bert.BertIntermediate) and m not in skipped]
    if layers:
        activation = _common_activation(layers) if act_fn is None else act_fn

        def gated(module: nn.Module, index: int) -> nn.Module | None:
            if module in skipped:
                return None
            return from_BertOutput(module, index, activation, gated_layer_bias, non_gated_layer_bias)

        def removed(module: nn.Module, index: int) -> nn.Module | None:
            return None if module in skipped else from_BertIntermediate(module, index)

        policies: dict[type[nn.Module], module_surgery.ReplacementFunction] = {
            bert.BertOutput: gated,
            bert.BertIntermediate: removed,
        }
        module_surgery.replace_module_classes(model, policies, optimizers=optimizers)
    module_surgery.warn_about_kept_modules("apply_gated_linear_units", model, skipped)
    if not module_surgery.count_module_instances(model, BERTGatedFFOutput):
        warn_no_effect("`apply_gated_linear_units` changed nothing: the model has no replaceable feed-forward layer.")


def _import_bert() -> Any:
    """Import the layers of BERT when they are first used."""
    try:
        return import_module("transformers.models.bert.modeling_bert")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        raise MissingConditionalImportError(extra_deps_group="nlp", conda_package="transformers") from error


def _find_skipped_layers(model: nn.Module, bert: Any) -> dict[nn.Module, str]:
    """Return the halves of the layers that cannot be initialized again, with the reason; always both halves."""
    skipped: dict[nn.Module, str] = {}
    for layer in model.modules():
        halves = [half for half in layer.children() if isinstance(half, bert.BertIntermediate | bert.BertOutput)]
        reasons = {_reason_to_skip(half, bert) for half in halves} - {None}
        if reasons:
            skipped |= dict.fromkeys(halves, str(min(map(str, reasons))))
    return skipped


def _reason_to_skip(half: nn.Module, bert: Any) -> str | None:
    base = bert.BertOutput if isinstance(half, bert.BertOutput) else bert.BertIntermediate
    if module_surgery.overrides_forward(half, base):
        return f"its `forward` is not that of `{base.__name__}`"
    if module_surgery.find_adapter_layers(half):
        return "it has adapters. Gate the layers before you add adapters"
    if not all(p.requires_grad for p in half.parameters()):
        return "it is frozen"
    return None


def _common_activation(layers: list[Any]) -> Activation:
    """Return the activation that all layers share. Two modules of one type count as the same activation."""
    by_kind = {_kind(layer.intermediate_act_fn): layer.intermediate_act_fn for layer in layers}
    if len(by_kind) != 1 or None in by_kind:
        names = sorted(getattr(kind, "__name__", repr(kind)) for kind in by_kind)
        raise ValueError(
            f"`act_fn` must be given if the layers of the model have different activations or none, got {names}."
        )
    activation: Activation = by_kind.popitem()[1]
    return activation


def _kind(activation: Any) -> Any:
    return type(activation) if isinstance(activation, nn.Module) else activation


class GatedLinearUnits(Algorithm):
    """Adds gates to the feed-forward layers of BERT.

    At INIT the layers are replaced; see `apply_gated_linear_units`. Examples are processed independently, so
    microbatches equal one batch.

    **Events** INIT. **Reads** nothing. **Writes** modules of `state.model`, parameters of `state.optimizers`.
    **Cost** a third linear layer in each block, as large as the other two: 50% more work and parameters of the
    feed-forward part. **Compilation** static: no shape depends on time or data.

    Args:
        act_fn: The activation of the gate. None: the activation of the model. A custom one is not saved: such a
            checkpoint can only be loaded if `algorithms` contains this algorithm with the activation.
        gated_layer_bias: True if the gate has a bias.
        non_gated_layer_bias: True if the linear layer of the gated values has a bias.

    Raises:
        MissingConditionalImportError: `transformers` is not installed.

    Example:
        >>> GatedLinearUnits(gated_layer_bias=True)
        GatedLinearUnits(act_fn=None,gated_layer_bias=True,non_gated_layer_bias=False)

    Source: Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202, section 2.
    Differs: as `apply_gated_linear_units`.
    """

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_FEEDFORWARD, ADDS_NORMS})

    def __init__(
        self, act_fn: Activation | None = None, gated_layer_bias: bool = False, non_gated_layer_bias: bool = False
    ) -> None:
        check_flags(gated_layer_bias=gated_layer_bias, non_gated_layer_bias=non_gated_layer_bias)
        if act_fn is not None and not callable(act_fn):
            raise TypeError(
                f"`act_fn` must be a function of a tensor, got {act_fn!r}. None uses the activation of the model."
            )
        _import_bert()
        self.act_fn = act_fn
        self.gated_layer_bias = gated_layer_bias
        self.non_gated_layer_bias = non_gated_layer_bias

    def __repr__(self) -> str:
        """Return a constructor call, with the placeholder `act_fn` for a custom activation."""
        act_fn = None if self.act_fn is None else "act_fn"
        biases = f"gated_layer_bias={self.gated_layer_bias},non_gated_layer_bias={self.non_gated_layer_bias}"
        return f"{type(self).__name__}(act_fn={act_fn},{biases})"

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the parameters of the layers have other names in a checkpoint."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the layers."""
        apply_gated_linear_units(
            state.model,
            optimizers=state.optimizers,
            act_fn=self.act_fn,
            gated_layer_bias=self.gated_layer_bias,
            non_gated_layer_bias=self.non_gated_layer_bias,
        )
