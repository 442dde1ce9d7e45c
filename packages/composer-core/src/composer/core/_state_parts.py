"""What a state works out of batches, loaders, models and values that were not read yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from composer.devices import Device
from composer.utils.device import get_device

__all__ = ["device_of", "length_of", "pair_of", "resolved"]


def resolved(values: dict[str, Any], tensors: bool = False) -> dict[str, Any]:
    """The values, each read from the device now if it has not been; with `tensors`, those in tensors too."""
    from composer.core.deferred_value import DeferredValue

    for key, value in values.items():
        if isinstance(value, DeferredValue):
            values[key] = value.value
        elif tensors and isinstance(value, torch.Tensor):
            values[key] = value.item()
    return values


def pair_of(batch: Any) -> Sequence[Any]:
    """The two parts of a batch."""
    if batch is None:  # `for state.inputs, state.targets in loader` begins with no batch at all
        return (None, None)
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(
            f"`state.inputs` and `state.targets` are the parts of a pair, but the batch is a {type(batch).__name__}. "
            f"Use `state.batch_get_item(key)` and `state.batch_set_item(key, value)`."
        )
    return batch


def device_of(model: torch.nn.Module) -> Device:
    """The device a model is on."""
    tensor = next(model.parameters(), next(model.buffers(), None))
    names = {"cpu": "cpu", "cuda": "gpu", "mps": "mps"}
    return get_device(None if tensor is None else names.get(tensor.device.type))


def length_of(dataloader: Any) -> int | None:
    """The number of batches; None if the loader is not sized (also torch's loader over an unsized dataset)."""
    try:
        return len(dataloader)
    except (TypeError, NotImplementedError):
        return None
