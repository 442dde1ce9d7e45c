"""The Trainer's own cost per step: a 32-32-10 MLP, batches of 8, against a bare PyTorch loop over the same batches."""

from __future__ import annotations

import argparse
import io
import statistics
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from composer import Trainer
from composer.models import ComposerClassifier, ComposerModel
from tools.bench._measure import interleaved, machine, median_difference, spread, timed

__all__ = ["Batches", "Plain", "bare_loop", "main", "make_batches", "make_network", "make_optimizer"]

Batch = tuple[torch.Tensor, torch.Tensor]


class Batches(list[Batch]):
    """A loader that costs nothing, so that only the loop is measured."""

    batch_size = 8


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
    return Batches(
        (torch.randn(8, 32, generator=generator), torch.randint(0, 10, (8,), generator=generator)) for _ in range(steps)
    )


def make_network() -> torch.nn.Module:
    """A network so small that the loop is what takes time."""
    return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Its optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def bare_loop(batches: Batches) -> float:
    """Seconds of a loop written by hand."""
    model = make_network()
    optimizer = make_optimizer(model)

    def loop() -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return timed(loop)


def _trainer(batches: Batches, everything: bool) -> float:
    model: ComposerModel = ComposerClassifier(make_network(), num_classes=10) if everything else Plain(make_network())
    trainer = Trainer(
        model=model,
        train_dataloader=batches,
        max_duration="1ep",
        optimizers=make_optimizer(model),
        device="cpu",
        progress_bar=everything,
        console_stream=io.StringIO(),
        seed=0,
    )
    seconds = timed(trainer.fit)
    trainer.close()
    return seconds


def main(arguments: list[str]) -> None:
    """Print the cost per step of the loop alone, and of what the Trainer adds."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- overhead", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000, help="steps per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    batches = make_batches(options.steps)
    contestants = {
        "bare PyTorch loop": lambda: bare_loop(batches),
        "Trainer, everything off": lambda: _trainer(batches, everything=False),
        "Trainer, metrics and progress bar": lambda: _trainer(batches, everything=True),
    }
    results = {
        name: [1e6 * seconds / options.steps for seconds in values]
        for name, values in interleaved(contestants, options.rounds).items()
    }
    bare = results["bare PyTorch loop"]
    print(f"{machine()}; {options.steps} steps, {options.rounds} interleaved rounds, medians")
    print(f"{'':36}{'us/step':>9}{'min-max':>16}{'own cost':>10}{'ratio':>7}")
    for name, values in results.items():
        median = statistics.median(values)
        own = "" if values is bare else f"{median_difference(values, bare):+.1f}"
        ratio = statistics.median(a / b for a, b in zip(values, bare, strict=True))
        print(f"{name:36}{median:9.1f}{spread(values):>16}{own:>10}{ratio:7.2f}")
