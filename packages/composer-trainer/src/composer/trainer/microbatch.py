"""The search for the largest microbatch size that fits the GPU: start with the whole batch, halve when memory runs out.

With several ranks, any of them may run out of memory at any moment. It would then not join the others in
synchronizing gradients, and they would wait until the timeout. So an attempt does not communicate: every rank computes
its gradients, then all exchange the outcome through the host, and only gradients that all ranks completed are averaged.
If any rank ran out of memory, all halve to the same size and compute the same batch again.

The cost: gradients are synchronized after the backward pass instead of during it, and every pass exchanges three
numbers per rank. This holds for the whole run, since a longer sequence may need more memory than any before.

What follows the exchange is not retried: a rank on which the gradient average, AFTER_TRAIN_BATCH or the
optimizer step runs out of memory raises, and the others get an error in their next collective operation.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from composer.core import Evaluator, State
from composer.distributed._lost_ranks import is_communication_error
from composer.loop.generators import global_states, set_global_states
from composer.loop.loss_terms import tensors_in
from composer.trainer.strategy import Strategy
from composer.utils import dist

TOO_LARGE = "Use a smaller model, a shorter or smaller input, or a lower precision."

_PROVEN = 3  # after this many batches, the optimizer states and the allocator's cache exist, too
_OOM_TEXTS = ("CUDA out of memory", "CUDA error: out of memory")
_CUDNN_TEXT = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."


def is_cuda_oom(error: BaseException) -> bool:
    """Return True if an error means that GPU memory ran out."""
    text = str(error)
    if isinstance(error, torch.cuda.OutOfMemoryError) or any(part in text for part in _OOM_TEXTS):
        return True
    if _CUDNN_TEXT in text:
        warnings.warn(
            f"cuDNN rejected an operation, usually for lack of workspace memory; this is treated as out of "
            f"memory. The error was: {text}",
            stacklevel=2,
        )
        return True
    return False


def adjust_device_train_microbatch_size(state: State) -> None:
    """Halve `state.device_train_microbatch_size`.

    Raises:
        RuntimeError: The size is already 1.
    """
    state.device_train_microbatch_size = _halved(
        "device_train_microbatch_size", state.device_train_microbatch_size, "training"
    )


def adjust_device_eval_microbatch_size(evaluator: Evaluator) -> None:
    """Halve an evaluator's `device_eval_microbatch_size`.

    Raises:
        RuntimeError: The size is already 1.
    """
    where = f" on rank {dist.get_global_rank()}" if dist.get_world_size() > 1 else ""
    what = f"the evaluator {evaluator.label!r}{where}"
    evaluator.device_eval_microbatch_size = _halved(
        "device_eval_microbatch_size", evaluator.device_eval_microbatch_size, what
    )


def _halved(name: str, size: float | None, what: str) -> int:
    assert size is not None, "the search starts from the loader's batch size"
    if size <= 1:
        raise RuntimeError(f"CUDA out of memory: {what} does not fit even with `{name}=1`. {TOO_LARGE}")
    smaller = max(int(size / 2), 1)
    warnings.warn(
        f"CUDA out of memory in {what}. `{name}` is reduced from {size} to {smaller}.", RuntimeWarning, stacklevel=4
    )
    return smaller


class Snapshot:
    """A copy of what a failed attempt changes: the batch, the model's buffers and the global random generators.

    With it restored, a run that searches trains like one that knew the size from the start. Copying costs time, so
    batches of shapes that have fitted three times, with the same size, are trained without a copy. If one still fails,
    because other programs use the memory, it is trained again from changed buffers and generators.

    Args:
        state: The run's state.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._fitted: Counter[Any] = Counter()  # batches by shapes and microbatch size
        self._shapes: tuple[torch.Size, ...] = ()
        self._is_copied = False
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._generators: dict[str, Any] = {}
        self._batch: Any = None

    def take(self) -> None:
        """Copy the current values, without waiting for the device, unless a batch like this one will fit."""
        self._batch = self._state.batch
        self._shapes = tuple(tensor.shape for tensor in tensors_in(self._batch))
        self._is_copied = self._fitted[self._state.device_train_microbatch_size, self._shapes] < _PROVEN
        if not self._is_copied:
            return
        self._buffers = [buffer for buffer in self._state.model.buffers() if not buffer.is_meta]
        if [*map(_form, self._buffers)] != [*map(_form, self._copies)]:
            self._copies = [*map(torch.empty_like, self._buffers)]
        _copy(self._buffers, self._copies)
        self._generators = global_states()

    def fitted(self) -> None:
        """Record that the batch has fitted the memory."""
        self._fitted[self._state.device_train_microbatch_size, self._shapes] += 1

    def restore(self) -> None:
        """Restore the values, drop the gradients, and empty the allocator's cache."""
        state = self._state
        state.batch, state.outputs, state.loss = self._batch, None, None
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
            if state.scaler is not None:
                # In place: a scaler that runs a closure keeps a reference. An unfinished unscale must not stay.
                state.scaler._per_optimizer_states[id(optimizer)].update(_refresh_per_optimizer_state())
        if self._is_copied:
            _copy(self._copies, self._buffers)
            set_global_states(self._generators)
        self._fitted.clear()
        empty_cache()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


