"""Each run in a separate process, in parallel over the cores or GPUs of this machine; finished runs survive a kill."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from composer.evidence.ledger import Ledger
from composer.evidence.run import RunResult, RunSpec, execute, hold_machine, read_result, write_atomically
from composer.evidence.task import Part, Task, load_task, module_of

_ATTEMPTS = 2  # how often a run is tried whose process dies


class Incomplete(RuntimeError):
    """Runs of other shards are missing."""


class Runner:
    """Trains the runs of one task and records them in a ledger.

    The result of each run is a file in `folder/runs`, written when the run ends: a kill loses only the runs in
    progress, and `results` continues with the missing ones.

    Args:
        reference: A task: its name, or `module:attribute`.
        folder: The folder of the ledger.
        data_folder: The folder of datasets.
        workers: Runs at the same time. None: one per core, or per GPU.
        device: "cpu" or "gpu".
        precision: The numerical precision of all runs.
        shard: This part of the runs, counted from 1, and the number of parts; the others are left to other machines.
        say: Called with a line of text about the progress.

    Attributes:
        task: The task.
        task_hash: Its hash.
        ledger: The ledger.

    Raises:
        ValueError: An argument is out of range, or there is no such task.
        FileNotFoundError: The data do not exist.
    """

    def __init__(
        self,
        reference: str,
        folder: Path,
        *,
        data_folder: Path | None = None,
        workers: int | None = None,
        device: str = "cpu",
        precision: str = "fp32",
        shard: tuple[int, int] = (1, 1),
        say: Callable[[str], None] = print,
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError(f"`workers` must be at least 1, got {workers!r}.")
        if not 1 <= shard[0] <= shard[1]:
            raise ValueError(f"`shard` must be a part and a number of parts, such as 1/4, got {shard[0]}/{shard[1]}.")
        if device not in ("cpu", "gpu"):
            raise ValueError(f"`device` must be 'cpu' or 'gpu', got {device!r}.")
        self._gpus = visible_gpus() if device == "gpu" else []
        if device == "gpu" and not self._gpus:
            raise ValueError("`device` is 'gpu', but torch sees no CUDA device here. Pass 'cpu'.")
        self.reference, self.folder, self.data_folder = reference, folder, data_folder
        self.task: Task = load_task(reference)
        self.data = self.task.data(data_folder)
        self.task_hash = self.task.hash(self.data)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = workers or len(self._gpus) or cores
        self.device, self.precision, self.shard, self.say = device, precision, shard, say
        self.ledger = Ledger(folder)
        self.expected_steps = 0.0  # of all runs of a command; 0: not known
        self._known: dict[str, RunResult] = {}
        for line in self.ledger.lines("run"):
            result = RunResult.from_json(line)
            self._known[result.spec.id] = result
            there = result.spec.device, result.spec.precision
            if result.spec.task_hash == self.task_hash and there != (device, precision):
                raise ValueError(
                    f"The runs of a task in one ledger must share `device` and `precision`: {folder} has some on "
                    f"{there[0]} in {there[1]}, got {device} and {precision}. Name another folder."
                )
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["composer.evidence._preload", module_of(reference)])

    def spec(self, part: Part, variant: str, steps: int, **others: Any) -> RunSpec:
        """Return the description of a run of this task; `others` are fields of `RunSpec`."""
        fixed: dict[str, Any] = {"device": self.device, "precision": self.precision}
        return RunSpec(self.task.name, self.task_hash, part, variant, steps, **{**fixed, **others})

    def results(self, specs: Sequence[RunSpec], title: str) -> list[RunResult]:
        """Return the results of runs; those that are missing are trained now.

        Args:
            specs: The runs.
            title: The name of this step in messages.

        Raises:
            Incomplete: Runs of other shards are missing.
            RuntimeError: The process of a run died twice.
        """
        wanted = {spec.id: spec for spec in specs}
        missing = [spec for name, spec in wanted.items() if self._find(name) is None]
        part, parts = self.shard
        own = [spec for spec in missing if int(spec.id, 16) % parts == part - 1]
        if own:
            self._train(own, title)
        if len(own) < len(missing):
            left = len(missing) - len(own)
            raise Incomplete(
                f"{title}: {left} of {len(wanted)} runs belong to other shards. Merge their ledgers with "
                f"`composer-evidence merge`, and repeat the command."
            )
        return [self._known[spec.id] for spec in specs]

    def elsewhere(self, folder: Path) -> Runner:
        """Return a runner of the same task with another ledger, so that all its runs are trained again."""
        return Runner(
            self.reference,
            folder,
            data_folder=self.data_folder,
            workers=self.workers,
            device=self.device,
            precision=self.precision,
            say=self.say,
        )

    def call(self, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call a function in a process of its own.

        Raises:
            RuntimeError: The process died.
        """
        process: Any = self._context.Process(target=target, args=arguments)
        process.start()
        process.join()
        if process.exitcode:
            raise RuntimeError(f"The process of `{target.__name__}` died with exit code {process.exitcode}.")

    def environments(self, runs: Iterable[str]) -> list[Mapping[str, Any]]:
        """Return where some finished runs were trained: versions, hardware and source of each."""
        return [self._known[run].environment for run in runs]

    def _steps_so_far(self) -> int:
        return sum(each.spec.steps for each in self._known.values() if each.spec.task_hash == self.task_hash)

    def _find(self, name: str) -> RunResult | None:
        if name not in self._known:
            result = read_result(self._file(name))
            if result is None:
                return None
            self._record(result)  # an earlier process was killed before it added the line
        return self._known[name]

    def _file(self, name: str) -> Path:
        return self.folder / "runs" / f"{name}.json"

    def _record(self, result: RunResult) -> None:
        self._known[result.spec.id] = result
        self.ledger.add("run", result.as_json())

    def _train(self, specs: Sequence[RunSpec], title: str) -> None:
        waiting, running, attempts = list(specs), dict[Any, tuple[Any, RunSpec, int]](), dict[str, int]()
        slots, begin, said, done = list(range(self.workers)), time.perf_counter(), 0.0, 0
        total = sum(spec.steps for spec in specs)
        try:
            while waiting or running:
                while waiting and slots:
                    spec, slot = waiting.pop(0), slots.pop(0)
                    process = self._start(spec, slot)
                    running[process.sentinel] = process, spec, slot
                for sentinel in wait(list(running)):
                    process, spec, slot = running.pop(sentinel)
                    process.join()
                    slots.append(slot)
                    result = read_result(self._file(spec.id))
                    if result is not None:
                        self._record(result)
                        done += spec.steps
                        continue
                    attempts[spec.id] = attempts.get(spec.id, 0) + 1
                    if attempts[spec.id] == _ATTEMPTS:
                        raise RuntimeError(
                            f"The process of run {spec.id} ({title}) died {_ATTEMPTS} times, the last time with "
                            f"exit code {process.exitcode}. If it was killed for memory, use fewer `workers`."
                        )
                    waiting.append(spec)
                elapsed = time.perf_counter() - begin
                if done and (elapsed - said > 10 or (not running and not waiting)):
                    said = elapsed
                    left = elapsed / done * (total - done)
                    count = len(specs) - len(waiting) - len(running)
                    text = f"{title}: {count}/{len(specs)} runs, {_time(elapsed)} passed, {_time(left)} left"
                    if self.expected_steps:
                        rest = max(total - done, self.expected_steps - self._steps_so_far())
                        text += f"; until the end about {_time(elapsed / done * rest)}"
                    self.say(text)
        finally:
            for process, _, _ in running.values():
                process.terminate()
                process.join()

    def _start(self, spec: RunSpec, slot: int) -> Any:
        folder = None if self.data_folder is None else str(self.data_folder)
        gpu = self._gpus[slot % len(self._gpus)] if self._gpus else None
        arguments = self.reference, folder, json.dumps(asdict(spec)), str(self._file(spec.id)), gpu
        process = self._context.Process(target=_run, args=arguments)
        process.start()
        return process


def _run(reference: str, folder: str | None, spec_text: str, file: str, gpu: str | None) -> None:
    """Train one run and write its result; the target of a process."""
    spec = RunSpec.from_json(json.loads(spec_text))
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command gets it, too, and ends its processes
    torch.set_num_threads(spec.threads)
    logging.getLogger("composer").setLevel(logging.ERROR)  # the same advice in every run
    path = Path(file)
    try:
        task = load_task(reference)
        data = task.data(None if folder is None else Path(folder))
        with hold_machine(alone=False):
            result = execute(task, data, spec, path.parent / "teachers")
    except Exception as error:  # noqa: BLE001 -- an error of the task would recur in every attempt
        result = RunResult(spec, "failed", message=f"{type(error).__name__}: {error}")
    write_atomically(path, json.dumps(result.as_json(), allow_nan=False))


def visible_gpus() -> list[str]:
    """Return the names that `CUDA_VISIBLE_DEVICES` gives to the GPUs that torch sees."""
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    return named[:count] if named else [str(index) for index in range(count)]


def _time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
