"""The names of `composer.inference` under the import path of MosaicML's Composer."""

from __future__ import annotations

import sys

from composer.inference import ExportFormat as ExportFormat
from composer.inference import Transform as Transform
from composer.inference import export
from composer.inference import export_for_inference as export_for_inference
from composer.inference import export_with_logger as export_with_logger
from composer.inference import quantize_dynamic as quantize_dynamic

__all__ = ["ExportFormat", "Transform", "export_for_inference", "export_with_logger", "quantize_dynamic"]

# The same module: what a program replaces here, `export_with_logger` calls.
sys.modules[__name__] = export