@torch.no_grad()
def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    if sources:
        torch._foreach_copy_(targets, sources)


class ThrashingDetector:
    """Detects that the allocator had to free its cache in two batches in a row: the size fits, but is slow."""

    def __init__(self) -> None:
        self._retries = self._batches = 0

    def check(self) -> bool:
        """Return True if that has just happened; call it after every pass."""
        # The nested statistics are what the allocator returns; the flat ones are sorted again in each call.
        stats = torch.cuda.memory_stats_as_nested_dict() if torch.cuda.is_available() else {}
        retries = stats.get("num_alloc_retries", 0)
        self._batches = self._batches + 1 if retries > self._retries else 0
        self._retries = retries
        if self._batches < 2:
            return False
        self._batches = 0
        return True


def raise_if_cuda_error(error: BaseException) -> None:
    """Convert a CUDA error to one that says that the search cannot continue.

    Raises:
        RuntimeError: `error` comes from CUDA.
    """
    text = str(error).lower()
    if isinstance(error, RuntimeError) and ("cuda" in text or "c10" in text):
        raise RuntimeError(
            "Encountered non-addressable cuda error while using auto microbatching. Set "
            "`device_train_microbatch_size` to a number."
        ) from error


def empty_cache() -> None:
    """Free cached GPU memory, which may be fragmented."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# The outcomes of an attempt; tight: the batch fits, but nothing larger would.
_FITS, _TIGHT, _OUT_OF_MEMORY, _FAILED = range(4)


class MicrobatchSearch:
    """Runs the forward and backward pass of a batch, and halves the microbatch size until the pass fits all ranks.

    The size is also halved when the allocator of a rank had to free its cache in two batches in a row: that fits, but
    is slow.

    Args:
        state: The run's state.
        strategy: Runs the steps of all ranks.
    """

    def __init__(self, state: State, strategy: Strategy) -> None:
        self._state, self._strategy = state, strategy
        self._snapshot, self._thrashing = Snapshot(state), ThrashingDetector()

    def check(self) -> None:
        """Check that the forward pass does not communicate.

        Raises:
            ValueError: The model has a `SyncBatchNorm`.
        """
        if self._strategy.world_size == 1:
            return
        for name, module in self._state.model.named_modules():
            if isinstance(module, torch.nn.SyncBatchNorm):
                raise ValueError(
                    f"`device_train_microbatch_size='auto'` must not be used on {self._strategy.world_size} ranks with "
                    f"`torch.nn.SyncBatchNorm` (`{name}`): its forward pass waits for ranks that may have run out of "
                    f"memory. Give a number, or use `torch.nn.BatchNorm2d`."
                )

    def run(self, attempt: Callable[[], Any], samples: float) -> Any:
        """Run `attempt` until it fits the memory of all ranks, and return its result.

        Args:
            attempt: Splits the batch by `state.device_train_microbatch_size` and computes this rank's gradients
                without communicating.
            samples: This rank's samples in the batch.

        Raises:
            RuntimeError: One sample does not fit on some rank, or some rank failed for another reason.
        """
        self._snapshot.take()
        while True:
            limit = self._state.device_train_microbatch_size
            size = samples if limit is None else limit
            outcome, result = self._try(attempt)
            outcomes = self._strategy.all_gather((outcome, size, min(size, samples)))
            _raise_if_others_failed(outcomes, "the forward or backward pass of this batch")
            failed = _ranks(outcomes, _OUT_OF_MEMORY)
            if not failed:
                break
            self._snapshot.restore()
            if max(outcomes[rank][2] for rank in failed) <= 1:
                raise RuntimeError(
                    f"CUDA out of memory{self._on(failed)}: training does not fit even with "
                    f"`device_train_microbatch_size=1`. {TOO_LARGE}"
                )
            self._halve(outcomes, failed)
        self._snapshot.fitted()
        # The next batches are split further if the allocator of any rank keeps freeing its cache.
        tight = [rank for rank in _ranks(outcomes, _TIGHT) if outcomes[rank][2] > 1]
        if tight:
            self._halve(outcomes, tight, "nearly out of memory")
            empty_cache()
        return result

    def _try(self, attempt: Callable[[], Any]) -> tuple[int, Any]:
        """Run one attempt and return its outcome on this rank, and its result."""
        try:
            result = attempt()
        except Exception as error:
            if isinstance(error, RuntimeError) and is_cuda_oom(error):
                return _OUT_OF_MEMORY, None
            if not is_communication_error(error):  # do not leave the others waiting
                self._strategy.all_gather((_FAILED, 0, 0))
            raise_if_cuda_error(error)
            raise
        return _TIGHT if self._thrashing.check() else _FITS, result

    def _halve(self, outcomes: Sequence[Sequence[float]], ranks: Sequence[int], why: str = "out of memory") -> None:
        """Halve the size until it makes a difference on one of these ranks; every rank computes the same result."""
        old = max(size for _, size, _ in outcomes)
        new, largest = old, max(outcomes[rank][2] for rank in ranks)
        while new >= largest:
            new = max(int(new / 2), 1)
        self._state.device_train_microbatch_size = new
        everywhere = " on all ranks" if len(outcomes) > 1 else ""
        warnings.warn(
            f"CUDA {why} in training{self._on(ranks)}. `device_train_microbatch_size` is reduced from {_as_int(old)} "
            f"to {new}{everywhere}.",
            RuntimeWarning,
            stacklevel=3,
        )

    def _on(self, ranks: Sequence[int]) -> str:
        return f" on {_named(ranks)}" if self._strategy.world_size > 1 else ""


@contextmanager
def eval_search(evaluator: Evaluator, state: State, strategy: Strategy) -> Iterator[None]:
    """Search for the microbatch size of an evaluation on several ranks.

    An evaluation does not communicate, and ranks may have different numbers of batches. So each rank halves its own
    size, and at the end all ranks use the smallest size, or fail together.

    Args:
        evaluator: Its `device_eval_microbatch_size` is searched for.
        state: The run's state.
        strategy: The other ranks.

    Raises:
        ValueError: The model is sharded.
        RuntimeError: One sample does not fit on some rank, or some rank failed for another reason.
    """
    check_local_forward("device_eval_microbatch_size", strategy)
    initial = evaluator.device_eval_microbatch_size
    try:
        yield
    except Exception as error:
        if not is_communication_error(error):  # do not leave the others waiting
            out_of_memory = isinstance(error, RuntimeError) and is_cuda_oom(error)
            strategy.all_gather((_OUT_OF_MEMORY if out_of_memory else _FAILED, 0))
        raise
    size = evaluator.device_eval_microbatch_size
    assert size is not None, "the search starts from the loader's batch size"
    outcomes = strategy.all_gather((_FITS if size == initial else _TIGHT, size))
    _raise_if_others_failed(outcomes, f"the evaluation of {evaluator.label!r}")
    failed = _ranks(outcomes, _OUT_OF_MEMORY)
    if failed:
        raise RuntimeError(
            f"CUDA out of memory on {_named(failed)}: the evaluator {evaluator.label!r} does not fit even with "
            f"`device_eval_microbatch_size=1`. {TOO_LARGE}"
        )
    if _ranks(outcomes, _TIGHT):
        evaluator.device_eval_microbatch_size = _as_int(min(each for _, each in outcomes))


def check_local_forward(argument: str, strategy: Strategy) -> None:
    """Check that the strategy allows a search for the microbatch size.

    Raises:
        ValueError: Ranks wait for each other in a forward pass.
    """
    if strategy.collective_forward:
        raise ValueError(
            f"`{argument}='auto'` must not be used with a sharded model: its forward pass waits for ranks that may "
            f"have run out of memory. Give a number."
        )


def _raise_if_others_failed(outcomes: Iterable[Sequence[float]], where: str) -> None:
    failed = _ranks(outcomes, _FAILED)
    if failed:
        who = _named(failed)
        raise RuntimeError(f"{who.capitalize()} failed in {where}. See the log of {who} for the reason.")


def _ranks(outcomes: Iterable[Sequence[float]], outcome: int) -> list[int]:
    return [rank for rank, numbers in enumerate(outcomes) if numbers[0] == outcome]


def _as_int(size: float) -> float:
    return int(size) if size == int(size) else size


def _named(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
