"""A logger for Weights & Biases."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from composer.loggers.spi import (
    HeldFiles,
    ImageCopy,
    Logged,
    Sender,
    ServiceLogger,
    call_at_exit,
    call_in_time,
    check_delivery_options,
    end_in_time,
    flatten_metrics,
    read_arrays,
    report_failure,
    start_copy,
    table_cell,
)
from composer.utils import dist
from composer.utils.delivery import DeliveryDeadline

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

_open_runs: set[str] = set()  # ids of the runs that loggers have opened and not finished


class _Client:
    """W&B's client in this process, with the process that uploads, which all runs share."""

    def __init__(self) -> None:
        self._process: int | None = None
        self._hanging: set[str] = set()

    def end_in_time(self) -> None:
        """See that the client ends in time at the end of this process, after the loggers."""
        if self._process != os.getpid():  # a fork has a client of its own
            self._process, self._hanging = os.getpid(), set()
            call_at_exit(self._end)

    def hangs(self, run_id: str) -> None:
        """Remember a run that could not be finished in time."""
        self._hanging.add(run_id)

    def _end(self) -> None:
        """End the client if it hangs: at exit, W&B waits for its other process without a limit.

        If the user has another run, which W&B finishes at exit, W&B does wait.
        """
        import wandb

        idle = wandb.run is None or wandb.run.id in self._hanging
        if self._hanging and idle and self._process == os.getpid():
            with suppress(SystemExit):  # with the exit code of W&B's process
                # Writing what it holds to the disk takes it two seconds.
                call_in_time(wandb.teardown, 10.0, "W&B's process")


_client = _Client()


