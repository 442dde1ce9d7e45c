"""Remote folders, against stores in memory, on the disk, and a real server of S3."""

from __future__ import annotations

import errno
import os
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import composer.utils
from composer.checkpoint import CorruptCheckpointError, durable
from composer.checkpoint import storage as stores
from composer.checkpoint.storage import (
    Connection,
    Storage,
    StorageError,
    is_transient,
    retrying,
    storage_of,
    without_password,
)


class FlakyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory that fails as it is told, at each kind of request."""

    protocol = "flaky"
    failures: ClassVar[list[BaseException]] = []  # raised by the next requests, one each
    torn: ClassVar[int] = 0  # how many transfers lose their end
    made: ClassVar[int] = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        type(self).made += 1

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("flaky://", "memory://")))

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def cat_file(self, path: str, *args: Any, **kwargs: Any) -> bytes:
        self._fail()
        return bytes(super().cat_file(path, *args, **kwargs))

    def get_file(self, rpath: str, lpath: str, **kwargs: Any) -> None:
        super().get_file(rpath, lpath, **kwargs)
        if self.torn:
            type(self).torn -= 1
            os.truncate(lpath, 1)
        self._fail()

    def put_file(self, lpath: str, rpath: str, callback: Any = None) -> None:
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        if self.torn:
            type(self).torn -= 1
            value = value[:1]
        super().pipe_file(path, value, **kwargs)
        self._fail()

    def rm_file(self, path: str) -> None:
        self._fail()
        super().rm_file(path)


class BlockFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A store in memory whose client sends blocks."""

    protocol = "blocks"
    sizes: ClassVar[list[int]] = []

    def put_file(self, lpath: str, rpath: str, chunksize: int = 0, **kwargs: Any) -> None:
        self.sizes.append(chunksize)
        self.pipe_file(rpath, Path(lpath).read_bytes())


@pytest.fixture(autouse=True)
def _clean_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(stores, "_BACKOFF_SECONDS", 0.01)
    fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
    yield
    FlakyFileSystem.failures, FlakyFileSystem.torn = [], 0
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "file", "path", "s3", "flaky"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    kind = request.param
    if kind == "path":
        return storage_of(tmp_path / "store" / "run")
    uris = {
        "memory": lambda: "memory://bucket/run",
        "file": lambda: f"file://{tmp_path}/store/run/",
        "s3": lambda: f"{request.getfixturevalue('s3')}/run",
        "flaky": lambda: "flaky://bucket/run",
    }
    return storage_of(uris[kind]())


def test_uploads_in_blocks_show_progress_and_have_at_most_5000_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("blocks", BlockFileSystem, clobber=True)
    monkeypatch.setattr(BlockFileSystem, "sizes", [])
    monkeypatch.setattr(stores, "_BLOCK", 10)
    for size in (5, 50_000, 50_001, 100_001):
        (tmp_path / "a").write_bytes(bytes(size))
        storage_of("blocks://bucket").upload(tmp_path / "a", "a")

    assert [10, 10, 20, 30] == BlockFileSystem.sizes


def test_files_and_texts_come_back_as_they_went(storage: Storage, tmp_path: Path) -> None:
    content = os.urandom(100_000)
    (tmp_path / "a.pt").write_bytes(content)

    assert [] == storage.find()
    assert not storage.exists("deep/a.pt")
    storage.upload(tmp_path / "a.pt", "deep/a.pt")
    storage.upload(tmp_path / "a.pt", "b.pt")
    storage.write_text("latest.symlink", "b.pt")
    storage.write_text("latest.symlink", "deep/a.pt")
    storage.download("deep/a.pt", tmp_path / "here" / "a.pt")

    assert content == (tmp_path / "here" / "a.pt").read_bytes()
    assert ["a.pt"] == os.listdir(tmp_path / "here")
    assert ["b.pt", "deep/a.pt", "latest.symlink"] == storage.find()
    assert "deep/a.pt" == storage.read_text("latest.symlink")
    assert (True, False) == (storage.exists("deep/a.pt"), storage.exists("deep"))
    assert 100_000 == storage.size("b.pt")


def test_what_was_removed_is_gone_at_once(storage: Storage) -> None:
    """A cached listing would still have it."""
    storage.write_text("a", "x")
    other = storage.with_attempts(2)
    assert ["a"] == storage.find() == other.find()
    other.delete("a")
    other.delete("a")

    assert ([], False) == (storage.find(), storage.exists("a"))


