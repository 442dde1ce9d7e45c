"""A logger that records a run in a file, for a report."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import secrets
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from composer.core import Plan, State
from composer.loggers import format_log_data_value
from composer.loggers.spi import (
    ImageCopy,
    Logged,
    Sender,
    ServiceLogger,
    check_delivery_options,
    flatten_metrics,
    list_images,
    read_arrays,
    report_failure,
    start_copy,
)
from composer.utils import check_finite, dist, format_name_with_dist, is_uri
from composer.utils.file_helpers import without_password
from composer.utils.misc import cpu_model

if TYPE_CHECKING:
    from composer.loggers import Logger

_SCHEMA = 1
_HOST = "node_name"  # a hyperparameter of the Trainer that is left out: a recording names no hosts
_ACTIONS_SECONDS = 10.0  # between two records of the actions of algorithms
_MAX_ROWS = 1000  # recorded of a table
_WRITE_SECONDS = 1.0  # between two writes
_CAPACITY = 1 << 18  # the queue holds enough calls of `log_metrics` for training steps of microseconds
_ALGORITHM_TRACES = "algorithm_traces/"  # the prefix of traces of algorithms
_MAX_SPANS = 128  # recorded for an algorithm at an event between two records
_MAX_MODULES = 200  # replaced modules that are listed by name
_OBJECT_ADDRESS = re.compile(r" object at 0x[0-9a-f]+| at 0x[0-9a-f]+")
_MAX_TEXT = 4000
_MAX_IMAGES = 64  # of a call of `log_images` that are recorded
_NOT_IN_A_FILE_NAME = re.compile(r"[^\w.-]+")
_PNG_COLORS = {1: 0, 3: 2, 4: 6}  # number of channels -> PNG's color type: gray, RGB, RGBA
_SECRET = re.compile(
    r"(^|[^a-z])(api_?key|secrets?|secret_?key|password|passwd|passphrase|credentials?|private_?key"
    r"|(access|auth|api|bearer|hf|hub|wandb)_?token)$",
    re.IGNORECASE,
)
_USER_IN_URI = re.compile(r"(?<=://)[^/@\s]+@")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class RunRecorder(ServiceLogger):
    """Logger that records a run in a folder, for the command `composer-report` and `read_run` of that package.

    The file `run-rank0.jsonl` has one line of JSON for each record: metrics with step, epoch and seconds; arrays,
    such as confusion matrices; hyperparameters, evaluations, tables; hardware and versions (no environment variables,
    no names of hosts or users; hyperparameters with the name of a password or key are hidden); the engine's plan; when
    each algorithm acted, as spans of batches; modules that were replaced; checkpoints; and how the run ended. The last
    images of each name, without masks, are PNG files beside it. Arrays of more than 2**20 elements are left out.

    Training puts logged values into a queue, and a thread writes them: a step waits neither for the disk nor for the
    device.

    Recording into the same folder again appends: a run that is resumed from a checkpoint continues from there, and
    records after that checkpoint are marked as superseded. An incomplete last line of a killed process is harmless.

    The lines are documented in the README of this package, "What RunRecorder writes".

    Args:
        folder: The folder of the run. May contain `{run_name}`, `{rank}` and the like.
        group: The name of a group of runs, for example of one recipe with several seeds: a report shows them as one,
            with mean and spread. None: the run has no group.
        rank_zero_only: True if only rank 0 records. Otherwise every rank writes a file.
        on_error: What to do if writing fails: "warn" (once; the run continues) or "raise".
        timeout: How many seconds checkpoints, `close` and the end of the process wait for the thread.

    Attributes:
        path: The file, set at INIT; None on ranks that do not record.

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

    def __init__(
        self,
        folder: str | os.PathLike[str] = "{run_name}",
        *,
        group: str | None = None,
        rank_zero_only: bool = True,
        on_error: str = "warn",
        timeout: float = 60.0,
    ) -> None:
        check_finite(timeout=timeout, above=0)
        check_delivery_options(on_error)
        self.folder = os.path.expanduser(os.fspath(folder))
        self.group = group
        self.rank_zero_only, self.on_error, self.timeout = rank_zero_only, on_error, timeout
        self.path: Path | None = None
        self._file: _RunFile | None = None
        self._resumed: dict[str, Any] | None = None
        self._previous_hook: Any = None
        self._reset()

    def _reset(self) -> None:
        self._attempt = ""
        self._start_time = 0.0
        self._has_started = False
        self._mark: tuple[int, int] = (0, -1)  # the number of the last mark, and the number of records at that time
        self._before: list[Callable[[], None]] = []  # the calls before INIT
        self._actions = _ActionCounter()
        self._actions_due = 0.0
        self._state: State | None = None
        self._modules: dict[str, type] | None = None
        self._savers: list[Any] = []
        self._saved: list[set[str]] = []  # the checkpoints of each saver that are recorded
        self._is_resumed = False
        self._limit: Any = None
        self._evaluation_began, self._status = 0.0, "unused"
        self._described: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the thread and the file, which cannot be copied."""
        without: dict[str, Any] = {"_file": None, "_state": None, "_savers": [], "_saved": [], "_previous_hook": None}
        return {**super().__getstate__(), **without}

    # ---- values ----

    def log_traces(self, traces: dict[str, Any]) -> None:
        state = self._state
        if state is not None:
            add, batch = self._actions.add, state.timestamp.batches
            for key, value in traces.items():
                if key.startswith(_ALGORITHM_TRACES):
                    add(key, batch)
                else:  # traces of other callbacks
                    self.log_metrics({key: value}, batch)

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        values = {str(key): _plain(value, str(key)) for key, value in hyperparameters.items() if key != _HOST}
        self._put("hyperparameters", values=values)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        kept = [[_plain(cell) for cell in row] for row in rows[:_MAX_ROWS]]
        self._put("table", name=name, step=step, columns=[str(c) for c in columns], rows=kept, num_rows=len(rows))

    def log_images(
        self,
        images: np.ndarray | torch.Tensor | Sequence[np.ndarray | torch.Tensor],
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: dict[int, str] | None = None,
        use_table: bool = False,
    ) -> None:
        arrays = list_images(images)
        if not self._has_started:
            copies = [start_copy(array)() for array in arrays]
            self._before.append(partial(self.log_images, copies, name, channels_last, step))
        if self._sender is not None and self._file is not None:
            seconds = round(time.time() - self._start_time, 3)
            record = {"type": "images", "seconds": seconds, "name": name, "step": step}
            self._sender.put_images(arrays, partial(self._file.write_images, record, channels_last=channels_last))

    # ---- start ----

    def init(self, state: State, logger: Logger) -> None:
        before = self._before
        self._reset()
        self._has_started, self.path = True, None
        if self.rank_zero_only and dist.get_global_rank() != 0:
            return
        self._start_time = time.time()
        self._attempt = f"{int(self._start_time * 1000):x}-{secrets.token_hex(3)}"
        folder = Path(format_name_with_dist(self.folder, state.run_name))
        path = folder / f"run-rank{dist.get_global_rank()}.jsonl"
        try:
            self._file = _RunFile(path, self._start_time)
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
            time=self._start_time,
            run_name=state.run_name,
            group=self.group,
            seed=state.rank_zero_seed,
            rank=dist.get_global_rank(),
        )
        self._sender.put(partial(_write_environment, self._file, _describe_machine(state)))
        for call in before:
            call()
        self._modules = _module_classes(state.model)
        self._previous_hook, sys.excepthook = sys.excepthook, self._on_exception

    def after_load(self, state: State, logger: Logger) -> None:
        self._write_modules(state)
        resumed, self._resumed = self._resumed, None
        self._is_resumed = state.timestamp.batch.value > 0
        if self._is_resumed:
            mark = (resumed or {}).get("mark")
            self._put("resume", mark=mark, epoch=state.timestamp.epoch.value, batch=state.timestamp.batch.value)
            self._put_epoch(state)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._write_modules(state)
        self._limit, self._status = state.max_duration, "stopped"  # `fit` changes this when it finishes
        self._savers = [c for c in state.callbacks if hasattr(c, "all_saved_checkpoints_to_timestamp")]
        # A record of a checkpoint comes after its mark, so a run resumed from that checkpoint records it again.
        known = [() if self._is_resumed else saver.all_saved_checkpoints_to_timestamp for saver in self._savers]
        self._saved, self._is_resumed = [set(paths) for paths in known], False
        described = [*state.algorithms, *state.callbacks]
        if self._sender is not None and described != self._described:
            self._described = described
            self._put("model", values=_describe_model(state.model))
            self._put("algorithms", values=_describe_algorithms(state))
            if logger.plan is not None:
                self._put("plan", rows=_plan_rows(logger.plan))
        length = state.dataloader_len
        self._put(
            "fit_start",
            batch=state.timestamp.batch.value,
            max_duration=None if state.max_duration is None else str(state.max_duration),
            epoch_batches=None if length is None else length.value,
        )
        self._actions_due = time.monotonic() + _ACTIONS_SECONDS

    def _write_modules(self, state: State) -> None:
        if self._sender is not None and self._modules is not None:
            after = _module_classes(state.model)
            changes = _module_changes(self._modules, after)
            self._modules = after
            if changes is not None:
                self._put("modules", batch=state.timestamp.batch.value, **changes)

    # ---- training ----

    def epoch_start(self, state: State, logger: Logger) -> None:
        self._put_epoch(state)

    epoch_end = epoch_start

    def _put_epoch(self, state: State) -> None:
        now = state.timestamp
        fields = {"epoch": now.epoch.value, "batch": now.batch.value, "batch_in_epoch": now.batch_in_epoch.value}
        self._put("epoch", **fields, sample=now.sample.value, token=now.token.value)

    def batch_end(self, state: State, logger: Logger) -> None:
        if time.monotonic() >= self._actions_due:
            self._write_actions()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._record_checkpoints()

    epoch_checkpoint = iteration_checkpoint = batch_checkpoint

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

    def _write_actions(self) -> None:
        self._actions_due = time.monotonic() + _ACTIONS_SECONDS
        actions = self._actions.take()
        if actions:
            self._put("actions", values=actions)

    def _record_checkpoints(self) -> None:
        for saver, saved in zip(self._savers, self._saved, strict=True):
            times = saver.all_saved_checkpoints_to_timestamp
            if len(times) == len(saved):
                continue
            saved_to = getattr(saver, "saved_to", None)
            remote = str(_plain(saved_to)) if isinstance(saved_to, str) and is_uri(saved_to) else None
            for path in [path for path in times if path not in saved]:
                saved.add(path)
                now = times[path]
                where = Path(path).name if remote else self._relative(path)
                self._put("checkpoint", path=where, remote=remote, epoch=now.epoch.value, batch=now.batch.value)

    def _relative(self, path: str) -> str:
        """Return a path relative to the run's folder, which may be moved together with its checkpoints."""
        assert self.path is not None
        try:
            return Path(os.path.relpath(path, self.path.parent)).as_posix()
        except ValueError:  # another drive of Windows
            return Path(path).as_posix()

    # ---- checkpoints and end ----

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the checkpoint in the file: a resumed run replaces the records after it."""
        if self._sender is None:
            return {}
        self._write_actions()
        number, records = self._mark
        if records != self._sender.num_queued:  # there are new records
            number += 1
            self._put("mark", mark=f"{self._attempt}.{number}")
            self._mark = (number, self._sender.num_queued)
        self._sender.flush(check=False)
        return {"mark": f"{self._attempt}.{number}"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state or None

    def fit_end(self, state: State, logger: Logger) -> None:
        self._record_checkpoints()
        self._write_actions()
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
        self._record_checkpoints()
        self._write_actions()
        kept = [self._relative(path) for saver in self._savers for path in getattr(saver, "saved_checkpoints", ())]
        crashed = error is not None and self._status != "finished"
        interrupted = isinstance(error, KeyboardInterrupt | SystemExit)
        described = (
            None if error is None or not crashed else {"type": type(error).__name__, "message": _plain(str(error))}
        )
        self._put(
            "end",
            status="crashed" if crashed and not interrupted else self._status,
            error=described,
            epoch=state.timestamp.epoch.value,
            batch=state.timestamp.batch.value,
            kept_checkpoints=kept,
            dropped=self._sender.num_dropped,
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
            seconds = round(time.time() - self._start_time, 3)
            record = {"type": type, "seconds": seconds, **fields}
            size = 1 + sum(len(rows) for rows in fields.values() if isinstance(rows, list)) // 8
            self._sender.put(partial(self._file.write, record), size=size)
        elif not self._has_started:
            self._before.append(partial(self._put, type, **fields))


def _write_environment(file: _RunFile, machine: dict[str, Any]) -> None:
    """Write the machine and the installed packages of this library. Reads a file for each installed package."""
    versions = {each.metadata["Name"]: each.version for each in distributions()}
    packages = {name: versions[name] for name in sorted(filter(None, versions)) if name.startswith("composer")}
    file.write({"type": "environment", "values": machine | {"packages": packages}})


class _ActionCounter:
    """Counter of the actions of algorithms, in memory that does not grow with the run.

    It counts how often each algorithm acted at each event since the last `take`, and at which batches. Consecutive
    batches become one span. An algorithm that acts irregularly would create many short spans: spans that are close to
    each other are joined, so that their number is bounded.
    """

    def __init__(self) -> None:
        self._spans: dict[str, _Spans] = {}

    def add(self, key: str, batch: int) -> None:
        """Count an action. Called several times in every step.

        Args:
            key: `algorithm_traces/<algorithm>/Event.<EVENT>`.
            batch: The number of trained batches.
        """
        actions = self._spans.get(key)
        if actions is None:
            actions = self._spans[key] = _Spans(batch)
        span = actions.spans[-1]
        if batch - span[1] > actions.gap:
            actions.spans.append([batch, batch, 1])
            if len(actions.spans) > _MAX_SPANS:
                actions.join()
        else:
            span[1] = batch
            span[2] += 1

    def take(self) -> list[dict[str, Any]]:
        """Return and reset the counts, as `{"algorithm", "event", "count", "spans": [[first, last, count], ...]}`."""
        taken, self._spans = self._spans, {}
        records = []
        for key, actions in taken.items():
            algorithm, event = key.removeprefix(_ALGORITHM_TRACES).split("/", 1)
            spans = [span for span in actions.spans if span[2]]
            record = {"algorithm": algorithm, "event": event.removeprefix("Event.").lower()}
            records.append(record | {"count": sum(span[2] for span in spans), "spans": spans})
        return records


class _Spans:
    """The spans `[first batch, last batch, count]` of one algorithm at one event."""

    __slots__ = ("gap", "spans")

    def __init__(self, batch: int) -> None:
        self.gap = 1  # the maximum number of batches between two actions of a span
        self.spans = [[batch, batch, 0]]

    def join(self) -> None:
        """Join neighboring spans until at most half of the allowed number remain."""
        while len(self.spans) > _MAX_SPANS // 2:
            self.gap *= 2
            joined = [self.spans[0]]
            for first, last, count in self.spans[1:]:
                if first - joined[-1][1] <= self.gap:
                    joined[-1][1] = last
                    joined[-1][2] += count
                else:
                    joined.append([first, last, count])
            self.spans = joined


class _RunFile:
    """The file of a recorded run: one JSON object per line. Only the constructor runs in the training thread.

    Args:
        path: The file. If it exists, records are appended; an incomplete last line of a killed process is terminated.
        started: The start of the run, in seconds since 1970.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: Path, started: float) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._started = started
        self._epoch = 0
        self._arrays: dict[str, tuple[int, float, np.ndarray]] = {}  # step, seconds and values by name
        if self._file.tell() and not _ends_with_newline(path):
            self._file.write(b"\n")

    def write(self, record: dict[str, Any]) -> None:
        """Write a record, after the arrays that were logged since the previous one."""
        if record["type"] == "epoch":
            self._epoch = record["epoch"]
        arrays, self._arrays = self._arrays, {}
        self._write(
            [
                {"type": "array", "seconds": seconds, "name": name, "step": step, "values": _nested(array)}
                for name, (step, seconds, array) in arrays.items()
            ]
            + [record]
        )

    def write_metrics(self, records: Sequence[Logged]) -> None:
        """Write metrics, those of one step in one line.

        Only the last array of each name is kept, for the next `write`: a confusion matrix of every training step would
        fill the disk.
        """
        lines: list[dict[str, Any]] = []
        arrays = read_arrays(records)
        seconds = round(records[-1].seconds - self._started, 3)
        self._arrays |= {name: (step, seconds, array) for name, (step, array) in arrays.items()}
        for logged, step, seconds in records:
            metrics = flatten_metrics(logged)
            line = lines[-1] if lines else None
            if line is None or line["step"] != step or not line["values"].keys().isdisjoint(metrics):
                line = {"type": "metrics", "step": step, "epoch": self._epoch}
                line |= {"seconds": round(seconds - self._started, 3), "values": {}}
                lines.append(line)
            for key, value in metrics.items():
                number = _number(value)
                if type(number) is not tuple or key not in arrays:
                    line["values"][str(key)] = number
        for line in lines:
            values = line["values"]
            texts = {key: values.pop(key)[0] for key in [key for key in values if type(values[key]) is tuple]}
            if texts:
                line["texts"] = texts
        self._write(lines)

    def write_images(self, record: dict[str, Any], copies: Sequence[ImageCopy], channels_last: bool) -> None:
        """Write PNG files beside the file, in place of earlier ones of that name, and the record that lists them."""
        path, name = Path(self._file.name), _NOT_IN_A_FILE_NAME.sub("-", record["name"])[:80]
        if name != record["name"]:  # another name may become the same
            name = f"{name}-{zlib.crc32(record['name'].encode()):08x}"
        folder = path.with_name(f"{path.stem}-images")
        folder.mkdir(exist_ok=True)
        images = [image for copy in copies for image in _split_images(copy(), channels_last)]
        files = []
        for index, image in enumerate(images[:_MAX_IMAGES]):
            file = folder / f"{name}-{index}.png"
            file.write_bytes(_png(image))
            files.append(f"{folder.name}/{file.name}")
        self.write({**record, "files": files, "num_images": len(images)})

    def _write(self, records: Sequence[dict[str, Any]]) -> None:
        text = "".join(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n" for record in records)
        self._file.write(text.encode("ascii"))
        self._file.flush()  # the operating system keeps it if the process crashes

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _split_images(array: np.ndarray, channels_last: bool) -> list[np.ndarray]:
    """Return the images of an array that `list_images` has checked, each of shape (H, W, channels), uint8.

    Only the last dimension of (H, W, 3) can be that of the channels.
    """
    if array.ndim == 2:
        array = array[..., None] if channels_last else array[None]
    batch = array if array.ndim == 4 else array[None]
    if not channels_last and (batch.shape[1] in _PNG_COLORS or batch.shape[-1] not in _PNG_COLORS):
        batch = np.moveaxis(batch, 1, -1)
    return list(batch if batch.dtype == np.uint8 else (batch * 255.0).round().astype(np.uint8))


def _png(image: np.ndarray) -> bytes:
    """Return an image as a PNG file.

    Args:
        image: Shape (H, W, channels), uint8. Of 2 channels, or more than 4, only the first is drawn.
    """
    channels = image.shape[-1] if image.shape[-1] in _PNG_COLORS else 1
    rows = image[..., :channels].reshape(len(image), -1)
    data = np.pad(rows, ((0, 0), (1, 0))).tobytes()  # each row begins with its filter: none

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = zlib.crc32(kind + content)
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", image.shape[1], image.shape[0], 8, _PNG_COLORS[channels], 0, 0, 0)
    parts = chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(data)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _plain(value: Any, key: str = "") -> Any:
    """Convert a value to JSON types: numbers, text, None, lists and dictionaries; anything else is formatted as text.

    Args:
        value: The logged value.
        key: Its name. Values with the name of a secret are hidden, and so are user names, passwords and tokens in URIs.
    """
    if _SECRET.search(key):
        return "(hidden)"
    if isinstance(value, np.generic | np.ndarray | torch.Tensor) and math.prod(value.shape) == 1:
        value = value.item()
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item, str(name)) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    text = value if isinstance(value, str) else format_log_data_value(value)
    return _short(without_password(_USER_IN_URI.sub("", _ADDRESS.sub("", text))))


