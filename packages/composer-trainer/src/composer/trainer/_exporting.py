"""Exporting the model of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from composer.core import State
from composer.inference import ExportFormat, Transform, export_with_logger
from composer.loggers import Logger

__all__ = ["Exports"]


class Exports:
    """Adds `export_for_inference` to what has a state and a logger."""

    state: State
    logger: Logger

    def export_for_inference(
        self,
        save_format: str | ExportFormat,
        save_path: str | os.PathLike[str],
        save_object_store: Any = None,
        sample_input: Any = None,
        transforms: Transform | Sequence[Transform] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        """Export the model as it is now for inference; see `composer.inference.export_for_inference`.

        Args:
            save_format: `"torch_export"` (PyTorch's own format, `.pt2`), `"onnx"`, or `"torchscript"`, which PyTorch
                has deprecated.
            save_path: Where to write: a local path, a URI, or a name in the object store; may contain `{run_name}`. If
                a logger stores files, it gets the file, too.
            save_object_store: An object store.
            sample_input: A batch to call the model with; None: the run's last batch.
            transforms: Functions that take the model and return it, such as `composer.inference.quantize_dynamic`.
            input_names: The names of the inputs.
            output_names: The names of the outputs.

        Raises:
            ValueError: An argument has a value that cannot work; there was no batch yet; or the model is divided among
                ranks.
            ModuleNotFoundError: The format or the store needs a package that is not installed.
            RuntimeError: The model cannot be exported in this way.
        """
        export_with_logger(
            model=self.state.model,
            save_format=save_format,
            save_path=save_path,
            logger=self.logger,
            save_object_store=save_object_store,
            sample_input=(self.state.batch if sample_input is None else sample_input, {}),
            transforms=transforms,
            input_names=input_names,
            output_names=output_names,
        )
