"""Runs of `programs/`, with a Trainer that is recorded and may load a checkpoint."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import composer
from composer.trainer import Trainer

PROGRAMS = Path(__file__).parent / "programs"


def run(program: str, *arguments: str, load: tuple[int, Path] | None = None) -> list[Trainer]:
    """Run a program and return its Trainers.

    Args:
        program: Its name.
        *arguments: Its arguments.
        load: The number of a Trainer, and the checkpoint that it loads. The program's own assertions are then
            ignored: some check numbers that only a whole run logs.
    """
    trainers: list[Trainer] = []

    class RecordedTrainer(Trainer):
        def __init__(self, **options: Any) -> None:
            if load is not None and len(trainers) == load[0]:
                options["load_path"] = str(load[1])
            trainers.append(self)
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
