"""One run of Weights & Biases and what is handed to it, from the thread that sends."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from composer.loggers import format_log_data_value
from composer.loggers._held_files import release_file
from composer.loggers._pixels import in_unit_range
from composer.loggers._sender import Logged

__all__ = ["WandBRun", "artifact_name"]


class WandBRun:
    """Hands over to one run.

    Args:
        run: What `wandb.init` returned.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def send(self, records: Sequence[Logged]) -> None:
        """Hand over metrics, those of one step together."""
        problem: Exception | None = None
        for step, group in groupby(records, key=lambda record: record.step):
            values: dict[str, Any] = {}
            for metrics, _, seconds in group:
                values |= metrics
                values.setdefault("_timestamp", seconds)
            try:
                self._run.log(values, step=step)
            except Exception as error:  # noqa: BLE001 - one bad value must not cost the other steps
                problem = problem or error
        if problem is not None:
            raise problem

    def send_config(self, hyperparameters: dict[str, Any]) -> None:
        """Hand over hyperparameters."""
        self._run.config.update(hyperparameters, allow_val_change=True)

    def send_table(self, columns: list[str], rows: list[list[Any]], name: str, step: int | None) -> None:
        """Hand over a table."""
        import wandb

        cells = [[_cell(value) for value in row] for row in rows]
        self._run.log({name: wandb.Table(columns=[*columns], data=cells)}, step=step)

    def send_images(
        self,
        images: Sequence[Callable[[], np.ndarray]],
        name: str,
        channels_last: bool,
        step: int | None,
        masks: Mapping[str, Sequence[Callable[[], np.ndarray]]],
        labels: dict[int, str],
        use_table: bool,
    ) -> None:
        """Hand over images with their masks."""
        import wandb

        pictures = []
        for i, image in enumerate(images):
            array = in_unit_range(image())
            named: dict[str, Any] = {"class_labels": labels} if labels else {}
            drawn = {key: {"mask_data": several[i]().astype(np.int64), **named} for key, several in masks.items()}
            array = array if channels_last else np.moveaxis(array, 0, -1)
            pictures.append(wandb.Image(array, masks=drawn or None))
        shown = wandb.Table(columns=["Image"], data=[[picture] for picture in pictures]) if use_table else pictures
        self._run.log({name: shown}, step=step)

    def send_file(self, name: str, held: Path, aliases: list[str], metadata: dict[str, Any]) -> None:
        """Hand over a file, and remove the held name of it: W&B makes a copy."""
        import wandb

        extension = held.suffix.removeprefix(".")
        kind = "model" if extension == "pt" else extension or "file"
        try:
            artifact = wandb.Artifact(name=name, type=kind, metadata=metadata)
            artifact.add_file(str(held))
            self._run.log_artifact(artifact, aliases=aliases)
        finally:
            release_file(held)

    def finish(self, exit_code: int) -> None:
        """End the run."""
        self._run.finish(exit_code=exit_code)


def artifact_name(name: str) -> str:
    """A name that W&B takes for an artifact."""
    return re.sub(r"[^A-Za-z0-9._-]", ".", name)


def _cell(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else format_log_data_value(value)
