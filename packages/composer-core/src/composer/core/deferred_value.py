"""Values that are logged while they are still on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

_UNSET: Any = object()
_NEW = object.__new__


class DeferredValue:
    """A logged value that may still be on the device; a logger reads it only when it needs the number.

    Reading a number from the device makes the host wait for the device. A training step that logs `DeferredValue`
    objects never waits; a logger reads them when it writes a file, prints a line or redraws a progress bar.

    There are two forms. `DeferredValue.of_tensor(tensor)` wraps the number in a tensor and reads as a float; a loss is
    logged this way. `DeferredValue(compute)` calls `compute` when the value is first needed, which may be never; a
    training metric is logged this way. The second form can only be computed while the data of its batch exists: a
    logger that needs the value later must call `hold` in its `log_metrics`.

    `compute` may be a collective operation. So call `hold` and `value` on every rank or on none: decide by counting
    batches, never by the clock or the rank. Reading a value that is held needs no communication.

    Args:
        compute: Computes the value on the device. Called at most once. The tensor it returns is cloned, because a
            metric may return its own running state.

    Example:
        >>> loss = DeferredValue.of_tensor(torch.tensor(0.5))
        >>> loss.value, f"{loss:.2f}"
        (0.5, '0.50')
        >>> accuracy = DeferredValue(lambda: torch.tensor(0.75))
        >>> accuracy.hold().value
        tensor(0.7500)
        >>> float(accuracy)
        0.75
    """

    __slots__ = ("_compute", "_copy", "_number", "_result")

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute: Callable[[], Any] | None = compute  # None: made by `of_tensor`
        self._result: Any = _UNSET
        self._number: Any = _UNSET  # the result, on the host
        self._copy: tuple[HostCopy, int] | None = None  # a running copy to the host, and the index in it

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> DeferredValue:
        """Wrap a tensor of one number, which is read as a float.

        Args:
            tensor: One element, any floating dtype; without a graph (`tensor.detach()`). It is stored, not copied, so
                it must not be changed in place afterwards.
        """
        self = _NEW(cls)  # without `__init__`: called at every step
        self._compute, self._result = None, tensor
        self._number, self._copy = _UNSET, None
        return self

    @property
    def held(self) -> bool:
        """True if the value can be read after its batch is over."""
        return self._result is not _UNSET

    @property
    def ready(self) -> bool:
        """True if the number can be read without waiting for the device."""
        if self._number is not _UNSET:
            return True
        if self._copy is not None:
            return self._copy[0].ready
        result = self._result
        return result is not _UNSET and not (isinstance(result, torch.Tensor) and result.device.type != "cpu")

    @property
    def value(self) -> Any:
        """The value: a float for `of_tensor`, otherwise the result of `compute`.

        Raises:
            RuntimeError: The batch is over and the value was not held.
        """
        if self._compute is None:
            return float(self._read())
        return self.hold()._result

    @property
    def plain(self) -> Any:
        """`value`, as a Python number if it has one element. Waits for the device if necessary.

        Raises:
            RuntimeError: The batch is over and the value was not held.
        """
        if self._compute is None:
            return float(self._read())
        result = self.hold()._result
        return self._read() if isinstance(result, torch.Tensor) and result.numel() == 1 else result

    def cpu_number(self) -> float | None:
        """Return the number of `of_tensor` if its tensor is on the CPU, else None; three times as fast as `plain`."""
        tensor = self._result
        if self._compute is not None or tensor is None or not tensor.is_cpu:
            return None
        self._number = number = float(tensor.item())
        self._result = None
        return number

    def hold(self) -> DeferredValue:
        """Compute the value now, on the device, without reading it, so that it outlives its batch.

        Returns:
            This object.

        Raises:
            RuntimeError: The batch is over and the value was not held.
        """
        if self._result is _UNSET:
            assert self._compute is not None
            result = self._compute()
            self._result = result.detach().clone() if isinstance(result, torch.Tensor) else result
            self._compute = _expired  # releases the batch
        return self

    def expire(self) -> None:
        """Release the data of the batch; afterwards only a value that is held can be read.

        The training loop calls it when the batch is over.
        """
        if self._compute is not None:
            self._compute = _expired

    @staticmethod
    def fetch(values: Iterable[DeferredValue]) -> None:
        """Hold the values and start copying them to the host, together and without waiting.

        `ready` is True once a value has arrived; reading it earlier waits. Only CUDA devices copy in the background;
        with others this call waits.

        Args:
            values: Values on any devices; those already fetched or read are skipped.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[DeferredValue, torch.Tensor]]] = {}
        for value in values:
            if value._number is _UNSET and value._copy is None:
                result = value.hold()._result
                if isinstance(result, torch.Tensor) and result.numel() == 1:
                    groups.setdefault((result.device, result.dtype), []).append((value, result))
        for (device, _), group in groups.items():
            if device.type == "cpu":
                for value, tensor in group:
                    value._number = tensor.item()
                continue
            copy = HostCopy(torch.stack([tensor.detach().reshape(()) for _, tensor in group]))
            for i, (value, _) in enumerate(group):
                value._copy = (copy, i)

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor on the device; None if the value is not held, is no tensor, or has been read as a float."""
        return self._result if isinstance(self._result, torch.Tensor) else None

    def reader(self) -> Callable[[], Any]:
        """Start the copy to the host unless it runs already, and return a function that waits for it.

        The function returns the number, or an array, and may be called in another thread: it does not use this object,
        which must be held.
        """
        convert = float if self._compute is None else _unchanged
        if self._number is not _UNSET:
            number = convert(self._number)
            return lambda: number
        if self._copy is not None:
            copy, index = self._copy
            return lambda: convert(copy.numbers[index])
        array = HostCopy(self._result)
        return lambda: np.array(array.numbers)

    def _read(self) -> Any:
        if self._number is _UNSET:
            if self._copy is not None:
                copy, i = self._copy
                self._number, self._copy = copy.numbers[i], None
            else:
                result = self.hold()._result
                self._number = result.item() if isinstance(result, torch.Tensor) else result
            if self._compute is None:
                self._result = None  # frees the device memory
        return self._number

    def __float__(self) -> float:
        return float(self._read())

    def __format__(self, spec: str) -> str:
        return format(self.plain, spec)

    def __repr__(self) -> str:
        if self._number is not _UNSET:
            return f"DeferredValue({self._number!r})"
        state = "expired" if self._compute is _expired and self._result is _UNSET else "not read"
        return f"DeferredValue(<{state}>)"


class HostCopy:
    """Numbers that are being copied to the host."""

    __slots__ = ("_event", "_host", "_numbers")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._numbers: list[Any] | None = None
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = tensor.to("cpu", non_blocking=True)  # into pinned memory
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.cpu()

    @property
    def ready(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> torch.Tensor:
        """Return the tensor on the host, once it has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host

    @property
    def numbers(self) -> list[Any]:
        if self._numbers is None:
            self._numbers = self.wait().tolist()
        return self._numbers


def _unchanged(number: Any) -> Any:
    return number


def _expired() -> Any:
    raise RuntimeError(
        "This `DeferredValue` must be held to outlive its batch: the batch is over and its data is released. Call its "
        "`hold()` in `log_metrics`, or log to a destination with `accepts_deferred = False`, which gets plain numbers."
    )
