"""Tests of runs that are resumed with changed arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shared_runs import StopAt, resuming, weights

from composer.checkpoint.resume import apply_changes, describe_arguments
from composer.core import Callback, State
from composer.loggers import Logger
from composer.optim import ConstantScheduler, LinearScheduler
from composer.testing import deep_compare

MakeTrainer = Any  # the fixture's class, in conftest.py


def run_changed(make_trainer: MakeTrainer, tmp_path: Path, first: dict[str, Any], then: dict[str, Any]) -> Any:
    def arguments(options: dict[str, Any]) -> dict[str, Any]:
        options = dict(options)
        model = make_trainer.model()
        lr, decay = options.pop("lr", 0.1), options.pop("weight_decay", 0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
        return {"model": model, "optimizers": optimizer, **options}

    with pytest.raises(InterruptedError):
        resuming(make_trainer, tmp_path, StopAt(4), **arguments(first)).fit()
    return resuming(make_trainer, tmp_path, progress_bar=True, **arguments(then))


def test_a_changed_learning_rate_wins(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linear = {"schedulers": LinearScheduler()}
    resumed = run_changed(make_trainer, tmp_path, {"lr": 0.1, **linear}, {"lr": 0.2, "weight_decay": 0.5, **linear})
    group = resumed.state.optimizers[0].param_groups[0]
    assert group["lr"] == pytest.approx(0.2 * (1 - 3 / 8))  # the schedule of the fourth batch was asked after the third
    assert group["weight_decay"] == 0.5
    assert "lr: 0.1 -> 0.2" in (said := capsys.readouterr().err)
    assert "weight_decay: 0.0 -> 0.5" in said
    rates: list[float] = []

    class Rates(Callback):
        def batch_start(self, state: State, logger: Logger) -> None:
            rates.append(state.optimizers[0].param_groups[0]["lr"])

    resumed.state.callbacks.append(Rates())
    resumed.fit()
    assert rates[1:] == pytest.approx([0.2 * (1 - batch / 8) for batch in range(4, 7)])


@pytest.mark.parametrize("new", [0.95, None, (0.8, 0.9, 0.98)])
def test_an_option_with_several_values_may_become_one_or_none(new: Any) -> None:
    def run(option: Any) -> State:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD([{"params": model.parameters(), "option": option}], lr=0.1)
        return State(model=model, max_duration="1ba", optimizers=optimizer)

    restored = run((0.85, 0.98))
    apply_changes(restored, describe_arguments(run(new), []), describe_arguments(restored, []))
    assert restored.optimizers[0].param_groups[0]["option"] == new


def test_without_a_schedule_the_new_rate_is_used(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    resumed = run_changed(make_trainer, tmp_path, {"lr": 0.1}, {"lr": 0.01})
    assert resumed.state.optimizers[0].param_groups[0]["lr"] == 0.01


def test_a_changed_schedule_is_followed_from_where_the_run_is(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    constant, linear = {"schedulers": ConstantScheduler(0.5)}, {"schedulers": LinearScheduler()}
    resumed = run_changed(make_trainer, tmp_path, constant, linear)
    # The rate of batch 4 was set by the step after batch 3.
    assert resumed.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * (1 - 3 / 8))
    assert "schedulers:" in capsys.readouterr().err


def test_a_schedule_of_torch_is_brought_to_where_the_run_is(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def options(gamma: float) -> dict[str, Any]:
        model = make_trainer.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=gamma)
        return {
            "model": model,
            "optimizers": optimizer,
            "schedulers": schedule,
            "step_schedulers_every_batch": True,
        }

    with pytest.raises(InterruptedError):
        resuming(make_trainer, tmp_path, StopAt(4), **options(0.1)).fit()
    same = resuming(make_trainer, tmp_path, **options(0.1))
    assert same.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)
    other = resuming(make_trainer, tmp_path, **options(0.5))
    assert other.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.25)
    gone = resuming(make_trainer, tmp_path, **{**options(0.1), "schedulers": None, "step_schedulers_every_batch": None})
    gone.fit()  # which might have brought one
    assert gone.state.optimizers[0].param_groups[0]["lr"] == 1.0


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # which SequentialLR of torch 2.6 passes itself
def test_a_new_rate_reaches_schedules_made_of_others(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def options(lr: float) -> dict[str, Any]:
        model = make_trainer.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=2)
        halving = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [constant, halving], milestones=[2])
        return {
            "model": model,
            "optimizers": optimizer,
            "schedulers": schedule,
            "step_schedulers_every_batch": True,
        }

    rates: dict[str, list[float]] = {}

    class Rates(Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def batch_start(self, state: State, logger: Logger) -> None:
            rates.setdefault(self.name, []).append(state.optimizers[0].param_groups[0]["lr"])

    resuming(make_trainer, tmp_path / "whole", Rates("whole"), **options(2.0)).fit()
    with pytest.raises(InterruptedError):
        resuming(make_trainer, tmp_path / "run", StopAt(4), **options(1.0)).fit()
    resuming(make_trainer, tmp_path / "run", Rates("resumed"), **options(2.0)).fit()

    assert rates["resumed"] == pytest.approx(rates["whole"][4:])


def test_a_schedule_given_to_fit_is_resumed(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    whole = resuming(make_trainer, tmp_path / "whole")
    whole.fit(schedulers=LinearScheduler())
    with pytest.raises(InterruptedError):
        resuming(make_trainer, tmp_path / "run", StopAt(5)).fit(schedulers=LinearScheduler())
    resumed = resuming(make_trainer, tmp_path / "run")
    resumed.fit(schedulers=LinearScheduler())

    deep_compare(weights(resumed), weights(whole))
    deep_compare(resumed.state.optimizers[0].state_dict(), whole.state.optimizers[0].state_dict())


@pytest.mark.parametrize("kind", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize("adam", [False, True])
def test_a_cycled_momentum_is_resumed_where_its_scheduler_is_given_to_fit(
    make_trainer: MakeTrainer, tmp_path: Path, kind: str, adam: bool
) -> None:
    def fit(folder: str, *callbacks: Callback) -> Any:
        model = make_trainer.model()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if adam:
            optimizer = torch.optim.Adam(model.parameters(), 0.1)
        trainer = resuming(make_trainer, tmp_path / folder, *callbacks, model=model, optimizers=optimizer)
        if kind == "OneCycleLR":
            schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        else:
            schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, step_size_up=4)
        trainer.fit(schedulers=schedule, step_schedulers_every_batch=True)
        return trainer

    whole = fit("whole")
    with pytest.raises(InterruptedError):
        fit("run", StopAt(5))
    resumed = fit("run")

    deep_compare(weights(resumed), weights(whole))
    deep_compare(resumed.state.optimizers[0].state_dict(), whole.state.optimizers[0].state_dict())


class Rates(Callback):
    """Notes the rate of each batch."""

    def __init__(self) -> None:
        self.seen: dict[int, float] = {}

    def batch_start(self, state: State, logger: Logger) -> None:
        self.seen[state.timestamp.batch.value] = state.optimizers[0].param_groups[0]["lr"]


SCHEDULES: dict[str, Any] = {
    "own": lambda optimizer: LinearScheduler(t_max="16ba"),
    "exponential": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=17),
}


@pytest.mark.parametrize(
    ("without", "name", "to_fit"),
    [
        ({"load_ignore_keys": ["state/optimizers/*"]}, "own", False),
        ({"load_ignore_keys": ["state/optimizers/*"]}, "one cycle", True),
        ({"load_ignore_keys": ["state/timestamp"]}, "exponential", True),
        ({"load_ignore_keys": ["state/timestamp"]}, "own", False),
        ({"save_ignore_keys": ["state/optimizers"]}, "one cycle", False),
        ({"save_ignore_keys": ["state/optimizers"]}, "own", True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*keeps its current state:UserWarning", "ignore:.*holds no:UserWarning")
def test_the_rate_is_the_schedule_s_where_the_optimizer_s_was_not_loaded(
    make_trainer: MakeTrainer, tmp_path: Path, name: str, without: dict[str, Any], to_fit: bool
) -> None:
    def rates(max_duration: str, **options: Any) -> dict[int, float]:
        model, noted = make_trainer.model(), Rates()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        given = {"step_schedulers_every_batch": True}
        if not to_fit:
            given["schedulers"] = SCHEDULES[name](optimizer)
        trainer = make_trainer(
            model=model, optimizers=optimizer, callbacks=noted, max_duration=max_duration,
            **{**options, **({} if to_fit else given)},
        )  # fmt: skip
        if to_fit:
            given["schedulers"] = SCHEDULES[name](optimizer)
        trainer.fit(**(given if to_fit else {}))
        return noted.seen

    loading = {key: value for key, value in without.items() if key.startswith("load")}
    saving = {key: value for key, value in without.items() if key.startswith("save")}
    whole = rates("16ba")
    rates("7ba", save_folder=tmp_path, **saving)
    resumed = rates(
        "16ba" if "timestamp" not in str(without) else "9ba", load_path=tmp_path / "latest-rank0.pt", **loading
    )

    shift = 7 if "timestamp" in str(without) and name != "own" else 0  # torch's count steps, ours ask for the time
    assert len(resumed) == 9
    for batch, seen in resumed.items():
        assert seen == pytest.approx(whole[batch + shift]), batch


def test_a_changed_batch_size_and_duration_are_told(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resumed = run_changed(
        make_trainer,
        tmp_path,
        {},
        {"train_dataloader": make_trainer.loader(batch_size=8, shuffle=True), "max_duration": "3ep"},
    )
    said = capsys.readouterr().err
    assert "batch size: 4 -> 8" in said
    assert "max_duration: 2ep -> 3ep" in said
    resumed.fit()
    assert resumed.state.timestamp.epoch == 3
    assert resumed.state.timestamp.sample == 48
