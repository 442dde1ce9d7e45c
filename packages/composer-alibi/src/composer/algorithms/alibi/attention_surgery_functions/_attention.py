"""The attention function that adds the bias, and the policy that puts it into attention layers of `transformers`.

Attention layers of `transformers` look up a function by the name in their configuration, `config._attn_implementation`,
in a registry that takes functions of others (`ALL_ATTENTION_FUNCTIONS`). Each layer that is changed gets a
configuration of its own with the name of the function here. Of the places where a bias could enter, this one

- sees the final keys, thus their true number also with a cache of any kind, and the mask in whatever form;
- is public and the same for all models, while the arguments of layers and the making of masks change from version to
  version;
- stays in force when the model is told to use another attention, and leaves other models that share the configuration
  alone, which a new `model.config._attn_implementation` would not.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from composer.algorithms.alibi.attention_surgery_functions._bias import LinearBias
from composer.algorithms.alibi.attention_surgery_functions.utils import PolicyRegistry

__all__ = ["add_bias", "attend", "check_attention", "register_attention", "share_biases"]

_NAME = "composer_alibi"
_KINDS = ("eager", "sdpa")  # both take any mask that is added to the scores


def add_bias(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module | None:
    """The policy for self-attention layers: they add the bias. Cross-attention has no distances and stays.

    Raises:
        NotImplementedError: The layer cannot add one; see `check_attention`.
    """
    if getattr(module, "is_cross_attention", False):
        return None
    _check_layer(module)
    layer: Any = module
    n_heads = getattr(layer, "num_attention_heads", None) or layer.num_heads
    layer._composer_alibi = LinearBias(n_heads, max_sequence_length)
    if layer.config._attn_implementation != _NAME:
        layer._composer_alibi_config, layer.config = layer.config, copy.copy(layer.config)
        layer.config._attn_implementation = _NAME
    register_attention()
    return module


def register_attention() -> None:
    """Let layers find `attend`."""
    ALL_ATTENTION_FUNCTIONS.register(_NAME, attend)


def check_attention(model: nn.Module, registry: PolicyRegistry) -> None:
    """Refuse a model, before anything is changed, if one of its layers could not add the bias.

    Args:
        model: The model.
        registry: The policies in force.

    Raises:
        NotImplementedError: An attention layer uses neither eager nor sdpa attention, has relative position
            embeddings, or does not look up its attention function.
    """
    classes = tuple(kind for kind, policy in registry.items() if policy is add_bias)
    for module in model.modules():
        if isinstance(module, classes) and not getattr(module, "is_cross_attention", False):
            _check_layer(module)


def share_biases(model: nn.Module) -> None:
    """Let layers that need equal biases use one."""
    shared: dict[tuple[int, int], LinearBias] = {}
    for module in model.modules():
        bias: Any = getattr(module, "_composer_alibi", None)
        if isinstance(bias, LinearBias):
            layer: Any = module
            layer._composer_alibi = shared.setdefault((bias.n_heads, bias.max_sequence_length), bias)


def _check_layer(layer: nn.Module) -> None:
    kind = type(layer).__name__
    relative = getattr(layer, "position_embedding_type", None) or "absolute"
    if relative != "absolute":
        raise NotImplementedError(
            f"`{kind}` must have absolute position embeddings for ALiBi to replace, got {relative!r}. Build the model "
            f"with `position_embedding_type='absolute'`."
        )
    if not _looks_up_attention(type(layer)):
        raise NotImplementedError(
            f"`{kind}` must look up its attention function in `ALL_ATTENTION_FUNCTIONS` of `transformers` for ALiBi to "
            f"add a bias, but its `forward` does not. Register a policy of your own in `policy_registry`."
        )
    _attention_of(layer)


def _looks_up_attention(kind: type) -> bool:
    """Whether `forward`, or what it calls as `super().forward`, uses the registry."""
    for base in kind.__mro__:
        code = getattr(inspect.unwrap(vars(base).get("forward", kind)), "__code__", None)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            return True
        if code is not None and "super" not in code.co_names:
            return False
    return False


def _attention_of(layer: Any) -> str:
    """The attention that the model is set to now."""
    found: str = getattr(layer, "_composer_alibi_config", layer.config)._attn_implementation or "eager"
    if found not in _KINDS:
        raise NotImplementedError(
            f"ALiBi needs attention that takes any bias, {' or '.join(map(repr, _KINDS))}, got {found!r}. Build the "
            f"model with `attn_implementation='sdpa'`, or call `model.set_attn_implementation('sdpa')`."
        )
    return found


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention with linear biases, in the form in which `transformers` calls attention functions.

    `softmax(scaling * q k^T + bias + mask) v`.

    Args:
        module: The layer, changed by `add_bias`.
        query: Shape (B, H, q, d).
        key: Shape (B, H, n, d), n at least q: cached ones come first.
        value: Shape (B, H, n, d).
        attention_mask: Shape (B or 1, H or 1, q, n): boolean, False where a query must not look, or to be added. None:
            later keys are hidden if the layer is causal, otherwise none is.
        dropout: Of the attention weights.
        scaling: None: as the layer's class would.
        is_causal: Overrides `module.is_causal`.
        **kwargs: What the model passes to all attention functions.

    Returns:
        The outputs, shape (B, q, H, d), and, with eager attention, the weights, shape (B, H, q, n).

    Raises:
        NotImplementedError: The model was set to attention that takes no bias.
        ValueError: There are more keys than ALiBi was applied for.

    Source: Press et al., arXiv:2108.12409, section 3.
    """
    layer: Any = module
    attention, scaling = _attention_of(layer), _scaling_of(layer, query) if scaling is None else scaling
    causal = layer.is_causal if is_causal is None else is_causal
    q = query.shape[2]
    if attention_mask is None and causal and 1 < q < key.shape[2]:
        key, value = key[:, :, :q], value[:, :, :q]  # a cache of fixed size, still empty
    bias = layer._composer_alibi.for_scores(query, key.shape[2], attention_mask, causal)
    if attention == "eager":
        return _attend_eagerly(layer, query, key, value, bias, dropout, scaling)
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
    result: tuple[torch.Tensor, None] = sdpa(
        module, query, key, value, bias, dropout=dropout, scaling=scaling, is_causal=False, **kwargs
    )
    return result


def _attend_eagerly(
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    dropout: float,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    key = key.transpose(2, 3)
    if getattr(layer, "reorder_and_upcast_attn", False):  # an option of GPT-2
        with torch.autocast(query.device.type, enabled=False):
            scores = torch.matmul(query.float() * scaling, key.float())
    else:
        scores = torch.matmul(query, key) * scaling
    weights = F.softmax(scores + bias, dim=-1).to(value.dtype)
    weights = F.dropout(weights, dropout)  # 0 in evaluation
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def _scaling_of(layer: Any, query: torch.Tensor) -> float:
    """GPT-2 of `transformers` 5.0 leaves its options to the attention function."""
    scaling: float = query.shape[-1] ** -0.5 if getattr(layer, "scale_attn_weights", True) else 1.0
    if getattr(layer, "scale_attn_by_inverse_layer_idx", False):
        scaling /= layer.layer_idx + 1
    return scaling
