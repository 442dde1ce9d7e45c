"""Servers of object stores on loopback, as fixtures of pytest and as context managers.

A `conftest.py` imports the fixtures that its tests use: `from composer.testing.servers import s3 as s3`, and
`s3_server`, which `s3` uses. The servers are those of moto, gcp-storage-emulator and mock-ssh-server; the tests that
start one install it, and pytest.
"""

from __future__ import annotations

import secrets
import socket
import sys
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def serve_s3() -> Iterator[Any]:
    """Start a server of S3; its `endpoint` is its address."""
    from moto.server import ThreadedMotoServer

    server: Any = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
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


@contextmanager
def serve_gcs() -> Iterator[str]:
    """Start the emulator of Google Cloud Storage, with a bucket `bucket`; yield its address."""
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    try:
        yield f"http://127.0.0.1:{server._api._httpd.server_address[1]}"
    finally:
        server.stop()


@contextmanager
def serve_sftp() -> Iterator[Any]:
    """Start a server of SSH with a user `me`; it has a `port`, a `host_key`, and the user's `key`, a file."""
    import mockssh
    import paramiko

    class Handler(mockssh.server.Handler):  # type: ignore[misc]  # mockssh has no types
        def run(self) -> None:
            with suppress(OSError, EOFError, paramiko.SSHException):  # the client may go
                super().run()

    class Server(mockssh.Server):  # type: ignore[misc]
        handler_cls = Handler

        def _run(self) -> None:
            with suppress(OSError, ValueError):  # closed before this thread begins
                super()._run()

    folder = Path(mockssh.__file__).parent
    key = folder / "sample-user-key"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "setDaemon")
        with Server({"me": str(key)}) as server:
            listening, thread = server._socket, server._thread
            server.key = str(key)
            server.host_key = " ".join((folder / "server-key.pub").read_text().split()[:2])
            yield server
        thread.join(10)
        listening.close()


@pytest.fixture
def sftp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server of SFTP; the environment has credentials, and the server's user is at home in `tmp_path`."""
    with serve_sftp() as server:
        known = tmp_path / "known_hosts"
        known.write_text(f"[127.0.0.1]:{server.port} {server.host_key}\n")
        monkeypatch.setenv("COMPOSER_SFTP_KEY_FILE", server.key)
        monkeypatch.setenv("COMPOSER_SFTP_KNOWN_HOSTS_FILE", str(known))
        monkeypatch.chdir(tmp_path)
        yield server


@pytest.fixture
def uninstall(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function after which a client of a store cannot be imported, although fsspec may have found it before."""
    import fsspec

    def hide(package: str) -> None:
        registry: dict[str, Any] = {}
        for name in ("registry", "_registry"):
            monkeypatch.setattr(sys.modules[fsspec.get_filesystem_class.__module__], name, registry)
        loaded = [name for name in sys.modules if name.startswith(f"{package}.")]
        for name in (package, *loaded, "fsspec.implementations.sftp"):
            monkeypatch.setitem(sys.modules, name, None)

    return hide
