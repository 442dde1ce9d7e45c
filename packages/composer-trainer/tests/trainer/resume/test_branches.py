"""The decay of a schedule, branched off a checkpoint of a longer run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from composer.core import Callback, State, Time
from composer.loggers import Logger
from composer.optim import ExponentialScheduler, WarmupStableDecayScheduler
from composer.testing import SimpleModelWithDropout, deep_compare
from composer.trainer import Trainer

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


# ---- `branch_duration`


class Killed(Exception):
    """Ends a run as a crash does."""


class KilledAt(Callback):
    """Ends the run in the middle of a batch."""

    def __init__(self, batch: str) -> None:
        self.batch = batch

    def before_forward(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == Time.from_timestring(self.batch):
            raise Killed


class Run:
    """A trainer with random data order and dropout, and the rates of its batches."""

    def __init__(self, folder: Path | None = None, t_decay: str = "4ba", decay: str = "1-sqrt", **kwargs: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(24, 4, generator=generator)
        data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
        torch.manual_seed(0)
        model = SimpleModelWithDropout(num_features=4)
        self.rates = Rates()
        defaults: dict[str, Any] = {
            "schedulers": WarmupStableDecayScheduler("2ba", t_decay=t_decay, decay=decay),
            "callbacks": [self.rates, *kwargs.pop("callbacks", ())],
            "optimizers": [
                torch.optim.AdamW(model.fc1.parameters(), lr=0.1),
                torch.optim.SGD(model.fc2.parameters(), lr=0.1, momentum=0.9),
            ],
        }
        if folder is not None:
            name = "{run_name}-ba{batch}.pt"
            defaults |= {"save_folder": str(folder), "save_interval": "1ba", "save_filename": name}
        self.trainer = Trainer(
            model=model,
            train_dataloader=torch.utils.data.DataLoader(data, batch_size=4, shuffle=True),
            progress_bar=False,
            device="cpu",
            seed=1,
            **{**defaults, **kwargs},
        )

    def fit(self, **kwargs: Any) -> dict[str, Any]:
        try:
            self.trainer.fit(**kwargs)
        finally:
            self.trainer.close()
        state = self.trainer.state
        weights = {name: p.detach().clone() for name, p in state.model.named_parameters()}
        return {"weights": weights, "optimizers": state.get_optim_state_dict(), "batch": state.timestamp.batch.value}


def trunk(folder: Path) -> dict[str, Any]:
    return Run(folder, run_name="trunk", max_duration="20ba").fit()


@pytest.mark.parametrize("same_folder", [True, False])
def test_a_branch_is_the_planned_run_from_its_checkpoint_on(tmp_path: Path, same_folder: bool) -> None:
    trunk(tmp_path)
    folder = tmp_path if same_folder else tmp_path / "branch"
    planned = Run(max_duration="14ba")
    expected = planned.fit()
    branch = Run(folder, run_name="branch", load_path=str(tmp_path / "trunk-ba10.pt"), branch_duration="4ba")

    deep_compare(expected, branch.fit())
    assert planned.rates.values[10:] == branch.rates.values
    assert [0.1 * (1 - (i / 4) ** 0.5) for i in range(4)] == [pytest.approx(rate) for rate in branch.rates.values]
    assert 10 == len(set(planned.rates.values[:10])) + 7, "warmup in two batches, then constant"


@pytest.mark.parametrize("at", [10, 12])
def test_a_branch_continues_after_a_kill(tmp_path: Path, at: int) -> None:
    trunk(tmp_path)

    def branch(**kwargs: Any) -> Run:
        path = str(tmp_path / "trunk-ba10.pt")
        options: dict[str, Any] = {"run_name": "branch", "autoresume": True, "decay": "linear", **kwargs}
        return Run(tmp_path, load_path=path, branch_duration="4ba", **options)

    expected = Run(max_duration="14ba", decay="linear").fit()
    with pytest.raises(Killed):
        branch(callbacks=[KilledAt(f"{at}ba")]).fit()
    resumed = branch()
    result = resumed.fit()

    deep_compare(expected, result)
    assert [0.1 * (14 - batch) / 4 for batch in range(at, 14)] == [pytest.approx(r) for r in resumed.rates.values]
    deep_compare(result, branch().fit())  # a third launch finds it complete


def test_the_trunk_continues_beside_its_branch(tmp_path: Path) -> None:
    expected = trunk(tmp_path / "whole")
    folder = tmp_path / "runs"
    with pytest.raises(Killed):
        Run(folder, run_name="trunk", max_duration="20ba", callbacks=[KilledAt("12ba")]).fit()
    Run(folder, run_name="branch", load_path=str(folder / "trunk-ba10.pt"), branch_duration="4ba").fit()

    deep_compare(expected, Run(folder, run_name="trunk", max_duration="20ba", autoresume=True).fit())


def test_the_duration_is_in_epochs_only_between_epochs(tmp_path: Path) -> None:
    Run(tmp_path, run_name="trunk", max_duration="20ba").fit()
    Run(tmp_path, run_name="epochs", max_duration="3ep", save_interval="1ep").fit()
    branch = Run(load_path=str(tmp_path / "epochs-ba12.pt"), branch_duration="1ep", t_decay="1ep")
    assert 18 == branch.fit()["batch"]

    for batch in (10, 12):  # the latter was saved before the end of the epoch
        inside = Run(load_path=str(tmp_path / f"trunk-ba{batch}.pt"), branch_duration="1ep", t_decay="1ep")
        with pytest.raises(ValueError, match=r"must be in batches, samples or tokens, got '1ep': .* of epoch 1"):
            inside.fit()


def test_the_schedule_of_the_branch_replaces_the_restored_rate(tmp_path: Path) -> None:
    """A decay that begins before the checkpoint, or that the run had begun, is not continuous: a warning tells."""
    trunk(tmp_path)
    path = str(tmp_path / "trunk-ba10.pt")
    early = Run(load_path=path, branch_duration="2ba", decay="linear")
    with pytest.warns(UserWarning, match=r"begins at 0.075, but it was 0.1 when its checkpoint was saved"):
        early.fit()
    assert [0.05, 0.025] == [pytest.approx(rate) for rate in early.rates.values]

    late = Run(load_path=str(tmp_path / "trunk-ba18.pt"), branch_duration="8ba")
    with pytest.warns(UserWarning, match=r"begins at 0.1, but it was 0.05 when its checkpoint was saved"):
        late.fit()


def test_a_schedule_that_does_not_depend_on_the_length_continues(tmp_path: Path) -> None:
    """Its rate of the first batch was set by the last step of the trunk."""
    options: dict[str, Any] = {"schedulers": ExponentialScheduler(0.9, "2ba")}
    Run(tmp_path, run_name="trunk", max_duration="20ba", **options).fit()
    branch = Run(load_path=str(tmp_path / "trunk-ba10.pt"), branch_duration="4ba", **options)

    deep_compare(Run(max_duration="14ba", **options).fit(), branch.fit())


def test_a_second_fit_is_no_branch(tmp_path: Path) -> None:
    trunk(tmp_path)
    branch = Run(load_path=str(tmp_path / "trunk-ba10.pt"), branch_duration="4ba")
    branch.trainer.fit()
    with pytest.raises(ValueError, match="already at its `max_duration` of '14ba'"):
        branch.trainer.fit()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load_path": None}, "`branch_duration` needs `load_path`"),
        ({"load_weights_only": True}, "`load_weights_only` must be False with `branch_duration`, .*got True and"),
        ({"load_path": "w.safetensors"}, "`load_path` not a `.safetensors` file, got False and 'w.safetensors'"),
        ({"max_duration": "20ba"}, "`max_duration` must not be given with `branch_duration`, got '20ba' and '4ba'"),
        ({"run_name": "trunk"}, "`run_name` must be a name of its own for a branch, got 'trunk'"),
        ({"branch_duration": "0ba"}, "`branch_duration` must be positive, got '0ba'"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    trunk(tmp_path)
    options: dict[str, Any] = {"load_path": str(tmp_path / "trunk-ba10.pt"), "branch_duration": "4ba", **arguments}

    with pytest.raises(ValueError, match=message):
        Run(**options)


def test_two_lengths_of_the_first_fit_are_refused(tmp_path: Path) -> None:
    trunk(tmp_path)
    branch = Run(load_path=str(tmp_path / "trunk-ba10.pt"), branch_duration="4ba")

    with pytest.raises(ValueError, match="`duration` must not be given to the first `fit` with `branch_duration`"):
        branch.fit(duration="2ba")


def test_a_branch_does_not_resume_from_its_trunk(tmp_path: Path) -> None:
    trunk(tmp_path)
    options: dict[str, Any] = {"run_name": "trunk", "autoresume": True}

    with pytest.raises(ValueError, match=r"`run_name` must not be that of the run that this one branches off"):
        Run(tmp_path, load_path=str(tmp_path / "trunk-ba10.pt"), branch_duration="4ba", **options)


def test_a_decay_that_is_a_fraction_of_the_whole_run_is_refused_in_a_branch(tmp_path: Path) -> None:
    trunk = Run(tmp_path, max_duration="20ba", save_interval="2ba", save_filename="ba{batch}.pt", run_name="trunk")
    trunk.trainer.fit()
    branch = Run(t_decay="0.2dur", load_path=str(tmp_path / "ba10.pt"), branch_duration="4ba", run_name="branch")
    with pytest.raises(ValueError, match=r"`t_decay` must be an absolute time in a branch, got '0.2dur'.* Write '4ba'"):
        branch.trainer.fit()
