"""`apply_qk_norm` and the algorithm `QKNorm`. Symbols: query q, key k, head dimension d, gain g."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from composer.algorithms.warnings import warn_no_effect
from composer.core import ADDS_NORMS, REPLACES_ATTENTION, REPLACES_BLOCKS, Algorithm, Event, Placement
from composer.utils import check_finite, check_integers, module_surgery, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_KINDS = ("rms", "layer")
_BY_HEAD = "query_key_value"
# The names of the projections of queries and keys. The same name twice: one projection of queries, keys and values, in
# thirds, or for `_BY_HEAD` with those of each head side by side.
_LAYOUTS = (("q_proj", "k_proj"), ("c_attn", "c_attn"), (_BY_HEAD, _BY_HEAD))


class HeadNorm(nn.Module):
    """Normalization of each attention head, with a gain that all heads share.

    With kind "rms": `g * x / sqrt(mean(x^2) + eps)`; with "layer" the mean of x is subtracted first. Means are over the
    d values of a head, in float32.

    Args:
        head_dim: d.
        kind: "rms" or "layer".
        eps: Added to the mean square.

    Attributes:
        weight: The gain g, shape (d,), initially 1.

    Example:
        >>> HeadNorm(2)(torch.tensor([[3.0, 3.0, 0.0, -5.0]]))
        tensor([[ 1.0000,  1.0000,  0.0000, -1.4142]], grad_fn=<ViewBackward0>)
    """

    def __init__(self, head_dim: int, kind: str = "rms", eps: float = 1e-6) -> None:
        super().__init__()
        self.head_dim, self.kind, self.eps = head_dim, kind, eps
        self.weight = nn.Parameter(torch.ones(head_dim))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize heads.

        Args:
            input: Shape (..., heads * d).

        Returns:
            The same shape and dtype.
        """
        x = input.reshape(*input.shape[:-1], -1, self.head_dim)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * x).to(input.dtype).reshape(input.shape)

    def composer_plain_state(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Raise ValueError: for `composer.export.plain_state_dict`."""
        raise ValueError("it normalizes queries or keys, which the attention layer without it does not")

    def extra_repr(self) -> str:
        """Return the arguments."""
        return f"{self.head_dim}, kind={self.kind!r}, eps={self.eps}"


class _NormalizeOutput:
    """A forward hook that normalizes the output of a projection, or the first parts of it.

    An object rather than a function: copies of the model get a hook with their own norms.
    """

    def __init__(self, norms: Sequence[HeadNorm], num_parts: int, by_head: bool = False) -> None:
        self.norms, self.num_parts, self.by_head = list(norms), num_parts, by_head

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if self.num_parts == 1:
            normalized: torch.Tensor = self.norms[0](output)
            return normalized
        if self.by_head:
            by_head: Any = output.unflatten(-1, (-1, self.num_parts, self.norms[0].head_dim))  # type: ignore[no-untyped-call]
            query, key, *others = by_head.unbind(-2)
            return torch.stack([self.norms[0](query), self.norms[1](key), *others], -2).flatten(-3)
        parts = output.chunk(self.num_parts, dim=-1)
        count = len(self.norms)
        return torch.cat([*(norm(part) for norm, part in zip(self.norms, parts, strict=False)), *parts[count:]], -1)


def apply_qk_norm(
    model: nn.Module,
    norm: str = "rms",
    eps: float = 1e-6,
    *,
    query_name: str | None = None,
    key_name: str | None = None,
    head_dim: int | None = None,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> int:
    """Normalize the queries and keys of each attention head of a model, in place.

    Each attention layer gets children `q_norm` and `k_norm`. Hooks apply them to the outputs of its projections: before
    rotary embeddings, the cache and grouped heads. The scale `1 / sqrt(d)` of the scores stays. With gains of 1, no
    score is larger than `sqrt(d)`.

    Attention layers are the modules with children `q_proj` and `k_proj` (Llama, Qwen, Mistral and most others of
    `transformers`), `c_attn` (GPT-2) or `query_key_value` with as many heads of keys as of queries (GPT-NeoX, Bloom),
    or with the given names, such as `qkv` for timm. Cross-attention of GPT-2, and layers that have a `q_norm` already,
    are not changed. An `nn.Identity` of that name is replaced; the layer calls its norms itself.

    Args:
        model: The model.
        norm: "rms" or "layer"; see `HeadNorm`.
        eps: Added to the mean square.
        query_name: The name of the projection of queries in an attention layer. None: the names above.
        key_name: The name of the projection of keys. If it is `query_name`, the output of the projection is the
            queries of all heads, then the keys, then the values, of equal sizes; for the name `query_key_value` it is
            query, key and value of the first head, then those of the second, and so on.
        head_dim: d. None: the attribute `head_dim` or `head_size` of an attention layer.
        optimizers: The optimizer of the model, if there is one. The gains join the group of other parameters with one
            dimension, which usually has no weight decay; see `update_params_in_optimizer`.

    Returns:
        The number of attention layers with norms of this function.

    Warns:
        NoEffectWarning: The model has no such layer.

    Raises:
        ValueError: `norm` or `eps` is invalid, only one name is given, or d does not divide a projection's outputs.

    Example:
        >>> layer = nn.ModuleDict({"query": nn.Linear(8, 8), "key": nn.Linear(8, 4)})
        >>> apply_qk_norm(layer, query_name="query", key_name="key", head_dim=4)
        1
        >>> layer["query"](torch.randn(5, 8)).square().mean().round(decimals=3)
        tensor(1., grad_fn=<RoundBackward1>)

    Source: Henry et al., "Query-Key Normalization for Transformers", arXiv:2010.04245; Dehghani et al., "Scaling Vision
        Transformers to 22 Billion Parameters", arXiv:2302.05442, section 2.
    Differs: from Henry et al.: a gain for each of the d values instead of a temperature.
    """
    _check(norm, eps, query_name, key_name, head_dim)
    layouts = _LAYOUTS if query_name is None or key_name is None else ((query_name, key_name),)
    found = list(_find_layers(model, layouts))
    plans = [(layer, names, _head_dim(layer, names, head_dim)) for layer, names in found if not _is_normalized(layer)]
    for layer, (query, key), size in plans:
        _add_norms(layer, query, key, [HeadNorm(size, norm, eps) for _ in range(2)], optimizers)
    count = sum(isinstance(layer._modules.get("q_norm"), HeadNorm) for layer, _ in found)
    if not count:
        warn_no_effect(
            f"`apply_qk_norm` changed nothing: no layer of the model has projections named "
            f"{' or '.join(f'`{query}` and `{key}`' for query, key in layouts)} and no `q_norm`. Pass their names as "
            f"`query_name` and `key_name`."
        )
    return count


def _find_layers(model: nn.Module, layouts: Sequence[tuple[str, str]]) -> Iterator[tuple[nn.Module, tuple[str, str]]]:
    for layer in model.modules():
        for names in layouts:
            has_both = all(isinstance(layer._modules.get(name), nn.Module) for name in names)
            if has_both and not (names[0] == names[1] and getattr(layer, "is_cross_attention", False)):
                if names[0] == _BY_HEAD and not _has_all_heads(layer.get_submodule(_BY_HEAD)):
                    continue
                yield layer, names
                break


def _has_all_heads(projection: Any) -> bool:
    """Return False if queries share keys, as in most sizes of Falcon: their outputs are laid out in another way."""
    return getattr(projection, "out_features", None) == 3 * getattr(projection, "in_features", 0)


def _is_normalized(layer: nn.Module) -> bool:
    return not isinstance(layer._modules.get("q_norm"), (nn.Identity, type(None)))


def _head_dim(layer: nn.Module, names: tuple[str, str], head_dim: int | None) -> int:
    """Return d of a layer, checked against the outputs of its projections."""
    size = getattr(layer, "head_dim", getattr(layer, "head_size", None)) if head_dim is None else head_dim
    if not isinstance(size, int):
        raise ValueError(
            f"`head_dim` must be given for layers without an attribute `head_dim`, such as `{type(layer).__name__}`. "
            f"It is the number of values of a head."
        )
    parts = 3 if names[0] == names[1] else 1
    for name in names:
        projection: Any = layer._modules[name]
        outputs = getattr(projection, "out_features", None) or getattr(projection, "nf", None)  # `nf` of `Conv1D`
        if isinstance(outputs, int) and outputs % (parts * size):
            raise ValueError(
                f"`head_dim` must divide the outputs of `{name}`{' / 3' if parts == 3 else ''}, got {size} for "
                f"{outputs} outputs of a `{type(layer).__name__}`. Pass the number of values of a head, and different "
                f"names for separate projections."
            )
    return size


def _add_norms(layer: nn.Module, query: str, key: str, norms: list[HeadNorm], optimizers: Any) -> None:
    projections = [layer.get_submodule(name) for name in dict.fromkeys((query, key))]
    relatives = [parameter for projection in projections for parameter in projection.parameters()]
    calls_norms = isinstance(layer._modules.get("q_norm"), nn.Identity)  # placeholders of norms, as in timm
    for name, norm in zip(("q_norm", "k_norm"), norms, strict=True):
        like = next((p for p in relatives if p.is_floating_point()), None)
        if like is not None:
            norm.to(like.device, like.dtype)
        norm.train(layer.training)
        layer.add_module(name, norm)
    if not calls_norms and len(projections) == 1:
        projections[0].register_forward_hook(_NormalizeOutput(norms, 3, by_head=query == _BY_HEAD))
    elif not calls_norms:
        for projection, norm in zip(projections, norms, strict=True):
            projection.register_forward_hook(_NormalizeOutput([norm], 1))
    if optimizers:
        module_surgery.update_params_in_optimizer(relatives, [*relatives, *(n.weight for n in norms)], optimizers)


class QKNorm(Algorithm):
    """Normalizes the queries and keys of attention, so that its scores stay bounded, also at high learning rates.

    At INIT each attention layer of the model gets norms; see `apply_qk_norm`. They act on each head by itself, so
    microbatches equal one batch.

    **Events** INIT. **Reads** nothing. **Writes** children of the attention layers of `state.model`; the parameter
    groups of the optimizers. **Cost** 2 d parameters per layer, and a normalization of queries and keys in float32 in
    each forward pass. **Compilation** static: no shape depends on time or data.

    **Logs** the hyperparameter `qk_norm/num_layers`, once.

    **When not to use it** the model is pretrained without it: its scores have other scales.

    Args:
        norm: "rms" or "layer"; see `HeadNorm`.
        eps: Added to the mean square.
        query_name: The name of the projection of queries in an attention layer; see `apply_qk_norm`.
        key_name: The name of the projection of keys.
        head_dim: The number of values of a head. None: the attribute `head_dim` of an attention layer.

    Raises:
        ValueError: An argument is invalid; see `apply_qk_norm`.

    Example:
        >>> QKNorm()
        QKNorm(norm='rms',eps=1e-06,query_name=None,key_name=None,head_dim=None)

    Source: Henry et al., "Query-Key Normalization for Transformers", arXiv:2010.04245; Dehghani et al., "Scaling Vision
        Transformers to 22 Billion Parameters", arXiv:2302.05442, section 2.
    Differs: from Henry et al.: a gain for each of the d values instead of a temperature.
    """

    events = frozenset({Event.INIT})
    placement = Placement(provides={ADDS_NORMS}, after={REPLACES_BLOCKS, REPLACES_ATTENTION})

    def __init__(
        self,
        norm: str = "rms",
        eps: float = 1e-6,
        query_name: str | None = None,
        key_name: str | None = None,
        head_dim: int | None = None,
    ) -> None:
        _check(norm, eps, query_name, key_name, head_dim)
        self.norm, self.eps = norm, plain_number(eps)
        self.query_name, self.key_name = query_name, key_name
        self.head_dim = None if head_dim is None else plain_number(head_dim)

    @staticmethod
    def required_on_load() -> bool:
        """Return True: a checkpoint contains the gains."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Add the norms and log the number of layers."""
        count = apply_qk_norm(
            state.model,
            self.norm,
            self.eps,
            query_name=self.query_name,
            key_name=self.key_name,
            head_dim=self.head_dim,
            optimizers=state.optimizers,
        )
        logger.log_hyperparameters({"qk_norm/num_layers": count})


def _check(norm: str, eps: float, query_name: str | None, key_name: str | None, head_dim: int | None) -> None:
    check_finite("Use for example 1e-6.", eps=eps, least=0)
    if norm not in _KINDS:
        raise ValueError(f"`norm` must be 'rms' or 'layer', got {norm!r}. Use 'rms' as most language models do.")
    if (query_name is None) != (key_name is None):
        raise ValueError(
            f"`query_name` and `key_name` must be given together, got {query_name!r} and {key_name!r}. Pass the same "
            f"name for both if one projection has queries, keys and values."
        )
    if head_dim is not None:
        check_integers("It is the number of values of a head.", head_dim=head_dim, least=1)
