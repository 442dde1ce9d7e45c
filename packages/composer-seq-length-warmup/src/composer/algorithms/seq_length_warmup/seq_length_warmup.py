"""The function, then the class. Sequences are (N, S) or (N, S, ...), with the sequence length S."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from composer.algorithms.seq_length_warmup._allocation import allocate
from composer.core import CHANGES_LENGTH, RESHAPES_SEQUENCES, Algorithm, Event, Placement, State, TimeUnit
from composer.loggers import Logger
from composer.utils import check_finite, check_flags, check_integers, plain_number

__all__ = ["SeqLengthWarmup", "apply_curriculum", "apply_seq_length_warmup", "set_batch_sequence_length"]

M = TypeVar("M", bound=Mapping[str, Any])


def set_batch_sequence_length(
    batch: M, curr_seq_len: int, truncate: bool = True, preserve_end_of_sequence: bool = False
) -> M:
    """Shorten the sequences of a batch. The mapping gets new tensors; the old ones are not modified.

    The length of the batch is that of `input_ids`, or else of the first tensor with a second dimension. A batch that is
    short enough stays. Sequences are cut at their ends, so padding must be there too.

    Args:
        batch: Tensors by name, such as `input_ids`; changed in place. What is no tensor stays.
        curr_seq_len: The length to shorten to, at least 1.
        truncate: Cut every tensor to `[:, :curr_seq_len]`. Otherwise all tokens are dealt out to more sequences: every
            tensor is flattened, cut to a multiple of the length, and becomes one of shape (-1, curr_seq_len).
        preserve_end_of_sequence: When truncating, what stands at the last attended position of each row, by
            `attention_mask`, is put at the end of what is left of the row, if it was cut off.

    Returns:
        `batch`.

    Raises:
        TypeError: `batch` is no mapping.
        ValueError: `curr_seq_len` is less than 1, a tensor holds no sequences (to truncate) or has another shape than
            `input_ids` (otherwise), or `attention_mask` or `input_ids` is needed and missing.

    Example:
        >>> batch = {"input_ids": torch.arange(8).view(2, 4)}
        >>> set_batch_sequence_length(batch, 3)["input_ids"].tolist()
        [[0, 1, 2], [4, 5, 6]]
        >>> set_batch_sequence_length(batch, 2, truncate=False)["input_ids"].tolist()
        [[0, 1], [2, 4], [5, 6]]

    Source: Li, Zhang and He, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT
        Models", arXiv:2108.06084.
    Differs: sequences can be reshaped instead of cut.
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
    new = _cut(tensors, length, curr_seq_len, preserve_end_of_sequence) if truncate else _dealt(tensors, curr_seq_len)
    target: Any = batch
    for key, value in new.items():
        target[key] = value
    return batch


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"`batch` must be a mapping of names to tensors, got {type(batch).__name__}. Use a dataset whose examples "
            f"are dicts, such as `{{'input_ids': ..., 'labels': ...}}`."
        )


def _cut(tensors: dict[str, torch.Tensor], full: int, length: int, preserve_end: bool) -> dict[str, torch.Tensor]:
    for key, value in tensors.items():
        _check_sequences(key, value, full, length)
    if not preserve_end:
        return {key: value[:, :length].contiguous() for key, value in tensors.items()}
    mask = tensors.get("attention_mask")
    if mask is None:
        raise ValueError("`batch` must hold 'attention_mask' for `preserve_end_of_sequence`, which tells the ends.")
    if mask.shape[1] != full:
        raise ValueError(
            f"`attention_mask` must be as long as the sequences, {full}, for `preserve_end_of_sequence`, got shape "
            f"{tuple(mask.shape)}."
        )
    last = mask.sum(1).sub(1).clamp(min=0).long()  # 0 for a row that attends to nothing
    rows, place = torch.arange(len(last), device=last.device), last.clamp(max=length - 1)
    new = {}
    for key, value in tensors.items():
        cut = new[key] = value[:, :length].clone(memory_format=torch.contiguous_format)
        cut[rows, place] = value[rows, last]
    return new


def _check_sequences(key: str, value: torch.Tensor, full: int, length: int) -> None:
    """Raise ValueError if cutting dimension 1 would cut something else than sequences."""
    if value.dim() < 2:
        raise ValueError(
            f"`batch` must hold tensors of at least two dimensions to truncate, got {key!r} of shape "
            f"{tuple(value.shape)}. With one value per example, give it a second dimension, `{key}[:, None]`."
        )
    if key == "attention_mask" and value.dim() > 2:
        raise ValueError(
            f"`attention_mask` must have shape (N, S) to truncate, got {tuple(value.shape)}. Let the model make a mask "
            f"of more dimensions from one of that shape."
        )
    # Integers of another length are other sequences, such as the labels of an encoder-decoder.
    if value.is_floating_point() and value.shape[1] not in (full, 1) and value.shape[1] > length:
        raise ValueError(
            f"`batch` must hold sequences of the length of the others, {full}, to truncate, got {key!r} of shape "
            f"{tuple(value.shape)} and floating dtype. Leave it out of the batch; targets with one value per class "
            f"cannot be trained on with `SeqLengthWarmup`."
        )


