"""A dataloader with the functions that transform, split and count its batches."""

from __future__ import annotations

import inspect
import itertools
import math
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Number
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, default_convert
from torch.utils.data.distributed import DistributedSampler

from composer.core.types import Batch
from composer.utils import dist
from composer.utils.batch_helpers import fields_of, is_batch_dataclass, with_fields
from composer.utils.iter_helpers import length_of as length_of
from composer.utils.numbers import plain_int, plain_number

_PRIMITIVES = (bool, int, float, str)


class DataSpec:
    """A dataloader with the functions that transform, split and count its batches.

    Args:
        dataloader: An iterable over the batches of this rank.
        num_samples: Samples in an epoch; None: the length of the dataset of a torch dataloader, if it has one.
        num_tokens: Tokens in an epoch, if known.
        batch_transforms: `batch -> batch`, called on the host before the batch moves to the device. None: the NumPy
            arrays of an `IterableDataset` become tensors, as in a `DataLoader`.
        microbatch_transforms: `batch -> batch`, called for each microbatch on the device.
        split_batch: `(batch, microbatch_size) -> microbatches`; None: `default_split_batch`.
        get_num_samples_in_batch: `batch -> number of samples`; None counts tensors and lists of the usual forms. The
            number may be of any library, such as `np.int64` or a CPU tensor of one integer.
        get_num_tokens_in_batch: `batch -> number of tokens`, or a dict of numbers by token type with the key "total",
            and "loss_generating" if the Trainer weights microbatches by tokens. None counts `batch["input_ids"]`, or
            uses the `max_seq_len` of the dataset for each sample, or 0.

    Attributes:
        has_token_counter: True if `get_num_tokens_in_batch` was given.

    Raises:
        TypeError: A function is not callable, `num_samples` or `num_tokens` is not an integer, or `dataloader` does not
            yield batches: it is a string, a class, a tensor, or a dataset, whose items are samples.
        ValueError: `dataloader` has an active iterator, or several ranks would read the same samples.

    Example:
        >>> import torch
        >>> spec = DataSpec([(torch.zeros(4, 3), torch.arange(4))])
        >>> batch = next(iter(spec.dataloader))
        >>> spec.get_num_samples_in_batch(batch), len(spec.split_batch(batch, 2))
        (4, 2)
    """

    def __init__(
        self,
        dataloader: Iterable[Batch],
        num_samples: SupportsIndex | None = None,
        num_tokens: SupportsIndex | None = None,
        batch_transforms: Callable[[Batch], Batch] | None = None,
        microbatch_transforms: Callable[[Batch], Batch] | None = None,
        split_batch: Callable[[Batch, int | float], Sequence[Batch]] | None = None,
        get_num_samples_in_batch: Callable[[Batch], SupportsIndex | float] | None = None,
        get_num_tokens_in_batch: Callable[[Batch], SupportsIndex | Mapping[str, SupportsIndex]] | None = None,
    ) -> None:
        check_yields_batches("dataloader", dataloader)
        functions: dict[str, object] = {
            "batch_transforms": batch_transforms,
            "microbatch_transforms": microbatch_transforms,
            "split_batch": split_batch,
            "get_num_samples_in_batch": get_num_samples_in_batch,
            "get_num_tokens_in_batch": get_num_tokens_in_batch,
        }
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise TypeError(f"`{name}` must be a function, got {function!r}. Leave it out for the default.")
        if isinstance(dataloader, DataLoader):
            _check_dataloader(dataloader)
            if num_samples is None and isinstance(dataloader.dataset, Sized):
                num_samples = len(dataloader.dataset)
        self.dataloader = dataloader
        self.num_samples = _count("num_samples", num_samples)
        self.num_tokens = _count("num_tokens", num_tokens)
        self.batch_transforms = batch_transforms or unchanged
        if batch_transforms is None and isinstance(dataloader, IterableDataset):
            self.batch_transforms = self._transform_first
        self.microbatch_transforms = microbatch_transforms or unchanged
        self.split_batch = split_batch or default_split_batch
        self._count_samples = get_num_samples_in_batch or count_samples
        if get_num_samples_in_batch is None:
            is_whole = isinstance(dataloader, DataLoader) and dataloader.batch_size is None
            # These yield the items of a dataset, which may be samples instead of batches.
            if is_whole or isinstance(dataloader, IterableDataset):
                self._count_samples = self._count_first
        self._max_seq_len = getattr(getattr(dataloader, "dataset", None), "max_seq_len", None)
        self.has_token_counter = get_num_tokens_in_batch is not None
        self._count_tokens = get_num_tokens_in_batch or self._default_get_num_tokens_in_batch

    def get_num_samples_in_batch(self, batch: Batch) -> int | float:
        """Return the number of samples in a batch.

        Args:
            batch: A batch of this dataloader.

        Raises:
            ValueError: The custom function did not return a number, or returned a tensor on an accelerator.
        """
        samples = self._count_samples(batch)
        if type(samples) is int:
            return samples
        number: Any = plain_number(samples)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise ValueError(
                f"`get_num_samples_in_batch` must return a number, got {samples!r}. Count on the host: shapes are "
                f"known there."
            )
        return number

    def get_num_tokens_in_batch(self, batch: Batch, token_type: str = "total") -> int:
        """Return the number of tokens in a batch.

        Args:
            batch: A batch of this dataloader.
            token_type: The type of tokens to count, if the custom function returns a dict.

        Raises:
            ValueError: The custom function returned neither an int nor a dict with the key `token_type`.
        """
        tokens: Any = self._count_tokens(batch)
        if type(tokens) is int:  # called at every step
            return tokens
        if isinstance(tokens, Mapping):
            if token_type not in tokens:
                raise ValueError(
                    f"`get_num_tokens_in_batch` must return {token_type!r} among the token types, "
                    f"got {sorted(tokens)}. Add that key, or return an int."
                )
            tokens = tokens[token_type]
        number = plain_int(tokens)
        if number is None:
            raise ValueError(
                f"`get_num_tokens_in_batch` must return an int or a dict of ints, got {tokens!r}. "
                f"Count on the host: shapes are known there."
            )
        return number

    def count_batch(self, batch: Batch) -> tuple[int | float, int]:
        """Return the number of samples and of tokens in a batch.

        Args:
            batch: A batch of this dataloader.
        """
        return self.get_num_samples_in_batch(batch), self.get_num_tokens_in_batch(batch)

    def _transform_first(self, batch: Batch) -> Batch:
        """Convert the NumPy arrays of this and all further batches, if the first batch has some."""
        transform: Callable[[Batch], Batch] = default_convert if _has_arrays(batch) else unchanged
        self.batch_transforms = transform
        return transform(batch)

    def _count_first(self, batch: Batch) -> int:
        """Count the samples of the first item of a loader whose items may be samples by mistake.

        Raises:
            TypeError: The item is a sample.
        """
        self._count_samples = count_samples
        _check_first(self.dataloader, batch)
        return count_samples(batch)

    def _default_get_num_samples_in_batch(self, batch: Batch) -> int:
        return count_samples(batch)

    def _default_get_num_tokens_in_batch(self, batch: Batch) -> int:
        # Builtin types first: `isinstance` of an abstract class is slower, and this is called at every step.
        if not isinstance(batch, (tuple, list)) and isinstance(batch, Mapping) and "input_ids" in batch:
            ids = batch["input_ids"]
            if not hasattr(ids, "shape"):
                raise ValueError(
                    f"`batch['input_ids']` must be a tensor, whose tokens are counted, got {type(ids).__name__}. Make "
                    f"it one, or pass `get_num_tokens_in_batch` to `DataSpec`."
                )
            return math.prod(ids.shape[:2])
        if self._max_seq_len is None:
            return 0
        return int(self._max_seq_len * self.get_num_samples_in_batch(batch))


