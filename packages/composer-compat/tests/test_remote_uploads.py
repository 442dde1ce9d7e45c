"""RemoteUploader and RemoteUploaderDownloader, in threads and in processes, on a real server and on the disk."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from composer.checkpoint.storage import storage_of
from composer.core import Event, State
from composer.core.engine import Engine
from composer.loggers import Logger, RemoteUploaderDownloader
from composer.testing import run_on_ranks
from composer.utils import (
    LibcloudObjectStore,
    ObjectStore,
    ObjectStoreTransientError,
    RemoteFilesExistingCheckStatus,
    RemoteUploader,
    file_helpers,
    maybe_create_remote_uploader_downloader_from_uri,
)


@pytest.fixture
def state() -> State:
    return State(
        model=torch.nn.Linear(1, 1),
        max_duration="1ep",
        rank_zero_seed=0,
        run_name="my-run",
        dataloader=[],
        device="cpu",
    )


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    folder = tmp_path / "libcloud" / "bucket"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def make(bucket: Path) -> Iterator[Callable[..., RemoteUploaderDownloader]]:
    """Make an uploader to a folder, which is closed at the end."""
    made: list[RemoteUploaderDownloader] = []

    def build(use_procs: bool = False, **arguments: Any) -> RemoteUploaderDownloader:
        kwargs = {"provider": "local", "provider_kwargs": {"key": str(bucket.parent)}}
        made.append(RemoteUploaderDownloader("libcloud://bucket", kwargs, use_procs=use_procs, **arguments))
        return made[-1]

    yield build
    for uploader in made:
        uploader.post_close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("content")
    return path


class GatedStore(ObjectStore):
    """A store in a folder that waits, and fails, as a test wants."""

    gate = threading.Event()
    failures: ClassVar[list[Exception]] = []
    sizes_asked: ClassVar[list[str]] = []

    def __init__(self, bucket: str, dir: str) -> None:
        self.folder = Path(dir, bucket)

    def get_uri(self, object_name: str) -> str:
        return f"s3://bucket/{object_name}"

    def upload_object(self, object_name: str, filename: Any, callback: Any = None, **kwargs: Any) -> None:
        target = self.folder / object_name
        target.parent.mkdir(parents=True, exist_ok=True)
        if object_name.startswith("."):
            return
        assert self.gate.wait(20)
        target.write_bytes(Path(filename).read_bytes())
        if self.failures:
            raise self.failures.pop(0)

    def get_object_size(self, object_name: str) -> int:
        self.sizes_asked.append(object_name)
        return (self.folder / object_name).stat().st_size

    def list_objects(self, prefix: str | None = None) -> list[str]:
        return [str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file()]


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., RemoteUploaderDownloader]:
    """Make an uploader to a `GatedStore`, where programs replace the class."""
    monkeypatch.setattr("composer.utils.object_store.utils.S3ObjectStore", GatedStore)
    monkeypatch.setattr(GatedStore, "gate", threading.Event())
    monkeypatch.setattr(GatedStore, "failures", [])
    monkeypatch.setattr(GatedStore, "sizes_asked", [])
    monkeypatch.setattr("composer.checkpoint.storage.Storage.__init__.__defaults__", (3, 0.0))

    def build(**arguments: Any) -> RemoteUploaderDownloader:
        arguments = {"use_procs": False, **arguments}
        return RemoteUploaderDownloader("s3://bucket", {"dir": str(tmp_path)}, **arguments)

    return build


def test_files_arrive_and_come_back(
    make: Callable[..., RemoteUploaderDownloader], state: State, file: Path, tmp_path: Path, bucket: Path
) -> None:
    uploader = make(file_path_format_string="{run_name}/rank{rank}/{remote_file_name}")
    logger = Logger(state, [uploader])
    state.callbacks = [uploader]
    engine = Engine(state, logger)
    engine.run_event(Event.INIT)
    logger.upload_file("a/b", file)
    file.write_text("changed in place")
    logger.upload_file("c", file)
    file.unlink()
    engine.run_event(Event.FIT_END)

    assert (bucket / "my-run/rank0/a/b").read_text() == "content"
    assert (bucket / "my-run/rank0/c").read_text() == "changed in place"
    assert uploader.can_upload_files()
    assert uploader.get_uri_for_file("c") == "local://bucket/my-run/rank0/c"
    uploader.download_file("a/b", str(tmp_path / "back"), progress_bar=False)
    assert (tmp_path / "back").read_text() == "content"
    with pytest.raises(FileExistsError):
        uploader.download_file("c", str(tmp_path / "back"), progress_bar=False)
    with pytest.raises(FileNotFoundError):
        uploader.download_file("none", str(tmp_path / "other"), progress_bar=False)
    staging = uploader._staging
    engine.close()
    assert staging is not None
    assert not staging.exists()


def test_it_works_outside_the_loggers_of_a_trainer(
    make: Callable[..., RemoteUploaderDownloader], state: State, file: Path, bucket: Path
) -> None:
    uploader = make()
    logger = Logger(state, [])
    uploader._num_concurrent_uploads = 4
    uploader.init(state, logger)
    state.callbacks.append(uploader)
    engine = Engine(state, logger)
    for number in range(6):
        uploader.upload_file(state=state, remote_file_name=f"shard{number}", file_path=file, overwrite=True)
    engine.run_event(Event.BATCH_END)
    engine.run_event(Event.FIT_END)

    assert sorted(os.listdir(bucket)) == [
        ".credentials_validated_successfully", *(f"shard{number}" for number in range(6)),
    ]  # fmt: skip
    assert uploader.remote_backend.get_uri("shard0") == "local://bucket/shard0"
    assert isinstance(uploader.remote_backend, LibcloudObjectStore)
    with pytest.raises(RuntimeError, match="already initialized"):
        uploader.init(state, logger)
    engine.close()


@pytest.mark.parametrize("event", ["batch_end", "epoch_end", "fit_end"])
def test_a_failure_is_raised_at_the_next_event(
    gated: Callable[..., RemoteUploaderDownloader], state: State, file: Path, event: str
) -> None:
    uploader = gated()
    logger = Logger(state, [])
    uploader.init(state, logger)
    GatedStore.failures.append(PermissionError("not yours"))
    uploader.batch_end(state, logger)
    uploader.upload_file(state, "a", file, overwrite=True)
    with pytest.raises(FileExistsError, match="was already enqueued to be uploaded, but overwrite=False"):
        uploader.upload_file(state, "a", file, overwrite=False)
    GatedStore.gate.set()
    if event != "fit_end":
        while uploader._exception_queue.empty():
            time.sleep(0.01)
    with pytest.raises(PermissionError, match="not yours"):
        getattr(uploader, event)(state, logger)
    with pytest.warns(RuntimeWarning, match="likely due to a worker crash: a") as caught:
        uploader.post_close()
    kept = str(caught[0].message).partition("kept in ")[2].split(". (")[0].rstrip(".")
    assert [Path(kept, name).read_text() for name in os.listdir(kept)] == ["content"]


@pytest.mark.parametrize("event", [Event.BATCH_END, Event.FIT_END])
def test_a_failure_is_a_warning_or_ends_the_run(
    gated: Callable[..., RemoteUploaderDownloader], state: State, file: Path, event: Event
) -> None:
    for on_error in ("warn", "raise"):
        uploader = gated(on_error=on_error)
        state.callbacks = [uploader]
        logger = Logger(state, [uploader])
        engine = Engine(state, logger)
        engine.run_event(Event.INIT)
        GatedStore.failures[:] = [PermissionError("not yours")]
        GatedStore.gate.set()
        logger.upload_file("a", file, overwrite=True)
        while uploader._exception_queue.empty():
            time.sleep(0.01)
        if on_error == "raise":
            with pytest.raises(PermissionError, match="not yours"):
                engine.run_event(event)
        else:
            with pytest.warns(UserWarning, match="not yours.* The run continues"):
                engine.run_event(event)
        with pytest.warns(RuntimeWarning, match="may not have been uploaded"):
            engine.close()
    with pytest.raises(ValueError, match="`on_error` must be 'warn' or 'raise'"):
        gated(on_error="ignore")


def test_a_retried_upload_may_replace_its_own_part(
    gated: Callable[..., RemoteUploaderDownloader], state: State, file: Path, tmp_path: Path
) -> None:
    uploader = gated()
    uploader.init(state, Logger(state, []))
    GatedStore.failures[:] = [ObjectStoreTransientError("busy"), ObjectStoreTransientError("busy")]
    GatedStore.gate.set()
    uploader.upload_file(state, "a", file, overwrite=False)
    uploader.fit_end(state, Logger(state, []))
    assert GatedStore.sizes_asked == ["a"]
    uploader.upload_file(state, "a", file, overwrite=False)
    with pytest.raises(
        FileExistsError, match=r"already exists, but overwrite was set to False\. Pass `overwrite=True` \("
    ):
        uploader.fit_end(state, Logger(state, []))
    with pytest.warns(RuntimeWarning, match="crash: a"):
        uploader.post_close()


def test_the_last_of_many_uploads_wins(
    gated: Callable[..., RemoteUploaderDownloader], state: State, tmp_path: Path
) -> None:
    uploader = gated(num_concurrent_uploads=4)
    uploader.init(state, Logger(state, []))
    for number in range(20):
        (tmp_path / "a").write_text(str(number))
        uploader.upload_file(state, "a", tmp_path / "a", overwrite=True)
    GatedStore.gate.set()
    uploader.post_close()
    assert (tmp_path / "bucket" / "a").read_text() == "19"


def test_a_store_without_progress_is_not_given_up_while_it_works(
    gated: Callable[..., RemoteUploaderDownloader], state: State, file: Path, tmp_path: Path
) -> None:
    uploader = gated()
    uploader.init(state, Logger(state, [], delivery_timeout=0.1))
    uploader.upload_file(state, "a", file, overwrite=True)
    threading.Timer(0.5, GatedStore.gate.set).start()
    uploader.post_close()
    assert (tmp_path / "bucket" / "a").exists()


def test_wrong_credentials_are_found_at_once(
    gated: Callable[..., RemoteUploaderDownloader], state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        raise PermissionError("who are you?")

    monkeypatch.setattr(GatedStore, "upload_object", refuse)
    with pytest.raises(PermissionError, match="who are you"):
        gated().init(state, Logger(state, []))
    with pytest.raises(ValueError, match="num_concurrent_uploads"):
        gated(num_concurrent_uploads=0)
    other = RemoteUploaderDownloader("nowhere://bucket")
    with pytest.raises(ValueError, match="`remote_backend_name` must be one of"):
        _ = other.remote_backend


def _init_without_container(folder: str) -> str:
    kwargs = {"provider": "local", "provider_kwargs": {"key": folder}}
    uploader = RemoteUploaderDownloader("libcloud://nowhere", kwargs, use_procs=False)
    state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="run", dataloader=[], device="cpu")
    try:
        uploader.init(state, Logger(state, []))
    except Exception as error:  # noqa: BLE001 - the test compares it
        return f"{type(error).__name__}: {error}"
    finally:
        uploader.post_close()
    return "went on"


def test_all_ranks_learn_that_the_first_one_cannot_upload(tmp_path: Path) -> None:
    first, second = run_on_ranks(_init_without_container, 2, str(tmp_path))
    assert "nowhere" in first
    assert second == f"RuntimeError: Rank 0 cannot upload to libcloud://nowhere: rank 0: {first}"


class SilentStore(ObjectStore):
    """A store that does not answer."""

    error: ClassVar[type[Exception]]

    def __init__(self, bucket: str) -> None:
        pass

    def upload_object(self, object_name: str, filename: Any, callback: Any = None, **kwargs: Any) -> None:
        raise self.error("no answer")


def _start_run_with_silent_store(error: type[Exception]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SilentStore, "error", error, raising=False)
        patch.setattr("composer.utils.object_store.utils.S3ObjectStore", SilentStore)
        uploader = RemoteUploaderDownloader("s3://bucket", use_procs=False)
        state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="run", dataloader=[], device="cpu")
        state.callbacks = [uploader]
        engine = Engine(state, Logger(state, [uploader]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.run_event(Event.INIT)
        engine.close()
        return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("error", [TimeoutError, ConnectionResetError])
def test_all_ranks_go_on_without_a_store_that_does_not_answer(error: type[Exception]) -> None:
    (first,), (second,) = run_on_ranks(_start_run_with_silent_store, 2, error)
    assert f"`RemoteUploaderDownloader.init` failed: {error.__name__}: no answer. The run continues" in first
    kind = "TimeoutError" if error is TimeoutError else "ConnectionError"
    cause = f"rank 0: {error.__name__}: no answer"
    assert f"failed: {kind}: Rank 0 cannot upload to s3://bucket: {cause}. The run continues" in second


def _init_without_group(folder: str, make: type[RemoteUploader] | type[RemoteUploaderDownloader]) -> str:
    kwargs = {"provider": "local", "provider_kwargs": {"key": folder}}
    state: Any = SimpleNamespace(run_name="run")
    logger: Any = None
    try:
        if issubclass(make, RemoteUploader):
            make("libcloud://nowhere", kwargs).init()
        else:
            make("libcloud://nowhere", kwargs, use_procs=False).init(state, logger)
    except Exception as error:  # noqa: BLE001 - the test compares it
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.parametrize("make", [RemoteUploader, RemoteUploaderDownloader])
def test_without_a_process_group_only_rank_0_checks(make: Any, tmp_path: Path) -> None:
    first, second = run_on_ranks(_init_without_group, 2, str(tmp_path), make, backend=None)
    assert "There is no object local://nowhere" in first
    assert second == "went on"


@pytest.mark.parametrize("make", [RemoteUploader, RemoteUploaderDownloader])
def test_passwords_are_not_told_to_other_ranks(make: Any, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**arguments: Any) -> None:
        raise PermissionError("who are you?")

    monkeypatch.setattr("composer.utils.object_store.utils.SFTPObjectStore", refuse)
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    monkeypatch.setattr("composer.utils.dist.is_initialized", lambda: True)
    reply = [((RuntimeError, "rank 0: PermissionError: who are you?"), None)]
    monkeypatch.setattr("composer.utils.dist.all_gather_object", lambda value: reply)
    uploader = make("sftp://me:secret@host/run")
    with pytest.raises(RuntimeError, match=r"^Rank 0 cannot upload to sftp://me:\.\.\.@host/run: rank 0: Perm"):
        uploader.init(*(() if make is RemoteUploader else (state, Logger(state, []))))


@pytest.mark.parametrize(
    ("uri", "name", "bucket", "arguments"),
    [
        ("s3://b/c", "s3", "b", {"bucket": "b"}),
        ("oci://b@n", "oci", "b", {"bucket": "b@n"}),
        ("sftp://host", "sftp", "host", {"host": "host"}),
        ("sftp://me@host//data", "sftp", "me@host", {"host": "sftp://me@host//data"}),
        ("libcloud://c", "libcloud", "c", {"container": "c"}),
        ("dbfs:/Volumes/a/b/c", "dbfs", "", {"path": "Volumes/a/b/c"}),
    ],
)
def test_what_a_uri_gives(uri: str, name: str, bucket: str, arguments: dict[str, Any]) -> None:
    uploader = RemoteUploaderDownloader(uri, {"more": 1})
    assert (uploader.remote_backend_name, uploader.remote_bucket_name) == (name, bucket)
    assert uploader.backend_kwargs == {**arguments, "more": 1}


@pytest.mark.parametrize(
    ("bucket", "served", "others"),
    [
        ("s3://b/c", ["s3://b", "s3://b/a", "S3://b/c/a"], ["s3://c/a", "gs://b/a", "s3:///a", "b/a", "/b/a"]),
        ("sftp://me@host", ["sftp://me@host/a"], ["sftp://you@host/a", "sftp://host/a"]),
        ("sftp://me@host:23", ["sftp://me@host:23/a"], ["sftp://me@host/a", "sftp://me@host:23//a"]),
        (
            "sftp://me@host//data/",
            ["sftp://me@host//data/a"],
            ["sftp://me@host/data/a", "sftp://me@host//database", "sftp://me@host//a"],
        ),
        ("sftp://host//", ["sftp://host//data/a"], ["sftp://host/data/a"]),
        (
            "sftp://me:secret@host",
            ["sftp://me:other@host/a"],
            ["sftp://host/a", "sftp://me@host:23/a"],
        ),
        ("sftp://h//a%20b", ["sftp://h//a%20b/x"], ["sftp://h//a/x", "sftp://h//a%2520b/x"]),
        ("oci://b@n", ["oci://b@n/a"], ["oci://b@m/a", "oci://b/a"]),
        ("oci://b@", ["oci://b/a", "oci://b@/a"], ["oci://b@n/a"]),
        ("azure://c", ["azure://c/a"], ["azure://d/a", "libcloud://c/a"]),
        ("libcloud://c", ["libcloud://c/a"], ["azure://c/a"]),
    ],
)
def test_an_uploader_serves_the_uris_in_its_bucket(bucket: str, served: list[str], others: list[str]) -> None:
    uploader = RemoteUploaderDownloader(bucket)
    assert [uploader.serves(uri) for uri in served] == [True] * len(served)
    assert [uploader.serves(uri) for uri in others] == [False] * len(others)


@pytest.mark.parametrize(
    "uri",
    ["sftp://me@host/run", "sftp://me@host:23//data/run", "oci://b@n/run", "azure://box/run", "gs://b/run"],
)
def test_an_uploader_for_a_uri_serves_it_and_is_the_only_one(uri: str) -> None:
    made = maybe_create_remote_uploader_downloader_from_uri(uri, [])
    assert made is not None
    assert made.serves(f"{uri}/a")
    with pytest.warns(UserWarning, match="There already exists a RemoteUploaderDownloader object to handle"):
        assert maybe_create_remote_uploader_downloader_from_uri(f"{uri}/b", made) is None


def test_uris_and_names_find_the_same_file(
    make: Callable[..., RemoteUploaderDownloader], state: State, file: Path, tmp_path: Path
) -> None:
    uploader = make(file_path_format_string="{run_name}/{remote_file_name}")
    uploader.init(state, Logger(state, []))
    uploader.upload_file(state, "libcloud://bucket/a", file, overwrite=True)
    uploader.fit_end(state, Logger(state, []))
    for number, name in enumerate(("a", "libcloud://bucket/a")):
        assert uploader.get_uri_for_file(name) == "local://bucket/my-run/a"
        uploader.download_file(name, str(tmp_path / str(number)), progress_bar=False)
        assert (tmp_path / str(number)).read_text() == "content"
    with pytest.raises(ValueError, match=r"a URI in libcloud://bucket, got 's3://me:\.\.\.@other/a'"):
        uploader.get_uri_for_file("s3://me:secret@other/a")
    with pytest.raises(ValueError, match="a URI in libcloud://bucket, got 's3://other/a'"):
        uploader.download_file("s3://other/a", str(tmp_path / "b"), progress_bar=False)


def test_a_name_that_leaves_the_bucket_is_refused_and_leaves_no_copy(
    make: Callable[..., RemoteUploaderDownloader], state: State, file: Path
) -> None:
    first = make()
    first.init(state, Logger(state, []))
    with pytest.raises(ValueError, match="must be relative to the folder and stay in it"):
        first.upload_file(state, "../x", file, overwrite=True)
    second = RemoteUploader("libcloud://bucket", first.backend_kwargs)
    with pytest.raises(ValueError, match="must be relative to the folder and stay in it"):
        second.upload_file_async("../x", file, overwrite=True)
    folders = [first._staging, second._staging]
    first.post_close()
    second.wait_and_close()
    assert [folder is not None and folder.exists() for folder in folders] == [False, False]


def test_messages_about_uris_have_no_passwords() -> None:
    calls: list[Callable[[str], Any]] = [
        RemoteUploader,
        lambda uri: maybe_create_remote_uploader_downloader_from_uri(uri, []),
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=r"as in 'nowhere://me:\.\.\.@host/a'\."):
            call("nowhere://me:secret@host/a")
    first = maybe_create_remote_uploader_downloader_from_uri("sftp://me:secret@host/a", [])
    assert first is not None
    with pytest.warns(UserWarning, match=r"to handle the uri 'sftp://me:\.\.\.@host/b'"):
        maybe_create_remote_uploader_downloader_from_uri("sftp://me:secret@host/b", first)


def test_an_uploader_for_a_uri() -> None:
    make = maybe_create_remote_uploader_downloader_from_uri
    assert make is file_helpers.maybe_create_remote_uploader_downloader_from_uri
    assert make("/data", []) is None
    first = make("s3://bucket/a", [])
    assert first is not None
    assert first.backend_kwargs == {"bucket": "bucket"}
    with pytest.warns(UserWarning, match="There already exists a RemoteUploaderDownloader object to handle"):
        assert make("s3://bucket/b", [first]) is None
    assert make("gs://bucket/b", [first]) is not None
    azure = make("azure://box/b", [])
    assert azure is not None
    assert azure.remote_backend_name == "libcloud"
    assert azure.backend_kwargs["provider"] == "AZURE_BLOBS"
    volume = make("dbfs:/Volumes/a/b/c", [])
    assert volume is not None
    assert volume.backend_kwargs == {"path": "Volumes/a/b/c"}
    for uri in ("wandb://a/b", "nowhere://a"):
        with pytest.raises(NotImplementedError, match="There is no uploader for"):
            make(uri, [])


def test_remote_uploader_in_the_background(s3: str, file: Path, tmp_path: Path) -> None:
    uploader = RemoteUploader(f"{s3}/run", num_concurrent_uploads=1)
    uploader.init()
    found = uploader.check_remote_files_exist_async(["run/a", "run/b"], 60, 0.05)
    first = uploader.upload_file_async("run/a", file, overwrite=False)
    file.write_text("changed")
    second = uploader.upload_file_async("run/b", file, overwrite=False)
    first.result(60)
    second.result(60)
    assert found.result(60) is RemoteFilesExistingCheckStatus.EXIST
    uploader.check_workers()
    assert uploader.futures == []
    bucket = storage_of(s3)
    assert (bucket.read_text("run/a"), bucket.read_text("run/b")) == ("content", "changed")
    assert bucket.exists(".credentials_validated_successfully")
    late = uploader.check_remote_files_exist_async(["run/none"], 0.05, 0.01)
    assert late.result(60) is RemoteFilesExistingCheckStatus.TIMEOUT
    uploader.upload_file_async("run/a", file, overwrite=False)
    with pytest.raises(FileExistsError, match="already exists, but overwrite was set to False"):
        uploader.wait()
    assert uploader.futures == []
    failed = uploader.check_remote_files_exist_async(["/run/a"], 60, 0.01)
    assert failed.result(60) is RemoteFilesExistingCheckStatus.ERROR
    other = uploader.check_remote_files_exist_async(["run/b"], 60, 0.01)
    assert other.result(60) is RemoteFilesExistingCheckStatus.EXIST
    uploader.upload_file_async("run/a", file, overwrite=True).result(60)
    again = uploader.check_remote_files_exist_async(["run/a"], 60, 0.01)
    assert again.result(60) is RemoteFilesExistingCheckStatus.EXIST
    uploader.wait_and_close()


def test_a_watch_for_files_leaves_no_thread_and_names_what_is_missing(
    bucket: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (bucket / "a").write_text("content")
    uploader = RemoteUploader(
        "libcloud://bucket", {"provider": "local", "provider_kwargs": {"key": str(bucket.parent)}}
    )
    before = {*threading.enumerate()}
    for names, expected in ((["a"], "EXIST"), (["a", "b"], "TIMEOUT")):
        outcome = uploader.check_remote_files_exist_async(names, 0.05, 0.01).result(30)
        assert RemoteFilesExistingCheckStatus[expected] is outcome

    end = time.monotonic() + 5  # half of the time that a first check may take
    while {*threading.enumerate()} - before:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert [": b"] == [text[-3:] for text in caplog.messages if "did not appear" in text]


def test_remote_uploader_checks_its_arguments(tmp_path: Path) -> None:
    uploader = RemoteUploader("azure://box/run")
    assert (uploader.remote_backend_name, uploader.remote_bucket_name, uploader.path) == ("libcloud", "box", "run")
    assert uploader.backend_kwargs["container"] == "box"
    for uri in ("wandb://a/b", "nowhere://a"):
        with pytest.raises(NotImplementedError, match="There is no uploader for"):
            RemoteUploader(uri)
    for name in ("num_concurrent_uploads", "num_attempts"):
        with pytest.raises(ValueError, match=name):
            RemoteUploader("s3://bucket", **{name: 0})
    with pytest.raises(ValueError, match="must be a URI"):
        RemoteUploader(str(tmp_path))


PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace
from composer.loggers import RemoteUploaderDownloader

if __name__ == "__main__":
    kwargs = {"provider": "local", "provider_kwargs": {"key": sys.argv[1]}}
    uploader, state = RemoteUploaderDownloader("libcloud://bucket", kwargs), SimpleNamespace(run_name="a")
    uploader.init(state, None)
    uploader.upload_file(state, "a", Path(sys.argv[2]), overwrite=True)
"""


def test_a_program_that_ends_waits_for_its_uploads(bucket: Path, file: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), str(bucket.parent), str(file)], check=True, timeout=60
    )
    assert (bucket / "a").read_text() == "content"
