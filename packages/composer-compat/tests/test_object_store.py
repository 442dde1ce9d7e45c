"""Object stores, on a real server of S3, in memory and on the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

import composer.utils
from composer.checkpoint.storage import StorageError
from composer.utils import get_file, maybe_create_object_store_from_uri
from composer.utils.object_store import (
    FsspecObjectStore,
    GCSObjectStore,
    ObjectStore,
    ObjectStoreTransientError,
    S3ObjectStore,
)


@pytest.fixture(autouse=True)
def _clean_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(params=["memory", "file", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "s3":
        bucket = request.getfixturevalue("s3").removeprefix("s3://")
        return S3ObjectStore(bucket, "/runs/", "us-east-1", client_config={"connect_timeout": 5})
    return FsspecObjectStore({"memory": "memory://bucket/runs", "file": f"file://{tmp_path}/store"}[request.param])


def test_objects_come_back_as_they_went(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))
    told: list[tuple[int, int]] = []
    with store:
        store.upload_object("ckpt/ep1.pt", tmp_path / "a", lambda done, total: told.append((done, total)))
        store.upload_object("ckpt/old/ep0.pt", tmp_path / "a")
        store.upload_object("log", tmp_path / "a")
        store.download_object("ckpt/ep1.pt", tmp_path / "b", callback=lambda done, total: told.append((done, total)))

        assert bytes(1000) == (tmp_path / "b").read_bytes()
        assert 2 == told.count((1000, 1000))
        assert 1000 == store.get_object_size("log")
        assert ["ckpt/ep1.pt", "ckpt/old/ep0.pt", "log"] == store.list_objects()
        assert ["ckpt/ep1.pt", "ckpt/old/ep0.pt"] == store.list_objects("ck") == store.list_objects("ckpt/")
        assert ["ckpt/ep1.pt"] == store.list_objects("ckpt/e")
        assert [] == store.list_objects("none/at/all")


def test_what_is_missing_or_in_the_way_is_an_error(store: ObjectStore, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such object"):
        store.get_object_size("none")
    with pytest.raises(FileNotFoundError, match="there is no such object"):
        store.download_object("none", tmp_path / "a")
    (tmp_path / "a").write_text("x")
    store.upload_object("a", tmp_path / "a")
    with pytest.raises(FileExistsError, match=r"a' already exists, and overwrite is set to False\."):
        store.download_object("a", tmp_path / "a")
    store.download_object("a", tmp_path / "a", overwrite=True)


def test_uris_name_objects(uninstall: Callable[[str], None]) -> None:
    assert "s3://bucket/runs/a" == S3ObjectStore("bucket", "runs").get_uri("a")
    assert "s3://bucket/a" == S3ObjectStore("bucket").get_uri("a")
    assert "S3ObjectStore(Storage('s3://bucket'))" == repr(S3ObjectStore("bucket"))
    uninstall("gcsfs")
    with pytest.raises(ModuleNotFoundError, match=r"gs://bucket/runs needs a package .*gcsfs"):
        GCSObjectStore("bucket", "runs")


def test_an_argument_reaches_the_server(s3: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "S3_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    bucket = s3.removeprefix("s3://")
    store = S3ObjectStore(
        bucket, endpoint_url=s3_server.endpoint, aws_access_key_id="k", aws_secret_access_key="s", aws_session_token="t"
    )
    store.upload_object("a", __file__)

    assert ["a"] == store.list_objects()


def test_a_store_is_made_from_a_uri(tmp_path: Path, uninstall: Callable[[str], None]) -> None:
    assert maybe_create_object_store_from_uri("/data/a") is None
    made = maybe_create_object_store_from_uri("s3://bucket/a/b")
    assert isinstance(made, S3ObjectStore)
    assert "s3://bucket/a/b" == made.get_uri("a/b")
    local = maybe_create_object_store_from_uri(f"file://{tmp_path}/a")
    assert local is not None
    local.upload_object(f"{tmp_path}/a".lstrip("/"), __file__)
    assert ["a"] == os.listdir(tmp_path)
    assert f"file://{tmp_path}/a" == local.get_uri(f"{tmp_path}/a".lstrip("/"))
    uninstall("gcsfs")
    with pytest.raises(ModuleNotFoundError, match="gcsfs"):
        maybe_create_object_store_from_uri("gs://bucket/a")
    for uri in ("wandb://entity/project", "nowhere://a"):
        with pytest.raises(NotImplementedError, match="There is no object store for"):
            maybe_create_object_store_from_uri(uri)


def test_a_checkpoint_comes_from_an_object_store(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "latest.symlink").write_text("run/ep1.pt")
    (tmp_path / "a").write_text("x")
    store.upload_object("run/ep1.pt", tmp_path / "a")
    store.upload_object("run/latest.symlink", tmp_path / "latest.symlink")
    get_file("run/latest", tmp_path / "b", store, progress_bar=False)

    assert "x" == (tmp_path / "b").read_text()


def test_a_store_that_is_gone_is_a_transient_error(
    stoppable_s3: tuple[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, server = stoppable_s3
    store = S3ObjectStore(uri.removeprefix("s3://"))
    monkeypatch.setattr("composer.checkpoint.storage._BACKOFF_SECONDS", 0.01)
    server.go_away()
    with pytest.raises(ObjectStoreTransientError, match="Could not look up") as caught:
        store.get_object_size("a")

    assert isinstance(caught.value, StorageError)


@pytest.mark.parametrize(
    "name",
    [
        "GCSObjectStore", "ObjectStore", "ObjectStoreTransientError", "S3ObjectStore", "extract_path_from_symlink",
        "get_file", "maybe_create_object_store_from_uri",
    ],
)  # fmt: skip
def test_the_names_are_found_in_composer_utils(name: str) -> None:
    assert name == getattr(composer.utils, name).__name__
