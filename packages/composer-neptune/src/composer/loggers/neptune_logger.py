"""A logger for Neptune."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
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
    end_in_time,
    import_client,
    list_images,
    read_arrays,
    read_numbers,
    report_failure,
)
from composer.utils import check_flags, dist
from composer.utils.delivery import DeliveryDeadline

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

log = logging.getLogger(__name__)

_MODES = ("async", "sync", "offline", "read-only", "debug")
_INTEGRATION = "source_code/integrations/neptune-MosaicML"


class NeptuneLogger(ServiceLogger):
    """Logger for Neptune, over its client of version 1.

    Training puts logged values into a queue, and a thread passes them to Neptune's client: a step waits neither for
    Neptune nor for the device. The step of a value is the number of trained batches. In the run, below
    `base_namespace`: `metrics/<key>`, `hyperparameters/<key>`, `traces/<key>`, `rank`, `<name>` of images, and files
    under their names. Neptune accepts only steps that grow, so a later value with the same step is left out.

    Args:
        project: The project, "workspace/name"; None is the environment variable NEPTUNE_PROJECT.
        api_token: The token; None is the environment variable NEPTUNE_API_TOKEN.
        rank_zero_only: True if only rank 0 logs (the runs of other ranks have the mode "debug"); else every rank has a
            Neptune run.
        upload_checkpoints: Store files, such as checkpoints. Symbolic links are skipped.
        base_namespace: The part of the Neptune run to log to.
        mode: "async", "sync", "offline" (a folder `.neptune` for `neptune sync`), "read-only" or "debug" (nothing is
            stored); None is the environment variable NEPTUNE_MODE or "async".
        on_error: What to do if logging fails: "warn" (once; the run continues) or "raise".
        delivery_timeout: How many seconds in total the end of the run waits for queued data once Neptune fails or
            hangs. None: the Trainer's timeout, which its services share (60 by default). Ending the Neptune run may
            take at least a tenth of it.
        **neptune_kwargs: More arguments of `neptune.init_run`, such as `with_id` to continue a Neptune run.

    Raises:
        ImportError: `neptune` is not installed.
        TypeError: An argument has another type.
        ValueError: `base_namespace` is empty, `mode` or `on_error` is unknown, or `delivery_timeout` is not positive.
    """

    def __init__(
        self,
        *,
        project: str | None = None,
        api_token: str | None = None,
        rank_zero_only: bool = True,
        upload_checkpoints: bool = False,
        base_namespace: str = "training",
        mode: str | None = None,
        on_error: str = "warn",
        delivery_timeout: float | None = None,
        **neptune_kwargs: Any,
    ) -> None:
        check_flags(rank_zero_only=rank_zero_only, upload_checkpoints=upload_checkpoints)
        for name, value in {"project": project, "api_token": api_token, "mode": mode}.items():
            if not isinstance(value, str | None):
                raise TypeError(f"`{name}` must be a str or None, got {value!r}.")
        if not isinstance(base_namespace, str):
            raise TypeError(f"`base_namespace` must be a str, got {base_namespace!r}.")
        if not base_namespace.strip("/"):
            raise ValueError(
                f"`base_namespace` must not be empty, got {base_namespace!r}. Leave it out for 'training'."
            )
        if mode is not None and mode not in _MODES:
            raise ValueError(f"`mode` must be {', '.join(map(repr, _MODES))} or None, got {mode!r}.")
        check_delivery_options(on_error, delivery_timeout)
        import_client("neptune", "NeptuneLogger")
        self.project, self.api_token, self.mode = project, api_token, mode
        self.rank_zero_only, self.upload_checkpoints = rank_zero_only, upload_checkpoints
        self.base_namespace = base_namespace.strip("/")
        self.on_error, self.delivery_timeout = on_error, delivery_timeout
        self._neptune_kwargs = neptune_kwargs
        self._enabled = not rank_zero_only or dist.get_global_rank() == 0
        self._hyperparameters: dict[str, Any] = {}
        self._deadline = DeliveryDeadline(60.0)  # replaced at `init` by that of the run
        self._run: Any = None
        self._stopped = False
        self._forget()

    def _forget(self) -> None:
        """Forget what was sent to the last run."""
        self._files = HeldFiles()
        self._steps: dict[str, int] = {}  # the last one sent, by key

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the thread and the connection, which cannot be copied."""
        return {**super().__getstate__(), "_run": None}

    @property
    def neptune_run(self) -> Any:
        """The `neptune.Run`; created when it is first used, at the latest at INIT."""
        if self._run is None:
            import neptune

            mode = self.mode if self._enabled else "debug"
            arguments = {"project": self.project, "api_token": self.api_token, "mode": mode, **self._neptune_kwargs}
            self._run = neptune.init_run(**arguments)
        return self._run

    @property
    def base_handler(self) -> Any:
        """The `neptune.handler.Handler` of `base_namespace`, for values that this class does not log."""
        return self.neptune_run[self.base_namespace]

    # ---- values ----

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        if self._sender is None:
            self._hyperparameters |= hyperparameters
        else:
            self._sender.put(partial(self._assign, "hyperparameters", dict(hyperparameters)))

    def log_traces(self, traces: dict[str, Any]) -> None:
        if self._sender is not None:
            self._sender.put(partial(self._assign, "traces", dict(traces)), may_drop=True)

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
        arrays = list_images(images)
        if self._sender is not None:
            send = partial(self._send_images, name=name, channels_last=channels_last, step=step)
            self._sender.put_images(arrays, send)

    # ---- files ----

    def can_upload_files(self) -> bool:
        return self.upload_checkpoints

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        if not self.upload_checkpoints or self._sender is None or file_path.is_symlink():
            return
        held = self._files.hold(file_path, file_path.name)
        self._sender.put(partial(self._send_file, held, remote_file_name, overwrite))

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        if os.path.exists(destination) and not overwrite:
            raise FileExistsError(f"{destination!r} exists. Pass `overwrite=True` to replace it.")
        path = f"{self.base_namespace}/{remote_file_name}"
        if not self.neptune_run.exists(path):
            raise FileNotFoundError(f"There is no file {path!r} in the Neptune run.")
        folder = os.path.dirname(os.path.abspath(destination))
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            file = os.path.join(temporary, os.path.basename(destination))
            self.neptune_run[path].download(destination=file, progress_bar=progress_bar)
            os.replace(file, destination)

    # ---- events ----

    def init(self, state: State, logger: Logger) -> None:
        self._deadline = logger.delivery_deadline.for_service(self.delivery_timeout)
        if self._stopped:
            self._run, self._stopped = None, False
        self._forget()
        try:
            call_in_time(partial(self._open, state.run_name), self._deadline.timeout, "Opening a run of Neptune")
        except Exception as error:  # noqa: BLE001 - Neptune has no common base class of errors
            report_failure("NeptuneLogger", error, self.on_error)
            return
        if not self._enabled:
            return
        self._sender = Sender(
            "NeptuneLogger", self._send, on_error=self.on_error, timeout=self._deadline.for_service(), kept=self._kept
        )
        if self._hyperparameters:
            self.log_hyperparameters(self._hyperparameters)
            self._hyperparameters = {}

    def _open(self, run_name: str) -> None:
        run = self.neptune_run
        if self.mode == "read-only":
            return
        if not self._neptune_kwargs.keys() & {"name", "with_id"}:
            run["sys/name"] = run_name
        run[_INTEGRATION] = version("composer-neptune")
        self.base_handler["rank"] = dist.get_global_rank()

    def post_close(self) -> None:
        sender, run, self._sender = self._sender, self._run, None
        if run is None or self._stopped or (sender is not None and sender.forked):
            return
        self._stopped = True
        try:
            if sender is not None:
                sender.close()
        finally:
            end_in_time(
                lambda seconds: run.stop(seconds=seconds),
                self._deadline,
                "Ending the run of Neptune",
                grace=1.0,  # Neptune stops by itself before that counts as a failure
            )

    def _kept(self) -> str:
        return self._files.describe("What Neptune's client has taken is sent or kept by it; other metrics are lost.")

    # ---- in the thread of the sender ----

    def _send(self, records: Sequence[Logged]) -> None:
        from neptune.types import File

        metrics = self.base_handler["metrics"]
        for values, step, seconds in records:
            for key, number in read_numbers(values).items():
                last = self._steps.get(key)
                if last is not None and step <= last:
                    log.info("Neptune has a value of %s for step %d; the one for step %d is left out.", key, last, step)
                    continue
                metrics[key].append(number, step=step, timestamp=seconds)
                self._steps[key] = step
        for key, (step, array) in read_arrays(records).items():
            content = json.dumps({"step": step, "values": array.tolist()})
            self.base_handler[f"arrays/{key}"].upload(File.from_content(content, extension="json"))

    def _assign(self, field: str, values: dict[str, Any]) -> None:
        from neptune.utils import stringify_unsupported

        self.base_handler[field] = stringify_unsupported(values)

    def _send_images(self, images: Sequence[ImageCopy], *, name: str, channels_last: bool, step: int | None) -> None:
        from neptune.types import File

        for image in images:
            for pixels in _as_pixels(image(), channels_last):
                self.base_handler[name].append(File.as_image(pixels), step=step)

    def _send_file(self, held: Path, name: str, overwrite: bool) -> None:
        """Store a file and release it, or keep it for `neptune sync` in offline mode, which stores its path."""
        path = f"{self.base_namespace}/{name}"
        if not overwrite and self.neptune_run.exists(path):
            HeldFiles.release(held)
            warnings.warn(
                f"Neptune has a file {path!r}, which is kept: it was uploaded again with `overwrite=False`.",
                stacklevel=2,
            )
            return
        self.neptune_run[path].upload(str(held), wait=True)
        if (self.mode or os.environ.get("NEPTUNE_MODE")) != "offline":
            HeldFiles.release(held)


def _as_pixels(array: np.ndarray, channels_last: bool) -> list[np.ndarray]:
    """Split an array of two to four dimensions into images of shape (H, W) or (H, W, C) that Neptune accepts."""
    if array.dtype == np.bool_:
        array = array.astype(np.float32)
    if array.ndim == 2:
        return [array]
    if not channels_last:
        array = np.moveaxis(array, -3, -1)
    return list(array) if array.ndim == 4 else [array]