def ensure_data_spec(dataloader: DataSpec | Iterable[Batch] | dict[str, Any], argument: str = "dataloader") -> DataSpec:
    """Make a `DataSpec` from a dataloader or a dict of `DataSpec` arguments; return a `DataSpec` unchanged.

    Args:
        dataloader: The dataloader, dict or `DataSpec`.
        argument: The name of the argument, for error messages.

    Raises:
        TypeError: `dataloader` has another type.
        ValueError: As in `DataSpec`.
    """
    if isinstance(dataloader, DataSpec):
        return dataloader
    if not isinstance(dataloader, dict) or _is_of_datasets(dataloader):
        check_yields_batches(argument, dataloader)
        if isinstance(dataloader, (list, tuple)):
            _check_batches(argument, dataloader)
        return DataSpec(dataloader)
    known = inspect.signature(DataSpec).parameters
    unknown = [key for key in dataloader if key not in known]
    if unknown or "dataloader" not in dataloader:
        keys = ", ".join(map(repr, dataloader)) or "none"
        raise TypeError(
            f"`{argument}` must be an iterable of batches, a `DataSpec`, or a dict of its arguments with 'dataloader', "
            f"got a dict with the keys {keys}. {_WRAP}"
        )
    check_yields_batches(argument, dataloader["dataloader"])
    return DataSpec(**dataloader)


