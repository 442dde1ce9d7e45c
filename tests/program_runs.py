"""Runs of `programs/`, with a Trainer that is recorded and may load a checkpoint."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import composer
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.trainer import Trainer
from composer.utils import ensure_tuple

PROGRAMS = Path(__file__).parent / "programs"


class Recorder(Callback):
    """Keeps the events of a run, as lines that each begin with an event of `STARTS`."""

    STARTS = ("INIT FIT_START BEFORE_DATALOADER EPOCH_END EVAL_START EVAL_BATCH_START EVAL_END FIT_END").split()

    def __init__(self) -> None:
        self.lines: list[list[str]] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event.name in self.STARTS or not self.lines:
            self.lines.append([])
        self.lines[-1].append(event.name)

    def summary(self) -> str:
        """Return the lines, equal ones in a row once, with their number."""
        return "".join(f"{len(list(same))} x {' '.join(line)}\n" for line, same in groupby(self.lines))


def run(
    program: str, *arguments: str, load: tuple[int, Path] | None = None, recorders: list[Recorder] | None = None
) -> list[Trainer]:
    """Run a program and return its Trainers.

    Args:
        program: Its name.
        *arguments: Its arguments.
        load: The number of a Trainer, and the checkpoint that it loads. The program's own assertions are then
            ignored: some check numbers that only a whole run logs.
        recorders: Gets the recorder of the events of each Trainer.
    """
    trainers: list[Trainer] = []

    class RecordedTrainer(Trainer):
        def __init__(self, **options: Any) -> None:
            if load is not None and len(trainers) == load[0]:
                options["load_path"] = str(load[1])
            trainers.append(self)
            if recorders is not None:
                recorders.append(Recorder())
                options["callbacks"] = [*ensure_tuple(options.get("callbacks")), recorders[-1]]
            super().__init__(**options)

    with (
        mock.patch.object(composer, "Trainer", RecordedTrainer, create=True),
        mock.patch.object(sys, "argv", [program, *arguments]),
        mock.patch.dict(os.environ, OMP_NUM_THREADS="1"),
    ):
        try:
            runpy.run_path(str(PROGRAMS / f"{program}.py"), run_name="__main__")
        except AssertionError:
            if load is None:
                raise
    return trainers


def keys_of(content: Any, depth: int = 3) -> list[str]:
    """Return the keys of nested dicts, sorted, joined by slashes, to a depth."""
    if not isinstance(content, dict) or depth == 0:
        return []
    below = ((str(key), keys_of(value, depth - 1)) for key, value in content.items())
    return sorted(path for key, rest in below for path in (key, *(f"{key}/{each}" for each in rest)))


def whole(weights: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return weights without shards; a collective operation."""
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in weights.items()}


def main(target: str, number: str, checkpoint: str, program: str, *arguments: str) -> None:
    """Run a program in which one Trainer loads a checkpoint, and save the weights that this Trainer ends with."""
    trainer = run(program, *arguments, load=(int(number), Path(checkpoint)))[int(number)]
    weights = whole(trainer.state.model.state_dict())
    if composer.utils.dist.get_global_rank() == 0:
        torch.save(weights, target)


if __name__ == "__main__":
    command: Sequence[str] = sys.argv[1:]
    main(*command)
