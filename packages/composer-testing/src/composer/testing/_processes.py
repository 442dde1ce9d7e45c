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
from multiprocessing.connection import Connection, wait
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import torch

from composer.utils import dist
from composer.utils.misc import get_free_tcp_port

T = TypeVar("T")

_GRACE_SECONDS = 5.0
_HINDSIGHT_SECONDS = 0.2


def run_on_ranks(
    fn: Callable[..., T], world_size: int = 2, *args: Any, timeout: float = 60.0, backend: str | None = "gloo"
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
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_tcp_port())}
        environment |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "NODE_RANK": "0"}
        processes, pipes = [], []
        for rank in range(world_size):
            here, there = context.Pipe(duplex=False)
            ranked = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(
                target=_work, args=(task, ranked, os.path.join(folder, "store"), timeout, there), daemon=True
            )
            process.start()
            there.close()  # with this copy open, the end of the child would not be noticed
            processes.append(process)
            pipes.append(here)
        patience = 0.0
        try:
            results = _collect(pipes, processes, timeout)
            patience = _GRACE_SECONDS  # all have results, so they exit on their own
        finally:
            _end(processes, patience)
            for pipe in pipes:
                pipe.close()
    return [pickle.loads(result) for result in results]


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


@dataclass(frozen=True)
class _Failure:
    time: float  # by a clock shared by all processes: the first failure is usually the cause of the others
    traceback: str
    error: bytes | None


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # Imported once instead of in each process; missing modules are skipped. Optimizers import the compiler: slow.
    context.set_forkserver_preload(
        [
            __name__,
            "torch.distributed",
            "torch.distributed.checkpoint",
            "torch._dynamo",
            "torchmetrics.classification",
            "composer.trainer",
            "composer.trainer.sharded",
        ]
    )
    return context


def _work(task: _Task, environment: dict[str, str], store: str, timeout: float, pipe: Connection) -> None:
    """Run the task in a process, and send the pickled result or a `_Failure` through the pipe."""
    os.environ.clear()  # a fork server has the environment from when it was started
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        if task.backend is not None:
            torch.distributed.init_process_group(
                task.backend,
                init_method=f"file://{store}",  # unlike a port, it cannot be taken by another process
                rank=int(environment["RANK"]),
                world_size=int(environment["WORLD_SIZE"]),
                timeout=timedelta(seconds=timeout),
            )
        function, arguments = task.load()
        message: bytes | _Failure = pickle.dumps(function(*arguments))
    except BaseException as error:  # noqa: BLE001  # raised again in the parent
        message = _Failure(time.monotonic(), traceback.format_exc(), _pickled(error))
    pipe.send(message)
    if isinstance(message, bytes) and torch.distributed.is_initialized():
        torch.distributed.barrier()  # other ranks may still read from this one
        dist.destroy_process_group()


def _pickled(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # many exceptions can be pickled, but not unpickled
    except Exception:  # noqa: BLE001  # then there is only the traceback
        return None
    return data


def _collect(pipes: list[Connection], processes: list[Any], timeout: float) -> list[bytes]:
    deadline = time.monotonic() + timeout
    results: dict[int, bytes] = {}
    failures: dict[int, _Failure] = {}
    missing = [*range(len(pipes))]
    while missing:
        ready = wait([pipes[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank in missing if pipes[rank] in ready]:
            message = _receive(pipes[rank], processes[rank])
            if isinstance(message, _Failure):
                failures[rank] = message
            else:
                results[rank] = message
            missing.remove(rank)
        if failures:  # an earlier failure of another rank may arrive shortly
            deadline = min(deadline, time.monotonic() + _HINDSIGHT_SECONDS)
    if failures:
        first = min(failures, key=lambda rank: failures[rank].time)
        failure = failures[first]
        cause = None if failure.error is None else pickle.loads(failure.error)
        raise RuntimeError(f"Rank {first} failed.\n{failure.traceback}") from cause
    if missing:
        raise TimeoutError(f"The ranks {missing} did not finish within {timeout} seconds.")
    return [results[rank] for rank in range(len(pipes))]


def _receive(pipe: Connection, process: Any) -> bytes | _Failure:
    try:
        message: bytes | _Failure = pipe.recv()
    except EOFError:
        process.join(_GRACE_SECONDS)
        # Time 0: a process that died is the cause of the failures of others.
        return _Failure(0.0, f"The process ended with exit code {process.exitcode} and no result.", None)
    return message


def _end(processes: list[Any], patience: float) -> None:
    """Wait some seconds for processes to exit, then terminate them."""
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(_GRACE_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
