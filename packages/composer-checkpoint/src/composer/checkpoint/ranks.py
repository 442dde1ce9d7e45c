"""Work that one rank does for the others; an error is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from composer.checkpoint.durable import scratch_folder
from composer.utils import dist

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
        ConnectionError: It failed on another rank with such an error; on that one, its own error is raised.
        TimeoutError: Likewise.
        RuntimeError: It failed on another rank with any other error, or there are several processes, but no process
            group.
    """
    result: Any = None
    failure = None
    if (dist.get_local_rank() if each_node else dist.get_global_rank()) == 0:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - sent to the other ranks, then raised
            failure = error
    described: tuple[type[Exception], str] | None = None
    if failure is not None:
        # Whoever tolerates a lost connection must do so on all ranks, so these errors keep their types.
        kinds = (each for each in (ConnectionError, TimeoutError) if isinstance(failure, each))
        text = f"rank {dist.get_global_rank()}: {type(failure).__name__}: {failure}"
        described = next(kinds, RuntimeError), text
    outcomes = dist.all_gather_object((described, result))
    if failure is not None:
        raise failure
    for described, _ in outcomes:
        if described is not None:
            kind, message = described
            raise kind(f"{problem}: {message}")
    first: T = outcomes[0][1]
    return first


@contextmanager
def on_each_node(fetch: Callable[[Path], None]) -> Iterator[Path]:
    """Fill a temporary folder on each node; it is removed when all ranks have left. A collective operation.

    Args:
        fetch: Fills a folder.

    Raises:
        Exception: As `on_first_rank`.
    """
    with ExitStack() as made:
        folder = str(made.enter_context(scratch_folder("download"))) if dist.get_local_rank() == 0 else ""
        on_first_rank(lambda: fetch(Path(folder)), each_node=True)
        folders = dict(pair for pair in dist.all_gather_object((dist.get_node_rank(), folder)) if pair[1])
        yield Path(folders[dist.get_node_rank()])
        dist.barrier()
