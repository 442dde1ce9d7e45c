"""What a model returns, as tuples, lists and dicts of tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["output_names", "plain_outputs", "tensors_in"]

log = logging.getLogger(__name__)


def plain_outputs(outputs: Any) -> Any:
    """Outputs that every format can hold: mappings become dicts, without their entries that are no tensors.

    Args:
        outputs: What a model returned.

    Raises:
        TypeError: There are others than tensors outside of mappings.
    """
    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return {str(key): plain_outputs(item) for key, item in outputs.items() if _is_plain(item)}
    if isinstance(outputs, (tuple, list)):
        items = [plain_outputs(item) for item in outputs]
        return items if isinstance(outputs, list) else tuple(items)
    raise TypeError(
        f"`model` must return tensors, or tuples, lists and mappings of them, to be exported, but there is "
        f"{type(outputs).__name__} in its outputs. Pass a transform that returns a module without it."
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_plain, value.values()))
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(_is_plain, value))
    return isinstance(value, torch.Tensor)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and mappings, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


def output_names(outputs: Any) -> list[str]:
    """A name for each tensor: the keys of mappings, `"output"` for a tensor alone, and numbers for several.

    Args:
        outputs: Plain outputs.
    """
    if isinstance(outputs, torch.Tensor):
        return ["output"]
    found: list[str] = []
    if isinstance(outputs, dict):
        for key, item in outputs.items():
            found += [key] if isinstance(item, torch.Tensor) else [f"{key}_{i}" for i in range(len(tensors_in(item)))]
        return found
    count = len(tensors_in(outputs))
    return ["output"] if count == 1 else [f"output_{index}" for index in range(count)]
