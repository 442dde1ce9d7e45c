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

from composer.cli._output import Outputs, tell
from composer.cli._plan import Plan, plan_of
from composer.cli._signals import Signals

__all__ = ["main"]

_LOOPBACK = "127.0.0.1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: What follows the command's name; None: what this process was given.

    Returns:
        The exit status: 0, or that of the rank that failed first, where 128 + n stands for the signal n.

    Raises:
        SystemExit: With status 2 after a mistake on the command line, before anything is started.
    """
    plan = plan_of(arguments, os.environ)
    try:
        plan, store = _with_ports(plan)
    except OSError as error:
        tell(f"composer: error: `--master_port` must be a free port, got {plan.master_port}: {error}. Use another one.")
        return 2
    if plan.limits_threads(os.environ):
        tell("composer: OMP_NUM_THREADS=1 is set for each process, since several run here. What you set stays.")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)  # how ranks end is told here
    with Signals() as signals:
        status = _run(plan, signals)
    del store  # it has to live as long as the ranks
    return status


def _run(plan: Plan, signals: Signals) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException

    from composer.cli._job import Job

    outputs = Outputs(plan)
    if plan.verbose:
        for rank in range(plan.nproc):
            tell(f"composer: rank {plan.base_rank + rank} runs `{shlex.join(plan.expanded(rank, os.environ))}`")
    status = 1
    signals.listen()
    try:
        job = Job(plan, os.environ, outputs, signals)
        signals.listen()
        status = job.run()
    except SignalException as error:  # torch's own, in the moment before the signals are ours
        status = 128 + error.sigval
    finally:
        outputs.finish()
        outputs.close(keep=status != 0)
    return status


def _with_ports(plan: Plan) -> tuple[Plan, Any]:
    """The plan with a port where the ranks meet; and a store that outlives any rank, if all of them are here.

    Through it the others can still tell which rank is missing, also if it is the one where they met.

    Raises:
        OSError: The port that was asked for is taken.
    """
    if plan.base_rank == 0:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
            probe.bind(("", plan.master_port))
            plan = replace(plan, master_port=probe.getsockname()[1])
    if plan.world_size > plan.nproc:
        return plan, None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it

    store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False)
    return replace(plan, store=f"{_LOOPBACK}:{store.port}"), store


if __name__ == "__main__":
    sys.exit(main())
