"""The lists of a state: what is evaluated, optimized and run. Engines are told when what runs changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from composer.core._observed import ObservedList, SteppingList
from composer.utils.iter_helpers import ensure_tuple

if TYPE_CHECKING:
    from composer.core._profiled import RunProfiler
    from composer.core.algorithm import Algorithm
    from composer.core.callback import Callback
    from composer.core.evaluator import Evaluator

__all__ = ["StateLists"]


class StateLists:
    """The lists of a state. Setting one replaces its contents, and takes a single object too."""

    _observers: list[Callable[[], None]]
    _profiler: RunProfiler | None = None

    def _set_lists(self, evaluators: Any, optimizers: Any, schedulers: Any, algorithms: Any, callbacks: Any) -> None:
        self._evaluators: ObservedList[Evaluator] = ObservedList(ensure_tuple(evaluators))
        self._optimizers: SteppingList[torch.optim.Optimizer] = SteppingList(ensure_tuple(optimizers))
        self._schedulers: SteppingList[Any] = SteppingList(ensure_tuple(schedulers))
        self._algorithms: ObservedList[Algorithm] = ObservedList(ensure_tuple(algorithms), self._notify)
        self._callbacks: ObservedList[Callback] = ObservedList(ensure_tuple(callbacks), self._notify)

    def _notify(self) -> None:
        """Tell the engines that what they compiled is out of date."""
        for observer in self._observers:
            observer()

    @property
    def evaluators(self) -> list[Evaluator]:
        """What is evaluated."""
        return self._evaluators

    @evaluators.setter
    def evaluators(self, value: Evaluator | Sequence[Evaluator]) -> None:
        self._evaluators[:] = ensure_tuple(value)

    @property
    def optimizers(self) -> SteppingList[torch.optim.Optimizer]:
        """The optimizers; `step` and `zero_grad` of the list call those of every member."""
        return self._optimizers

    @optimizers.setter
    def optimizers(self, value: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers[:] = ensure_tuple(value)

    @property
    def schedulers(self) -> SteppingList[Any]:
        """The learning-rate schedulers; `step` of the list steps every member."""
        return self._schedulers

    @schedulers.setter
    def schedulers(self, value: Any) -> None:
        self._schedulers[:] = ensure_tuple(value)

    @property
    def algorithms(self) -> list[Algorithm]:
        """The algorithms that run, in the user's order."""
        return self._algorithms

    @algorithms.setter
    def algorithms(self, value: Algorithm | Sequence[Algorithm]) -> None:
        self._algorithms[:] = ensure_tuple(value)

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks and loggers that run."""
        return self._callbacks

    @callbacks.setter
    def callbacks(self, value: Callback | Sequence[Callback]) -> None:
        self._callbacks[:] = ensure_tuple(value)

    @property
    def profiler(self) -> RunProfiler | None:
        """What records when events, algorithms and callbacks begin and end; None: nothing does."""
        return self._profiler

    @profiler.setter
    def profiler(self, value: RunProfiler | None) -> None:
        self._profiler = value
        self._notify()
