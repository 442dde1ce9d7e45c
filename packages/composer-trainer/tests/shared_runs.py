"""Callbacks, loggers, optimizers and runs that several test files share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from composer.core import Callback, State
from composer.loggers import Logger, LoggerDestination
from composer.testing import RandomClassificationDataset, SimpleModel
from composer.trainer import Trainer

MakeTrainer = Any  # the fixture's class, in conftest.py


class StopAt(Callback):
    """Raises an error at the start of a batch, as in a crash."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.batch:
            raise InterruptedError("crashed")


class Quiet(LoggerDestination):
    accepts_deferred = True

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        pass


class TwoPass(torch.optim.SGD):
    """Needs two gradients per step; only the signature of `step` shows it."""

    def step(self, closure: Callable[..., Any]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure(ddp_sync=False)
            loss = closure(loss_dict={})
        super().step()
        return loss


class Overflowing(torch.optim.SGD):
    _step_supports_amp_closure = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[Any] = []

    def step(self, closure: Callable[..., Any]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        self.losses.append(loss)
        if loss is not None:
            super().step()
        return loss


class Marker:
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def start(self) -> None:
        self.calls.append(f"<{self.name}")

    def finish(self) -> None:
        self.calls.append(f"{self.name}>")


class Profiler(Callback):
    """Records the calls of its markers."""

    def __init__(self, *remote_filenames: str) -> None:
        self.calls: list[str] = []
        self.remote_filenames = remote_filenames
        self.bound: list[State] = []

    def bind_to_state(self, state: State) -> None:
        self.bound.append(state)
        state.callbacks.append(self)

    def marker(self, name: str, *args: Any, **kwargs: Any) -> Marker:
        return Marker(name, self.calls)


def make_profiled(profiler: Any, **kwargs: Any) -> Trainer:
    model = SimpleModel()
    arguments: dict[str, Any] = {
        "model": model,
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "train_dataloader": DataLoader(RandomClassificationDataset(size=8), batch_size=2),
        "max_duration": "2ep",
        "progress_bar": False,
        "device": "cpu",
        "run_name": "run",
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The profiler is enabled")
        return Trainer(profiler=profiler, **(arguments | kwargs))


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def resuming(make_trainer: MakeTrainer, folder: Path, *callbacks: Callback, **kwargs: Any) -> Any:
    return make_trainer(
        **{
            "train_dataloader": make_trainer.loader(shuffle=True),
            "callbacks": callbacks,
            "save_folder": folder,
            "save_interval": "1ba",
            "autoresume": True,
            "run_name": "run",
            **kwargs,
        }
    )


def generated(loader: Any) -> Iterator[Any]:
    yield from loader


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