def _dealt(tensors: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    if "input_ids" not in tensors:
        raise ValueError("`batch` must hold 'input_ids' for `truncate=False`, whose shape the others must have.")
    shape = tensors["input_ids"].shape
    for key, value in tensors.items():
        if value.shape != shape:
            raise ValueError(
                f"`batch` must hold tensors of one shape for `truncate=False`, got {key!r} of shape "
                f"{tuple(value.shape)} and 'input_ids' of {tuple(shape)}. Use `truncate=True`."
            )
    kept = shape.numel() // length * length
    return {key: value.reshape(-1)[:kept].view(-1, length) for key, value in tensors.items()}


def apply_seq_length_warmup(batch: M, curr_seq_len: int, truncate: bool = True) -> M:
    """`set_batch_sequence_length`, under its earlier name."""
    return set_batch_sequence_length(batch, curr_seq_len, truncate)


def apply_curriculum(batch: M, curr_seq_len: int, truncate: bool) -> M:
    """`set_batch_sequence_length`, under its first name."""
    return set_batch_sequence_length(batch, curr_seq_len, truncate)


class SeqLengthWarmup(Algorithm):
    """Trains on short sequences first and lets them grow.

    At AFTER_DATALOADER the batch, which must be a mapping of names to tensors, is shortened to the length of this
    moment; see `set_batch_sequence_length`. With T batches in the run, of which W = int(T * duration) are warmup, and
    u = (max_seq_length - min_seq_length) // step_size steps, the length grows by `step_size` every W // u batches:

        length = min(min_seq_length + step_size * (batch // (W // u)), max_seq_length)

    If W < u, it grows by several steps at once, `min_seq_length + step_size * (batch * u // W)`; if u = 0, it is
    `min_seq_length` until the warmup is over. A run measured in samples or tokens has no T; then the elapsed fraction
    takes the place of `batch / T`. A batch is shortened before it is split, so microbatches equal one batch.

    On a GPU the first batch goes through the model once at full length, without effect on the weights, buffers or
    random numbers, so that memory is reserved in pieces that fit all lengths.

    **Events** INIT (a new run), AFTER_DATALOADER. **Reads** the batch, the timestamp, the length of the
    run. **Writes** the batch. **Cost** a copy of the shortened batch; saves the share of the tokens that is left out,
    which come again if `truncate=False`. **Compilation** each length may compile a compiled model again: u + 1 times.

    **Logs** `seq_length_warmup/curr_seq_len` and `seq_length_warmup/curr_bs`, the number of sequences.

    Args:
        duration: The fraction of the run that is warmup, in [0, 1].
        min_seq_length: The length at the start, at least 1.
        max_seq_length: The length in the end. Longer sequences stay cut to it.
        step_size: How much the length grows at once; multiples of 8 suit GPUs.
        truncate: Whether to cut sequences, rather than deal their tokens out to more sequences.
        preserve_end_of_sequence: Whether a cut sequence keeps its last token. Used with `truncate` only.

    Raises:
        ValueError: A number is out of range.
        TypeError: At the first batch, if it is no mapping.
        RuntimeError: At the first batch, if the run is measured in epochs of unknown length.

    Example:
        >>> SeqLengthWarmup(max_seq_length=512).step_size
        8

    Source: Li, Zhang and He, "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT
        Models", arXiv:2108.06084.
    Differs: lengths grow in whole steps, evenly spread over the warmup. Sequences can be reshaped instead of cut.
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
        check_finite(duration=duration)
        if not 0 <= duration <= 1:
            raise ValueError(f"`duration` must be in [0, 1], got {duration!r}. It is a fraction of the run.")
        check_flags(truncate=truncate, preserve_end_of_sequence=preserve_end_of_sequence)
        check_integers(min_seq_length=min_seq_length, max_seq_length=max_seq_length, step_size=step_size)
        if max_seq_length < min_seq_length:
            raise ValueError(
                f"`max_seq_length` must not be less than `min_seq_length`, got {max_seq_length!r} and "
                f"{min_seq_length!r}."
            )
        for name, value in (("min_seq_length", min_seq_length), ("step_size", step_size)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value!r}.")
        self.duration = plain_number(duration)
        self.min_seq_length, self.max_seq_length = plain_number(min_seq_length), plain_number(max_seq_length)
        self.step_size = plain_number(step_size)
        self.truncate, self.preserve_end_of_sequence = truncate, preserve_end_of_sequence
        self._activated = False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Shorten the batch; the first one goes through the model at full length before."""
        if event is Event.INIT:
            self._activated = False
            return
        _check_batch(state.batch)
        if not self._activated:
            self._activated = True
            if state.device.name == "gpu":
                allocate(state, self._shortened(state.batch, self.max_seq_length))
        length = self._length_at(state)
        batch = state.batch = self._shortened(state.batch, length)
        size = next((len(v) for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 1), 0)
        logger.log_metrics({"seq_length_warmup/curr_seq_len": length, "seq_length_warmup/curr_bs": size})

    def _shortened(self, batch: M, length: int) -> M:
        return set_batch_sequence_length(copy.copy(batch), length, self.truncate, self.preserve_end_of_sequence)

    def _length_at(self, state: State) -> int:
        limit = state.max_duration
        assert limit is not None, "the engine asks for `max_duration` at this event"
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
    assert limit is not None, "asked before"
    if limit.unit is TimeUnit.BATCH:
        return int(limit)
    if state.dataloader_len is None:
        raise RuntimeError(
            f"`SeqLengthWarmup` must know the number of batches in an epoch of a run of {str(limit)!r}, but the loader "
            f"has no length. Use a `max_duration` in batches, such as '1000ba'."
        )
    return int(limit) * int(state.dataloader_len)
