"""The search for the largest microbatch that fits the GPU: start with the whole batch, halve when memory runs out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from composer.core import Evaluator, State
from composer.trainer._generators import global_states, set_global_states
from composer.utils import dist

__all__ = [
    "TOO_LARGE",
    "Before",
    "MicrobatchSearch",
    "Thrashing",
    "adjust_device_eval_microbatch_size",
    "adjust_device_train_microbatch_size",
    "empty_cache",
    "is_cuda_oom",
    "raise_if_of_cuda",
]

TOO_LARGE = "Use a smaller model, a shorter or smaller input, or a lower precision."

_OOM_TEXTS = ("CUDA out of memory", "CUDA error: out of memory")
_CUDNN_TEXT = "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input."


def is_cuda_oom(error: BaseException) -> bool:
    """Whether an error says that GPU memory ran out."""
    text = str(error)
    if isinstance(error, torch.cuda.OutOfMemoryError) or any(part in text for part in _OOM_TEXTS):
        return True
    if _CUDNN_TEXT in text:
        warnings.warn(
            f"cuDNN refused an operation, which mostly means too little workspace memory; treated as out of memory. "
            f"The error was: {text}",
            stacklevel=2,
        )
        return True
    return False


def adjust_device_train_microbatch_size(state: State) -> None:
    """Halve `state.device_train_microbatch_size`.

    Raises:
        RuntimeError: It is 1 already.
    """
    state.device_train_microbatch_size = _halved(
        "device_train_microbatch_size", state.device_train_microbatch_size, "training"
    )


def adjust_device_eval_microbatch_size(evaluator: Evaluator) -> None:
    """Halve an evaluator's `device_eval_microbatch_size`.

    Raises:
        RuntimeError: It is 1 already.
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
        f"CUDA out of memory in {what}. `{name}` goes from {size} to {smaller}.", RuntimeWarning, stacklevel=4
    )
    return smaller


class Before:
    """What a try that fails leaves changed, and the next one has to find as it was.

    That is the batch, the model's buffers (such as running statistics) and the global random generators, so that a run
    that had to search trains like one that knew the size from the start.

    Args:
        state: The run's state.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._generators: dict[str, Any] = {}
        self._batch: Any = None

    def note(self) -> None:
        """Keep what is now. The device is not waited for."""
        self._buffers = [buffer for buffer in self._state.model.buffers() if not buffer.is_meta]
        if [*map(_form, self._buffers)] != [*map(_form, self._copies)]:
            self._copies = [*map(torch.empty_like, self._buffers)]
        _copy(self._buffers, self._copies)
        self._generators, self._batch = global_states(), self._state.batch

    def restore(self) -> None:
        """Bring it back, drop what a try computed, and let the allocator start anew."""
        state = self._state
        state.batch, state.outputs, state.loss = self._batch, None, None
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
            if state.scaler is not None:
                # In place: a scaler that runs a closure holds on to it. An unfinished unscale would be kept.
                state.scaler._per_optimizer_states[id(optimizer)].update(_refresh_per_optimizer_state())
        _copy(self._copies, self._buffers)
        set_global_states(self._generators)
        empty_cache()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


@torch.no_grad()
def _copy(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    if sources:
        torch._foreach_copy_(targets, sources)


class Thrashing:
    """Notices when the allocator had to free its cache in two batches in a row: what is tried fits, but is slow."""

    def __init__(self) -> None:
        self._retries = self._batches = 0

    def found(self) -> bool:
        """Whether it did now; to be asked after every pass."""
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0
        self._batches = self._batches + 1 if retries > self._retries else 0
        self._retries = retries
        if self._batches < 2:
            return False
        self._batches = 0
        return True


class MicrobatchSearch:
    """Runs the forward and backward pass of a batch; halves the microbatch size and runs it again when memory runs out.

    Also halves when the allocator had to free its cache in two batches in a row: that fits, but is slow. For one
    process; several search together, see `composer.trainer._lockstep`.

    Args:
        state: The run's state.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._before, self._thrashing = Before(state), Thrashing()

    def run(self, attempt: Callable[[], Any]) -> Any:
        """What `attempt` returns once it fits.

        Args:
            attempt: Splits the batch by `state.device_train_microbatch_size` and computes its gradients.

        Raises:
            RuntimeError: One sample does not fit, or CUDA failed for another reason.
        """
        self._before.note()
        while True:
            try:
                result = attempt()
            except RuntimeError as error:
                if not is_cuda_oom(error):
                    raise_if_of_cuda(error)
                    raise
            else:
                self._watch_for_thrashing()
                return result
            self._before.restore()
            adjust_device_train_microbatch_size(self._state)

    def _watch_for_thrashing(self) -> None:
        size = self._state.device_train_microbatch_size
        if self._thrashing.found() and size is not None and size > 1:
            adjust_device_train_microbatch_size(self._state)
            empty_cache()


def raise_if_of_cuda(error: BaseException) -> None:
    """Say of an error of CUDA that the search cannot go on.

    Raises:
        RuntimeError: It is one.
    """
    text = str(error).lower()
    if isinstance(error, RuntimeError) and ("cuda" in text or "c10" in text):
        raise RuntimeError(
            "Encountered non-addressable cuda error while using auto microbatching. Set "
            "`device_train_microbatch_size` to a number."
        ) from error


def empty_cache() -> None:
    """Give cached GPU memory back, of which none may be left in pieces that are large enough."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
