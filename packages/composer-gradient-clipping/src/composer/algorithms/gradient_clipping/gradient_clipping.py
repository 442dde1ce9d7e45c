"""`apply_gradient_clipping` and the algorithm `GradientClipping`. Symbols: gradient g, weight w, threshold t."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import CLIPS_GRADIENTS, Algorithm, Event, Placement
from composer.utils import check_finite, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_TYPES = ("norm", "value", "adaptive")
_EPS = 1e-3  # value of the paper


def apply_gradient_clipping(
    model: torch.nn.Module | torch.Tensor | Iterable[torch.Tensor],
    clipping_type: str,
    clipping_threshold: float,
    fsdp_enabled: bool = False,
    *,
    eps: float = _EPS,
) -> None:
    """Limit the gradients of a model, in place. Nothing is read back from the device.

    With the threshold t: "norm" scales all gradients by `min(1, t / norm)`, with the norm over all of them; "value"
    clamps each element to [-t, t], of complex ones both parts; "adaptive" scales each unit, a row of a weight or a
    whole vector, by `min(1, t * max(norm of the weights, eps) / norm of the gradients)`. Sparse gradients stay sparse.

    Args:
        model: The model after its backward pass, or its parameters. Parameters without a gradient are skipped.
        clipping_type: "norm", "value" or "adaptive".
        clipping_threshold: Positive. For "adaptive" a fraction of the norm of the weights.
        fsdp_enabled: True if the model is wrapped in `FullyShardedDataParallel`, which computes the norm over all
            ranks. "value" then limits the largest element by scaling. Not needed for `fully_shard`.
        eps: Lower bound of the norm of the weights of a unit, for "adaptive". With 0, weights that are zero stay zero.

    Raises:
        ValueError: `clipping_type` is unknown, a number is out of range, or "adaptive" is used with `fsdp_enabled`.
        NotImplementedError: "adaptive" is used and a sparse gradient does not consist of whole rows.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> weight.grad = torch.tensor([6.0, 8.0])
        >>> apply_gradient_clipping([weight], "norm", 5.0)
        >>> weight.grad.norm().round(decimals=3)
        tensor(5.)

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training Recurrent Neural Networks", arXiv:1211.5063,
        section 3.2 (norm); Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization",
        arXiv:2102.06171, section 4.1, eq. 3 (adaptive).
    Differs: "adaptive" clips the last layer too, unless its parameters are not passed.
    """
    _check(clipping_type, clipping_threshold, eps)
    if fsdp_enabled and isinstance(model, torch.nn.Module):
        _clip_wrapped(model, clipping_type, clipping_threshold)
        return
    if isinstance(model, Iterator):  # iterated more than once below
        model = list(model)
    parameters = _parameters(model)
    special = _find_special(model)
    if clipping_type == "norm":
        if special:
            parameters = [_dense_part(weight) if _is_sparse(weight) else weight for weight in _each(parameters)]
        torch.nn.utils.clip_grad_norm_(parameters, max_norm=clipping_threshold)
    elif clipping_type == "value":
        _clip_special_values(special, clipping_threshold)
        if special:
            parameters = [weight for weight in _each(parameters) if not _is_special(weight)]
        try:
            torch.nn.utils.clip_grad_value_(parameters, clip_value=clipping_threshold)
        except RuntimeError:  # raised by torch if there is no gradient at all
            remaining = _parameters(model) if not special else parameters
            if any(weight.grad is not None for weight in _each(remaining)):
                raise
    elif eps == _EPS:
        _apply_agc(parameters, clipping_threshold=clipping_threshold)
    else:
        _apply_agc(parameters, clipping_threshold=clipping_threshold, eps=eps)


def apply_agc(model: torch.nn.Module | Iterable[torch.Tensor], clipping_threshold: float = 0.01) -> None:
    """Call `apply_gradient_clipping(model, "adaptive", clipping_threshold)`, under its earlier name."""
    apply_gradient_clipping(model, "adaptive", clipping_threshold)


class GradientClipping(Algorithm):
    """Limits gradients before the optimizer uses them.

    `apply_gradient_clipping` runs at AFTER_TRAIN_BATCH, when the gradients of all microbatches are accumulated and
    unscaled, so microbatches equal one batch.

    **Events** INIT (a warning), AFTER_TRAIN_BATCH. **Reads** weights with "adaptive". **Writes** gradients. **Cost**
    one pass over the gradients for their norms and one to scale them, with "adaptive" also one over the weights; two
    passes with "value".
    **Compilation** static: no shape depends on time or data; nothing waits for the device.

    Args:
        clipping_type: "norm", "value" or "adaptive".
        clipping_threshold: The limit of the norm or of each element; for "adaptive", of the norm as a fraction of the
            norm of the weights. Positive.
        eps: Lower bound of the norm of the weights of a unit, for "adaptive". With 0, weights that are zero stay zero.

    Raises:
        ValueError: `clipping_type` is unknown, or a number is out of range.

    Warns:
        NotIntendedUseWarning: At INIT, with "adaptive" and `eps=0`, if parameters are zero: they would stay zero.

    Example:
        >>> GradientClipping("norm", clipping_threshold=1.0)
        GradientClipping(clipping_type='norm',clipping_threshold=1.0,eps=0.001)

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training Recurrent Neural Networks", arXiv:1211.5063,
        section 3.2 (norm); Brock et al., "High-Performance Large-Scale Image Recognition Without Normalization",
        arXiv:2102.06171, section 4.1, eq. 3 (adaptive).
    Differs: "adaptive" clips the last layer too.
    """

    events = frozenset({Event.INIT, Event.AFTER_TRAIN_BATCH})
    placement = Placement(provides={CLIPS_GRADIENTS})

    def __init__(self, clipping_type: str, clipping_threshold: float, *, eps: float = _EPS) -> None:
        _check(clipping_type, clipping_threshold, eps)
        self.clipping_type = clipping_type
        self.clipping_threshold, self.eps = plain_number(clipping_threshold), plain_number(eps)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Clip the gradients; at INIT, warn about zero weights."""
        if event is Event.AFTER_TRAIN_BATCH:
            apply_gradient_clipping(
                state.model,
                clipping_type=self.clipping_type,
                clipping_threshold=self.clipping_threshold,
                fsdp_enabled=state.fsdp_config_version == 1,
                **({} if self.eps == _EPS else {"eps": self.eps}),
            )
        elif self.clipping_type == "adaptive" and not self.eps:
            _warn_of_zeros(state.model)


