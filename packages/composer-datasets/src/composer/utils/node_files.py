"""Let local rank 0 prepare data before the other processes of its node use it.

Those that wait for a file are for long work: a collective would time out.
"""

from __future__ import annotations

import os
import random
import string
import time
from collections.abc import Iterator
from contextlib import contextmanager

from composer.utils import dist

_POLL_SECONDS = 0.1


@contextmanager
def run_local_rank_zero_first() -> Iterator[None]:
    """Run the body on local rank 0, then on the other processes of the node.

    For short work, such as preparing a dataset: the other processes wait in a barrier, which can time out.
    """
    if dist.get_local_rank() == 0:
        try:
            yield
        finally:
            dist.barrier()  # after an error, too: the others would wait forever
    else:
        dist.barrier()
        yield


@contextmanager
def local_rank_zero_download_and_wait(expected_file_path: str) -> Iterator[None]:
    """Let the other processes of the node wait until local rank 0 has created a file in the body.

    For long work: no process waits in a collective.

    Args:
        expected_file_path: The file that local rank 0 creates when it is done.
    """
    if dist.get_local_rank() != 0:
        _wait_for(expected_file_path)
    yield


@contextmanager
def busy_wait_for_local_rank_zero(dir_path: str | None = None) -> Iterator[None]:
    """Let the processes of a node leave the body only after local rank 0 has left it.

    They wait for a hidden file, not in a collective, so the body may take longer than any timeout.

    Args:
        dir_path: A directory that all processes of the node can read; None: the working directory.

    Raises:
        RuntimeError: On the other processes, if the body failed on local rank 0.
    """
    name = get_node_signal_file_name()
    path = os.path.join(dir_path or os.getcwd(), name)
    if dist.get_local_rank() == 0:
        try:
            yield
        except BaseException as error:
            _write(path, f"{type(error).__name__}: {error}")
            raise
        _write(path, "")
    else:
        yield
        _wait_for(path)
        with open(path, encoding="utf-8") as file:
            failure = file.read()
        if failure:
            raise RuntimeError(f"Local rank 0 failed while this process waited for it. {failure}")
    dist.barrier()  # all processes have seen the file
    if dist.get_local_rank() == 0:
        os.remove(path)


def get_node_signal_file_name(rng: random.Random | None = None) -> str:
    """Return a name for the hidden signal file of this node, the same on all of its processes.

    Args:
        rng: The generator of the random part, used on rank 0; None: that of the operating system, so that seeded runs
            do not repeat names and no global generator is advanced.
    """
    draw = rng or random.SystemRandom()
    suffix = ["".join(draw.choices(string.ascii_letters + string.digits, k=6))]
    dist.broadcast_object_list(suffix)
    return f"._signal_file_node{dist.get_node_rank()}_{suffix[0]}"


def write_signal_file(signal_file_name: str, dir_path: str | None = None) -> str:
    """Create a signal file from local rank 0.

    Args:
        signal_file_name: The name, from `get_node_signal_file_name`.
        dir_path: The directory, created if it is missing; None: the working directory.

    Returns:
        The path of the file, on all ranks.
    """
    path = os.path.join(dir_path or os.getcwd(), signal_file_name)
    if dist.get_local_rank() == 0:
        _write(path, "")
    return path


def _write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = f"{path}.partial"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(partial, path)  # waiting processes never see a partial file


def _wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(_POLL_SECONDS)
