"""A cooldown that is branched off half of a run, next to runs that are planned for its length, on characters of a text.

For each of `--seeds` seeds, a run with `WarmupStableDecayScheduler` that is planned for `--steps` steps saves a
checkpoint at half of them. `Trainer(load_path=..., branch_duration=...)` decays from there, for `--decay` steps. Two
runs are planned for the length of the branch from the start: one with the same schedule, one with a cosine. All have
the same initial weights and data order. The peak rates of the two schedules are those with the best loss of planned
runs on a second part of the text; losses are reported on a third.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from composer import Callback, State, Trainer
from composer.loggers import Logger
from composer.optim import CosineAnnealingWithWarmupScheduler, WarmupStableDecayScheduler
from tools.bench._measure import machine
from tools.bench.characters import SEEDS, batches, groups, loss_of, make_model, mean_with_interval

_CHOSEN_ON, _REPORTED = 1, 2  # parts of the text
_TUNING_SEEDS = (100, 101)
_GRID = (2e-3, 4e-3, 8e-3)


class _StopAt(Callback):
    """Ends the run early: nothing after its checkpoint is needed."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.batch:
            state.stop_training()


def _run(
    options: argparse.Namespace, seed: int, schedule: Any, lr: float, part: int = _REPORTED, **arguments: Any
) -> float:
    model = make_model(options.text, seed)
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.AdamW(groups(model), lr=lr, betas=(0.9, 0.95), fused=True),
        schedulers=schedule,
        train_dataloader=batches(options.text, options.steps, seed),
        progress_bar=False,
        device="cpu",
        seed=seed,
        **arguments,
    )
    trainer.fit()
    trainer.close()
    return loss_of(model, options.text, part)


def _tuned(options: argparse.Namespace, name: str, schedule: Any, length: str) -> float:
    """Return the best peak rate of planned runs, which is not at an edge."""
    means: dict[float, float] = {}

    def loss(lr: float) -> float:
        if lr not in means:
            runs = [_run(options, seed, schedule, lr, _CHOSEN_ON, max_duration=length) for seed in _TUNING_SEEDS]
            means[lr] = statistics.mean(runs)
            print(f"{name}, lr {lr:g}: {means[lr]:.4f}", flush=True)
        return means[lr]

    best = min(_GRID, key=loss)
    for edge, factor in ((min(_GRID), 0.5), (max(_GRID), 2.0)):
        while best == edge and loss(best * factor) < loss(best):
            best = edge = best * factor
    return best


def main(arguments: list[str]) -> None:
    """Print the losses and their differences."""
    parser = argparse.ArgumentParser(prog="nox -s bench -- cooldown", description=__doc__)
    parser.add_argument("--text", type=Path, help="a text file; without it nothing is measured")
    parser.add_argument(
        "--steps", type=int, default=320, help="steps that the run is planned for (default: %(default)s)"
    )
    parser.add_argument("--decay", type=int, default=40, help="steps of the cooldown (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=10, choices=SEEDS, help="seeds (default: %(default)s)")
    parser.add_argument("--lr", type=float, help="peak learning rate of all runs (default: the best of each schedule)")
    options = parser.parse_args(arguments)
    if options.text is None:
        print("Give a text to train on: --text PATH")
        return
    torch.set_num_threads(1)
    print(machine(), flush=True)
    begin = time.perf_counter()
    half, warmup = options.steps // 2, f"{options.steps // 20}ba"
    length = f"{half + options.decay}ba"
    losses: dict[str, list[float]] = {"branch": [], "planned, same schedule": [], "planned, cosine": []}
    wsd, cosine = (
        WarmupStableDecayScheduler(warmup, t_decay=f"{options.decay}ba"),
        CosineAnnealingWithWarmupScheduler(warmup),
    )
    named = {"same schedule": wsd, "cosine": cosine}
    lr_wsd, lr_cosine = (options.lr or _tuned(options, name, each, length) for name, each in named.items())
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            save: dict[str, Any] = {"save_folder": folder, "save_interval": f"{half}ba", "save_filename": "half.pt"}
            _run(options, seed, wsd, lr_wsd, max_duration=f"{options.steps}ba", callbacks=_StopAt(half), **save)
            branch: dict[str, Any] = {"load_path": f"{folder}/half.pt", "branch_duration": f"{options.decay}ba"}
            losses["branch"].append(_run(options, seed, wsd, lr_wsd, **branch))
        losses["planned, same schedule"].append(_run(options, seed, wsd, lr_wsd, max_duration=length))
        losses["planned, cosine"].append(_run(options, seed, cosine, lr_cosine, max_duration=length))
        print(f"seed {seed}: " + ", ".join(f"{name} {values[-1]:.4f}" for name, values in losses.items()), flush=True)
    for name, values in losses.items():
        print(f"{name}: {statistics.mean(values):.4f}, standard deviation {statistics.stdev(values):.4f}")
    for name in list(losses)[1:]:
        mean, interval = mean_with_interval([a - b for a, b in zip(losses["branch"], losses[name], strict=True)])
        verdict = "within noise" if abs(mean) <= interval else "better" if mean < 0 else "worse"
        print(
            f"branch minus {name}: {mean:+.4f} +- {interval:.4f} nats per character (95 %, {options.seeds} pairs): "
            f"{verdict}"
        )
    rates = f"lr {lr_wsd:g}, of the cosine {lr_cosine:g}"
    print(f"{half} steps, then {options.decay}; {rates}; {time.perf_counter() - begin:.0f} s")
