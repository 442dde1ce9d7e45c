"""One run of MLflow and what is sent to it, mostly from the thread that sends."""

from __future__ import annotations

import logging
import os
import posixpath
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from composer.loggers import format_log_data_value
from composer.loggers._held_files import release_file
from composer.loggers._numbers import as_number
from composer.loggers._pixels import in_unit_range
from composer.loggers._sender import Logged

__all__ = [
    "MLFlowRun",
    "check_registry",
    "current_run",
    "ended_as",
    "find_flavor",
    "matches",
    "open_run",
    "register",
    "start_monitor",
]

log = logging.getLogger(__name__)

_METRICS_PER_REQUEST, _PARAMS_PER_REQUEST, _LONGEST_KEY = 1000, 100, 250
_URI = "MLFLOW_TRACKING_URI"
_REFUSED = re.compile(r"[^\w/.: -]")


class MLFlowRun:
    """Sends to one run.

    Args:
        client: A `mlflow.MlflowClient`.
        run_id: The run.
        rename_metrics: New names by old ones.
        repeat_after: Steps after which an unchanged value is sent again.
    """

    def __init__(self, client: Any, run_id: str, rename_metrics: dict[str, str], repeat_after: int) -> None:
        self.client, self.run_id = client, run_id
        self.metrics_cache: dict[str, tuple[float, int]] = {}  # the newest value sent, and its step
        self._rename, self._repeat_after = rename_metrics, repeat_after
        self._names: dict[str, str] = {}
        self._params: dict[str, str] = dict(client.get_run(run_id).data.params)

    def send(self, records: Sequence[Logged]) -> None:
        """Send metrics, in as few requests as the server takes."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, int(seconds * 1000), step)
            for values, step, seconds in records
            for name, value in self._changed(values, step)
        ]
        problem: Exception | None = None
        for start in range(0, len(metrics), _METRICS_PER_REQUEST):
            some = metrics[start : start + _METRICS_PER_REQUEST]
            try:
                self.client.log_batch(self.run_id, metrics=some)
            except Exception as error:  # noqa: BLE001 - one request must not cost the others
                problem = problem or error
                for metric in some:  # or the same value would not be sent again
                    self.metrics_cache.pop(metric.key, None)
        if problem is not None:
            raise problem

    def _changed(self, values: Mapping[str, Any], step: int) -> list[tuple[str, float]]:
        found: list[tuple[str, float]] = []
        for key, value in values.items():
            number = as_number(value)
            if number is None:
                continue
            name = self.name(self._rename.get(key, key))
            before = self.metrics_cache.get(name)
            if before is None or before[0] != number or step >= before[1] + self._repeat_after:
                self.metrics_cache[name] = (number, step)
                found.append((name, number))
        return found

    def name(self, key: str) -> str:
        """A name that MLflow takes: of letters, digits and `_-. :/`, short, and not like `../a` or `a//b`."""
        name = self._names.get(key)
        if name is None:
            name = posixpath.normpath(_REFUSED.sub(".", str(key)).strip("/"))[:_LONGEST_KEY]
            name = self._names[key] = re.sub(r"^(\.\./)+|^\.\.?$", "_", name)
            if name != key:
                log.warning("MLflow does not take the name %r; it is logged as %r.", key, name)
        return name

    def send_params(self, hyperparameters: dict[str, Any]) -> None:
        """Send hyperparameters; what the run has is left out, because MLflow does not let it be changed."""
        from mlflow.entities import Param

        new: list[Any] = []
        for key, value in hyperparameters.items():
            name, text = self.name(key), value if isinstance(value, str) else str(value)
            before = self._params.get(name)
            if before is None:
                self._params[name] = text
                new.append(Param(name, text))
            elif not text.startswith(before):  # long ones were cut off
                log.warning("MLflow keeps the hyperparameter %s=%r; it cannot become %r.", name, before, text)
        for start in range(0, len(new), _PARAMS_PER_REQUEST):
            self.client.log_batch(self.run_id, params=new[start : start + _PARAMS_PER_REQUEST])

    def send_table(self, columns: list[str], rows: list[list[Any]], name: str) -> None:
        """Append rows to a table, an artifact."""
        cells = [[_cell(value) for value in row] for row in rows]
        data = {column: [row[i] for row in cells] for i, column in enumerate(columns)}
        self.client.log_table(self.run_id, data, f"{self.name(name)}.json")

    def send_images(
        self, images: Sequence[Callable[[], np.ndarray]], name: str, channels_last: bool, step: int | None
    ) -> None:
        """Send images as artifacts."""
        pictures = [picture for image in images for picture in _pictures(in_unit_range(image()), channels_last)]
        for number, picture in enumerate(pictures):
            self.client.log_image(self.run_id, picture, artifact_file=f"{self.name(name)}_{step}_{number}.png")

    def send_file(self, held: Path, folder: str | None) -> None:
        """Send a file, and remove the held name it is sent by."""
        try:
            self.client.log_artifact(self.run_id, str(held), folder)
        finally:
            release_file(held)

    def end(self, status: str) -> None:
        """Say how the run has ended."""
        self.client.set_terminated(self.run_id, status)


def open_run(client: Any, experiment: str, name: str, tags: dict[str, Any], *, resume: bool) -> tuple[str, str, bool]:
    """Find or create a run.

    Returns:
        The ids of the experiment and the run, and whether it is new.
    """
    found = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if found is None else found.experiment_id
    if resume:
        quote = '"' if "'" in tags["run_name"] else "'"  # there is no way to escape them
        runs = client.search_runs([experiment_id], f"tags.run_name = {quote}{tags['run_name']}{quote}", max_results=1)
        if runs:
            client.update_run(runs[0].info.run_id, status="RUNNING")
            return experiment_id, runs[0].info.run_id, False
    run = client.create_run(experiment_id, tags=tags, run_name=name)
    return experiment_id, run.info.run_id, True


def start_monitor(run_id: str, uri: str | None, *, again: bool) -> Any:
    """Have MLflow log what the machine does, from a thread of its own; `again`: it has done so for this run before."""
    from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

    make: Any = SystemMetricsMonitor
    monitor = make(run_id, resume_logging=again, tracking_uri=uri)
    monitor.start()
    return monitor


def check_registry(uri: str | None, prefix: str) -> None:
    """Refuse a prefix that the Unity Catalog does not take.

    Raises:
        ValueError: It does not.
    """
    if uri == "databricks-uc" and len(prefix.split(".")) != 2:
        raise ValueError(
            f"When registering to Unity Catalog, `model_registry_prefix` must be of the form 'catalog.schema', got "
            f"{prefix!r}."
        )


def register(client: Any, run_id: str | None, uri: str, name: str, wait: int, tags: dict[str, Any] | None) -> Any:
    """Register a model, which need not be known yet."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    return client.create_model_version(name, uri, run_id, tags=tags, await_creation_for=wait)


