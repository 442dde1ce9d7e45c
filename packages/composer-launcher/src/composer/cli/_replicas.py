"""Several replica groups on one machine: each is a launcher of its own, which is started again when it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from composer.cli._output import print_message
from composer.cli._plan import Plan
from composer.cli._signals import Signals

_POLL_SECONDS = 0.1
_START_SECONDS = 10.0  # a group that was started again so recently does not have the state of the run yet
_LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
_HEARTBEAT_MS, _JOIN_MS = 2_000, 60_000


def run_groups(plan: Plan, environment: Mapping[str, str]) -> int:
    """Start all replica groups, and those that fail again, until all have ended.

    A group is started again as long as another one has the state of the run. If none has, such as when the program
    fails in all groups at its start, all end. After a signal, and when another group has finished, none is started
    again.

    Returns:
        The exit status: 0 if a group has finished, or else that of the first one that has failed for good (128 + n if
        signal n killed it).

    Raises:
        ModuleNotFoundError: There is no Lighthouse, and torchft is not installed.
    """
    found = environment.get(_LIGHTHOUSE)
    place: AbstractContextManager[str] = nullcontext(found) if found else _lighthouse()
    with place as address, Signals() as signals:
        groups = {group: _start(plan, group, address, environment) for group in range(plan.replicas)}
        signals.listen()
        restarts, started = dict.fromkeys(groups, 0), dict.fromkeys(groups, 0.0)
        codes, stopping = list[int](), False
        try:
            while groups:
                while (number := signals.take()) is not None:
                    stopping = True
                    _send(number, groups)
                for group, process in list(groups.items()):
                    code = process.poll()
                    if code is None:
                        continue
                    status = 128 - code if code < 0 else code
                    since = max(started[group], time.monotonic() - _START_SECONDS)
                    survives = any(started[other] <= since for other in groups if other != group)
                    if code and survives and not stopping and 0 not in codes and restarts[group] < plan.max_restarts:
                        restarts[group] += 1
                        print_message(
                            f"replica group {group} failed with exit status {status} and is started again, "
                            f"{restarts[group]}/{plan.max_restarts}."
                        )
                        started[group] = time.monotonic()
                        groups[group] = _start(plan, group, address, environment)
                        continue
                    codes.append(status)
                    del groups[group]
                    if code and not stopping:
                        rest = ", but another one has finished the run" if 0 in codes else " and is not started again"
                        print_message(f"replica group {group} failed with exit status {status}{rest}.")
                        if groups and not survives and 0 not in codes:
                            print_message("no other group has the state of the run, so all end.")
                            stopping = True
                            _send(signal.SIGTERM, groups)
                time.sleep(_POLL_SECONDS)
        finally:
            for process in groups.values():
                process.kill()
    return 0 if 0 in codes else codes[0]


def _send(number: int, groups: Mapping[int, subprocess.Popen[Any]]) -> None:
    for process in groups.values():
        process.send_signal(number)


def _start(plan: Plan, group: int, address: str, environment: Mapping[str, str]) -> subprocess.Popen[Any]:
    """Start a group, in a session of its own: Ctrl-C in a terminal would reach it directly, too."""
    launcher = [sys.executable, "-m", "composer.cli", "-n", str(plan.nproc)]
    launcher += ["--shutdown_timeout", str(plan.shutdown_timeout), *["--verbose"][: plan.verbose]]
    variables = {"NUM_REPLICA_GROUPS": str(plan.replicas), "REPLICA_GROUP_ID": str(group), _LIGHTHOUSE: address}
    if plan.gpus:
        own = plan.gpus[group * plan.nproc : (group + 1) * plan.nproc]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    else:
        variables["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS", "1")
    script = str(Path(__file__).with_name("_rank.py"))
    command = [sys.executable, "-I", "-S", script, str(os.getpid()), "", "", *launcher, "-c", *plan.command]
    return subprocess.Popen(command, env={**environment, **variables}, start_new_session=True)


@contextmanager
def _lighthouse() -> Iterator[str]:
    """Run a Lighthouse in this process; yield its address."""
    os.environ.setdefault("RUST_LOG", "error")
    try:
        from torchft.coordination import LighthouseServer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "`--replicas` needs torchft. Install it with `pip install composer-torchft`.", name=error.name
        ) from error
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=_JOIN_MS, heartbeat_timeout_ms=_HEARTBEAT_MS
    )
    try:
        yield server.address()
    finally:
        server.shutdown()