def report_empty_epoch(epoch: int, yielded: int) -> None:
    """Raise RuntimeError, because an epoch had no batches.

    Args:
        epoch: The number of the epoch.
        yielded: The number of batches that the training loader has yielded in earlier epochs.

    Raises:
        RuntimeError: Always.
    """
    before = f", although it had yielded {yielded} before: it can be iterated only once" if yielded else ""
    raise RuntimeError(
        f"The training loader yielded no batch in epoch {epoch}{before}. No batches were trained for "
        f"global rank {dist.get_global_rank()} in this epoch. Pass a `DataLoader`, a list, or another iterable that "
        f"can be iterated repeatedly."
    )


def check_ends(argument: str, dataloader: Any, advice: str) -> None:
    """Check that a loader whose batches are not counted ends; warn if that is unknown, because it has no length.

    Args:
        argument: The name of the argument, for the message.
        dataloader: The loader.
        advice: What to do instead.

    Raises:
        ValueError: The loader is known to be endless.
    """
    if length_of(dataloader) is not None:
        return
    kind = type(dataloader).__name__
    if is_endless(dataloader):
        raise ValueError(f"`{argument}` must have an end, got a {kind} that yields batches forever. {advice}")
    warnings.warn(
        f"`{argument}` is a {kind} without a length, and is iterated until it ends. If it never ends, neither does "
        f"this program. {advice}",
        stacklevel=4,
    )


def warn_of_longer_epoch(dataloader: Any, length: int) -> None:
    """Warn that an epoch has more batches than the loader's length, which only an `IterableDataset` can have.

    Args:
        dataloader: The training loader.
        length: Its length in batches.
    """
    workers = getattr(dataloader, "num_workers", 0)
    cause = (
        f"Each of its {workers} workers may yield the whole dataset: divide it among them in `__iter__`, with "
        f"`torch.utils.data.get_worker_info()`."
        if workers > 1
        else "Correct the `__len__` of its dataset."
    )
    warnings.warn(
        f"The training loader yields more batches than its length, {length}. Schedules and fractions of the run count "
        f"{length} per epoch, so the learning rate may be at its end already. {cause}",
        stacklevel=3,
    )


_WRAP = (
    "Wrap a dataset: `torch.utils.data.DataLoader(dataset, batch_size=...)`, with `batch_size=None` if its items are "
    "batches already. Make a dataset of tensors with `torch.utils.data.TensorDataset(inputs, targets)`."
)


