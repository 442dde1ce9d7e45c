"""Writing checkpoints while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import torch

from composer.checkpoint._container import write_file
from composer.utils.iter_helpers import map_items

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """Writes checkpoints one after the other: at once, or from a copy in a thread of its own.

    Args:
        asynchronous: Whether `write` returns as soon as it has a copy of the tensors in host memory. The copy takes as
            much memory as the checkpoint; it is kept for the next one.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._copies = _HostCopies()
        self._pool: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None

    def write(self, content: dict[str, Any], path: str, then: Callable[[], None]) -> None:
        """Write a checkpoint.

        Args:
            content: What to save; it may change as soon as this returns.
            path: The file.
            then: Called when the file is whole and on the disk.

        Raises:
            OSError: This one, or the one before it, could not be written.
        """
        if not self.asynchronous:
            write_file(content, path)
            then()
            return
        self.wait()  # one copy is enough: who saves faster than the disk writes has to wait for the disk
        copied = self._copies.of(content)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        described = Event()
        self._running = self._pool.submit(_write, copied, path, then, described.set)
        # Pickling runs Python and would slow the next step; all that follows it releases the interpreter.
        described.wait()

    @property
    def busy(self) -> bool:
        """Whether a write in the background has not ended."""
        return self._running is not None and not self._running.done()

    def check(self) -> None:
        """Raise what a write in the background ended with, if it has ended."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the write in the background, and raise what it ended with."""
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


def _write(content: dict[str, Any], path: str, then: Callable[[], None], described: Callable[[], None]) -> None:
    try:
        write_file(content, path, described)
    finally:
        described()
    then()


class _HostCopies:
    """Copies of tensors in host memory, whose memory is used again."""

    def __init__(self) -> None:
        self._storages: dict[Any, torch.UntypedStorage] = {}

    def of(self, content: Any) -> Any:
        """A copy of a nested structure. Tensors that share memory share it in the copy, too."""
        storages: dict[Any, torch.UntypedStorage] = {}
        order: dict[Any, int] = {}
        copied = self._copy(content, storages, order)
        if any(key[1] == "cuda" for key in order):
            torch.cuda.synchronize()  # the copies from the device run on their own
        self._storages = storages
        return copied

    def _copy(self, value: Any, storages: dict[Any, torch.UntypedStorage], order: dict[Any, int]) -> Any:
        if isinstance(value, dict):
            return map_items(value, lambda _, item: self._copy(item, storages, order))
        if type(value) in (list, tuple):
            return type(value)(self._copy(v, storages, order) for v in value)
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value.detach(), storages, order)
        return value

    def _copy_tensor(
        self, tensor: torch.Tensor, storages: dict[Any, torch.UntypedStorage], order: dict[Any, int]
    ) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor.cpu().clone()
        source = tensor.untyped_storage()
        key = (source.data_ptr(), tensor.device.type, source.nbytes())
        if key not in order:
            # The same place in the next checkpoint, which nearly always has the same size there.
            place = order[key] = len(order)
            storage = self._storages.get(place)
            if storage is None or storage.nbytes() != source.nbytes():
                pin = tensor.device.type == "cuda"
                storage = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=pin).untyped_storage()
            storages[place] = storage.copy_(source, non_blocking=True)
        copied = torch.empty(0, dtype=tensor.dtype)
        return copied.set_(storages[order[key]], tensor.storage_offset(), tensor.size(), tensor.stride())
