"""Fixtures of the tests: servers of stores, and small runs of the Trainer."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.core import Callback
from composer.testing import RandomClassificationDataset, SimpleModel

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for what several tests use
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # else gcsfs asks Google, not the emulator, for some things
# Who begins the tests in the background, or with nohup, lets them ignore signals, and all processes inherit that.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    number = getattr(signal, name, None)  # Windows has no SIGHUP
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture
def uninstall(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function after which a package cannot be imported, although fsspec may have found its store before."""
    import fsspec

    def hide(package: str) -> None:
        registry: dict[str, Any] = {}
        for name in ("registry", "_registry"):
            monkeypatch.setattr(sys.modules[fsspec.get_filesystem_class.__module__], name, registry)
        loaded = [name for name in sys.modules if name.startswith(f"{package}.")]
        for name in (package, *loaded, "fsspec.implementations.sftp"):
            monkeypatch.setitem(sys.modules, name, None)

    return hide


@contextmanager
def serve_s3() -> Iterator[Any]:
    """A server of S3 on loopback; its `endpoint` is its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    server.endpoint = f"http://localhost:{server.get_host_and_port()[1]}"
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def s3_server() -> Iterator[Any]:
    """A server of S3 that the tests of a module share."""
    with serve_s3() as server:
        yield server


def _make_bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a-key",
        "AWS_SECRET_ACCESS_KEY": "a-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",  # the client's own attempts take long
        "S3_ENDPOINT_URL": endpoint,
    }.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{secrets.token_hex(4)}"
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")):
        return f"s3://{bucket}"


@pytest.fixture
def s3(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty bucket of a real server; the environment has credentials."""
    return _make_bucket(s3_server.endpoint, monkeypatch)


@pytest.fixture
def stoppable_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Any]]:
    """The URI of an empty bucket and its server, for tests that stop the server.

    After its `go_away()` nothing else answers at its port.
    """
    with serve_s3() as server, socket.socket() as held:

        def go_away() -> None:
            server.stop()
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", int(server.endpoint.rpartition(":")[2])))

        server.go_away = go_away
        yield _make_bucket(server.endpoint, monkeypatch), server


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from store_servers import serve_mlflow

    with serve_mlflow(tmp_path_factory.mktemp("mlflow")) as address:
        yield address


@pytest.fixture
def mlflow(mlflow_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of MLflow's client, which finds the server where it looks for Databricks."""
    monkeypatch.setenv("DATABRICKS_HOST", mlflow_server)
    monkeypatch.setenv("DATABRICKS_TOKEN", "token")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE", "1")  # restored at the end


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
