"""A store that hangs or fails does not hold up the end of a process: one deadline, and the files are kept."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from pathlib import Path
from composer.checkpoint._storage import storage_of
from composer.checkpoint._uploads import Uploader

endpoint, folder = sys.argv[1:]
storage = storage_of("s3://bucket/run", key="k", secret="s", endpoint_url=endpoint,
    config_kwargs={"retries": {"max_attempts": 0}})
uploader = Uploader(storage, timeout=2.0)
for i in range(20):
    path = Path(folder) / f"ba{i}.pt"
    path.write_bytes(b"x" * 100_000)
    uploader.upload(path, path.name, overwrite=True)
    path.unlink()  # as rotation does
start = time.monotonic()
for end in (uploader.wait, uploader.close):
    try:
        end()
    except Exception as error:
        print(type(error).__name__)
print("seconds", time.monotonic() - start)
"""


@contextmanager
def _server(kind: str) -> Iterator[str]:
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            if kind == "hangs":
                done.wait(120)
            elif kind == "answers 500":
                self.send_response(500)
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self.rfile.read(1000)
                self.connection.close()

        do_PUT = do_GET = do_HEAD = do_POST = _answer

        def log_message(self, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError, ValueError):  # the client is gone
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        done.set()
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize("kind", ["hangs", "answers 500", "dies half way"])
def test_a_process_ends_although_its_store_does_not_work(kind: str, tmp_path: Path) -> None:
    """Twenty uploads, two seconds for all of them: a limit of 60 seconds for the process tells one from twenty."""
    pytest.importorskip("s3fs")
    with _server(kind) as endpoint:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, endpoint, str(tmp_path)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    assert 0 == done.returncode, done.stderr
    assert "TimeoutError" == done.stdout.splitlines()[0]
    assert 2 == len(done.stdout.splitlines())  # `close` neither waits nor raises again
    assert "They are kept: " in done.stderr
    assert (tmp_path / "ba19.pt").exists()
