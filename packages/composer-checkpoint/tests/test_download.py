"""Files from local folders, stores, loggers and the web, and the links that stand for them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from composer.checkpoint import durable
from composer.checkpoint.download import extract_path_from_symlink, get_file
from composer.checkpoint.storage import StorageError, storage_of


@pytest.fixture(autouse=True)
def _clean_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class _Web(BaseHTTPRequestHandler):
    content: ClassVar[dict[str, bytes]] = {}
    replies: ClassVar[list[int]] = []  # the status of the next replies
    torn: ClassVar[int] = 0

    def do_GET(self) -> None:
        status = self.replies.pop(0) if self.replies else 200 if self.path in self.content else 404
        self.send_response(status)
        body = self.content.get(self.path, b"")
        self.send_header("Content-Length", str(len(body)))
        if self.torn and status == 200:
            type(self).torn -= 1
            body = body[:1]
        self.end_headers()  # the test goes on here
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a web server that has the file `/model.pt`."""
    monkeypatch.setattr("composer.checkpoint.storage._BACKOFF_SECONDS", 0.01)
    _Web.content, _Web.replies, _Web.torn = {"/model.pt": b"weights" * 1000}, [], 0
    with ThreadingHTTPServer(("127.0.0.1", 0), _Web) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Store:
    """An object store in a folder, by its public methods only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def download_object(self, object_name: str, filename: str, overwrite: bool, callback: Any) -> None:
        shutil.copyfile(self.folder / object_name, filename)
        size = os.path.getsize(filename)
        callback(size, size)


class KeepingLogger:
    """A logger that stores files, by its public methods only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def download_file(self, remote_file_name: str, destination: str, overwrite: bool, progress_bar: bool) -> None:
        shutil.copyfile(self.folder / remote_file_name, destination)


def test_a_local_file_is_linked_to(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    get_file(tmp_path / "a", tmp_path / "deep" / "b")

    assert os.path.realpath(tmp_path / "a") == os.readlink(tmp_path / "deep" / "b")


def test_without_symbolic_links_a_local_file_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    (tmp_path / "a").write_text("x")
    get_file(tmp_path / "a", tmp_path / "b")

    assert "x" == (tmp_path / "b").read_text()
    assert not (tmp_path / "b").is_symlink()


def test_a_local_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"Local path {tmp_path}/a does not exist"):
        get_file(tmp_path / "a", tmp_path / "b")
    assert [] == os.listdir(tmp_path)