def test_what_is_missing_is_named(storage: Storage, tmp_path: Path) -> None:
    uri = storage.uri("deep/none.pt")
    with pytest.raises(FileNotFoundError, match=f"Could not read {uri}: there is no such object"):
        storage.read_text("deep/none.pt")
    with pytest.raises(FileNotFoundError, match=f"Could not look up {uri}"):
        storage.size("deep/none.pt")
    with pytest.raises(FileNotFoundError, match=f"Could not download {uri} to "):
        storage.download("deep/none.pt", tmp_path / "here" / "none.pt")
    assert [] == os.listdir(tmp_path / "here")
    with pytest.raises(FileNotFoundError, match=r"absent\.pt"):
        storage.upload(tmp_path / "absent.pt", "a.pt")


def test_a_folder_is_found_writable_without_leaving_anything(storage: Storage) -> None:
    storage.check_writable()

    assert [] == storage.find()


def test_progress_is_told(storage: Storage, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))
    storage.upload(tmp_path / "a", "a", progress=True)
    told: list[tuple[int, int]] = []
    storage.download("a", tmp_path / "b", progress=lambda done, total: told.append((done, total)))

    assert (1000, 1000) == told[-1]


def test_a_bar_is_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    storage = storage_of("memory://bucket")
    storage.write_text("model.pt", "x" * 1000)
    storage.download("model.pt", tmp_path / "a", progress=True)

    assert "model.pt: 100%" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../../b"])
def test_names_stay_in_the_folder(name: str) -> None:
    with pytest.raises(ValueError, match="`name` must be relative to the folder and stay in it, got"):
        storage_of("memory://bucket").exists(name)


def test_uris_name_what_is_stored(tmp_path: Path) -> None:
    assert "memory://bucket/run/a" == storage_of("MEMORY://bucket/run/").uri("a")
    assert f"file://{tmp_path}/a" == storage_of(tmp_path).uri("a")
    assert "file:///data/a" == storage_of("file:/data").uri("a")


def test_passwords_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "check_installed", lambda scheme, uri: None)
    storage = Storage("sftp://me:secret@host/run", {})

    assert "Storage('sftp://me:...@host/run')" == repr(storage)
    assert "sftp://me:secret@host/run/a" == storage.uri("a")


def test_what_fails_for_a_moment_is_tried_again_with_a_new_connection(tmp_path: Path) -> None:
    storage = storage_of("flaky://bucket/run")
    storage.write_text("a", "text")
    made = FlakyFileSystem.made
    FlakyFileSystem.failures[:] = [ConnectionResetError("reset"), TimeoutError("late")]

    assert "text" == storage.read_text("a")
    assert made + 2 == FlakyFileSystem.made


def test_what_fails_for_good_is_told_with_all_there_is_to_know() -> None:
    storage = storage_of("flaky://bucket/run")
    FlakyFileSystem.failures[:] = [ConnectionResetError("reset")] * 3
    with pytest.raises(
        StorageError, match=r"read flaky://bucket/run/a: ConnectionResetError: reset\. .* tried 3 times"
    ):
        storage.read_text("a")
    assert [] == FlakyFileSystem.failures


def test_a_refusal_is_not_tried_again() -> None:
    storage = storage_of("flaky://bucket/run")
    FlakyFileSystem.failures[:] = [PermissionError(errno.EACCES, "no"), ConnectionResetError("never reached")]
    with pytest.raises(StorageError, match=r"The store refuses it\. Check the credentials") as caught:
        storage.read_text("a")

    assert errno.EACCES == caught.value.errno
    assert 1 == len(FlakyFileSystem.failures)


def test_a_mistake_of_the_program_stays_what_it_is() -> None:
    FlakyFileSystem.failures[:] = [KeyError("a bug")]
    with pytest.raises(KeyError, match="a bug"):
        storage_of("flaky://bucket/run").read_text("a")


def test_a_torn_download_is_repeated_and_leaves_nothing_if_it_stays_torn(tmp_path: Path) -> None:
    storage = storage_of("flaky://bucket/run")
    storage.write_text("a", "text")
    (tmp_path / "a").write_text("old")
    FlakyFileSystem.torn = 3
    with pytest.raises(StorageError, match=r"the transfer was interrupted: 1 of 4 bytes arrived"):
        storage.download("a", tmp_path / "a")
    assert (["a"], "old") == (os.listdir(tmp_path), (tmp_path / "a").read_text())
    FlakyFileSystem.torn = 2
    storage.download("a", tmp_path / "a")

    assert (["a"], "text") == (os.listdir(tmp_path), (tmp_path / "a").read_text())


