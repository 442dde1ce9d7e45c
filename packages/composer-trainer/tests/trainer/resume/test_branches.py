"""The decay of a schedule, branched off a checkpoint of a longer run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from composer.core import Callback, State
from composer.loggers import Logger
from composer.optim import WarmupStableDecayScheduler
from composer.testing import deep_compare

MakeTrainer = Any  # the fixture's class, in conftest.py


class Rates(Callback):
    """The learning rate after every batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        self.values.append(float(state.optimizers[0].param_groups[0]["lr"]))


def run(make_trainer: MakeTrainer, length: str, **kwargs: Any) -> tuple[dict[str, torch.Tensor], list[float]]:
    rates = Rates()
    schedule = WarmupStableDecayScheduler("2ba", t_decay="4ba", decay="linear")
    trainer = make_trainer(max_duration=length, schedulers=schedule, callbacks=rates, **kwargs)
    trainer.fit()
    return {name: p.detach().clone() for name, p in trainer.state.model.named_parameters()}, rates.values


@pytest.mark.parametrize("length", ["14ba", "40ba"])
def test_a_branch_equals_a_run_that_was_planned_for_its_length(
    make_trainer: MakeTrainer, tmp_path: Path, length: str
) -> None:
    run(make_trainer, "20ba", save_folder=str(tmp_path), save_interval="2ba", save_filename="ba{batch}.pt")
    weights, rates = run(make_trainer, length, load_path=str(tmp_path / "ba10.pt"))
    expected, planned = run(make_trainer, length)

    deep_compare(expected, weights)
    assert planned[10:] == rates
    assert [0.1, 0.075, 0.05, 0.025] == [pytest.approx(rate) for rate in rates[-4:]]
