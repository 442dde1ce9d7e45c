"""A process ends although its W&B server does not answer, and a server that is down is told from a missing artifact."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import wandb

from composer.loggers import WandBLogger

PROGRAM = """
import sys, time, torch
from pathlib import Path
from composer.core import Engine, State
from composer.loggers import Logger, WandBLogger

folder, own = sys.argv[1:]
settings = {"init_timeout": 5}
options = {"project": "tests", "init_kwargs": {"dir": folder, "settings": settings}}
several = [WandBLogger(**options, delivery_timeout=3.0 if own == "own" else None) for _ in range(2)]
state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="my-run", dataloader=[1], callbacks=several)
logger = Logger(state, several, delivery_timeout=60.0 if own == "own" else 3.0)
engine = Engine(state, logger)
engine.run_event("init")
engine.run_event("fit_start")
for step in range(50):
    engine.logger.log_metrics({"loss": torch.tensor(float(step))}, step)
engine.run_event("fit_end")
engine.close()
deadline = logger.delivery_deadline.for_service()  # shares the time that is lost
print("lost", round(deadline.timeout - deadline.left(time.monotonic()), 3))
"""
_RUN = {
    "id": "R", "name": "r", "displayName": "n", "historyLineCount": 0,
    "project": {"id": "P", "name": "tests", "entity": {"id": "E", "name": "team"}},
}  # fmt: skip


@contextmanager
def server(kind: str) -> Iterator[str]:
    """A W&B server, as far as a run needs it.

    Args:
        kind: "hangs" once a run is open, "answers 500" to everything, or "is empty", having no artifacts.
    """
    done = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if kind == "hangs" and ("file_stream" in self.path or b"CreateRunFiles" in body):
                done.wait(300)
                return
            answer: dict[str, Any] = {}
            if "graphql" in self.path:
                name = json.loads(body).get("variables", {}).get("name", "r")
                answer = {"upsertBucket": {"bucket": {**_RUN, "name": name}, "inserted": True}, "project": None}
                answer["viewer"] = {"id": "V", "username": "u", "entity": "team", "flags": "{}", "teams": {"edges": []}}
            text = json.dumps({"data": answer} if answer else {}).encode()
            self.send_response(500 if kind == "answers 500" else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = _answer

        def log_message(self, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError, ValueError):  # the client is gone
                super().handle()

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.daemon_threads = True
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_port}"
    finally:
        done.set()
        found.shutdown()
        found.server_close()
        thread.join()


def use(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", uri)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_MODE", "online")


@pytest.mark.parametrize("own", ["own", "shared"])
def test_a_process_ends_although_its_server_hangs(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B itself would try for days. Of two runs that share the time, the second is given a tenth of it."""
    with server("hangs") as uri:
        use(uri, monkeypatch)
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), own]
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)

    assert 0 == run.returncode, run.stderr
    folders = sorted(str(folder) for folder in tmp_path.glob("wandb/run-*/files"))
    assert 2 == len(folders)
    for folder in folders:
        assert f"The upload to W&B; it is kept in {folder} for `wandb sync`, and has not ended" in run.stderr
    assert 2 == len(list(tmp_path.glob("wandb/run-*/*.wandb")))
    lost = float(run.stdout.split()[-1])
    if own == "own":
        assert 0 == lost
        assert 2 == run.stderr.count("has not ended in 3 seconds")
    else:
        assert 3 <= lost < 6
        assert 1 == run.stderr.count("has not ended in 0.3 seconds")


def test_a_missing_artifact_differs_from_a_server_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = WandBLogger(project="tests", entity="team")
    with server("is empty") as uri:
        use(uri, monkeypatch)
        with pytest.raises(FileNotFoundError, match=r"There is no artifact 'team/tests/ep1\.pt:latest' in W&B"):
            logger.download_file("ep1.pt", str(tmp_path / "a"))


def test_a_server_that_is_down_does_not_count_as_one_without_the_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = WandBLogger(project="tests", entity="team")
    with server("answers 500") as uri:
        use(uri, monkeypatch)
        with pytest.raises(wandb.errors.Error) as caught:
            logger.download_file("ep1.pt", str(tmp_path / "a"))
    assert not isinstance(caught.value, FileNotFoundError)
