"""Tests of `autoresume`: a relaunched run continues from its newest checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shared_runs import StopAt, resuming, weights

from composer.core import Callback, Event, State
from composer.loggers import FileLogger, Logger
from composer.testing import deep_compare

MakeTrainer = Any  # the fixture's class, in conftest.py


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_folder": None, "save_interval": "1ep"}, "needs `save_folder`"),
        ({"save_latest_filename": None}, "needs `save_latest_filename`"),
        ({"run_name": None}, "needs a `run_name`"),
        ({"save_weights_only": True}, "cannot continue from weights alone"),
    ],
)
def test_resuming_says_what_it_needs(
    make_trainer: MakeTrainer, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resuming(make_trainer, tmp_path, **arguments)


def test_the_newest_intact_checkpoint_is_taken(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = resuming(make_trainer, tmp_path / "whole")
    whole.fit()
    with pytest.raises(InterruptedError):
        resuming(make_trainer, tmp_path / "run", StopAt(6)).fit()
    newest = tmp_path / "run" / "ep1-ba6-rank0.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="an older") as caught:
        resumed = resuming(make_trainer, tmp_path / "run", progress_bar=True)
    texts = [str(warning.message) for warning in caught]
    assert any("ep1-ba6-rank0.pt' is damaged" in text for text in texts)
    assert resumed.state.timestamp.batch == 5
    resumed.fit()

    assert "ep1-ba5-rank0.pt" in capsys.readouterr().err
    deep_compare(weights(resumed), weights(whole))


def test_a_run_without_checkpoint_starts(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "notes.pt").write_bytes(b"torn")  # no name of a checkpoint
    trainer = resuming(make_trainer, tmp_path)
    trainer.fit()

    assert trainer.state.timestamp.batch == 8


def test_time_is_not_reset_under_checkpoints_that_an_earlier_fit_saved(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(save_folder=tmp_path)
    trainer.fit()
    before = {path.name: path.read_bytes() for path in tmp_path.glob("ep*")}
    with pytest.raises(FileExistsError) as caught:
        trainer.fit(duration="1ep", reset_time=True)
    assert "by an earlier one or `fit` of this name" in str(caught.value)
    assert "`save_overwrite=True`" in str(caught.value)

    assert trainer.state.timestamp.batch == 8
    assert {"ep1-ba4-rank0.pt", "ep2-ba8-rank0.pt"} == before.keys()
    assert all(content == (tmp_path / name).read_bytes() for name, content in before.items())


@pytest.mark.parametrize("options", [{"save_overwrite": True}, {"save_filename": "last.pt"}])
def test_time_is_reset_where_checkpoints_may_be_replaced(
    make_trainer: MakeTrainer, tmp_path: Path, options: dict[str, Any]
) -> None:
    trainer = make_trainer(save_folder=tmp_path, **options)
    trainer.fit()
    trainer.fit(duration="1ep", reset_time=True)

    assert trainer.state.timestamp.batch == 4


def test_a_program_of_several_fits_is_relaunched(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def program(folder: str, *callbacks: Callback) -> Any:
        trainer = resuming(make_trainer, tmp_path / folder, *callbacks, max_duration=None)
        trainer.fit(duration="6ba")
        trainer.fit(duration="1ep", reset_time=True)
        trainer.fit(duration="3ba")
        return trainer

    whole = program("whole")
    for batch in (2, 5):
        with pytest.raises(InterruptedError):
            program(f"run{batch}", StopAt(batch))
        resumed = program(f"run{batch}")
        deep_compare(weights(resumed), weights(whole))
        assert resumed.state.timestamp.batch == whole.state.timestamp.batch == 7


def test_a_complete_run_says_so_and_can_be_made_longer(
    make_trainer: MakeTrainer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    resuming(make_trainer, tmp_path).fit()
    again = resuming(make_trainer, tmp_path, progress_bar=True)
    again.fit()
    assert "nothing is left to train" in capsys.readouterr().err
    assert again.state.timestamp.epoch == 2
    longer = resuming(make_trainer, tmp_path, max_duration="3ep")
    longer.fit()
    whole = resuming(make_trainer, tmp_path / "whole", max_duration="3ep")
    whole.fit()

    assert longer.state.timestamp.batch == 12
    deep_compare(weights(longer), weights(whole))


class CrashIn(Callback):
    """Ends a run as a crash would, at an event of its last batch."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is self.event and state.timestamp.batch.value == 8:
            raise InterruptedError("crashed")


@pytest.mark.parametrize(
    "event",
    [Event.BEFORE_DATALOADER, Event.EPOCH_END, Event.EVAL_END, Event.EPOCH_CHECKPOINT, Event.FIT_END],
)
def test_the_end_of_a_run_is_not_left_out(make_trainer: MakeTrainer, tmp_path: Path, event: Event) -> None:
    def program(folder: str, *callbacks: Callback) -> Any:
        loader = make_trainer.loader(shuffle=True)
        trainer = resuming(make_trainer, tmp_path / folder, *callbacks, eval_dataloader=loader, eval_interval="3ba")
        trainer.fit()
        return torch.rand(2), dict(trainer.state.eval_metric_values), dict(trainer.state.train_metric_values)

    whole = program("whole")
    with pytest.raises(InterruptedError):
        program("run", CrashIn(event))
    for _ in range(2):  # the first relaunch ends the run, the second finds it complete
        deep_compare(program("run"), whole)


def test_metrics_of_the_last_evaluation_can_be_computed_after_a_relaunch(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def launched() -> Any:
        return resuming(make_trainer, tmp_path, eval_dataloader=make_trainer.loader(4), eval_interval="1ep")

    first = launched()
    first.fit()
    first.close()
    second = launched()
    second.fit()  # the run is complete, so nothing is evaluated again

    expected = first.state.eval_metrics["eval"]["Accuracy"].compute()
    assert torch.equal(expected, second.state.eval_metrics["eval"]["Accuracy"].compute())


def test_a_relaunched_run_goes_on_in_its_log_file(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    with pytest.raises(InterruptedError):
        resuming(make_trainer, tmp_path / "run", StopAt(5), loggers=FileLogger(str(log), capture_stderr=False)).fit()
    make_trainer.made[-1].close()
    trainer = resuming(make_trainer, tmp_path / "run", loggers=FileLogger(str(log), capture_stderr=False))
    trainer.fit()
    trainer.close()

    text = log.read_text()
    assert [f"time/batch: {batch} " in text for batch in range(9)] == [True] * 9


@pytest.mark.parametrize("filename", ["{run_name}-ep{epoch}-ba{batch}.pt", "{run_name}/ep{epoch}-ba{batch}.pt"])
def test_runs_that_share_a_folder_go_on_from_their_own(
    make_trainer: MakeTrainer, tmp_path: Path, filename: str
) -> None:
    def run(name: str, duration: str) -> int:
        trainer = make_trainer(
            run_name=name,
            max_duration=duration,
            save_folder=str(tmp_path),
            save_filename=filename,
            save_latest_filename="{run_name}-latest.pt",
            autoresume=True,
        )
        begun = trainer.state.timestamp.batch.value
        trainer.fit()
        trainer.close()
        return begun

    assert [run("mine", "1ep"), run("other", "2ep"), run("mine", "2ep"), run("new", "1ep")] == [0, 0, 4, 0]
