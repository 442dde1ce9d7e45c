"""A logger for Comet."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from composer.loggers.spi import (
    ImageCopy,
    Logged,
    Sender,
    ServiceLogger,
    call_at_exit,
    check_delivery_options,
    end_in_time,
    import_client,
    read_arrays,
    read_numbers,
    start_copy,
    table_cell,
)
from composer.utils import dist
from composer.utils.delivery import DeliveryDeadline

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 10.0  # that the program waits for Comet when an experiment is created
_MASK_ALPHA = 0.6  # how opaque masks are over images


class CometMLLogger(ServiceLogger):
    """Logger for Comet.

    The experiment is created with the logger. If Comet does not answer in 10 seconds, the creation continues in the
    background: values are queued until it answers, and a failure is reported as that of any other call.

    Training puts logged values into a queue, and a thread passes them to Comet's client: a step waits neither for Comet
    nor for the device. The step of a value is the number of trained batches. Numbers become metrics; text becomes a
    field of the tab "Other"; an array, such as a confusion matrix, becomes an asset `<name>.json`.

    Args:
        workspace: The workspace; None is Comet's setting.
        project_name: The project; None is Comet's setting.
        log_code: Let Comet store the source code of the program.
        log_graph: Let Comet store the graph of the model.
        name: The name of the experiment; None is the run name. If all ranks log, "-rank<rank>" is appended.
        rank_zero_only: True if only rank 0 logs; else every rank has an experiment.
        exp_kwargs: More arguments of `comet_ml.Experiment` or `comet_ml.OfflineExperiment`; they override those above.
        offline: Create a `comet_ml.OfflineExperiment`, which writes a zip file for `comet upload` and needs neither a
            network nor an account. `exp_kwargs={"offline_directory": ...}` is its folder.
        on_error: What to do if logging fails: "warn" (once; the run continues) or "raise".
        delivery_timeout: How many seconds in total the end of the run waits for queued data once Comet fails or hangs.
            None: the Trainer's timeout, which its services share (60 by default). Ending the experiment may take at
            least a tenth of it.

    Raises:
        ImportError: `comet_ml` is not installed.
        ValueError: `delivery_timeout` is not positive, `on_error` is unknown, or Comet refuses the arguments, for
            example because there is no API key.
    """

    def __init__(
        self,
        workspace: str | None = None,
        project_name: str | None = None,
        log_code: bool = False,
        log_graph: bool = False,
        name: str | None = None,
        rank_zero_only: bool = True,
        exp_kwargs: dict[str, Any] | None = None,
        *,
        offline: bool = False,
        on_error: str = "warn",
        delivery_timeout: float | None = None,
    ) -> None:
        check_delivery_options(on_error, delivery_timeout)
        given = {"workspace": workspace, "project_name": project_name, "log_code": log_code, "log_graph": log_graph}
        self._arguments = {**given, **(exp_kwargs or {})}
        self.name, self.rank_zero_only, self.offline = name, rank_zero_only, offline
        self.on_error, self.delivery_timeout = on_error, delivery_timeout
        self._enabled = not rank_zero_only or dist.get_global_rank() == 0
        self._hyperparameters: dict[str, Any] = {}
        self._deadline = DeliveryDeadline(60.0)  # replaced at `init` by that of the run
        self._creation: Future[Any] | None = None
        client = import_client("comet_ml", "CometMLLogger")
        if self._enabled:
            self._create(client)

    def _create(self, client: Any) -> None:
        """Create the experiment; in the background once Comet does not answer.

        Raises:
            Exception: Comet refused it.
        """
        creation: Future[Any] = Future()

        def create() -> None:
            try:
                creation.set_result(
                    (client.OfflineExperiment if self.offline else client.Experiment)(**self._arguments)
                )
            except Exception as error:  # noqa: BLE001 - raised by `result`
                creation.set_exception(error)

        if self.offline:
            create()
        else:  # the client may wait for minutes
            threading.Thread(target=create, name="composer-comet", daemon=True).start()
        if wait([creation], _CONNECT_SECONDS).done:
            creation.result()
        else:
            log.warning(
                "Comet has not answered in %g seconds. The run continues, and what it logs is sent once Comet answers.",
                _CONNECT_SECONDS,
            )
        self._creation = creation
        call_at_exit(self._finish)

    @property
    def experiment(self) -> Any:
        """The experiment; None on ranks that do not log, after the run, and until Comet has answered."""
        creation = self._creation
        if creation is None or not creation.done() or creation.exception() is not None:
            return None
        return creation.result()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the thread and the experiment, which cannot be copied."""
        return {**super().__getstate__(), "_creation": None}

    # ---- values ----

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        if self._sender is None:
            self._hyperparameters |= hyperparameters
        else:
            values = dict(hyperparameters)
            self._sender.put(lambda: self._alive().log_parameters(values))

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        if self._sender is not None:
            size = 1 + sum(map(len, rows)) // 16
            self._sender.put(partial(self._send_table, list(columns), [[*row] for row in rows], name, step), size=size)

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
        pictures = _split(images, 3)
        drawn = {key: _split(mask, 2) for key, mask in (masks or {}).items()}
        _check_images(pictures, drawn, channels_last)
        if self._sender is None:
            return
        options: dict[str, Any] = {
            "name": name,
            "channels_last": channels_last,
            "step": step,
            "masks": {key: [start_copy(mask) for mask in arrays] for key, arrays in drawn.items()},
            "labels": dict(mask_class_labels or {}),
        }
        self._sender.put_images(pictures, partial(self._send_images, **options))

    # ---- events ----

    def init(self, state: State, logger: Logger) -> None:
        if not self._enabled:
            return
        if self._creation is None:  # the experiment that was created with the logger has ended with its run
            self._create(import_client("comet_ml", "CometMLLogger"))
        name = self.name or state.run_name
        if not self.rank_zero_only:
            name = f"{name}-rank{dist.get_global_rank()}"
        self._deadline = logger.delivery_deadline.for_service(self.delivery_timeout)
        self._sender = Sender(
            "CometMLLogger",
            self._send,
            on_error=self.on_error,
            timeout=self._deadline.for_service(),
            kept=lambda: "What Comet's client has taken is sent or kept by it; the rest is lost.",
        )
        self._sender.put(lambda: self._alive().set_name(name))
        if self._hyperparameters:
            self.log_hyperparameters(self._hyperparameters)
            self._hyperparameters = {}

    def post_close(self) -> None:
        self._finish()

    def _finish(self) -> None:
        """Send what is queued and end the experiment."""
        sender, self._sender = self._sender, None
        if self._creation is None or (sender is not None and sender.forked):
            return
        try:
            if sender is not None:
                sender.close()
        finally:
            experiment, self._creation = self.experiment, None
            if experiment is not None:
                end_in_time(lambda _: experiment.end(), self._deadline, "Ending the experiment of Comet")

    # ---- in the thread of the sender ----

    def _alive(self) -> Any:
        """Return the experiment.

        Raises:
            ConnectionError: The client has given up; it would ignore what it gets without a word.
            Exception: Comet has refused the experiment.
        """
        creation = self._creation
        experiment = None if creation is None else creation.result()  # waits for Comet
        if experiment is None or not experiment.alive:
            raise ConnectionError("Comet's client has stopped the experiment. Its own messages say why.")
        return experiment

    def _send(self, records: Sequence[Logged]) -> None:
        experiment = self._alive()
        for metrics, step, _ in records:
            experiment.log_metrics(read_numbers(metrics), step=step)
            for key, text in metrics.items():
                if isinstance(text, str):
                    experiment.log_other(key, text)
        for key, (step, array) in read_arrays(records).items():
            content = io.StringIO(json.dumps({"step": step, "values": array.tolist()}))
            experiment.log_asset(content, file_name=f"{key}.json", step=step)

    def _send_table(self, columns: list[str], rows: list[list[Any]], name: str, step: int | None) -> None:
        cells = [[table_cell(value) for value in row] for row in rows]
        content = io.StringIO(json.dumps({"columns": columns, "data": cells}))  # pandas' orientation "split"
        self._alive().log_asset(content, file_name=f"{name}.json", step=step)

    def _send_images(
        self,
        images: Sequence[ImageCopy],
        *,
        name: str,
        channels_last: bool,
        step: int | None,
        masks: Mapping[str, Sequence[ImageCopy]],
        labels: dict[int, str],
    ) -> None:
        from PIL.Image import fromarray  # the client asks the file system for a path if it gets an array

        experiment = self._alive()
        classes = {"classes": {str(number): label for number, label in labels.items()}} if labels else None
        for i, image in enumerate(images):
            pixels = _as_pixels(image(), channels_last)
            experiment.log_image(fromarray(pixels), name=f"{name}_{i}", step=step)
            for key, arrays in masks.items():
                mask = arrays[i]()
                overlaid = f"{name}_{i} + {key} mask overlaid"
                experiment.log_image(fromarray(_overlay(pixels, mask)), name=overlaid, step=step, metadata=classes)
                experiment.log_image(fromarray(_colors(mask)), name=f"{key}_{i} mask", step=step, metadata=classes)


