"""Writes event files. All of it runs in the thread that sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from composer.loggers._numbers import as_number
from composer.loggers._pixels import in_unit_range
from composer.loggers._sender import Logged, read_metrics

__all__ = ["EventWriter", "scalars"]

_step = attrgetter("step")


class EventWriter:
    """An event file, and the next one when it is handed over.

    Args:
        folder: Where to write; made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        # tensorboard takes seconds to import
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        from composer.loggers._event_file import Writer

        self._event, self._session_log = Event, SessionLog
        self.writer: Any = Writer(str(folder))
        self.finished: list[Path] = []
        self._written = False

    def send(self, records: Sequence[Logged]) -> None:
        """Write scalars, and let readers see them: one event per step, because making events is what takes time."""
        add = self.writer._get_file_writer().event_writer.add_scalars
        problem: Exception | None = None
        for step, group in groupby(records, key=_step):
            numbers: list[tuple[str, float]] = []
            seconds = 0.0
            for metrics, _, seconds in group:  # noqa: B007 - the last one is wanted
                numbers += scalars(metrics).items()
            if not numbers:
                continue
            try:
                add(numbers, step, seconds)
                self._written = True
            except Exception as error:  # noqa: BLE001 - one bad value must not cost the other steps
                problem = problem or error
        self.writer.flush()
        if problem is not None:
            raise problem

    def write_text(self, name: str, text: str, step: int | None) -> None:
        """Write Markdown."""
        self.writer.add_text(name, text, step)
        self._written = True

    def write_images(
        self, images: Sequence[Callable[[], np.ndarray]], name: str, channels_last: bool, step: int | None
    ) -> None:
        """Write images of two to four dimensions, side by side."""
        for number, image in enumerate(images):
            array = in_unit_range(image())
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
            hyperparameters: Numbers and texts by name.
            results: Metrics, as a snapshot holds them.
            expected: All metrics there will be: TensorBoard keeps the first list of them that it reads.
            step: The step of the results.
        """
        from torch.utils.tensorboard.summary import hparams

        numbers = {f"hparams/{key}": number for key, number in scalars(read_metrics(results)).items()}
        listed = dict.fromkeys([*(f"hparams/{key}" for key in expected), *numbers], 0.0)
        file = self.writer._get_file_writer()
        for summary in hparams(hyperparameters, listed):  # type: ignore[no-untyped-call]
            file.add_summary(summary)
        for key, number in numbers.items():
            self.writer.add_scalar(key, number, step)
        self._written = True

    def purge(self, step: int) -> None:
        """Hide what was written from this step on by those who wrote into this folder before."""
        start = self._session_log(status=self._session_log.START)
        self.writer._get_file_writer().add_event(self._event(session_log=start), step)
        self.writer.flush()

    def flush(self, *, roll: bool) -> None:
        """Bring everything to the disk, and begin a new file if so wanted."""
        if roll and self._written:
            self.finished.append(Path(self.writer._get_file_writer().event_writer.path))
            self.writer.close()  # opens a new file when it is next used
            self._written = False
        else:
            self.writer.flush()

    def close(self) -> None:
        """Complete the file."""
        self.writer.close()


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The values that are numbers."""
    numbers = {str(k): v if type(v) is float else as_number(v) for k, v in metrics.items()}
    return {key: number for key, number in numbers.items() if number is not None}
