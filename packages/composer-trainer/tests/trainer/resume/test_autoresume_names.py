"""Tests of `autoresume` with checkpoints under other names and with other files in the folder."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MakeTrainer

from composer.checkpoint import read_checkpoint
from composer.loggers import LoggerDestination
from composer.testing import SimpleModel


def launch(make_trainer: MakeTrainer, folder: Path | str, filename: str, duration: str = "2ba", **kwargs: Any) -> Any:
    arguments = {"save_folder": folder, "run_name": "run", "autoresume": True, "save_interval": "1ba", **kwargs}
    return make_trainer(save_filename=filename, max_duration=duration, **arguments)


@pytest.mark.parametrize(
    ("before", "now"),
    [("ep{epoch}-ba{batch}.tar.gz", "ep{epoch}-ba{batch}.pt"), ("x{batch}.pt", "in/ba{batch}.pt")],
)  # fmt: skip
def test_checkpoints_with_another_name_are_found(
    make_trainer: MakeTrainer, tmp_path: Path, before: str, now: str
) -> None:
    first = launch(make_trainer, tmp_path, before)
    first.fit()
    first.close()
    (tmp_path / "notes.txt").write_text("no checkpoint")
    second = launch(make_trainer, tmp_path, now, "4ba")
    assert second.state.timestamp.batch == 2
    second.fit()
    second.close()

    assert launch(make_trainer, tmp_path, before, "4ba").state.timestamp.batch == 4  # the newest of both names


@pytest.mark.parametrize(
    ("where", "filename"),
    [("local", "ba{batch}.pt"), ("memory", "in/ba{batch}.pt"), ("memory", "w{world_size}-ba{batch}.pt")],
)
def test_a_checkpoint_in_a_subfolder_is_not_taken(
    make_trainer: MakeTrainer, tmp_path: Path, where: str, filename: str
) -> None:
    folder = f"{tmp_path if where == 'local' else f'memory://{secrets.token_hex(4)}'}/root"
    for subfolder in ("other", "w1"):  # of runs that have the same name
        other = launch(make_trainer, f"{folder}/{subfolder}", filename)
        other.fit()
        other.close()

    first = launch(make_trainer, folder, filename, "1ba")
    assert 0 == first.state.timestamp.batch
    first.fit()
    first.close()
    assert 1 == launch(make_trainer, folder, filename, load_progress_bar=False).state.timestamp.batch


@pytest.mark.parametrize("remote", [False, True])
def test_a_resumed_run_names_its_checkpoint_not_a_copy(
    make_trainer: MakeTrainer, tmp_path: Path, remote: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = f"memory://{secrets.token_hex(4)}" if remote else str(tmp_path)
    first = launch(make_trainer, folder, "ba{batch}.pt")
    first.fit()
    first.close()
    with caplog.at_level("INFO", "composer.trainer"):
        resumed = launch(make_trainer, folder, "ba{batch}.pt", load_progress_bar=False)

    assert f"{folder}/ba2.pt" == resumed.state.load_path
    assert f"The run, at epoch 0 and batch 2, loaded from {folder}/ba2.pt." in caplog.messages


REFUSAL = "must not hold a newer checkpoint of another run under a name that the run '{}' uses, .*{}', saved by the run"


@pytest.mark.parametrize("remote", [False, True])
def test_a_file_of_another_run_under_ones_own_names_is_neither_taken_nor_replaced(
    make_trainer: MakeTrainer, tmp_path: Path, remote: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = f"memory://{secrets.token_hex(4)}" if remote else tmp_path

    def begin(run_name: str, **kwargs: Any) -> Any:
        return launch(
            make_trainer, folder, "ba{batch}.pt", run_name=run_name, save_latest_filename=f"latest-{run_name}", **kwargs
        )

    first = begin("run")
    first.fit()
    first.close()
    with pytest.raises(FileExistsError, match=REFUSAL.format("other", "ba2.pt")):
        begin("other")
    other = begin("other", duration="4ba", save_overwrite=True)
    assert 0 == other.state.timestamp.batch
    other.fit()
    other.close()

    with pytest.raises(FileExistsError, match=REFUSAL.format("run", "ba4.pt")):
        begin("run")
    assert 4 == begin("other", duration="4ba").state.timestamp.batch
    assert 0 == begin("run", save_overwrite=True).state.timestamp.batch
    assert "ba4.pt was saved by the run 'other', so 'run' does not resume from it" in caplog.text


@pytest.mark.parametrize("autoresume", [True, False])
def test_a_file_without_counts_in_its_name_is_not_taken_from_another_run(
    make_trainer: MakeTrainer, tmp_path: Path, autoresume: bool
) -> None:
    for _ in range(2):
        own = launch(make_trainer, tmp_path, "last.pt", autoresume=autoresume)
        own.fit()
        own.close()
    content = (tmp_path / "last.pt").read_bytes()
    with pytest.raises(FileExistsError, match=REFUSAL.format("other", "last.pt")):
        launch(make_trainer, tmp_path, "last.pt", run_name="other", autoresume=autoresume).fit()

    assert content == (tmp_path / "last.pt").read_bytes()
    launch(make_trainer, tmp_path, "last.pt", run_name="other", autoresume=autoresume, save_overwrite=True)


def test_a_remote_file_without_counts_in_its_name_is_replaced_by_its_own_run(make_trainer: MakeTrainer) -> None:
    folder = f"memory://{secrets.token_hex(4)}"
    first = launch(make_trainer, folder, "last.pt")
    first.fit()
    first.close()

    assert 2 == launch(make_trainer, folder, "last.pt").state.timestamp.batch


def test_a_shortened_file_under_another_name_is_reported(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    first = launch(make_trainer, tmp_path, "x{batch}.pt")
    first.fit()
    first.close()
    for path in tmp_path.glob("x*.pt"):
        path.write_bytes(path.read_bytes()[:-2000])

    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(RuntimeError, match="none can be loaded"):
        launch(make_trainer, tmp_path, "ep{epoch}.pt")


def test_other_runs_files_are_left_alone(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    other = launch(make_trainer, tmp_path, "x{batch}.pt", run_name="other")
    other.fit()
    other.close()

    assert launch(make_trainer, tmp_path, "ep{epoch}.pt", save_latest_filename="own").state.timestamp.batch == 0


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    first = launch(make_trainer, tmp_path, "ba{batch}.pt")
    first.fit()
    first.close()
    (tmp_path / "ba1.pt").write_bytes(b"")
    (tmp_path / "ba2.pt").unlink()
    (tmp_path / "ba2.pt").symlink_to("ba2.pt")  # leads to itself

    with pytest.warns(UserWarning, match="is damaged"), pytest.raises(RuntimeError) as caught:
        launch(make_trainer, tmp_path, "ba{batch}.pt")
    assert all(text in str(caught.value) for text in ("ba1.pt", "it is empty", "ba2.pt", "autoresume=False"))


def weights(path: Path) -> None:
    torch.save({"state": {"model": {"w": torch.zeros(2)}}}, path)


def module(path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), path)


@pytest.mark.parametrize(
    ("put", "name"), [(weights, "ba9.pt"), (module, "ba2.pt"), (os.mkdir, "ba2.pt"), (weights, "another.pt")]
)
def test_what_is_no_checkpoint_of_a_run_is_passed_over(
    make_trainer: MakeTrainer, tmp_path: Path, put: Callable[[Path], None], name: str
) -> None:
    first = launch(make_trainer, tmp_path, "ba{batch}.pt")
    first.fit()
    first.close()
    (tmp_path / name).unlink(missing_ok=True)
    put(tmp_path / name)

    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*ba[29].pt' is not a checkpoint that a run can resume from: it holds only weights"
        )
        second = launch(make_trainer, tmp_path, "ba{batch}.pt", "3ba")
    assert second.state.timestamp.batch == (1 if name == "ba2.pt" else 2)


@pytest.mark.parametrize("autoresume", [False, True])
def test_the_users_own_weights_are_not_replaced(make_trainer: MakeTrainer, tmp_path: Path, autoresume: bool) -> None:
    file = tmp_path / "model.pt"
    torch.save(SimpleModel().state_dict(), file, pickle_protocol=2)
    content = file.read_bytes()

    with pytest.raises(FileExistsError) as caught:
        launch(make_trainer, tmp_path, "model.pt", autoresume=autoresume).fit()
    assert str(caught.value).startswith(
        f"`save_folder` must not hold other files under a name that the run 'run' uses, got {str(file)!r}, which is "
        f"not a checkpoint that a run can resume from: it holds only weights, or another program's data. The run would "
        f"replace it. Use another `save_filename` or `save_folder`, or pass `save_overwrite=True` if it may be "
        f"replaced."
    )
    assert content == file.read_bytes()
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", ".*model.pt' is not a checkpoint that a run can resume from.*It may be replaced"
        )
        launch(make_trainer, tmp_path, "model.pt", autoresume=autoresume, save_overwrite=True).fit()
    assert "timestamp" in read_checkpoint(file)["state"]


def test_weights_that_a_run_saved_may_be_replaced_by_it(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    for _ in range(2):
        trainer = launch(make_trainer, tmp_path, "model.pt", autoresume=False, save_weights_only=True)
        trainer.fit()
        trainer.close()

    assert {"model", "metadata", "integrations"} == set(read_checkpoint(tmp_path / "model.pt")["state"])


def test_a_folder_with_the_name_of_a_checkpoint_is_named(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "ba1.pt").mkdir()
    trainer = launch(make_trainer, tmp_path, "ba{batch}.pt")

    with pytest.raises(IsADirectoryError, match=r"Could not save '.*ba1.pt': there is a folder of that name"):
        trainer.fit()


@pytest.mark.parametrize("keeps_files", [False, True])
def test_a_logger_that_is_down_stops_a_launch_only_if_it_keeps_files(
    make_trainer: MakeTrainer, tmp_path: Path, keeps_files: bool
) -> None:
    class Down(LoggerDestination):
        def can_upload_files(self) -> bool:
            return keeps_files

        def download_file(self, *args: Any, **kwargs: Any) -> None:
            raise TimeoutError("no reply")

    if keeps_files:
        with pytest.raises(TimeoutError, match="no reply"):
            launch(make_trainer, tmp_path, "ba{batch}.pt", loggers=Down())
    else:
        assert 0 == launch(make_trainer, tmp_path, "ba{batch}.pt", loggers=Down()).state.timestamp.batch
