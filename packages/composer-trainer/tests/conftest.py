"""Fixtures of the Trainer's tests."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics.classification import MulticlassAccuracy

from composer.testing import RandomClassificationDataset, SimpleModel
from composer.trainer import Trainer
from composer.utils.reproducibility import seed_context

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for what several tests use
# Who begins the tests in the background, or with nohup, lets them ignore signals, and all processes inherit that.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    number = getattr(signal, name, None)  # Windows has no SIGHUP
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


class MakeTrainer:
    """Makes trainers over a small model with SGD, four batches of four samples, for two epochs."""

    def __init__(self) -> None:
        self.made: list[Trainer] = []

    def __call__(self, **kwargs: Any) -> Trainer:
        model = kwargs.pop("model", None)
        model = self.model() if model is None else model
        if "optimizers" not in kwargs:
            kwargs["optimizers"] = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        defaults = {
            "model": model,
            "train_dataloader": self.loader(),
            "max_duration": "2ep",
            "progress_bar": False,
            "device": "cpu",
            "seed": 0,
        }
        trainer = Trainer(**{**defaults, **kwargs})
        self.made.append(trainer)
        return trainer

    @staticmethod
    def loader(size: int = 16, batch_size: int = 4, **kwargs: Any) -> torch.utils.data.DataLoader[Any]:
        return torch.utils.data.DataLoader(RandomClassificationDataset(size=size), batch_size=batch_size, **kwargs)

    @staticmethod
    def model() -> SimpleModel:
        def accuracy() -> dict[str, Any]:
            return {"Accuracy": MulticlassAccuracy(num_classes=2, average="micro", validate_args=False)}

        with seed_context(0):  # every model begins alike
            return SimpleModel(train_metrics=accuracy(), eval_metrics=accuracy())


@pytest.fixture
def make_trainer() -> Iterator[MakeTrainer]:
    """Makes trainers, and closes them at the end."""
    make = MakeTrainer()
    yield make
    for trainer in make.made:
        trainer.close()


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