def test_a_file_is_replaced_only_if_told(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("new")
    (tmp_path / "b").write_text("old")
    with pytest.raises(FileExistsError, match=r"b' already exists\. Pass `overwrite=True`"):
        get_file(tmp_path / "a", tmp_path / "b")
    assert "old" == (tmp_path / "b").read_text()
    get_file(tmp_path / "a", tmp_path / "b", overwrite=True)

    assert "new" == (tmp_path / "b").read_text()


def test_a_file_may_stay_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    get_file(tmp_path / "a", tmp_path / "a", overwrite=True)

    assert "x" == (tmp_path / "a").read_text()


@pytest.mark.parametrize("suffix", ["", ".symlink"])
def test_a_local_text_link_is_followed(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "ep1.pt").write_text("x")
    (tmp_path / "latest.pt.symlink").write_text("ep1.pt")
    (tmp_path / "newest.symlink").write_text(str(tmp_path / "latest.pt"))
    get_file(f"{tmp_path}/latest.pt{suffix}", tmp_path / "b")
    get_file(f"{tmp_path}/newest{suffix}", tmp_path / "c")

    assert "x" == (tmp_path / "b").read_text() == (tmp_path / "c").read_text()
    for name in ("source_path", "path"):
        assert "ep1.pt" == extract_path_from_symlink(**{name: tmp_path / "latest.pt.symlink"})


@pytest.mark.parametrize("kind", ["memory", "file", "s3"])
def test_a_file_comes_from_a_store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    bucket = {"memory": "memory://bucket", "file": f"file://{tmp_path}/store"}.get(kind)
    bucket = bucket or request.getfixturevalue("s3")
    storage = storage_of(f"{bucket}/runs/mnist")
    storage.write_text("ep1.pt", "x" * 1000)
    storage.write_text("latest.pt.symlink", "ep1.pt")
    get_file(f"{bucket}/runs/mnist/ep1.pt", tmp_path / "a", progress_bar=False)
    get_file(f"{bucket}/runs/mnist/latest.pt", tmp_path / "b", progress_bar=False)

    assert "x" * 1000 == (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    with pytest.raises(FileNotFoundError, match=rf"{bucket}/runs/mnist/none\.pt to .* there is no such object"):
        get_file(f"{bucket}/runs/mnist/none.pt", tmp_path / "c")


@pytest.mark.parametrize("text", ["ep1.pt", "runs/mnist/ep1.pt", "memory://bucket/runs/mnist/ep1.pt"])
def test_a_link_may_be_relative_to_its_folder_or_to_the_bucket(text: str, tmp_path: Path) -> None:
    storage_of("memory://bucket/runs/mnist").write_text("ep1.pt", "x")
    storage_of("memory://bucket/runs/mnist").write_text("latest.symlink", text)
    get_file("memory://bucket/runs/mnist/latest", tmp_path / "a", progress_bar=False)

    assert "x" == (tmp_path / "a").read_text()


def test_a_link_to_nothing_says_so(tmp_path: Path) -> None:
    storage_of("memory://bucket").write_text("latest.symlink", "ep1.pt")
    with pytest.raises(FileNotFoundError, match=r"latest\.symlink' links to 'ep1\.pt', which does not exist"):
        get_file("memory://bucket/latest", tmp_path / "a")


@pytest.mark.parametrize("kind", [Store, KeepingLogger])
def test_a_file_comes_from_an_object_store_or_a_logger(kind: type, tmp_path: Path) -> None:
    (tmp_path / "store" / "run").mkdir(parents=True)
    (tmp_path / "store" / "run" / "ep1.pt").write_text("x")
    (tmp_path / "store" / "run" / "latest.symlink").write_text("run/ep1.pt")
    store = kind(tmp_path / "store")
    get_file("run/ep1.pt", tmp_path / "a", store)
    get_file("run/latest", tmp_path / "b", store)

    assert "x" == (tmp_path / "a").read_text() == (tmp_path / "b").read_text()
    with pytest.raises(FileNotFoundError, match=r"none\.pt"):
        get_file("run/none.pt", tmp_path / "c", store)
    assert ["a", "b", "store"] == sorted(os.listdir(tmp_path))


def test_an_object_store_must_be_able_to_download(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="`object_store` must have a method `download_object` or `download_file`"):
        get_file("a", tmp_path / "a", object())


def test_a_file_comes_from_the_web(web: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    get_file(f"{web}/model.pt", tmp_path / "a")

    assert b"weights" * 1000 == (tmp_path / "a").read_bytes()
    assert "model.pt: 100%" in capfd.readouterr().err


def test_a_web_page_that_is_not_there_is_missing(web: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"/none\.pt does not exist: the server says HTTP Error 404"):
        get_file(f"{web}/none.pt", tmp_path / "a")
    assert [] == os.listdir(tmp_path)


def test_a_busy_web_server_is_asked_again(web: str, tmp_path: Path) -> None:
    _Web.replies, _Web.torn = [503], 1
    get_file(f"{web}/model.pt", tmp_path / "a", progress_bar=False)
    assert 7000 == (tmp_path / "a").stat().st_size
    _Web.replies = [503] * 3
    with pytest.raises(StorageError, match=r"model\.pt: HTTPError: .*503.* It was tried 3 times"):
        get_file(f"{web}/model.pt", tmp_path / "b", progress_bar=False)
    _Web.replies = [403]
    with pytest.raises(StorageError, match=r"403: Forbidden\. Check the URI"):
        get_file(f"{web}/model.pt", tmp_path / "b", progress_bar=False)
    _Web.torn = 3
    with pytest.raises(StorageError, match=r"interrupted: 1 of 7000 bytes arrived|IncompleteRead"):
        get_file(f"{web}/model.pt", tmp_path / "b", progress_bar=False)

    assert ["a"] == os.listdir(tmp_path)


def test_a_full_disk_is_told(web: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    monkeypatch.setattr(durable, "temporary_path", lambda path: tmp_path / "full")
    with pytest.raises(StorageError, match=rf"No space left on device\. Free some space in '{tmp_path}'") as caught:
        get_file(f"{web}/model.pt", tmp_path / "a", progress_bar=False)

    assert (errno.ENOSPC, []) == (caught.value.errno, os.listdir(tmp_path))
