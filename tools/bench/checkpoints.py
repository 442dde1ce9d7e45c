"""Checkpoints: what a safe save and load cost over torch's bare ones, and what a step costs while one is written."""

from __future__ import annotations

import argparse
import hashlib
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
from tools.bench._measure import interleaved, machine, timed
from tools.bench.overhead import Batches, Plain

__all__ = ["main"]

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
    """Save and load ResNet-50 with momentum, each next to torch's own plus a checksum of the file."""
    content = _resnet50()
    ours, bare = folder / "ours.pt", folder / "bare.pt"
    contestants = {
        "save, bare torch + SHA-256": _saving(bare, lambda: _bare_save(content, bare)),
        "save, bare torch + SHA-256 + flush": _saving(bare, lambda: _bare_save(content, bare, flush=True)),
        "save": _saving(ours, lambda: write_file(content, ours)),
        "load, bare torch + SHA-256": lambda: timed(lambda: (_checksum(bare), torch.load(bare, weights_only=True))),
        "load": lambda: timed(lambda: read_file(ours)),
    }
    results = interleaved(contestants, rounds)
    print(f"\nResNet-50 with momentum, {os.path.getsize(ours) / 1e6:.0f} MB; a save is on the disk when it is done\n")
    for name, other in (("save", " + flush"), ("save", ""), ("load", "")):
        mine, theirs = results[name], results[f"{name}, bare torch + SHA-256{other}"]
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        medians = [statistics.median(values) * 1e3 for values in (mine, theirs)]
        print(f"{name}: {medians[0]:6.1f} ms, bare torch + SHA-256{other} {medians[1]:6.1f} ms, ratio {ratio:.2f}")


def _bare_save(content: Any, path: Path, flush: bool = False) -> None:
    torch.save(content, path)
    _checksum(path)
    if flush:
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


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