def _check(clipping_type: str, clipping_threshold: float, eps: float) -> None:
    if clipping_type not in _TYPES:
        raise ValueError(
            f"`clipping_type` must be 'norm', 'value' or 'adaptive', got {clipping_type!r}. 'norm' keeps the direction "
            f"of the gradient."
        )
    if clipping_threshold != math.inf:  # allowed: clips nothing, used to log the norm
        hint = "It would leave no gradient. Use for example 1.0 for 'norm'."
        check_finite(hint, clipping_threshold=clipping_threshold, above=0)
    check_finite("Use `eps=1e-3`, as the paper does.", eps=eps, least=0)


def _parameters(model: Any) -> Any:
    """Return the parameters of a model; return a tensor or several tensors unchanged."""
    return model.parameters() if hasattr(model, "parameters") else model


def _each(parameters: torch.Tensor | Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else parameters


def _warn_of_zeros(model: torch.nn.Module) -> None:
    zeros = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and not weight.is_meta and not _unitwise_norm(weight.detach()).any()
    ]
    if zeros:
        warnings.warn(
            f"`GradientClipping('adaptive', ...)` keeps parameters that are zero at zero; {len(zeros)} are, such as "
            f"{zeros[0]!r}. Use `eps=1e-3`, the default, to let them train.",
            NotIntendedUseWarning,
            stacklevel=2,
        )


def _clip_wrapped(model: torch.nn.Module, clipping_type: str, clipping_threshold: float) -> None:
    """Clip with the method of `FullyShardedDataParallel`, whose parameters are flat shards without rows."""
    if clipping_type == "adaptive":
        raise ValueError(
            "`clipping_type` must be 'norm' or 'value' for a model in `FullyShardedDataParallel`, got 'adaptive': the "
            "rows of a weight are split across its shards. Use `fully_shard` instead."
        )
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:  # not imported, so the model is not wrapped
        return
    norm_type = 2.0 if clipping_type == "norm" else math.inf
    for module in model.modules():
        if isinstance(module, fsdp.FullyShardedDataParallel) and module.check_is_root():
            module.clip_grad_norm_(max_norm=clipping_threshold, norm_type=norm_type)


