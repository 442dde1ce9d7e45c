"""Distinguish class indices from class probabilities, and convert indices to one-hot targets."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Iterator
from typing import Any, Literal

import torch

__all__ = [
    "check_for_index_targets",
    "ensure_targets_one_hot",
    "ignored_label",
    "infer_target_type",
    "loss_setting",
]

_INDEX_DTYPES = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def infer_target_type(input: torch.Tensor, targets: torch.Tensor) -> Literal["one_hot", "indices"]:
    """Infer whether targets are class indices or have one value per class.

    Args:
        input: Logits, shape (N, C, ...).
        targets: Shape (N, ...) for indices, (N, C, ...) for one value per class.

    Returns:
        "one_hot" if the shapes are equal, "indices" if `targets` has one dimension less.

    Raises:
        RuntimeError: The shapes fit neither.

    Example:
        >>> infer_target_type(torch.zeros(4, 10), torch.zeros(4, dtype=torch.int64))
        'indices'
    """
    if input.shape == targets.shape:
        return "one_hot"
    if input.ndim == targets.ndim + 1:
        return "indices"
    raise RuntimeError(
        f"`targets` must have the shape of `input`, {tuple(input.shape)}, or that without dimension 1, got "
        f"{tuple(targets.shape)}. Reshape them to class probabilities or class indices."
    )


def ensure_targets_one_hot(input: torch.Tensor, targets: torch.Tensor, num_classes: int | None = None) -> torch.Tensor:
    """Convert class indices to one-hot values along dimension 1; convert values per class to float32.

    A negative index gives zeros for every class. Nothing is read from an accelerator: the warning, and the error for an
    index that is too large, are raised on the CPU only (on CUDA such an index is a device-side assertion).

    Args:
        input: Logits, shape (N, C, ...).
        targets: Indices, shape (N, ...), or one value per class, shape (N, C, ...).
        num_classes: Number of classes; None: `input.shape[1]`.

    Returns:
        Shape (N, C, ...), float32.

    Raises:
        RuntimeError: The shapes fit neither kind of target.
        ValueError: The indices are not integers, or one is `num_classes` or larger.

    Example:
        >>> ensure_targets_one_hot(torch.zeros(2, 3), torch.tensor([2, 0]))
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
    """
    if infer_target_type(input, targets) == "one_hot":
        return targets.float()
    return _one_hot(targets, input.shape[1] if num_classes is None else num_classes, dim=1, dtype=torch.float32)


def check_for_index_targets(targets: torch.Tensor) -> bool:
    """Return True if the dtype of the targets is one of class indices: uint8, int8, int16, int32 or int64.

    Args:
        targets: Targets of any shape.
    """
    return targets.dtype in _INDEX_DTYPES


def ignored_label(loss: Any) -> int | None:
    """Return the class index that a loss leaves out of its mean, or None if the loss does not say.

    The first of these that exists: an attribute `ignore_index`; the argument of that name that `functools.partial` has
    bound, or its default in the signature of a function; the same of the loss of a model (`loss_fn`), or of the module
    inside a wrapper.

    Args:
        loss: A loss, such as `torch.nn.CrossEntropyLoss()` or `torch.nn.functional.cross_entropy`, or a model.

    Example:
        >>> (
        ...     ignored_label(torch.nn.CrossEntropyLoss(ignore_index=255)),
        ...     ignored_label(torch.nn.functional.cross_entropy),
        ... )
        (255, -100)
    """
    for layer in _layers(loss):
        index = _setting(layer, "ignore_index")
        if isinstance(index, int):
            return index
    return None


def loss_setting(loss: Any, name: str) -> Any:
    """Return a setting of a loss, such as its `reduction`, or None if the loss does not say.

    Args:
        loss: A loss or a model, as for `ignored_label`.
        name: The name of the attribute or argument.

    Example:
        >>> loss_setting(torch.nn.CrossEntropyLoss(label_smoothing=0.1), "label_smoothing")
        0.1
    """
    values = (_setting(layer, name) for layer in _layers(loss))
    return next((value for value in values if value is not None), None)


def _layers(loss: Any) -> Iterator[Any]:
    """Yield a loss or model, and what it calls to compute the loss, from the outside to the inside."""
    inner: Any = loss
    while inner is not None:
        yield inner
        if isinstance(inner, functools.partial):
            inner = inner.func
        else:
            parts = (getattr(inner, name, None) for name in ("loss_fn", "_loss_fn", "criterion", "module"))
            inner = next(filter(callable, parts), None)


def _setting(loss: Any, name: str) -> Any:
    """Return an attribute of a loss, an argument that is bound in it, or the default of its argument; None if none."""
    if isinstance(loss, functools.partial):
        return loss.keywords.get(name)
    value = getattr(loss, name, None)
    if value is not None or isinstance(loss, torch.nn.Module):
        return value
    # Same as `inspect.signature`, which takes longer than the loss of a small batch.
    function: Any = inspect.unwrap(loss)
    function = function if hasattr(function, "__code__") else getattr(type(function), "__call__", None)  # noqa: B004
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    named = reversed(code.co_varnames[: code.co_argcount])
    defaults = dict(zip(named, reversed(function.__defaults__ or ()), strict=False))
    return {**defaults, **(function.__kwdefaults__ or {})}.get(name)


def _one_hot(
    tensor: torch.Tensor, num_classes: int = -1, dim: int = -1, *, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Convert labels to one-hot values along any dimension; a negative label gives zeros.

    Args:
        tensor: Labels of an integer dtype, any shape.
        num_classes: Number of classes; -1 is the largest label plus one, which is read from the device.
        dim: The position of the new dimension.
        dtype: The dtype of the result.

    Raises:
        ValueError: The labels are not integers, or (checked on the CPU only) one is `num_classes` or larger.
    """
    if not check_for_index_targets(tensor):
        raise ValueError(f"`tensor` must contain integer labels, got dtype {tensor.dtype}. Convert it with `.long()`.")
    if num_classes == -1:
        num_classes = int(tensor.max()) + 1
    readable = tensor.device.type == "cpu" and not torch.compiler.is_compiling()  # elsewhere a check would synchronize
    if readable and tensor.numel():
        smallest, largest = (int(extreme) for extreme in tensor.aminmax())
        if largest >= num_classes:
            raise ValueError(
                f"`num_classes` must be larger than every label, got {num_classes!r} for label {largest}. "
                f"Pass at least {largest + 1}."
            )
        if smallest < 0:
            warnings.warn(
                "Negative label indices are being ignored in conversion to one-hot labels: their rows are all zero.",
                stacklevel=3,
            )
    labels = tensor.long().unsqueeze(dim)
    shape = list(labels.shape)
    shape[dim] = num_classes
    present = (labels >= 0).to(dtype)
    return torch.zeros(shape, dtype=dtype, device=tensor.device).scatter_(dim, labels.clamp(min=0), present)
