"""Tests of saving checkpoints during training."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_runs import StopAt, names, weights

from composer.callbacks import CheckpointSaver
from composer.checkpoint.saver import CheckpointWriter
from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.optim import LinearScheduler
from composer.testing import deep_compare

MakeTrainer = Any  # the fixture's class, in conftest.py


@pytest.mark.parametrize(
    ("interval", "duration", "saves"),
    [
        *[("1ep", "5ep", 5), ("2ep", "8ep", 4), ("10ba", "8ep", 4), ("0.25dur", "4ep", 4), ("5ba", "10ba", 2)],
        *[("0.35dur", "4ep", 3), ("0.10dur", "70sp", 10), ("0.05dur", "80sp", 20)],
    ],
)
def test_a_run_saves_as_often_as_asked(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    interval: str,
    duration: str,
    saves: int,
) -> None:
    written: list[str] = []
    write = CheckpointWriter.write

    def count(self: CheckpointWriter, content: Any, path: str, then: Any) -> None:
        written.append(path)
        write(self, content, path, then)

    monkeypatch.setattr(CheckpointWriter, "write", count)
    trainer = make_trainer(
        train_dataloader=make_trainer.loader(10, 2), max_duration=duration, save_folder=tmp_path, save_interval=interval
    )
    trainer.fit()

    # If the last batch was due, its checkpoint is written again when the run has ended, under the same name.
    assert trainer.saved_checkpoints == list(dict.fromkeys(written))
    assert len(trainer.saved_checkpoints) == saves
    assert len(names(tmp_path)) == saves + 1  # the link
    assert os.path.realpath(tmp_path / "latest-rank0.pt") == os.path.realpath(trainer.saved_checkpoints[-1])


@pytest.mark.parametrize(("keep", "left"), [(-1, 4), (0, 0), (1, 1), (3, 3)])
def test_old_checkpoints_are_rotated_out(make_trainer: MakeTrainer, tmp_path: Path, keep: int, left: int) -> None:
    trainer = make_trainer(save_folder=tmp_path, save_interval="2ba", save_num_checkpoints_to_keep=keep)
    trainer.fit()

    files = [name for name in names(tmp_path) if name.startswith("ep")]
    assert len(files) == left == len(trainer.saved_checkpoints)
    assert ("latest-rank0.pt" in names(tmp_path)) == (keep != 0)
    assert files == sorted(os.path.basename(path) for path in trainer.saved_checkpoints)


def test_the_best_by_a_metric_are_kept(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    values = [0.2, 0.9, 0.5, 0.7, 0.1, 0.3]

    class Scripted(Callback):
        def eval_end(self, state: State, logger: Logger) -> None:
            metric = state.eval_metrics["eval"]["Accuracy"]
            metric.reset()
            value = values[state.timestamp.epoch.value - 1]
            targets = torch.arange(10) < 10 * value
            metric.update(torch.nn.functional.one_hot(torch.zeros(10).long(), 2).float(), (~targets).long())

    trainer = make_trainer(
        eval_dataloader=make_trainer.loader(),
        callbacks=Scripted(),
        max_duration="6ep",
        save_folder=tmp_path,
        save_num_checkpoints_to_keep=1,
        save_num_best_checkpoints_to_keep=2,
        save_monitor="eval/Accuracy",
    )
    trainer.fit()

    assert names(tmp_path) == [
        "best-rank0.pt",
        "ep2-ba8-rank0.pt",
        "ep4-ba16-rank0.pt",
        "ep6-ba24-rank0.pt",
        "latest-rank0.pt",
    ]
    assert os.readlink(tmp_path / "best-rank0.pt") == "ep2-ba8-rank0.pt"


def test_the_best_are_known_after_resuming(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    def trainer(*callbacks: Callback) -> Any:
        return make_trainer(
            callbacks=callbacks,
            max_duration="4ep",
            save_folder=tmp_path,
            save_num_checkpoints_to_keep=1,
            save_num_best_checkpoints_to_keep=2,
            save_monitor="loss/train/total",
            save_monitor_mode="min",
            autoresume=True,
            run_name="best",
        )

    with pytest.raises(InterruptedError):
        trainer(StopAt(9)).fit()
    resumed = trainer()
    assert len(resumed._checkpoint_saver.best.values) == 2
    resumed.fit()

    best = resumed._checkpoint_saver.best
    assert len(best.values) == 2
    assert set(best.paths) <= set(resumed.saved_checkpoints)
    assert all(os.path.isfile(path) for path in best.paths)


def test_a_checkpoint_has_the_known_layout(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(save_folder=tmp_path, schedulers=LinearScheduler(), save_metrics=True)
    trainer.fit()
    saved = torch.load(tmp_path / "latest-rank0.pt", weights_only=False)

    assert saved.keys() == {"state", "rng", "resumption", "has_checksum"}
    state = saved["state"]
    assert state["timestamp"]["Timestamp"]["batch"] == 8
    assert set(state["optimizers"]["SGD"]["state"]) == {name for name, _ in trainer.state.model.named_parameters()}
    assert "LambdaLR" in state["schedulers"]
    assert state["callbacks"]["CheckpointSaver"]["all_saved_checkpoints_to_timestamp"][-1][1]["batch"] == 8
    assert "Accuracy" in state["train_metrics"]
    assert set(saved["rng"][0]) >= {"python", "numpy", "torch"}


def test_weights_alone_are_saved_and_loaded(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(save_folder=tmp_path, save_weights_only=True)
    trainer.fit()
    path = tmp_path / "latest-rank0.pt"
    assert torch.load(path, weights_only=False).keys() == {"state", "has_checksum"}
    assert torch.load(path, weights_only=False)["state"].keys() == {"model", "integrations", "metadata"}

    other = make_trainer(load_path=path, load_weights_only=True)
    deep_compare(weights(other), weights(trainer))
    assert other.state.timestamp.batch == 0
    with pytest.raises(ValueError, match="holds no `state/timestamp`, like a file of weights"):
        make_trainer(load_path=path)


def test_what_is_to_be_ignored_is_not_saved(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(save_folder=tmp_path, save_ignore_keys=["state/optimizers", "rng"]).fit()
    saved = torch.load(tmp_path / "latest-rank0.pt", weights_only=False)

    assert "rng" not in saved
    assert "optimizers" not in saved["state"]


def test_a_run_can_be_saved_at_any_time(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.fit(duration="1ep")
    path = trainer.save_checkpoint(str(tmp_path / "{run_name}-ep{epoch}.pt"))
    assert path == str(tmp_path / f"{trainer.state.run_name}-ep1.pt")
    loaded = make_trainer(load_path=path)
    deep_compare(weights(loaded), weights(trainer))
    assert loaded.state.timestamp.batch == 4
    with pytest.raises(ValueError, match="you must pass a save_folder"):
        trainer.save_checkpoint_to_save_folder()
    saving = make_trainer(save_folder=tmp_path / "folder")
    saving.save_checkpoint_to_save_folder()
    assert names(tmp_path / "folder") == ["ep0-ba0-rank0.pt", "latest-rank0.pt"]
    assert saving.saved_checkpoints == [str(tmp_path / "folder" / "ep0-ba0-rank0.pt")]


def test_in_the_background_the_same_files_are_written(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    for name, background in (("now", False), ("later", True)):
        trainer = make_trainer(save_folder=tmp_path / name, save_interval="1ba", save_async=background, run_name="run")
        trainer.fit()
        trainer.close()

    assert names(tmp_path / "now") == names(tmp_path / "later")
    for name in names(tmp_path / "now"):
        first, second = (torch.load(tmp_path / folder / name, weights_only=False) for folder in ("now", "later"))
        for saved in (first, second):
            saved["state"].pop("callbacks")
            saved["state"].pop("timestamp")
            saved.pop("resumption")
        deep_compare(first, second)


def test_files_of_another_run_stop_a_new_one(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    make_trainer(save_folder=tmp_path).fit()
    with pytest.raises(FileExistsError, match=r"save_overwrite=True") as caught:
        make_trainer(save_folder=tmp_path).fit()
    assert "autoresume=True" in str(caught.value)
    make_trainer(save_folder=tmp_path, save_overwrite=True).fit()


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Color.RED, "`.*Color`. Loading it could run code"),
        (lambda: 1, "`builtins.function` that cannot be loaded again: "),
    ],
)
def test_a_state_that_will_not_load_is_refused_at_the_first_save(
    make_trainer: MakeTrainer, tmp_path: Path, value: Any, reason: str
) -> None:
    class Odd(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"value": [value]}

    trainer = make_trainer(save_folder=tmp_path, callbacks=Odd(), save_interval="2ba")
    with pytest.raises(TypeError, match=f"at 'state/callbacks/.*Odd/value/0', got a {reason}"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 2
    assert not any(tmp_path.glob("*.pt"))
    with pytest.raises(TypeError, match="Odd/value/0"):
        trainer.save_checkpoint(str(tmp_path / "a.pt"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"save_num_checkpoints_to_keep": -2}, "save|num_checkpoints_to_keep"),
        ({"save_num_best_checkpoints_to_keep": 2}, "must be given together"),
        ({"save_monitor": "eval/Accuracy"}, "must be given together"),
        ({"save_num_best_checkpoints_to_keep": -1, "save_monitor": "a/b"}, "must be a number of checkpoints"),
        ({"save_num_best_checkpoints_to_keep": 1, "save_monitor": "Accuracy"}, "for example 'eval/Accuracy'"),
        (
            {"save_num_best_checkpoints_to_keep": 1, "save_monitor": "a/b", "save_monitor_mode": "best"},
            "'max' or 'min'",
        ),
        ({"save_filename": "a.tar.zip"}, "valid tarfile extension"),
    ],
)
def test_bad_arguments_of_saving_are_refused(
    make_trainer: MakeTrainer, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(save_folder=tmp_path, **arguments)


def test_an_unknown_metric_is_refused_before_training(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    trainer = make_trainer(save_folder=tmp_path, save_num_best_checkpoints_to_keep=1, save_monitor="eval/Accuracy")
    with pytest.raises(ValueError, match="It has: train/Accuracy"):
        trainer.fit()


def test_a_saver_of_ones_own_is_used(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path / "{run_name}", save_interval=lambda state, event: event is Event.EPOCH_CHECKPOINT)
    trainer = make_trainer(callbacks=[saver, Callback()], run_name="mine")
    trainer.fit()

    assert names(tmp_path / "mine") == ["ep1-ba4-rank0.pt", "ep2-ba8-rank0.pt", "latest-rank0.pt"]
    assert trainer.saved_checkpoints == saver.saved_checkpoints
