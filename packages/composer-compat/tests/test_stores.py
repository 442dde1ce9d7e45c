"""The object store of each vendor, with the vendor's client, against a server on loopback."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from store_servers import FolderStore, serve_oci

from composer.checkpoint import storage as storages
from composer.checkpoint.storage import storage_of
from composer.core import State
from composer.loggers import Logger, RemoteUploaderDownloader
from composer.testing.servers import serve_gcs
from composer.utils import RemoteUploader, file_helpers
from composer.utils.object_store import (
    FsspecObjectStore,
    GCSObjectStore,
    LibcloudObjectStore,
    MLFlowObjectStore,
    ObjectStore,
    ObjectStoreTransientError,
    OCIObjectStore,
    S3ObjectStore,
    SFTPObjectStore,
    UCObjectStore,
    build_remote_backend,
)
from composer.utils.object_store.storages import storage_in

RUN = "databricks/mlflow-tracking/{mlflow_experiment_id}/{mlflow_run_id}/artifacts/x"


@pytest.fixture
def oci(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    kinds = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "key.pem").write_bytes(key.private_bytes(*kinds))
    values = {
        "user": "ocid1.user.oc1..aaaa",
        "fingerprint": ":".join(["00"] * 16),
        "key_file": str(tmp_path / "key.pem"),
        "tenancy": "ocid1.tenancy.oc1..aaaa",
        "region": "us-ashburn-1",
    }
    (tmp_path / "config").write_text("\n".join(["[DEFAULT]", *(f"{name}={value}" for name, value in values.items())]))
    monkeypatch.setenv("OCI_CONFIG_FILE", str(tmp_path / "config"))
    with serve_oci() as server:
        # The client has no setting for another server in its file.
        monkeypatch.setattr("oci.regions.endpoint_for", lambda *args, **kwargs: server.address)
        yield server


@pytest.fixture
def make_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that makes the store of a kind, and starts its server."""

    def make(kind: str) -> ObjectStore:
        if kind == "s3":
            return S3ObjectStore(request.getfixturevalue("s3").removeprefix("s3://"), "/runs/")
        if kind == "gcs":
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", request.getfixturevalue("gcs"))
            return GCSObjectStore("bucket", f"/{tmp_path.name}/")
        if kind == "gcs with a key":
            bucket = request.getfixturevalue("s3").removeprefix("s3://")
            monkeypatch.setenv("GCS_KEY", "key")
            monkeypatch.setenv("GCS_SECRET", "secret")
            return GCSObjectStore(bucket, "runs")
        if kind == "sftp":
            port = request.getfixturevalue("sftp").port
            return SFTPObjectStore(
                f"sftp://me@127.0.0.1:{port}/it's a folder; # ?".replace("?", "%3F").replace("#", "%23")
            )
        if kind == "libcloud":
            (tmp_path / "libcloud" / "container").mkdir(parents=True)
            return LibcloudObjectStore("local", "container", provider_kwargs={"key": str(tmp_path / "libcloud")})
        if kind == "uc":
            request.getfixturevalue("databricks")
            return UCObjectStore("Volumes/catalog/schema/volume/unused")
        if kind == "mlflow":
            request.getfixturevalue("mlflow")
            return MLFlowObjectStore(RUN)
        request.getfixturevalue("oci")
        return OCIObjectStore("bucket", "runs")

    return make


@pytest.fixture(scope="module")
def gcs() -> Iterator[str]:
    with serve_gcs() as address:
        yield address


