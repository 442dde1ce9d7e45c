"""Uploads in the background: their order, what they leave, and what happens when they fail or the process ends."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from composer.checkpoint import upload as uploads
from composer.checkpoint.storage import Storage, StorageError, UnreachableError, storage_of
from composer.checkpoint.upload import Uploader, upload_file


@pytest.fixture(autouse=True)
def _clean_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class GatedStorage(Storage):
    """A folder in memory that does what a test tells it before each upload, and writes down what arrived."""

    def __init__(self) -> None:
        super().__init__("memory://bucket/run", {})
        self.gates: dict[str, threading.Event] = {}
        self.before: Callable[[str], None] = lambda content: None
        self.log: list[str] = []

    def upload(self, source: Any, name: str, progress: Any = False) -> None:
        content = Path(source).read_text()
        if content in self.gates:
            assert self.gates[content].wait(20)
        self.before(content)
        super().upload(source, name, progress)
        self.log.append(f"{name}={content}")

    def write_text(self, name: str, text: str) -> None:
        super().write_text(name, text)
        self.log.append(f"{name}->{text}")


@pytest.fixture
def storage() -> GatedStorage:
    return GatedStorage()


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def make(content: str) -> Path:
        path = tmp_path / "files" / f"{content}.pt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        return path

    return make


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_files_arrive_with_the_link_to_the_last(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, file: Callable[[str], Path]
) -> None:
    uri = f"{request.getfixturevalue('s3')}/run" if kind == "s3" else f"file://{tmp_path}/store"
    uploader = Uploader(storage_of(uri), concurrent=2)
    for index in range(4):
        source = file(f"ba{index}")
        uploader.upload(source, f"ba{index}.pt", overwrite=False, link=("latest.symlink", f"ba{index}.pt"))
        source.unlink()  # as rotation does
    uploader.close()
    storage = storage_of(uri)

    assert ["ba0.pt", "ba1.pt", "ba2.pt", "ba3.pt", "latest.symlink"] == storage.find()
    assert ("ba3.pt", "ba2") == (storage.read_text("latest.symlink"), storage.read_text("ba2.pt"))
    assert [] == os.listdir(tmp_path / "files")


def test_training_goes_on_while_a_file_is_uploaded(storage: GatedStorage, file: Callable[[str], Path]) -> None:
    gate = storage.gates["a"] = threading.Event()
    uploader = Uploader(storage)
    uploader.upload(file("a"), "a", overwrite=False)
    uploader.upload(file("b"), "b", overwrite=False)
    uploader.check()

    assert ("a", "b") == uploader.pending
    gate.set()
    uploader.wait()
    assert ((), ["a=a", "b=b"]) == (uploader.pending, storage.log)
    uploader.close()


def test_an_older_link_never_replaces_a_newer_one(storage: GatedStorage, file: Callable[[str], Path]) -> None:
    gate = storage.gates["old"] = threading.Event()
    uploader = Uploader(storage, concurrent=2)
    uploader.upload(file("old"), "old", overwrite=False, link=("latest", "old"))
    uploader.upload(file("new"), "new", overwrite=False, link=("latest", "new"))
    _until(lambda: uploader.pending == ("old",))
    assert "new" == storage.read_text("latest")
    gate.set()
    uploader.close()

    assert ["new=new", "latest->new", "old=old"] == storage.log


def test_uploads_of_one_name_keep_their_order(
    storage: GatedStorage, file: Callable[[str], Path], tmp_path: Path
) -> None:
    gate = storage.gates["1"] = threading.Event()
    uploader = Uploader(storage, concurrent=3, timeout=20)
    for content in ("1", "2", "3"):
        source = file(content).rename(tmp_path / "latest.pt")
        uploader.upload(source, "latest.pt", overwrite=True)
    uploader.upload(file("other"), "other.pt", overwrite=True)
    _until(lambda: uploader.pending == ("latest.pt",) * 3)
    gate.set()
    uploader.close()

    assert ["other.pt=other", "latest.pt=1", "latest.pt=2", "latest.pt=3"] == storage.log


def test_the_link_waits_for_its_file_and_is_not_written_without_it(
    storage: GatedStorage, file: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(content: str) -> None:
        if content == "bad":
            raise StorageError("lost")

    storage.before = fail
    uploader = Uploader(storage)
    uploader.upload(file("good"), "good", overwrite=False, link=("latest", "good"))
    uploader.upload(file("bad"), "bad", overwrite=False, link=("latest", "bad"))
    uploader.upload(file("last"), "last", overwrite=False)
    with pytest.raises(StorageError, match="lost"):
        uploader.wait()
    with pytest.raises(StorageError, match="lost"):
        uploader.check()
    uploader.close()  # says it no third time
    uploader.close()

    assert ["good=good", "latest->good", "last=last"] == storage.log
    assert "bad.pt" in caplog.text


def test_a_file_of_several_comes_when_all_are_there_or_not_at_all(
    storage: GatedStorage, file: Callable[[str], Path]
) -> None:
    def fail(content: str) -> None:
        if content == "bad":
            raise StorageError("lost")

    storage.before = fail
    uploader = Uploader(storage, concurrent=2)
    for part in ("good", "bad"):
        uploader.upload(
            file(f"{part}-end"),
            f"{part}/end",
            overwrite=False,
            link=("latest", part),
            before=[(file(part), f"{part}/1")],
        )
    with pytest.raises(StorageError, match="lost"):
        uploader.wait()
    uploader.close()

    assert ["good/1=good", "good/end=good-end", "latest->good"] == storage.log


def test_a_folder_may_be_removed_while_its_files_wait(storage: GatedStorage, tmp_path: Path) -> None:
    folder = tmp_path / "ep0-ba1"
    folder.mkdir()
    for name in ("part", "end"):
        (folder / name).write_text(name)
    gate = storage.gates["part"] = threading.Event()
    uploader = Uploader(storage)

    uploader.upload(folder / "end", "1/end", overwrite=False, before=[(folder / "part", "1/part")])
    assert sorted(os.listdir(folder)) == ["end", "part"]
    shutil.rmtree(folder)
    gate.set()
    uploader.close()

    assert ["1/part=part", "1/end=end"] == storage.log
    assert os.listdir(tmp_path) == []


def test_a_failure_that_nobody_asked_for_is_raised_at_the_end(
    storage: GatedStorage, file: Callable[[str], Path]
) -> None:
    storage.write_text("a", "there already")
    uploader = Uploader(storage)
    uploader.upload(file("a"), "a", overwrite=False)
    with pytest.raises(
        FileExistsError, match="memory://bucket/run/a already exists, but overwrite was set to False"
    ) as e:
        uploader.close()

    assert "`save_overwrite=True`" in str(e.value)
    assert "there already" == storage.read_text("a")


def test_what_is_there_may_be_replaced(storage: GatedStorage, file: Callable[[str], Path]) -> None:
    storage.write_text("a", "there already")
    uploader = Uploader(storage)
    uploader.upload(file("a"), "a", overwrite=True)
    uploader.close()

    assert "a" == storage.read_text("a")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_queued_file_may_be_replaced(
    storage: GatedStorage, file: Callable[[str], Path], has_links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_links:

        def refuse(source: Any, destination: Any) -> None:
            raise PermissionError("no links here")

        monkeypatch.setattr(os, "link", refuse)
    gate = storage.gates["a"] = threading.Event()
    uploader = Uploader(storage)
    first, second = file("a"), file("b")
    uploader.upload(first, "a", overwrite=False)
    uploader.upload(second, "b", overwrite=False)
    first.unlink()
    first.write_text("newer")  # another file by now
    gate.set()
    uploader.close()

    assert ["a.pt", "b.pt"] == sorted(os.listdir(first.parent))
    assert ("newer", ["a=a", "b=b"]) == (first.read_text(), storage.log)


def test_a_file_must_be_there(storage: GatedStorage, tmp_path: Path) -> None:
    uploader = Uploader(storage)
    with pytest.raises(FileNotFoundError, match="absent"):
        uploader.upload(tmp_path / "absent", "a", overwrite=True)
    with pytest.raises(ValueError, match="`name` must be relative"):
        uploader.upload(tmp_path / "absent", "../a", overwrite=True)
    uploader.close()


def test_arguments_are_checked(storage: GatedStorage) -> None:
    with pytest.raises(ValueError, match="`concurrent` must be at least 1, got 0"):
        Uploader(storage, concurrent=0)
    with pytest.raises(ValueError, match="`timeout` must be positive, got 0"):
        Uploader(storage, timeout=0)


def test_a_closed_uploader_takes_no_more(storage: GatedStorage, file: Callable[[str], Path]) -> None:
    uploader = Uploader(storage)
    uploader.close()
    with pytest.raises(RuntimeError, match="The uploader is closed"):
        uploader.upload(file("a"), "a", overwrite=True)


def test_waiting_ends(storage: GatedStorage, file: Callable[[str], Path]) -> None:
    gate = storage.gates["a"] = threading.Event()
    uploader = Uploader(storage, timeout=0.05)
    uploader.upload(file("a"), "a", overwrite=True)
    with pytest.raises(
        TimeoutError,
        match=r"have not ended in 0\.05 seconds .*: a\. The local files are kept: .*a\.pt\. Check the network",
    ):
        uploader.wait()
    uploader.close()  # which neither waits nor raises again
    gate.set()
    for thread in uploader._threads:
        thread.join(20)


def test_an_outage_is_ridden_out(
    storage: GatedStorage, file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_PAUSE_SECONDS", 0.01)
    failures = [UnreachableError("down")] * 3

    def fail(content: str) -> None:
        if failures:
            raise failures.pop()

    storage.before = fail
    uploader = Uploader(storage, rides_out=True)
    source = file("a")
    upload = uploader.upload(source, "a", overwrite=False, link=("latest", "a"))
    source.unlink()  # as rotation does
    upload.result(20)
    assert not uploader.failing
    uploader.check()
    uploader.close()

    assert ["a=a", "latest->a"] == storage.log


def test_a_removed_file_is_there_again_when_an_outage_outlasts_the_deadline(
    storage: GatedStorage, file: Callable[[str], Path]
) -> None:
    def fail(content: str) -> None:
        raise UnreachableError("down")

    storage.before = fail
    uploader = Uploader(storage, timeout=0.2, rides_out=True)
    source = file("a")
    uploader.upload(source, "a", overwrite=False)
    source.unlink()
    with pytest.raises(TimeoutError, match=f"The local files are kept: {source}"):
        uploader.wait()
    uploader.close()

    assert "a" == source.read_text()


def test_an_upload_cannot_be_cancelled(storage: GatedStorage, file: Callable[[str], Path]) -> None:
    gate = storage.gates["a"] = storage.gates["b"] = threading.Event()
    uploader = Uploader(storage, timeout=0.05)
    uploads = [uploader.upload(file(name), name, overwrite=True) for name in ("a", "b")]  # one runs, one is queued
    assert [False, False] == [upload.cancel() for upload in uploads]
    with pytest.raises(TimeoutError):
        uploader.wait()
    gate.set()

    for name, upload in zip(("a", "b"), uploads, strict=True):
        with pytest.raises(TimeoutError, match=rf"/{name}\.pt was not uploaded to memory://bucket/run/{name}\."):
            upload.result(0)
    uploader.close()
    for thread in uploader._threads:
        thread.join(20)


def test_messages_of_uploads_have_no_passwords(
    file: Callable[[str], Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, shown = "memory://me:secret@bucket/run", r"memory://me:\.\.\.@bucket/run"
    assert upload_file(file("a"), uri) == f"{uri}/a.pt"
    with pytest.raises(FileExistsError, match=f"^{shown}/a.pt already exists"):
        upload_file(file("a"), uri)
    uploader = Uploader(storage_of(uri))
    uploader.upload(file("a"), "a.pt", overwrite=False)
    with pytest.raises(FileExistsError, match=f"^{shown}/a.pt already exists, but overwrite"):
        uploader.close()

    gate = threading.Event()
    uploader = Uploader(storage_of(uri), timeout=0.05)
    monkeypatch.setattr(uploader.storage, "upload", lambda path, name, progress: assert_set(gate))
    upload = uploader.upload(file("b"), "b", overwrite=True)
    uploader._finish_at_exit()
    gate.set()
    with pytest.raises(TimeoutError, match=f"was not uploaded to {shown}/b"):
        upload.result(0)
    for thread in uploader._threads:
        thread.join(20)
    assert "b.pt was not uploaded to memory://me:...@bucket/run/b." in caplog.text
    assert "secret" not in caplog.text


def assert_set(gate: threading.Event) -> None:
    assert gate.wait(20)


def test_closing_ends_the_threads(storage: GatedStorage, file: Callable[[str], Path]) -> None:
    uploader = Uploader(storage, concurrent=2)
    uploader.upload(file("a"), "a", overwrite=True)
    uploader.upload(file("b"), "b", overwrite=True)
    uploader.close()

    assert not any(thread.is_alive() for thread in uploader._threads)


def _use_in_child(uploader: Uploader) -> None:
    uploader.close()


def test_a_forked_process_does_not_wait_for_uploads_it_cannot_make(
    storage: GatedStorage, file: Callable[[str], Path]
) -> None:
    """As the workers of a data loader are forked; the end of such a process runs what the threads registered."""
    gate = storage.gates["a"] = threading.Event()
    uploader = Uploader(storage)
    uploader.upload(file("a"), "a", overwrite=True)
    child = multiprocessing.get_context("fork").Process(target=_use_in_child, args=(uploader,))
    child.start()
    child.join(30)

    assert 0 == child.exitcode
    gate.set()
    uploader.close()


def test_the_end_of_the_process_says_what_was_not_uploaded(
    storage: GatedStorage, file: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    gate = storage.gates["a"] = threading.Event()
    uploader = Uploader(storage, timeout=0.05)
    source = file("a")
    uploader.upload(source, "a", overwrite=True)
    with caplog.at_level(logging.WARNING):
        uploader._finish_at_exit()
    gate.set()
    for thread in uploader._threads:
        thread.join(20)

    assert "Waiting for uploads to Storage('memory://bucket/run') before the process ends: a" in caplog.text
    assert f"{source} was not uploaded to memory://bucket/run/a." in caplog.text


_PROGRAM = """
import sys
from pathlib import Path

