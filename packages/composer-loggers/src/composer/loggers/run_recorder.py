"""A logger that records a run, to be looked at later."""

from __future__ import annotations

import os
import secrets
import sys
import time
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from composer.core import Callback
from composer.loggers import LoggerDestination
from composer.loggers import _run_facts as facts
from composer.loggers._acts import ALGORITHM, ActCounter
from composer.loggers._run_file import RunFile, plain
from composer.loggers._sender import Sender, check_on_error, hold_metrics, report_failure
from composer.utils import dist, format_name_with_dist, is_uri

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

__all__ = ["RunRecorder"]

_SCHEMA = 1
_HOST = "node_name"  # which the Trainer logs: a record, which others may read, names no hosts
_ACTS_SECONDS = 10.0  # between two records of when algorithms acted
_MOST_ROWS = 1000  # of a table
_WRITE_SECONDS = 1.0  # how far the file may lag behind
_CAPACITY = 1 << 18  # calls of `log_metrics` that may wait, for training steps of microseconds


class RunRecorder(LoggerDestination):
    """Records a run in a folder, as `composer-report` (package `composer-report`) shows it and `read_run` reads it.

    The file `run-rank0.jsonl` gets everything that is logged and happens, as lines of JSON: metrics with step, epoch
    and seconds; hyperparameters, evaluations, tables; machine and versions (no environment variables, no names of hosts
    or users; hyperparameters named like a password or key are hidden); the engine's plan; when each algorithm acted, as
    spans of batches; modules that were replaced; checkpoints; and how the run ended. Images are left out.

    A step puts what is logged into a queue, and a thread writes it: a step waits neither for the disk nor for the
    device.

    Recording into a folder again appends: a run that is resumed from a checkpoint goes on where the checkpoint was, and
    what came after the checkpoint is marked as superseded. A line that a killed process left unfinished does no harm.

    The lines are documented in the README of this package, "What RunRecorder writes".

    Args:
        folder: The run's folder. May contain `{run_name}`, `{rank}` and the like, as file names elsewhere.
        group: What the run is one of, for example the recipe of which it is one seed: a report shows the runs of a
            group as one, with mean and spread. None: it stands alone.
        rank_zero_only: Whether only rank 0 records. Otherwise every rank writes a file of its own.
        on_error: What happens if writing fails: "warn" (once, and the run goes on) or "raise".
        timeout: How long checkpoints, `close` and the end of the process wait for the thread, in seconds.

    Attributes:
        path: The file, once the run has begun; None on ranks that record nothing.

    Raises:
        ValueError: `on_error` is unknown, or `timeout` is not positive.

    Example:
        >>> import tempfile, torch
        >>> from composer.core import Engine, State
        >>> folder = tempfile.mkdtemp()
        >>> recorder = RunRecorder(folder)
        >>> state = State(
        ...     model=torch.nn.Linear(1, 1), max_duration="1ep", callbacks=[recorder], run_name="short"
        ... )
        >>> engine = Engine(state)
        >>> _ = engine.run_event("init")
        >>> engine.logger.log_metrics({"loss": 0.5})
        >>> engine.close()
        >>> recorder.path.name, "loss" in recorder.path.read_text()
        ('run-rank0.jsonl', True)
    """

    accepts_deferred: ClassVar[bool] = True

    def __init__(
        self,
        folder: str | os.PathLike[str] = "{run_name}",
        *,
        group: str | None = None,
        rank_zero_only: bool = True,
        on_error: str = "warn",
        timeout: float = 60.0,
    ) -> None:
        if timeout <= 0:
            raise ValueError(f"`timeout` must be positive, got {timeout!r}.")
        check_on_error(on_error)
        self.folder = os.path.expanduser(os.fspath(folder))
        self.group = group
        self.rank_zero_only, self.on_error, self.timeout = rank_zero_only, on_error, timeout
        self.path: Path | None = None
        self._sender: Sender | None = None
        self._file: RunFile | None = None
        self._resumed: dict[str, Any] | None = None
        self._previous_hook: Any = None
        self._forget()

    def _forget(self) -> None:
        """Begin another run."""
        self._attempt = ""
        self._began = 0.0
        self._begun = False
        self._mark: tuple[int, int] = (0, -1)  # the number of the last mark, and of records up to it
        self._before: list[dict[str, Any]] = []  # logged before the run began
        self._acts = ActCounter()
        self._acts_due = 0.0
        self._state: State | None = None
        self._modules: dict[str, type] | None = None
        self._savers: list[Any] = []
        self._saved: list[set[str]] = []  # the checkpoints of each saver that are recorded
        self._goes_on = False
        self._limit: Any = None
        self._evaluation_began, self._status = 0.0, "unused"
        self._described: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the thread and the file, for copies."""
        return {
            **vars(self),
            "_sender": None,
            "_file": None,
            "_state": None,
            "_savers": [],
            "_saved": [],
            "_previous_hook": None,
        }

    # ---- what is logged ----

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self._sender is None:
            hold_metrics(metrics)
        else:
            self._sender.put_metrics(metrics, 0 if step is None else step)

    def log_traces(self, traces: dict[str, Any]) -> None:
        state = self._state
        if state is not None:
            add, batch = self._acts.add, state.timestamp._batch
            for key, value in traces.items():
                if key.startswith(ALGORITHM):
                    add(key, batch)
                else:  # somebody's own
                    self.log_metrics({key: value}, batch)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        values = {str(key): plain(value, str(key)) for key, value in hyperparameters.items() if key != _HOST}
        self._put("hyperparameters", values=values)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        kept = [[plain(cell) for cell in row] for row in rows[:_MOST_ROWS]]
        self._put("table", name=name, step=step, columns=[str(c) for c in columns], rows=kept, num_rows=len(rows))

    # ---- the beginning ----

    def init(self, state: State, logger: Logger) -> None:
        before = self._before
        self._forget()
        self._begun, self.path = True, None
        if self.rank_zero_only and dist.get_global_rank() != 0:
            return
        self._began = time.time()
        self._attempt = f"{int(self._began * 1000):x}-{secrets.token_hex(3)}"
        folder = Path(format_name_with_dist(self.folder, state.run_name))
        path = folder / f"run-rank{dist.get_global_rank()}.jsonl"
        try:
            self._file = RunFile(path, self._began)
        except OSError as error:
            report_failure("RunRecorder", error, self.on_error)
            return
        self.path, self._state = path, state
        self._sender = Sender(
            "RunRecorder",
            self._file.write_metrics,
            on_error=self.on_error,
            interval=_WRITE_SECONDS,
            capacity=_CAPACITY,
            timeout=self.timeout,
        )
        self._put(
            "start",
            schema=_SCHEMA,
            attempt=self._attempt,
            time=self._began,
            run_name=state.run_name,
            group=self.group,
            seed=state.rank_zero_seed,
            rank=dist.get_global_rank(),
        )
        self._sender.put(partial(_write_environment, self._file, facts.machine(state)))
        for record in before:
            self._put(record.pop("type"), **record)
        self._modules = facts.module_classes(state.model)
        self._previous_hook, sys.excepthook = sys.excepthook, self._on_exception

    def after_load(self, state: State, logger: Logger) -> None:
        self._write_modules(state)
        resumed, self._resumed = self._resumed, None
        self._goes_on = state.timestamp.batch.value > 0
        if self._goes_on:
            mark = (resumed or {}).get("mark")
            self._put("resume", mark=mark, epoch=state.timestamp.epoch.value, batch=state.timestamp.batch.value)
            self._put_epoch(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._write_modules(state)
        self._limit, self._status = state.max_duration, "stopped"  # unless it comes to its end
        self._savers = [c for c in state.callbacks if hasattr(c, "all_saved_checkpoints_to_timestamp")]
        # A checkpoint is recorded after what it holds: a run that goes on from one tells of it anew.
        known = [() if self._goes_on else saver.all_saved_checkpoints_to_timestamp for saver in self._savers]
        self._saved, self._goes_on = [set(paths) for paths in known], False
        described = [*state.algorithms, *state.callbacks]
        if self._sender is not None and described != self._described:
            self._described = described
            self._put("model", values=facts.describe_model(state.model))
            self._put("algorithms", values=facts.describe_algorithms(state))
            if logger.plan is not None:
                self._put("plan", rows=facts.plan_rows(logger.plan))
        length = state.dataloader_len
        self._put(
            "fit_start",
            batch=state.timestamp.batch.value,
            max_duration=None if state.max_duration is None else str(state.max_duration),
            epoch_batches=None if length is None else length.value,
        )
        self._acts_due = time.monotonic() + _ACTS_SECONDS

    def _write_modules(self, state: State) -> None:
        if self._sender is not None and self._modules is not None:
            after = facts.module_classes(state.model)
            changes = facts.module_changes(self._modules, after)
            self._modules = after
            if changes is not None:
                self._put("modules", batch=state.timestamp.batch.value, **changes)

    # ---- on the way ----

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._put_epoch(state)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._put_epoch(state)

    def _put_epoch(self, state: State) -> None:
        now = state.timestamp
        fields = {"epoch": now.epoch.value, "batch": now.batch.value, "batch_in_epoch": now.batch_in_epoch.value}
        self._put("epoch", **fields, sample=now.sample.value, token=now.token.value)

    def batch_end(self, state: State, logger: Logger) -> None:
        if time.monotonic() >= self._acts_due:
            self._write_acts()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._note_checkpoints()

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._note_checkpoints()

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        self._note_checkpoints()

    def eval_start(self, state: State, logger: Logger) -> None:
        self._evaluation_began = time.perf_counter()

    def eval_end(self, state: State, logger: Logger) -> None:
        self._put(
            "evaluation",
            label=state.dataloader_label,
            step=state.timestamp.batch.value,
            duration=time.perf_counter() - self._evaluation_began,
            batches=state.eval_timestamp.batch.value,
            samples=state.eval_timestamp.sample.value,
        )

    def _write_acts(self) -> None:
        self._acts_due = time.monotonic() + _ACTS_SECONDS
        acts = self._acts.take()
        if acts:
            self._put("acts", values=acts)

    def _note_checkpoints(self) -> None:
        for saver, saved in zip(self._savers, self._saved, strict=True):
            times = saver.all_saved_checkpoints_to_timestamp
            if len(times) == len(saved):
                continue
            remote = _remote_of(saver)
            for path in [path for path in times if path not in saved]:
                saved.add(path)
                now = times[path]
                where = Path(path).name if remote else self._relative(path)
                self._put("checkpoint", path=where, remote=remote, epoch=now.epoch.value, batch=now.batch.value)

    def _relative(self, path: str) -> str:
        """Seen from the run's folder, which may be moved with its checkpoints."""
        assert self.path is not None
        try:
            return Path(os.path.relpath(path, self.path.parent)).as_posix()
        except ValueError:  # another drive of Windows
            return Path(path).as_posix()

    # ---- checkpoints and the end ----

    def state_dict(self) -> dict[str, Any]:
        """Where in the file the checkpoint is, so that a run that goes on from it knows what it replaces."""
        if self._sender is None:
            return {}
        self._write_acts()
        number, records = self._mark
        if records != self._sender._put:  # something was recorded since
            number += 1
            self._put("mark", mark=f"{self._attempt}.{number}")
            self._mark = (number, self._sender._put)
        self._sender.flush(check=False)
        return {"mark": f"{self._attempt}.{number}"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state or None

    def fit_end(self, state: State, logger: Logger) -> None:
        self._note_checkpoints()
        self._write_acts()
        limit = state.max_duration
        early = self._limit is not None and limit is not None and self._limit != limit
        self._status = "stopped" if early else "finished"
        self._put("fit_end", status=self._status, epoch=state.timestamp.epoch.value, batch=state.timestamp.batch.value)
        if self._sender is not None:
            self._sender.fetch()

    def close(self, state: State, logger: Logger) -> None:
        if self._sender is None:
            return
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        self._end(sys.exc_info()[1])

    def post_close(self) -> None:
        sender, file, self._sender, self._file = self._sender, self._file, None, None
        self._state, self._savers = None, []
        if sender is not None and file is not None:
            sender.put(file.close, check=False)
            sender.close()

    def _end(self, error: BaseException | None) -> None:
        """Record how the run ended, once."""
        state = self._state
        if state is None or self._sender is None or self._status == "ended":
            return
        self._note_checkpoints()
        self._write_acts()
        kept = [self._relative(path) for saver in self._savers for path in getattr(saver, "saved_checkpoints", ())]
        crashed = error is not None and self._status != "finished"
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        described = (
            None if error is None or not crashed else {"type": type(error).__name__, "message": plain(str(error))}
        )
        self._put(
            "end",
            status="crashed" if crashed and not interrupted else self._status,
            error=described,
            epoch=state.timestamp.epoch.value,
            batch=state.timestamp.batch.value,
            kept_checkpoints=kept,
            dropped=self._sender._dropped,
        )
        self._status = "ended"
        self._sender.fetch()

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._previous_hook(kind, error, traceback)
        if self._sender is not None:
            self._end(error)
            self._sender.flush(check=False)

    def _put(self, type: str, /, **fields: Any) -> None:
        if self._sender is not None and self._file is not None:
            seconds = round(time.time() - self._began, 3)
            record = {"type": type, "seconds": seconds, **fields}
            size = 1 + sum(len(rows) for rows in fields.values() if isinstance(rows, list)) // 8
            self._sender.put(partial(self._file.write, record), size=size)
        elif not self._begun:
            self._before.append({"type": type, **fields})


def _write_environment(file: RunFile, machine: dict[str, Any]) -> None:
    file.write({"type": "environment", "values": machine | {"packages": facts.packages()}})


def _remote_of(saver: Callback) -> str | None:
    """Where a saver uploads to; None: it does not."""
    where = getattr(saver, "saved_to", None)
    return str(plain(where)) if isinstance(where, str) and is_uri(where) else None
