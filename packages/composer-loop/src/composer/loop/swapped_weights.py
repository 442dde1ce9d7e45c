"""Put the weights that algorithms want saved, such as averages, into the model for a save, and take them out again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from composer.core.algorithm import Algorithm, declared_placement
from composer.core.callback import Callback
from composer.core.effects import SWAPS_WEIGHTS
from composer.core.engine import Engine
from composer.core.event import Event
from composer.core.state import State


class _Saver(Callback):
    """Callback that reports a save at every checkpoint event."""

    def save_interval(self, state: State, event: Event) -> bool:
        return True


@contextmanager
def weights_to_save(engine: Engine) -> Iterator[None]:
    """Swap in, for the body, the weights that algorithms want saved, such as averages.

    Args:
        engine: The engine of the run.
    """
    swapped = swap_in(engine)
    try:
        yield
    finally:
        swap_out(engine, swapped)


def swap_in(engine: Engine) -> list[Algorithm]:
    """Swap in the weights that algorithms want saved, as at a checkpoint event, until training continues.

    Algorithms whose weights are in the model already, or that have no attribute `swapped`, are skipped.

    Args:
        engine: The engine of the run.

    Returns:
        The algorithms that may have swapped.
    """
    state, saver = engine.state, _Saver()
    swapping = [
        algorithm
        for algorithm in state.algorithms
        if SWAPS_WEIGHTS in declared_placement(algorithm).provides and not getattr(algorithm, "swapped", True)
    ]
    if not swapping:
        return []
    state.callbacks.append(saver)
    try:
        for algorithm in swapping:
            if algorithm.match(Event.BATCH_CHECKPOINT, state):
                algorithm.apply(Event.BATCH_CHECKPOINT, state, engine.logger)
    except BaseException:
        swap_out(engine, swapping)
        raise
    finally:
        state.callbacks.remove(saver)
    return swapping


def swap_out(engine: Engine, algorithms: Iterable[Algorithm]) -> None:
    """Put the weights of training back into the model, where algorithms have swapped in others.

    Args:
        engine: The engine of the run.
        algorithms: The algorithms; those that have not swapped, or have no attribute `swapped`, are skipped.
    """
    for algorithm in algorithms:
        if getattr(algorithm, "swapped", False):
            algorithm.apply(Event.ITERATION_START, engine.state, engine.logger)  # no iteration starts
