"""A process ends although its W&B server does not answer, and a server that is down is told from a missing artifact."""

from __future__ import annotations

import json
import os
import signal
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
import faulthandler, os, signal, sys, time, torch
from pathlib import Path
from composer.core import Engine, State
from composer.loggers import Logger, WandBLogger

faulthandler.dump_traceback_later(100)
folder, own, frozen = sys.argv[1:]
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
for file in Path("/proc").glob("[0-9]*/status") if frozen == "frozen" else []:
    if f"PPid:\\t{os.getpid()}\\n" in file.read_text():
        os.kill(int(file.parent.name), signal.SIGSTOP)
        print(file.parent.name, file=sys.stderr)
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


def run(folder: Path, *arguments: str) -> tuple[str, str]:
    """Run the program, which must end, and return its output. W&B's process may outlive it, with its pipes."""
    command = [sys.executable, "-c", PROGRAM, str(folder), *arguments]
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


@pytest.mark.parametrize("own", ["own", "shared"])
def test_a_process_ends_although_its_server_hangs(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B itself would try for days. Of two runs that share the time, the second is given a tenth of it."""
    with server("hangs") as uri:
        use(uri, monkeypatch)
        out, err = run(tmp_path, own, "")

    folders = sorted(str(folder) for folder in tmp_path.glob("wandb/run-*/files"))
    assert 2 == len(folders)
    for folder in folders:
        assert f"The upload to W&B; it is kept in {folder} for `wandb sync`, and has not ended" in err
    assert 2 == len(list(tmp_path.glob("wandb/run-*/*.wandb")))
    lost = float(out.split()[-1])
    if own == "own":
        assert 0 == lost
        assert 2 == err.count("has not ended in 3 seconds")
    else:
        assert 3 <= lost < 6
        assert 1 == err.count("has not ended in 0.3 seconds")


@pytest.mark.skipif(sys.platform != "linux", reason="finds W&B's process in /proc")
def test_a_process_ends_although_the_process_that_uploads_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server("hangs") as uri:
        use(uri, monkeypatch)
        _, err = run(tmp_path, "shared", "frozen")

    (frozen,) = (int(line) for line in err.splitlines() if line.isdigit())
    os.kill(frozen, signal.SIGKILL)
    assert "W&B's process has not ended in 10 seconds" in err


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
