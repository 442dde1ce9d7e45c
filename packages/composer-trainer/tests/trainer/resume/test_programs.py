"""Whole programs, killed and relaunched, against the same programs to which nothing happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.core import Algorithm, Callback, Event, State
from composer.loggers import Logger
from composer.optim import LinearScheduler
from composer.testing import deep_compare


class KilledError(BaseException):
    """The process is killed."""


class KillAt(Callback):
    """Kills the process at an event of a batch."""

    def __init__(self, event: str, batch: int) -> None:
        self.at = (event, batch)

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if (event.value, state.timestamp.batch.value) == self.at:
            raise KilledError


class Journal(Callback):
    """Records the learning rate of every batch, the scale of gradients after it, and the results of evaluations."""

    def __init__(self) -> None:
        self.rates: dict[int, float] = {}
        self.scales: dict[int, float] = {}
        self.evaluations: list[tuple[int, float]] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        self.rates[state.timestamp.batch.value] = state.optimizers[0].param_groups[0]["lr"]

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.scaler is not None:
            self.scales[state.timestamp.batch.value] = state.scaler.get_scale()

    def eval_end(self, state: State, logger: Logger) -> None:
        (metric,) = state.eval_metrics[str(state.dataloader_label)].values()
        self.evaluations.append((state.timestamp.batch.value, float(metric.compute())))


class Launch:
    """One launch of a program: its model, and Trainers that save to one folder."""

    def __init__(self, folder: Path, kill: tuple[str, int] | None, number: int = 0) -> None:
        torch.manual_seed(0)
        self.folder, self.kill, self.number, self.journal = folder, kill, number, Journal()
        self.model = torch.nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.state: Any = None

    def trainer(self, **arguments: Any) -> Trainer:
        defaults: dict[str, Any] = {
            "loss": torch.nn.functional.cross_entropy,
            "metrics": {"acc": MulticlassAccuracy(2, average="micro")},
            "optimizers": self.optimizer,
            "train_dataloader": loader(samples()),
            "save_interval": "2ba",
        }
        callbacks = [*arguments.pop("callbacks", ()), self.journal, *([KillAt(*self.kill)] if self.kill else ())]
        trainer = Trainer(
            model=self.model,
            callbacks=callbacks,
            run_name="run",
            save_folder=self.folder,
            autoresume=True,
            seed=7,
            progress_bar=False,
            device="cpu",
            **{**defaults, **arguments},
        )
        self.state = trainer.state
        return trainer


Program = Callable[[Launch], None]


def samples(count: int = 32, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randint(0, 2, (count,), generator=generator))


def loader(data: TensorDataset, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=8, shuffle=True, **arguments)


def launches(program: Program, folder: Path, *kills: tuple[str, int]) -> tuple[Launch, list[Launch]]:
    """Return an uninterrupted launch, and those that were killed with the one that ends the run."""
    whole = Launch(folder / "whole", None)
    program(whole)
    found = []
    for number, kill in enumerate((*kills, None)):
        launch = Launch(folder / "killed", kill, number)
        found.append(launch)
        if kill is None:
            program(launch)
        else:
            with pytest.raises(KilledError):
                program(launch)
    return whole, found


def check_equal(program: Program, folder: Path, *kills: tuple[str, int]) -> None:
    """Check that a killed program trains and evaluates as if nothing had happened."""
    whole, parts = launches(program, folder, *kills)
    deep_compare(whole.model.state_dict(), parts[-1].model.state_dict())
    assert whole.state.timestamp.batch == parts[-1].state.timestamp.batch
    for part in parts:
        assert part.journal.rates == {batch: whole.journal.rates[batch] for batch in part.journal.rates}
        assert part.journal.scales == {batch: whole.journal.scales[batch] for batch in part.journal.scales}
    resumed = parts[-1].journal.evaluations
    assert resumed == whole.journal.evaluations[len(whole.journal.evaluations) - len(resumed) :]
    batches = sorted({batch for part in parts for batch, _ in part.journal.evaluations})
    assert batches == sorted({batch for batch, _ in whole.journal.evaluations})


@pytest.mark.parametrize("constructor", ["fp32", "amp_fp16"])
def test_the_scale_of_gradients_is_restored_for_a_precision_that_fit_was_given(
    tmp_path: Path, constructor: str
) -> None:
    def program(launch: Launch) -> None:
        trainer = launch.trainer(
            loss=lambda outputs, targets: 50 * torch.nn.functional.cross_entropy(outputs, targets),
            precision=constructor,
            max_duration="8ba",
        )
        trainer.fit(precision="amp_fp16")

    check_equal(program, tmp_path, ("batch_start", 5))


@pytest.mark.parametrize("kill", [("fit_start", 4), ("batch_start", 5), ("batch_start", 7)])
def test_a_relaunched_program_trains_nothing_twice(tmp_path: Path, kill: tuple[str, int]) -> None:
    def program(launch: Launch) -> None:
        trainer = launch.trainer(max_duration="4ba")
        trainer.fit()
        trainer.eval(loader(samples(16, 1)))
        torch.randn(3)
        trainer.fit(duration="4ba")

    whole, parts = launches(program, tmp_path, kill)
    deep_compare(whole.model.state_dict(), parts[-1].model.state_dict())
    assert [*range(kill[1] // 2 * 2, 8)] == [*parts[-1].journal.rates]


@pytest.mark.parametrize(("interval", "event"), [("2ba", "epoch_checkpoint"), ("0.5dur", "fit_end")])
def test_the_end_of_a_run_is_evaluated_once(tmp_path: Path, interval: str, event: str) -> None:
    def program(launch: Launch) -> None:
        trainer = launch.trainer(max_duration="1ep", eval_dataloader=loader(samples(16, 1)), eval_interval=interval)
        trainer.fit()

    check_equal(program, tmp_path, (event, 4))


def linear(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return LinearLR(optimizer, 0.1, total_iters=steps)


def constant(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return ConstantLR(optimizer, 0.1, total_iters=steps)


def warm_cosine(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    parts = [LinearLR(optimizer, 0.1, total_iters=6), CosineAnnealingLR(optimizer, steps)]
    return SequentialLR(optimizer, parts, milestones=[6])


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # older `SequentialLR` passes it
@pytest.mark.parametrize("make", [linear, constant, warm_cosine, lambda _, steps: LinearScheduler(alpha_f=steps / 20)])
def test_a_changed_schedule_continues_as_if_it_had_been_used_from_the_start(tmp_path: Path, make: Any) -> None:
    def program(launch: Launch, steps: int, rate: float) -> None:
        optimizer = launch.optimizer = torch.optim.SGD(launch.model.parameters(), lr=rate)
        arguments = {"schedulers": make(optimizer, steps), "step_schedulers_every_batch": True}
        launch.trainer(max_duration="12ba", **arguments).fit()

    whole = Launch(tmp_path / "whole", None)
    program(whole, 8, 0.2)
    with pytest.raises(KilledError):
        program(Launch(tmp_path / "killed", ("batch_start", 5)), 10, 0.1)
    resumed = Launch(tmp_path / "killed", None)
    program(resumed, 8, 0.2)

    assert [*range(4, 12)] == [*resumed.journal.rates]
    assert resumed.journal.rates == pytest.approx({batch: whole.journal.rates[batch] for batch in range(4, 12)})


def test_a_schedule_whose_arguments_change_as_it_is_stepped_is_resumed(tmp_path: Path) -> None:
    def program(launch: Launch) -> None:
        schedule = CosineAnnealingWarmRestarts(launch.optimizer, 3, T_mult=2)
        launch.trainer(max_duration="12ba", schedulers=schedule, step_schedulers_every_batch=True).fit()

    check_equal(program, tmp_path, ("batch_start", 9))


class Lengthens(Callback):
    """Changes the length of the run."""

    def __init__(self, end: str) -> None:
        self.end = end

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == 3:
            state.max_duration = self.end


class Doubles(Algorithm):
    """Doubles the length of the run when it is known, as `ScaleSchedule` does for a length that `fit` is given."""

    def match(self, event: Event, state: State) -> bool:
        return event is Event.FIT_START

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        assert state.max_duration is not None
        state.max_duration = state.max_duration * 2


@pytest.mark.parametrize("batch", [2, 5])
def test_a_length_that_an_algorithm_scales_is_scaled_once(tmp_path: Path, batch: int) -> None:
    def program(launch: Launch) -> None:
        launch.trainer(algorithms=Doubles()).fit(duration="4ba")

    check_equal(program, tmp_path, ("batch_start", batch))


@pytest.mark.parametrize(("planned", "actual", "batch"), [("5ba", "10ba", 7), ("12ba", "7ba", 5), ("12ba", "7ba", 6)])
def test_a_length_that_a_callback_has_changed_is_kept(tmp_path: Path, planned: str, actual: str, batch: int) -> None:
    def program(launch: Launch) -> None:
        launch.trainer(max_duration=planned, callbacks=[Lengthens(actual)]).fit()

    check_equal(program, tmp_path, ("batch_start", batch))
