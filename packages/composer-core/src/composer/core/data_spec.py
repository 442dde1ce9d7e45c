"""A dataloader together with what must be known about its batches."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from numbers import Number
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from composer.core._split import _check_list_is_primitives as _check_list_is_primitives
from composer.core._split import _default_split_batch as _default_split_batch
from composer.core._split import _split_list as _split_list
from composer.core._split import _split_mapping as _split_mapping
from composer.core._split import _split_tensor as _split_tensor
from composer.core._split import count_samples
from composer.core._split import default_split_batch as default_split_batch
from composer.core.types import Batch
from composer.utils import dist
from composer.utils.misc import plain_int, plain_number

__all__ = ["DataSpec", "default_split_batch", "ensure_data_spec"]


class DataSpec:
    """A dataloader, and how its batches are transformed, split and counted.

    Args:
        dataloader: Yields the batches of this rank.
        num_samples: Samples in an epoch; None takes the length of a torch dataloader's dataset where it has one.
        num_tokens: Tokens in an epoch, if known.
        batch_transforms: `batch -> batch`, on the host, before the batch moves to the device.
        microbatch_transforms: `batch -> batch`, for each microbatch on the device.
        split_batch: `(batch, microbatch_size) -> microbatches`; None is `default_split_batch`.
        get_num_samples_in_batch: `batch -> number of samples`; None counts tensors and lists of the usual forms. This
            and the next may return numbers of any library, such as `np.int64` or a CPU tensor of one integer.
        get_num_tokens_in_batch: `batch -> number of tokens`, or a dict of numbers by token type with the key "total",
            and "loss_generating" where the Trainer weighs microbatches by tokens. None counts `batch["input_ids"]`,
            else takes the dataset's `max_seq_len` per sample, else 0.

    Attributes:
        has_token_counter: Whether `get_num_tokens_in_batch` was given.

    Raises:
        TypeError: One of the functions can not be called, `num_samples` or `num_tokens` is no integer, or `dataloader`
            yields no batches: it is a text, a class, a tensor, or a data set, whose items are samples.
        ValueError: `dataloader` is being iterated already, or several ranks would read the same samples of it.

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
        _check_yields_batches("dataloader", dataloader)
        _check_callable("batch_transforms", batch_transforms)
        _check_callable("microbatch_transforms", microbatch_transforms)
        _check_callable("split_batch", split_batch)
        _check_callable("get_num_samples_in_batch", get_num_samples_in_batch)
        _check_callable("get_num_tokens_in_batch", get_num_tokens_in_batch)
        if isinstance(dataloader, DataLoader):
            _check_dataloader(dataloader)
            if num_samples is None and isinstance(dataloader.dataset, Sized):
                num_samples = len(dataloader.dataset)
        self.dataloader = dataloader
        self.num_samples = _count("num_samples", num_samples)
        self.num_tokens = _count("num_tokens", num_tokens)
        self.batch_transforms = batch_transforms or _unchanged
        self.microbatch_transforms = microbatch_transforms or _unchanged
        self.split_batch = split_batch or default_split_batch
        self._count_samples = get_num_samples_in_batch or count_samples
        self._max_seq_len = getattr(getattr(dataloader, "dataset", None), "max_seq_len", None)
        self.has_token_counter = get_num_tokens_in_batch is not None
        self._count_tokens = get_num_tokens_in_batch or self._default_get_num_tokens_in_batch

    def get_num_samples_in_batch(self, batch: Batch) -> int | float:
        """The number of samples in a batch.

        Args:
            batch: A batch of this dataloader.

        Raises:
            ValueError: The user's function returned no number, or a tensor on an accelerator.
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
        """The number of tokens in a batch.

        Args:
            batch: A batch of this dataloader.
            token_type: Which tokens; matters only if the user's function tells types apart.

        Raises:
            ValueError: The user's function returned neither an int nor a dict that holds `token_type`.
        """
        tokens: Any = self._count_tokens(batch)
        if type(tokens) is int:  # asked every step
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

    def _default_get_num_samples_in_batch(self, batch: Batch) -> int:
        return count_samples(batch)

    def _default_get_num_tokens_in_batch(self, batch: Batch) -> int:
        # The builtin types first: asking an abstract class takes longer, and this is asked every step.
        if not isinstance(batch, (tuple, list)) and isinstance(batch, Mapping) and "input_ids" in batch:
            return math.prod(batch["input_ids"].shape[:2])
        if self._max_seq_len is None:
            return 0
        return int(self._max_seq_len * self.get_num_samples_in_batch(batch))


def ensure_data_spec(dataloader: DataSpec | Iterable[Batch] | dict[str, Any], argument: str = "dataloader") -> DataSpec:
    """Make a `DataSpec` of a dataloader or of a dict of `DataSpec` arguments; a `DataSpec` stays as it is.

    Args:
        dataloader: Any of the three.
        argument: Whose value it is, for the messages of errors.

    Raises:
        TypeError: It is none of them.
        ValueError: As `DataSpec`.
    """
    if isinstance(dataloader, DataSpec):
        return dataloader
    if not isinstance(dataloader, dict):
        _check_yields_batches(argument, dataloader)
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
    _check_yields_batches(argument, dataloader["dataloader"])
    return DataSpec(**dataloader)


_WRAP = (
    "Wrap a data set: `torch.utils.data.DataLoader(dataset, batch_size=...)`, with `batch_size=None` if its items are "
    "batches already. Tensors make a data set: `torch.utils.data.TensorDataset(inputs, targets)`."
)


def _check_yields_batches(argument: str, dataloader: Any) -> None:
    """Raise unless what is given can be iterated, and its items may be batches."""
    kind = type(dataloader)
    if isinstance(dataloader, type):
        what, hint = f"the class `{dataloader.__name__}`", f"Pass `{dataloader.__name__}(...)`."
    elif isinstance(dataloader, (str, bytes, os.PathLike)):
        what, hint = repr(dataloader), f"Load the data it names. {_WRAP}"
    elif _has_samples(dataloader):
        what, hint = f"a {kind.__name__}, whose items are samples", _WRAP
    elif not isinstance(dataloader, Iterable) and not hasattr(dataloader, "__getitem__"):
        what, hint = kind.__name__, _WRAP
    else:
        return
    raise TypeError(f"`{argument}` must be an iterable of batches, got {what}. {hint}")


def _check_batches(argument: str, batches: Sequence[Any]) -> None:
    """Raise if the items of a list are no batches."""
    tensors = [item for item in batches if isinstance(item, torch.Tensor)]
    if len(tensors) == len(batches) > 1 and all(tensor.dim() > 0 for tensor in tensors):
        lengths, kinds = {len(tensor) for tensor in tensors}, {(tensor.dtype, tensor.dim()) for tensor in tensors}
        if len(lengths) == 1 and (len(kinds) > 1 or isinstance(batches, tuple)):
            raise TypeError(
                f"`{argument}` must be an iterable of batches, got a {type(batches).__name__} of {len(tensors)} "
                f"tensors of {lengths.pop()} samples each. {_WRAP}"
            )
    for item in batches:
        is_empty = isinstance(item, (tuple, list, dict)) and not item
        if item is None or isinstance(item, Number) or is_empty:
            raise TypeError(
                f"`{argument}` must be an iterable of batches, such as tuples of tensors, got a "
                f"{type(batches).__name__} with {item!r}, of which no samples can be counted. {_WRAP}"
            )


def _has_samples(dataloader: Any) -> bool:
    # Data sets of Hugging Face are none of torch's.
    if isinstance(dataloader, (torch.Tensor, np.ndarray)) or type(dataloader).__module__.split(".")[0] == "datasets":
        return True
    return isinstance(dataloader, Dataset) and not isinstance(dataloader, IterableDataset)


def _unchanged(batch: Batch) -> Batch:
    return batch


def _count(name: str, value: Any) -> int | None:
    number = plain_int(value)
    if value is not None and number is None:
        raise TypeError(f"`{name}` must be an integer or None, got {value!r}.")
    return number


def _check_callable(name: str, function: object) -> None:
    if function is not None and not callable(function):
        raise TypeError(f"`{name}` must be a function, got {function!r}. Leave it out for the default.")


def _check_dataloader(dataloader: DataLoader[Any]) -> None:
    # Workers of an active iterator have copied the dataset before algorithms could add transforms to it.
    if dataloader._iterator is not None:
        raise ValueError(
            "`dataloader` must not have an active iterator: persistent workers hold a copy of the dataset from before. "
            "Pass a dataloader that nobody has iterated yet."
        )
    if dist.get_world_size() == 1 or isinstance(dataloader.dataset, IterableDataset):
        return
    samplers = (dataloader.sampler, dataloader.batch_sampler, getattr(dataloader.batch_sampler, "sampler", None))
    if not any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ValueError(
            f"`dataloader` must use a `DistributedSampler` on {dist.get_world_size()} ranks, got "
            f"{type(dataloader.sampler).__name__}: every rank would train on the same samples. "
            f"Pass `sampler=composer.utils.dist.get_sampler(dataset, shuffle=True)` to it."
        )
