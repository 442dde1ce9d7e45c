"""What training, evaluation and prediction share: the active loader, autocast, modes, and the epoch of samplers."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

from composer.core import AVERAGES_WEIGHTS, State, get_precision_context
from composer.utils import dist

__all__ = [
    "OptimizerModes",
    "active_dataloader",
    "autocast",
    "device_type",
    "num_shares",
    "set_epoch",
    "wrapped_optimizers",
]


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


class OptimizerModes:
    """Switches optimizers that have a training and an evaluation mode, as schedule-free ones have.

    Such an optimizer has methods `train()` and `eval()`, which change the weights in place between those that gradients
    are computed at and the averages that are meant to be used. Those of other optimizers are left alone. Outside of
    `fit`, however it ended, they are in evaluation mode.

    Args:
        state: The run's state.
    """

    def __init__(self, state: State) -> None:
        self._state, self._training = state, False

    def train(self) -> None:
        """Put them in training mode: training begins or goes on."""
        self._training = True
        for optimizer in self._with_modes():
            optimizer.train()

    def eval(self) -> None:
        """Put them in evaluation mode: training has ended, or was interrupted."""
        self._training = False
        for optimizer in self._with_modes():
            optimizer.eval()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Put them in evaluation mode for a while."""
        before = self._training
        self.eval()
        yield
        # Not after an error: an algorithm may have left other weights in the model, which the next `fit` takes out.
        if before:
            self.train()

    def check(self) -> None:
        """Refuse algorithms that put averages of their own into the model, which would be taken for the optimizer's.

        Raises:
            ValueError: There is one, and an optimizer with modes.
        """
        averaging = [each for each in self._state.algorithms if AVERAGES_WEIGHTS in each.placement.provides]
        for optimizer in self._with_modes():
            for algorithm in averaging:
                optimizer_name, name = type(optimizer).__name__, type(algorithm).__name__
                raise ValueError(
                    f"`algorithms` must not hold `{name}` together with the optimizer `{optimizer_name}`: both average "
                    f"the weights, and `{optimizer_name}` would take the average of `{name}` for its own. Leave out "
                    f"`{name}`, or train with another optimizer."
                )

    def _with_modes(self) -> Iterator[Any]:
        # A wrapper that has them passes them on itself.
        waiting = list(self._state.optimizers)
        while waiting:
            optimizer = waiting.pop(0)
            if all(_is_method_without_arguments(optimizer, name) for name in ("train", "eval")):
                yield optimizer
            else:
                waiting += _held_by(optimizer)


def _is_method_without_arguments(target: Any, name: str) -> bool:
    method = getattr(target, name, None)
    if not inspect.ismethod(method):
        return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return all(p.default is not p.empty or p.kind in variadic for p in parameters)


def wrapped_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return optimizers, and those that they hold as attributes or in collections, at any depth."""
    found = list(optimizers)
    for optimizer in found:
        found += [inner for inner in _held_by(optimizer) if not any(inner is other for other in found)]
    return found


def _held_by(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    held: list[torch.optim.Optimizer] = []
    for value in vars(optimizer).values():
        if isinstance(value, Mapping):
            value = list(value.values())
        items = value if isinstance(value, (list, tuple)) else (value,)
        held += [item for item in items if isinstance(item, torch.optim.Optimizer)]
    return held


def set_epoch(dataloader: Any, epoch: int) -> None:
    """Give the epoch to a loader's distributed samplers, whose order depends on it."""
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(dataloader, name, None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
