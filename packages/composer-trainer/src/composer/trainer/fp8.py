"""The context of forward passes in FP8, through TransformerEngine."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch

_FP8_MIN_CAPABILITY = (8, 9)


def fp8_context(config: dict[str, Any] | None, enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """Return the context manager in which modules of TransformerEngine compute in FP8.

    Args:
        config: As `precision_config` of `composer.core.get_precision_context`.
        enabled: Compute in FP8.

    Raises:
        ImportError: TransformerEngine is not installed.
        RuntimeError: The device has a compute capability below 8.9.
    """
    try:
        te = importlib.import_module("transformer_engine.pytorch")
        recipe = importlib.import_module("transformer_engine.common.recipe")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("transformer_engine"):
            raise
        raise ImportError(
            "AMP_FP8 precision is used but TransformerEngine is not installed. "
            "Run `pip install transformer-engine[pytorch]`, or use 'amp_bf16'."
        ) from error
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability < _FP8_MIN_CAPABILITY:
        actual = "no CUDA device" if capability is None else f"compute capability {capability[0]}.{capability[1]}"
        raise RuntimeError(
            f"AMP_FP8 precision is used but current device does not support it: it needs compute capability 8.9, "
            f"found {actual}. Use 'amp_bf16'."
        )
    if config is None:
        config = {"fp8_format": recipe.Format.HYBRID, "amax_history_len": 16, "amax_compute_algo": "max"}
    context: contextlib.AbstractContextManager[Any] = te.fp8_autocast(
        enabled=enabled, fp8_recipe=recipe.DelayedScaling(**config)
    )
    return context
