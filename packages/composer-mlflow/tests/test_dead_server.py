"""A process ends although its MLflow server does not answer: one deadline for all of it, with MLflow's own client."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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
FORKS = """
import json, os, sys
import mlflow.tracking, torch  # once for all cases: it takes longer than they do
children = {}
for case, arguments, errors in json.load(sys.stdin):
    child = os.fork()
    if child == 0:
        sys.argv = ["-c", *arguments]
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
        break  # to the program
    children[child] = case
else:
    codes = {}
    while children:
        child, status = os.wait()
        codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
    print(json.dumps(codes))
    sys.exit()
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


CASES = {
    "the experiment": ("experiments/get-by-name", 1, ()),
    "the run": ("runs/get", 1, ()),
    "a batch": ("runs/log-batch", 1, ()),
    # Of a resumed run: reopening it, reading it, the start of its system metrics; which request is whose depends on
    # threads.
    "reopening": ("runs/update", 1, ("resumed",)),
    "reading": ("runs/get", 2, ("resumed",)),
    "system metrics": ("runs/get", 3, ("resumed",)),
    "down": (None, 1, ()),
}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, Path]]:
    """The exit code of each case's process, what it has printed, and its folder."""
    folders = {case: tmp_path_factory.mktemp("case") for case in CASES}
    with ExitStack() as servers:
        arguments = {}
        for case, (hangs_at, time, more) in CASES.items():
            if hangs_at is None:
                with server("nothing") as uri:
                    pass  # it is down now
            else:
                uri = servers.enter_context(server(hangs_at, time))
            arguments[case] = [uri, str(folders[case] / "ba1.pt"), *more]
        errors = {case: str(folder / "errors.txt") for case, folder in folders.items()}
        cases = json.dumps([(case, arguments[case], errors[case]) for case in CASES])
        # MLflow itself would try for more than twice as long as this waits.
        run = subprocess.run(
            [sys.executable, "-c", FORKS + PROGRAM],
            input=cases,
            stdout=subprocess.PIPE,
            text=True,
            timeout=300,
            check=True,
        )
    codes = json.loads(run.stdout)
    return {case: (codes[case], Path(errors[case]).read_text(), folders[case]) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_a_process_ends_although_its_server_hangs_or_is_down(
    case: str, endings: dict[str, tuple[int, str, Path]]
) -> None:
    code, errors, folder = endings[case]
    assert 0 == code, errors
    if case == "a batch":
        assert "records. Metrics are lost. The files to be sent are kept: " in errors
        (held,) = folder.glob(".held-*/ba1.pt")
        assert str(held) in errors
        assert "a checkpoint" == held.read_text()
    elif CASES[case][2]:
        found = re.search(r"`MLFlowLogger` (failed to log: .* has not ended|could not send everything) in 5", errors)
        assert found is not None, errors
    elif case == "down":
        assert "`MLFlowLogger` failed to log: " in errors
    else:
        assert "`MLFlowLogger` failed to log: TimeoutError" in errors
