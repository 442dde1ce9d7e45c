"""Forward passes of evaluation and prediction, where ranks may have different numbers of batches.

A forward pass of a model that is divided among ranks gathers weights, so all ranks must take part in it. A rank that
has no batch left repeats its last one, and forgets the outputs, until no rank has any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from composer.core import State
from composer.trainer._context import autocast
from composer.trainer._parallel import SingleProcess

__all__ = ["Turns"]

_NOTHING = object()


class Turns:
    """The forward passes of one evaluation or prediction, in step with the other ranks if they must be.

    To be used as a context: at its end, this rank takes part until all ranks are through.

    Args:
        forward: Computes the outputs of a batch on the device.
        state: The run's state.
        parallel: The other ranks.
        fp8: Whether FP8 may be used.
    """

    def __init__(self, forward: Callable[[Any], Any], state: State, parallel: SingleProcess, fp8: bool = True) -> None:
        self._forward, self._state, self._parallel, self._fp8 = forward, state, parallel, fp8
        self._last = _NOTHING  # a batch to repeat

    def __enter__(self) -> Turns:
        self._parallel.free_gathered()  # weights may have been replaced since
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._parallel.collective_forward:
            while self._another(has_batch=False):
                self._pass(self._last)
            self._last = _NOTHING
        self._parallel.free_gathered()

    def of(self, batch: Any) -> Any:
        """The outputs of a batch on the device.

        Raises:
            RuntimeError: Another rank has no batch at all.
        """
        if self._parallel.collective_forward:
            self.keep(batch)
            self._another(has_batch=True)
        return self._pass(batch)

    def keep(self, batch: Any) -> None:
        """Take a batch to repeat, in case that there is no other."""
        self._last = batch

    def _another(self, has_batch: bool) -> bool:
        """Whether any rank still has a batch."""
        ranks = self._parallel.of_all_ranks((has_batch, self._last is _NOTHING))
        any_has = any(has for has, _ in ranks)
        if any_has and any(nothing for _, nothing in ranks):
            raise RuntimeError(
                "All ranks must have a batch to gather a sharded model together, but the loader of some rank yielded "
                "nothing. Give every rank a part of the data."
            )
        return any_has

    def _pass(self, batch: Any) -> Any:
        with autocast(self._state, fp8=self._fp8):
            return self._forward(batch)
