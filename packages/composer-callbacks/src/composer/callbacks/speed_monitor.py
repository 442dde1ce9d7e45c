"""Log throughput and training time."""

from __future__ import annotations

import re
import warnings
from collections import deque
from typing import Any, SupportsIndex

import torch

from composer.callbacks._units import seconds_in
from composer.core import Callback, Precision, State
from composer.loggers import DeferredValue, Logger
from composer.utils import check_finite, dist, int_at_least, unwrapped_model

GPU_AVAILABLE_FLOPS: dict[str, dict[str, float]] = {
    "b200": {"fp32": 75e12, "tf32": 1.1e15, "amp_fp16": 2.25e15, "amp_bf16": 2.25e15, "amp_fp8": 4.5e15},
    "h200": {"fp32": 67e12, "tf32": 494.5e12, "amp_fp16": 989.5e12, "amp_bf16": 989.5e12, "amp_fp8": 1.979e15},
    "h100 nvl": {"fp32": 60e12, "tf32": 417.5e12, "amp_fp16": 835.5e12, "amp_bf16": 835.5e12, "amp_fp8": 1.6705e15},
    "h100 pcie": {"fp32": 51e12, "tf32": 378e12, "amp_fp16": 756.5e12, "amp_bf16": 756.5e12, "amp_fp8": 1.513e15},
    "h100": {"fp32": 67e12, "tf32": 494.5e12, "amp_fp16": 989.5e12, "amp_bf16": 989.5e12, "amp_fp8": 1.979e15},
    "a100": {"fp32": 19.5e12, "tf32": 156e12, "amp_fp16": 312e12, "amp_bf16": 312e12},
    "a10g": {"fp32": 31.5e12, "tf32": 35e12, "amp_fp16": 70e12, "amp_bf16": 70e12},
    "a10": {"fp32": 31.2e12, "tf32": 62.5e12, "amp_fp16": 125e12, "amp_bf16": 125e12},
    "l40s": {"fp32": 91.6e12, "tf32": 183e12, "amp_fp16": 362e12, "amp_bf16": 362e12, "amp_fp8": 733e12},
    "l4": {"fp32": 30.3e12, "tf32": 60e12, "amp_fp16": 121e12, "amp_bf16": 121e12, "amp_fp8": 242.5e12},
    "v100-sxm2": {"fp32": 15.7e12, "amp_fp16": 125e12},
    "v100-pcie": {"fp32": 14e12, "amp_fp16": 112e12},
    "t4": {"fp32": 8.1e12, "amp_fp16": 65e12},
}
"""Floating-point operations per second without sparsity, from the vendor's data sheets, by part of the device's name
(in lower case) and precision; "tf32" is fp32 after `torch.set_float32_matmul_precision("high")`."""


