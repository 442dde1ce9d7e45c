"""Exporting models for inference: `torch.export`, ONNX, TorchScript."""

from composer.inference._formats import ExportFormat
from composer.inference._model import Transform, quantize_dynamic
from composer.inference.export import export_for_inference, export_with_logger

__all__ = ["ExportFormat", "Transform", "export_for_inference", "export_with_logger", "quantize_dynamic"]
