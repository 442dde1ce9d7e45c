"""Runs of the Trainer that save to object stores, and what the Trainer does with uploaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from store_servers import FolderStore
from torch.utils.data import DataLoader, TensorDataset

from composer.callbacks import CheckpointSaver
from composer.checkpoint.storage import storage_of
from composer.core import Callback, State
from composer.loggers import Logger, LoggerDestination, RemoteUploaderDownloader
from composer.trainer import Trainer
from composer.utils import file_helpers


class CrashAt(Callback):
    """Ends a run before the third batch."""

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == 2:
            raise InterruptedError("crashed")


def make_trainer(*callbacks: Callback, **arguments: Any) -> Trainer:
    torch.manual_seed(1)
    model = torch.nn.Linear(2, 1)
    data = TensorDataset(torch.arange(8.0).reshape(4, 2), torch.ones(4, 1))
    return Trainer(
        model=model,
        loss=torch.nn.functional.mse_loss,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        train_dataloader=DataLoader(data, batch_size=1),
        max_duration="1ep",
        seed=1,
        run_name="my-run",
        progress_bar=False,
        callbacks=callbacks,
        **arguments,
    )


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty folder in an object store."""
    if request.param == "unity catalog":
        request.getfixturevalue("databricks")
        return "dbfs:/Volumes/catalog/schema/volume/runs/{run_name}"
    if request.param == "mlflow":
        request.getfixturevalue("mlflow")
        return "dbfs:/databricks/mlflow-tracking/{mlflow_experiment_id}/{mlflow_run_id}/artifacts/{run_name}"
    factories = file_helpers.BACKEND_TO_OBJECT_STORE_FACTORY
    monkeypatch.setitem(factories, "mine", lambda bucket, path: FolderStore(tmp_path / bucket))
    (tmp_path / "there").mkdir()
    return "mine://there/runs/{run_name}"


@pytest.mark.parametrize("folder", ["unity catalog", "mlflow", "a user's"], indirect=True)
def test_a_run_saves_to_a_store_and_goes_on_from_it(folder: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"save_interval": "1ba", "autoresume": True}
    crashed = make_trainer(CrashAt(), save_folder=folder, **options)
    saver = next(each for each in crashed.state.callbacks if isinstance(each, CheckpointSaver))
    assert saver._uri is not None
    there = saver._uri.replace("{run_name}", "my-run")
    assert "{" not in there
    with pytest.raises(InterruptedError):
        crashed.fit()
    crashed.close()
    names = ["ep0-ba1-rank0.pt", "ep0-ba2-rank0.pt", "latest-rank0.pt.symlink"]
    assert [name for name in storage_of(there).find() if not name.startswith(".")] == names
    again = make_trainer(save_folder=there, **options)
    assert again.state.timestamp.batch == 2
    again.fit()
    again.close()
    whole = make_trainer()
    whole.fit()
    assert torch.equal(again.state.model.module.weight, whole.state.model.module.weight)
    loaded = make_trainer(load_path=f"{there}/latest-rank0.pt")
    assert loaded.state.timestamp.batch == 4


def test_a_store_is_given_to_load_from(tmp_path: Path) -> None:
    trainer = make_trainer(save_folder=str(tmp_path / "there" / "run"))
    trainer.fit()
    trainer.close()
    store = FolderStore(tmp_path / "there", failures=1)
    loaded = make_trainer(load_path="run/ep1-ba4-rank0.pt", load_object_store=store)
    assert loaded.state.timestamp.batch == 4


class NamesRun(LoggerDestination):
    """A logger that has started a run of MLflow."""

    mlflow_ids = {"mlflow_experiment_id": "7", "mlflow_run_id": "8"}  # noqa: RUF012


def test_identifiers_come_from_the_logger_of_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(file_helpers, "MLFlowObjectStore", lambda path: FolderStore(tmp_path / "there"))
    folder = "dbfs:/databricks/mlflow-tracking/{mlflow_experiment_id}/{mlflow_run_id}/artifacts/x"
    trainer = make_trainer(save_folder=folder, loggers=NamesRun())
    trainer.fit()
    trainer.close()
    saved = tmp_path / "there" / "databricks" / "mlflow-tracking" / "7" / "8" / "artifacts" / "x"
    assert (saved / "ep1-ba4-rank0.pt").exists()


def test_a_run_uploads_through_its_logger(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    kwargs = {"provider": "local", "provider_kwargs": {"key": str(tmp_path)}}
    uploader = RemoteUploaderDownloader("libcloud://bucket", kwargs, use_procs=False)
    trainer = make_trainer(save_folder=str(tmp_path / "local"), loggers=uploader, autoresume=True)
    trainer.fit()
    trainer.close()
    names = {str(path.relative_to(tmp_path / "bucket")) for path in (tmp_path / "bucket").rglob("*") if path.is_file()}
    assert {"my-run/checkpoints/ep1-ba4-rank0.pt", "my-run/checkpoints/latest-rank0.pt.symlink"} <= names


def test_uploaders_that_could_lose_the_latest_checkpoint_are_refused(tmp_path: Path) -> None:
    renaming = RemoteUploaderDownloader("s3://bucket", file_path_format_string="{rank}/{remote_file_name}")
    with pytest.raises(ValueError, match="Specifying a `file_path_format_string` to a `RemoteUploaderDownloader` is"):
        make_trainer(loggers=renaming, save_folder=str(tmp_path))
    several = RemoteUploaderDownloader("s3://bucket", num_concurrent_uploads=2)
    with pytest.raises(
        ValueError, match="Multiple concurrent uploads is not currently supported when using autoresume"
    ):
        make_trainer(loggers=several, autoresume=True, save_folder=str(tmp_path))


@pytest.mark.parametrize("save_folder", [None, "memory://checkpoints-that-the-saver-uploads"])
def test_an_uploader_that_gets_no_checkpoints_may_rename_files(tmp_path: Path, save_folder: str | None) -> None:
    (tmp_path / "bucket").mkdir()
    kwargs = {"provider": "local", "provider_kwargs": {"key": str(tmp_path)}}
    uploader = RemoteUploaderDownloader(
        "libcloud://bucket", kwargs, file_path_format_string="{run_name}/{remote_file_name}", use_procs=False
    )
    trainer = make_trainer(loggers=uploader, save_folder=save_folder)
    (tmp_path / "notes.txt").write_text("a file of the user")
    trainer.logger.upload_file("notes.txt", tmp_path / "notes.txt")
    trainer.close()
    assert (tmp_path / "bucket" / "my-run" / "notes.txt").exists()
