"""A process ends although its MLflow server does not answer: one deadline for all of it, with MLflow's own client."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch, warnings
from pathlib import Path
from composer.core import Engine, State
from composer.loggers import Logger, MLFlowLogger

loggers = [MLFlowLogger(tracking_uri=sys.argv[1], delivery_timeout=5.0, log_artifacts=True)]
state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="my-run", dataloader=[1], callbacks=loggers)
engine = Engine(state, Logger(state, loggers))
engine.run_event("init")
if len(sys.argv) > 3:  # resumed
    loggers[0].load_state_dict({"run_name": "my-run", "run_id": "before", "experiment_id": "1"})
    engine.run_event("after_load")
engine.run_event("fit_start")
for step in range(50):
    engine.logger.log_metrics({"loss": torch.tensor(float(step))}, step)
Path(sys.argv[2]).write_text("a checkpoint")
engine.logger.upload_file("checkpoints/ba1.pt", Path(sys.argv[2]), overwrite=True)
Path(sys.argv[2]).unlink()  # as rotation does
engine.run_event("fit_end")
engine.close()
"""
_RUN = {
    "info": {
        "run_id": "r", "run_uuid": "r", "experiment_id": "1", "status": "RUNNING", "start_time": 1, "run_name": "n",
        "artifact_uri": "mlflow-artifacts:/1/r/artifacts", "lifecycle_stage": "active", "user_id": "u",
    },
    "data": {"metrics": [], "params": [], "tags": []},
}  # fmt: skip
_EXPERIMENT = {
    "experiment_id": "1", "name": "e", "artifact_location": "mlflow-artifacts:/1", "lifecycle_stage": "active"
}  # fmt: skip


@contextmanager
def server(hangs_at: str, time: int = 1) -> Iterator[str]:
    """An MLflow server, as far as a run needs it, that does not answer from some request on, made for some time."""
    hanging, done, seen = threading.Event(), threading.Event(), list[str]()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if hangs_at in self.path:
                seen.append(self.path)
                if len(seen) >= time:
                    hanging.set()
            if hanging.is_set():
                done.wait(300)
                return
            body = json.dumps({"experiment": _EXPERIMENT} if "experiments" in self.path else {"run": _RUN}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_PATCH = _answer

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


def ended(uri: str, path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run the program; MLflow itself would try for more than twice as long as this waits."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, uri, str(path), *more], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("hangs_at", ["experiments/get-by-name", "runs/get", "runs/log-batch"])
def test_a_process_ends_although_its_server_hangs(hangs_at: str, tmp_path: Path) -> None:
    with server(hangs_at) as uri:
        run = ended(uri, tmp_path / "ba1.pt")

    assert 0 == run.returncode, run.stderr
    if hangs_at == "runs/log-batch":
        assert "records. Metrics are lost. The files to be sent are kept: " in run.stderr
        (held,) = tmp_path.glob(".held-*/ba1.pt")
        assert str(held) in run.stderr
        assert "a checkpoint" == held.read_text()
    else:
        assert "`MLFlowLogger` failed to log: TimeoutError" in run.stderr


@pytest.mark.parametrize(("hangs_at", "time"), [("runs/update", 1), ("runs/get", 2), ("runs/get", 3)])
def test_a_process_ends_although_its_server_hangs_when_a_run_is_resumed(
    hangs_at: str, time: int, tmp_path: Path
) -> None:
    """Reopening the run, reading it and the start of its system metrics; which request is whose depends on threads."""
    with server(hangs_at, time) as uri:
        run = ended(uri, tmp_path / "ba1.pt", "resumed")

    assert 0 == run.returncode, run.stderr
    found = re.search(r"`MLFlowLogger` (failed to log: .* has not ended|could not send everything) in 5", run.stderr)
    assert found is not None, run.stderr


def test_a_process_ends_while_the_server_is_down(tmp_path: Path) -> None:
    with server("nothing") as uri:
        pass

    run = ended(uri, tmp_path / "ba1.pt")
    assert 0 == run.returncode, run.stderr
    assert "`MLFlowLogger` failed to log: " in run.stderr