def check_yields_batches(argument: str, dataloader: Any) -> None:
    """Check that a value is iterable and that its items can be batches.

    Args:
        argument: The name of the argument, for the message.
        dataloader: The value.

    Raises:
        TypeError: The value is not iterable, or its items are samples.
    """
    kind = type(dataloader)
    if isinstance(dataloader, type):
        got, hint = f"the class `{dataloader.__name__}`", f"Pass `{dataloader.__name__}(...)`."
    elif isinstance(dataloader, (str, bytes, os.PathLike)):
        got, hint = repr(dataloader), f"Load the data it names. {_WRAP}"
    elif _is_of_datasets(dataloader):
        splits = isinstance(dataloader, Mapping)
        got = f"a `datasets.{kind.__name__}`, whose {'values are datasets' if splits else 'items are samples'}"
        dataset = f"dataset[{next(iter(dataloader), 'train')!r}]" if splits else "dataset"
        hint = (
            f"Pass `torch.utils.data.DataLoader({dataset}.with_format('torch'), batch_size=...)`, with "
            f"`batch_size=None` if `dataset.batch(...)` has made batches already."
        )
    elif isinstance(dataloader, (torch.Tensor, np.ndarray)) or (
        isinstance(dataloader, Dataset) and not isinstance(dataloader, IterableDataset)
    ):
        got, hint = f"a {kind.__name__}, whose items are samples", _WRAP
    elif not isinstance(dataloader, Iterable) and not hasattr(dataloader, "__getitem__"):
        got, hint = kind.__name__, _WRAP
    else:
        return
    raise TypeError(f"`{argument}` must be an iterable of batches, got {got}. {hint}")


def _check_batches(argument: str, batches: Sequence[Any]) -> None:
    """Check that the items of a list or tuple are batches."""
    tensors = [item for item in batches if isinstance(item, torch.Tensor)]
    if len(tensors) == len(batches) > 1 and all(tensor.dim() > 0 for tensor in tensors):
        lengths, kinds = {len(tensor) for tensor in tensors}, {(tensor.dtype, tensor.dim()) for tensor in tensors}
        if len(lengths) == 1 and (len(kinds) > 1 or isinstance(batches, tuple)):
            raise TypeError(
                f"`{argument}` must be an iterable of batches, got a {type(batches).__name__} of {len(tensors)} "
                f"tensors of {lengths.pop()} samples each. {_WRAP}"
            )
    for item in batches:
        if isinstance(item, (DataLoader, DataSpec)):
            raise TypeError(
                f"`{argument}` must be one loader, got a {type(batches).__name__} of {len(batches)}. Join the datasets "
                f"with `torch.utils.data.ConcatDataset([...])`, or write an iterable that yields the batches of each."
            )
        is_empty = isinstance(item, (tuple, list, dict)) and not item
        if item is None or isinstance(item, Number) or is_empty:
            raise TypeError(
                f"`{argument}` must be an iterable of batches, such as tuples of tensors, got a "
                f"{type(batches).__name__} with {item!r}, which has no samples. {_WRAP}"
            )


def unchanged(batch: Batch) -> Batch:
    """Return the batch unchanged: the default transform of a `DataSpec`."""
    return batch


def _count(name: str, value: Any) -> int | None:
    number = plain_int(value)
    if value is not None and number is None:
        raise TypeError(f"`{name}` must be an integer or None, got {value!r}.")
    return number


def _is_of_datasets(data: Any) -> bool:
    """Return True for Hugging Face datasets, which need not be subclasses of torch's `Dataset`.

    The name of the module is not enough: programs may have a module `datasets` of their own.
    """
    return type(data).__module__.partition(".")[0] == "datasets" and hasattr(data, "with_format")