class SpeedMonitor(Callback):
    """Logs the throughput over a window of batches, and the training time.

    Throughput is measured from the end of the first to the end of the last batch of the window. Evaluation does not
    count as training time. Keys with `device` are per rank, the others are totals over all ranks.

    If the model has a method `flops_per_batch(batch)`, which returns the number of floating-point operations for
    training on the batch of this rank, operations per second and model FLOPs utilization are logged too.

    **Events** INIT, FIT_START, BATCH_END, EVAL_END.
    **Cost** none on the device; with several ranks and `flops_per_batch`, one all-reduce of a number per batch.

    Args:
        window_size: Number of batches of the window, at least 1. Throughput is logged from batch `window_size + 1` on.
        gpu_flops_available: Peak of the device in operations per second; None: look it up in `GPU_AVAILABLE_FLOPS`.
        time_unit: The unit of `time/...`: "seconds", "minutes", "hours" or "days".

    Attributes:
        history_samples: Total number of samples at the end of each batch of the window.
        history_tokens: Total number of tokens at the end of each batch of the window.
        history_wct: Total training time in seconds at the end of each batch of the window.
        history_flops: Operations of each batch of the window on this rank.
        total_eval_wct: Evaluation time in seconds.

    Raises:
        ValueError: An argument is out of range.
        TypeError: At INIT, if `flops_per_batch` of the model is not a method.

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

    Differs: a loop that does not record the duration of its batches logs no throughput, instead of a division by zero.
        Operations are summed over ranks on the device, without synchronization.
    """

    def __init__(
        self, window_size: SupportsIndex = 100, gpu_flops_available: float | None = None, time_unit: str = "hours"
    ) -> None:
        number = int_at_least("window_size", window_size, 1, "batch", "Use 100.")
        if gpu_flops_available is not None:
            check_finite("Leave it out to look it up.", gpu_flops_available=gpu_flops_available, above=0)
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
        """Return the attributes without the method of the model, for copies."""
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
            self.gpu_flops_available = _look_up_peak(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._find_flops(state)

    def _find_flops(self, state: State) -> None:
        # Not in every batch: looking up a missing attribute of a module takes microseconds.
        self._ranks = dist.get_world_size()
        method = getattr(unwrapped_model(state.model), "flops_per_batch", None)
        if method is not None and not callable(method):
            raise TypeError(
                f"`flops_per_batch` of the model must be a method that takes a batch, got {type(method).__name__}. "
                f"Define `def flops_per_batch(self, batch)`."
            )
        self._flops_per_batch = method

    def batch_end(self, state: State, logger: Logger) -> None:
        now = state.timestamp
        seconds = now.total_seconds
        self.history_samples.append(now.samples)
        self.history_tokens.append(now.tokens)
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
            rates = {
                "batches_per_sec": self.window_size / elapsed,
                "samples_per_sec": (self.history_samples[-1] - self.history_samples[0]) / elapsed,
            }
            tokens = self.history_tokens[-1] - self.history_tokens[0]
            if tokens > 0:
                rates["tokens_per_sec"] = tokens / elapsed
            for name, rate in rates.items():
                logged[f"throughput/{name}"] = rate
                logged[f"throughput/device/{name}"] = rate / self._ranks
            if len(self.history_flops) > self.window_size:
                self._add_flops(logged, elapsed, state)
        logger.log_metrics(logged)

    def eval_end(self, state: State, logger: Logger) -> None:
        self.total_eval_wct += state.eval_timestamp.total_wct.total_seconds()

    def _add_flops(self, logged: dict[str, Any], elapsed: float, state: State) -> None:
        total: Any = (sum(self.history_flops) - self.history_flops[0]) / elapsed
        ranks, peak = self._ranks, self.gpu_flops_available
        if ranks > 1:  # summed on the device, and read when a logger writes it
            total = torch.full((), total, dtype=torch.float32, device=state.device._device)
            dist.all_reduce(total)
        rates = {"throughput/flops_per_sec": total, "throughput/device/flops_per_sec": total / ranks}
        if peak:
            rates["throughput/device/mfu"] = total / (ranks * peak)
        logged |= rates if ranks == 1 else {name: DeferredValue.of_tensor(rate) for name, rate in rates.items()}

    def _clear(self) -> None:
        for history in (self.history_samples, self.history_tokens, self.history_wct, self.history_flops):
            history.clear()


def _look_up_peak(state: State) -> float:
    """Return the peak of the device of the run; 0, with a warning on GPUs, if it is unknown."""
    if state.device.name != "gpu":
        return 0.0
    name = torch.cuda.get_device_name()
    peak = _peak_flops(name, state.precision)
    if not peak:
        warnings.warn(
            f"The peak of {name!r} in {state.precision.value} is not known, so `throughput/device/mfu` is not logged. "
            f"Pass `gpu_flops_available` to `SpeedMonitor`.",
            stacklevel=2,
        )
    return peak


def _peak_flops(device_name: str, precision: Precision) -> float:
    """Return the peak of a GPU in operations per second; 0 if it is unknown.

    Args:
        device_name: The result of `torch.cuda.get_device_name`.
        precision: The numerical precision of the run.
    """
    text = device_name.lower()
    for name, peaks in GPU_AVAILABLE_FLOPS.items():
        # A variant may follow ("a100-sxm4-80gb"), but not the rest of another model number ("a1000", "l40").
        if all(re.search(rf"\b{re.escape(part)}(?![0-9a-z])", text) for part in name.split()):
            key = precision.value
            if precision is Precision.FP32 and torch.get_float32_matmul_precision() != "highest" and "tf32" in peaks:
                key = "tf32"
            return peaks.get(key, 0.0)
    return 0.0
