"""Servers on loopback for the tests of object stores."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from composer.utils import ObjectStore, ObjectStoreTransientError


@contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.address = f"http://127.0.0.1:{server.server_port}"
    server.files, server.failures, server.requests = {}, [], []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, status: int, content: bytes = b"", **headers: Any) -> None:
        self.send_response(status)
        headers.setdefault("Content_Length", len(content))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        text = json.dumps({"error_code": code, "code": code, "message": f"the server says {code}"})
        self.answer(status, text.encode(), Content_Type="application/json")

    def body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def begin(self) -> bool:
        """Answer with the next of the failures that a test wants; False if there is none."""
        server: Any = self.server
        server.requests.append(f"{self.command} {unquote(self.path)}")
        if not server.failures:
            return False
        self.body()
        self.refuse(*server.failures.pop(0))
        return True


class _DatabricksHandler(_Handler):
    """The files API of Databricks, as its documentation describes it."""

    def do_GET(self) -> None:
        server: Any = self.server
        path = unquote(urlsplit(self.path).path)
        if not path.startswith("/api/"):
            return self.answer(404)
        if self.begin():
            return None
        kind, _, name = path.removeprefix("/api/2.0/fs/").partition("/")
        if kind == "directories":
            start = f"{name.rstrip('/')}/"
            inside = {file.removeprefix(start) for file in server.files if file.startswith(start)}
            if not inside:
                return self.refuse(404, "NOT_FOUND")
            names = {entry.partition("/")[0]: "/" in entry for entry in inside}
            entries = [
                {"path": f"/{start}{entry}", "name": entry, "is_directory": is_folder}
                for entry, is_folder in names.items()
            ]
            return self.answer(200, json.dumps({"contents": entries}).encode(), Content_Type="application/json")
        if name not in server.files:
            return self.refuse(404, "NOT_FOUND")
        return self.answer(200, server.files[name], Content_Type="application/octet-stream")

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        if self.begin():
            return
        server: Any = self.server
        kind, _, name = unquote(urlsplit(self.path).path).removeprefix("/api/2.0/fs/").partition("/")
        content = self.body()
        if kind == "files":
            server.files[name] = content
        self.answer(204)


@contextmanager
def serve_databricks() -> Iterator[Any]:
    """A server of Databricks' files API; its `address`, `files`, and `failures` to answer with."""
    with _serving(_DatabricksHandler) as server:
        yield server


class _OCIHandler(_Handler):
    """A part of the API of OCI's object storage: objects are put, read and listed."""

    def do_GET(self) -> None:
        if self.begin():
            return None
        server: Any = self.server
        address = urlsplit(self.path)
        parts = unquote(address.path).strip("/").split("/", 5)
        if parts == ["n"]:
            return self.answer(200, b'"my-namespace"', Content_Type="application/json")
        if parts[:4] != ["n", "my-namespace", "b", "bucket"]:
            return self.refuse(404, "BucketNotFound")
        if len(parts) == 5:
            query = dict(part.partition("=")[::2] for part in unquote(address.query).split("&"))
            found = [
                {"name": name, "size": len(content)}
                for name, content in sorted(server.files.items())
                if name.startswith(query.get("prefix", ""))
            ]
            return self.answer(200, json.dumps({"objects": found}).encode(), Content_Type="application/json")
        if parts[5] not in server.files:
            return self.refuse(404, "ObjectNotFound")
        known = {"last_modified": "Thu, 26 Nov 2026 00:00:00 GMT", "etag": "1", "storage_tier": "Standard"}
        headers = {"accept_ranges": "bytes", "version_id": "1", **known}
        return self.answer(200, server.files[parts[5]], Content_Type="application/octet-stream", **headers)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        if self.begin():
            return
        server: Any = self.server
        content = self.body()
        parts = unquote(urlsplit(self.path).path).strip("/").split("/", 5)
        if parts[3] != "bucket":
            return self.refuse(404, "BucketNotFound")
        server.files[parts[5]] = content
        return self.answer(200)


@contextmanager
def serve_oci() -> Iterator[Any]:
    """A server with a part of OCI's API."""
    with _serving(_OCIHandler) as server:
        yield server


class FolderStore(ObjectStore):
    """A user's store, with a constructor of its own."""

    def __init__(self, folder: Path, failures: int = 0) -> None:
        self.folder, self.failures, self.calls = folder, failures, 0

    def get_uri(self, object_name: str) -> str:
        return f"mine://{object_name}"

    def upload_object(self, object_name: str, filename: Any, callback: Any = None, **kwargs: Any) -> None:
        self._fail()
        target = self.folder / object_name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(Path(filename).read_bytes())

    def get_object_size(self, object_name: str) -> int:
        return (self.folder / object_name).stat().st_size

    def download_object(self, object_name: str, filename: Any, overwrite: bool = False, callback: Any = None) -> None:
        self._fail()
        Path(filename).write_bytes((self.folder / object_name).read_bytes())

    def list_objects(self, prefix: str | None = None) -> list[str]:
        names = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        return [name for name in names if name.startswith(prefix or "")]

    def _fail(self) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            raise ObjectStoreTransientError("busy")
