"""A program without torch that the tests start; its first argument is the name of a function here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

RANK = os.environ["RANK"]


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def report(*arguments: str) -> None:
    """Print the variables and the arguments."""
    print(json.dumps({"environment": dict(os.environ), "arguments": arguments, "terminal": sys.stderr.isatty()}))
    print(f"warning of rank {RANK}", file=sys.stderr)


def stubborn(folder: str) -> None:
    """Rank 1 fails; rank 0 and its child ignore signals. A child of rank 1 survives it."""
    place = Path(folder)
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], preexec_fn=_ignore)  # noqa: PLW1509
    (place / f"child{RANK}").write_text(str(child.pid))
    if RANK == "0":
        _ignore()
        (place / "ready").touch()
        time.sleep(600)
    _wait_for(place / "ready")
    (place / "when").write_text(str(time.time()))
    raise RuntimeError("rank 1 is broken")


def patient(folder: str) -> None:
    """Ignore signals."""
    _ignore()
    (Path(folder) / f"ready{RANK}").write_text(str(os.getpid()))
    time.sleep(600)


def lonely(folder: str) -> None:
    """Rank 0 notices that rank 1 is gone, and exits before rank 1 does."""
    if RANK == "0":
        sys.exit("RuntimeError: [gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:1")
    time.sleep(0.5)
    sys.exit(5)


def replica(folder: str, name: str) -> None:
    """Group 1 fails twice, then when group 0 has finished; both fail `always`, in `turns`, or wait for `signals`."""
    group = os.environ["REPLICA_GROUP_ID"]
    place = f"{os.environ['TORCHFT_LIGHTHOUSE']}, rank {RANK} of {os.environ['WORLD_SIZE']}"
    (Path(folder) / f"ready{group}.{os.getpid()}").write_text(place)
    if name == "signals":
        time.sleep(600)
    if name == "turns":
        begun = [len([*Path(folder).glob(f"ready{each}.*")]) for each in range(2)]
        if begun[int(group)] == 1:
            while group == "1" and len([*Path(folder).glob("ready0.*")]) < 2:
                time.sleep(0.01)
            sys.exit(3)
        while len([*Path(folder).glob("ready1.*")]) < 2:
            time.sleep(0.01)
        return
    if name == "always" or (group == "1" and len([*Path(folder).glob("ready1.*")]) < 2):
        sys.exit(3)
    while len([*Path(folder).glob("ready1.*")]) < 2:
        time.sleep(0.01)
    if group == "1":
        time.sleep(2)  # until the launcher has noticed that group 0 finished
        sys.exit(3)


def sum_on_devices() -> None:
    """Add up one number of each rank with NCCL; rank 0 prints the sum."""
    import torch

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    number = torch.full((), int(RANK) + 1, device="cuda")
    torch.distributed.all_reduce(number)
    if RANK == "0":
        print(json.dumps({"world": torch.distributed.get_world_size(), "sum": number.item()}))
    torch.distributed.destroy_process_group()


def _ignore() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    functions = (report, stubborn, patient, lonely, replica, sum_on_devices)
    {function.__name__: function for function in functions}[sys.argv[1]](*sys.argv[2:])
