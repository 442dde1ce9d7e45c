"""What training, evaluation and prediction share: the active loader, autocast, and the epoch of samplers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from composer.core import State, get_precision_context
from composer.utils import dist

__all__ = ["active_dataloader", "autocast", "device_type", "num_shares", "set_epoch"]


def device_type(state: State) -> str:
    """Torch's name of the device the run is on."""
    return "cuda" if state.device.name == "gpu" else state.device.name


def num_shares(state: State) -> int:
    """Into how many parts, one per rank or group of ranks that share layers, the data is divided."""
    return dist.get_world_size() // (1 if state.tp_config is None else int(state.tp_config.tensor_parallel_degree))


def autocast(state: State, fp8: bool = True) -> AbstractContextManager[None]:
    """The run's numerical precision.

    Args:
        state: The run's state.
        fp8: Whether FP8 may be used; not in evaluation.
    """
    return get_precision_context(
        state.precision, state.precision_config, fp8_autocast_enabled=fp8, device_type=device_type(state)
    )


@contextmanager
def active_dataloader(state: State, dataloader: Iterable[Any], label: str, length: int) -> Iterator[None]:
    """Make a loader the active one for a while; then restore loader, batch and outputs.

    Args:
        state: The run's state.
        dataloader: The loader.
        label: Its label.
        length: Batches to use; -1 is all.
    """
    before, before_label, before_length = state.dataloader, state.dataloader_label, state.dataloader_len
    batch, outputs = state.batch, state.outputs
    state.set_dataloader(dataloader, label, length)
    try:
        yield
    finally:
        state.set_dataloader(before, before_label, -1 if before_length is None else before_length)
        state.batch, state.outputs = batch, outputs


def set_epoch(dataloader: Any, epoch: int) -> None:
    """Give the epoch to a loader's distributed samplers, whose order depends on it."""
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(dataloader, name, None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
