"""A logger that writes event files for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from composer.loggers import LoggerDestination, format_log_data_value
from composer.loggers.spi import (
    Sender,
    check_delivery_options,
    hold_metrics,
    list_images,
    read_numbers,
    report_failure,
)
from composer.utils import check_finite, dist

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger
    from composer.loggers._event_file import EventWriter


class TensorboardLogger(LoggerDestination):
    """Logger that writes event files, which `tensorboard --logdir tensorboard_logs` shows.

    The files are in `<log_dir>/<run_name>`; ranks other than 0 use its subfolders `rank<rank>`. Training puts logged
    values into a queue, and a thread writes them: a step waits neither for the disk nor for the device. Numbers become
    scalars, with the number of trained batches as their step; NaN and infinity are written as they are. Arrays, such as
    a confusion matrix, become gray images, the largest value white. Text is left out. Hyperparameters are on the
    HPARAMS page, next to the results of the last evaluation.

    If another logger stores files, the event file is passed to it every `flush_interval` batches and at the end, as
    `tensorboard_logs/{run_name}/<event file>-<rank>`, and a new file is started.

    A run that is resumed from a checkpoint, under the same name and in the same folder, hides what was logged after
    that checkpoint, so that every curve continues from the checkpoint.

    Args:
        log_dir: The parent folder of the run; None is "tensorboard_logs".
        flush_interval: The number of batches between two flushes. The end of an epoch, evaluation or `fit` flushes too.
        rank_zero_only: True if only rank 0 writes; else every rank is a separate run in TensorBoard.
        on_error: What to do if writing fails: "warn" (once; the run continues) or "raise".
        delivery_timeout: How many seconds in total the end of the run waits for queued data once the disk fails or
            hangs, counted from the first failure, or from the last write if it hangs. None: the Trainer's timeout,
            which its services share (60 by default).

    Raises:
        ValueError: `flush_interval` or `delivery_timeout` is not positive, or `on_error` is unknown.

    Differs: the values of a step are one event; hyperparameters are in the file of the scalars, not in a separate
    folder; a new file is only started if another logger stores the finished one; a resumed run hides orphaned values.
    Ranks do not share a folder, because TensorBoard follows one file per folder. Masks of images are not drawn.
    """

    accepts_deferred: ClassVar[bool] = True

    def __init__(
        self,
        log_dir: str | None = None,
        flush_interval: int = 100,
        rank_zero_only: bool = True,
        *,
        on_error: str = "warn",
        delivery_timeout: float | None = None,
    ) -> None:
        check_finite(flush_interval=flush_interval, least=1)
        check_delivery_options(on_error, delivery_timeout)
        self.log_dir = None if log_dir is None else os.path.expanduser(log_dir)
        self.flush_interval = flush_interval
        self.rank_zero_only = rank_zero_only
        self.on_error, self.delivery_timeout = on_error, delivery_timeout
        self.run_name: str | None = None
        self.hyperparameters: dict[str, Any] = {}
        self._hyperparameters_written = True
        self._results: dict[str, Any] = {}  # of the current evaluation
        self._results_prefix: str | None = None
        self._at_step: tuple[int, dict[str, Any]] = (-1, {})  # the metrics of the last step
        self._resumed: dict[str, Any] | None = None
        self._writer: EventWriter | None = None
        self._sender: Sender | None = None

    @property
    def writer(self) -> Any:
        """The `torch.utils.tensorboard.SummaryWriter` during a run, else None. A background thread uses it too."""
        return None if self._writer is None else self._writer.writer

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the thread and the file, which cannot be copied."""
        return {**vars(self), "_sender": None, "_writer": None}

    # ---- values ----

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.hyperparameters |= {
            key: value if isinstance(value, int | float | str) else format_log_data_value(value)
            for key, value in hyperparameters.items()
        }
        self._hyperparameters_written = False

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        sender = self._sender
        if sender is None:
            self._check_running()
            hold_metrics(metrics)
            return
        step = 0 if step is None else step
        snapshot = sender.put_metrics(metrics, step)
        if self._at_step[0] == step:
            self._at_step[1].update(snapshot)
        else:
            self._at_step = (step, snapshot.copy())
        if self._results_prefix is not None:
            self._results |= {k: v for k, v in snapshot.items() if k.startswith(self._results_prefix)}

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self._check_running()
        if self._sender is not None and self._writer is not None:
            text = _markdown(columns, rows)
            self._sender.put(partial(self._writer.write_text, name, text, step), size=1 + len(text) // 1024)

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
        arrays = list_images(images)
        self._check_running()
        if self._sender is not None and self._writer is not None:
            write = partial(self._writer.write_images, name=name, channels_last=channels_last, step=step)
            self._sender.put_images(arrays, write)

    def _check_running(self) -> None:
        if self.run_name is None:
            raise RuntimeError(
                "`TensorboardLogger` can only log during a run, which names its folder. Log from an event, or call "
                "`logger.init(state, ...)` first."
            )

    # ---- events ----

    def init(self, state: State, logger: Logger) -> None:
        self.run_name = state.run_name
        if self.rank_zero_only and dist.get_global_rank() != 0:
            return
        from composer.loggers._event_file import EventWriter  # imports tensorboard, which takes seconds

        try:
            rank = dist.get_global_rank()
            folder = Path(self.log_dir or "tensorboard_logs", state.run_name)
            self._writer = EventWriter(folder / f"rank{rank}" if rank else folder)
        except OSError as error:
            report_failure("TensorboardLogger", error, self.on_error)
            return
        self._sender = Sender(
            "TensorboardLogger",
            self._writer.send,
            on_error=self.on_error,
            timeout=logger.delivery_deadline.for_service(self.delivery_timeout),
            kept=lambda: f"What was written is kept in {str(folder)!r}; the rest is lost.",
        )

    def after_load(self, state: State, logger: Logger) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is None or self._sender is None or self._writer is None or resumed["run_name"] != state.run_name:
            return
        self._sender.put(partial(self._writer.purge, state.timestamp.batch.value))
        self.log_metrics(resumed["metrics"], resumed["step"])

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batches % self.flush_interval == 0:
            self._flush(logger, roll=True)

    def epoch_end(self, state: State, logger: Logger) -> None:
        self._flush(logger)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._results, self._results_prefix = {}, f"metrics/{state.dataloader_label}/"

    def eval_end(self, state: State, logger: Logger) -> None:
        self._results_prefix = None
        self._write_hyperparameters(state)
        self._flush(logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        if not self._hyperparameters_written:  # there was no evaluation
            self._write_hyperparameters(state)
        self._flush(logger, roll=True, wait=True)

    def close(self, state: State, logger: Logger) -> None:
        self._flush(logger, roll=True, wait=True, check=False)

    def post_close(self) -> None:
        sender, writer, self._sender, self._writer = self._sender, self._writer, None, None
        self.run_name, self._at_step, self._results = None, (-1, {}), {}
        self.hyperparameters = {}
        if sender is not None and writer is not None:
            sender.put(writer.close, check=False)
            sender.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the metrics of the last step: a resumed run hides them and logs only some of them again."""
        if self._sender is None:
            return {}
        self._sender.fetch()
        step, logged = self._at_step
        return {"run_name": self.run_name, "step": step, "metrics": read_numbers(logged)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed = state or None

    def _write_hyperparameters(self, state: State) -> None:
        if self._sender is None or self._writer is None or not self.hyperparameters:
            return
        expected = [f"metrics/{label}/{name}" for label, metrics in state.eval_metrics.items() for name in metrics]
        write = partial(self._writer.write_hyperparameters, dict(self.hyperparameters), self._results, expected)
        self._sender.fetch()
        self._sender.put(partial(write, state.timestamp.batch.value))
        self._hyperparameters_written = True

    def _flush(self, logger: Logger, *, roll: bool = False, wait: bool = False, check: bool = True) -> None:
        """Flush the event file, and pass finished files to the loggers that store files."""
        if self._sender is None or self._writer is None:
            return
        self._sender.fetch()
        roll = roll and any(other is not self and other.can_upload_files() for other in logger.destinations)
        self._sender.put(partial(self._writer.flush, roll=roll), check=check)
        if wait:
            self._sender.flush(check=check)
        finished = self._writer.finished
        while finished:
            path = finished.pop(0)
            name = f"tensorboard_logs/{{run_name}}/{path.name}-{dist.get_global_rank()}"
            logger.upload_file(name, path, overwrite=True)


def _markdown(columns: list[str], rows: list[list[Any]]) -> str:
    """Format a table as Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = [[_cell(cell) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else format_log_data_value(value)
    return text.replace("|", "\\|").replace("\n", "<br>")
