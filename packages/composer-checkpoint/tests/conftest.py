"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # else gcsfs asks Google, not the emulator, for some things
# Who begins the tests in the background, or with nohup, lets them ignore signals, and all processes inherit that.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    number = getattr(signal, name, None)  # Windows has no SIGHUP
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture
def uninstall(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function after which a package cannot be imported, although fsspec may have found its store before."""
    import fsspec

    def hide(package: str) -> None:
        registry: dict[str, Any] = {}
        for name in ("registry", "_registry"):
            monkeypatch.setattr(sys.modules[fsspec.get_filesystem_class.__module__], name, registry)
        loaded = [name for name in sys.modules if name.startswith(f"{package}.")]
        for name in (package, *loaded, "fsspec.implementations.sftp"):
            monkeypatch.setitem(sys.modules, name, None)

    return hide


@contextmanager
def serve_s3() -> Iterator[Any]:
    """A server of S3 on loopback; its `endpoint` is its address."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
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
