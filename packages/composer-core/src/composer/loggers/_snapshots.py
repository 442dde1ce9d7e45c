"""Logged values as they were when they were logged, some of them still on their way from the device."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from composer.loggers._deferred import _UNSET, DeferredValue, _Copy

__all__ = ["Arriving", "read_metrics", "snapshot"]


class Arriving:
    """A value on the device, or on its way to the host.

    Others read the same `DeferredValue` in the training's thread, so the sending thread never touches one.
    """

    __slots__ = ("as_float", "copy", "failure", "index", "number", "value")

    def __init__(self, value: DeferredValue) -> None:
        self.value: DeferredValue | None = value
        self.as_float = value._compute is None
        self.copy: _Copy | None = None
        self.index: int | None = None
        self.number: Any = None
        self.failure: Exception | None = None
        result = value._result
        if value._copy is not None or (isinstance(result, torch.Tensor) and result.numel() != 1):
            self.settle()

    def settle(self) -> None:
        """Note where the number will be."""
        value = self.value
        if value is None:
            return
        if value._number is not _UNSET:
            self.number = value._number
        elif value._copy is not None:
            self.copy, self.index = value._copy
        else:
            try:
                self.copy = _Copy(value._result)
            except Exception as error:  # noqa: BLE001 - the training meets it where it waits for the device
                self.failure = error
        self.value = None

    def read(self) -> Any:
        """The number, or an array; waits for the copy, and raises if it failed."""
        if self.failure is not None:
            raise self.failure
        if self.copy is None:
            number = self.number
        elif self.index is None:
            return np.array(self.copy.numbers)
        else:
            number = self.copy.numbers[self.index]
        return float(number) if self.as_float else number


def snapshot(value: Any, arriving: list[Arriving], arrays: list[Any]) -> Any:
    """A value as it is now; what is not a number is put into `arrays` as well."""
    if type(value) is DeferredValue:
        number = value.settled()
        if number is not None:
            return number
    else:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, torch.Tensor):
            arrays.append(copy.deepcopy(value))
            return arrays[-1]
        if value.device.type != "cpu":
            value = DeferredValue(value.detach)
        elif value.numel() == 1:
            return value.item()
        else:
            arrays.append(value.detach().clone())
            return arrays[-1]
    value.hold()
    if value.ready:
        plain = value.plain
        if isinstance(plain, torch.Tensor):
            plain = plain.detach()
            arrays.append(plain)
        return plain
    found = Arriving(value)
    if found.copy is not None and found.index is None:
        arrays.append(value._result)
    arriving.append(found)
    return found


def read_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """A snapshot of `Sender.put_metrics` with all its values on the host; waits for their copies."""
    return {key: value.read() if type(value) is Arriving else value for key, value in metrics.items()}
