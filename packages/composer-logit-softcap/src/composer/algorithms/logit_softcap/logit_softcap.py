"""`softcap_logits`, `apply_logit_softcap` and the algorithm `LogitSoftcap`. Symbols: logits x, cap s.

Attention layers of `transformers` look up a function by name, `config._attn_implementation`, in a public registry,
`ALL_ATTENTION_FUNCTIONS`. Each capped layer gets a copy of its configuration with the name of `_attend`, which caps the
scores before the mask.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from composer.algorithms.warnings import warn_no_effect
from composer.core import (
    CHANGES_LAYERS,
    REPLACES_ATTENTION,
    REPLACES_BLOCKS,
    REPLACES_LOSS,
    Algorithm,
    Event,
    Placement,
)
from composer.utils import MissingConditionalImportError, check_finite, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_NAME = "composer_logit_softcap"
_CHILD = "logit_softcap"  # of a capped layer
_SUPPORTED = ("eager", "sdpa")  # their masks have a value for each query and key


def softcap_logits(logits: torch.Tensor, cap: float = 30.0) -> torch.Tensor:
    """Bound logits smoothly: `s * tanh(x / s)`, computed in float32.

    The slope is 1 at 0, so that small logits hardly change, and results are in [-s, s].

    Args:
        logits: Floating; any shape. Not modified.
        cap: The bound s, above 0.

    Returns:
        The same shape and dtype.

    Raises:
        ValueError: `cap` is not above 0.

    Example:
        >>> softcap_logits(torch.tensor([0.1, 3.0, 1000.0]), cap=3.0)
        tensor([0.1000, 2.2848, 3.0000])

    Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", arXiv:2408.00118, section 2.
    Differs: none.
    """
    _check_cap("cap", cap)
    full = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (cap * torch.tanh(full / cap)).to(logits.dtype)


class Softcap(nn.Module):
    """The cap of a head or an attention layer, a child of it without parameters; see `softcap_logits`.

    Args:
        cap: The bound s.
        config: The original configuration of an attention layer; None for a head.
    """

    def __init__(self, cap: float, config: Any = None) -> None:
        super().__init__()
        self.cap, self.config = cap, config

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if self.config is not None:
            _register_attention()  # a pickled model may be loaded in a process that never capped one

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the capped logits."""
        return softcap_logits(logits, self.cap)

    def composer_plain_state(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Raise ValueError: for `composer.export.plain_state_dict`."""
        raise ValueError(f"it caps at {self.cap}. `model.state_dict()` fits the plain model, which does not cap")

    def extra_repr(self) -> str:
        """Return the cap."""
        return f"{self.cap}"


def _cap_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Cap the output of a head, as its forward hook."""
    capped: torch.Tensor = module.get_submodule(_CHILD)(output)
    return capped


def apply_logit_softcap(
    model: nn.Module, final: float | None = 30.0, attention: float | None = None, *, head_name: str | None = None
) -> None:
    """Bound the logits of a model, or the scores of its attention, or both, in place; see `softcap_logits`.

    Parameters and their names do not change. A second call changes the caps that it is given.

    Args:
        model: The model.
        final: The cap of the output of the head. None: it is not capped.
        attention: The cap of the scaled scores of attention, before the mask. None: they are not capped. Otherwise the
            model must have attention layers of `transformers` such as those of GPT-2, Llama and Qwen, with eager or
            sdpa attention. They then compute all scores in float32.
        head_name: The name of the head, a module of the model that returns the logits; may contain dots. None: the
            output embeddings of the model of `transformers`, `get_output_embeddings()`.

    Warns:
        NoEffectWarning: A cap is requested for the head or for attention, but the model has none; it is not capped.

    Raises:
        ValueError: A cap is not above 0, both are None, or the model caps the same logits already, as Gemma 2 does; or
            the attention is neither eager nor sdpa, or has other terms in its softmax.
        AttributeError: The model has no module `head_name`.
        MissingConditionalImportError: `attention` is given and `transformers` is not installed.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 10))
        >>> apply_logit_softcap(model, final=0.01, head_name="1")
        >>> bool((model(torch.randn(8, 4)).abs() <= 0.01).all())
        True

    Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", arXiv:2408.00118, section 2.
    Differs: none.
    """
    _check_caps(final, attention)
    _check_uncapped(model, final, attention)
    head = None if final is None else _find_head(model, head_name)
    layers = [] if attention is None else list(_find_attention(model))
    for layer in layers:
        _check_layer(layer)
    if final is not None and head is not None:
        _cap_head(head, final)
    if attention is not None and layers:
        _register_attention()
        for layer in layers:
            _cap_layer(layer, attention)
    missing = [
        *(["head, whose name can be passed as `head_name`"] if final is not None and head is None else []),
        *(["attention layer of `transformers`"] if attention is not None and not layers else []),
    ]
    if missing:
        warn_no_effect(f"`apply_logit_softcap` did not cap everything: the model has no {', and no '.join(missing)}.")


def _check_uncapped(model: nn.Module, final: float | None, attention: float | None) -> None:
    requests = (("final", final, "final_logit_softcapping"), ("attention", attention, "attn_logit_softcapping"))
    for module in model.modules():
        for argument, cap, option in requests:
            own = getattr(getattr(module, "config", None), option, None)
            if cap is not None and own is not None:
                raise ValueError(
                    f"`{argument}` must be None for `{type(module).__name__}`, which has `{option}={own}` in its "
                    f"configuration. Change the configuration instead."
                )


def _find_head(model: nn.Module, head_name: str | None) -> nn.Module | None:
    if head_name is not None:
        try:
            return model.get_submodule(head_name)
        except AttributeError as error:
            similar = [repr(name) for name, _ in model.named_modules() if name.endswith(f".{head_name}")]
            raise AttributeError(
                f"`head_name` must be a name in `model.named_modules()`, got {head_name!r}: {error}."
                + (f" Use {' or '.join(similar)}." if similar else "")
            ) from None
    for module in model.modules():
        get_head = getattr(module, "get_output_embeddings", None)
        head = get_head() if callable(get_head) else None
        if isinstance(head, nn.Module):
            return head
    return None


def _cap_head(head: nn.Module, cap: float) -> None:
    if isinstance(child := head._modules.get(_CHILD), Softcap):
        child.cap = cap
    else:
        head.add_module(_CHILD, Softcap(cap))
        head.register_forward_hook(_cap_output)


def _find_attention(model: nn.Module) -> Iterator[Any]:
    """Yield the layers that look up their attention function in the registry of `transformers`."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_attn_implementation") and _looks_up_attention(type(module)):
            yield module


def _looks_up_attention(kind: type) -> bool:
    """Return True if `forward`, including `super().forward`, uses the registry."""
    for base in kind.__mro__:
        code = getattr(inspect.unwrap(vars(base).get("forward", kind)), "__code__", None)
        if code is not None:
            return "ALL_ATTENTION_FUNCTIONS" in code.co_names or (
                "super" in code.co_names and any(map(_looks_up_attention, base.__bases__))
            )
    return False


def _check_layer(layer: Any) -> None:
    child = layer._modules.get(_CHILD)
    config = child.config if isinstance(child, Softcap) else layer.config
    name = config._attn_implementation or "eager"
    if name not in _SUPPORTED:
        raise ValueError(
            f"`attention` needs a model with attention {' or '.join(map(repr, _SUPPORTED))}, got {name!r}. Build the "
            f"model with `attn_implementation='sdpa'`."
        )
    if getattr(layer, "sinks", None) is not None:
        raise ValueError(
            f"`attention` does not support the attention sinks of `{type(layer).__name__}`. Use only `final`."
        )


def _cap_layer(layer: Any, cap: float) -> None:
    if isinstance(child := layer._modules.get(_CHILD), Softcap):
        child.cap = cap
        return
    layer.add_module(_CHILD, Softcap(cap, layer.config))
    layer.config = copy.copy(layer.config)
    layer.config._attn_implementation = _NAME


def _register_attention() -> None:
    try:
        registry = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "transformers":
            raise
        raise MissingConditionalImportError(extra_deps_group="nlp", conda_package="transformers") from error
    registry.register(_NAME, _attend)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with capped scores: `softmax(softcap(scaling * q k^T) + mask) v`.

    The signature is that of the attention functions of `transformers`.

    Args:
        module: The layer.
        query: Shape (B, H, q, d).
        key: Shape (B, H or fewer, n, d), n at least q; cached keys come first.
        value: Shape (B, H or fewer, n, d).
        attention_mask: Shape (B or 1, H or 1, q, n): boolean, False for hidden keys, or additive. None: a causal mask
            if the layer is causal, otherwise no mask.
        dropout: Dropout probability of the attention weights.
        scaling: Factor of the scores. None: `1 / sqrt(d)`.
        is_causal: Overrides `module.is_causal`.
        **kwargs: Other arguments that the model passes to attention functions.

    Returns:
        The outputs, shape (B, q, H, d), and the weights, shape (B, H, q, n).
    """
    layer: Any = module
    causal = getattr(layer, "is_causal", True) if is_causal is None else is_causal
    q, n = query.shape[2], key.shape[2]
    if attention_mask is None and causal and 1 < q < n:
        key, value, n = key[:, :, :q], value[:, :, :q], q  # an empty cache of fixed size
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = layer.logit_softcap(scores.to(torch.promote_types(scores.dtype, torch.float32)))
    if attention_mask is None and causal and q > 1:
        attention_mask = torch.ones(q, n, dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None:
        if attention_mask.dtype is torch.bool:
            scores = torch.where(attention_mask, scores, torch.finfo(scores.dtype).min)
        else:
            scores = scores + attention_mask
    weights = F.dropout(F.softmax(scores, dim=-1).to(value.dtype), dropout)  # 0 in evaluation
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class LogitSoftcap(Algorithm):
    """Bounds the logits of a model, or the scores of its attention, so that training at high learning rates is stable.

    At INIT the head, and attention layers if requested, are changed; see `apply_logit_softcap`. Each logit is capped
    by itself, so microbatches equal one batch. The caps stay in evaluation and in generation.

    **Events** INIT. **Reads** nothing. **Writes** hooks, children and configurations of modules of `state.model`.
    **Cost** a tanh of the logits in float32. With `attention` the scores, shape (N, heads, length, length), are
    computed and stored in float32 in each layer: fused attention kernels cannot be used. **Compilation**
    static: no shape depends on time or data.

    **When not to use it** the model is pretrained without caps; or `attention` with long sequences.

    Args:
        final: The cap of the output of the head; 30 in Gemma 2. None: it is not capped.
        attention: The cap of the scores of attention; 50 in Gemma 2. None: they are not capped.
        head_name: The name of the head, a module of the model that returns the logits; may contain dots. None: the
            output embeddings of a model of `transformers`.

    Raises:
        ValueError: A cap is not above 0, or both are None; at INIT, see `apply_logit_softcap`.

    Example:
        >>> LogitSoftcap(attention=50.0)
        LogitSoftcap(final=30.0,attention=50.0,head_name=None)

    Source: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", arXiv:2408.00118, section 2.
    Differs: none.
    """

    events = frozenset({Event.INIT})

    def __init__(
        self, final: float | None = 30.0, attention: float | None = None, head_name: str | None = None
    ) -> None:
        _check_caps(final, attention)
        self.final = None if final is None else plain_number(final)
        self.attention = None if attention is None else plain_number(attention)
        self.head_name = head_name

    @property
    def placement(self) -> Placement:  # type: ignore[override]
        """The effects: with `attention`, the attention of the model is replaced."""
        after = {REPLACES_BLOCKS, REPLACES_ATTENTION}
        excludes = set() if self.final is None else {REPLACES_LOSS}  # which does not call the head
        if self.attention is None:
            return Placement(provides={CHANGES_LAYERS}, after=after, excludes=excludes)
        return Placement(
            provides={REPLACES_ATTENTION}, after={REPLACES_BLOCKS}, excludes={*excludes, REPLACES_ATTENTION}
        )

    @staticmethod
    def required_on_load() -> bool:
        """Return True: trained weights compute something else without the caps."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Cap the logits."""
        apply_logit_softcap(state.model, self.final, self.attention, head_name=self.head_name)


def _check_caps(final: float | None, attention: float | None) -> None:
    if final is None and attention is None:
        raise ValueError("`final` or `attention` must be a cap, got None for both. Leave `LogitSoftcap` out instead.")
    for name, cap in (("final", final), ("attention", attention)):
        if cap is not None:
            _check_cap(name, cap)


def _check_cap(name: str, cap: float) -> None:
    check_finite(**{name: cap})
    if cap <= 0:
        raise ValueError(f"`{name}` must be above 0, got {cap!r}. Use for example 30.0; a large cap changes little.")
