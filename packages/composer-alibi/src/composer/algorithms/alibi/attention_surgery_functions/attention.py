"""The bias, the attention function that adds it, and the policy for attention layers of `transformers`.

Attention layers of `transformers` look up a function by name, `config._attn_implementation`, in a public registry,
`ALL_ATTENTION_FUNCTIONS`. Each changed layer gets a copy of its configuration with the name of `attend`. Compared with
other places where a bias could be added, this one

- gets the final keys, including those from a cache of any kind, and the mask in every form;
- is public and the same for all models, while the arguments of layers and the code that makes masks change from version
  to version;
- stays in effect when the model is switched to another attention implementation, and does not affect other models that
  share the configuration.

Symbols: B examples, H heads, q queries, n keys, L maximum number of tokens.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.jit import is_tracing  # type: ignore[attr-defined]
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from composer.algorithms.alibi.attention_surgery_functions.utils import PolicyRegistry

_NAME = "composer_alibi"
_SUPPORTED = ("eager", "sdpa")  # both accept an additive mask
_CACHED = "_composer_alibi"  # attribute of a mask: its sum with the bias
_ROUND = 128  # tables grow by this many positions, so that slowly growing lengths rarely need a new one

_is_tracing: Callable[[], bool] = is_tracing  # torch does not annotate it


def add_bias(module: nn.Module, module_index: int, max_sequence_length: int) -> nn.Module | None:
    """Make a self-attention layer add the bias. Cross-attention has no distances and is not changed.

    Raises:
        NotImplementedError: The layer cannot add a bias; see `check_attention`.
    """
    if getattr(module, "is_cross_attention", False):
        return None
    _check_layer(module)
    layer: Any = module
    n_heads = getattr(layer, "num_attention_heads", None) or layer.num_heads
    layer._composer_alibi = LinearBias(n_heads, max_sequence_length)
    layer.composer_plain_state = _refuse_plain_state
    if layer.config._attn_implementation != _NAME:
        layer._composer_alibi_config, layer.config = layer.config, copy.copy(layer.config)
        layer.config._attn_implementation = _NAME
    _register_attention()
    return module


def _refuse_plain_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Raise ValueError: for `composer.export.plain_state_dict`."""
    raise ValueError("it biases its scores by the distance of tokens, which replaces position embeddings")


def _register_attention() -> None:
    """Register `attend` in `transformers`."""
    ALL_ATTENTION_FUNCTIONS.register(_NAME, attend)


def check_attention(model: nn.Module, registry: PolicyRegistry) -> None:
    """Raise an error, before the model is changed, if one of its layers could not add the bias.

    Args:
        model: The model.
        registry: The policies.

    Raises:
        NotImplementedError: An attention layer uses neither eager nor sdpa attention, has relative position
            embeddings, or does not look up its attention function.
    """
    classes = tuple(kind for kind, policy in registry.items() if policy is add_bias)
    for module in model.modules():
        if isinstance(module, classes) and not getattr(module, "is_cross_attention", False):
            _check_layer(module)


def share_biases(model: nn.Module) -> None:
    """Share one `LinearBias` between all layers with equal arguments."""
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
            f"ALiBi replaces absolute position embeddings, but those of `{kind}` are {relative!r}. Build the model "
            f"with `position_embedding_type='absolute'`."
        )
    if not _looks_up_attention(type(layer)):
        raise NotImplementedError(
            f"ALiBi needs layers that look up their attention function in `ALL_ATTENTION_FUNCTIONS` of `transformers`, "
            f"but `{kind}.forward` does not. Register a policy for it in `policy_registry`."
        )
    _attention_of(layer)


def _looks_up_attention(kind: type) -> bool:
    """Return True if `forward`, including `super().forward`, uses the registry."""
    for base in kind.__mro__:
        code = getattr(inspect.unwrap(vars(base).get("forward", kind)), "__code__", None)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            return True
        if code is not None and "super" not in code.co_names:
            return False
    return False


def _attention_of(layer: Any) -> str:
    """Return the attention implementation that the model is set to now."""
    name: str = getattr(layer, "_composer_alibi_config", layer.config)._attn_implementation or "eager"
    if name not in _SUPPORTED:
        raise NotImplementedError(
            f"ALiBi needs attention that accepts a bias, {' or '.join(map(repr, _SUPPORTED))}, got {name!r}. Build the "
            f"model with `attn_implementation='sdpa'`, or call `model.set_attn_implementation('sdpa')`."
        )
    return name


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
    """Compute attention with linear biases: `softmax(scaling * q k^T + bias + mask) v`.

    The signature is that of the attention functions of `transformers`.

    Args:
        module: The layer, changed by `add_bias`.
        query: Shape (B, H, q, d).
        key: Shape (B, H, n, d), n at least q; cached keys come first.
        value: Shape (B, H, n, d).
        attention_mask: Shape (B or 1, H or 1, q, n): boolean, False for hidden keys, or additive. None: a causal mask
            if the layer is causal, otherwise no mask.
        dropout: Dropout probability of the attention weights.
        scaling: Factor of the scores. None: the value that the class of the layer uses.
        is_causal: Overrides `module.is_causal`.
        **kwargs: Other arguments that the model passes to attention functions.

    Returns:
        The outputs, shape (B, q, H, d), and, with eager attention, the weights, shape (B, H, q, n).

    Raises:
        NotImplementedError: The model was switched to attention that takes no bias.
        ValueError: There are more keys than `max_sequence_length`.

    Source: Press et al., arXiv:2108.12409, section 3.
    """
    layer: Any = module
    attention = _attention_of(layer)
    if scaling is None:  # GPT-2 of `transformers` 5.0 leaves its options to the attention function
        scaling = query.shape[-1] ** -0.5 if getattr(layer, "scale_attn_weights", True) else 1.0
        if getattr(layer, "scale_attn_by_inverse_layer_idx", False):
            scaling /= layer.layer_idx + 1
    causal = layer.is_causal if is_causal is None else is_causal
    q = query.shape[2]
    if attention_mask is None and causal and 1 < q < key.shape[2]:
        key, value = key[:, :, :q], value[:, :, :q]  # an empty cache of fixed size
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


