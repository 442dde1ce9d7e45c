"""Runs that save to, and resume from, a store elsewhere: a real server of S3 on loopback, a folder, memory."""

from __future__ import annotations

import logging
import secrets
import tempfile
from pathlib import Path
from typing import Any

import pytest

from composer.callbacks import CheckpointSaver
from composer.checkpoint.durable import UNDELIVERED
from composer.checkpoint.storage import Storage, StorageError, storage_of
from composer.core import Callback, State
from composer.loggers import Logger, LoggerDestination
from composer.testing import deep_compare

MakeTrainer = Any  # the fixture's class, in conftest.py


class CrashAt(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.batch:
            raise InterruptedError("crashed")


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URI of an empty folder of a store."""
    kind = getattr(request, "param", "memory")
    if kind == "s3":
        bucket: str = request.getfixturevalue("s3")
        return f"{bucket}/runs"
    return f"file://{tmp_path}/remote" if kind == "file" else f"memory://{secrets.token_hex(4)}/runs"


def trainer_of(make_trainer: MakeTrainer, folder: str, *callbacks: Callback, **kwargs: Any) -> Any:
    return make_trainer(
        train_dataloader=make_trainer.loader(shuffle=True),
        callbacks=callbacks,
        save_folder=folder,
        **{"save_interval": "2ba", "run_name": "run", "autoresume": True, **kwargs},
    )


@pytest.mark.parametrize("store", ["s3", "file", "memory"], indirect=True)
def test_a_run_goes_on_from_a_store(make_trainer: MakeTrainer, store: str, tmp_path: Path) -> None:
    whole = trainer_of(make_trainer, str(tmp_path / "whole"))
    whole.fit()
    crashed = trainer_of(make_trainer, f"{store}/{{run_name}}", CrashAt(5), save_async=True)
    with pytest.raises(InterruptedError):
        crashed.fit()
    crashed.close()
    there = storage_of(f"{store}/run")
    names = ["ep0-ba2-rank0.pt", "ep0-ba4-rank0.pt", "latest-rank0.pt.symlink"]
    assert there.find() == names
    assert (
        there.read_text(names[-1])
        == f"{storage_of(store)._folder.partition('://')[2].partition('/')[2]}/run/{names[1]}"
    )
    resumed = trainer_of(make_trainer, f"{store}/{{run_name}}")
    assert resumed.state.timestamp.batch == 4
    resumed.fit()
    resumed.close()

    deep_compare(resumed.state.model.state_dict(), whole.state.model.state_dict())
    assert there.find()[:4] == [*names[:2], "ep1-ba6-rank0.pt", "ep1-ba8-rank0.pt"]
    complete = trainer_of(make_trainer, f"{store}/{{run_name}}")
    complete.fit()
    assert complete.state.timestamp.epoch == 2


def test_what_was_downloaded_goes_when_it_is_loaded(
    make_trainer: MakeTrainer, store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = trainer_of(make_trainer, store)
    first.fit()
    (staging,) = tmp_path.glob("composer-scratch-*")
    assert not (staging / UNDELIVERED).exists()
    first.close()
    second = trainer_of(make_trainer, store)

    assert second.state.timestamp.batch == 8
    left = {path for path in tmp_path.glob("composer-*") if path.suffix != ".lock"}  # which `second` holds
    assert {staging} == {path for path in left if "saving" not in path.name or path == staging}


def test_what_is_not_uploaded_yet_stays_if_the_process_is_killed(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    upload = Storage.upload

    def look(*args: Any, **kwargs: Any) -> Any:
        found.append(marker.exists())
        return upload(*args, **kwargs)

    monkeypatch.setattr(Storage, "upload", look)  # before the uploader binds it
    trainer = trainer_of(make_trainer, f"memory://{secrets.token_hex(4)}", save_interval="1ba")
    marker = Path(trainer._checkpoint_saver._scratch_folder()) / UNDELIVERED
    trainer.fit()

    assert len(found) >= 8
    assert all(found)
    assert not marker.exists()


def test_nothing_is_kept_here_if_so_wanted(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    folder = f"file://{tmp_path}/remote"
    trainer = trainer_of(make_trainer, folder, save_num_checkpoints_to_keep=0)
    trainer.fit()
    assert [path for path in Path(trainer._checkpoint_saver.folder).iterdir() if path.suffix == ".pt"] == []
    trainer.close()
    relaunched = trainer_of(make_trainer, folder, save_num_checkpoints_to_keep=0)
    relaunched.fit()

    assert relaunched.state.timestamp.epoch == 2


def test_a_checkpoint_is_loaded_from_a_store(make_trainer: MakeTrainer, store: str) -> None:
    saving = trainer_of(make_trainer, store, autoresume=False)
    saving.fit()
    saving.close()
    for name in ("ep0-ba4-rank0.pt", "latest-rank0.pt", "latest-rank0.pt.symlink"):
        loaded = make_trainer(load_path=f"{store}/{name}", load_progress_bar=False)
        assert loaded.state.timestamp.batch == (4 if name.startswith("ep") else 8)
    with pytest.raises(FileNotFoundError):
        make_trainer(load_path=f"{store}/missing.pt", load_progress_bar=False)


def test_a_damaged_file_in_a_store_is_passed_over(make_trainer: MakeTrainer, store: str, tmp_path: Path) -> None:
    saving = trainer_of(make_trainer, store, CrashAt(6))
    with pytest.raises(InterruptedError):
        saving.fit()
    saving.close()
    there = storage_of(store)
    there.download("ep1-ba6-rank0.pt", tmp_path / "file")
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-5000])
    there.upload(tmp_path / "file", "ep1-ba6-rank0.pt")

    with pytest.warns(UserWarning, match=r"ep1-ba6-rank0\.pt' is damaged"):
        resumed = trainer_of(make_trainer, store)
    assert resumed.state.timestamp.batch == 4


def test_a_saver_of_ones_own_with_a_store_is_resumed_from(make_trainer: MakeTrainer, store: str) -> None:
    def trainer(*callbacks: Callback) -> Any:
        path = store.partition("://")[2].partition("/")[2]
        saver = CheckpointSaver(
            folder=store,
            remote_file_name=f"{path}/{{run_name}}/ba{{batch}}.pt",
            latest_remote_file_name=f"{path}/{{run_name}}/latest",
            filename="ba{batch}.pt",
            save_interval="2ba",
        )
        return make_trainer(callbacks=[*callbacks, saver], run_name="mine", autoresume=True)

    crashed = trainer(CrashAt(5))
    with pytest.raises(InterruptedError):
        crashed.fit()
    crashed.close()

    assert trainer().state.timestamp.batch == 4


@pytest.mark.parametrize("filename", ["ep{epoch}-ba{batch}.pt", "in/ba{batch}.pt", "last.pt"])
def test_existing_files_in_a_store_are_reported_before_the_run_trains(
    make_trainer: MakeTrainer, store: str, filename: str
) -> None:
    arguments = {"autoresume": False, "max_duration": "2ba", "save_filename": filename}
    first, second = (trainer_of(make_trainer, store, **arguments) for _ in range(2))
    first.fit()
    first.fit(duration="2ba")  # its own files are not in the way
    with pytest.raises(FileExistsError, match=r"`.*://.*\.pt` .*`autoresume=True`.*`save_overwrite=True`"):
        second.fit()
    assert 0 == second.state.timestamp.batch
    again = trainer_of(make_trainer, store, **arguments, save_overwrite=True)
    again.fit()
    again.close()


def test_a_bucket_that_is_not_there_stops_a_run_before_it_trains(make_trainer: MakeTrainer, s3: str) -> None:
    with pytest.raises((FileNotFoundError, StorageError), match="missing"):
        trainer_of(make_trainer, "s3://missing-bucket/run")


def test_a_lost_store_is_a_clear_error_and_nothing_is_lost(
    make_trainer: MakeTrainer, stoppable_s3: tuple[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    bucket, server = stoppable_s3

    class StopServer(Callback):
        def batch_start(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch.value == 6:
                saver.flush()
                server.go_away()

    trainer = trainer_of(make_trainer, f"{bucket}/run", StopServer(), autoresume=False, delivery_timeout=5.0)
    saver = trainer._checkpoint_saver
    with caplog.at_level(logging.ERROR), pytest.raises(TimeoutError, match=r"s3://.*ep1-ba8-rank0\.pt"):
        trainer.fit()

    assert "The local files are kept in" in caplog.text
    kept = sorted(path.name for path in Path(saver.folder).iterdir())
    assert "ep1-ba8-rank0.pt" in kept
    loaded = make_trainer(load_path=Path(saver.folder) / "ep1-ba8-rank0.pt")
    assert loaded.state.timestamp.batch == 8


class Shelf(LoggerDestination):
    """A logger that keeps files, as those of tracking services do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool = False) -> None:
        target = self.folder / remote_file_name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(file_path).read_bytes())

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        source = self.folder / remote_file_name
        if not source.exists():
            raise FileNotFoundError(remote_file_name)
        Path(destination).write_bytes(source.read_bytes())


def test_loggers_that_keep_files_are_used(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "shelf")
    with pytest.raises(InterruptedError):
        trainer_of(make_trainer, str(tmp_path / "here"), CrashAt(5), loggers=shelf).fit()
    make_trainer.made[-1].close()
    kept = tmp_path / "shelf" / "run" / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == [
        "ep0-ba2-rank0.pt",
        "ep0-ba4-rank0.pt",
        "latest-rank0.pt.symlink",
    ]
    elsewhere = trainer_of(make_trainer, str(tmp_path / "there"), loggers=shelf)
    assert elsewhere.state.timestamp.batch == 4
    elsewhere.close()
    loaded = make_trainer(load_path="run/checkpoints/ep0-ba2-rank0.pt", load_object_store=shelf)
    assert loaded.state.timestamp.batch == 2
