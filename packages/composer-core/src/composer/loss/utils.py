"""Distinguish class indices from class probabilities, and convert indices to one-hot targets."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import torch

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


def ensure_targets_one_hot(
    input: torch.Tensor,
    targets: torch.Tensor,
    num_classes: int | None = None,
    *,
    ignore_index: int | None = None,
    rescale: bool = False,
    class_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convert class indices to one-hot values along dimension 1 with `dense_targets`; convert others to float32.

    Args:
        input: Logits, shape (N, C, ...).
        targets: Indices, shape (N, ...), or one value per class, shape (N, C, ...).
        num_classes: Number of classes; None: `input.shape[1]`.
        ignore_index: See `dense_targets`.
        rescale: Multiply the values of indices so that the mean sum of a position is 1; see `dense_targets`.
        class_weights: See `dense_targets`.

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
    classes = input.shape[1] if num_classes is None else num_classes
    return dense_targets(targets, classes, ignore_index=ignore_index, rescale=rescale, class_weights=class_weights)


def dense_targets(
    labels: torch.Tensor,
    num_classes: int,
    *,
    dim: int = 1,
    smoothing: float = 0.0,
    ignore_index: int | None = None,
    rescale: bool = False,
    class_weights: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Convert class indices to one value per class: `1 - s + s / C` for the class, `s / C` for the other ones.

    Positions with `ignore_index` or a negative index get zeros. Nothing is read from an accelerator: the warning, and
    the error for an index that is too large, are raised on the CPU only (on CUDA such an index is a device-side
    assertion).

    Args:
        labels: Indices of an integer dtype, any shape.
        num_classes: Number of classes C.
        dim: The position of the new dimension.
        smoothing: The weight s of the uniform distribution; 0 gives one-hot values.
        ignore_index: The index that the loss ignores. None: negative ones, with a warning.
        rescale: Multiply all values by the number of positions over the number of positions that are not ignored. The
            mean over all positions, which `torch.nn.functional.cross_entropy` computes for dense targets, then equals
            the mean over the positions that are not ignored, which this function computes for indices.
        class_weights: The weights of the loss, shape (C,), whose sum over the labels `rescale` uses in place of their
            number, as the mean of `torch.nn.functional.cross_entropy` does.
        dtype: The dtype of the result.

    Warns:
        UserWarning: An index is negative, and `ignore_index` is None.

    Raises:
        ValueError: The labels are not integers, or one is `num_classes` or larger.

    Example:
        >>> dense_targets(torch.tensor([1, 255]), 2, ignore_index=255, rescale=True)
        tensor([[0., 2.],
                [0., 0.]])
    """
    if not check_for_index_targets(labels):
        raise ValueError(f"`labels` must contain class indices, got dtype {labels.dtype}. Convert them with `.long()`.")
    ignored = -1 if ignore_index is None else ignore_index
    labels = labels.long().unsqueeze(dim)  # an unsigned dtype could wrap `ignored` around
    shape = list(labels.shape)
    shape[dim] = num_classes
    off_value = smoothing / num_classes
    on_value = 1 - smoothing + off_value
    if (
        labels.device.type == "cpu" and not torch.compiler.is_compiling() and labels.numel()
    ):  # else it would synchronize
        smallest, largest = (int(extreme) for extreme in labels.aminmax())
        is_plain = smallest >= 0 and largest < num_classes and not 0 <= ignored < num_classes
        if is_plain and (class_weights is None or not rescale):
            filled = torch.full(shape, off_value, dtype=dtype, device=labels.device)
            return filled.scatter_(dim, labels, on_value)
        if largest == ignored:
            largest = int(torch.where(labels == ignored, -1, labels).max())
        if largest >= num_classes:
            raise ValueError(
                f"Class indices must be below {num_classes}, the number of classes, got {largest}. If it marks "
                f"positions to ignore, say so where the loss is made, for example "
                f"`torch.nn.CrossEntropyLoss(ignore_index={largest})`, or as the default of an argument `ignore_index`."
            )
        if smallest < 0 and ignore_index is None:
            warnings.warn(
                "Negative label indices are being ignored in conversion to one-hot labels: their rows are all zero.",
                stacklevel=3,
            )
    is_counted = (labels >= 0) & (labels != ignored)
    mass = is_counted.to(torch.promote_types(dtype, torch.float32))
    if rescale:
        counts = is_counted if class_weights is None else class_weights[torch.where(is_counted, labels, 0)] * is_counted
        total = counts.sum(dtype=mass.dtype)
        mass = mass * (is_counted.numel() / torch.where(total > 0, total, 1))
    result = (mass * off_value).to(dtype).expand(shape).contiguous()
    return result.scatter_(dim, torch.where(is_counted, labels, 0), (mass * on_value).to(dtype))


