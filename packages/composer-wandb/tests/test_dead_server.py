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
from types import SimpleNamespace
from typing import Any

import pytest
import requests
import wandb

from composer.loggers import WandBLogger

PROGRAM = """
import faulthandler, sys, time, torch
from composer.core import Engine, State
from composer.loggers import Logger, WandBLogger

faulthandler.dump_traceback_later(100)
options = {"project": "tests", "init_kwargs": {"dir": sys.argv[1], "settings": {"init_timeout": 5}}}
several = [WandBLogger(**options) for _ in range(2)]
state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="my-run", dataloader=[1], callbacks=several)
logger = Logger(state, several, delivery_timeout=3.0)
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
needs_a_newer_client = pytest.mark.skipif(
    tuple(map(int, wandb.__version__.split(".")[:2])) < (0, 31),
    reason="older clients of W&B ask for what this server does not have",
)
_RUN = {
    "id": "R", "name": "r", "displayName": "n", "historyLineCount": 0,
    "project": {"id": "P", "name": "tests", "entity": {"id": "E", "name": "team"}},
}  # fmt: skip


@contextmanager
def server(kind: str) -> Iterator[str]:
    """A W&B server, as far as a run needs it.

    Args:
        kind: "hangs" once a run is open, or "is empty", having no artifacts.
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
            self.send_response(200)
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


def run(folder: Path) -> tuple[str, str]:
    """Run the program, which must end, and return its output. W&B's process may outlive it, with its pipes."""
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    out, err = folder / "out.txt", folder / "err.txt"
    with out.open("w") as out_file, err.open("w") as err_file:
        process = subprocess.Popen(command, stdout=out_file, stderr=err_file)
    try:
        code = process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()
        logs = [log.read_text() for log in folder.glob("wandb/run-*/logs/*.log")]
        pytest.fail("\n".join(["The process has not ended.", err.read_text(), *logs]))
    assert code == 0, err.read_text()
    return out.read_text(), err.read_text()


@needs_a_newer_client
def test_a_process_ends_although_its_server_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B itself would try for days. Of two runs that share the time, the second is given a tenth of it."""
    with server("hangs") as uri:
        use(uri, monkeypatch)
        out, err = run(tmp_path)

    folders = sorted(str(folder) for folder in tmp_path.glob("wandb/run-*/files"))
    assert 2 == len(folders)
    for folder in folders:
        assert f"The upload to W&B; it is kept in {folder} for `wandb sync`, and has not ended" in err
    assert 2 == len(list(tmp_path.glob("wandb/run-*/*.wandb")))
    lost = float(out.split()[-1])
    assert 3 <= lost < 6
    assert 1 == err.count("has not ended in 0.3 seconds")


@needs_a_newer_client
def test_a_missing_artifact_differs_from_a_server_that_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = WandBLogger(project="tests", entity="team")
    with server("is empty") as uri:
        use(uri, monkeypatch)
        with pytest.raises(FileNotFoundError, match=r"There is no artifact 'team/tests/ep1\.pt:latest' in W&B"):
            logger.download_file("ep1.pt", str(tmp_path / "a"))


def test_a_server_that_is_down_does_not_count_as_one_without_the_artifact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = requests.Response()
    response.status_code = 503
    failure = wandb.errors.CommError("unavailable", requests.HTTPError(response=response))

    def fail(path: str) -> None:
        raise failure

    monkeypatch.setattr(wandb, "Api", lambda: SimpleNamespace(artifact=fail))
    with pytest.raises(wandb.errors.CommError, match="unavailable"):
        WandBLogger(project="tests", entity="team").download_file("ep1.pt", str(tmp_path / "a"))
