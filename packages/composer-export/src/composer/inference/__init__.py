"""Exporting models for inference: `torch.export`, ONNX, TorchScript."""

from composer.inference.export import Transform, export_for_inference, export_with_logger, quantize_dynamic
from composer.inference.formats import ExportFormat

__all__ = ["ExportFormat", "Transform", "export_for_inference", "export_with_logger", "quantize_dynamic"]