def find_flavor(name: str) -> Any:
    """The module of MLflow for a kind of model.

    Raises:
        ValueError: There is none.
    """
    try:
        module = import_module(f"mlflow.{name}")
    except ModuleNotFoundError:
        module = None
    if not hasattr(module, "log_model"):
        raise ValueError(f"`flavor` must be a kind of model that MLflow knows, such as 'pytorch', got {name!r}.")
    return module


@contextmanager
def current_run(run_id: str | None, uri: str | None) -> Iterator[None]:
    """Make a run the one that functions of the module `mlflow` log to."""
    import mlflow

    before, variable = mlflow.get_tracking_uri(), os.environ.get(_URI)
    try:
        if uri is not None:
            mlflow.set_tracking_uri(uri)
        with mlflow.start_run(run_id=run_id):
            yield
    finally:
        if uri is not None:
            mlflow.set_tracking_uri(before)  # and so the variable
            os.environ.pop(_URI, None)
            os.environ.update({} if variable is None else {_URI: variable})


def ended_as(*, training: bool) -> str:
    """The status of a run that is closed now: FINISHED, FAILED or KILLED.

    Args:
        training: Whether it is closed in the middle of the training.
    """
    error = sys.exc_info()[1] or (getattr(sys, "last_value", None) if training else None)  # the latter at exit
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "KILLED"
    return "FAILED" if error is not None or training else "FINISHED"


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches one of the patterns, as file names do."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else format_log_data_value(value)


def _pictures(array: np.ndarray, channels_last: bool) -> list[np.ndarray]:
    """Images (H, W) or (H, W, C) out of an array of two to four dimensions."""
    if array.ndim == 2:
        return [array]
    if not channels_last:
        array = np.moveaxis(array, -3, -1)
    return list(array) if array.ndim == 4 else [array]
