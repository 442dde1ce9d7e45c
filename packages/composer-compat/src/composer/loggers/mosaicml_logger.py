"""A logger for the MosaicML platform, and the names of the platform's environment variables."""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from composer.core import Time, TimeUnit
from composer.core.deferred_value import DeferredValue
from composer.loggers.spi import Logged, Sender, ServiceLogger, hold_metrics
from composer.utils import check_finite, dist, ensure_tuple
from composer.utils.delivery import DeliveryDeadline
from composer.utils.file_helpers import without_password

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

log = logging.getLogger(__name__)

RUN_NAME_ENV_VAR = "RUN_NAME"
"""The environment variable with the name of the run; without it, `MosaicMLLogger` does nothing."""
MOSAICML_PLATFORM_ENV_VAR = "MOSAICML_PLATFORM"
"""The environment variable that is "true" in runs of the platform."""
MOSAICML_ACCESS_TOKEN_ENV_VAR = "MOSAICML_ACCESS_TOKEN_FILE"
"""The environment variable with the file of the access token."""
MOSAICML_LOG_DIR_ENV_VAR = "MOSAICML_LOG_DIR"
"""The environment variable with the folder that the launcher writes the output of each rank to."""
MOSAICML_GPU_LOG_FILE_PREFIX_ENV_VAR = "MOSAICML_GPU_LOG_FILE_PREFIX"
"""The environment variable with the beginning of the names of these files; the local rank and ".txt" follow."""

_PAGES = {"WandBLogger": "wandb/run_url", "MLFlowLogger": "mlflow/run_url"}


