"""The cost per step of loggers and callbacks, together and each alone, beyond a bare PyTorch loop."""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from composer import Trainer
from composer.callbacks import LRMonitor, MemoryMonitor, OptimizerMonitor, SpeedMonitor
from composer.loggers import FileLogger, TensorboardLogger
from tools.bench._measure import interleaved, machine, median_difference, spread, timed
from tools.bench.overhead import Batches, Plain, bare_loop, make_batches, make_network, make_optimizer

Make = Callable[[Path], dict[str, Any]]
"""Makes the arguments of a Trainer that writes into a folder."""

_ALL = "all of them"
_ALONE = "Trainer alone"


def _all(folder: Path) -> dict[str, Any]:
    callbacks = [LRMonitor(), SpeedMonitor(), MemoryMonitor(), OptimizerMonitor()]
    loggers = [FileLogger(str(folder / "log.txt")), TensorboardLogger(str(folder))]
    return {"progress_bar": True, "callbacks": callbacks, "loggers": loggers}


_WATCHED: dict[str, Make] = {
    _ALONE: lambda folder: {},
    _ALL: _all,
    "progress bar": lambda folder: {"progress_bar": True},
    "FileLogger": lambda folder: {"loggers": FileLogger(str(folder / "log.txt"))},
    "TensorboardLogger": lambda folder: {"loggers": TensorboardLogger(str(folder))},
    "LRMonitor": lambda folder: {"callbacks": LRMonitor()},
    "SpeedMonitor": lambda folder: {"callbacks": SpeedMonitor()},
    "MemoryMonitor": lambda folder: {"callbacks": MemoryMonitor()},
    "OptimizerMonitor": lambda folder: {"callbacks": OptimizerMonitor()},
}


def _watched(batches: Batches, make: Make) -> float:
    """Seconds of `fit`, with everything that was logged written at its end."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The memory monitor only works on CUDA devices")
        model = Plain(make_network())
        arguments = {"progress_bar": False, **make(Path(folder))}
        trainer = Trainer(
            model=model,
            train_dataloader=batches,
            max_duration="1ep",
            optimizers=make_optimizer(model),
            device="cpu",
            console_stream=io.StringIO() if arguments.get("progress_bar") else "stderr",
            seed=0,
            **arguments,
        )
        seconds = timed(trainer.fit)
        trainer.close()
    return seconds


def main(arguments: list[str]) -> None:
    """Print the cost per step of each, the loop's taken off."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- observers", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    batches = make_batches(options.steps)
    contestants: dict[str, Callable[[], float]] = {"bare PyTorch loop": lambda: bare_loop(batches)}
    for name, make in _WATCHED.items():
        contestants[name] = lambda make=make: _watched(batches, make)  # type: ignore[misc]
    results = {
        name: [1e6 * seconds / options.steps for seconds in values]
        for name, values in interleaved(contestants, options.rounds).items()
    }
    bare, alone = results["bare PyTorch loop"], results[_ALONE]
    print(f"{machine()}; {options.steps} steps, {options.rounds} interleaved rounds, medians, us/step")
    print(f"{'':24}{'step':>9}{'min-max':>16}{'beyond the loop':>17}{'beyond the Trainer':>20}")
    for name, values in results.items():
        beyond = "" if values is bare else f"{median_difference(values, bare):+.1f}"
        more = "" if values is bare or values is alone else f"{median_difference(values, alone):+.1f}"
        print(f"{name:24}{statistics.median(values):9.1f}{spread(values):>16}{beyond:>17}{more:>20}")
