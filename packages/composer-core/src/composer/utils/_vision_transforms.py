"""Add a transform to a torchvision data set. torchvision is not a dependency: whoever has such a data set has it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["add_vision_dataset_transform"]

_log = logging.getLogger(__name__)
_MAKES_TENSOR = {"ToTensor", "PILToTensor", "ToImage"}  # of torchvision.transforms and of its v2


def add_vision_dataset_transform(
    dataset: Any, transform: Callable[[Any], Any], is_tensor_transform: bool = False
) -> None:
    """Add a transform to the ones a torchvision data set already applies, in place, and log the change as a warning.

    Without a transform so far, it becomes the transform. In a `Compose` it goes just before the first `ToTensor`
    (just after it, if it transforms tensors), or to the end if there is none; a single other transform becomes a
    `Compose` by the same rule.

    Args:
        dataset: A `torchvision.datasets.VisionDataset`.
        transform: The transform to add.
        is_tensor_transform: Whether `transform` takes tensors; otherwise it takes PIL images.

    Differs: an existing `Compose` is replaced, not changed, because other data sets may share it.
    """
    existing = dataset.transform
    if existing is None:
        dataset.transform = transform
    else:
        is_compose = _is_a(existing, {"Compose"})
        steps = list(existing.transforms) if is_compose else [existing]
        position = next((i for i, step in enumerate(steps) if _is_a(step, _MAKES_TENSOR)), len(steps))
        steps.insert(position + 1 if is_tensor_transform else position, transform)
        compose = type(existing) if is_compose else import_module("torchvision.transforms").Compose
        dataset.transform = compose(steps)
    _update_joint_transform(dataset)
    _log.warning("Added %r to the transforms of %s: %r.", transform, type(dataset).__name__, dataset.transform)


def _is_a(transform: object, names: set[str]) -> bool:
    return any(base.__name__ in names for base in type(transform).__mro__)


def _update_joint_transform(dataset: Any) -> None:
    """Some data sets read `transform`, others `transforms`, a `StandardTransform` that holds a copy of it."""
    joint = getattr(dataset, "transforms", None)
    if joint is not None and _is_a(joint, {"StandardTransform"}):
        dataset.transforms = type(joint)(dataset.transform, dataset.target_transform)
    elif joint is None and hasattr(dataset, "transforms"):
        standard = import_module("torchvision.datasets.vision").StandardTransform
        dataset.transforms = standard(dataset.transform, dataset.target_transform)
