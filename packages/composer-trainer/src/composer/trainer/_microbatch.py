"""The search for the largest microbatch that fits the GPU: start with the whole batch, halve when memory runs out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from composer.core import Evaluator, State

__all__ = [
    "MicrobatchSearch",
    "adjust_device_eval_microbatch_size",
    "adjust_device_train_microbatch_size",
    "is_cuda_oom",
]

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
    evaluator.device_eval_microbatch_size = _halved(
        "device_eval_microbatch_size", evaluator.device_eval_microbatch_size, f"the evaluator {evaluator.label!r}"
    )


def _halved(name: str, size: float | None, what: str) -> int:
    assert size is not None, "the search starts from the loader's batch size"
    if size <= 1:
        raise RuntimeError(
            f"CUDA out of memory: {what} does not fit even with `{name}=1`. Use a smaller model, a shorter or smaller "
            f"input, or a lower precision."
        )
    smaller = max(int(size / 2), 1)
    warnings.warn(
        f"CUDA out of memory in {what}. `{name}` goes from {size} to {smaller}.", RuntimeWarning, stacklevel=4
    )
    return smaller


class MicrobatchSearch:
    """Runs the forward and backward pass of a batch; halves the microbatch size and runs it again when memory runs out.

    Also halves when the allocator had to free its cache in two batches in a row: that fits, but is slow.

    Args:
        state: The run's state.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._retries = 0
        self._thrashed = 0

    def run(self, attempt: Callable[[], Any]) -> Any:
        """What `attempt` returns once it fits.

        Args:
            attempt: Splits the batch by `state.device_train_microbatch_size` and computes its gradients.

        Raises:
            RuntimeError: One sample does not fit, or CUDA failed for another reason.
        """
        while True:
            try:
                result = attempt()
            except RuntimeError as error:
                if not is_cuda_oom(error):
                    text = str(error).lower()
                    if "cuda" in text or "c10" in text:
                        raise RuntimeError(
                            "Encountered non-addressable cuda error while using auto microbatching. Set "
                            "`device_train_microbatch_size` to a number."
                        ) from error
                    raise
            else:
                self._watch_for_thrashing()
                return result
            self._clean_up()
            adjust_device_train_microbatch_size(self._state)

    def _clean_up(self) -> None:
        state = self._state
        state.outputs = state.loss = None
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
            if state.scaler is not None:
                state.scaler._per_optimizer_states.pop(id(optimizer), None)  # an unfinished unscale would be kept
        _empty_cache()

    def _watch_for_thrashing(self) -> None:
        retries = torch.cuda.memory_stats().get("num_alloc_retries", 0) if torch.cuda.is_available() else 0
        self._thrashed = self._thrashed + 1 if retries > self._retries else 0
        self._retries = retries
        size = self._state.device_train_microbatch_size
        if self._thrashed == 2 and size is not None and size > 1:
            self._thrashed = 0
            adjust_device_train_microbatch_size(self._state)
            _empty_cache()


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