KINDS = ["s3", "gcs", "gcs with a key", "sftp", "libcloud", "uc", "mlflow", "oci"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_keeps_the_contract(kind: str, make_store: Callable[..., Any], tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    (tmp_path / "a").write_bytes(b"x" * 1000)
    with make_store(kind) as store:
        store.upload_object("ckpt/ep1 it's.pt", tmp_path / "a", lambda done, total: told.append((done, total)))
        store.upload_object(object_name="ckpt/old/ep0.pt", filename=str(tmp_path / "a"))
        store.download_object("ckpt/ep1 it's.pt", tmp_path / "new" / "b", callback=lambda *now: told.append(now))

        assert (tmp_path / "new" / "b").read_bytes() == b"x" * 1000
        assert [file.name for file in (tmp_path / "new").iterdir()] == ["b"]
        assert told.count((1000, 1000)) == 2
        assert store.get_object_size("ckpt/ep1 it's.pt") == 1000
        assert store.list_objects("ckpt/") == ["ckpt/ep1 it's.pt", "ckpt/old/ep0.pt"]
        assert store.list_objects("ckpt/e") == ["ckpt/ep1 it's.pt"]
        assert store.list_objects("none/at/all") == []
        store.upload_object("log", tmp_path / "a")
        (tmp_path / "a").write_text("newer")
        store.upload_object("log", tmp_path / "a")
        with pytest.raises(FileExistsError, match="overwrite is set to False"):
            store.download_object("log", tmp_path / "new" / "b")
        store.download_object("log", tmp_path / "new" / "b", overwrite=True)
        assert (tmp_path / "new" / "b").read_text() == "newer"
        for call in (store.get_object_size, lambda name: store.download_object(name, tmp_path / "new" / "c")):
            with pytest.raises(FileNotFoundError):
                call("none")
        assert not (tmp_path / "new" / "c").exists()
        assert store.get_uri("a/b").endswith("/a/b")


@pytest.mark.parametrize("kind", ["libcloud", "uc"])
def test_a_missing_object_leaves_no_folder(kind: str, make_store: Callable[..., Any], tmp_path: Path) -> None:
    store = make_store(kind)
    with pytest.raises(FileNotFoundError):
        store.download_object("none", tmp_path / "new" / "a")
    assert not (tmp_path / "new").exists()
    (tmp_path / "a").touch()
    with pytest.raises(FileExistsError):
        store.download_object("none", tmp_path / "a")


@pytest.mark.parametrize("kind", ["libcloud", "uc", "mlflow"])
def test_a_store_without_fsspec_is_a_storage(kind: str, make_store: Callable[..., Any], tmp_path: Path) -> None:
    store = make_store(kind)
    storage = storage_in(lambda: store, store.get_uri("run").replace("dbfs:", "dbfs://"), "run")
    storage.check_writable()
    storage.write_text("latest.symlink", "a")
    (tmp_path / "a").write_bytes(b"0123456789")
    storage.upload(tmp_path / "a", "old/a")

    assert storage.read_text("latest.symlink") == "a"
    assert storage.read_text("old/a") == "0123456789"
    assert storage.exists("old/a")
    assert not storage.exists("old/b")
    assert storage.find("old/") == ["old/a"]
    assert "latest.symlink" in storage.find()
    assert "a" not in storage.find()
    assert storage.write_new_text("b", "x") is None
    with pytest.raises(PermissionError, match="cannot be removed"):
        storage.delete("old/a")


@pytest.mark.parametrize(
    ("kind", "uri"),
    [
        ("s3", "s3://"),
        ("gcs", "gs://bucket/"),
        ("libcloud", "local://container/a"),
        ("uc", "dbfs:/Volumes/catalog/schema/volume/a"),
        ("mlflow", "dbfs:/databricks/mlflow-tracking/"),
        ("sftp", "sftp://me@127.0.0.1:"),
        ("oci", "oci://bucket/runs/a"),
    ],
)
def test_uris(kind: str, uri: str, make_store: Callable[..., Any]) -> None:
    assert make_store(kind).get_uri("a").startswith(uri)


@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [
        ("s3", "s3fs", "s3"),
        ("oci", "ocifs", "oci"),
        ("sftp", "paramiko", "sftp"),
        ("libcloud", "libcloud", "libcloud"),
        ("uc", "databricks.sdk", "databricks"),
        ("mlflow", "mlflow", "mlflow"),
        ("gcs with a key", "s3fs", "s3"),
    ],
)
def test_a_missing_client_names_the_extra(
    kind: str, module: str, extra: str, make_store: Callable[..., Any], uninstall: Callable[[str], None]
) -> None:
    make_store("s3" if "key" in kind else kind)
    uninstall(module)
    make_again: dict[str, Callable[[], Any]] = {
        "libcloud": lambda: LibcloudObjectStore("local", "a"),
        "mlflow": lambda: MLFlowObjectStore(RUN),
        "uc": lambda: UCObjectStore("Volumes/a/b/c"),
        "sftp": lambda: SFTPObjectStore("host"),
        "oci": lambda: OCIObjectStore("bucket"),
        "s3": lambda: S3ObjectStore("bucket"),
        "gcs with a key": lambda: make_store("gcs with a key"),
    }
    with pytest.raises(ImportError, match=rf"\[{extra}\]|'{extra}'"):
        make_again[kind]()


def test_arguments_of_s3(s3: str, s3_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"connect_timeout": 5, "retries": {"mode": "standard"}}
    transfers = {"multipart_chunksize": 5 << 20, "max_concurrency": 2}
    bucket = s3.removeprefix("s3://")
    store = S3ObjectStore(bucket, "a", client_config=config, transfer_config=transfers)
    (tmp_path / "big").write_bytes(bytes(11 << 20))
    parts: list[int] = []
    store.upload_object(
        "big", tmp_path / "big", lambda done, total: parts.append(done), ExtraArgs={"Metadata": {"k": "v"}}
    )

    head = store.client.head_object(Bucket=bucket, Key=store.get_key("big"))
    assert head["Metadata"] == {"k": "v"}
    assert head["ETag"].endswith('-3"')  # parts
    assert (store.bucket, store.prefix, store.transfer_config) == (bucket, "a/", transfers)
    assert config == {"connect_timeout": 5, "retries": {"mode": "standard"}}
    assert S3ObjectStore(bucket).client.meta.config.retries["mode"] == "adaptive"
    with pytest.raises(ValueError, match="no option but `ExtraArgs`, got Config"):
        store.upload_object("b", tmp_path / "big", Config=1)
    with pytest.raises(ValueError, match="got use_threads"):
        S3ObjectStore(bucket, transfer_config={"use_threads": False})


@pytest.mark.parametrize("kind", ["s3", "gcs with a key"])
def test_what_s3_refuses_is_missing(kind: str, make_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(kind)
    from s3fs import S3FileSystem

    async def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("Forbidden")

    monkeypatch.setattr(S3FileSystem, "_call_s3", refuse)
    with pytest.raises(FileNotFoundError if kind == "s3" else OSError, match="The store refuses it"):
        store.get_object_size("a")


def test_google_credentials_are_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GCS_KEY", "GCS_SECRET", "STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    with pytest.raises(ValueError, match="No Google Cloud credentials were found"):
        GCSObjectStore("bucket")


def test_a_store_of_oci_without_its_bucket_or_configuration(
    oci: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = OCIObjectStore("nowhere")
    assert store.namespace == "my-namespace"
    with pytest.raises(ValueError, match="BucketNotFound"):
        store.list_objects()
    other = OCIObjectStore("bucket@other")
    assert (other.bucket, other.namespace, other.get_uri("a")) == ("bucket", "other", "oci://bucket@other/a")
    monkeypatch.setenv("OCI_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="Set `OCI_CONFIG_FILE`"):
        OCIObjectStore("bucket")


def test_uris_of_oci_name_the_same_objects(oci: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    OCIObjectStore("bucket", "runs").upload_object("a", tmp_path / "a")
    for bucket in ("bucket", "bucket@my-namespace"):
        storage = storage_of(f"oci://{bucket}/runs")
        storage.upload(tmp_path / "a", "b")
        assert (storage.find(), storage.read_text("b"), storage.exists("c")) == (["a", "b"], "x", False)


def test_an_unknown_host_is_refused(sftp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "known_hosts").write_text("")
    store = SFTPObjectStore("127.0.0.1", sftp.port, "me")
    monkeypatch.setattr(storages, "_BACKOFF_SECONDS", 0.0)
    with pytest.raises(OSError, match=r"is not in .*known_hosts\. Its key is ssh-rsa SHA256:"):
        store.get_object_size("a")
    accepting = SFTPObjectStore(
        "127.0.0.1", sftp.port, "me", missing_host_key_policy="AutoAddPolicy", cwd=str(tmp_path)
    )
    accepting.upload_object("a", tmp_path / "known_hosts")
    assert "a" in os.listdir(tmp_path)
    with pytest.raises(ValueError, match="`missing_host_key_policy` must be"):
        SFTPObjectStore("host", missing_host_key_policy="Whatever")


@pytest.mark.parametrize("scheme", ["sftp", "ssh"])
def test_stores_of_uris_of_sftp_are_only_for_known_hosts(
    scheme: str, sftp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"{scheme}://me@127.0.0.1:{sftp.port}{tmp_path}/run"
    store = file_helpers.maybe_create_object_store_from_uri(uri)
    assert isinstance(store, SFTPObjectStore)
    name = f"{str(tmp_path)[1:]}/run/sub/a"
    store.upload_object(name, tmp_path / "known_hosts")
    assert FsspecObjectStore(uri).list_objects() == ["sub/a"]
    assert store.get_object_size(name) == (tmp_path / "known_hosts").stat().st_size
    assert file_helpers.list_remote_objects(f"{uri}/sub") == [name]

    known = tmp_path / "known_hosts"
    _, _, blob = known.read_text().partition(" ")
    known.write_text(f"elsewhere {blob}")
    monkeypatch.setattr(storages, "_BACKOFF_SECONDS", 0.0)
    for refused in (FsspecObjectStore(uri), file_helpers.maybe_create_object_store_from_uri(uri)):
        with pytest.raises(OSError, match=r"is not in .*known_hosts\. Its key is ssh-rsa SHA256:"):
            refused.get_object_size("a")


def test_an_uploader_takes_uris_in_its_folder_of_sftp(sftp: Any, tmp_path: Path) -> None:
    host = f"sftp://me@127.0.0.1:{sftp.port}"
    (tmp_path / "a").write_text("x")
    (tmp_path / "data").mkdir()
    state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="run", dataloader=[], device="cpu")
    folders = (f"{host}/{tmp_path}/data", f"{host}/data", host)
    for number, bucket in enumerate(folders):  # home is `tmp_path`
        uploader = RemoteUploaderDownloader(bucket, use_procs=False)
        uploader.init(state, Logger(state, []))
        uploader.upload_file(state, f"{bucket}/run/{number}", tmp_path / "a", overwrite=False)
        assert uploader.serves(uploader.get_uri_for_file("x"))
        uploader.post_close()

    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("run/*"))
    assert written == ["data/run/0", "data/run/1", "run/2"]


@pytest.mark.parametrize("name", ["known_hosts_filename", "key_filename"])
def test_a_missing_file_of_keys_is_named(name: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=f"`{name}`, .* must name a file, got '{missing}'"):
        SFTPObjectStore("host", **{name: missing})


@pytest.mark.parametrize(
    ("host", "arguments", "match"),
    [
        ("sftp://me@host", {"username": "you"}, "`username` must be given once"),
        ("sftp://host:23", {"port": 24}, "`port` must be given once"),
        ("sftp://host/a", {"cwd": "b"}, "`cwd` must be given once"),
        ("ssh://host", {}, "begins with 'sftp://'"),
        ("sftp://host/a?b=c", {}, "without a query"),
    ],
)
def test_a_wrong_host_is_refused(host: str, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        SFTPObjectStore(host, **arguments)


@pytest.mark.parametrize("kind", [S3ObjectStore, GCSObjectStore, OCIObjectStore])
def test_a_wrong_bucket_is_refused_at_once(kind: Callable[..., Any]) -> None:
    for bucket in ("", "/", "bucket/folder", "s3://bucket"):
        with pytest.raises(ValueError, match="`bucket` must be the name of a bucket, got "):
            kind(bucket)
    with pytest.raises(TypeError, match="`bucket` must be a string, the name of a bucket, got None"):
        kind(None)


def test_a_store_of_oci_must_name_its_bucket_and_need_not_name_a_namespace(oci: Any) -> None:
    with pytest.raises(ValueError, match="`bucket` must name the bucket, as in 'bucket@namespace', got '@namespace'"):
        OCIObjectStore("@namespace")
    store = OCIObjectStore("bucket@")
    assert (store.bucket, store.namespace, store.get_uri("a")) == ("bucket", "my-namespace", "oci://bucket/a")


def test_uris_of_sftp_tell_the_root_from_the_home() -> None:
    uris = [SFTPObjectStore(host).get_uri("x") for host in ("sftp://h", "sftp://h/", "sftp://h//", "sftp://h//data/")]
    assert uris == ["sftp://h/x", "sftp://h/x", "sftp://h//x", "sftp://h//data/x"]


def test_messages_about_a_wrong_host_have_no_passwords() -> None:
    for host in ("ssh://me:secret@host", "sftp://me:secret@host/a?b=c"):
        with pytest.raises(ValueError, match=r"://me:\.\.\.@host") as caught:
            SFTPObjectStore(host)
        assert "secret" not in str(caught.value)


def test_a_store_without_its_container_or_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`container` must be the name of a container, got ''"):
        LibcloudObjectStore("local", "", provider_kwargs={"key": str(tmp_path)})
    with pytest.raises(ValueError, match="`host` must be a host"):
        SFTPObjectStore("")


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///x", "s3:/bucket/x", "gs://", "oci:///x", "azure://", "sftp:///x", "S3://"]
)
def test_a_uri_without_a_bucket_is_refused_at_once(uri: str, tmp_path: Path) -> None:
    calls: list[Callable[[str], Any]] = [
        FsspecObjectStore,
        file_helpers.maybe_create_object_store_from_uri,
        file_helpers.list_remote_objects,
        RemoteUploaderDownloader,
        RemoteUploader,
        lambda uri: file_helpers.maybe_create_remote_uploader_downloader_from_uri(uri, []),
        lambda uri: file_helpers.get_file(f"{uri}/a".replace("///a", "//"), tmp_path / "a", progress_bar=False),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=f"`uri` must name a bucket, container or host, as in '{uri[:2].lower()}"):
            call(uri)


def test_errors_of_libcloud(tmp_path: Path, make_store: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from libcloud.common.types import LibcloudError

    store = make_store("libcloud")
    (tmp_path / "a").write_text("x")
    for error, expected in (
        (LibcloudError("Unexpected status code, status code: 503"), ObjectStoreTransientError),
        (LibcloudError("status code: 400"), LibcloudError),
        (TimeoutError("slow"), ObjectStoreTransientError),
    ):

        def fail(*args: Any, error: Exception = error, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr(type(store._driver), "upload_object_via_stream", fail)
        with pytest.raises(expected):
            store.upload_object("a", tmp_path / "a")
    with pytest.raises(ValueError, match="`provider` must be one of"):
        LibcloudObjectStore("nowhere", "a")
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ValueError, match="Set `MY_KEY`"):
        LibcloudObjectStore("s3", "a", key_environ="MY_KEY")


def test_names_and_errors_of_unity_catalog(databricks: Any, tmp_path: Path) -> None:
    from databricks.sdk.errors import PermissionDenied

    store = UCObjectStore("/Volumes/catalog/schema/volume/run")
    assert store.prefix == "Volumes/catalog/schema/volume"
    assert store.get_uri("Volumes/catalog/schema/volume/a") == store.get_uri("a")
    (tmp_path / "a").write_text("x")
    databricks.failures = [(403, "PERMISSION_DENIED")]
    with pytest.raises(PermissionDenied):
        store.get_object_size("a")
    databricks.failures = [(400, "INVALID_STATE")]
    with pytest.raises(ObjectStoreTransientError):
        store.get_object_size("a")
    for path, match in (("a/b", 'should start with "Volumes"'), ("Volumes/a/b", "must be of the form")):
        with pytest.raises(ValueError, match=match):
            UCObjectStore.validate_path(path)
    with pytest.raises(ValueError, match="must be in the volume"):
        store.get_uri("Volumes/other/schema/volume/a")


def test_names_and_errors_of_mlflow(mlflow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MLFlowObjectStore(RUN)
    full = f"databricks/mlflow-tracking/{store.experiment_id}/{store.run_id}/artifacts/a/b"
    assert store.get_dbfs_path("a/b") == full
    assert store.get_artifact_path(full) == "a/b"
    assert MLFlowObjectStore.parse_dbfs_path(full) == (store.experiment_id, store.run_id, "a/b")
    again = MLFlowObjectStore(full)
    assert (again.experiment_id, again.run_id) == (store.experiment_id, store.run_id)
    assert MLFlowObjectStore(RUN).experiment_id == store.experiment_id
    with pytest.raises(ValueError, match="must be in experiment"):
        store.get_artifact_path("databricks/mlflow-tracking/1/2/artifacts/a")
    with pytest.raises(ValueError, match="must name the experiment"):
        MLFlowObjectStore("databricks/mlflow-tracking/{mlflow_experiment_id}/2/artifacts/a")
    with pytest.raises(ValueError, match="must be of the form"):
        MLFlowObjectStore("databricks/mlflow-tracking/1/2")
    with pytest.raises(FileNotFoundError):
        MLFlowObjectStore(full.replace(store.run_id, "none")).list_objects()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost")
    with pytest.raises(ValueError, match="`MLFLOW_TRACKING_URI` must be 'databricks'"):
        MLFlowObjectStore(RUN)


def test_build_remote_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mlflow: None, databricks: Any) -> None:
    kinds = {
        "s3": ({"bucket": "a"}, S3ObjectStore),
        "libcloud": (
            {"provider": "local", "container": "a", "provider_kwargs": {"key": str(tmp_path)}},
            LibcloudObjectStore,
        ),
        "sftp": ({"host": "a"}, SFTPObjectStore),
    }
    for name, (arguments, kind) in kinds.items():
        assert type(build_remote_backend(name, arguments)) is kind
    assert type(build_remote_backend("dbfs", {"path": "Volumes/a/b/c"})) is UCObjectStore
    assert type(build_remote_backend("dbfs", {"path": RUN})) is MLFlowObjectStore
    monkeypatch.setattr("composer.utils.object_store.utils.S3ObjectStore", dict)
    assert build_remote_backend("s3", {"bucket": "a"}) == {"bucket": "a"}
    with pytest.raises(ValueError, match="must be one of dbfs, gs, libcloud, oci, s3, sftp, got 'wandb'"):
        build_remote_backend("wandb", {})


def test_a_users_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storages, "_BACKOFF_SECONDS", 0.0)
    (tmp_path / "there" / "run").mkdir(parents=True)
    (tmp_path / "there" / "run" / "a").write_text("x")
    store = FolderStore(tmp_path / "there", failures=2)
    file_helpers.get_file("run/a", tmp_path / "b", store, progress_bar=False)
    assert store.calls == 3
    assert (tmp_path / "b").read_text() == "x"
    with pytest.raises(ObjectStoreTransientError, match="busy"):
        file_helpers.get_file("run/a", tmp_path / "c", FolderStore(tmp_path / "there", failures=3), progress_bar=False)
    with pytest.raises(FileNotFoundError):
        file_helpers.get_file("none", tmp_path / "c", store, progress_bar=False)

    monkeypatch.setitem(
        file_helpers.BACKEND_TO_OBJECT_STORE_FACTORY, "mine", lambda bucket, path: FolderStore(tmp_path / bucket)
    )
    file_helpers.get_file("mine://there/run/a", tmp_path / "c", progress_bar=False)
    assert (tmp_path / "c").read_text() == "x"
    storage_of("mine://there/run").write_text("b", "y")
    assert file_helpers.list_remote_objects("mine://there/run/") == ["run/a", "run/b"]
    assert storage_of("mine://there/run").find() == ["a", "b"]
    assert storage_of("mine://there").find() == ["run/a", "run/b"]
    file_helpers.validate_credentials(store, "ok")
    assert (tmp_path / "there" / "ok").exists()


def test_a_partial_store_says_what_it_lacks() -> None:
    with pytest.raises(NotImplementedError, match="`ObjectStore` has no method `list_objects`"):
        ObjectStore().list_objects()


def test_stores_of_uris(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, databricks: Any) -> None:
    made: list[dict[str, Any]] = []
    for name in ("S3", "GCS", "OCI", "Libcloud"):
        monkeypatch.setattr(file_helpers, f"{name}ObjectStore", lambda **arguments: made.append(arguments))
    for uri in ("s3://bucket/a", "gs://bucket/a", "oci://bucket@namespace/a", "azure://bucket/a"):
        file_helpers.maybe_create_object_store_from_uri(uri)
    azure = {
        "provider": "AZURE_BLOBS",
        "key_environ": "AZURE_ACCOUNT_NAME",
        "secret_environ": "AZURE_ACCOUNT_ACCESS_KEY",
    }
    assert made[:3] == [{"bucket": "bucket"}, {"bucket": "bucket"}, {"bucket": "bucket@namespace"}]
    assert made[3:] == [{"container": "bucket", **azure}]
    found = file_helpers.maybe_create_object_store_from_uri("dbfs:/Volumes/a/b/c/d")
    assert isinstance(found, UCObjectStore)
    with pytest.raises(ValueError, match='should start with "Volumes"'):
        file_helpers.maybe_create_object_store_from_uri("dbfs:/elsewhere/a/b/c")
    with pytest.raises(ValueError, match="must be a URI"):
        file_helpers.list_remote_objects(str(tmp_path))


def test_the_command_lists_objects(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").write_text("x")
    storage_of(f"{s3}/run").upload(tmp_path / "a", "b")
    monkeypatch.setattr(sys, "argv", ["composer_validate_remote_path", f"{s3}/run/"])
    file_helpers.validate_remote_path()
    assert capsys.readouterr().out == "run/b\n"
    for uri, match in ((f"{s3}/none", "There are no objects"), ("/data", "must be a URI")):
        monkeypatch.setattr(sys, "argv", ["composer_validate_remote_path", uri])
        with pytest.raises(SystemExit, match=match):
            file_helpers.validate_remote_path()
