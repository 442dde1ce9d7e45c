"""Run a function in several processes that form a `torch.distributed` group."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NoReturn, TypeVar

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from composer.utils import dist
from composer.utils.misc import get_free_tcp_port

T = TypeVar("T")

_GRACE_SECONDS = 5.0


def run_on_ranks(
    fn: Callable[..., T], world_size: int = 2, *args: Any, timeout: float = 300.0, backend: str | None = "gloo"
) -> list[T]:
    """Call a function concurrently in several new processes and return the results.

    Each process gets the environment variables of a launcher on a single node, and one thread per torch operation.

    Args:
        fn: A function at the top level of a module.
        world_size: The number of processes.
        *args: The arguments, the same in all processes; pickled.
        timeout: Seconds until all processes are terminated and the call fails.
        backend: The backend of the process group, which is initialized before the call; None: no process group.

    Returns:
        The result of each rank (pickled), by rank.

    Raises:
        RuntimeError: A rank raised (with its traceback, and its exception as the cause) or died. The other ranks
            are terminated.
        TimeoutError: A rank did not finish in time.
    """
    task = _Task.of(fn, args, backend)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_tcp_port())}
        environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "NODE_RANK": "0"}
        results = [Path(folder, f"result-{rank}") for rank in range(world_size)]
        arguments = task, environment, folder, timeout
        options: dict[str, Any] = {"daemon": True, "start_method": _context().get_start_method()}
        context: Any = start_processes(_work, arguments, world_size, join=False, **options)  # type: ignore[no-untyped-call]
        deadline = time.monotonic() + timeout
        try:
            while not context.join(min(1.0, timeout)):
                missing = [rank for rank, path in enumerate(results) if not path.exists()]
                if not missing:  # a thread may keep a process from exiting
                    context.join(_GRACE_SECONDS)
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"The ranks {missing} did not finish within {timeout} seconds.")
        except ProcessException as error:
            _raise_first_failure(Path(folder), [process.exitcode for process in context.processes], error)
        finally:
            for process in context.processes:
                process.kill()
                process.join()
        return [pickle.loads(path.read_bytes()) for path in results]


def restore_signals() -> None:
    """Let SIGINT and SIGHUP end processes again, if the program that started the tests ignores these signals.

    `nohup` ignores them, and so do shells for a command in the background; all processes of the tests would inherit it.
    """
    for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@dataclass(frozen=True)
class _Task:
    files: dict[str, str | None]  # the files of the modules that define the function and its arguments
    content: bytes  # the pickled function and arguments
    backend: str | None

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...], backend: str | None) -> _Task:
        content = io.BytesIO()
        pickler = _Pickler(content)
        pickler.dump((fn, args))
        files = {name: getattr(sys.modules[name], "__file__", None) for name in pickler.modules}
        return cls(files, content.getvalue(), backend)

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        for name, file in self.files.items():
            _import(name, file)
        content: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.loads(self.content)
        return content


class _Pickler(pickle.Pickler):
    """A pickler that records the modules it refers to, in order."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: dict[str, None] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType):
            self.modules[obj.__module__] = None
        return NotImplemented


def _import(name: str, file: str | None) -> None:
    """Import a module; from its file if it is not on the path, like many test modules."""
    try:
        if import_module(name).__file__ == file:
            return
    except (AttributeError, ModuleNotFoundError):  # builtins have no file
        if file is None:
            return
    assert file is not None
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    parents = name.split(".")[:-1]
    for depth in range(len(parents)):  # pytest names test modules by their path, and pickle imports the parents
        parent = ".".join(parents[: depth + 1])
        sys.modules.setdefault(parent, ModuleType(parent))
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    # Imported once instead of in each process; missing modules are skipped. Optimizers import the compiler: slow.
    modules = [
        __name__,
        "torch.distributed",
        "torch.distributed.checkpoint",
        "torch._dynamo",
        "torchmetrics.classification",
        "composer.trainer",
        "composer.trainer.sharded",
    ]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(modules)
    return context


def _work(rank: int, task: _Task, environment: dict[str, str], folder: str, timeout: float) -> None:
    """Run the task in a process, and write the pickled result, or the failure."""
    os.environ.clear()  # a fork server has the environment from when it was started
    os.environ.update({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    try:
        if task.backend is not None:
            torch.distributed.init_process_group(
                task.backend,
                init_method=f"file://{folder}/store",  # unlike a port, it cannot be taken by another process
                rank=rank,
                world_size=int(environment["WORLD_SIZE"]),
                timeout=timedelta(seconds=timeout),
            )
        function, arguments = task.load()
        result = pickle.dumps(function(*arguments))
    except BaseException as error:  # noqa: BLE001  # raised again in the parent
        # The clock is shared by all processes: the first failure is usually the cause of the others.
        failure = pickle.dumps((time.monotonic(), rank, traceback.format_exc(), _pickled(error)))
        _write(Path(folder, f"failure-{rank}"), failure)
        sys.exit(1)
    _write(Path(folder, f"result-{rank}"), result)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # other ranks may still read from this one
        dist.destroy_process_group()


def _write(path: Path, content: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.replace(path)


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions can be pickled, but not unpickled
    except Exception:  # noqa: BLE001  # then there is only the traceback
        return None
    return data


def _raise_first_failure(folder: Path, exit_codes: list[int | None], error: ProcessException) -> NoReturn:
    """Raise the failure of the rank that died, or else that of the rank that failed first."""
    failures = sorted(pickle.loads(path.read_bytes()) for path in folder.glob("failure-?"))
    failed = {rank for _, rank, _, _ in failures}
    # The others are terminated when one has failed.
    ended = {
        rank: code for rank, code in enumerate(exit_codes) if code not in (0, -signal.SIGTERM) and rank not in failed
    }
    if ended or not failures:
        rank = min(ended, default=error.error_index)
        text = f"The process ended with exit code {exit_codes[rank]} and no result."
        raise RuntimeError(f"Rank {rank} failed.\n{text}") from None
    _, rank, text, cause = failures[0]
    raise RuntimeError(f"Rank {rank} failed.\n{text}") from (None if cause is None else pickle.loads(cause))