def test_a_torn_upload_does_not_replace_what_is_there(tmp_path: Path) -> None:
    storage = storage_of("flaky://bucket/run")
    storage.write_text("a", "old")
    FlakyFileSystem.torn = 3
    with pytest.raises(StorageError, match="the transfer was interrupted"):
        storage.write_text("a", "text")

    assert (["a"], "old") == (storage.find(), storage.read_text("a"))


def test_a_broken_upload_leaves_nothing_even_if_cleaning_up_fails_too(tmp_path: Path) -> None:
    storage = storage_of("flaky://bucket/run")
    FlakyFileSystem.failures[:] = [ConnectionResetError("first"), ConnectionResetError("cleaning up")] * 3
    with pytest.raises(StorageError, match="first"):
        storage.write_text("a", "text")

    assert not storage.exists("a")


def test_a_full_disk_here_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of("memory://bucket")
    storage.write_text("a", "x" * 100_000)
    (tmp_path / "full").symlink_to("/dev/full")
    monkeypatch.setattr(durable, "temporary_path", lambda path: tmp_path / "full")
    with pytest.raises(StorageError, match=f"No space left on device. Free some space in '{tmp_path}/a'") as caught:
        storage.download("a", tmp_path / "a")

    assert errno.ENOSPC == caught.value.errno
    assert [] == os.listdir(tmp_path)


def test_a_full_store_is_told() -> None:
    FlakyFileSystem.failures[:] = [OSError(errno.ENOSPC, "No space left on device")]
    with pytest.raises(StorageError, match="Free some space in flaky://bucket/run/a"):
        storage_of("flaky://bucket/run").write_text("a", "x")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is forbidden to root")
def test_a_folder_here_that_cannot_be_written_to_is_not_blamed_on_the_store(tmp_path: Path) -> None:
    storage = storage_of("memory://bucket")
    storage.write_text("a", "x")
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(PermissionError, match="locked"):
        storage.download("a", tmp_path / "locked" / "a")


def test_credentials_that_may_not_remove_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = storage_of("memory://bucket/run")

    def refuse(self: Any, path: str) -> None:
        raise PermissionError("no")

    monkeypatch.setattr(MemoryFileSystem, "rm_file", refuse)
    storage.check_writable()

    def fail(self: Any, path: str) -> None:
        raise OSError(errno.EINVAL, "what?")

    monkeypatch.setattr(MemoryFileSystem, "rm_file", fail)
    with pytest.raises(StorageError, match=r"what\?\. Check the URI and the options"):
        storage.check_writable()


def test_a_missing_package_is_named(uninstall: Callable[[str], None]) -> None:
    for scheme, module, extra in (("gs", "gcsfs", "gcs"), ("azure", "adlfs", "azure"), ("sftp", "paramiko", "sftp")):
        uninstall(module)
        told = rf"://bucket(/run)? needs a package .*{module}.* 'composer-checkpoint\[{extra}\]'"
        with pytest.raises(ModuleNotFoundError, match=told):
            storage_of(f"{scheme}://bucket/run")


def test_passwords_do_not_get_into_messages(tmp_path: Path) -> None:
    assert without_password("ftp://me:secret@host/a:b@c") == "ftp://me:...@host/a:b@c"
    assert without_password("abfs://box/a?sv=2&sig=x%2F&se=3#part") == "abfs://box/a?sv=2&sig=...&se=3#part"
    assert without_password("https://b/a?X-Amz-Security-Token=x") == "https://b/a?X-Amz-Security-Token=..."
    assert without_password("ftp://me:se@cret@host") == "ftp://me:...@host"
    assert without_password("oci://bucket@namespace/a") == "oci://bucket@namespace/a"
    storage = Storage("mine://me:secret@host/run", {}, connection=Connection(lambda: (None, ""), is_object_store=True))
    with pytest.raises(PermissionError, match=r"^mine://me:\.\.\.@host/run/a cannot be removed"):
        storage.delete("a")
    storage_of("memory://me:secret@bucket").write_text("a.symlink", "b")
    with pytest.raises(FileNotFoundError, match=r"^'memory://me:\.\.\.@bucket/a\.symlink' links to 'b'"):
        composer.utils.get_file("memory://me:secret@bucket/a", tmp_path / "a", progress_bar=False)
    assert "'ftp://me:...@host/a' is damaged" in str(CorruptCheckpointError("ftp://me:secret@host/a", "it is torn"))


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"`uri` must have a scheme .* got 'nowhere://bucket'"):
        storage_of("nowhere://bucket")


