"""Test that a job that is killed and relaunched gives bit-exactly the results of an uninterrupted job."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from composer.core.callback import Callback
from composer.core.saving.optimizers import optimizers_state
from composer.core.state import State
from composer.loggers import Logger
from composer.testing._compare import deep_compare
from composer.testing._processes import run_on_ranks
from composer.utils.misc import unwrapped_model
from composer.utils.reproducibility import seed_all, seed_context

_WALL_CLOCK = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")
_LAST_BATCH_KEYS = frozenset({"losses", "train_metrics"})
_END = "end"


class _Job(Protocol):
    """The result of the user's function, usually a `Trainer`."""

    @property
    def state(self) -> State: ...

    def fit(self) -> Any: ...

    def close(self) -> Any: ...


@dataclass(frozen=True)
class ResumptionReport:
    """The result of `assert_resumes_exactly`.

    Attributes:
        batches: The number of batches of the uninterrupted run.
        kills: The batches at which the other run was killed.
        resumed_from: The first batch of each relaunch; 0 if it found no checkpoint.
    """

    batches: int
    kills: tuple[float, ...]
    resumed_from: tuple[int, ...]


def assert_resumes_exactly(
    make: Callable[[Path], _Job],
    kills: Sequence[float] | None = None,
    *,
    sigkill: bool = False,
    folder: str | os.PathLike[str] | None = None,
    ignore: Collection[str] = (),
    timeout: float = 600.0,
) -> ResumptionReport:
    """Assert that a job that is killed and relaunched trains bit-exactly like an uninterrupted job.

    The job runs once without interruption. Then it runs in another folder, is killed at each of the given batches in
    turn, and is constructed again after each kill, with other states of the global generators, as in a new process. At
    the start of every batch and after `fit` these are compared: the batch, model, optimizers, schedulers, algorithms,
    scaler, timestamp (without wall-clock times), the generators of Python, NumPy, torch and CUDA, losses and metrics.

    Args:
        make: A function that constructs the job in a given folder: a `Trainer`, or an object with `state`, `fit()` and
            `close()`. The job must save to the folder and resume from it (`save_folder=folder, save_interval="1ba",
            autoresume=True, run_name=...`). Random numbers before it sets its seed differ between launches.
        kills: Batches, from 0, ascending: the run is killed at the start of the batch. With `sigkill`, 3.5 is about
            half a batch later. None: after one third and two thirds of the run.
        sigkill: Kill real processes with SIGKILL, instead of raising an exception in this process. `make` must then be
            a function at the top level of a module or script, and each launch takes seconds.
        folder: The folder for both runs; None: a temporary folder.
        ignore: Keys, at any depth, that may differ.
        timeout: The timeout of a process in seconds; only with `sigkill`.

    Returns:
        The batches of the run, the kills, and the first batch of each relaunch.

    Raises:
        AssertionError: The runs differ. The message names the batch, the first entry that differs, and the difference;
            or no relaunch resumed from a checkpoint.
        ValueError: `kills` are not ascending numbers of batches of the run.

    Example:
        ::

            def make(folder):
                model = Classifier()
                return Trainer(
                    model=model,
                    train_dataloader=DataLoader(data, batch_size=8, shuffle=True),
                    max_duration="6ba",
                    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
                    seed=1,
                    run_name="proof",
                    save_folder=folder,
                    save_interval="1ba",
                    autoresume=True,
                )


            def test_my_job_resumes_exactly():
                assert_resumes_exactly(make, kills=[2, 4])
    """
    _check_kills(kills, None)
    with _folder(folder) as root, seed_context(0):  # gives the generators their states back afterwards
        launcher = _Launcher(make, root, frozenset(ignore), timeout if sigkill else None)
        launcher.launch("uninterrupted", 0, None)
        batches = int((root / "records" / _END).read_text())
        kills = sorted({batches // 3, 2 * batches // 3}) if kills is None else kills
        _check_kills(kills, batches)
        first_batches = [launcher.launch("killed", number, kill) for number, kill in enumerate([*kills, None])]
        resumed_from = tuple(first_batches[1:])
        if kills and max(kills) >= 1 and not any(resumed_from):
            raise AssertionError(
                f"The job was killed at batches {list(kills)} and started from scratch each time: it did not save "
                f"to the folder, or did not resume from it. Pass `save_folder=folder, "
                f'save_interval="1ba", autoresume=True, run_name=...` '
                f"to the `Trainer`, and kill it after its first checkpoint."
            )
        return ResumptionReport(batches, tuple(kills), resumed_from)


def _check_kills(kills: Sequence[float] | None, batches: int | None) -> None:
    if kills is None:
        return
    wrong = any(kill < 0 or (batches is not None and kill >= batches) for kill in kills)
    if wrong or any(a >= b for a, b in zip(kills, list(kills)[1:], strict=False)):
        limit = "" if batches is None else f" below {batches}, the length of the run"
        raise ValueError(
            f"`kills` must be ascending numbers of batches{limit}, got {list(kills)!r}. The first batch is 0."
        )


@contextmanager
def _folder(given: str | os.PathLike[str] | None) -> Iterator[Path]:
    if given is not None:
        yield Path(given)
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        yield Path(made)


# ---- launches ----


@dataclass(frozen=True)
class _Launcher:
    """Launches the job in this process, or in a new process if there is a `timeout`."""

    make: Callable[[Path], _Job]
    folder: Path
    ignore: frozenset[str]
    timeout: float | None

    def launch(self, name: str, number: int, kill: float | None) -> int:
        """Run the job until it is killed or ends; return its first batch."""
        if self.timeout is None:
            return self._run(name, number, kill)
        try:
            run_on_ranks(self._run, 1, name, number, kill, timeout=self.timeout, backend=None)
        except RuntimeError as error:
            if isinstance(error.__cause__, AssertionError):
                raise error.__cause__ from None
            if not (self.folder / f"killed-{number}").exists():
                raise
        return int((self.folder / f"begun-{name}-{number}").read_text())

    def _run(self, name: str, number: int, kill: float | None) -> int:
        seed_all(1000 + number)  # in a new process the generators have other states
        own = self.folder / name
        own.mkdir(parents=True, exist_ok=True)
        job = self.make(own)
        journal = _Journal(self.folder, name, number, self.ignore)
        job.state.callbacks.append(journal)
        if kill is not None:
            note = None if self.timeout is None else self.folder / f"killed-{number}"
            job.state.callbacks.append(_Kill(kill, note))
        try:
            job.fit()
            journal.end(job.state)
        except _Killed:
            pass
        finally:
            with suppress(_Killed):
                job.close()
        return journal.first_batch


class _Killed(BaseException):
    """Simulates the end of the process; not caught by `except Exception`."""


class _Kill(Callback):
    """Callback that kills the run at the start of a batch, or a fraction of a batch later."""

    def __init__(self, when: float, note: Path | None) -> None:
        self.batch, self.delay = int(when), when - int(when)
        self.note = note
        self._last = time.monotonic()

    def batch_start(self, state: State, logger: Logger) -> None:
        now = time.monotonic()
        lap, self._last = now - self._last, now
        if state.timestamp.batch != self.batch:
            return
        if self.note is None:
            raise _Killed
        if self.delay:
            threading.Timer(self.delay * lap, self._die).start()
        else:
            self._die()

    def _die(self) -> None:
        assert self.note is not None
        self.note.write_text("")
        os.kill(os.getpid(), signal.SIGKILL)


# ---- records ----


class _Journal(Callback):
    """Callback that records the uninterrupted run at each batch, or compares another run with the records.

    Attributes:
        first_batch: The first batch that this launch trained.
    """

    def __init__(self, folder: Path, name: str, launch: int, ignore: frozenset[str]) -> None:
        self.folder, self.ignore, self.launch = folder / "records", ignore, launch
        self.compares = name != "uninterrupted"
        self.first_batch = 0
        self._note = folder / f"begun-{name}-{launch}"  # read by the process that started this one
        self._begun = False
        self.folder.mkdir(parents=True, exist_ok=True)

    def _begin(self, state: State) -> None:
        if not self._begun:
            self._begun, self.first_batch = True, state.timestamp.batch.value
            self._note.write_text(str(self.first_batch))

    def batch_start(self, state: State, logger: Logger) -> None:
        before = _LAST_BATCH_KEYS if not self._begun else frozenset()  # not restored by a relaunch
        self._begin(state)
        self._visit(str(state.timestamp.batch.value), {"batch": _plain(state.batch), **_record(state)}, before)

    def end(self, state: State) -> None:
        """Record or compare the state after `fit`."""
        before = _LAST_BATCH_KEYS if not self._begun else frozenset()  # a relaunch may have nothing left to train
        self._begin(state)
        self._visit("after", _record(state) | {"eval_metrics": _plain(dict(state.eval_metric_values))}, before)
        if not self.compares:
            (self.folder / _END).write_text(str(state.timestamp.batch.value))

    def _visit(self, name: str, record: dict[str, Any], ignore: frozenset[str] = frozenset()) -> None:
        path = self.folder / f"{name}.pt"
        if not self.compares:
            torch.save(record, path)
            return
        where = "After `fit`" if name == "after" else f"At the start of batch {name}"
        if not path.exists():
            raise AssertionError(f"{where}: the uninterrupted run has already ended.")
        try:
            deep_compare(torch.load(path, weights_only=False), record, ignore_keys=self.ignore | ignore)
        except AssertionError as error:
            difference = f"the run that was relaunched at batch {self.first_batch} differs from the uninterrupted one"
            if self.launch == 0:
                difference = (
                    "a second run differs from the first although it was not killed yet. Make the job deterministic "
                    "(`seed=`, `deterministic_mode=True`), or list keys that may differ in `ignore`. The first "
                    "difference"
                )
            raise AssertionError(f"{where}, {difference}: {error}") from None


def _record(state: State) -> dict[str, Any]:
    """Return everything that determines the rest of the run, with the easiest differences to understand first."""
    timestamp = {key: value for key, value in state.timestamp.state_dict().items() if key not in _WALL_CLOCK}
    return {
        "rank_zero_seed": state.rank_zero_seed,
        "timestamp": timestamp,
        "model": _plain(unwrapped_model(state.model).state_dict()),
        "optimizers": optimizers_state(state),
        "schedulers": [_plain(scheduler.state_dict()) for scheduler in state.schedulers],
        "algorithms": [{type(a).__name__: _plain(a.state_dict())} for a in state.algorithms],
        "scaler": None if state.scaler is None else state.scaler.state_dict(),
        "generators": _generators(),
        "losses": _plain(dict(state.total_loss_dict)),
        "train_metrics": _plain(dict(state.train_metric_values)),
    }


def _plain(value: Any) -> Any:
    """Replace objects other than tensors, arrays, numbers, strings and containers by a number or a class name."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, (torch.Tensor, np.ndarray, int, float, str, bytes, bool, type(None))):
        return value
    return float(value) if hasattr(value, "__float__") else type(value).__name__  # such as `DeferredValue`


def _generators() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states
