"""A logger for MLflow."""

from __future__ import annotations

import logging
import os
import posixpath
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
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
    call_in_time,
    check_delivery_options,
    list_images,
    read_arrays,
    read_numbers,
    report_failure,
    table_cell,
)
from composer.utils import check_finite, dist, renamed_arguments
from composer.utils.delivery import DeliveryDeadline

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

log = logging.getLogger(__name__)

_METRICS_PER_REQUEST, _PARAMS_PER_REQUEST, _LONGEST_KEY = 1000, 100, 250
_URI = "MLFLOW_TRACKING_URI"
_REFUSED = re.compile(r"[^\w/.: -]")


class MLFlowLogger(ServiceLogger):
    """Logger for an MLflow server or a local store.

    Training puts logged values into a queue, and a thread sends them, many values in one request: a step waits neither
    for the server nor for the device. Numbers become metrics, with the number of trained batches as their step; an
    array, such as a confusion matrix, becomes an artifact `<name>_<step>.json`. Text is left out, and so is a value
    that has not changed since it was sent. Names may consist of letters, digits and `_-. :/`; other characters become
    dots. NaN and infinity are sent as they are.

    A run that is resumed from a checkpoint under the same run name continues its MLflow run.

    Args:
        experiment_name: None is the environment variable MLFLOW_EXPERIMENT_NAME or "my-mlflow-experiment".
        run_name: The name of the MLflow run; None is the run name.
        tags: Tags of the run.
        tracking_uri: The server or store; None is MLflow's setting.
        rank_zero_only: True if only rank 0 logs; else all ranks log to one MLflow run.
        flush_interval: The minimum number of seconds between two requests with metrics.
        model_registry_prefix: A prefix of the names of registered models, separated by a dot.
        model_registry_uri: The registry; None is MLflow's setting.
        synchronous: True if each call of `log_metrics` waits until its values are sent. Slows down training.
        log_system_metrics: True if MLflow logs the use of CPU, memory, disk and network every 10 seconds.
        rename_metrics: New names by old ones.
        ignore_metrics: Metrics to leave out: patterns as for file names, such as "time/*".
        ignore_hyperparameters: Hyperparameters to leave out: patterns, as above.
        run_group: The tag "run_group".
        resume: Continue the run of this experiment with the same tag `run_name`, if there is one.
        logging_buffer_seconds: How long metrics are collected before they are sent.
        log_duplicated_metric_every_n_steps: After how many steps an unchanged value is sent again.
        on_error: What to do if logging fails: "warn" (once; the run continues) or "raise".
        log_artifacts: Store files, such as checkpoints, as artifacts.
        delivery_timeout: How many seconds in total the end of the run waits for queued data once the service fails or
            hangs, counted from the first failure, or from the last delivery if it hangs. A service that still accepts
            data, however slowly, is waited for. None: the Trainer's timeout, which its services share (60 by default).

    Raises:
        ValueError: A number is not positive, `on_error` is unknown, or `model_registry_prefix` is not valid for the
            Unity Catalog.

    Differs: values are sent by our own thread, not by MLflow's. No process watches the run on Databricks: the run ends
    as FAILED or KILLED when an error closes the logger, or at the end of the process.
    """

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
        check_delivery_options(on_error, delivery_timeout)
        interval = max(flush_interval, logging_buffer_seconds or 0.0)
        check_finite(
            flush_interval=flush_interval,
            logging_buffer_seconds=logging_buffer_seconds or interval,
            log_duplicated_metric_every_n_steps=log_duplicated_metric_every_n_steps,
            above=0,
        )
        if model_registry_uri == "databricks-uc" and len(model_registry_prefix.split(".")) != 2:
            raise ValueError(
                f"When registering to Unity Catalog, `model_registry_prefix` must be of the form 'catalog.schema', got "
                f"{model_registry_prefix!r}."
            )
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
        self._created = False
        self._deadline = DeliveryDeadline(delivery_timeout or 60.0)  # replaced at `init` by that of the run
        self._clear()

    def _clear(self) -> None:
        self._run: _MLFlowRun | None = None
        self._sender = None
        self._monitor: Any = None
        self._files = HeldFiles()
        self._ignored: dict[str, bool] = {}  # by name of a metric

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the thread and the connection, which cannot be copied."""
        return {**super().__getstate__(), "_run": None, "_monitor": None}

    @property
    def mlflow_ids(self) -> dict[str, str] | None:
        """The placeholders `mlflow_experiment_id` and `mlflow_run_id` of names of files; None before INIT."""
        if self._experiment_id is None or self._run_id is None:
            return None
        return {"mlflow_experiment_id": self._experiment_id, "mlflow_run_id": self._run_id}

    @property
    def run_url(self) -> str | None:
        """The page of the MLflow run; None before INIT and for a store that is not a server."""
        uri = (self.tracking_uri or os.environ.get(_URI) or "").rstrip("/")
        run = f"experiments/{self._experiment_id}/runs/{self._run_id}"
        if self._run_id is None:
            return None
        if uri.startswith("databricks"):
            host = os.environ.get("DATABRICKS_HOST", "").rstrip("/")
            return f"{host}/ml/{run}" if host else None
        return f"{uri}/#/{run}" if uri.startswith(("http://", "https://")) else None

    @property
    def _metrics_cache(self) -> dict[str, tuple[float, int]]:
        return self._run.metrics_cache if self._run else {}

    # ---- values ----

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        kept = {k: v for k, v in hyperparameters.items() if not _matches(k, self.ignore_hyperparameters)}
        self._hyperparameters |= kept
        if self._sender is not None and self._run is not None:
            self._sender.put(partial(self._run.send_params, {key: str(value) for key, value in kept.items()}))

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if self.ignore_metrics:
            metrics = {key: value for key, value in metrics.items() if not self._is_ignored(key)}
        super().log_metrics(metrics, step)
        if self.synchronous and self._sender is not None:
            self._sender.flush()

    def _is_ignored(self, name: str) -> bool:
        if name not in self._ignored:
            self._ignored[name] = _matches(name, self.ignore_metrics)
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
        name: str = "image",
        channels_last: bool = False,
        step: int | None = None,
        masks: Mapping[str, Any] | None = None,
        mask_class_labels: dict[int, str] | None = None,
        use_table: bool = True,
    ) -> None:
        arrays = list_images(images)
        if self._sender is not None and self._run is not None:
            send = partial(self._run.send_images, name=name, channels_last=channels_last, step=step)
            self._sender.put_images(arrays, send)

    # ---- files and models ----

    def can_upload_files(self) -> bool:
        return self.log_artifacts

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        if not self.log_artifacts or self._sender is None or self._run is None:
            return
        remote = Path(remote_file_name)
        folder = None if remote.parent == Path() else remote.parent.as_posix()
        held = self._files.hold(file_path, remote.name)
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
        try:
            artifacts = call_in_time(
                lambda: client.list_artifacts(run_id, inside), self._deadline.timeout, "Asking MLflow for its artifacts"
            )
        except Exception as error:
            if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":  # a server that is down may have it
                raise
            artifacts = []
        if remote_file_name not in [artifact.path for artifact in artifacts]:
            raise FileNotFoundError(f"{remote_file_name!r} is not among the artifacts of the MLflow run {run_id}.")
        folder = os.path.dirname(os.path.abspath(destination))
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            path = client.download_artifacts(run_id, remote_file_name, temporary)
            os.replace(path, destination)

    def rename(self, key: str) -> str:
        """Return the name by which a metric is logged, from `rename_metrics`; a name that is not there stays.

        Args:
            key: The name of the metric.
        """
        return self.rename_metrics.get(key, key)

    @renamed_arguments(await_creation_for="await_registration_for")
    def register_model(
        self, model_uri: str, name: str, await_registration_for: int = 300, tags: dict[str, Any] | None = None
    ) -> Any:
        """Register a model.

        Args:
            model_uri: The URI of the model.
            name: Its name, to which `model_registry_prefix` and a dot are prepended.
            await_registration_for: How long to wait for its creation, in seconds.
            tags: Tags of the version.

        Returns:
            The `mlflow.entities.model_registry.ModelVersion`; None on a rank that does not log.
        """
        return self._register(None, model_uri, name, await_registration_for, tags)

    def register_model_with_run_id(
        self, model_uri: str, name: str, await_creation_for: int = 300, tags: dict[str, Any] | None = None
    ) -> Any:
        """Register a model as created by this run; otherwise like `register_model`."""
        return self._register(self._run_id, model_uri, name, await_creation_for, tags)

    def _register(self, run_id: str | None, model_uri: str, name: str, wait: int, tags: dict[str, Any] | None) -> Any:
        """Register a version of a model, and the model itself if it is new."""
        if self._run is None:
            return None
        from mlflow.exceptions import MlflowException

        full_name = f"{self.model_registry_prefix}.{name}" if self.model_registry_prefix else name
        client = self._run.client
        try:
            client.create_registered_model(full_name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        return client.create_model_version(full_name, model_uri, run_id, tags=tags, await_creation_for=wait)

    def save_model(self, flavor: str, **kwargs: Any) -> None:
        """Save a model locally with `mlflow.<flavor>.save_model`.

        Raises:
            ValueError: MLflow has no such flavor.
        """
        if self._run is not None:
            _find_flavor(flavor).save_model(**kwargs)

    def log_model(self, flavor: str, **kwargs: Any) -> Any:
        """Store a model as an artifact of the run with `mlflow.<flavor>.log_model`.

        Raises:
            ValueError: MLflow has no such flavor.
        """
        if self._run is None:
            return None
        module = _find_flavor(flavor)
        with _current_run(self._run_id, self.tracking_uri):
            logged = module.log_model(**kwargs)
        self._run.client.update_run(self._run_id, status="RUNNING")  # the context has ended it
        return logged

    # ---- events ----

    def init(self, state: State, logger: Logger) -> None:
        self._composer_run_name = state.run_name
        self._deadline = logger.delivery_deadline.for_service(self.delivery_timeout)
        self._training = False
        ids: list[Any] = [None, None, False]
        failure: Exception | None = None
        if dist.get_global_rank() == 0:
            try:
                tags = self.tags | ({} if self.run_group is None else {"run_group": self.run_group})
                tags["run_name"] = os.environ.get("RUN_NAME") or self.run_name or state.run_name
                name = self.experiment_name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "my-mlflow-experiment"
                open_ = partial(_open_run, name=self.run_name or state.run_name, tags=tags, resume=self.resume)
                client = self._client()  # imports MLflow, which takes seconds; the timeout is for the server
                # The client retries for minutes if the server is down.
                ids = [*call_in_time(lambda: open_(client, name), self._deadline.timeout, "Opening a run")]
            except Exception as error:  # noqa: BLE001 - reported below
                failure = error
        dist.broadcast_object_list(ids)  # before an error is raised, or the other ranks would wait forever
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
            lambda: _MLFlowRun(client, run_id, self.rename_metrics, every), self._deadline.timeout, "Reading the run"
        )
        if self._sender is None:
            self._sender = Sender(
                "MLFlowLogger",
                lambda records: None if self._run is None else self._run.send(records),
                on_error=self.on_error,
                interval=self._interval,
                timeout=self._deadline,
                kept=lambda: self._files.describe("Metrics are lost."),
            )
        self.log_hyperparameters(self._hyperparameters)  # logged before the run was opened
        if self.log_system_metrics:
            self._monitor = call_in_time(
                lambda: _start_monitor(run_id, self.tracking_uri, resume=not self._created),
                self._deadline.timeout,
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
            call_in_time(update, self._deadline.timeout, "Reopening the run")
            self._sender.flush()
            self._stop_monitor()
            self._connect()
        except Exception as error:  # noqa: BLE001 - MLflow has no common base class of errors
            report_failure("MLFlowLogger", error, self.on_error)
            self._experiment_id, self._run_id, self._created = fresh
            return
        if fresh[2] and dist.get_global_rank() == 0:  # it was created before the checkpoint was loaded
            self._sender.put(partial(self._run.client.delete_run, fresh[1]), check=False)

    def post_close(self) -> None:
        sender, run = self._sender, self._run
        if sender is None or run is None:
            return
        self._stop_monitor()
        self._hyperparameters = {}
        if dist.get_global_rank() == 0:
            status = _final_status(training=self._training)
            sender.put(partial(run.client.set_terminated, run.run_id, status), check=False)
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
        """Return the MLflow run that a resumed run continues."""
        if self._run_id is None:
            return {}
        return {"run_name": self._composer_run_name, "run_id": self._run_id, "experiment_id": self._experiment_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state or None


class _MLFlowRun:
    """An MLflow run. Most of its methods are called in the thread of the sender.

    Args:
        client: A `mlflow.MlflowClient`.
        run_id: The id of the run.
        rename_metrics: New names by old ones.
        repeat_after: The number of steps after which an unchanged value is sent again.
    """

    def __init__(self, client: Any, run_id: str, rename_metrics: dict[str, str], repeat_after: int) -> None:
        self.client, self.run_id = client, run_id
        self.metrics_cache: dict[str, tuple[float, int]] = {}  # the last value sent, and its step
        self._rename, self._repeat_after = rename_metrics, repeat_after
        self._names: dict[str, str] = {}
        self._params: dict[str, str] = dict(client.get_run(run_id).data.params)

    def send(self, records: Sequence[Logged]) -> None:
        """Send metrics in as few requests as the server allows, and the last array of each name as an artifact."""
        from mlflow.entities import Metric

        for key, (step, array) in read_arrays(records).items():
            content = {"step": step, "values": array.tolist()}
            self.client.log_dict(self.run_id, content, f"{self.name(self._rename.get(key, key))}_{step}.json")
        metrics = [
            Metric(name, value, int(seconds * 1000), step)
            for values, step, seconds in records
            for name, value in self._changed(values, step)
        ]
        problem: Exception | None = None
        for start in range(0, len(metrics), _METRICS_PER_REQUEST):
            batch = metrics[start : start + _METRICS_PER_REQUEST]
            try:
                self.client.log_batch(self.run_id, metrics=batch)
            except Exception as error:  # noqa: BLE001 - one failed request must not lose the others
                problem = problem or error
                for metric in batch:  # otherwise the same value would not be sent again
                    self.metrics_cache.pop(metric.key, None)
        if problem is not None:
            raise problem

    def _changed(self, values: Mapping[str, Any], step: int) -> list[tuple[str, float]]:
        """Return the numbers that differ from the last ones sent, or were sent `repeat_after` steps ago."""
        changed: list[tuple[str, float]] = []
        for key, number in read_numbers(values).items():
            name = self.name(self._rename.get(key, key))
            before = self.metrics_cache.get(name)
            if before is None or before[0] != number or step >= before[1] + self._repeat_after:
                self.metrics_cache[name] = (number, step)
                changed.append((name, number))
        return changed

    def name(self, key: str) -> str:
        """Return a name that MLflow accepts: of letters, digits and `_-. :/`, short, and not like `../a` or `a//b`."""
        name = self._names.get(key)
        if name is None:
            name = posixpath.normpath(_REFUSED.sub(".", str(key)).strip("/"))[:_LONGEST_KEY]
            name = self._names[key] = re.sub(r"^(\.\./)+|^\.\.?$", "_", name)
            if name != key:
                log.warning("MLflow does not accept the name %r; it is logged as %r.", key, name)
        return name

    def send_params(self, hyperparameters: dict[str, Any]) -> None:
        """Send hyperparameters that the run does not have yet: MLflow does not allow them to be changed."""
        from mlflow.entities import Param

        new: list[Any] = []
        for key, value in hyperparameters.items():
            name, text = self.name(key), value if isinstance(value, str) else str(value)
            before = self._params.get(name)
            if before is None:
                self._params[name] = text
                new.append(Param(name, text))
            elif not text.startswith(before):  # MLflow truncates long values
                log.warning("MLflow cannot change the hyperparameter %s=%r to %r.", name, before, text)
        for start in range(0, len(new), _PARAMS_PER_REQUEST):
            self.client.log_batch(self.run_id, params=new[start : start + _PARAMS_PER_REQUEST])

    def send_table(self, columns: list[str], rows: list[list[Any]], name: str) -> None:
        """Append rows to a table, which is stored as an artifact."""
        cells = [[table_cell(value) for value in row] for row in rows]
        data = {column: [row[i] for row in cells] for i, column in enumerate(columns)}
        self.client.log_table(self.run_id, data, f"{self.name(name)}.json")

    def send_images(self, images: Sequence[ImageCopy], *, name: str, channels_last: bool, step: int | None) -> None:
        """Send images as artifacts."""
        pictures = [picture for image in images for picture in _pictures(image(), channels_last)]
        for number, picture in enumerate(pictures):
            self.client.log_image(self.run_id, picture, artifact_file=f"{self.name(name)}_{step}_{number}.png")

    def send_file(self, held: Path, folder: str | None) -> None:
        """Send a file as an artifact, and release it."""
        try:
            self.client.log_artifact(self.run_id, str(held), folder)
        finally:
            HeldFiles.release(held)


def _open_run(client: Any, experiment: str, name: str, tags: dict[str, Any], *, resume: bool) -> tuple[str, str, bool]:
    """Find or create a run.

    Returns:
        The id of the experiment, the id of the run, and True if the run is new.
    """
    existing = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if existing is None else existing.experiment_id
    if resume:
        quote = '"' if "'" in tags["run_name"] else "'"  # quotes cannot be escaped
        runs = client.search_runs([experiment_id], f"tags.run_name = {quote}{tags['run_name']}{quote}", max_results=1)
        if runs:
            client.update_run(runs[0].info.run_id, status="RUNNING")
            return experiment_id, runs[0].info.run_id, False
    run = client.create_run(experiment_id, tags=tags, run_name=name)
    return experiment_id, run.info.run_id, True


def _start_monitor(run_id: str, uri: str | None, *, resume: bool) -> Any:
    """Start MLflow's thread that logs system metrics.

    Args:
        run_id: The id of the run.
        uri: The tracking URI.
        resume: True if the run already has system metrics, which this one continues.
    """
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    make: Any = SystemMetricsMonitor
    monitor = make(run_id, resume_logging=resume, tracking_uri=uri)
    monitor.start()
    return monitor


def _find_flavor(name: str) -> Any:
    """Import the MLflow module for a kind of model.

    Raises:
        ValueError: MLflow has none of that name.
    """
    try:
        module = import_module(f"mlflow.{name}")
    except ModuleNotFoundError:
        module = None
    if not hasattr(module, "log_model"):
        raise ValueError(f"`flavor` must be a kind of model that MLflow knows, such as 'pytorch', got {name!r}.")
    return module


@contextmanager
def _current_run(run_id: str | None, uri: str | None) -> Iterator[None]:
    """Make a run the active run of the functions in the module `mlflow`."""
    import mlflow

    before, variable = mlflow.get_tracking_uri(), os.environ.get(_URI)
    try:
        if uri is not None:
            mlflow.set_tracking_uri(uri)
        with mlflow.start_run(run_id=run_id):
            yield
    finally:
        if uri is not None:
            mlflow.set_tracking_uri(before)  # which sets the environment variable too
            os.environ.pop(_URI, None)
            os.environ.update({} if variable is None else {_URI: variable})


def _final_status(*, training: bool) -> str:
    """Return the final status of a run that is closed now: FINISHED, FAILED or KILLED.

    Args:
        training: True if training has started and not finished.
    """
    error = sys.exc_info()[1] or (getattr(sys, "last_value", None) if training else None)  # `last_value`: at exit
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "KILLED"
    return "FAILED" if error is not None or training else "FINISHED"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Return True if a name matches one of the patterns for file names."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _pictures(array: np.ndarray, channels_last: bool) -> list[np.ndarray]:
    """Split an array of two to four dimensions into images of shape (H, W) or (H, W, C)."""
    if array.ndim == 2:
        return [array]
    if not channels_last:
        array = np.moveaxis(array, -3, -1)
    return list(array) if array.ndim == 4 else [array]
