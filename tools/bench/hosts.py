"""The cost per step of our algorithms in other trainers: each library with and without a run that has no algorithm."""

from __future__ import annotations

import argparse
import importlib.util
import logging
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from composer.loop import HostedRun
from tools.bench._measure import QUANTILES, TimedBatches, interleaved, low, machine, timed
from tools.bench.overhead import Batches, make_batches, make_network, make_optimizer, steps_of

_AIM = 10.0  # microseconds


def _loss(outputs: Any, batch: Any) -> torch.Tensor:
    return cross_entropy(outputs, batch[1])


def _loop(batches: Batches, ours: bool) -> None:
    network = make_network()
    optimizer = make_optimizer(network)
    if not ours:

        def train() -> None:
            for batch in batches:
                optimizer.zero_grad()
                _loss(network(batch[0]), batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()

    else:
        run = HostedRun(network, loss=_loss, optimizers=optimizer, dataloader=batches, max_duration="1ep")
        run.begin_fit()

        def train() -> None:
            for batch in run.epoch():
                run.backward(run.loss(batch))
                run.step()

    timed(train)


def _lightning(batches: Batches, ours: bool, has_callback: bool = False) -> None:
    import lightning.pytorch as pl

    from composer.hosts.lightning import ComposeCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)  # tells what the machine has

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = make_network()

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.network(inputs)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if ours:
                return self.composer.loss(batch)  # type: ignore[operator, union-attr]
            return _loss(self(batch[0]), batch)

        def configure_optimizers(self) -> Any:
            return make_optimizer(self)

    callbacks: list[pl.Callback] = [pl.Callback()] if has_callback else []
    if ours:
        callbacks = [ComposeCallback(loss=_loss)]
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", barebones=True, callbacks=callbacks)
    timed(lambda: trainer.fit(Module(), batches))


def _transformers(batches: Batches, ours: bool) -> None:
    import transformers

    from composer.hosts.huggingface import ComposerTrainer

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = make_network()

        def forward(self, x: torch.Tensor) -> Any:
            return self.network(x)

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            num_train_epochs=1,
            max_grad_norm=0.0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        network = Network()
        kind: Any = ComposerTrainer if ours else transformers.Trainer
        trainer = kind(
            network,
            arguments,
            compute_loss_func=lambda outputs, labels, num_items_in_batch=None: cross_entropy(outputs, labels),
            optimizers=(make_optimizer(network), None),
            **({"algorithms": []} if ours else {}),
        )
        named = TimedBatches({"x": inputs, "labels": targets} for inputs, targets in list.__iter__(batches))
        trainer.get_train_dataloader = lambda: named
        trainer.remove_callback(transformers.PrinterCallback)
        timed(trainer.train)
    batches._stamps = named._stamps


def _accelerate(batches: Batches, ours: bool) -> None:
    from accelerate import Accelerator

    from composer.hosts.accelerate import AcceleratedRun

    accelerator, network = Accelerator(cpu=True), make_network()
    optimizer: Any = make_optimizer(network)
    if not ours:
        net, optimizer = accelerator.prepare(network, optimizer)

        def train() -> None:
            for batch in batches:
                with accelerator.accumulate(net):
                    accelerator.backward(_loss(net(batch[0]), batch))
                    optimizer.step()
                    optimizer.zero_grad()

    else:
        run = AcceleratedRun(accelerator, network, loss=_loss, max_duration="1ep")
        net, optimizer = run.prepare(network, optimizer)

        def train() -> None:
            for epoch in run.epochs(batches):
                for batch in epoch:
                    with accelerator.accumulate(net):
                        accelerator.backward(run.loss(batch))
                        optimizer.step()
                        optimizer.zero_grad()

    timed(train)


def _ignite(batches: Batches, ours: bool) -> None:
    from ignite.engine import create_supervised_trainer

    from composer.hosts.ignite import IgniteRun

    network = make_network()
    optimizer = make_optimizer(network)
    if ours:
        run = IgniteRun(network, optimizer=optimizer, loss=_loss, max_duration="1ep")
        engine = run.create_supervised_trainer()
    else:
        engine = create_supervised_trainer(network, optimizer, cross_entropy)
    timed(lambda: engine.run(batches, max_epochs=1))


_HOSTS: dict[str, tuple[str, Callable[[Batches, bool], None]]] = {
    "a loop by hand": ("torch", _loop),
    "Lightning": ("lightning", _lightning),
    "  with a callback": ("lightning", partial(_lightning, has_callback=True)),  # it calls even one that does nothing
    "transformers": ("transformers", _transformers),
    "Accelerate": ("accelerate", _accelerate),
    "Ignite": ("ignite", _ignite),
}


def main(arguments: list[str]) -> None:
    """Print the cost per step that our run adds to each library."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- hosts", description=__doc__)
    parser.add_argument("--steps", type=int, default=500, help="steps per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    batches = make_batches(options.steps)
    contestants: dict[str, Callable[[], list[float]]] = {}
    for host, (package, run) in _HOSTS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{host} is not installed")
            continue
        contestants[host] = steps_of(batches, partial(run, batches, False))
        contestants[f"{host}, ours"] = steps_of(batches, partial(run, batches, True))
    results = interleaved(contestants, options.rounds)
    print(f"{machine()}; {options.steps} steps, {options.rounds} interleaved rounds; quantiles of single steps")
    print(f"{'':20}{'us, 5 %':>9}{'with ours':>11}{'own cost':>10}{'2 to 10 %':>16}{'aim':>5}")
    for host in _HOSTS:
        if host in results:
            alone, ours = results[host], results[f"{host}, ours"]
            costs = sorted(low(ours, quantile) - low(alone, quantile) for quantile in QUANTILES)
            span = f"{costs[0]:.1f}-{costs[-1]:.1f}"
            print(f"{host:20}{low(alone):9.1f}{low(ours):11.1f}{low(ours) - low(alone):10.1f}{span:>16}{_AIM:5.0f}")
