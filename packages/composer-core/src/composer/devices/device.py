"""Devices, and how modules, batches and optimizers move to them."""

from __future__ import annotations

import operator
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from composer.utils._environment import lookup
from composer.utils.batch_helpers import fields_of, is_batch_dataclass, with_fields

T_nnModule = TypeVar("T_nnModule", bound=torch.nn.Module)
_STRINGS = (str, bytes, bytearray)


class Device(ABC):
    """The device of the model and the batches of a run.

    Attributes:
        dist_backend: The `torch.distributed` backend of the device; "" if there is none.
        name: The short name that `composer.utils.get_device` accepts.
    """

    dist_backend: str = ""
    name: str = ""
    _device: torch.device

    @property
    def torch_type(self) -> str:
        """The type of its tensors' device: "cuda" for "gpu", "xla" for "tpu" and "neuron", otherwise the name."""
        return {"gpu": "cuda", "tpu": "xla", "neuron": "xla"}.get(self.name, self.name)

    @abstractmethod
    def module_to_device(self, module: T_nnModule) -> T_nnModule:
        """Move a module in place and return it."""

    @abstractmethod
    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a tensor to this device; return the same object if it is there already."""

    def batch_to_device(self, batch: Any) -> Any:
        """Move every tensor in nested mappings, sequences and dataclasses; other values are unchanged.

        Returns:
            A batch of the same structure. A tuple whose tensors are all on the device already is returned itself; lists
            and mappings are always new, so that changing the result does not change `batch`.
        """
        return _map_batch(batch, self.tensor_to_device)

    def optimizer_to_device(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Move an optimizer's state in place and return the optimizer.

        Step counters stay on the host unless the optimizer is capturable or fused, as in `Optimizer.load_state_dict`:
        with a counter on the GPU, Adam would synchronize with the GPU at every step.
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
    """A device that uses `.to`; subclasses set `_device`."""

    def module_to_device(self, module: T_nnModule) -> T_nnModule:
        return module.to(self._device)

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)


class DeviceCPU(PlainDevice):
    """The CPU, with gloo between processes."""

    dist_backend = "gloo"
    name = "cpu"
    _device = torch.device("cpu")

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_cpu else tensor.cpu()


class DeviceGPU(PlainDevice):
    """One CUDA (or ROCm) GPU, with NCCL between processes.

    Makes the GPU the current device and sets the process-wide TF32 flags.

    Args:
        device_id: The index of the GPU; None: the local rank of this process.
        allow_tf32: True if float32 matrix products and convolutions may round their inputs to TF32 (10 bits of
            mantissa), which is several times faster from Ampere on.

    Raises:
        ValueError: CUDA is not available, or has no such GPU.
    """

    dist_backend = "nccl"
    name = "gpu"

    def __init__(self, device_id: int | None = None, *, allow_tf32: bool = True) -> None:
        if not torch.cuda.is_available():
            raise ValueError("`DeviceGPU` needs a GPU, and CUDA is not available here. Use `device='cpu'`.")
        if device_id is None:
            device_id = lookup("LOCAL_RANK")
        count = torch.cuda.device_count()
        if not 0 <= device_id < count:
            raise ValueError(f"`device_id` must be below the number of visible GPUs, {count}, got {device_id!r}.")
        self._device = torch.device("cuda", device_id)
        torch.cuda.set_device(self._device)
        self._copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        _set_tf32(allow_tf32)

    def tensor_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)

    def batch_to_device(self, batch: Any) -> Any:
        """Move every tensor in nested mappings and sequences, as on any device, but on a separate stream.

        So a batch is copied while the GPU still computes the previous step: the host runs ahead, because no step reads
        from the GPU. Copies from pinned memory (`DataLoader(pin_memory=True)`) do not block the host either.
        """
        copied: list[torch.Tensor] = []

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device == self._device:
                return tensor
            with torch.cuda.stream(self._copies):
                copied.append(tensor.to(self._device, non_blocking=True))
            return copied[-1]

        moved = _map_batch(batch, copy)
        if copied:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._copies)
            for tensor in copied:
                tensor.record_stream(current)  # its memory is not reused before this stream has read it
        return moved


class DeviceMPS(PlainDevice):
    """The GPU of an Apple computer; one process only.

    Raises:
        ValueError: MPS is not available.
    """

    dist_backend = ""
    name = "mps"

    def __init__(self) -> None:
        if not torch.backends.mps.is_available():
            raise ValueError("`DeviceMPS` needs an Apple GPU, and MPS is not available here. Use `device='cpu'`.")
        self._device = torch.device("mps")


def _map_batch(batch: Any, map_fn: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `map_fn` to every tensor in nested mappings, sequences and dataclasses; see `Device.batch_to_device`."""
    if isinstance(batch, torch.Tensor):
        return map_fn(batch)
    if isinstance(batch, tuple):
        mapped = [_map_batch(element, map_fn) for element in batch]
        return batch if all(map(operator.is_, mapped, batch)) else _rebuilt(batch, mapped)
    if isinstance(batch, Mapping):
        return _rebuilt(batch, {key: _map_batch(value, map_fn) for key, value in batch.items()})
    if isinstance(batch, Sequence) and not isinstance(batch, _STRINGS):
        return _rebuilt(batch, [_map_batch(element, map_fn) for element in batch])
    if is_batch_dataclass(batch):
        return with_fields(batch, {name: _map_batch(value, map_fn) for name, value in fields_of(batch).items()})
    return batch


def _rebuilt(batch: Any, mapped: dict[Any, Any] | list[Any]) -> Any:
    """Return mapped parts in the type of their batch, or as they are if its constructor takes other arguments."""
    if type(batch) in (dict, list):
        return mapped
    make: Any = getattr(type(batch), "_make", type(batch))  # a namedtuple takes its fields one by one
    try:
        return make(mapped)
    except TypeError:  # the constructor of a defaultdict or a range, for example
        return mapped


def _set_tf32(allow: bool) -> None:
    # torch has two interfaces. The older one sets both: after `matmul.fp32_precision = "tf32"`,
    # `torch.get_float32_matmul_precision`, which `torch.compile` calls, raises.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Please use the new API settings to control TF32")
        torch.backends.cuda.matmul.allow_tf32 = allow
        torch.backends.cudnn.allow_tf32 = allow
