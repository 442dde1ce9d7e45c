"""Closures and train or eval modes of optimizers, and optimizers inside others."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from composer.core import AVERAGES_WEIGHTS, State
from composer.utils.misc import needs_closure

__all__ = ["OptimizerModes", "needs_closure", "wrapped_optimizers"]


class OptimizerModes:
    """Switches the train and eval modes of schedule-free optimizers.

    Such an optimizer has methods `train()` and `eval()`, which switch the weights in place between those that gradients
    are computed at and their averages, which are used for inference. Other optimizers are left alone. Outside `fit`,
    however it ended, the optimizers are in eval mode.

    Args:
        state: The run's state.
    """

    def __init__(self, state: State) -> None:
        self._state, self._training = state, False

    def train(self) -> None:
        """Switch to train mode: training starts or continues."""
        self._training = True
        for optimizer in self._with_modes():
            optimizer.train()

    def eval(self) -> None:
        """Switch to eval mode: training has ended or was interrupted."""
        self._training = False
        for optimizer in self._with_modes():
            optimizer.eval()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch to eval mode temporarily."""
        before = self._training
        self.eval()
        yield
        # Not after an error: an algorithm may have left other weights in the model, which the next `fit` removes.
        if before:
            self.train()

    def check(self) -> None:
        """Check that no algorithm loads averages into the model that the optimizer would treat as its own.

        Raises:
            ValueError: The run has such an algorithm and an optimizer with modes.
        """
        averaging = [each for each in self._state.algorithms if AVERAGES_WEIGHTS in each.placement.provides]
        for optimizer in self._with_modes():
            for algorithm in averaging:
                optimizer_name, name = type(optimizer).__name__, type(algorithm).__name__
                raise ValueError(
                    f"`algorithms` must not hold `{name}` together with the optimizer `{optimizer_name}`: both average "
                    f"the weights, and `{optimizer_name}` would treat the average of `{name}` as its own. Remove "
                    f"`{name}`, or train with another optimizer."
                )

    def _with_modes(self) -> Iterator[Any]:
        # A wrapper with modes switches the optimizers inside it.
        queue = list(self._state.optimizers)
        while queue:
            optimizer = queue.pop(0)
            if all(_is_method_without_arguments(optimizer, name) for name in ("train", "eval")):
                yield optimizer
            else:
                queue += _inner_optimizers(optimizer)


def _is_method_without_arguments(target: Any, name: str) -> bool:
    method = getattr(target, name, None)
    if not inspect.ismethod(method):
        return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return all(p.default is not p.empty or p.kind in variadic for p in parameters)


def wrapped_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return optimizers and the optimizers inside them, as attributes or in collections, at any depth."""
    found = list(optimizers)
    for optimizer in found:
        found += [inner for inner in _inner_optimizers(optimizer) if not any(inner is other for other in found)]
    return found


def _inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    inner: list[torch.optim.Optimizer] = []
    for value in vars(optimizer).values():
        if isinstance(value, Mapping):
            value = list(value.values())
        items = value if isinstance(value, (list, tuple)) else (value,)
        inner += [item for item in items if isinstance(item, torch.optim.Optimizer)]
    return inner
