"""The Trainer's own cost per step: a 32-32-10 MLP, batches of 8, against a bare PyTorch loop over the same batches."""

from __future__ import annotations

import argparse
import importlib.util
import io
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.nn.functional import cross_entropy

from composer import Trainer
from composer.models import ComposerClassifier, ComposerModel
from tools.bench._measure import QUANTILES, TimedBatches, interleaved, low, machine, spread, timed

Batch = tuple[torch.Tensor, torch.Tensor]


Batches: TypeAlias = TimedBatches[Batch]


class Plain(ComposerModel):
    """The network as a `ComposerModel`, without metrics."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Batch) -> Any:
        return self.module(batch[0])

    def loss(self, outputs: Any, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        return cross_entropy(outputs, batch[1])


def make_batches(steps: int) -> Batches:
    """Batches for as many steps, the same ones every time."""
    generator = torch.Generator().manual_seed(0)
    return TimedBatches(
        (torch.randn(8, 32, generator=generator), torch.randint(0, 10, (8,), generator=generator)) for _ in range(steps)
    )


def make_network() -> torch.nn.Module:
    """A network so small that the loop is what takes time."""
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Its optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def steps_of(batches: Batches, run: Callable[[], object]) -> Callable[[], list[float]]:
    """Return a function that runs over the batches and returns the microseconds of each step."""

    def measure() -> list[float]:
        run()
        return batches.steps()

    return measure


def bare_loop(batches: Batches, model: torch.nn.Module | None = None) -> float:
    """Seconds of a loop written by hand."""
    model = make_network() if model is None else model
    optimizer = make_optimizer(model)

    def loop() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return timed(loop)


def run_trainer(batches: Batches, **arguments: Any) -> None:
    """Train the network for an epoch; the arguments are those of the Trainer."""
    model = arguments.pop("model", None) or Plain(make_network())
    trainer = Trainer(
        **{
            "model": model,
            "train_dataloader": batches,
            "max_duration": "1ep",
            "optimizers": make_optimizer(model),
            "device": "cpu",
            "progress_bar": False,
            "console_stream": io.StringIO() if arguments.get("progress_bar") else "stderr",
            "seed": 0,
            **arguments,
        }
    )
    timed(trainer.fit)
    trainer.close()


def _run_ignite(batches: Batches, everything: bool) -> None:
    from ignite.engine import Engine  # it is not one of the project's dependencies
    from ignite.handlers import ProgressBar
    from ignite.metrics import Accuracy, RunningAverage

    network = make_network()
    optimizer = make_optimizer(network)

    def step(engine: Any, batch: Batch) -> Any:
        inputs, targets = batch
        optimizer.zero_grad()
        outputs = network(inputs)
        loss = cross_entropy(outputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return (outputs.detach(), targets) if everything else loss.detach()

    engine = Engine(step)
    if everything:
        RunningAverage(Accuracy()).attach(engine, "accuracy")
        ProgressBar(file=io.StringIO()).attach(engine, ["accuracy"])
    timed(lambda: engine.run(batches, max_epochs=1))


def main(arguments: list[str]) -> None:
    """Print the cost per step of the loop alone, and of what the Trainer adds."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- overhead", description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    batches = make_batches(options.steps)
    contestants: dict[str, Callable[[], object]] = {
        "bare PyTorch loop": lambda: bare_loop(batches),
        "Trainer, everything off": lambda: run_trainer(batches),
        "Trainer, metrics and progress bar": lambda: run_trainer(
            batches, model=ComposerClassifier(make_network(), num_classes=10), progress_bar=True
        ),
    }
    if importlib.util.find_spec("ignite"):
        contestants["Ignite, loss"] = lambda: _run_ignite(batches, everything=False)
        contestants["Ignite, accuracy and progress bar"] = lambda: _run_ignite(batches, everything=True)
    results = interleaved({name: steps_of(batches, run) for name, run in contestants.items()}, options.rounds)
    bare = low(results["bare PyTorch loop"])
    print(f"{machine()}; {options.steps} steps, {options.rounds} interleaved rounds; quantiles of single steps")
    print(f"{'':36}{'us, 5 %':>9}{'2 to 10 %':>16}{'own cost':>10}{'ratio':>7}")
    for name, steps in results.items():
        value, span = low(steps), spread([low(steps, quantile) for quantile in QUANTILES])
        print(f"{name:36}{value:9.1f}{span:>16}{value - bare:>+10.1f}{value / bare:7.2f}")