class LinearBias:
    """The bias `-m * |i - j|`, computed once for each dtype and device and shared by all layers.

    It is computed in float32 and rounded once. It is not a buffer: `DistributedDataParallel` would broadcast it in
    every step, casting a model would round it twice, and checkpoints would grow.

    Args:
        n_heads: H.
        max_sequence_length: L.
    """

    def __init__(self, n_heads: int, max_sequence_length: int) -> None:
        self.n_heads = n_heads
        self.max_sequence_length = max_sequence_length
        self._tables: dict[tuple[Any, ...], torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}  # copies and pickles compute them again

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _register_attention()  # a pickled model may be loaded in a process that never applied ALiBi

    def for_scores(self, query: torch.Tensor, n: int, mask: torch.Tensor | None, causal: bool) -> torch.Tensor:
        """Return the tensor to add to the scores of a layer: the bias and the mask.

        Args:
            query: Shape (B, H, q, d). If q < n, the keys before the last q come from a cache.
            n: The number of keys.
            mask: Shape (B or 1, H or 1, q, n): boolean, False for hidden keys, or additive; or None.
            causal: True if a `mask` of None means a causal mask rather than no mask.

        Returns:
            Shape (B or 1, H, q, n), in the dtype of `query`; must not be modified. Always finite, also for queries
            whose keys are all hidden.

        Raises:
            ValueError: n is larger than L.
        """
        if n > self.max_sequence_length:
            raise ValueError(
                f"`max_sequence_length` must be at least the length of a sequence, got {self.max_sequence_length} for "
                f"{n} tokens. Apply ALiBi again with a larger value; trained weights do not change."
            )
        q, dtype, device = query.shape[2], query.dtype, query.device
        if mask is None:
            if q == 1:
                return self._line(dtype, device)[..., -n:]
            return self._square(n, dtype, device, causal)[..., n - q :, :]
        if _is_captured():  # a compiler merges the equal computations of the layers
            return self._masked(mask, q, n, dtype)
        # All layers get the same mask object: cache its sum with the bias as an attribute of the mask.
        key = (self, q, n, dtype, None if mask.is_inference() else mask._version)
        cached = getattr(mask, _CACHED, None)
        if cached is None or cached[0] != key:
            cached = key, self._masked(mask, q, n, dtype)
            setattr(mask, _CACHED, cached)
        result: torch.Tensor = cached[1]
        return result

    def _masked(self, mask: torch.Tensor, q: int, n: int, dtype: torch.dtype) -> torch.Tensor:
        lowest = torch.finfo(dtype).min
        if q == n and mask.dtype is torch.bool:
            return torch.where(mask, self._square(n, dtype, mask.device, False), lowest)
        full = torch.promote_types(dtype, torch.float32)
        if q == n:
            bias = self._square(n, full, mask.device, False)
        else:
            bias = self._line(full, mask.device)[..., -n:]
        hidden = torch.finfo(full).min
        total = torch.where(mask, bias, hidden) if mask.dtype is torch.bool else bias + mask
        if q != n:
            # A cache of fixed size has empty positions after the query, and a bias relative to its end may be too large
            # to be exact in 16 bits. Make the bias of the nearest visible key 0; the softmax does not change.
            total = total - total.amax(dim=-1, keepdim=True)
        return total.clamp_min(lowest).to(dtype)

    def _square(self, n: int, dtype: torch.dtype, device: torch.device, causal: bool) -> torch.Tensor:
        """Return the bias of n queries and n keys, shape (1, H, n, n)."""

        def compute(size: int) -> torch.Tensor:
            positions = torch.arange(size, device=device)
            distance = positions[:, None] - positions
            table = self._slopes(device) * -distance.abs()
            if causal:
                table = torch.where(distance >= 0, table, torch.finfo(dtype).min)
            return table.to(dtype)

        return self._cached((dtype, device, causal), n, compute)[..., :n, :n]

    def _line(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the bias of one query after L keys, shape (1, H, 1, L)."""

        def compute(size: int) -> torch.Tensor:
            return (self._slopes(device) * torch.arange(1 - size, 1, device=device)).to(dtype)

        return self._cached((dtype, device), self.max_sequence_length, compute)

    def _cached(self, key: tuple[Any, ...], n: int, compute: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Return a table for at least n positions, from the cache if a cached one is large enough."""
        if _is_captured():
            return compute(n)
        table = self._tables.get(key)
        if table is None or table.shape[-1] < n:
            with torch.inference_mode(False):  # training will also use it
                table = compute(min(-(-n // _ROUND) * _ROUND, self.max_sequence_length))
            if type(table) is torch.Tensor:  # a FakeTensor has no values
                self._tables[key] = table
        return table

    def _slopes(self, device: torch.device) -> torch.Tensor:
        """Return `get_alibi_head_slopes`, computed on the device, shape (1, H, 1, 1)."""
        n = 1 << (self.n_heads.bit_length() - 1)
        between = torch.arange(self.n_heads - n, device=device) + 0.5
        exponents = torch.cat([torch.arange(1, n + 1, device=device), between])
        return torch.exp2(exponents.float() * (-8 / n)).view(1, -1, 1, 1)


def _is_captured() -> bool:
    """Return True while a graph is captured: its tensors must not be cached."""
    return torch.compiler.is_compiling() or _is_tracing()
