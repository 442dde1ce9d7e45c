"""Splitting a batch into microbatches, and counting its samples."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["count_samples", "default_split_batch"]

_PRIMITIVES = (bool, int, float, str)


def default_split_batch(batch: Any, microbatch_size: int | float) -> Sequence[Any]:
    """Split a batch into microbatches along the samples.

    Tensors are split along dimension 0, lists and tuples of primitives (`bool, int, float, str`) by entry. In any other
    list or tuple every element is a field and is split; a microbatch is then a tuple. In a mapping every value is a
    field; a microbatch is then a dict. What has no samples (primitives in a mapping, tensors of no dimension) goes into
    every microbatch. A nested list is split by entry if it has one entry per sample and its elements do not.
    A batch that fits one microbatch is returned as it is, in a list; tensors are never copied.

    Args:
        batch: A tensor, or a nesting of lists, tuples and mappings.
        microbatch_size: Samples in a microbatch, a positive integer; the last one may be smaller.

    Returns:
        The microbatches, at least one.

    Raises:
        ValueError: `microbatch_size` is a float or not positive, an element can not be split, or two elements do not
            give the same number of microbatches.
        NotImplementedError: `batch` is neither tensor, list, tuple nor mapping.

    Example:
        >>> x, y = torch.zeros(5, 3), torch.arange(5)
        >>> [len(part) for part, _ in default_split_batch((x, y), 2)]
        [2, 2, 1]
    """
    if isinstance(microbatch_size, float):
        raise ValueError(
            f"`microbatch_size` must be an integer to split a batch by default, got {microbatch_size!r}. "
            f"Pass `split_batch` to `DataSpec` for fractions of a sample."
        )
    if microbatch_size < 1:
        raise ValueError(f"`microbatch_size` must be positive, got {microbatch_size!r}. Use 1 for single samples.")
    if not isinstance(batch, (torch.Tensor, list, tuple, Mapping)):
        raise NotImplementedError(
            f"A batch of type {type(batch).__name__} can not be split by default. Pass `split_batch` to `DataSpec`."
        )
    if isinstance(batch, (list, tuple)) and not _check_list_is_primitives(batch):
        chunks = _split_fields(batch, microbatch_size, _leading_length(batch))
    else:
        chunks = _split(batch, microbatch_size, _leading_length([batch]))
    return [batch] if chunks is None else chunks


_default_split_batch = default_split_batch


def count_samples(batch: Any) -> int:
    """The number of samples in a batch of one of the forms that `default_split_batch` splits.

    Args:
        batch: A tensor, or a nesting of lists, tuples and mappings.

    Raises:
        ValueError: An element has no shape, or no element has samples.
        NotImplementedError: Elements differ in their number of samples.

    Example:
        >>> count_samples({"image": torch.zeros(4, 3), "name": ["a", "b", "c", "d"]})
        4
    """
    if isinstance(batch, (list, tuple)):
        size = _flat_count(batch)
        if size is not None:
            return size
        size = _leading_length(batch)
        counts = {count for element in batch for count in _counts(element, size)}
    else:
        counts = set(_counts(batch, _leading_length([batch])))
    if not counts:
        raise ValueError(
            f"Unable to determine the number of samples in a batch of type {type(batch).__name__}: nothing in it has "
            f"samples. Pass `get_num_samples_in_batch` to `DataSpec`."
        )
    if len(counts) > 1:
        raise NotImplementedError(
            f"The batch contains multiple Tensors or lists that differ in their number of samples: {sorted(counts)}. "
            f"Pass `get_num_samples_in_batch` to `DataSpec`."
        )
    return counts.pop()


def _flat_count(batch: Sequence[Any]) -> int | None:
    """The samples of a flat batch of equal tensors, which nearly every batch is; None for other forms."""
    count = None
    for element in batch:
        if not isinstance(element, torch.Tensor) or not element.dim():
            return None
        size = element.size(0)
        if count is None:
            count = size
        elif size != count:
            return None
    return count


def _split(item: Any, size: int, samples: int | None) -> list[Any] | None:
    """The chunks of one item, or None if it has no samples and belongs into every microbatch whole."""
    if isinstance(item, torch.Tensor):
        return _split_tensor(item, size) if item.ndim else None
    if isinstance(item, Mapping):
        return _split_mapping(item, size, samples)
    if isinstance(item, (list, tuple)):
        return _split_list(item, size) if _is_per_sample(item, samples) else _split_fields(item, size, samples)
    raise ValueError(
        f"A batch must be made of tensors, lists, tuples and mappings to be split by default, got an element of type "
        f"{type(item).__name__}. Pass `split_batch` to `DataSpec`."
    )


def _split_tensor(tensor: torch.Tensor, microbatch_size: int) -> list[torch.Tensor]:
    """Split along dimension 0; shorter than one microbatch is a warning."""
    length = tensor.shape[0]
    if length <= microbatch_size:
        _warn_if_short(length, microbatch_size)
        return [tensor]
    return list(torch.split(tensor, microbatch_size))


def _split_list(items: Sequence[Any], microbatch_size: int) -> list[Sequence[Any]]:
    """Split by entry; shorter than one microbatch is a warning."""
    if len(items) <= microbatch_size:
        _warn_if_short(len(items), microbatch_size)
        return [items]
    return [items[start : start + microbatch_size] for start in range(0, len(items), microbatch_size)]


def _split_mapping(
    mapping: Mapping[Any, Any], microbatch_size: int, samples: int | None = None
) -> list[Mapping[Any, Any]] | None:
    """Split every value; primitives are repeated. None if the mapping holds nothing else."""
    chunks = {
        key: None if isinstance(value, _PRIMITIVES) else _split(value, microbatch_size, samples)
        for key, value in mapping.items()
    }
    count = _common_count(chunks.values())
    if count is None or count == 1:
        return None if count is None else [mapping]
    return [
        {key: mapping[key] if parts is None else parts[index] for key, parts in chunks.items()}
        for index in range(count)
    ]


def _split_fields(fields: Sequence[Any], size: int, samples: int | None) -> list[Any] | None:
    """Split every element of a list or tuple, and put the parts together again as tuples."""
    chunks = [_split(field, size, samples) for field in fields]
    count = _common_count(chunks)
    if count is None or count == 1:
        return None if count is None else [fields]
    rows = zip(
        *([field] * count if parts is None else parts for field, parts in zip(fields, chunks, strict=True)), strict=True
    )
    make = getattr(fields, "_make", tuple)  # a named tuple keeps its names
    return [make(row) for row in rows]


def _common_count(chunks: Iterable[list[Any] | None]) -> int | None:
    counts = {len(parts) for parts in chunks if parts is not None}
    if len(counts) > 1:
        raise ValueError(
            f"All elements of a batch must give the same number of microbatches, got {sorted(counts)}. "
            f"Make their first dimensions equal, or pass `split_batch` to `DataSpec`."
        )
    return counts.pop() if counts else None


def _check_list_is_primitives(items: Sequence[Any]) -> bool:
    """Whether all entries are of the same one of the types bool, int, float and str. True for an empty list."""
    return not items or (type(items[0]) in _PRIMITIVES and all(type(item) is type(items[0]) for item in items))


def _leading_length(fields: Iterable[Any]) -> int | None:
    """The samples of the first field that says so beyond doubt: a tensor, or a list of primitives."""
    for field in fields:
        if isinstance(field, torch.Tensor):
            if field.ndim:
                return field.shape[0]
        elif isinstance(field, Mapping):
            length = _leading_length(field.values())
            if length is not None:
                return length
        elif isinstance(field, (list, tuple)) and _check_list_is_primitives(field):
            return len(field)
    return None


def _is_per_sample(items: Sequence[Any], samples: int | None) -> bool:
    """Whether a list inside a batch holds one entry per sample, rather than fields with all samples each."""
    if _check_list_is_primitives(items):
        return True
    if samples is None:
        return not all(isinstance(item, (torch.Tensor, list, tuple, Mapping)) for item in items)
    return len(items) == samples and not _has_samples(items, samples)


def _has_samples(item: Any, samples: int) -> bool:
    """Whether everything in `item` has this number of samples."""
    if isinstance(item, torch.Tensor):
        return not item.ndim or item.shape[0] == samples
    if isinstance(item, Mapping):
        return all(isinstance(value, _PRIMITIVES) or _has_samples(value, samples) for value in item.values())
    if isinstance(item, (list, tuple)):
        if _check_list_is_primitives(item):
            return len(item) == samples
        return all(_has_samples(element, samples) for element in item)
    return False


def _counts(item: Any, samples: int | None) -> Iterator[int]:
    """The numbers of samples of everything in `item` that has samples."""
    if isinstance(item, Mapping):
        for value in item.values():
            if isinstance(value, (Mapping, list, tuple)) or getattr(value, "shape", None):
                yield from _counts(value, samples)
    elif isinstance(item, (list, tuple)):
        if _is_per_sample(item, samples):
            yield len(item)
        else:
            for element in item:
                yield from _counts(element, samples)
    elif hasattr(item, "shape"):
        yield from item.shape[:1]
    else:
        raise ValueError(
            f"Unable to determine the number of samples in a batch with an element of type {type(item).__name__}, "
            f"which has no shape. Pass `get_num_samples_in_batch` to `DataSpec`."
        )


def _warn_if_short(length: int, size: int) -> None:
    if length < size:
        warnings.warn(
            f"Cannot split tensor of length {length} (or list of that length) into microbatches of size {size}; "
            f"it stays whole. This is expected for the last batch of an epoch.",
            UserWarning,
            stacklevel=5,
        )