def _warn_of_lists(dataloader: DataLoader[Any]) -> None:
    """Warn if the loader of a Hugging Face dataset yields lists of Python objects, which modules do not accept."""
    dataset: Any = dataloader.dataset
    if not _is_of_datasets(dataset) or dataloader.collate_fn is not default_collate:
        return
    kind = (getattr(dataset, "format", None) or {}).get("type")
    if kind is not None or getattr(getattr(dataset, "_formatting", None), "format_type", None) is not None:
        return  # an `IterableDataset` has only the second
    features = getattr(dataset, "features", None) or {}
    lists = [name for name, kind in features.items() if type(kind).__name__ not in ("Value", "ClassLabel")]
    if lists:
        warnings.warn(
            f"The columns {', '.join(map(repr, lists))} of the dataset are Python objects, of which the loader makes "
            f"lists instead of tensors. Pass `DataLoader(dataset.with_format('torch'), ...)`, or a `collate_fn`.",
            stacklevel=4,
        )


def _check_dataloader(dataloader: DataLoader[Any]) -> None:
    # The workers of an active iterator already have a copy of the dataset, without the transforms of algorithms.
    if dataloader._iterator is not None:
        raise ValueError(
            "`dataloader` must not have an active iterator: its persistent workers already have a copy of the dataset. "
            "Pass a dataloader that has not been iterated yet."
        )
    _warn_of_lists(dataloader)
    if dist.get_world_size() == 1 or isinstance(dataloader.dataset, IterableDataset):
        return
    samplers = (dataloader.sampler, dataloader.batch_sampler, getattr(dataloader.batch_sampler, "sampler", None))
    if not any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ValueError(
            f"`dataloader` must use a `DistributedSampler` on {dist.get_world_size()} ranks, got "
            f"{type(dataloader.sampler).__name__}: every rank would train on the same samples. "
            f"Pass `sampler=composer.utils.dist.get_sampler(dataset, shuffle=True)` to it."
        )


# ---- loaders that can only be checked by their first item