class MosaicMLLogger(ServiceLogger):
    """Logger for the metadata of a run on the MosaicML platform, through its client `mcli`.

    Rank 0 collects the latest value of each key and sends them all with `mcli.update_run_metadata` every `log_interval`
    seconds and at the end, from a thread: no step waits. Keys get the prefix "mosaicml/". Without `mcli` or outside a
    run of the platform (no environment variable RUN_NAME), the logger does nothing. Pass it as `loggers=...`: the
    Trainer does not add one.

    Besides metrics and hyperparameters it sends `model_initialized_time`, `checkpoint_resumed_path`, `wandb/run_url`,
    `mlflow/run_url`, `train_started_time`, `train_finished_time`, `checkpoint_uploaded_time` (when the uploads of a
    `CheckpointSaver` with a remote folder are complete), `training_progress` such as "[epoch=1/2]" and
    `training_sub_progress`. Times are in seconds since 1970.

    Args:
        log_interval: Seconds between two requests.
        ignore_keys: Keys to leave out: patterns as for file names, such as "time/*".
        ignore_exceptions: True: the first failed request becomes a warning, and the run continues. False: it stops.

    Attributes:
        run_name: The name of the run on the platform.

    Raises:
        ValueError: `log_interval` is not positive.

    Warns:
        UserWarning: `mcli` is not installed, so nothing is sent.
    """

    def __init__(
        self,
        log_interval: float = 60,
        ignore_keys: list[str] | None = None,
        ignore_exceptions: bool = True,
    ) -> None:
        check_finite(log_interval=log_interval, above=0)
        self.log_interval = log_interval
        self.ignore_keys, self.ignore_exceptions = ensure_tuple(ignore_keys), ignore_exceptions
        self.on_error = "warn" if ignore_exceptions else "raise"
        self.run_name = os.environ.get(RUN_NAME_ENV_VAR)
        self._unsent: dict[str, Any] = {}  # used by the thread only
        self._savers: list[Any] = []
        self._num_uploaded = 0  # checkpoints
        self._enabled = self._can_send()
        if self._enabled:
            self._start(60.0)  # metadata may be logged before the run begins

    def _can_send(self) -> bool:
        if dist.get_global_rank() != 0:
            return False
        if self.run_name is None:
            log.info("`MosaicMLLogger` does nothing: the environment variable %s is not set.", RUN_NAME_ENV_VAR)
            return False
        try:
            import_module("mcli")
        except ModuleNotFoundError as error:
            if error.name != "mcli":
                raise
            warnings.warn(
                "`MosaicMLLogger` does nothing: `mcli` is not installed. Run `pip install mosaicml-cli`, or remove the "
                "logger.",
                stacklevel=3,
            )
            return False
        return True

    def _start(self, timeout: float | DeliveryDeadline) -> None:
        self._sender = Sender(
            "MosaicMLLogger", self._send, on_error=self.on_error, interval=self.log_interval, timeout=timeout
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the thread, which cannot be copied."""
        return {**super().__getstate__(), "_savers": []}

    # ---- values ----

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.log_metadata(hyperparameters)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        hold_metrics(metrics)  # on every rank, even if nothing is sent
        kept = self._kept(metrics)
        if kept and self._sender is not None:
            self._sender.put_metrics(kept, 0 if step is None else step)

    def log_metadata(self, metadata: dict[str, Any], force_flush: bool = False) -> None:
        """Log metadata of the run.

        Args:
            metadata: Values by key; the latest of each key is sent.
            force_flush: Send it now instead of after `log_interval`. Does not wait either.
        """
        kept = self._kept(metadata)
        if kept and self._sender is not None:
            self._sender.put_metrics(kept, 0)
        if force_flush:
            self._flush_metadata(force_flush=True)

    def log_exception(self, exception: Exception) -> None:
        """Log the exception that ends a run as the metadata `exception`, and send it now."""
        self.log_metadata({"exception": exception_to_json_serializable_dict(exception)}, force_flush=True)

    def _flush_metadata(self, force_flush: bool = False) -> None:
        """Send what is collected now, without waiting; without `force_flush` it is sent after `log_interval`."""
        if force_flush and self._sender is not None:
            self._sender.wake()

    def _kept(self, values: dict[str, Any]) -> dict[str, Any]:
        if self._sender is None:
            return {}
        return {
            key: value
            for key, value in values.items()
            if not any(fnmatchcase(key, pattern) for pattern in self.ignore_keys)
        }

    # ---- events ----

    def init(self, state: State, logger: Logger) -> None:
        if not self._enabled:
            return
        if self._sender is None:  # another run
            self._start(logger.delivery_deadline.for_service())
        self._savers, self._num_uploaded = [], 0
        self.log_metadata({"model_initialized_time": time.time()})

    def after_load(self, state: State, logger: Logger) -> None:
        if state.load_path is not None:
            self.log_metadata({"checkpoint_resumed_path": without_password(state.load_path)})
        self._log_run_urls(logger)

    def fit_start(self, state: State, logger: Logger) -> None:
        super().fit_start(state, logger)
        self._savers = [c for c in state.callbacks if hasattr(c, "all_saved_checkpoints_to_timestamp")]
        self._num_uploaded = self._num_saved()
        self._log_run_urls(logger)
        self.log_metadata({"train_started_time": time.time(), **_progress(state)}, force_flush=True)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._sender is not None:
            self.log_metadata(_progress(state))
            self._log_upload_time()

    epoch_end = batch_end

    def fit_end(self, state: State, logger: Logger) -> None:
        self._log_upload_time()
        self.log_metadata({"train_finished_time": time.time(), **_progress(state)})
        super().fit_end(state, logger)

    def post_close(self) -> None:
        sender, self._sender, self._savers = self._sender, None, []
        if sender is not None:
            sender.close()

    def _log_run_urls(self, logger: Logger) -> None:
        """Log the pages of the same run in other services."""
        for destination in logger.destinations:
            key = _PAGES.get(type(destination).__name__)
            page = None if key is None else getattr(destination, "run_url", None)
            if key is not None and page is not None:
                self.log_metadata({key: page})

    def _num_saved(self) -> int:
        return sum(len(saver.all_saved_checkpoints_to_timestamp) for saver in self._savers)

    def _log_upload_time(self) -> None:
        """Log the time at which the uploads of new checkpoints are seen to be complete."""
        uploaders = [saver.remote_uploader for saver in self._savers if saver.remote_uploader is not None]
        saved = self._num_saved()
        if uploaders and saved != self._num_uploaded and not any(uploader.pending for uploader in uploaders):
            self._num_uploaded = saved
            self.log_metadata({"checkpoint_uploaded_time": time.time()})

    # ---- in the thread of the sender ----

    def _send(self, records: Sequence[Logged]) -> None:
        for record in records:
            for key, value in record.metrics.items():
                self._unsent[f"mosaicml/{key}"] = format_data_to_json_serializable(value)
        mcli = import_module("mcli")
        mcli.update_run_metadata(self.run_name, dict(self._unsent), future=True, protect=True).result()
        self._unsent = {}  # what could not be sent is part of the next request


def _progress(state: State) -> dict[str, str]:
    """Return how much of the run is done, in the unit of its length and, within an epoch, in batches."""
    now, limit = state.timestamp, state.max_duration
    assert limit is not None, "the engine runs no event without it"
    done: Time[Any] = now.get(limit.unit)
    name = limit.unit.name.lower()
    if limit.unit is not TimeUnit.EPOCH:
        return {"training_progress": f"[{name}={done.value}/{limit.value}]"}
    epoch, batch = done.value, now.batch_in_epoch.value
    running = epoch + (batch > 0)  # the epochs that have started
    length = "" if state.dataloader_len is None else f"/{int(state.dataloader_len)}"
    return {
        "training_progress": f"[{name}={running}/{limit.value}]",
        "training_sub_progress": f"[batch={batch}{length}]",
    }


def format_data_to_json_serializable(data: Any) -> Any:
    """Convert a logged value to JSON types.

    Args:
        data: None, text, numbers, tensors, arrays, exceptions, mappings or sequences of them; anything else becomes
            text.

    Returns:
        Tensors and arrays of one element as a number, others as a description of their shape.

    Example:
        >>> format_data_to_json_serializable({"loss": torch.tensor(0.5), "image": torch.zeros(2, 3)})
        {'loss': 0.5, 'image': 'Tensor of shape (2, 3)'}
    """
    if isinstance(data, DeferredValue):
        data = data.plain
    if data is None or isinstance(data, str | bool | int | float):
        return data
    if isinstance(data, torch.Tensor | np.ndarray | np.generic):
        if data.shape.numel() == 1 if isinstance(data, torch.Tensor) else data.size == 1:
            return data.item()
        return f"{type(data).__name__} of shape {tuple(data.shape)}"
    if isinstance(data, Exception):
        return exception_to_json_serializable_dict(data)
    if isinstance(data, Mapping):
        return {str(key): format_data_to_json_serializable(value) for key, value in data.items()}
    if isinstance(data, list | tuple | set | frozenset):
        return [format_data_to_json_serializable(value) for value in data]
    return str(data)


def exception_to_json_serializable_dict(exc: Exception) -> dict[str, Any]:
    """Convert an exception to its class, message and public attributes.

    Args:
        exc: The exception.

    Example:
        >>> exception_to_json_serializable_dict(ValueError("too large"))
        {'class': 'ValueError', 'message': 'too large', 'attributes': {}}
    """
    attributes = {key: value for key, value in vars(exc).items() if not key.startswith("_")}
    return {
        "class": type(exc).__name__,
        "message": str(exc),
        "attributes": format_data_to_json_serializable(attributes),
    }


def dict_to_str(data: Mapping[str, Any]) -> str:
    """Return the items of a dict as one line of text.

    Args:
        data: The dict.

    Example:
        >>> dict_to_str({"epoch": 1, "batch": 2})
        'epoch: 1, batch: 2'
    """
    return ", ".join(f"{key}: {value}" for key, value in data.items())
