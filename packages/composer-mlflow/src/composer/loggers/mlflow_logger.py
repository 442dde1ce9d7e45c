"""A logger for MLflow."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from composer.loggers import LoggerDestination
from composer.loggers._held_files import hold_file, kept_files
from composer.loggers._mlflow_run import (
    MLFlowRun,
    check_registry,
    current_run,
    ended_as,
    find_flavor,
    matches,
    open_run,
    register,
    start_monitor,
)
from composer.loggers._process import call_in_time
from composer.loggers._sender import Sender, check_on_error, hold_metrics, report_failure, start_copy
from composer.utils import dist
from composer.utils.retrying import DeliveryDeadline

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

__all__ = ["MLFlowLogger"]

log = logging.getLogger(__name__)


class MLFlowLogger(LoggerDestination):
    """Sends what is logged to an MLflow server or a local store.

    The training puts what it logs into a queue, and a thread sends it, many values in one request: a step waits neither
    for the server nor for the device. Numbers become metrics, with the number of trained batches as their step; other
    metrics (text, arrays) are left out, and so is a value that has not changed since it was sent. Names may consist of
    letters, digits and `_-. :/`; anything else in one becomes a dot. NaN and infinity are sent as they are.

    A run that is resumed from a checkpoint under the same run name goes on in its MLflow run.

    Args:
        experiment_name: None is MLFLOW_EXPERIMENT_NAME of the environment or "my-mlflow-experiment".
        run_name: None is the name of the run.
        tags: Tags of the run.
        tracking_uri: The server or store; None is what MLflow is set to.
        rank_zero_only: Whether only rank 0 logs; else all ranks log to one MLflow run.
        flush_interval: Seconds between two requests with metrics, at least.
        model_registry_prefix: Goes before the names of registered models, with a dot.
        model_registry_uri: The registry; None is what MLflow is set to.
        synchronous: Whether every call of `log_metrics` waits until it is sent. Slows training.
        log_system_metrics: Whether MLflow logs the use of CPU, memory, disk and network every 10 seconds.
        rename_metrics: New names by old ones.
        ignore_metrics: Metrics to leave out: patterns as for file names, such as "time/*".
        ignore_hyperparameters: Hyperparameters to leave out, likewise.
        run_group: Becomes the tag "run_group".
        resume: Whether to go on in the run of this experiment that has the tag `run_name`, if there is one.
        logging_buffer_seconds: How long metrics gather before they are sent.
        log_duplicated_metric_every_n_steps: After how many steps an unchanged value is sent again.
        on_error: What happens if logging fails: "warn" (once, and the run goes on) or "raise".
        log_artifacts: Whether to store files, such as checkpoints, as artifacts.
        delivery_timeout: How many seconds the end of the run waits in all for what is still queued, once the service
            fails or hangs: counted from the first failure, or from the last delivery if it hangs. While it takes
            anything, however slowly, it is waited for. None: the Trainer's, which its services share; 60 without one.

    Raises:
        ValueError: A number is not positive, `on_error` is unknown, or `model_registry_prefix` does not suit the Unity
            Catalog.

    Differs: sending is done by a thread of ours, not by that of MLflow. There is no process that watches the run on
    Databricks: the run ends as FAILED or KILLED when the logger is closed by an error or at the end of the process.
    """

    accepts_deferred: ClassVar[bool] = True

    def __init__(
        self,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: dict[str, Any] | None = None,
        tracking_uri: str | os.PathLike[str] | None = None,
        rank_zero_only: bool = True,
        flush_interval: float = 10,
        model_registry_prefix: str = "",
        model_registry_uri: str | None = None,
        synchronous: bool = False,
        log_system_metrics: bool = True,
        rename_metrics: dict[str, str] | None = None,
        ignore_metrics: list[str] | None = None,
        ignore_hyperparameters: list[str] | None = None,
        run_group: str | None = None,
        resume: bool = False,
        logging_buffer_seconds: float | None = 10,
        log_duplicated_metric_every_n_steps: int = 100,
        *,
        on_error: str = "warn",
        log_artifacts: bool = False,
        delivery_timeout: float | None = None,
    ) -> None:
        check_on_error(on_error)
        interval = max(flush_interval, logging_buffer_seconds or 0.0)
        for argument, value in (
            ("flush_interval", flush_interval),
            ("logging_buffer_seconds", logging_buffer_seconds or interval),
            ("log_duplicated_metric_every_n_steps", log_duplicated_metric_every_n_steps),
            ("delivery_timeout", 60.0 if delivery_timeout is None else delivery_timeout),
        ):
            if not 0 < value < math.inf:
                raise ValueError(f"`{argument}` must be positive, got {value!r}.")
        check_registry(model_registry_uri, model_registry_prefix)
        self.experiment_name, self.run_name = experiment_name, run_name
        self.tags = dict(tags or {})
        self.tracking_uri = None if tracking_uri is None else str(tracking_uri)
        self.rank_zero_only, self.synchronous, self.resume = rank_zero_only, synchronous, resume
        self.model_registry_prefix, self.model_registry_uri = model_registry_prefix, model_registry_uri
        self.log_system_metrics = log_system_metrics
        self.rename_metrics = dict(rename_metrics or {})
        self.ignore_metrics = list(ignore_metrics or [])
        self.ignore_hyperparameters = list(ignore_hyperparameters or [])
        self.run_group = run_group
        self.log_duplicated_metric_every_n_steps = log_duplicated_metric_every_n_steps
        self.on_error, self.log_artifacts, self.delivery_timeout = on_error, log_artifacts, delivery_timeout
        self._interval = interval
        self._experiment_id: str | None = None
        self._run_id: str | None = None
        self._composer_run_name: str | None = None
        self._hyperparameters: dict[str, Any] = {}
        self._resumed: dict[str, Any] | None = None
        self._created = self._training = False
        self._abandoned: str | None = None  # the run that was begun before the checkpoint told of another
        self._deadline = DeliveryDeadline(60.0)  # the run's, from `init` on
        self._clear()

    def _clear(self) -> None:
        self._run: MLFlowRun | None = None
        self._sender: Sender | None = None
        self._monitor: Any = None
        self._held: list[Path] = []  # files that are sent, or still to be
        self._ignored: dict[str, bool] = {}  # whether a name is to be left out

    def __getstate__(self) -> dict[str, Any]:
        """Without the thread and the connection, for copies."""
        return {**vars(self), "_run": None, "_sender": None, "_monitor": None}

    @property
    def _timeout(self) -> float:
        return self._deadline.timeout if self.delivery_timeout is None else self.delivery_timeout

    @property
    def _metrics_cache(self) -> dict[str, tuple[float, int]]:
        return self._run.metrics_cache if self._run else {}

    # ---- what is logged ----

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        kept = {k: v for k, v in hyperparameters.items() if not matches(k, self.ignore_hyperparameters)}
        self._hyperparameters |= kept
        if self._sender is not None and self._run is not None:
            self._sender.put(partial(self._run.send_params, {key: str(value) for key, value in kept.items()}))

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self.ignore_metrics:
            metrics = {key: value for key, value in metrics.items() if not self._is_ignored(key)}
        if self._sender is None:
            hold_metrics(metrics)
            return
        self._sender.put_metrics(metrics, 0 if step is None else step)
        if self.synchronous:
            self._sender.flush()

    def _is_ignored(self, name: str) -> bool:
        if name not in self._ignored:
            self._ignored[name] = matches(name, self.ignore_metrics)
        return self._ignored[name]

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        if self._sender is not None and self._run is not None:
            size = 1 + sum(map(len, rows)) // 16
            self._sender.put(partial(self._run.send_table, list(columns), [list(row) for row in rows], name), size=size)

    def log_images(
        self,
        images: np.ndarray | torch.Tensor | Sequence[np.ndarray | torch.Tensor],
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: dict[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        several = images if isinstance(images, Sequence) else [images]
        for image in several:
            if image.ndim not in (2, 3, 4):
                raise ValueError(f"`images` must have 2 to 4 dimensions, got shape {tuple(image.shape)}.")
        if self._sender is not None and self._run is not None:
            size = 1 + sum(math.prod(image.shape) for image in several) * 4 // 1024
            copies = [start_copy(image) for image in several]
            send = partial(self._run.send_images, copies, name, channels_last, step)
            self._sender.put(send, size=size, may_drop=True)

    # ---- files and models ----

    def can_upload_files(self) -> bool:
        return self.log_artifacts

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        if not self.log_artifacts or self._sender is None or self._run is None:
            return
        remote = Path(remote_file_name)
        folder = None if remote.parent == Path() else remote.parent.as_posix()
        held = hold_file(file_path, remote.name)
        self._held = [path for path in self._held if path.exists()] + [held]
        self._sender.put(partial(self._run.send_file, held, folder))

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        if os.path.exists(destination) and not overwrite:
            raise FileExistsError(f"{destination!r} exists. Pass `overwrite=True` to replace it.")
        if self._run_id is None:
            raise RuntimeError("`MLFlowLogger.download_file` needs a run: call it after Event.INIT.")
        if self._sender is not None:
            self._sender.flush()
        client, run_id = self._client(), self._run_id
        inside = os.path.dirname(remote_file_name) or None
        try:  # a server that is down must not be mistaken for one that does not have the file
            there = call_in_time(
                lambda: client.list_artifacts(run_id, inside), self._timeout, "Asking MLflow for its artifacts"
            )
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
                raise
            there = []
        if remote_file_name not in [artifact.path for artifact in there]:
            raise FileNotFoundError(f"{remote_file_name!r} is not among the artifacts of the MLflow run {run_id}.")
        folder = os.path.dirname(os.path.abspath(destination))
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            path = client.download_artifacts(run_id, remote_file_name, temporary)
            os.replace(path, destination)

    def register_model(
        self, model_uri: str, name: str, await_creation_for: int = 300, tags: dict[str, Any] | None = None
    ) -> Any:
        """Register a model.

        Args:
            model_uri: Where it is.
            name: Its name; `model_registry_prefix` and a dot go before it.
            await_creation_for: How long to wait for it, in seconds.
            tags: Tags of the version.

        Returns:
            The `mlflow.entities.model_registry.ModelVersion`; None on a rank that does not log.
        """
        return self._register(None, model_uri, name, await_creation_for, tags)

    def register_model_with_run_id(
        self, model_uri: str, name: str, await_creation_for: int = 300, tags: dict[str, Any] | None = None
    ) -> Any:
        """Register a model as made by this run; otherwise as `register_model`."""
        return self._register(self._run_id, model_uri, name, await_creation_for, tags)

    def _register(self, run_id: str | None, model_uri: str, name: str, wait: int, tags: dict[str, Any] | None) -> Any:
        if self._run is None:
            return None
        full_name = f"{self.model_registry_prefix}.{name}" if self.model_registry_prefix else name
        return register(self._run.client, run_id, model_uri, full_name, wait, tags)

    def save_model(self, flavor: str, **kwargs: Any) -> None:
        """Save a model locally, as `mlflow.<flavor>.save_model`.

        Raises:
            ValueError: MLflow has no such flavor.
        """
        if self._run is not None:
            find_flavor(flavor).save_model(**kwargs)

    def log_model(self, flavor: str, **kwargs: Any) -> Any:
        """Store a model as an artifact of the run, as `mlflow.<flavor>.log_model`.

        Raises:
            ValueError: MLflow has no such flavor.
        """
        if self._run is None:
            return None
        module = find_flavor(flavor)
        with current_run(self._run_id, self.tracking_uri):
            logged = module.log_model(**kwargs)
        self._run.client.update_run(self._run_id, status="RUNNING")  # leaving the block has ended it
        return logged

    # ---- when ----

    def init(self, state: State, logger: Logger) -> None:
        self._composer_run_name = state.run_name
        self._deadline = logger.delivery_deadline
        self._training = False
        ids: list[Any] = [None, None, False]
        failure: Exception | None = None
        if dist.get_global_rank() == 0:
            try:
                tags = self.tags | ({} if self.run_group is None else {"run_group": self.run_group})
                tags["run_name"] = os.environ.get("RUN_NAME") or self.run_name or state.run_name
                name = self.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "my-mlflow-experiment"
                open_ = partial(open_run, name=self.run_name or state.run_name, tags=tags, resume=self.resume)
                client = self._client()  # whose import takes seconds, which are not the server's
                # A server that is down is tried for minutes by the client.
                ids = [*call_in_time(lambda: open_(client, name), self._timeout, "Opening a run")]
            except Exception as error:  # noqa: BLE001 - reported below
                failure = error
        dist.broadcast_object_list(ids)  # before anything is raised, or the others would wait for ever
        self._experiment_id, self._run_id, self._created = ids
        if failure is None and self._run_id is not None and (not self.rank_zero_only or dist.get_global_rank() == 0):
            try:
                self._connect()
            except Exception as error:  # noqa: BLE001 - reported below
                failure = error
        if failure is not None:
            report_failure("MLFlowLogger", failure, self.on_error)

    def _client(self) -> Any:
        from mlflow import MlflowClient  # takes seconds

        return MlflowClient(self.tracking_uri, self.model_registry_uri)

    def _connect(self) -> None:
        assert self._run_id is not None
        every = self.log_duplicated_metric_every_n_steps
        client, run_id = self._client(), self._run_id
        self._run = call_in_time(
            lambda: MLFlowRun(client, run_id, self.rename_metrics, every), self._timeout, "Reading the run"
        )
        if self._sender is None:
            self._sender = Sender(
                "MLFlowLogger",
                lambda records: None if self._run is None else self._run.send(records),
                on_error=self.on_error,
                interval=self._interval,
                timeout=self._deadline.for_service(self.delivery_timeout),
                kept=lambda: kept_files(self._held, "Metrics are lost."),
            )
        self.log_hyperparameters(self._hyperparameters)  # those that came before there was a run
        if self.log_system_metrics:
            self._monitor = call_in_time(
                lambda: start_monitor(run_id, self.tracking_uri, again=not self._created),
                self._timeout,
                "Starting the system metrics",
            )

    def after_load(self, state: State, logger: Logger) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is None or resumed["run_name"] != state.run_name or resumed["run_id"] == self._run_id:
            return
        fresh = self._experiment_id, self._run_id, self._created
        self._experiment_id, self._run_id, self._created = resumed["experiment_id"], resumed["run_id"], False
        if self._run is None or self._sender is None:
            return
        try:
            update = partial(self._run.client.update_run, self._run_id, status="RUNNING")
            call_in_time(update, self._timeout, "Reopening the run")
            self._sender.flush()
            self._stop_monitor()
            self._connect()
        except Exception as error:  # noqa: BLE001 - of whatever kind MLflow's are
            report_failure("MLFlowLogger", error, self.on_error)
            self._experiment_id, self._run_id, self._created = fresh
            return
        if fresh[2] and dist.get_global_rank() == 0:
            self._abandoned = fresh[1]  # other ranks may still be sending to it

    def fit_start(self, state: State, logger: Logger) -> None:
        self._training = True
        self._delete_abandoned()

    def _delete_abandoned(self) -> None:
        abandoned, self._abandoned = self._abandoned, None
        if abandoned is not None and self._run is not None and self._sender is not None:
            self._sender.put(partial(self._run.client.delete_run, abandoned), check=False)

    def epoch_end(self, state: State, logger: Logger) -> None:
        if self._sender is not None:
            self._sender.fetch()  # nothing may be logged for a while

    eval_start = eval_end = epoch_end

    def fit_end(self, state: State, logger: Logger) -> None:
        self._training = False
        if self._sender is not None:
            self._sender.flush()

    def close(self, state: State, logger: Logger) -> None:
        if self._sender is not None:
            self._sender.flush(check=False)

    def post_close(self) -> None:
        sender, run = self._sender, self._run
        if sender is None or run is None:
            return
        self._stop_monitor()
        self._delete_abandoned()
        self._hyperparameters = {}
        if dist.get_global_rank() == 0:
            sender.put(partial(run.end, ended_as(training=self._training)), check=False)
        try:
            sender.close()
        finally:
            self._clear()

    def _stop_monitor(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            left = 5.0 if self._sender is None else min(5.0, self._sender.seconds_left)
            try:
                call_in_time(monitor.finish, left, "Ending the system metrics")  # its thread may wait for the server
            except TimeoutError as error:
                log.info("%s", error)

    def state_dict(self) -> dict[str, Any]:
        """Which MLflow run a resumed run goes on in."""
        if self._run_id is None:
            return {}
        return {"run_name": self._composer_run_name, "run_id": self._run_id, "experiment_id": self._experiment_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state or None
