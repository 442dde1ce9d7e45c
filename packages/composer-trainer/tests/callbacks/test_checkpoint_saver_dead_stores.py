"""A store that hangs or fails does not hold up the end of a process: one deadline, and the files are kept."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeTrainer
from fsspec.implementations.memory import MemoryFileSystem

from composer.callbacks import CheckpointSaver
from composer.checkpoint import lease as leases
from composer.core import Callback, State
from composer.loggers import Logger, LoggerDestination
from composer.loggers.spi import Sender

PROGRAM = """
import sys, time
from pathlib import Path
from composer.checkpoint.storage import storage_of
from composer.checkpoint.upload import Uploader

endpoint, folder = sys.argv[1:]
storage = storage_of("s3://bucket/run", key="k", secret="s", endpoint_url=endpoint,
    config_kwargs={"retries": {"max_attempts": 0}})
uploader = Uploader(storage, timeout=2.0)
for i in range(20):
    path = Path(folder) / f"ba{i}.pt"
    path.write_bytes(b"x" * 100_000)
    uploader.upload(path, path.name, overwrite=True)
    path.unlink()  # as rotation does
start = time.monotonic()
for end in (uploader.wait, uploader.close):
    try:
        end()
    except Exception as error:
        print(type(error).__name__)
print("seconds", time.monotonic() - start)
"""


@contextmanager
def _server(kind: str) -> Iterator[str]:
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            if kind == "hangs":
                done.wait(120)
            else:
                self.rfile.read(1000)
                self.connection.close()

        do_PUT = do_GET = do_HEAD = do_POST = _answer

        def log_message(self, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError, ValueError):  # the client is gone
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        done.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("kind", ["hangs", "dies half way"])
def test_a_process_ends_although_its_store_does_not_work(kind: str, tmp_path: Path) -> None:
    """Twenty uploads, two seconds for all of them: a limit of 60 seconds for the process tells one from twenty."""
    pytest.importorskip("s3fs")
    with _server(kind) as endpoint:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, endpoint, str(tmp_path)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    assert 0 == done.returncode, done.stderr
    assert "TimeoutError" == done.stdout.splitlines()[0]
    assert 2 == len(done.stdout.splitlines())  # `close` neither waits nor raises again
    assert "The local files are kept: " in done.stderr
    assert (tmp_path / "ba19.pt").exists()


def test_a_launch_ends_although_its_store_never_answers(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The given time ends the wait."""
    pytest.importorskip("s3fs")
    expected = "Writing to s3://bucket/mine has not ended in 1 seconds. Check that the service runs"
    with _server("hangs") as endpoint:
        for name, value in {
            "S3_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
        }.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(OSError, match=re.escape(expected)):
            make_trainer(save_folder="s3://bucket/{run_name}", run_name="mine", delivery_timeout=1.0)


class Hanging(LoggerDestination):
    """Sends to a service that does not answer."""

    def __init__(self, done: threading.Event) -> None:
        self.done = done

    def init(self, state: State, logger: Logger) -> None:
        self.sender = Sender("Hanging", self._send, timeout=logger.delivery_deadline.for_service())

    def _send(self, records: Any) -> None:
        self.done.wait()

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.sender.put_metrics(metrics, step or 0)

    def fit_end(self, state: State, logger: Logger) -> None:
        self.sender.flush()

    def post_close(self) -> None:
        self.sender.close()


class Uploading(Callback):
    """Has a file uploaded at the beginning."""

    remote_file_name = "memory://profiles/a.txt"

    def __init__(self, path: Path) -> None:
        self.path = path

    def fit_start(self, state: State, logger: Logger) -> None:
        self.path.write_text("a profile")
        logger.upload_file(self.remote_file_name, self.path)


def test_all_services_of_a_run_that_hang_are_waited_for_once(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two loggers, the store of the checkpoints and that of a callback's file: two seconds in all, not eight."""
    done = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *args, **kwargs: done.wait())
    trainer = make_trainer(
        save_folder=f"memory://{tmp_path.name}",
        loggers=[Hanging(done), Hanging(done)],
        callbacks=[Uploading(tmp_path / "a.txt")],
        delivery_timeout=2.0,
    )
    try:
        with pytest.raises(TimeoutError, match="have not ended in 2 seconds without progress"):
            trainer.fit()
        trainer.close()
        assert 2 <= trainer.logger.delivery_deadline._seconds_lost[0] < 4
        assert 2 == caplog.text.count("`Hanging` did not deliver")
        last = [record for record in caplog.records if record.name == "composer.checkpoint.upload"]
        assert 2 == sum("The local files are kept: " in record.getMessage() for record in last)  # one for each store
    finally:
        done.set()


def test_a_saver_with_a_time_of_its_own_shares_none(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *args, **kwargs: done.wait())
    saver = CheckpointSaver("memory://own", remote_file_name="run/ba{batch}.pt", delivery_timeout=0.5)
    trainer = make_trainer(callbacks=[saver], delivery_timeout=60.0)
    try:
        with pytest.raises(TimeoutError, match=r"have not ended in 0\.5 seconds"):
            trainer.fit()
        assert 0 == trainer.logger.delivery_deadline._seconds_lost[0]
    finally:
        done.set()


def test_a_store_that_hangs_while_the_lease_is_checked_does_not_hold_up_a_save(
    make_trainer: MakeTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training waits once, for the time given to the store, rather than at every save for as long as it hangs."""
    done = threading.Event()
    monkeypatch.setattr(leases, "_PATIENCE_SECONDS", 0.1)
    asked: list[str] = []

    def hang(*arguments: Any) -> None:
        asked.append(threading.current_thread().name)
        done.wait()

    trainer = make_trainer(save_folder=f"memory://{tmp_path.name}", save_interval="1ba")
    monkeypatch.setattr(leases.Lease, "_read", hang)
    try:
        trainer.fit()
        assert ["composer-lease"] == asked  # neither further renewals nor the release ask again meanwhile
    finally:
        done.set()
