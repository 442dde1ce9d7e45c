"""The function, then the algorithm. Sequences are (N, S) or (N, S, ...), with the sequence length S."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from composer.core import CHANGES_LENGTH, RESHAPES_SEQUENCES, Algorithm, Event, Placement, TimeUnit
from composer.core.precision import precision_context_of
from composer.models.base import total_loss
from composer.utils import check_finite, check_flags, check_integers, dist, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

M = TypeVar("M", bound=Mapping[str, Any])


def set_batch_sequence_length(
    batch: M, curr_seq_len: int, truncate: bool = True, preserve_end_of_sequence: bool = False
) -> M:
    """Shorten the sequences of a batch. The mapping is updated with new tensors; the old tensors are not modified.

    The length of the batch is that of `input_ids`, or else of the first tensor with a second dimension. A batch that is
    short enough is returned unchanged. Sequences are truncated at their ends, so padding must be on the right.

    Args:
        batch: Tensors by name, such as `input_ids`; changed in place. Values that are not tensors are left alone.
        curr_seq_len: The length to shorten to, at least 1.
        truncate: Truncate every tensor to `[:, :curr_seq_len]`. If False, reshape instead: every tensor is flattened,
            truncated to a multiple of the length, and reshaped to (-1, curr_seq_len).
        preserve_end_of_sequence: When truncating, copy the value at the last attended position of each row, according
            to `attention_mask`, to the end of the truncated row if it was cut off.

    Returns:
        `batch`.

    Raises:
        TypeError: `batch` is not a mapping.
        ValueError: `curr_seq_len` is less than 1, a tensor does not hold sequences (with `truncate`) or differs in
            shape from `input_ids` (without), or `attention_mask` or `input_ids` is needed and missing.

    Example:
        >>> batch = {"input_ids": torch.arange(8).view(2, 4)}
        >>> set_batch_sequence_length(batch, 3)["input_ids"].tolist()
        [[0, 1, 2], [4, 5, 6]]
        >>> set_batch_sequence_length(batch, 2, truncate=False)["input_ids"].tolist()
        [[0, 1], [2, 4], [5, 6]]

    Source: Li, Zhang and He, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT
        Models", arXiv:2108.06084.
    Differs: sequences can be reshaped instead of truncated.
    """
    _check_batch(batch)
    if curr_seq_len < 1:
        raise ValueError(f"`curr_seq_len` must be at least 1, got {curr_seq_len!r}.")
    tensors = {key: value for key, value in batch.items() if isinstance(value, torch.Tensor)}
    ids = tensors.get("input_ids")
    candidates = tensors.values() if ids is None else [ids]
    length = next((value.shape[1] for value in candidates if value.dim() > 1), 0)
    if curr_seq_len >= length:
        return batch
    if truncate:
        shortened = _truncate(tensors, length, curr_seq_len, preserve_end_of_sequence)
    else:
        shortened = _reshape(tensors, curr_seq_len)
    target: Any = batch
    for key, value in shortened.items():
        target[key] = value
    return batch


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"`batch` must be a mapping of names to tensors, got {type(batch).__name__}. Use a dataset of dicts, such "
            f"as `{{'input_ids': ..., 'labels': ...}}`."
        )


def _truncate(tensors: dict[str, torch.Tensor], full: int, length: int, preserve_end: bool) -> dict[str, torch.Tensor]:
    for key, value in tensors.items():
        _check_sequences(key, value, full, length)
    if not preserve_end:
        return {key: value[:, :length].contiguous() for key, value in tensors.items()}
    mask = tensors.get("attention_mask")
    if mask is None:
        raise ValueError(
            "`batch` must hold 'attention_mask' for `preserve_end_of_sequence`: it marks the end of each sequence."
        )
    if mask.shape[1] != full:
        raise ValueError(
            f"`attention_mask` must be as long as the sequences, {full}, for `preserve_end_of_sequence`, got shape "
            f"{tuple(mask.shape)}."
        )
    last = mask.sum(1).sub(1).clamp(min=0).long()  # 0 for a row that attends to nothing
    rows, position = torch.arange(len(last), device=last.device), last.clamp(max=length - 1)
    truncated = {}
    for key, value in tensors.items():
        truncated[key] = value[:, :length].clone(memory_format=torch.contiguous_format)
        truncated[key][rows, position] = value[rows, last]
    return truncated


def _check_sequences(key: str, value: torch.Tensor, full: int, length: int) -> None:
    """Raise ValueError if dimension 1 does not appear to be the sequence dimension."""
    if value.dim() < 2:
        raise ValueError(
            f"`batch` must hold tensors of at least two dimensions to truncate, got {key!r} of shape "
            f"{tuple(value.shape)}. If it has one value per example, add a second dimension: `{key}[:, None]`."
        )
    if key == "attention_mask" and value.dim() > 2:
        raise ValueError(
            f"`attention_mask` must have shape (N, S) to truncate, got {tuple(value.shape)}. Expand the mask to more "
            f"dimensions inside the model."
        )
    # Integer tensors of another length are other sequences, such as the labels of an encoder-decoder model.
    if value.is_floating_point() and value.shape[1] not in (full, 1) and value.shape[1] > length:
        raise ValueError(
            f"`batch` must hold sequences of the same length, {full}, to truncate, got {key!r} of shape "
            f"{tuple(value.shape)} and floating dtype. Remove it from the batch; `SeqLengthWarmup` does not support "
            f"targets with one value per class."
        )


def _reshape(tensors: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    if "input_ids" not in tensors:
        raise ValueError("`batch` must hold 'input_ids' for `truncate=False`: all tensors must have its shape.")
    shape = tensors["input_ids"].shape
    for key, value in tensors.items():
        if value.shape != shape:
            raise ValueError(
                f"`batch` must hold tensors of one shape for `truncate=False`, got {key!r} of shape "
                f"{tuple(value.shape)} and 'input_ids' of {tuple(shape)}. Use `truncate=True`."
            )
    num_tokens = shape.numel() // length * length
    return {key: value.reshape(-1)[:num_tokens].view(-1, length) for key, value in tensors.items()}


def apply_seq_length_warmup(batch: M, curr_seq_len: int, truncate: bool = True) -> M:
    """Call `set_batch_sequence_length`; an earlier name of it."""
    return set_batch_sequence_length(batch, curr_seq_len, truncate)


def apply_curriculum(batch: M, curr_seq_len: int, truncate: bool) -> M:
    """Call `set_batch_sequence_length`; its first name."""
    return set_batch_sequence_length(batch, curr_seq_len, truncate)


class SeqLengthWarmup(Algorithm):
    """Trains on short sequences first, which grow during a warmup.

    At AFTER_DATALOADER the batch, which must be a mapping of names to tensors, is shortened to the current length; see
    `set_batch_sequence_length`. With T batches in the run, W = int(T * duration) of them warmup, and
    u = (max_seq_length - min_seq_length) // step_size steps, the length grows by `step_size` every W // u batches:

        length = min(min_seq_length + step_size * (batch // (W // u)), max_seq_length)

    If W < u, it grows by several steps at a time, `min_seq_length + step_size * (batch * u // W)`; if u = 0, it is
    `min_seq_length` until the warmup ends. In a run measured in samples or tokens the elapsed fraction replaces
    `batch / T`. A batch is shortened before it is split, so microbatches equal one batch.

    On a GPU the first batch goes through the model once at full length, so that the allocator reserves blocks that fit
    all lengths. This has no effect on weights, buffers or random numbers.

    **Events** INIT (a new run), AFTER_DATALOADER. **Reads** the batch, the timestamp, the length of the run. **Writes**
    the batch. **Cost** a copy of the shortened batch; saves computation in proportion to the dropped tokens.
    **Compilation** each of the u + 1 lengths may recompile a compiled model.

    **Logs** `seq_length_warmup/curr_seq_len` and `seq_length_warmup/curr_bs`, the number of sequences.

    Args:
        duration: The fraction of the run that is warmup, in [0, 1].
        min_seq_length: The length at the start, at least 1.
        max_seq_length: The length after the warmup. Longer sequences are truncated to it.
        step_size: The increment of the length; multiples of 8 suit GPUs.
        truncate: Truncate sequences. If False, reshape them to more, shorter sequences.
        preserve_end_of_sequence: Keep the last token of truncated sequences. Used only with `truncate`.

    Raises:
        ValueError: A number is out of range.
        TypeError: At the first batch, if it is not a mapping.
        RuntimeError: At the first batch, if the run is measured in epochs of unknown length.

    Example:
        >>> SeqLengthWarmup(max_seq_length=512).step_size
        8

    Source: Li, Zhang and He, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT
        Models", arXiv:2108.06084.
    Differs: lengths grow in whole steps, evenly spread over the warmup. Sequences can be reshaped instead of truncated.
    """

    events = frozenset({Event.INIT, Event.AFTER_DATALOADER})
    placement = Placement(provides={CHANGES_LENGTH}, after={RESHAPES_SEQUENCES})

    def __init__(
        self,
        duration: float = 0.3,
        min_seq_length: int = 8,
        max_seq_length: int = 1024,
        step_size: int = 8,
        truncate: bool = True,
        preserve_end_of_sequence: bool = False,
    ) -> None:
        check_finite("It is a fraction of the run.", duration=duration, least=0, most=1)
        check_flags(truncate=truncate, preserve_end_of_sequence=preserve_end_of_sequence)
        check_integers(min_seq_length=min_seq_length, step_size=step_size, least=1)
        check_integers(max_seq_length=max_seq_length)
        if max_seq_length < min_seq_length:
            raise ValueError(
                f"`max_seq_length` must not be less than `min_seq_length`, got {max_seq_length!r} and "
                f"{min_seq_length!r}."
            )
        self.duration = plain_number(duration)
        self.min_seq_length, self.max_seq_length = plain_number(min_seq_length), plain_number(max_seq_length)
        self.step_size = plain_number(step_size)
        self.truncate, self.preserve_end_of_sequence = truncate, preserve_end_of_sequence
        self._memory_is_reserved = False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Shorten the batch. On a GPU, first run the model on the first batch at full length."""
        if event is Event.INIT:
            self._memory_is_reserved = False
            return
        _check_batch(state.batch)
        if not self._memory_is_reserved:
            self._memory_is_reserved = True
            if state.device.name == "gpu":
                _reserve_memory(state, self._shorten(state.batch, self.max_seq_length))
        length = self._current_length(state)
        batch = state.batch = self._shorten(state.batch, length)
        size = next((len(v) for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 1), 0)
        logger.log_metrics({"seq_length_warmup/curr_seq_len": length, "seq_length_warmup/curr_bs": size})

    def _shorten(self, batch: M, length: int) -> M:
        return set_batch_sequence_length(copy.copy(batch), length, self.truncate, self.preserve_end_of_sequence)

    def _current_length(self, state: State) -> int:
        limit = state.max_duration
        assert limit is not None, "the engine requires `max_duration` at this event"
        num_steps = (self.max_seq_length - self.min_seq_length) // self.step_size
        if limit.unit is TimeUnit.EPOCH or limit.unit is TimeUnit.BATCH:
            batch, warmup = int(state.timestamp.batch), int(_num_batches(state) * self.duration)
            every = warmup // num_steps if num_steps else 0
            if every:
                return min(self.min_seq_length + self.step_size * (batch // every), self.max_seq_length)
            is_over, done = batch >= warmup, batch * num_steps // max(warmup, 1)
        else:
            elapsed = state.get_elapsed_duration()
            assert elapsed is not None, "the run has a length"
            is_over = elapsed.value >= self.duration
            done = 0 if is_over else int(elapsed.value / self.duration * num_steps)
        return self.max_seq_length if is_over else self.min_seq_length + self.step_size * done


def _num_batches(state: State) -> int:
    limit = state.max_duration
    assert limit is not None, "checked by the caller"
    if limit.unit is TimeUnit.BATCH:
        return int(limit)
    if state.dataloader_len is None:
        raise RuntimeError(
            f"`SeqLengthWarmup` must know the number of batches in an epoch of a run of {str(limit)!r}, but the loader "
            f"has no length. Use a `max_duration` in batches, such as '1000ba'."
        )
    return int(limit) * int(state.dataloader_len)


def _reserve_memory(state: State, batch: Mapping[str, Any]) -> None:
    """Run a forward and backward pass on a microbatch of full length, with no effect but reserved memory.

    With automatic microbatching, the microbatch size is halved on all ranks until the pass fits in memory. Gradients
    are dropped.
    """
    while True:
        fits = _fits(state, batch)
        if dist.get_world_size() > 1:
            fits_everywhere = state.device.tensor_to_device(torch.tensor(int(fits)))
            dist.all_reduce(fits_everywhere, "MIN")
            fits = bool(fits_everywhere)
        if fits:
            return
        size = state.device_train_microbatch_size or _batch_size(batch)
        if size <= 1:
            raise RuntimeError(
                "Not even one example of full length fits in memory. Use a smaller `max_seq_length` or model."
            )
        state.device_train_microbatch_size = max(int(size / 2), 1)


def _fits(state: State, batch: Mapping[str, Any]) -> bool:
    try:
        _run_forward_backward(state, batch)
    except torch.OutOfMemoryError:
        if not state.auto_microbatching:
            raise
        return False
    finally:
        state.model.zero_grad(set_to_none=True)
    return True


def _run_forward_backward(state: State, batch: Mapping[str, Any]) -> None:
    model: Any = state.model
    if isinstance(model, DistributedDataParallel):  # the gradients are dropped, so they need no communication
        model = model.module
    size = state.device_train_microbatch_size
    if size is not None:
        rows: Any = copy.copy(batch)
        for key, value in batch.items():
            rows[key] = value[: max(int(size), 1)] if isinstance(value, torch.Tensor) and value.dim() else value
        batch = rows
    batch = state.device.batch_to_device(batch)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [torch.cuda.current_device()] if state.device.torch_type == "cuda" else []
    with torch.random.fork_rng(devices):
        with precision_context_of(state):
            loss = total_loss(model.loss(model(batch), batch))
        loss.backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for buffer, original in buffers:
            buffer.copy_(original)


def _batch_size(batch: Mapping[str, Any]) -> int:
    return next((len(v) for v in batch.values() if isinstance(v, torch.Tensor) and v.dim()), 1)
