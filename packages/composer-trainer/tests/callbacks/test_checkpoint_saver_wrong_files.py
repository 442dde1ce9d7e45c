"""Names, folders and files that cannot work: each is answered at construction, by the name of the argument."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeTrainer

from composer.callbacks import CheckpointSaver
from composer.core import State, Time
from composer.testing import SimpleModel

PATTERNS = ["x{nope}.pt", "{}.pt", "{0}.pt", "x{epoch:s}.pt", "x{epoch", "x}.pt", "{rank.nope}"]
NO_FILES = ["../x.pt", "a/../../x.pt", "/x.pt", "", "a/", "."]
INTERVALS = ["0ba", "-1ep", 0, "0.0dur", "0ep", -1, Time(0, "ba")]


@pytest.mark.parametrize("name", [*PATTERNS, *NO_FILES])
@pytest.mark.parametrize("argument", ["filename", "latest_filename"])
def test_a_name_that_cannot_be_filled_in_or_leads_elsewhere_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, argument: str, name: str
) -> None:
    with pytest.raises(ValueError, match=f"`save_{argument}` must"):
        make_trainer(save_folder=tmp_path, **{f"save_{argument}": name})
    with pytest.raises(ValueError, match=f"`{argument}` must"):
        CheckpointSaver(tmp_path, **{argument: name})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("argument", ["remote_file_name", "latest_remote_file_name"])
def test_a_remote_name_that_cannot_be_filled_in_is_refused(tmp_path: Path, argument: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"`{argument}` must"):
        CheckpointSaver(tmp_path, **{argument: name})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*PATTERNS, "{epoch}", "s3://bucket/{nope}"])
def test_a_folder_that_cannot_be_filled_in_is_refused(make_trainer: MakeTrainer, name: str) -> None:
    with pytest.raises(ValueError, match="`save_folder` must"):
        make_trainer(save_folder=name)
    with pytest.raises(ValueError, match="`folder` must"):
        CheckpointSaver(name)


@pytest.mark.parametrize(
    "name", ["ep{epoch:03d}-ba{batch}.pt", "{run_name}/{total_wct:.1f}-{world_size}.pt", "ba{batch:0{rank}d}", "a.tar"]
)
def test_names_of_known_fields_are_taken(tmp_path: Path, name: str) -> None:
    assert CheckpointSaver(tmp_path, name).filename.filename == name


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        ({"save_filename": "latest-rank{rank}.pt"}, "latest-rank0.pt"),
        ({"save_filename": "latest-rank0.pt"}, "latest-rank0.pt"),
        ({"save_filename": "{run_name}", "save_latest_filename": "r"}, "r"),
        ({"save_latest_filename": "ep1-ba4-rank0.pt"}, "ep1-ba4-rank0.pt"),
        ({"save_filename": "a/b{batch}.pt", "save_latest_filename": "./a//b7.pt"}, "b7.pt"),
    ],
)
def test_a_link_that_would_replace_a_checkpoint_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, names: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ValueError, match=f"(The link '{wrong}' must not have the name of a checkpoint|must differ)"):
        make_trainer(save_folder=tmp_path, run_name="r", **names)


@pytest.mark.parametrize(
    ("filename", "latest"), [("{total_wct}.pt", "latest.pt"), ("{run_name}-{batch}.pt", "{run_name}-latest.pt")]
)
def test_a_link_of_another_name_is_taken(make_trainer: MakeTrainer, tmp_path: Path, filename: str, latest: str) -> None:
    make_trainer(save_folder=tmp_path, run_name="r", save_filename=filename, save_latest_filename=latest).close()


def test_a_monitored_metric_that_an_evaluator_does_not_have_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"`monitor` must be a metric of this run, got 'eval/Nope'. It has: eval/"):
        make_trainer(
            save_folder=tmp_path,
            save_num_best_checkpoints_to_keep=1,
            save_monitor="eval/Nope",
            eval_dataloader=make_trainer.loader(),
        )


@pytest.mark.parametrize("run_name", ["../x", "a/../../x", "/x"])
def test_a_run_name_that_leads_elsewhere_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="`run_name` must not"):
        make_trainer(run_name=run_name, save_folder=str(tmp_path / "{run_name}"))
    state = State(model=SimpleModel(), run_name=run_name)  # a name that did not come through the Trainer
    with pytest.raises(ValueError, match="`run_name` must not"):
        CheckpointSaver(tmp_path).reserve(state)


@pytest.mark.parametrize("interval", INTERVALS)
def test_an_interval_that_never_saves_is_refused(make_trainer: MakeTrainer, tmp_path: Path, interval: Any) -> None:
    with pytest.raises(ValueError, match="`save_interval` must be positive"):
        make_trainer(save_folder=tmp_path, save_interval=interval)
    with pytest.raises(ValueError, match="`save_interval` must be positive"):
        CheckpointSaver(tmp_path, save_interval=interval)


def test_a_link_does_not_take_the_place_of_the_checkpoint(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"The link 'a\.pt' must not have the name of a checkpoint"):
        make_trainer(save_folder=tmp_path, save_filename="a.pt", save_latest_filename="a.pt")


@pytest.mark.parametrize("inside", ["", "sub", "sub/sub"])
def test_a_folder_that_is_a_file_or_inside_of_one_is_refused(
    make_trainer: MakeTrainer, tmp_path: Path, inside: str
) -> None:
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "file" / inside
    for arguments in ({"save_folder": folder}, {"callbacks": CheckpointSaver(folder)}):
        with pytest.raises(ValueError, match=r"`save_folder` must be a folder, got .*/file.* is a file"):
            make_trainer(**arguments)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_made_is_told(make_trainer: MakeTrainer) -> None:
    with pytest.raises(OSError, match=r"`save_folder` must be a folder that this process can write to, got '/proc/x'"):
        make_trainer(save_folder="/proc/x")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_told(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(OSError, match=f"`save_folder` must be .* this process can write to.*{os.strerror(number)}"):
        make_trainer(save_folder=tmp_path)


def test_a_full_disk_does_not_keep_a_run_from_starting(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert make_trainer(save_folder=tmp_path).saved_checkpoints == []


def test_a_path_without_a_checkpoint_is_told(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("gone")
    for name in ["absent", "link", "x{nope}.pt", "{}.pt"]:
        with pytest.raises(FileNotFoundError, match=f"There is no checkpoint .*/{re.escape(name)}'.* a new run starts"):
            make_trainer(load_path=tmp_path / name)


def test_a_folder_without_a_checkpoint_is_told(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    (tmp_path / "ep1.pt").touch()
    with pytest.raises(RuntimeError, match=r"is damaged: it is a folder that lacks 'composer_states.pt'"):
        make_trainer(load_path=tmp_path)
