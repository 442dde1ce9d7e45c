"""Exports the model for inference at the end of training."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from composer.core import Callback, State
from composer.devices import DeviceCPU
from composer.inference import ExportFormat, Transform, export_with_logger
from composer.inference.export import check_destination, check_exportable
from composer.inference.formats import check_format
from composer.loggers import Logger
from composer.utils import dist


class ExportForInferenceCallback(Callback):
    """Exports the model for inference when training ends; see `composer.inference.export_for_inference`.

    The format and the destination are checked at construction; when training starts, the model must not be sharded.

    **Events** FIT_START; AFTER_DATALOADER, once, without `sample_input`; FIT_END.
    **Reads** the model, and the first batch. **Cost** a copy of that batch in host memory, without `sample_input`.

    Args:
        save_format: `"torch_export"`, `"onnx"` or `"torchscript"`.
        save_path: Where to write: a local path, a URI, or a name in the object store. A local path is also the name of
            the file in loggers that store files. A later fit replaces the file.
        save_object_store: An object store.
        sample_input: A batch to call the model with; None: the first batch of the run.
        transforms: Functions that take the model and return it, such as `composer.inference.quantize_dynamic`.
        input_names: Names of the inputs.
        output_names: Names of the outputs.

    Raises:
        ValueError: There is no such format, the path has no file name, or the model is sharded.
        ModuleNotFoundError: The format or the store needs a package that is not installed.
        TypeError: `save_object_store` is not an object store.

    Differs: the first batch is the sample for every format, not only for ONNX.
    """

    def __init__(
        self,
        save_format: str | ExportFormat,
        save_path: str | os.PathLike[str],
        save_object_store: Any = None,
        sample_input: Any = None,
        transforms: Transform | Sequence[Transform] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        check_destination(check_format(save_format), save_path, save_object_store)
        self.save_format, self.save_path = save_format, save_path
        self.save_object_store = save_object_store
        self.sample_input = sample_input
        self.transforms = transforms
        self.input_names, self.output_names = input_names, output_names

    def fit_start(self, state: State, logger: Logger) -> None:
        check_exportable(state.model)

    def after_dataloader(self, state: State, logger: Logger) -> None:
        if self.sample_input is None and dist.get_global_rank() == 0:
            self.sample_input = DeviceCPU().batch_to_device(state.batch)

    def fit_end(self, state: State, logger: Logger) -> None:
        export_with_logger(
            model=state.model,
            save_format=self.save_format,
            save_path=self.save_path,
            logger=logger,
            save_object_store=self.save_object_store,
            sample_input=(self.sample_input, {}),
            transforms=self.transforms,
            input_names=self.input_names,
            output_names=self.output_names,
        )
