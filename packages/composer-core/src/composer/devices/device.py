"""The interface of a device, and how batches and optimizers move to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

__all__ = ["Device"]

T_nnModule = TypeVar("T_nnModule", bound=torch.nn.Module)
_STRINGS = (str, bytes, bytearray)


class Device(ABC):
    """Where the model and the batches of a run live.

    Attributes:
        dist_backend: The `torch.distributed` backend that goes with the device; "" if there is none.
        name: The short name, as `composer.utils.get_device` takes it.
    """

    dist_backend: str = ""
    name: str = ""
    _device: torch.device

    @abstractmethod
    def module_to_device(self, module: T_nnModule) -> T_nnModule:
        """Move a module in place and return it."""

    @abstractmethod
    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on this device; the same object if it already is there."""

    def batch_to_device(self, batch: Any) -> Any:
        """Move every tensor in nested mappings and sequences; other values stay as they are.

        Returns:
            A batch of the same structure. A tuple whose tensors are all on the device already is returned itself;
            lists and mappings are always new, so changing the result leaves `batch` alone.
        """
        return _map_batch(batch, self.tensor_to_device)

    def optimizer_to_device(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Move an optimizer's state in place and return the optimizer.

        Step counters stay on the host unless the optimizer is capturable or fused, as in `Optimizer.load_state_dict`:
        an Adam that finds its counter on a GPU would wait for the GPU at every step.
        """
        for group in optimizer.param_groups:
            moves_step = group.get("capturable") or group.get("fused")
            for parameter in group["params"]:
                state: dict[str, Any] = optimizer.state.get(parameter) or {}
                for key, value in state.items():
                    if key != "step" or moves_step:
                        state[key] = _map_batch(value, self.tensor_to_device)
        return optimizer


class PlainDevice(Device):
    """A device that needs no more than `.to`; subclasses set `_device`."""

    def module_to_device(self, module: T_nnModule) -> T_nnModule:
        return module.to(self._device)

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)


def _map_batch(batch: Any, map_fn: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `map_fn` to every tensor in nested mappings and sequences; see `Device.batch_to_device`."""
    if isinstance(batch, torch.Tensor):
        return map_fn(batch)
    if isinstance(batch, tuple):
        mapped, is_same = [], True
        for old in batch:
            new = map_fn(old) if isinstance(old, torch.Tensor) else _map_batch(old, map_fn)
            is_same = is_same and new is old
            mapped.append(new)
        return batch if is_same else _rebuild_sequence(batch, mapped)
    if isinstance(batch, Mapping):
        return _rebuild_mapping(batch, {key: _map_batch(value, map_fn) for key, value in batch.items()})
    if isinstance(batch, Sequence) and not isinstance(batch, _STRINGS):
        return _rebuild_sequence(batch, [_map_batch(element, map_fn) for element in batch])
    return batch


def _rebuild_mapping(batch: Mapping[Any, Any], mapped: dict[Any, Any]) -> Mapping[Any, Any]:
    if type(batch) is dict:
        return mapped
    try:
        return type(batch)(mapped)  # type: ignore[call-arg]
    except TypeError:  # its constructor takes something else, as that of defaultdict does
        return mapped


def _rebuild_sequence(batch: Sequence[Any], mapped: list[Any]) -> Sequence[Any]:
    if type(batch) is list:
        return mapped
    make: Any = getattr(type(batch), "_make", type(batch))  # a namedtuple takes its fields one by one
    try:
        rebuilt: Sequence[Any] = make(x for x in mapped)
    except TypeError:  # its constructor takes something else, as that of range does
        return mapped
    return rebuilt
