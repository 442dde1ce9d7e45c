"""Fixtures of the tests: servers of stores, and small runs of the Trainer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.core import Callback
from composer.testing import RandomClassificationDataset, SimpleModel, restore_signals
from composer.testing.servers import s3 as s3
from composer.testing.servers import s3_server as s3_server
from composer.testing.servers import sftp as sftp
from composer.testing.servers import stoppable_s3 as stoppable_s3
from composer.testing.servers import uninstall as uninstall

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for what several tests use
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # else gcsfs asks Google, not the emulator, for some things
restore_signals()


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's own client with a store on the disk, where it looks for Databricks."""
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes ten seconds to make
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE", "1")  # restored at the end
    client, folder = mlflow.MlflowClient, f"file://{tmp_path}/mlflow"
    monkeypatch.setattr(mlflow, "MlflowClient", lambda tracking: client(folder))


@pytest.fixture
def databricks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from store_servers import serve_databricks

    with serve_databricks() as server:
        monkeypatch.setenv("DATABRICKS_HOST", server.address)
        monkeypatch.setenv("DATABRICKS_TOKEN", "token")
        yield server


def loader(size: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(RandomClassificationDataset(size=size), batch_size=batch_size)


class Run:
    """A trainer of a small model."""

    def __init__(self, callbacks: Callback | Sequence[Callback], **kwargs: Any) -> None:
        accuracy = {"MulticlassAccuracy": MulticlassAccuracy(num_classes=2, average="micro")}
        model = SimpleModel(train_metrics=accuracy, eval_metrics=dict(accuracy))
        arguments: dict[str, Any] = {"train_dataloader": loader(), "max_duration": "2ep", "device": "cpu"} | kwargs
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.trainer = Trainer(model=model, optimizers=optimizer, callbacks=callbacks, progress_bar=False, **arguments)
        self.state = self.trainer.state

    def fit(self, **kwargs: Any) -> Run:
        self.trainer.fit(**kwargs)
        return self


@pytest.fixture
def run() -> Any:
    """Create runs: `run(callbacks, max_duration=..., ...)`. They are closed at the end of the test."""
    runs: list[Run] = []

    def make(*args: Any, **kwargs: Any) -> Run:
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    yield make
    for one in runs:
        one.trainer.close()


@pytest.fixture
def make_loader() -> Callable[..., DataLoader[Any]]:
    return loader