class WandBLogger(ServiceLogger):
    """Logger for Weights & Biases.

    Training puts logged values into a queue, and a thread passes them to W&B: a step waits neither for W&B nor for the
    device. The step of a value is the number of trained batches.

    A run that is resumed from a checkpoint under the same run name continues its W&B run. A logger uses the W&B run
    that your script has started, but never that of another logger: each logger has its own run.

    Args:
        project: The project.
        group: The group; None is the run name if every rank has a W&B run, else no group.
        name: The name of the W&B run; None is the run name. If every rank has a W&B run, "-rank<rank>" is appended.
        entity: The user or team.
        tags: Tags of the W&B run.
        log_artifacts: Store files, such as checkpoints, as artifacts.
        rank_zero_only: True if only rank 0 logs; else every rank has a W&B run.
        init_kwargs: More arguments of `wandb.init`; they override those above.
        on_error: What to do if logging fails: "warn" (once; the run continues) or "raise".
        delivery_timeout: How many seconds in total the end of the run waits for queued data once the service fails or
            hangs, counted from the first failure, or from the last delivery if it hangs. A service that still accepts
            data, however slowly, is waited for. None: the Trainer's timeout, which its services share (60 by default).
            Finishing the W&B run may take at least a tenth of it.

    Attributes:
        run_dir: The folder of the W&B run, set at INIT.
        run_url: The page of the W&B run, set at INIT; None in offline mode.

    Raises:
        ValueError: `delivery_timeout` is not positive, or `on_error` is unknown.
    """

    def __init__(
        self,
        project: str | None = None,
        group: str | None = None,
        name: str | None = None,
        entity: str | None = None,
        tags: list[str] | None = None,
        log_artifacts: bool = False,
        rank_zero_only: bool = True,
        init_kwargs: dict[str, Any] | None = None,
        *,
        on_error: str = "warn",
        delivery_timeout: float | None = None,
    ) -> None:
        check_delivery_options(on_error, delivery_timeout)
        if log_artifacts and rank_zero_only and dist.get_world_size() > 1:
            warnings.warn(
                "With `log_artifacts=True`, only the files of rank 0 are stored. To store those of all ranks, "
                "`rank_zero_only` should be set to False.",
                stacklevel=2,
            )
        given = {"project": project, "group": group, "name": name, "entity": entity, "tags": tags}
        self._init_kwargs = {key: value for key, value in given.items() if value is not None} | (init_kwargs or {})
        self._log_artifacts, self._rank_zero_only = log_artifacts, rank_zero_only
        self.on_error, self.delivery_timeout = on_error, delivery_timeout
        self.entity, self.project = entity, project
        self.run_dir: str | None = None
        self.run_url: str | None = None
        self._run_name: str | None = None
        self._hyperparameters: dict[str, Any] = {}
        self._resumed: dict[str, Any] | None = None
        self._saved: dict[str, Any] = {}
        self._run: _WandBRun | None = None
        self._deadline = DeliveryDeadline(60.0)  # replaced at `init` by that of the run
        self._files = HeldFiles()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the thread and the connection, which cannot be copied."""
        return {**super().__getstate__(), "_run": None}

    # ---- values ----

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self._hyperparameters |= hyperparameters
        if self._sender is not None and self._run is not None:
            self._sender.put(partial(self._run.send_config, dict(hyperparameters)))

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        if self._sender is not None and self._run is not None:
            size = 1 + sum(map(len, rows)) // 16
            send = partial(self._run.send_table, list(columns), [list(row) for row in rows], name, step)
            self._sender.put(send, size=size)

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
        pictures = _split(images, 3)
        for picture in pictures:
            if picture.ndim != 3:
                raise ValueError(
                    f"`images` must be images of 3 dimensions, got shape {tuple(picture.shape)}. Add a dimension for "
                    f"the channels: `image.unsqueeze(0)`."
                )
        drawn = {key: _split(mask, 2) for key, mask in (masks or {}).items()}
        for key, arrays in drawn.items():
            if len(arrays) != len(pictures):
                raise ValueError(f"`masks[{key!r}]` must hold {len(pictures)} masks, got {len(arrays)}.")
        if self._sender is None or self._run is None:
            return
        options: dict[str, Any] = {
            "name": name,
            "channels_last": channels_last,
            "step": step,
            "masks": {key: [start_copy(mask) for mask in arrays] for key, arrays in drawn.items()},
            "labels": dict(mask_class_labels or {}),
            "use_table": use_table,
        }
        self._sender.put_images(pictures, partial(self._run.send_images, **options))

    # ---- files ----

    def can_upload_files(self) -> bool:
        return self._log_artifacts

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        if not self._log_artifacts or self._sender is None or self._run is None:
            return
        name = _artifact_name(remote_file_name)
        if name != remote_file_name:
            warnings.warn(
                f"W&B permits only letters, digits, '.', '-' and '_' in the names of artifacts, so "
                f"{remote_file_name!r} is stored as {name!r}.",
                stacklevel=3,
            )
        now = state.timestamp
        aliases = ["latest", f"ep{int(now.epoch)}-ba{int(now.batch)}"]
        metadata = {f"timestamp/{key}": _plain(value) for key, value in now.state_dict().items()}
        held = self._files.hold(file_path, file_path.name)
        self._sender.put(partial(self._run.send_file, name, held, aliases, metadata))

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        if os.path.exists(destination) and not overwrite:
            raise FileExistsError(f"{destination!r} exists. Pass `overwrite=True` to replace it.")
        import wandb

        name, colon, version = remote_file_name.rpartition(":")
        if not colon:
            name, version = version, "latest"
        parts = [part for part in (self.entity, self.project) if part]
        path = "/".join([*parts, f"{_artifact_name(name)}:{version}"])
        folder = os.path.dirname(os.path.abspath(destination))
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            try:
                artifact = wandb.Api().artifact(path)
            except wandb.errors.CommError as error:
                if not _is_missing(error):  # a server that is down may have the file
                    raise
                raise FileNotFoundError(f"There is no artifact {path!r} in W&B: {error}") from error
            folder_of_artifact = Path(artifact.download(root=temporary))
            [file] = [file for file in folder_of_artifact.rglob("*") if file.is_file()]
            os.replace(file, destination)

    # ---- events ----

    def init(self, state: State, logger: Logger) -> None:
        self._run_name, self._training = state.run_name, False
        self._deadline = logger.delivery_deadline
        failure: Exception | None = None
        if not self._rank_zero_only or dist.get_global_rank() == 0:
            try:
                self._open(self._take_resumed())
            except Exception as error:  # noqa: BLE001 - reported below
                failure = error
        names = [self.entity, self.project]
        dist.broadcast_object_list(names)  # before an error is raised, or the other ranks would wait forever
        self.entity, self.project = names
        if failure is not None:
            report_failure("WandBLogger", failure, self.on_error)

    def _take_resumed(self) -> dict[str, Any]:
        """Return the arguments of `wandb.init` that continue the run of the checkpoint, once."""
        resumed, self._resumed = self._resumed, None
        if resumed is None or resumed["run_name"] != self._run_name or resumed["rank"] != dist.get_global_rank():
            return {}
        return {"id": resumed["id"], "resume": "allow"}

    def _open(self, extra: dict[str, Any]) -> None:
        import wandb  # takes a second

        arguments = {"name": self._run_name, **self._init_kwargs, **extra}
        if not self._rank_zero_only:
            arguments["group"] = arguments.get("group") or arguments["name"]
            arguments["name"] = f"{arguments['name']}-rank{dist.get_global_rank()}"
        if _open_runs:  # by default `wandb.init` would return the last one
            arguments.setdefault("reinit", "create_new")
        run = wandb.init(**arguments)
        _open_runs.add(run.id)
        _client.end_in_time()
        call_at_exit(self._finish_at_exit)
        self.run_dir, self.run_url = run.dir, None if run.offline else run.url
        self.entity, self.project = run.entity, run.project
        self._saved = {"run_name": self._run_name, "rank": dist.get_global_rank(), "id": run.id}
        self._run = _WandBRun(run)
        # W&B accepts records immediately and sends them later; only `finish` shows whether they arrived.
        self._deadline = self._deadline.for_service(self.delivery_timeout)
        self._sender = Sender(
            "WandBLogger", self._run.send, on_error=self.on_error, timeout=self._deadline.for_service(), kept=self._kept
        )
        if self._hyperparameters:
            self._sender.put(partial(self._run.send_config, dict(self._hyperparameters)))

    def after_load(self, state: State, logger: Logger) -> None:
        extra = self._take_resumed()
        if not extra or self._run is None or extra["id"] == self._saved["id"]:
            return
        try:
            self._finish(exit_code=0)
            self._open(extra)
        except Exception as error:  # noqa: BLE001 - W&B has no common base class of errors
            report_failure("WandBLogger", error, self.on_error)

    def post_close(self) -> None:
        self._finish(exit_code=int(self._training or sys.exc_info()[1] is not None))
        self._hyperparameters = {}

    def _finish_at_exit(self) -> None:
        """Finish the run at the end of the process: W&B's client shuts down before engines are closed."""
        self._finish(exit_code=int(self._training))

    def _finish(self, *, exit_code: int) -> None:
        sender, run, self._sender, self._run = self._sender, self._run, None, None
        if sender is None or run is None or sender.forked:
            return
        try:
            sender.close()
        finally:
            _open_runs.discard(self._saved["id"])
            what = f"The upload to W&B; it is kept in {self.run_dir} for `wandb sync`, and"
            try:
                end_in_time(lambda _: run.finish(exit_code), self._deadline, what)
            except TimeoutError:
                _client.hangs(self._saved["id"])
                raise

    def _kept(self) -> str:
        return self._files.describe(
            f"What W&B has taken is kept in {self.run_dir} for `wandb sync`; metrics that it has not are lost."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the W&B run that a resumed run continues."""
        return dict(self._saved)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state or None


class _WandBRun:
    """A W&B run. Its methods are called in the thread of the sender.

    Args:
        run: The object that `wandb.init` returned.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def send(self, records: Sequence[Logged]) -> None:
        """Log metrics, those of one step in one call; the last array of each name as a table."""
        import wandb

        problem: Exception | None = None
        arrays = read_arrays(records)
        for step, group in groupby(records, key=lambda record: record.step):
            values: dict[str, Any] = {}
            for metrics, _, seconds in group:
                values |= {key: value for key, value in flatten_metrics(metrics).items() if key not in arrays}
                values.setdefault("_timestamp", seconds)
            for key, (last, array) in arrays.items():
                if last == step:
                    rows = array.reshape(len(array), -1).tolist()
                    values[key] = wandb.Table(columns=[str(i) for i in range(len(rows[0]))], data=rows)
            try:
                self._run.log(values, step=step)
            except Exception as error:  # noqa: BLE001 - one invalid value must not lose the other steps
                problem = problem or error
        if problem is not None:
            raise problem

    def send_config(self, hyperparameters: dict[str, Any]) -> None:
        """Set hyperparameters."""
        self._run.config.update(hyperparameters, allow_val_change=True)

    def send_table(self, columns: list[str], rows: list[list[Any]], name: str, step: int | None) -> None:
        """Log a table."""
        import wandb

        cells = [[table_cell(value) for value in row] for row in rows]
        self._run.log({name: wandb.Table(columns=[*columns], data=cells)}, step=step)

    def send_images(
        self,
        images: Sequence[ImageCopy],
        *,
        name: str,
        channels_last: bool,
        step: int | None,
        masks: Mapping[str, Sequence[ImageCopy]],
        labels: dict[int, str],
        use_table: bool,
    ) -> None:
        """Log images with their masks."""
        import wandb

        pictures = []
        for i, image in enumerate(images):
            array = image()
            named: dict[str, Any] = {"class_labels": labels} if labels else {}
            drawn = {key: {"mask_data": arrays[i]().astype(np.int64), **named} for key, arrays in masks.items()}
            array = array if channels_last else np.moveaxis(array, 0, -1)
            pictures.append(wandb.Image(array, masks=drawn or None))
        shown = wandb.Table(columns=["Image"], data=[[picture] for picture in pictures]) if use_table else pictures
        self._run.log({name: shown}, step=step)

    def send_file(self, name: str, held: Path, aliases: list[str], metadata: dict[str, Any]) -> None:
        """Log a file as an artifact and release it: W&B makes a copy."""
        import wandb

        extension = held.suffix.removeprefix(".")
        kind = "model" if extension == "pt" else extension or "file"
        try:
            artifact = wandb.Artifact(name=name, type=kind, metadata=metadata)
            artifact.add_file(str(held))
            self._run.log_artifact(artifact, aliases=aliases)
        finally:
            HeldFiles.release(held)

    def finish(self, exit_code: int) -> None:
        """Finish the run."""
        self._run.finish(exit_code=exit_code)


def _is_missing(error: Any) -> bool:
    """Return True if W&B has answered that the requested artifact does not exist."""
    cause = error.exc
    response = getattr(cause, "response", None)
    status = getattr(response, "status_code", None) or getattr(response, "http_status", None)
    return bool(status == 404) or (isinstance(cause, ValueError) and "not found" in str(cause))


def _split(images: Any, ndim: int) -> list[Any]:
    """Return one image, several in one array, or a sequence of images as a list."""
    if isinstance(images, Sequence):
        return list(images)
    return list(images) if images.ndim == ndim + 1 else [images]


def _artifact_name(name: str) -> str:
    """Replace the characters that W&B does not allow in the name of an artifact."""
    return re.sub(r"[^A-Za-z0-9._-]", ".", name)


def _plain(value: Any) -> Any:
    return value.total_seconds() if hasattr(value, "total_seconds") else value