def _split(images: Any, ndim: int) -> list[Any]:
    """Return one image, several in one array, or a sequence of images as a list."""
    if isinstance(images, Sequence):
        return list(images)
    return list(images) if images.ndim == ndim + 1 else [images]


def _check_images(images: Sequence[Any], masks: Mapping[str, Sequence[Any]], channels_last: bool) -> None:
    """Check the shapes of images and masks.

    Raises:
        ValueError: An image is empty, has other than 2 or 3 dimensions or other than 1, 3 or 4 channels, or a mask does
            not fit its image.
    """
    for image in images:
        if image.ndim not in (2, 3) or 0 in image.shape:
            raise ValueError(
                f"`images` must be images of 2 or 3 dimensions with at least one pixel, got shape "
                f"{tuple(image.shape)}. Pass several images as one array (N, C, H, W) or as a list."
            )
        if image.ndim == 3 and image.shape[-1 if channels_last else 0] not in (1, 3, 4):
            raise ValueError(
                f"`images` must have 1, 3 or 4 channels, got shape {tuple(image.shape)} with "
                f"`channels_last={channels_last}`."
            )
    for key, arrays in masks.items():
        if len(arrays) != len(images):
            raise ValueError(f"`masks[{key!r}]` must hold {len(images)} masks, got {len(arrays)}.")
        for image, mask in zip(images, arrays, strict=True):
            size = tuple(image.shape[:2] if image.ndim == 2 or channels_last else image.shape[1:])
            if mask.ndim != 2 or tuple(mask.shape) != size:
                raise ValueError(
                    f"`masks[{key!r}]` must hold masks of 2 dimensions and the size of their images, {size}, got shape "
                    f"{tuple(mask.shape)}. Pass the number of the class of each pixel."
                )


def _as_pixels(image: np.ndarray, channels_last: bool) -> np.ndarray:
    """Return an image as bytes, of shape (H, W) or (H, W, C)."""
    if image.ndim == 3 and not channels_last:
        image = np.moveaxis(image, 0, -1)
    if image.dtype != np.uint8:
        image = np.rint(image.astype(np.float32) * 255).astype(np.uint8)
    return image[..., 0] if image.ndim == 3 and image.shape[-1] == 1 else image


def _colors(mask: np.ndarray) -> np.ndarray:
    """Return a mask of classes as an image: the colors of Pascal VOC, in which class 0 is black."""
    number, colors = mask.astype(np.int64), np.zeros((*mask.shape, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            colors[..., channel] |= (((number >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    return colors


def _overlay(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Draw a mask over an image."""
    image = np.repeat(pixels[..., None], 3, axis=-1) if pixels.ndim == 2 else pixels[..., :3]
    blended = (1 - _MASK_ALPHA) * image.astype(np.float32) + _MASK_ALPHA * _colors(mask)
    return np.rint(blended).astype(np.uint8)
