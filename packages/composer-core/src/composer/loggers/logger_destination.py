"""The base class of everything that takes what is logged."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from composer.core.callback import Callback

if TYPE_CHECKING:
    import numpy as np
    import torch

    from composer.core.state import State

__all__ = ["LoggerDestination"]


class LoggerDestination(Callback, ABC):
    """A place that logged values go to: a file, the terminal, a tracking service. Override what it can take.

    It is a callback as well, so it can open at `init`, write at `batch_end` or `epoch_end` and clean up in `close`. It
    runs on every rank. `log_metrics` must not communicate between ranks.

    Attributes:
        accepts_deferred: Whether `log_metrics` is given values that are still on the device, as
            `composer.loggers.DeferredValue`. With False it sees plain values, and its calls wait for the device.
        on_error: What happens when a method of it raises an exception during a run. "warn": the first one is a warning
            that names logger, method and error, with the traceback in the log record; later ones are counted and told
            at the end; the run goes on. "raise": the run ends. While a run is set up (`init`), only a lost connection
            or a timeout (`ConnectionError`, `TimeoutError`) is treated so: anything else is a mistake to mend, and
            raised.

    Example:
        >>> class Printer(LoggerDestination):
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        >>> Printer().log_metrics({"loss/train/total": 0.5}, step=3)
        3 {'loss/train/total': 0.5}
    """

    accepts_deferred: ClassVar[bool] = False
    on_error: str = "warn"

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        """Take hyperparameters.

        Args:
            hyperparameters: Values by name.
        """

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        """Take a table.

        Args:
            columns: The names of the columns.
            rows: One list per row, as long as `columns`.
            name: The name of the table.
            step: The number of trained batches.
        """

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Take metrics. The dictionary is shared with the other destinations and must not be changed.

        Args:
            metrics: Values by name.
            step: The number of trained batches.
        """

    def log_traces(self, traces: dict[str, Any]) -> None:
        """Take the traces of algorithms: which ran at which event.

        Args:
            traces: Values by name.
        """

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
        """Take images.

        Args:
            images: One image (H, W) or (C, H, W), several (N, C, H, W), or a sequence of images.
            name: The name of the images.
            channels_last: Whether the channels come last instead.
            step: The number of trained batches.
            masks: Segmentation masks by name, like `images` but without channels.
            mask_class_labels: The name of each class in the masks.
            use_table: Whether to show the images as a table, where the destination can.
        """

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Take a file.

        Args:
            state: The state of the run.
            remote_file_name: The name to store it under.
            file_path: Where it is now. It may change or go away after the call returns.
            overwrite: Whether to replace what is stored under that name.
        """

    def can_upload_files(self) -> bool:
        """Whether `upload_file` stores files."""
        return False

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Fetch a file that was stored by `upload_file`.

        Args:
            remote_file_name: The name it is stored under.
            destination: The path to write to.
            overwrite: Whether to replace an existing file there.
            progress_bar: Whether to show progress.

        Raises:
            NotImplementedError: This destination stores no files.
            FileNotFoundError: There is no such file.
            FileExistsError: `destination` exists and `overwrite` is False.
        """
        raise NotImplementedError(
            f"`{type(self).__name__}` does not store files, so it cannot download {remote_file_name!r}. Use a logger "
            f"whose `can_upload_files()` is True, or an object store."
        )
