"""Logs throughput and training time."""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any, ClassVar, SupportsIndex

import torch

from composer.callbacks._flops import GPU_AVAILABLE_FLOPS as GPU_AVAILABLE_FLOPS
from composer.callbacks._flops import peak_flops
from composer.callbacks._units import Declared, seconds_in
from composer.core import Callback, State
from composer.loggers import DeferredValue, Logger
from composer.utils import check_finite, dist, plain_int, unwrapped_model

__all__ = ["GPU_AVAILABLE_FLOPS", "SpeedMonitor"]


class SpeedMonitor(Callback):
    """Logs how fast the run trains, over a window of batches, and for how long it has.

    Throughput is what was trained between the ends of the first and the last batch of the window, divided by the
    training time between them. Evaluation does not count as training time. Keys without `device` are over all ranks,
    those with it per rank.

    If the model has a method `flops_per_batch(batch)`, which says how many floating-point operations training on this
    rank's batch takes, operations per second are logged too, and how much of the device's peak they are.

    **Events** INIT, FIT_START, BATCH_END, EVAL_END.
    **Cost** none on the device; with several ranks and `flops_per_batch`, one sum of a number over the ranks per batch.

    Args:
        window_size: Batches of the window, at least 1. Throughput is logged once `window_size + 1` have been trained.
        gpu_flops_available: The device's peak in operations per second; None looks it up in `GPU_AVAILABLE_FLOPS`.
        time_unit: The unit of `time/...`: "seconds", "minutes", "hours" or "days".

    Attributes:
        history_samples: Samples trained by the run, at the end of each batch of the window.
        history_tokens: The same for tokens.
        history_wct: The same for training time in seconds.
        history_flops: Operations of each batch of the window, of this rank.
        total_eval_wct: Seconds of evaluation.

    Raises:
        ValueError: An argument cannot work.
        TypeError: At INIT: `flops_per_batch` of the model is no method.

    Example:
        >>> from composer.core import Engine, Timestamp
        >>> from datetime import timedelta
        >>> monitor = SpeedMonitor(window_size=1, time_unit="seconds")
        >>> state = State(model=torch.nn.Linear(1, 1), max_duration="2ba", dataloader=[0, 0], callbacks=monitor)
        >>> engine = Engine(state)
        >>> for _ in range(2):
        ...     state.timestamp = state.timestamp.to_next_batch(samples=8, duration=timedelta(seconds=2))
        ...     _ = engine.run_event("batch_end")
        >>> (monitor.history_samples[1] - monitor.history_samples[0]) / 2
        4.0

    Differs: a loop that does not tell the duration of its batches gets no throughput, rather than a division by zero.
        Operations are summed over ranks on the device, without waiting.
    """

    metrics: ClassVar[Declared] = {
        "throughput/batches_per_sec": ("batches/s", "batches, one per step of all ranks together"),
        "throughput/samples_per_sec": ("samples/s", "samples over all ranks"),
        "throughput/tokens_per_sec": ("tokens/s", "tokens over all ranks; if tokens are counted"),
        "throughput/flops_per_sec": ("operations/s", "operations over all ranks; if the model has `flops_per_batch`"),
        "throughput/device/batches_per_sec": ("batches/s", "the same divided by the number of ranks"),
        "throughput/device/samples_per_sec": ("samples/s", "samples per rank"),
        "throughput/device/tokens_per_sec": ("tokens/s", "tokens per rank; if tokens are counted"),
        "throughput/device/flops_per_sec": ("operations/s", "operations per rank; if the model has `flops_per_batch`"),
        "throughput/device/mfu": ("1", "model FLOPs utilization: operations per rank as a part of the device's peak"),
        "time/train": ("`time_unit`", "training time of the run"),
        "time/val": ("`time_unit`", "evaluation time of the run"),
        "time/total": ("`time_unit`", "the sum of both"),
    }

    def __init__(
        self, window_size: SupportsIndex = 100, gpu_flops_available: float | None = None, time_unit: str = "hours"
    ) -> None:
        number = plain_int(window_size)
        if number is None or number < 1:
            raise ValueError(f"`window_size` must be at least 1 batch, got {window_size!r}. Use 100.")
        if gpu_flops_available is not None:
            check_finite(gpu_flops_available=gpu_flops_available)
        if gpu_flops_available is not None and not gpu_flops_available > 0:
            raise ValueError(
                f"`gpu_flops_available` must be positive, got {gpu_flops_available!r}. Leave it out to look it up."
            )
        self.window_size = number
        self.gpu_flops_available: float | None = gpu_flops_available
        self._given_flops = gpu_flops_available
        self._divider = seconds_in(time_unit)
        self.history_samples: deque[int] = deque(maxlen=number + 1)
        self.history_tokens: deque[int] = deque(maxlen=number + 1)
        self.history_wct: deque[float] = deque(maxlen=number + 1)
        self.history_flops: deque[float] = deque(maxlen=number + 1)
        self.total_eval_wct = 0.0
        self._flops_per_batch: Any = None
        self._ranks = 1

    def __getstate__(self) -> dict[str, Any]:
        """Without the model, for copies."""
        return {**vars(self), "_flops_per_batch": None}

    def state_dict(self) -> dict[str, Any]:
        return {"total_eval_wct": self.total_eval_wct}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clear()
        self.total_eval_wct = state["total_eval_wct"]

    def init(self, state: State, logger: Logger) -> None:
        self._clear()
        self.total_eval_wct = 0.0
        self.gpu_flops_available = self._given_flops
        self._find_flops(state)
        if self._given_flops is None and self._flops_per_batch is not None:
            self.gpu_flops_available = _looked_up(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._find_flops(state)

    def _find_flops(self, state: State) -> None:
        """Ask once, not in every batch: a module takes microseconds to say that it has no such method."""
        self._ranks = dist.get_world_size()
        found = getattr(unwrapped_model(state.model), "flops_per_batch", None)
        if found is not None and not callable(found):
            raise TypeError(
                f"`flops_per_batch` of the model must be a method that takes a batch, got {type(found).__name__}. "
                f"Define `def flops_per_batch(self, batch)`."
            )
        self._flops_per_batch = found

    def batch_end(self, state: State, logger: Logger) -> None:
        now = state.timestamp
        seconds = now._total_wct.total_seconds()
        self.history_samples.append(now._sample)
        self.history_tokens.append(now._token)
        self.history_wct.append(seconds)
        if self._flops_per_batch is not None:
            self.history_flops.append(float(self._flops_per_batch(state.batch)))
        elif not logger.destinations:
            return
        divider = self._divider
        logged: dict[str, Any] = {
            "time/train": seconds / divider,
            "time/val": self.total_eval_wct / divider,
            "time/total": (seconds + self.total_eval_wct) / divider,
        }
        elapsed = seconds - self.history_wct[0]
        if len(self.history_wct) > self.window_size and elapsed > 0:
            self._add_throughput(logged, elapsed)
            if len(self.history_flops) > self.window_size:
                self._add_flops(logged, elapsed, state)
        logger.log_metrics(logged)

    def eval_end(self, state: State, logger: Logger) -> None:
        self.total_eval_wct += state.eval_timestamp.total_wct.total_seconds()

    def _add_throughput(self, logged: dict[str, Any], elapsed: float) -> None:
        ranks = self._ranks
        batches = self.window_size / elapsed
        samples = (self.history_samples[-1] - self.history_samples[0]) / elapsed
        logged["throughput/batches_per_sec"] = batches
        logged["throughput/samples_per_sec"] = samples
        logged["throughput/device/batches_per_sec"] = batches / ranks
        logged["throughput/device/samples_per_sec"] = samples / ranks
        tokens = self.history_tokens[-1] - self.history_tokens[0]
        if tokens > 0:
            logged["throughput/tokens_per_sec"] = tokens / elapsed
            logged["throughput/device/tokens_per_sec"] = tokens / elapsed / ranks

    def _add_flops(self, logged: dict[str, Any], elapsed: float, state: State) -> None:
        speed = (sum(self.history_flops) - self.history_flops[0]) / elapsed
        ranks = self._ranks
        peak = self.gpu_flops_available
        if ranks == 1:
            logged["throughput/flops_per_sec"] = logged["throughput/device/flops_per_sec"] = speed
            if peak:
                logged["throughput/device/mfu"] = speed / peak
            return
        # Filled on the device, summed there, and read by who writes it down.
        total = torch.full((), speed, dtype=torch.float32, device=state.device._device)
        dist.all_reduce(total)
        logged["throughput/flops_per_sec"] = DeferredValue.of_tensor(total)
        logged["throughput/device/flops_per_sec"] = DeferredValue.of_tensor(total / ranks)
        if peak:
            logged["throughput/device/mfu"] = DeferredValue.of_tensor(total / (ranks * peak))

    def _clear(self) -> None:
        for history in (self.history_samples, self.history_tokens, self.history_wct, self.history_flops):
            history.clear()


def _looked_up(state: State) -> float:
    """The peak of the run's device; 0, with a warning on GPUs, if it is not known."""
    if state.device.name != "gpu":
        return 0.0
    name = torch.cuda.get_device_name()
    found = peak_flops(name, state.precision)
    if not found:
        warnings.warn(
            f"The peak of {name!r} in {state.precision.value} is not known, so `throughput/device/mfu` is not logged. "
            f"Pass `gpu_flops_available` to `SpeedMonitor`.",
            stacklevel=2,
        )
    return found
