"""Event files of TensorBoard. Imports tensorboard, which takes seconds, so `TensorboardLogger` imports it at INIT."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from composer.loggers.spi import ImageCopy, Logged, read_arrays, read_numbers

_FILES = "events.out.tfevents.*"
_HEAT_MAP = 256  # pixels of the longer side, at least


class EventWriter:
    """The event files of a run. All but the constructor is called in the thread of the sender.

    Args:
        folder: The folder of the files; created if it does not exist.

    Attributes:
        writer: The `SummaryWriter` of the current file.
        finished: The paths of files that are complete, for loggers that store files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._known = folder, set(folder.glob(_FILES))
        self.writer: Any = SummaryWriter(str(folder))
        self.finished: list[Path] = []
        self._written = False

    def send(self, records: Sequence[Logged]) -> None:
        """Write scalars and images of arrays, and flush the file.

        All scalars of a step are one event, because each event costs time. Of several arrays of one name, the last one
        is written.
        """
        problem: Exception | None = None
        for step, group in groupby(records, key=attrgetter("step")):
            numbers: list[tuple[str, float]] = []
            seconds = 0.0
            for metrics, _, seconds in group:  # noqa: B007 - the last one is used
                numbers += read_numbers(metrics).items()
            if not numbers:
                continue
            try:
                summary = Summary(value=[Summary.Value(tag=tag, simple_value=number) for tag, number in numbers])
                self.writer._get_file_writer().add_summary(summary, step, seconds)
                self._written = True
            except Exception as error:  # noqa: BLE001 - one invalid value must not lose the other steps
                problem = problem or error
        for name, (step, array) in read_arrays(records).items():
            self.writer.add_image(name, _heat_map(array), step, dataformats="HW")
            self._written = True
        self.writer.flush()
        if problem is not None:
            raise problem

    def write_text(self, name: str, text: str, step: int | None) -> None:
        """Write Markdown."""
        self.writer.add_text(name, text, step)
        self._written = True

    def write_images(self, images: Sequence[ImageCopy], *, name: str, channels_last: bool, step: int | None) -> None:
        """Write images of two to four dimensions; those of one array are shown side by side."""
        for number, image in enumerate(images):
            array = image()
            letters = "HW" if array.ndim == 2 else "N" * (array.ndim - 3) + ("HWC" if channels_last else "CHW")
            tag = name if len(images) == 1 else f"{name}_{number}"
            add = self.writer.add_images if array.ndim == 4 else self.writer.add_image
            add(tag, array, step, dataformats=letters)
        self._written = True

    def write_hyperparameters(
        self, hyperparameters: dict[str, Any], results: dict[str, Any], expected: Sequence[str], step: int
    ) -> None:
        """Write hyperparameters and results for the HPARAMS page.

        Args:
            hyperparameters: Numbers and strings by name.
            results: A snapshot of metrics.
            expected: The names of all metrics of the run: TensorBoard uses the first list that it reads.
            step: The step of the results.
        """
        numbers = {f"hparams/{key}": number for key, number in read_numbers(results).items()}
        listed = dict.fromkeys([*(f"hparams/{key}" for key in expected), *numbers], 0.0)
        file = self.writer._get_file_writer()
        for summary in hparams(hyperparameters, listed):  # type: ignore[no-untyped-call]
            file.add_summary(summary)
        for key, number in numbers.items():
            self.writer.add_scalar(key, number, step)
        self._written = True

    def purge(self, step: int) -> None:
        """Hide events from this step on that earlier event files in this folder hold."""
        start = SessionLog(status=SessionLog.START)
        self.writer._get_file_writer().add_event(Event(session_log=start), step)
        self.writer.flush()

    def flush(self, *, roll: bool) -> None:
        """Flush the file.

        Args:
            roll: Complete the file and start a new one, if anything was written.
        """
        if roll and self._written:
            self.writer.close()  # the next write opens a new file
            written = sorted(set(self._folder.glob(_FILES)) - self._known)
            self.finished += written
            self._known.update(written)
            self._written = False
        else:
            self.writer.flush()

    def close(self) -> None:
        """Flush and close the file."""
        self.writer.close()


def _heat_map(array: np.ndarray) -> np.ndarray:
    """Return an array as a gray image in [0, 1], the largest value white; further dimensions become columns."""
    values = np.atleast_2d(array).astype(np.float64)
    values = np.where(np.isfinite(values), values, np.nan).reshape(len(values), -1)
    low, high = np.nanmin(values, initial=np.inf), np.nanmax(values, initial=-np.inf)
    values = np.nan_to_num((values - low) / (high - low)) if high > low else np.zeros_like(values)
    scale = -(-_HEAT_MAP // max(values.shape))
    return values.repeat(scale, axis=0).repeat(scale, axis=1)