def _check_first(dataloader: Any, batch: Any) -> None:
    """Check the first item of a loader.

    Raises:
        TypeError: It is a sample.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        return
    inputs, target = batch
    is_single = isinstance(target, Number) or (isinstance(target, (torch.Tensor, np.ndarray)) and target.ndim == 0)
    if is_single and isinstance(inputs, (torch.Tensor, np.ndarray)) and inputs.ndim > 0:
        is_loader = isinstance(dataloader, DataLoader)
        advice = "Pass `batch_size=...` to it, or let its dataset yield batches." if is_loader else _WRAP
        raise TypeError(
            f"`dataloader` must be an iterable of batches, got a {type(dataloader).__name__} whose first item is a "
            f"sample: inputs of shape {tuple(inputs.shape)} and one target. {advice}"
        )


def _has_arrays(batch: Any) -> bool:
    if isinstance(batch, np.ndarray):
        return True
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return any(isinstance(value, (np.ndarray, tuple, list, Mapping)) and _has_arrays(value) for value in values)


def is_endless(dataloader: Any) -> bool:
    """Return True if a loader is known to have no end: an iterator of `itertools`."""
    return isinstance(dataloader, (itertools.cycle, itertools.count))


# ---- splitting and counting


def default_split_batch(batch: Any, microbatch_size: int | float) -> Sequence[Any]:
    """Split a batch into microbatches along the samples.

    Tensors are split along dimension 0, lists and tuples of primitives (`bool, int, float, str`) by entry. In any other
    list or tuple every element is a field, and a microbatch is a tuple. In a mapping every value is a field, and a
    microbatch is a dict. A dataclass is split as the mapping of its fields, into objects of its class. Values without
    samples (primitives in a mapping, 0-dimensional tensors) go into every microbatch. A nested list is split by entry
    if it has one entry per sample and its elements do not.
    A batch that fits into one microbatch is returned unchanged, in a list. Tensors are never copied.

    Args:
        batch: A tensor, or a nesting of lists, tuples, mappings and dataclasses.
        microbatch_size: Samples in a microbatch, a positive integer; the last microbatch may be smaller.

    Returns:
        The microbatches, at least one.

    Raises:
        ValueError: `microbatch_size` is a float or not positive, an element cannot be split, or two elements give
            different numbers of microbatches.
        NotImplementedError: `batch` is not a tensor, list, tuple, mapping or dataclass.

    Example:
        >>> x, y = torch.zeros(5, 3), torch.arange(5)
        >>> [len(part) for part, _ in default_split_batch((x, y), 2)]
        [2, 2, 1]
    """
    if isinstance(microbatch_size, float):
        raise ValueError(
            f"`microbatch_size` must be an integer to split a batch by default, got {microbatch_size!r}. "
            f"Pass `split_batch` to `DataSpec` to split by fractions of a sample."
        )
    microbatch_size = operator.index(microbatch_size)
    if microbatch_size < 1:
        raise ValueError(f"`microbatch_size` must be positive, got {microbatch_size!r}. Use 1 for single samples.")
    samples = _common_length(batch) if type(batch) is tuple else None
    if samples is not None and samples > microbatch_size:  # the usual case, in every step
        full, rest = divmod(samples, microbatch_size)
        sizes = [microbatch_size] * full + [rest] * (rest > 0)
        return list(zip(*[tensor.split_with_sizes(sizes) for tensor in batch], strict=True))
    if not isinstance(batch, (torch.Tensor, list, tuple, Mapping)) and not is_batch_dataclass(batch):
        raise NotImplementedError(
            f"A batch of type {type(batch).__name__} cannot be split by default. Pass `split_batch` to `DataSpec`."
        )
    if isinstance(batch, (list, tuple)) and not _check_list_is_primitives(batch):
        chunks = _split_fields(batch, microbatch_size, _leading_length(batch))
    else:
        chunks = _split(batch, microbatch_size, _leading_length([batch]))
    return [batch] if chunks is None else chunks


_default_split_batch = default_split_batch


def _common_length(fields: Iterable[Any]) -> int | None:
    """Return the number of samples that all tensors have; None if the numbers differ or a field is not a tensor."""
    samples = None
    for field in fields:
        if type(field) is not torch.Tensor or not field.dim():
            return None
        size = field.size(0)
        if samples is not None and samples != size:
            return None
        samples = size
    return samples


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch of a form that `default_split_batch` supports.

    Args:
        batch: A tensor, or a nesting of lists, tuples, mappings and dataclasses.

    Raises:
        ValueError: An element has no shape, or no element has samples.
        NotImplementedError: Elements have different numbers of samples.

    Example:
        >>> count_samples({"image": torch.zeros(4, 3), "name": ["a", "b", "c", "d"]})
        4
    """
    is_sequence = isinstance(batch, (list, tuple))
    # Tensors of equal length are the usual case, in every step.
    count = _common_length(batch if is_sequence else batch.values() if isinstance(batch, Mapping) else ())
    if count is not None:
        return count
    if is_sequence:
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


def check_microbatch_size(argument: str, size: float | None, spec: DataSpec) -> None:
    """Check that a loader's batches can be split into microbatches of a size.

    Args:
        argument: The name of the argument, for the message.
        size: The samples in a microbatch; None: the whole batch.
        spec: The loader.

    Raises:
        ValueError: `size` is a float, and the loader splits batches by default.
    """
    if isinstance(size, float) and spec.split_batch is default_split_batch:
        raise ValueError(
            f"`{argument}` must be an integer for a loader that splits batches by default, got {size!r}. Pass "
            f"`split_batch` to `DataSpec` to split by fractions of a sample."
        )


def _split(item: Any, size: int, samples: int | None) -> list[Any] | None:
    """Split one item; return None if it has no samples and goes into every microbatch unchanged."""
    if isinstance(item, torch.Tensor):
        return _split_tensor(item, size) if item.ndim else None
    if isinstance(item, Mapping):
        return _split_mapping(item, size, samples)
    if isinstance(item, (list, tuple)):
        return _split_list(item, size) if _is_per_sample(item, samples) else _split_fields(item, size, samples)
    if is_batch_dataclass(item):
        parts = _split_mapping(fields_of(item), size, samples)
        return None if parts is None else [with_fields(item, part) for part in parts]
    raise ValueError(
        f"A batch must consist of tensors, lists, tuples and mappings to be split by default, got an element of type "
        f"{type(item).__name__}. Pass `split_batch` to `DataSpec`."
    )


