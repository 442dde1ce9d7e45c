"""The cost per step of each thing that is added to a run, next to what we aim at."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric

from composer import Callback, Trainer
from composer.callbacks import NaNMonitor, RuntimeEstimator, SystemMetricsMonitor
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.optim import CosineAnnealingScheduler
from tools.bench._measure import QUANTILES, interleaved, low, machine, spread, timed
from tools.bench.overhead import (
    Batches,
    Plain,
    bare_loop,
    make_batches,
    make_network,
    make_optimizer,
    run_trainer,
    steps_of,
)

_TENSORS = 20_000
_MANY_STEPS, _FEW_STEPS = 400, 20


class Declaring(Algorithm):
    """Declares its event, and does nothing."""

    events = frozenset({Event.BATCH_END})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        pass


class Matching(Algorithm):
    """Is asked at every event, and never acts."""

    def match(self, event: Event, state: State) -> bool:
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        pass


class Measured(Plain):
    """A model with many training metrics."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {f"mean{number}": MeanMetric() for number in range(1000)}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs)


class Pieces(torch.nn.Module):
    """A model of many small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces = torch.nn.ParameterList([torch.ones(1) for _ in range(_TENSORS)])
        self.which = torch.arange(_TENSORS) % 10

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(10).index_add(0, self.which, torch.cat([*self.pieces]))
        return inputs[:, :10] * sums


class Row(NamedTuple):
    """An addition to a run, the contestants whose difference is its cost, and the aim."""

    added: str
    plus: tuple[str, ...]
    minus: tuple[str, ...]
    aim: str
    per: int = 1


_ROWS = (
    Row("an algorithm that declares its events", ("declares",), ("Trainer",), "1"),
    Row("30 of them", ("30 declare",), ("Trainer",), "30"),
    Row("an algorithm that only matches", ("matches",), ("Trainer",), "2"),
    Row("30 of them", ("30 match",), ("Trainer",), "30"),
    Row("a callback that does nothing", ("callback",), ("Trainer",), "0"),
    Row("1,000 metrics that nobody reads", ("metrics",), ("Trainer",), "50"),
    Row("bf16, beyond that of the bare loop", ("bf16", "bare loop"), ("Trainer", "bare bf16"), "5"),
    Row("a microbatch, beyond that of the bare loop", ("4 microbatches", "bare loop"), ("Trainer", "bare 4"), "5", 3),
    Row("evaluation of a batch, beyond the bare loop", ("evaluation",), ("bare evaluation",), "5"),
    Row("a cosine schedule", ("cosine",), ("Trainer",), "3"),
    Row("NaNMonitor", ("NaNMonitor",), ("Trainer",), "5"),
    Row("RuntimeEstimator", ("RuntimeEstimator",), ("Trainer",), "5"),
    Row("SystemMetricsMonitor", ("SystemMetricsMonitor",), ("Trainer",), "0"),
)


def _bare(batches: Batches, bf16: bool = False, microbatches: int = 1) -> None:
    network = make_network()
    optimizer = make_optimizer(network)

    def loop() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = cross_entropy(network(x), y)
                (loss / microbatches).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    timed(loop)


def _evaluate(batches: Batches) -> None:
    model = Plain(make_network())
    trainer = Trainer(model=model, optimizers=make_optimizer(model), device="cpu", progress_bar=False)
    timed(lambda: trainer.eval(batches))
    trainer.close()


def _bare_evaluation(batches: Batches) -> None:
    network = make_network().eval()

    def loop() -> None:
        with torch.no_grad():
            for inputs, _ in batches:
                network(inputs)

    timed(loop)


def _contestants(batches: Batches) -> dict[str, Callable[[], list[float]]]:
    runs: dict[str, Callable[[], None]] = {
        "bare loop": lambda: _bare(batches),
        "bare bf16": lambda: _bare(batches, bf16=True),
        "bare 4": lambda: _bare(batches, microbatches=4),
        "bare evaluation": lambda: _bare_evaluation(batches),
        "Trainer": lambda: run_trainer(batches),
        "declares": lambda: run_trainer(batches, algorithms=Declaring()),
        "30 declare": lambda: run_trainer(batches, algorithms=[Declaring() for _ in range(30)]),
        "matches": lambda: run_trainer(batches, algorithms=Matching()),
        "30 match": lambda: run_trainer(batches, algorithms=[Matching() for _ in range(30)]),
        "callback": lambda: run_trainer(batches, callbacks=Callback()),
        "metrics": lambda: run_trainer(batches, model=Measured(make_network())),
        "bf16": lambda: run_trainer(batches, precision="amp_bf16"),
        "4 microbatches": lambda: run_trainer(batches, device_train_microbatch_size=2),
        "evaluation": lambda: _evaluate(batches),
        "cosine": lambda: run_trainer(batches, schedulers=CosineAnnealingScheduler()),
        "NaNMonitor": lambda: run_trainer(batches, callbacks=NaNMonitor()),
        "RuntimeEstimator": lambda: run_trainer(batches, callbacks=RuntimeEstimator()),
        "SystemMetricsMonitor": lambda: run_trainer(batches, callbacks=SystemMetricsMonitor()),
    }
    return {name: steps_of(batches, run) for name, run in runs.items()}


def main(arguments: list[str]) -> None:
    """Print the microseconds of each, and the ratio for a model of many tensors."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- growth", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    batches = make_batches(_MANY_STEPS)
    results = interleaved(_contestants(batches), options.rounds)
    print(f"{machine()}; {options.rounds} interleaved rounds of {_MANY_STEPS} steps; quantiles of single steps")
    print(f"{'us more per step':46}{'5 %':>8}{'2 to 10 %':>16}{'aim':>6}")
    for row in _ROWS:
        more = [
            (sum(low(results[name], q) for name in row.plus) - sum(low(results[name], q) for name in row.minus))
            / row.per
            for q in QUANTILES
        ]
        print(f"{row.added:46}{more[1]:8.1f}{spread(more):>16}{row.aim:>6}")
    few = make_batches(_FEW_STEPS)
    wide = interleaved(
        {
            "bare": steps_of(few, lambda: bare_loop(few, Pieces())),
            "Trainer": steps_of(few, lambda: run_trainer(few, model=Plain(Pieces()))),
        },
        options.rounds,
    )
    ratios = [low(wide["Trainer"], q) / low(wide["bare"], q) for q in QUANTILES]
    print(f"\n{_TENSORS} tensors: {ratios[1]:.3f} of the bare loop ({spread(ratios, 3)}), aim 1.01")
