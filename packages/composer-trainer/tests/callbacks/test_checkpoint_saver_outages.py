"""Training goes on while the store of the checkpoints is down, and nothing is missing there at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from conftest import MakeTrainer

from composer.checkpoint import storage as stores
from composer.checkpoint.storage import StorageError, storage_of
from composer.core import Callback, State
from composer.loggers import Logger

pytest.importorskip("s3fs")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores.Storage.__init__, "__defaults__", (3, 0.01))


class Outage(Callback):
    """Lets a server of S3 refuse checkpoints from the start until the end of a batch by which some have failed."""

    def __init__(self, server: Any, until: int, status: int = 503, stores_it: bool = False) -> None:
        self.server, self.until, self.status, self.stores_it = server, until, status, stores_it
        self.works = server._server.app

    def fit_start(self, state: State, logger: Logger) -> None:
        self.server._server.app = self.answer

    def answer(self, environ: dict[str, str], start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] != "PUT" or ".owner" in environ["PATH_INFO"]:
            return self.works(environ, start_response)
        if self.stores_it:  # only the answer is lost
            list(self.works(environ, lambda *args: None))
        start_response(f"{self.status} failing", [("Content-Length", "0")])
        return [b""]

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.until:
            saver = next(callback for callback in state.callbacks if hasattr(callback, "remote_uploader"))
            wait_until(lambda: saver.remote_uploader.failing)
            self.server._server.app = self.works


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def restored(server: Any) -> Iterator[None]:
    works = server._server.app
    try:
        yield
    finally:
        server._server.app = works


@pytest.mark.parametrize(("until", "stores_it", "asynchronous"), [(3, True, False), (8, False, True)])
def test_checkpoints_of_an_outage_are_uploaded_afterwards(
    make_trainer: MakeTrainer, s3: str, s3_server: Any, until: int, stores_it: bool, asynchronous: bool
) -> None:
    with restored(s3_server):
        trainer = make_trainer(
            save_folder=f"{s3}/run",
            save_filename="ba{batch}.pt",
            save_interval="1ba",
            save_num_checkpoints_to_keep=1,
            save_async=asynchronous,
            callbacks=Outage(s3_server, until, stores_it=stores_it),
            run_name="run",
        )
        trainer.fit()
        trainer.close()

    there = storage_of(f"{s3}/run")
    assert [f"ba{batch}.pt" for batch in range(1, 9)] == [name for name in there.find() if name.endswith(".pt")]
    assert "run/ba8.pt" == there.read_text("latest-rank0.pt.symlink").strip()
    assert 1 == len(trainer.saved_checkpoints)
    assert 1 == make_trainer(load_path=f"{s3}/run/ba1.pt", load_progress_bar=False).state.timestamp.batch


def test_a_store_that_refuses_ends_the_run(make_trainer: MakeTrainer, s3: str, s3_server: Any) -> None:
    with restored(s3_server):
        trainer = make_trainer(
            max_duration="1000ba",
            save_folder=f"{s3}/run",
            save_interval="1ba",
            callbacks=Outage(s3_server, 3, status=403),
            run_name="run",
        )
        with pytest.raises((StorageError, PermissionError), match="The store refuses it"):
            trainer.fit()

    assert trainer.state.timestamp.batch < 1000  # told by the next save, not only at the end
