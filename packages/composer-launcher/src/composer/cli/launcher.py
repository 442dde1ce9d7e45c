"""`composer`: start a program in several processes, on one node or on several.

The processes run under torch's elastic multiprocessing. The launcher watches them, and ends all of them when one fails.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from composer.cli._output import Outputs, print_message
from composer.cli._plan import Plan, parse_plan, without_nodes
from composer.cli._signals import Signals

_LOOPBACK = "127.0.0.1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: The command line without the command's name. None: that of this process.

    Returns:
        The exit status: 0, or that of the rank that failed first (128 + n if signal n killed it).

    Raises:
        SystemExit: With status 2 if the command line is invalid, before anything is started.
    """
    plan = parse_plan(arguments, os.environ)
    if plan.replicas:
        return _run_groups(plan)
    try:
        plan, store = _with_ports(plan)
    except OSError as error:
        print_message(f"error: `--master_port` must be a free port, got {plan.master_port}: {error}. Use another one.")
        return 2
    if plan.limits_threads(os.environ):
        print_message(
            "OMP_NUM_THREADS=1 is set for each process, since several run on this machine. Set the variable to change "
            "that."
        )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)  # `Job` reports how ranks end
    with Signals() as signals:
        status = _run(plan, signals)
    del store  # must live as long as the ranks
    return status


def _run_groups(plan: Plan) -> int:
    from composer.cli._replicas import run_groups

    try:
        return run_groups(plan, without_nodes(os.environ))
    except ModuleNotFoundError as error:
        print_message(f"error: {error}")
        return 2


def _run(plan: Plan, signals: Signals) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException

    from composer.cli._job import Job

    outputs = Outputs(plan)
    if plan.verbose:
        for rank in range(plan.nproc):
            print_message(f"rank {plan.base_rank + rank} runs `{shlex.join(plan.expanded(rank, os.environ))}`")
    status = 1
    signals.listen()
    try:
        job = Job(plan, os.environ, outputs, signals)
        signals.listen()
        status = job.run()
    except SignalException as error:  # torch's handlers raise it before `listen` replaces them
        status = 128 + error.sigval
    finally:
        outputs.finish()
        outputs.close(keep=status != 0)
    return status


def _with_ports(plan: Plan) -> tuple[Plan, Any]:
    """Return the plan with a rendezvous port and, on a single node, a store that outlives all ranks.

    Through the store the other ranks can find out which rank is gone, even if that is rank 0.

    Raises:
        OSError: The requested port is in use.
    """
    if plan.base_rank == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # torch sets it, too
            probe.bind(("", plan.master_port))
            plan = replace(plan, master_port=probe.getsockname()[1])
    if plan.world_size > plan.nproc:
        return plan, None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

    store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    return replace(plan, store=f"{_LOOPBACK}:{store.port}"), store


if __name__ == "__main__":
    sys.exit(main())
