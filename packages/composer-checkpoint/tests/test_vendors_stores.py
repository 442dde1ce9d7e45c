"""Folders of Google Cloud Storage and of servers of SSH, on loopback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from composer.checkpoint.download import get_file
from composer.checkpoint.storage import bucket_of, direct_storage, storage_of
from composer.testing.servers import serve_gcs


@pytest.mark.parametrize("scheme", ["sftp", "ssh"])
def test_uris_of_sftp_are_only_for_known_hosts(
    scheme: str, sftp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{scheme}://me@127.0.0.1:{sftp.port}{tmp_path}/run"
    key = os.environ["COMPOSER_SFTP_KEY_FILE"]
    storage = storage_of(uri)
    storage.check_writable()
    storage.write_text("sub/a", "x")
    storage.write_text("sub/a", "x")
    assert (tmp_path / "run" / "sub" / "a").read_text() == "x"
    assert storage.uri("sub/a") == f"{uri}/sub/a"
    assert storage.to_folder("sub").find() == ["a"]
    assert storage_of(uri, key_filename=key).find() == ["sub/a"]
    assert bucket_of(uri).read_text(f"{str(tmp_path)[1:]}/run/sub/a") == "x"
    get_file(f"{uri}/sub/a", tmp_path / "back", progress_bar=False)
    assert (tmp_path / "back").read_text() == "x"

    known = tmp_path / "known_hosts"
    _, _, blob = known.read_text().partition(" ")
    known.write_text(f"elsewhere {blob}")
    monkeypatch.setattr("composer.checkpoint.storage._BACKOFF_SECONDS", 600.0)
    for storage in (storage_of(uri), bucket_of(uri), storage_of(uri, key_filename=key), direct_storage(uri)):
        with pytest.raises(PermissionError, match=r"is not in .*known_hosts\. Its key is ssh-rsa SHA256:") as caught:
            storage.exists("a")
        assert "network" not in str(caught.value)


def test_a_host_with_another_key_is_refused_at_once(sftp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import paramiko

    another = paramiko.RSAKey.generate(1024)
    (tmp_path / "known_hosts").write_text(f"[127.0.0.1]:{sftp.port} ssh-rsa {another.get_base64()}\n")
    storage = storage_of(f"sftp://me@127.0.0.1:{sftp.port}/run")
    monkeypatch.setattr("composer.checkpoint.storage._BACKOFF_SECONDS", 600.0)
    with pytest.raises(OSError, match=r"Host key for server .* does not match"):
        storage.exists("a")


@pytest.mark.parametrize("variable", ["COMPOSER_SFTP_KNOWN_HOSTS_FILE", "COMPOSER_SFTP_KEY_FILE"])
def test_a_missing_file_of_keys_is_named(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match=f"The variable `{variable}` must name a file, got '{tmp_path}/none'"):
        storage_of("sftp://host/run")


def test_options_that_a_connection_to_sftp_does_not_have_are_refused(sftp: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="host_key_policy"):
        storage_of(f"sftp://me@127.0.0.1:{sftp.port}{tmp_path}", host_key_policy="auto_add").find()
    with pytest.raises(ValueError, match="`timeout` must be"):
        storage_of("sftp://host/run", timeout=0)


@pytest.mark.parametrize("kind", ["emulator", "key"])
def test_uris_of_google(kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_gcs() as address:
        bucket = "bucket"
        if kind == "emulator":
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        else:
            bucket = request.getfixturevalue("s3").removeprefix("s3://")
            monkeypatch.setenv("GCS_KEY", "key")
            monkeypatch.setenv("GCS_SECRET", "secret")
        storage = storage_of(f"gs://{bucket}/run")
        storage.write_text("sub/a", "x")
        assert storage.find() == ["sub/a"]
        assert bucket_of(f"gs://{bucket}/run").read_text("run/sub/a") == "x"


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///x", "s3:/bucket/x", "gs://", "oci:///x", "azure://", "sftp:///x", "S3://"]
)
def test_a_uri_without_a_bucket_is_refused_at_once(uri: str) -> None:
    for call in (storage_of, bucket_of):
        with pytest.raises(ValueError, match=f"`uri` must name a bucket, container or host, as in '{uri[:2].lower()}"):
            call(uri)


def test_a_volume_of_databricks_needs_another_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.checkpoint.storage.entry_points", lambda group: [])
    with pytest.raises(ModuleNotFoundError, match=r"^dbfs:/Volumes/a needs .* Run `pip install composer-compat`\."):
        storage_of("dbfs:/Volumes/a")
    storage_of("memory://bucket").check_writable()
