"""Object stores in the artifacts of a run of MLflow on Databricks."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer.checkpoint.durable import symlink_or_copy
from composer.checkpoint.names import MLFLOW_DBFS_PATH_PREFIX as MLFLOW_DBFS_PATH_PREFIX
from composer.checkpoint.names import MLFLOW_EXPERIMENT_ID_FORMAT_KEY as MLFLOW_EXPERIMENT_ID_FORMAT_KEY
from composer.checkpoint.names import MLFLOW_RUN_ID_FORMAT_KEY as MLFLOW_RUN_ID_FORMAT_KEY
from composer.utils import MissingConditionalImportError
from composer.utils.object_store.object_store import ObjectStore, ObjectStoreTransientError, check_destination

__all__ = [
    "MLFLOW_DBFS_PATH_PREFIX",
    "MLFLOW_EXPERIMENT_ID_FORMAT_KEY",
    "MLFLOW_RUN_ID_FORMAT_KEY",
    "MLFlowObjectStore",
]

_EXPERIMENT, _RUN = f"{{{MLFLOW_EXPERIMENT_ID_FORMAT_KEY}}}", f"{{{MLFLOW_RUN_ID_FORMAT_KEY}}}"
_PATH = re.compile(rf"{MLFLOW_DBFS_PATH_PREFIX}([^/]+)/([^/]+)/artifacts(?:/(.*))?")
_DEFAULT_EXPERIMENT = "mlflow-object-store"
_MISSING = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND", "ENDPOINT_NOT_FOUND")


class MLFlowObjectStore(ObjectStore):
    """The artifacts of a run of MLflow on Databricks. Needs the extra `mlflow` of composer-compat.

    Names are relative to the artifacts, or full paths.

    Args:
        path: `databricks/mlflow-tracking/<experiment>/<run>/artifacts/<path>`, where the last part is not used. The
            placeholders `{mlflow_experiment_id}` and `{mlflow_run_id}` stand for the active run of this process;
            without one, for a new run, in the experiment that `MLFLOW_EXPERIMENT_NAME` names, else in
            `mlflow-object-store`.
        multipart_upload_chunk_size: The size in bytes of the parts of large files, which MLflow keeps for the process.

    Attributes:
        experiment_id: The identifier of the experiment.
        run_id: The identifier of the run.

    Raises:
        ImportError: `mlflow` is not installed.
        ValueError: The path has another form, names a run but no experiment, or `MLFLOW_TRACKING_URI` is not that of
            Databricks.
        PermissionError: Databricks refuses the credentials.
    """

    def __init__(self, path: str, multipart_upload_chunk_size: int = 100 * 1024 * 1024) -> None:
        try:
            import mlflow
        except ImportError as error:
            raise MissingConditionalImportError("mlflow", "mlflow") from error
        experiment, run, _ = self.parse_dbfs_path(path)
        if experiment == _EXPERIMENT and run != _RUN:
            raise ValueError(f"`path` must name the experiment of the run {run!r}, got {path!r}.")
        tracking = os.environ.get("MLFLOW_TRACKING_URI") or "databricks"
        if tracking.partition("://")[0] != "databricks":
            raise ValueError(f"`MLFLOW_TRACKING_URI` must be 'databricks' to store files there, got {tracking!r}.")
        os.environ["MLFLOW_MULTIPART_UPLOAD_CHUNK_SIZE"] = str(multipart_upload_chunk_size)
        self._client = mlflow.MlflowClient(tracking)
        with _translated(path):
            self.experiment_id, self.run_id = self._resolve(experiment, run)

    @staticmethod
    def parse_dbfs_path(path: str) -> tuple[str, str, str]:
        """Return experiment, run and the path in the artifacts of a full path.

        Raises:
            ValueError: The path has another form.
        """
        match = _PATH.fullmatch(path.strip("/"))
        if match is None:
            raise ValueError(
                f"`path` must be of the form '{MLFLOW_DBFS_PATH_PREFIX}<experiment>/<run>/artifacts/<path>', got "
                f"{path!r}."
            )
        return match[1], match[2], match[3] or ""

    def get_artifact_path(self, object_name: str) -> str:
        """Return the path of an object in the artifacts.

        Raises:
            ValueError: `object_name` is a full path of another experiment or run.
        """
        name = object_name.lstrip("/")
        if not name.startswith(MLFLOW_DBFS_PATH_PREFIX):
            return name
        experiment, run, path = self.parse_dbfs_path(name)
        if experiment not in (self.experiment_id, _EXPERIMENT) or run not in (self.run_id, _RUN):
            raise ValueError(
                f"`object_name` must be in experiment {self.experiment_id!r} and run {self.run_id!r}, got "
                f"{object_name!r}."
            )
        return path

    def get_dbfs_path(self, object_name: str) -> str:
        """Return the full path of an object, which need not exist."""
        artifact = self.get_artifact_path(object_name)
        return f"{MLFLOW_DBFS_PATH_PREFIX}{self.experiment_id}/{self.run_id}/artifacts/{artifact}"

    def get_uri(self, object_name: str) -> str:
        return f"dbfs:/{self.get_dbfs_path(object_name)}"

    def upload_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Upload a file; see `ObjectStore.upload_object`. There are no options.

        Raises:
            PermissionError: Databricks refuses the credentials.
            ObjectStoreTransientError: Another attempt may succeed.
            ValueError: An option is given, or the object is one of another run.
        """
        if kwargs:
            raise ValueError(f"`MLFlowObjectStore.upload_object` has no option {', '.join(map(repr, kwargs))}.")
        folder, _, name = self.get_artifact_path(object_name).rpartition("/")
        with tempfile.TemporaryDirectory(prefix="composer-mlflow-") as temporary:
            # MLflow names the artifact after the file.
            link = Path(temporary) / name
            symlink_or_copy(filename, link)
            with _translated(self.get_uri(object_name)):
                self._client.log_artifact(self.run_id, str(link), folder or None)
        if callback is not None:
            size = os.stat(filename).st_size
            callback(size, size)

    def get_object_size(self, object_name: str) -> int:
        path = self.get_artifact_path(object_name)
        for found in self._list(path.rpartition("/")[0]):
            if found.path == path and not found.is_dir:
                return int(found.file_size or 0)
        raise FileNotFoundError(f"There is no object {self.get_uri(object_name)}.")

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Callable[[int, int], None] | None = None,
    ) -> None:
        """Download an object; see `ObjectStore.download_object`.

        Raises:
            PermissionError: Databricks refuses the credentials.
        """
        check_destination(filename, overwrite)
        size = self.get_object_size(object_name)
        target = Path(filename)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".composer-mlflow-", dir=target.parent) as folder:
            with _translated(self.get_uri(object_name)):
                got = self._client.download_artifacts(self.run_id, self.get_artifact_path(object_name), folder)
            os.replace(got, target)
        if callback is not None:
            callback(size, size)

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """List the sorted names of the objects that begin with `prefix`, also in folders, relative to the artifacts."""
        start = self.get_artifact_path(prefix or "")
        folders, names = [start.rpartition("/")[0]], []
        while folders:
            for found in self._list(folders.pop()):
                if found.is_dir:
                    folders.append(found.path)
                elif found.path.startswith(start):
                    names.append(found.path)
        return sorted(names)

    def _list(self, folder: str) -> list[Any]:
        with _translated(self.get_uri(folder)):
            try:
                return list(self._client.list_artifacts(self.run_id, folder or None))
            except NotADirectoryError:
                return []

    def _resolve(self, experiment: str, run: str) -> tuple[str, str]:
        """Return experiment and run of a path, with identifiers in place of placeholders."""
        import mlflow

        if run != _RUN:
            return experiment, run
        active = mlflow.active_run()
        if active is not None and experiment in (_EXPERIMENT, active.info.experiment_id):
            return active.info.experiment_id, active.info.run_id
        if experiment == _EXPERIMENT:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _DEFAULT_EXPERIMENT
            existing = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if existing is None else existing.experiment_id
        return experiment, self._client.create_run(experiment).info.run_id


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """Convert the errors of MLflow to those that an `ObjectStore` raises."""
    from mlflow.exceptions import MlflowException
    from requests.exceptions import ConnectionError as RequestsConnectionError
    from requests.exceptions import HTTPError, Timeout

    try:
        yield
    except (RequestsConnectionError, Timeout) as error:
        raise ObjectStoreTransientError(f"The request for {what} failed: {error}") from error
    except (MlflowException, HTTPError) as error:
        if isinstance(error, MlflowException):
            status, code = int(error.get_http_status_code()), error.error_code
        else:
            status, code = (0 if error.response is None else error.response.status_code), ""
        if status in (401, 403):
            raise PermissionError(f"Databricks refuses the request for {what}: {error}") from error
        if status == 404 or code in _MISSING:
            raise FileNotFoundError(f"There is no {what}. ({error})") from error
        if status in (408, 429) or status >= 500:
            raise ObjectStoreTransientError(f"The request for {what} failed: {error}") from error
        raise