def test_at_least_one_attempt_is_made() -> None:
    with pytest.raises(ValueError, match="`attempts` must be at least 1, got 0"):
        storage_of("memory://bucket").with_attempts(0).exists("a")


def test_the_environment_gives_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://here")
    monkeypatch.setenv("S3_CANNED_ACL", "private")
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "me")
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", "secret")

    assert {
        "config_kwargs": {"retries": {"mode": "adaptive"}},
        "endpoint_url": "http://here",
        "s3_additional_kwargs": {"ACL": "private"},
    } == stores._default_options("s3")
    assert {"account_name": "me", "account_key": "secret"} == stores._default_options("az")
    assert {"token": "google_default"} == stores._default_options("gs")
    monkeypatch.setenv("OCI_CONFIG_FILE", "~/mine")
    assert {"config": os.path.expanduser("~/mine")} == stores._default_options("oci")
    monkeypatch.setenv("OCIFS_IAM_TYPE", "instance_principal")
    assert {} == stores._default_options("oci")


def test_refused_credentials_stop_a_run_before_it_trains(s3: str, s3_server: Any) -> None:
    def require_credentials(after: bytes) -> None:
        address = f"{s3_server.endpoint}/moto-api/reset-auth"
        request = urllib.request.Request(address, data=after, headers={"Content-Type": "text/plain"})
        with urllib.request.urlopen(request):
            pass

    require_credentials(b"0")
    try:
        with pytest.raises(StorageError, match=r"PermissionError: .*The store refuses it\. Check the credentials"):
            storage_of(f"{s3}/run").check_writable()
    finally:
        require_credentials(b"inf")


def test_a_bucket_that_does_not_exist_stops_a_run_before_it_trains(s3: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"Could not write {s3}-typo/run/.*no such object, folder or bucket"):
        storage_of(f"{s3}-typo/run").check_writable()


def test_a_server_that_stops_is_told_and_leaves_nothing(stoppable_s3: tuple[str, Any], tmp_path: Path) -> None:
    uri, server = stoppable_s3
    storage = Storage(uri, {"endpoint_url": server.endpoint}).with_attempts(2)
    storage.write_text("a", "x")
    server.go_away()
    with pytest.raises(StorageError, match=rf"download {uri}/a .*It was tried 2 times\. Check the network"):
        storage.download("a", tmp_path / "a")
    with pytest.raises(StorageError, match=f"write {uri}/b"):
        storage.upload(__file__, "b")

    assert [] == os.listdir(tmp_path)


def test_a_server_that_comes_back_is_used_again(stoppable_s3: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_BACKOFF_SECONDS", 0.1)
    uri, server = stoppable_s3
    storage = Storage(uri, {"endpoint_url": server.endpoint}).with_attempts(8)
    storage.write_text("a", "x")
    server.stop()
    server._port = int(server.endpoint.rpartition(":")[2])
    threading.Timer(0.2, server.start).start()

    assert "x" == storage.read_text("a")


def test_threads_share_a_storage(s3: str) -> None:
    storage = storage_of(f"{s3}/run")
    threads = [threading.Thread(target=storage.write_text, args=(f"{index}", "x")) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert ["0", "1"] == storage.find()


class _Reply(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(str(status))
        self.status = status


def test_only_what_may_pass_is_tried_again() -> None:
    passing = [_Reply(503), _Reply(429), OSError(errno.EIO, "x"), OSError("x"), EOFError(), BrokenPipeError()]
    lasting = [_Reply(403), _Reply(400), FileExistsError(), IsADirectoryError(), OSError(errno.ENOSPC, "x"), KeyError()]

    assert [True] * 6 + [False] * 6 == [is_transient(error) for error in passing + lasting]


def test_an_existing_file_stays_a_file_exists_error() -> None:
    def fail() -> None:
        raise FileExistsError("a")

    with pytest.raises(FileExistsError, match=r"^Could not write b: it exists already\. \(a\)$"):
        retrying(fail, "write b", "b")