from composer.checkpoint.storage import storage_of
from composer.checkpoint.upload import Uploader

uploader = Uploader(storage_of(sys.argv[1]), timeout=60)
for index in range(3):
    source = Path(sys.argv[2]) / str(index)
    source.write_text(str(index))
    uploader.upload(source, str(index), overwrite=False, link=("latest", str(index)))
raise SystemExit(7)
"""


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 3),
    reason="at its end Python 3.12.0 to 3.12.2 start no threads, which s3fs needs (python/cpython#113964)",
)
def test_a_process_that_ends_without_closing_uploads_what_waits(s3: str, tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", _PROGRAM, s3, str(tmp_path)], timeout=90, check=False)
    storage = storage_of(s3)

    assert 7 == child.returncode
    assert (["0", "1", "2", "latest"], "2") == (storage.find(), storage.read_text("latest"))
    assert ["0", "1", "2"] == sorted(os.listdir(tmp_path))


def test_a_server_that_stops_fails_the_upload_and_leaves_the_link(
    stoppable_s3: tuple[str, Any], file: Callable[[str], Path]
) -> None:
    uri, server = stoppable_s3
    storage = Storage(uri, {"endpoint_url": server.endpoint}).with_attempts(2)
    uploader = Uploader(storage)
    uploader.upload(file("a"), "a", overwrite=False, link=("latest", "a"))
    uploader.wait()
    server.go_away()
    uploader.upload(file("b"), "b", overwrite=False, link=("latest", "b"))
    with pytest.raises(StorageError, match=rf"{uri}/b.* tried 2 times"):
        uploader.close()
    server._port = int(server.endpoint.rpartition(":")[2])
    server.start()

    assert (["a", "latest"], "a") == (storage.find(), storage.read_text("latest"))


def test_at_the_end_an_uploader_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(threading, "_register_atexit", registered.append, raising=False)

    class Thing:
        calls = 0

        def method(self) -> None:
            Thing.calls += 1

    thing = Thing()
    uploads.call_at_exit(thing.method)
    registered[0]()
    del thing
    registered[0]()

    assert 1 == Thing.calls