def check_for_index_targets(targets: torch.Tensor) -> bool:
    """Return True if the dtype of the targets is one of class indices: uint8, int8, int16, int32 or int64.

    Args:
        targets: Targets of any shape.
    """
    return targets.dtype in _INDEX_DTYPES


def ignored_label(loss: Any) -> int | None:
    """Return the class index that a loss leaves out of its mean, or None if the loss does not say.

    The index is an attribute `ignore_index`, or else the argument of that name that `functools.partial` has bound, or
    its default in the signature of a function. For a model, the index is that of its loss (`loss_fn`); for a wrapper,
    that of the module inside.

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


def innermost_loss(loss: Any) -> Any:
    """Return the function or module that computes a loss, inside a model, wrappers and `functools.partial`.

    Args:
        loss: A loss or a model, as for `ignored_label`.

    Example:
        >>> innermost_loss(functools.partial(torch.nn.functional.cross_entropy, reduction="sum")).__name__
        'cross_entropy'
    """
    for layer in _layers(loss):
        loss = layer
    return loss


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


def class_weights_of(loss: Any) -> torch.Tensor | None:
    """Return the class weights of a loss of torch or a function, shape (C,); None without weights or for other losses.

    Args:
        loss: A loss or a model, as for `ignored_label`. An attribute `weight` of a model is not that of its loss.

    Example:
        >>> class_weights_of(
        ...     functools.partial(torch.nn.functional.cross_entropy, weight=torch.tensor([1.0, 2.0]))
        ... )
        tensor([1., 2.])
    """
    for layer in _layers(loss):
        if isinstance(layer, torch.nn.modules.loss._Loss) or not isinstance(layer, torch.nn.Module):
            weight = _setting(layer, "weight")
            if isinstance(weight, torch.Tensor):
                return weight
    return None


def loss_for(loss: Any, targets: Any) -> Any:
    """Return a loss that accepts the targets: torch refuses probabilities with an `ignore_index` of 0 or more.

    Args:
        loss: A loss; the result is another one only for torch's cross-entropy, and for functions with an argument
            `ignore_index`.
        targets: The targets that the loss is called with.

    Example:
        >>> loss = torch.nn.CrossEntropyLoss(ignore_index=255)
        >>> (
        ...     loss_for(loss, torch.tensor([[0.5, 0.5]])).ignore_index,
        ...     loss_for(loss, torch.tensor([1])).ignore_index,
        ... )
        (-100, 255)
    """
    if not isinstance(targets, torch.Tensor) or not targets.is_floating_point():
        return loss
    if isinstance(loss, torch.nn.CrossEntropyLoss) and loss.ignore_index >= 0:
        loss = copy.copy(loss)
        loss.ignore_index = -100
    elif not isinstance(loss, torch.nn.Module) and (_setting(loss, "ignore_index") or 0) >= 0:
        with suppress(TypeError, ValueError):  # a function without a signature
            if "ignore_index" in inspect.signature(loss).parameters:
                loss = functools.partial(loss, ignore_index=-100)
    return loss


def _layers(loss: Any) -> Iterator[Any]:
    """Yield a loss or model, and what it calls to compute the loss, from the outside to the inside."""
    inner: Any = loss
    while inner is not None:
        yield inner
        if isinstance(inner, functools.partial):
            inner = inner.func
        else:
            own = getattr(inner, "__dict__", {})  # a method `loss` says nothing, but a function may be set in its place
            parts = [getattr(inner, name, None) for name in ("loss_fn", "_loss_fn", "criterion")]
            inner = next(filter(callable, [*parts, own.get("loss"), getattr(inner, "module", None)]), None)


def _setting(loss: Any, name: str) -> Any:
    """Return an attribute of a loss, an argument that is bound in it, or the default of its argument; None if none."""
    if isinstance(loss, functools.partial):
        return loss.keywords.get(name)
    value = getattr(loss, name, None)
    if value is not None or isinstance(loss, torch.nn.Module):
        return value
    # Same as `inspect.signature`, which takes longer than the loss of a small batch.
    function: Any = inspect.unwrap(loss)
    if callable(function) and not hasattr(function, "__code__"):
        function = type(function).__call__
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    named = reversed(code.co_varnames[: code.co_argcount])
    defaults = dict(zip(named, reversed(function.__defaults__ or ()), strict=False))
    return {**defaults, **(function.__kwdefaults__ or {})}.get(name)


def _one_hot(tensor: torch.Tensor, num_classes: int = -1, dim: int = -1) -> torch.Tensor:
    """Convert labels to one-hot integers along any dimension; a negative label gives zeros.

    Args:
        tensor: Labels of an integer dtype, any shape.
        num_classes: Number of classes; -1 is the largest label plus one, which is read from the device.
        dim: The position of the new dimension.
    """
    if num_classes == -1 and check_for_index_targets(tensor):
        num_classes = int(tensor.max()) + 1
    return dense_targets(tensor, num_classes, dim=dim, dtype=torch.int64)
