"""Tools for callbacks that save while training continues: writing in the background, and ranking by a metric."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from composer.checkpoint.file import write_file
from composer.checkpoint.sharded_tensors import map_tensors
from composer.utils import plain_int

if TYPE_CHECKING:
    from composer.core import State

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes checkpoints one after the other: synchronously, or from a copy in a background thread.

    Args:
        asynchronous: True if `write` returns as soon as it has copied the tensors to host memory. The copy takes as
            much memory as the checkpoint; it is reused for the next one.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._copies = _HostCopies()
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def write(self, content: dict[str, Any], path: str, then: Callable[[], None]) -> None:
        """Write a checkpoint.

        Args:
            content: The content, which may change as soon as this returns.
            path: The file.
            then: Called when the file is complete and on the disk.

        Raises:
            OSError: This one, or the one before it, could not be written.
        """
        if not self.asynchronous:
            write_file(content, path)
            then()
            return
        self.wait()  # only one copy is held, so saving more often than the disk can write waits for the disk
        copied = self._copies.of(content)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        pickled = Event()

        def work() -> None:
            try:
                write_file(copied, path, pickled.set)
            finally:
                pickled.set()
            then()

        self._running = self._pool.submit(work)
        # Pickling holds the GIL and would slow down the next step; everything after it releases the GIL.
        pickled.wait()

    @property
    def busy(self) -> bool:
        """True while a write in the background is running."""
        return self._running is not None and not self._running.done()

    def check(self) -> None:
        """Raise the error of a write in the background that has ended, if any."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the write in the background, and raise its error, if any."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def close(self) -> None:
        """Wait, and end the thread. Safe to call twice."""
        try:
            self.wait()
        finally:
            if self._pool is not None:
                self._pool.shutdown()
                self._pool = None


class _HostCopies:
    """Copies of tensors in host memory, reused from one checkpoint to the next."""

    def __init__(self) -> None:
        self._storages: dict[Any, torch.UntypedStorage] = {}

    def of(self, content: Any) -> Any:
        """Copy a nested structure. Tensors that share memory share it in the copy, too."""
        storages: dict[Any, torch.UntypedStorage] = {}
        order: dict[Any, int] = {}
        copied = map_tensors(content, lambda tensor: self._copy_tensor(tensor.detach(), storages, order))
        if any(key[1] == "cuda" for key in order):
            torch.cuda.synchronize()  # copies from the device are asynchronous
        self._storages = storages
        return copied

    def _copy_tensor(
        self, tensor: torch.Tensor, storages: dict[Any, torch.UntypedStorage], order: dict[Any, int]
    ) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.cpu().clone()
        source = tensor.untyped_storage()
        key = (source.data_ptr(), tensor.device.type, source.nbytes())
        if key not in order:
            # Tensors have the same order, and nearly always the same sizes, in the next checkpoint.
            place = order[key] = len(order)
            storage = self._storages.get(place)
            if storage is None or storage.nbytes() != source.nbytes():
                pin = tensor.device.type == "cuda"
                storage = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=pin).untyped_storage()
            storages[place] = storage.copy_(source, non_blocking=True)
        copied = torch.empty(0, dtype=tensor.dtype)
        return copied.set_(storages[order[key]], tensor.storage_offset(), tensor.size(), tensor.stride())


class BestCheckpoints:
    """Ranking of checkpoints by a metric.

    Args:
        count: The number to keep; 0 keeps none.
        monitor: `"<evaluator>/<metric>"`, `"train/<metric>"` or `"loss/train/<loss>"`.
        mode: `"max"` if higher is better, `"min"` if lower is.

    Raises:
        ValueError: An argument is invalid, or one is missing.
    """

    def __init__(self, count: SupportsIndex, monitor: str | None, mode: str) -> None:
        number = plain_int(count)
        if number is None or number < 0:
            raise ValueError(f"`num_best_checkpoints_to_keep` must be a number of checkpoints, got {count!r}.")
        if mode not in ("max", "min"):
            raise ValueError(f"`monitor_mode` must be 'max' or 'min', got {mode!r}.")
        if (number > 0) != (monitor is not None):
            raise ValueError(
                "`num_best_checkpoints_to_keep` and `monitor` must be given together: the number to keep, and the "
                "metric to rank by, for example `monitor='eval/MulticlassAccuracy'`."
            )
        if monitor is not None and "/" not in monitor:
            raise ValueError(
                f"`monitor` must name an evaluator and its metric, for example 'eval/{monitor}', got {monitor!r}."
            )
        self.count, self.monitor, self.mode = number, monitor, mode
        self.values: dict[str, float] = {}

    @property
    def evaluator(self) -> str | None:
        """The evaluator whose metric is monitored."""
        return None if self.monitor is None else self.monitor.partition("/")[0]

    @property
    def paths(self) -> list[str]:
        """The best checkpoints, the best first; of equals, the earlier is the better."""
        sign = -1 if self.mode == "max" else 1
        return sorted(self.values, key=lambda path: sign * self.values[path])[: self.count]

    @property
    def path(self) -> str | None:
        """The best checkpoint."""
        return next(iter(self.paths), None)

    def check(self, state: State) -> None:
        """Check that the run has the metric.

        Raises:
            ValueError: The run has no such metric; the message lists its metrics.
        """
        if self.monitor is None or self.monitor.startswith("loss/"):
            return
        known = [f"{label}/{name}" for label, metrics in state.eval_metrics.items() for name in metrics]
        known += [f"train/{name}" for name in state.train_metrics]
        if self.monitor not in known:
            raise ValueError(
                f"`monitor` must be a metric of this run, got {self.monitor!r}. It has: {', '.join(known) or 'none'}."
            )

    def consider(self, path: str, state: State) -> None:
        """Add a checkpoint that is about to be saved, with the current value of the metric."""
        if self.monitor is None:
            return
        label, _, name = self.monitor.partition("/")
        if label == "loss":
            value: Any = state.total_loss_dict.get(self.monitor)
        else:
            metric = (state.train_metrics if label == "train" else state.eval_metrics[label])[name]
            value = metric.compute() if metric.update_called else None
        if value is None or math.isnan(value := float(value)):
            log.info("%s has no value yet, so %s is not ranked.", self.monitor, path)
            return
        self.values[path] = value
        self.values = {kept: self.values[kept] for kept in self.values if kept in self.paths}

    def state_dict(self) -> dict[str, Any]:
        """Return the values by path."""
        return {"monitor": self.monitor, "values": dict(self.values)}

    def restore(self, saved: dict[str, Any], existing: Mapping[str, str]) -> None:
        """Restore the values of the checkpoints that still exist, if they are of the same metric.

        Args:
            saved: The result of `state_dict`. Its paths may be from another run, or from
                before the folder was moved.
            existing: The path of each checkpoint of this run by its name in the folder.
        """
        if self.monitor is None or saved.get("monitor") != self.monitor:
            return
        for path, value in saved["values"].items():
            own = next((own for name, own in existing.items() if f"/{path}".endswith(f"/{name}")), None)
            if own is not None:
                self.values[own] = value