def _find_special(model: Any) -> list[torch.Tensor]:
    """Return the parameters whose gradients torch cannot clip by value: sparse and complex ones."""
    parameters = _parameters(model)
    return [w for w in _each(parameters) if _is_special(w)] if isinstance(parameters, Iterable) else []


def _is_special(weight: torch.Tensor) -> bool:
    return weight.grad is not None and (_is_sparse(weight) or weight.is_complex())


@torch.no_grad()
def _clip_special_values(weights: list[torch.Tensor], clipping_threshold: float) -> None:
    for weight in weights:
        values = _values_of(weight)
        values = torch.view_as_real(values) if values.is_complex() else values
        values.clamp_(-clipping_threshold, clipping_threshold)


def _is_sparse(weight: torch.Tensor) -> bool:
    return weight.grad is not None and weight.grad.layout is torch.sparse_coo


def _values_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the gradient, to be changed in place; for a sparse one its values, with duplicate entries summed."""
    assert weight.grad is not None
    if not _is_sparse(weight):
        return weight.grad
    weight.grad = weight.grad.coalesce()
    return weight.grad._values()


def _dense_part(weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose gradient holds the values of a sparse one: not every torch has norms of sparse tensors."""
    values = _values_of(weight)
    part = values.detach()
    part.grad = values
    return part


def _units_of(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and its gradient; for a sparse gradient, only the rows that it has.

    Raises:
        NotImplementedError: The gradient is sparse within rows.
    """
    grad = _values_of(weight)
    if not _is_sparse(weight) or weight.dim() == 1:
        return weight, grad
    assert weight.grad is not None
    if weight.grad.sparse_dim() != 1 or weight.layout is not torch.strided:
        raise NotImplementedError(
            f"'adaptive' clips gradients that are dense or consist of whole rows, such as those of "
            f"`torch.nn.Embedding(..., sparse=True)`, but the gradient of a parameter of shape "
            f"{tuple(weight.shape)} is sparse within rows. Use 'norm' or 'value'."
        )
    return weight.index_select(0, weight.grad._indices()[0]), grad


@torch.no_grad()
def _apply_agc(parameters: torch.Tensor | Iterable[torch.Tensor], clipping_threshold: float, eps: float = _EPS) -> None:
    """Clip adaptively. The factors of all units are computed at once; only norms and products are per tensor."""
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for weight in _each(parameters):
        if weight.grad is None:
            continue
        if hasattr(weight, "to_local"):  # sharded: torch combines the norms of all ranks
            weight.grad.mul_(_get_clipped_gradient_coeff(weight, weight.grad, clipping_threshold, eps))
            continue
        weights, grads = groups.setdefault((weight.device, weight.dtype), ([], []))
        unit, grad = _units_of(weight)
        weights.append(unit)
        grads.append(grad)
    for weights, grads in groups.values():
        norms = [_unitwise_norm(grad) for grad in grads]
        factors = _factors(_joined([_unitwise_norm(w) for w in weights]), _joined(norms), clipping_threshold, eps)
        parts = torch.split(factors, [norm.numel() for norm in norms])
        torch._foreach_mul_(grads, [part.view_as(norm) for part, norm in zip(parts, norms, strict=True)])


def _joined(norms: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([norm.view(-1) for norm in norms])


def _get_clipped_gradient_coeff(
    weights: torch.Tensor, grad: torch.Tensor, clipping_threshold: float = 0.01, eps: float = _EPS
) -> torch.Tensor:
    """Return the factor of each unit of one gradient, in a shape that broadcasts to it."""
    return _factors(_unitwise_norm(weights), _unitwise_norm(grad), clipping_threshold, eps)


def _factors(weight_norm: torch.Tensor, grad_norm: torch.Tensor, threshold: float, eps: float) -> torch.Tensor:
    if eps:
        weight_norm = weight_norm.clamp(min=eps)
    # A zero gradient is not clipped: 0 / 0 becomes 1, and positive / 0 is infinite, clamped to 1.
    return (weight_norm * threshold / grad_norm).nan_to_num(nan=1.0).clamp(max=1.0)


def _unitwise_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of a scalar or vector; for other tensors, the norm of each row, with shape (N, 1, ...)."""
    dims = tuple(range(1, tensor.dim())) or None
    dtype = torch.float32 if tensor.dtype.itemsize < torch.float32.itemsize else None  # 16-bit squares overflow
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=True, dtype=dtype)
    return norm
