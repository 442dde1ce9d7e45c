"""The formats a model can be exported to, and what each needs."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from composer.utils import StringEnum

__all__ = ["ExportFormat", "check_format"]


class ExportFormat(StringEnum):
    """What a model is exported to.

    Attributes:
        TORCH_EXPORT: `"torch_export"`: the graph that `torch.export` makes, read with `torch.export.load`; its files
            end in `.pt2`. PyTorch's own way, and the one to choose if nothing speaks for another.
        ONNX: `"onnx"`: the Open Neural Network Exchange format, for ONNX Runtime, TensorRT and others.
        TORCHSCRIPT: `"torchscript"`: read with `torch.jit.load`. PyTorch has deprecated it.
    """

    TORCH_EXPORT = "torch_export"
    ONNX = "onnx"
    TORCHSCRIPT = "torchscript"


def check_format(save_format: str | ExportFormat) -> ExportFormat:
    """The format of this name, if models can be exported to it here.

    Args:
        save_format: The format, or its name.

    Raises:
        ValueError: There is no such format.
        ModuleNotFoundError: It needs packages that are not installed.
        RuntimeError: This release of torch does not have it any more.
    """
    found = ExportFormat(save_format)
    if found is ExportFormat.ONNX:
        missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
        if missing:
            raise ModuleNotFoundError(
                f"`save_format='onnx'` needs {' and '.join(f'`{name}`' for name in missing)}, which torch exports "
                f"with. Run `pip install 'composer-export[onnx]'`.",
                name=missing[0],
            )
    if found is ExportFormat.TORCHSCRIPT and not (hasattr(torch.jit, "script") and hasattr(torch.jit, "trace")):
        raise RuntimeError(
            f"`save_format='torchscript'` is not possible: torch {torch.__version__} has no TorchScript any more. Use "
            f"'torch_export'."
        )
    return found
