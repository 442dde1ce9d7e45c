"""Checkpoints: saving and loading next to torch, and what a step costs while one is written."""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torchvision.models import resnet50

from composer import Callback, Logger, State, Trainer
from composer.checkpoint.file import read_file, write_file
from composer.checkpoint.saver import CheckpointWriter
from tools.bench._measure import interleaved, machine, spread, timed
from tools.bench.overhead import Batches, Plain

_WIDTH = 7000  # a layer of 7000 x 7000 takes 196 MB


def main(arguments: list[str]) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench checkpoints", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        _files(Path(folder), options.rounds)
        _steps(Path(folder), options.rounds)


def _files(folder: Path, rounds: int) -> None:
    """Save and load ResNet-50 with momentum, next to torch."""
    content = _resnet50()
    ours, torchs, later = folder / "ours.pt", folder / "torch.pt", folder / "later.pt"
    writer = CheckpointWriter(asynchronous=True)

    def blocked() -> float:
        """Seconds until training continues."""
        later.unlink(missing_ok=True)
        seconds = timed(lambda: writer.write(content, str(later), lambda: None))
        writer.wait()
        return seconds

    results = interleaved(
        {
            "torch.save": _saving(torchs, lambda: torch.save(content, torchs)),
            "torch.save and fsync": _saving(torchs, lambda: _save_and_flush(content, torchs)),
            "save": _saving(ours, lambda: write_file(content, ours)),
            "asynchronous save, until it returns": blocked,
            "torch.load": lambda: timed(lambda: torch.load(torchs, weights_only=True)),
            "load": lambda: timed(lambda: read_file(ours)),
        },
        rounds,
    )
    size = os.path.getsize(ours) / 1e6
    print(f"\nResNet-50 with momentum, {size:.0f} MB; a save is on the disk and has a checksum, a load checks it\n")
    print(f"{'':40}{'ms':>7}{'min-max':>14}{'ratio to':>24}")
    for name, values in results.items():
        seconds = [1e3 * value for value in values]
        other = "torch.load" if "load" in name else "torch.save"
        ratio = statistics.median(a / b for a, b in zip(values, results[other], strict=True))
        print(f"{name:40}{statistics.median(seconds):7.1f}{spread(seconds):>14}{other:>18}{ratio:6.2f}")


def _save_and_flush(content: Any, path: Path) -> None:
    torch.save(content, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _saving(path: Path, run: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        path.unlink(missing_ok=True)  # a run saves under a new name each time
        os.sync()  # and does not wait for the disk on behalf of the one before
        return timed(run)

    return measure


def _resnet50() -> dict[str, Any]:
    model = resnet50()
    momentum = {name: torch.randn_like(value) for name, value in model.named_parameters()}
    return {"state": {"model": model.state_dict(), "optimizers": {"SGD": momentum}}}


class _Laps(Callback):
    """Seconds of each step, without the time that a save takes of it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def batch_start(self, state: State, logger: Logger) -> None:
        self._start = time.perf_counter()

    def batch_end(self, state: State, logger: Logger) -> None:
        self.seconds.append(time.perf_counter() - self._start)


class _Wide(torch.nn.Module):
    """A small network beside 196 MB of state that the step does not touch, like a frozen table."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
        self.register_buffer("table", torch.randn(_WIDTH, _WIDTH))

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers(inputs)


def _steps(folder: Path, rounds: int) -> None:
    """Steps while a checkpoint is being written in the background, next to those when none is."""
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(256, 256, generator=generator), torch.randint(10, (256,), generator=generator))
    model, laps, every = Plain(_Wide()), _Laps(), 200
    trainer = Trainer(
        model=model,
        train_dataloader=Batches([batch] * every * (rounds + 1)),
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        callbacks=laps,
        progress_bar=False,
        device="cpu",
        save_folder=str(folder / "run"),
        save_interval=f"{every}ba",
        save_num_checkpoints_to_keep=1,
        save_async=True,
    )
    trainer.fit()
    trainer.close()
    after = [laps.seconds[save] for save in range(every, len(laps.seconds), every)]
    while_writing = [t for save in range(every, len(laps.seconds), every) for t in laps.seconds[save : save + 10]]
    quiet = [
        t for save in range(every, len(laps.seconds), every) for t in laps.seconds[save + every - 50 : save + every]
    ]
    normal = statistics.median(quiet)
    print(f"\n200 MB of state, saved in the background; a normal step takes {normal * 1e3:.2f} ms\n")
    for name, values in (("the step after a save", after), ("the ten steps after a save", while_writing)):
        median = statistics.median(values)
        print(f"{name}: {median * 1e3:.2f} ms, ratio {median / normal:.2f}")