def _number(value: Any) -> Any:
    """Convert a metric to JSON types; anything but a number becomes a tuple with its text."""
    kind = type(value)
    if kind is float:
        return _float(value)
    if kind is int or kind is bool:
        return int(value)
    if isinstance(value, np.ndarray | torch.Tensor) and math.prod(value.shape) == 1:
        return _number(value.item())
    if isinstance(value, float):
        return _float(float(value))
    if isinstance(value, int):
        return int(value)
    return (_short(value if isinstance(value, str) else format_log_data_value(value)),)


def _nested(array: np.ndarray) -> Any:
    """Convert an array to nested lists."""
    values = array.tolist()
    return values if array.dtype.kind != "f" or np.isfinite(array).all() else _plain(values)


def _float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _short(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ... ({len(text)} characters)"


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def _describe_machine(state: State) -> dict[str, Any]:
    """Return hardware, versions and settings: no environment variables, no names of hosts, users or folders."""
    kind = state.device.name
    device: dict[str, Any] = {"kind": kind, "precision": str(state.precision.value)}
    if kind == "gpu":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device |= {"name": properties.name, "memory_bytes": properties.total_memory}
    else:
        device["name"] = cpu_model()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "device": device,
        "world_size": dist.get_world_size(),
        "nodes": dist.get_world_size() // dist.get_local_world_size(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _describe_model(model: torch.nn.Module) -> dict[str, Any]:
    """Return the class and the size of the model."""
    parameters = list(model.parameters())
    return {
        "class": type(model).__name__,
        "inner": [type(child).__name__ for child in model.children()][:8],
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "modules": sum(1 for _ in model.modules()),
    }


def _describe_algorithms(state: State) -> list[dict[str, Any]]:
    """Return the algorithms, in the user's order."""
    return [
        {
            "name": type(algorithm).__name__,
            "config": _OBJECT_ADDRESS.sub("", repr(algorithm)),
            "events": None if algorithm.events is None else sorted(event.value for event in algorithm.events),
        }
        for algorithm in state.algorithms
    ]


def _plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """Convert the result of `engine.explain()` to JSON types."""
    return [
        {"event": row.event.value, "order": row.order, "kind": row.kind, "name": row.name, "reason": row.reason}
        for row in plan
    ]


def _module_classes(model: torch.nn.Module) -> dict[str, type]:
    """Return the class of each module."""
    return {name: type(module) for name, module in model.named_modules()}


def _module_changes(before: dict[str, type], after: dict[str, type]) -> dict[str, Any] | None:
    """Return the modules that were replaced, added and removed; None if there are none."""
    replaced = [
        {"module": name, "before": before[name].__name__, "after": kind.__name__}
        for name, kind in after.items()
        if name in before and before[name] is not kind
    ]
    added = Counter(kind.__name__ for name, kind in after.items() if name not in before)
    removed = Counter(kind.__name__ for name, kind in before.items() if name not in after)
    if not (replaced or added or removed):
        return None
    kinds = Counter((each["before"], each["after"]) for each in replaced)
    return {
        "replaced": replaced[:_MAX_MODULES],
        "kinds": [{"before": old, "after": new, "count": count} for (old, new), count in kinds.most_common()],
        "added": dict(added),
        "removed": dict(removed),
    }
