"""Save the weights that algorithms want saved, such as averages, outside of a checkpoint event."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from composer.core import SWAPS_WEIGHTS, Callback, Engine, Event, State
from composer.core.algorithm import declared_placement


class _Saver(Callback):
    """Callback that reports a save at every checkpoint event."""

    def save_interval(self, state: State, event: Event) -> bool:
        return True


@contextmanager
def weights_to_save(engine: Engine) -> Iterator[None]:
    """Swap in, for the body, the weights that algorithms want saved, such as averages.

    They are swapped in as at a checkpoint event, and out afterwards. Algorithms whose weights are in the model already,
    or that have no attribute `swapped`, are skipped.

    Args:
        engine: The engine of the run.
    """
    state, saver = engine.state, _Saver()
    swapping = [
        algorithm
        for algorithm in state.algorithms
        if SWAPS_WEIGHTS in declared_placement(algorithm).provides and not getattr(algorithm, "swapped", True)
    ]
    if not swapping:
        yield
        return
    try:
        state.callbacks.append(saver)
        try:
            for algorithm in swapping:
                if algorithm.match(Event.BATCH_CHECKPOINT, state):
                    algorithm.apply(Event.BATCH_CHECKPOINT, state, engine.logger)
        finally:
            state.callbacks.remove(saver)
        yield
    finally:
        for algorithm in swapping:
            if algorithm.swapped:  # type: ignore[attr-defined]
                algorithm.apply(Event.ITERATION_START, state, engine.logger)
