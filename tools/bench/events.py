"""The cost of announcing an event: to nobody, to one callback, and to one algorithm."""

from __future__ import annotations

import argparse
import statistics
import timeit
from functools import partial
from typing import Any

import torch

from composer.core import Algorithm, Callback, Engine, Event, State
from composer.loggers import Logger
from tools.bench._measure import interleaved, machine, spread


class Listening(Callback):
    """Does nothing at BATCH_END."""

    def batch_end(self, state: State, logger: Logger) -> None:
        pass


class Acting(Algorithm):
    """Does nothing at BATCH_END."""

    events = frozenset({Event.BATCH_END})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        pass


def _engine(**kwargs: Any) -> Engine:
    return Engine(State(model=torch.nn.Linear(1, 1), max_duration="1ep", dataloader=[0], **kwargs))


def main(arguments: list[str]) -> None:
    """Print nanoseconds per event."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- events", description=__doc__)
    parser.add_argument("--calls", type=int, default=200_000, help="events per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    engines = {
        "nobody": _engine(),
        "one callback": _engine(callbacks=Listening()),
        "one algorithm": _engine(algorithms=Acting()),
    }

    def measure(engine: Engine) -> float:
        names = {"run_event": engine.run_event, "event": Event.BATCH_END}
        seconds: float = timeit.timeit("run_event(event)", globals=names, number=options.calls)
        return float(1e9 * seconds / options.calls)

    contestants = {name: partial(measure, engine) for name, engine in engines.items()}
    print(f"{machine()}; {options.calls} events, {options.rounds} interleaved rounds, medians")
    print(f"{'who listens':20}{'ns/event':>10}{'min-max':>18}")
    for name, values in interleaved(contestants, options.rounds).items():
        print(f"{name:20}{statistics.median(values):10.0f}{spread(values):>18}")