def _split_tensor(tensor: torch.Tensor, microbatch_size: int) -> list[torch.Tensor]:
    """Split along dimension 0; warn if the tensor is shorter than a microbatch."""
    length = tensor.shape[0]
    if length <= microbatch_size:
        _warn_if_short(length, microbatch_size)
        return [tensor]
    return list(torch.split(tensor, microbatch_size))


def _split_list(items: Sequence[Any], microbatch_size: int) -> list[Sequence[Any]]:
    """Split by entry; warn if the list is shorter than a microbatch."""
    if len(items) <= microbatch_size:
        _warn_if_short(len(items), microbatch_size)
        return [items]
    return [items[start : start + microbatch_size] for start in range(0, len(items), microbatch_size)]


def _split_mapping(
    mapping: Mapping[Any, Any], microbatch_size: int, samples: int | None = None
) -> list[Mapping[Any, Any]] | None:
    """Split every value; repeat primitives. Return None if the mapping has only primitives."""
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
    """Split every element of a list or tuple, and combine the parts into tuples."""
    chunks = [_split(field, size, samples) for field in fields]
    count = _common_count(chunks)
    if count is None or count == 1:
        return None if count is None else [fields]
    rows = zip(
        *([field] * count if parts is None else parts for field, parts in zip(fields, chunks, strict=True)), strict=True
    )
    make = getattr(fields, "_make", tuple)  # named tuples stay named tuples
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
    """Return True if all entries have the same primitive type (bool, int, float or str), or there are none."""
    return not items or (type(items[0]) in _PRIMITIVES and all(type(item) is type(items[0]) for item in items))


def _leading_length(fields: Iterable[Any]) -> int | None:
    """Return the number of samples of the first tensor or list of primitives; None if there is none."""
    for field in fields:
        if isinstance(field, torch.Tensor):
            if field.ndim:
                return field.shape[0]
        elif isinstance(field, Mapping) or is_batch_dataclass(field):
            length = _leading_length(field.values() if isinstance(field, Mapping) else fields_of(field).values())
            if length is not None:
                return length
        elif isinstance(field, (list, tuple)) and _check_list_is_primitives(field):
            return len(field)
    return None


def _is_per_sample(items: Sequence[Any], samples: int | None) -> bool:
    """Return True if a nested list has one entry per sample; False if its entries are fields with all samples."""
    if _check_list_is_primitives(items):
        return True
    if samples is None:
        return not all(isinstance(item, (torch.Tensor, list, tuple, Mapping)) for item in items)
    return len(items) == samples and _sizes(items) != {samples}


def _sizes(item: Any) -> set[int | None]:
    """Return the lengths of all parts of `item` that may have an entry per sample; None for a part without a length."""
    if is_batch_dataclass(item):
        item = fields_of(item)
    if isinstance(item, torch.Tensor):
        return {item.shape[0] if item.ndim else None}
    if isinstance(item, (list, tuple)) and _check_list_is_primitives(item):
        return {len(item)}
    if isinstance(item, Mapping):  # a number or a text belongs to all samples
        item = [value for value in item.values() if not isinstance(value, _PRIMITIVES)]
    return set().union(*map(_sizes, item)) if isinstance(item, (list, tuple)) else {None}


def _counts(item: Any, samples: int | None) -> Iterator[int]:
    """Yield the number of samples of every element of `item` that has samples."""
    if is_batch_dataclass(item):
        item = fields_of(item)
    if isinstance(item, Mapping):
        for value in item.values():
            if isinstance(value, (Mapping, list, tuple)) or getattr(value, "shape", None) or is_batch_dataclass(value):
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
            f"it is not split. This is expected for the last batch of an epoch.",
            stacklevel=5,
        )
