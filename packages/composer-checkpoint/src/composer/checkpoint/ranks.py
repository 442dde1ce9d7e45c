"""Work that one rank does for the others; an error is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from composer.checkpoint.durable import scratch_folder
from composer.utils import dist

__all__ = ["on_each_node", "on_first_rank"]

T = TypeVar("T")


def on_first_rank(
    work: Callable[[], T], each_node: bool = False, problem: str = "Stopped, because another rank failed"
) -> T:
    """Run a function on rank 0, and return its result on all ranks. A collective operation.

    Args:
        work: The function.
        each_node: True if the first rank of every node runs it.
        problem: The beginning of the message on the other ranks.

    Raises:
        RuntimeError: It failed on another rank; on that one, its own error is raised.
    """
    result: Any = None
    failure = None
    if (dist.get_local_rank() if each_node else dist.get_global_rank()) == 0:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - sent to the other ranks, then raised
            failure = error
    message = None if failure is None else f"rank {dist.get_global_rank()}: {type(failure).__name__}: {failure}"
    outcomes = dist.all_gather_object((message, result))
    if failure is not None:
        raise failure
    for message, _ in outcomes:
        if message is not None:
            raise RuntimeError(f"{problem}: {message}")
    first: T = outcomes[0][1]
    return first


@contextmanager
def on_each_node(fetch: Callable[[Path], None]) -> Iterator[Path]:
    """Fill a temporary folder on each node; it is removed when all ranks have left. A collective operation.

    Args:
        fetch: Fills a folder.

    Raises:
        RuntimeError: It failed on another rank; on that one, its own error is raised.
    """
    with ExitStack() as made:
        folder = str(made.enter_context(scratch_folder("download"))) if dist.get_local_rank() == 0 else ""
        on_first_rank(lambda: fetch(Path(folder)), each_node=True)
        folders = dict(pair for pair in dist.all_gather_object((dist.get_node_rank(), folder)) if pair[1])
        yield Path(folders[dist.get_node_rank()])
        dist.barrier()
