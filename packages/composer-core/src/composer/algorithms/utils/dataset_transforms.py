"""Add a transform to the dataset of a dataloader, once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from composer.algorithms.utils.augmentation_common import has_pixel_maps
from composer.utils.misc import add_vision_dataset_transform

if TYPE_CHECKING:
    from composer.core.state import State


def check_training_transform(state: State, transform: Callable[[Any], Any], advice: str) -> None:
    """Check that a transform can be added to the training dataset, and does not affect evaluation data.

    Args:
        state: The state of the run; without a training dataloader nothing is checked.
        transform: The transform for `add_training_transform`.
        advice: The last sentence of the error for a dataloader without an image dataset.

    Raises:
        TypeError: The dataset does not support transforms.
        ValueError: The dataset has joint transforms, or an evaluator reads the same dataset.
    """
    dataloader = _training_dataloader(state)
    if dataloader is None:
        return
    _check(dataloader, transform, advice)
    for evaluator in state.evaluators:
        evaluated = getattr(evaluator.dataloader.dataloader, "dataset", None)
        if any(dataset is dataloader.dataset for dataset in _nested_datasets(evaluated)):
            raise ValueError(
                f"The training dataset must not be shared with the evaluator {evaluator.label!r}, whose images "
                f"`{type(transform).__name__}` would change too. Pass the evaluator a separate dataset object, such as "
                f"`copy.copy(dataset)`."
            )


def add_training_transform(state: State, transform: Callable[[Any], Any], advice: str) -> None:
    """Add a transform of Pillow images to the training dataset, unless it has it; see `add_dataset_transform`.

    Args:
        state: The state of the run, with a training dataloader.
        transform: A function that takes an image and returns one.
        advice: As for `check_training_transform`, whose errors this function raises.
    """
    check_training_transform(state, transform, advice)
    add_dataset_transform(_training_dataloader(state), transform)


def check_targets_stay(state: State, method: str) -> None:
    """Check that targets do not have a value per pixel, because a transform of the images does not move them along.

    Args:
        state: The state of the run; its batch is checked.
        method: The name of the method, for messages.

    Raises:
        ValueError: The batch has a mask of its images, or boxes.
    """
    batch = state.batch
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    images = next((part for part in parts if isinstance(part, Tensor) and part.dim() == 4), None)
    if images is not None and has_pixel_maps(batch, images):
        raise ValueError(
            f"`{method}` changes images where they are read, and must not be used for targets with positions in them, "
            f"such as masks or boxes, which would stay. Leave it out, and transform images and targets together in the "
            f"dataset, for example with `torchvision.transforms.v2`."
        )


def has_dataset_transform(dataloader: Any, transform: Callable[[Any], Any]) -> bool:
    """Return True if the dataset of a dataloader already applies a transform.

    Args:
        dataloader: The dataloader; the result is False for other objects.
        transform: The transform, compared by identity.
    """
    return _contains(getattr(_whole(getattr(dataloader, "dataset", None)), "transform", None), transform)


def add_dataset_transform(dataloader: Any, transform: Callable[[Any], Any]) -> None:
    """Add a transform of Pillow images to the dataset of a dataloader, unless it has it.

    The dataset is changed in place as by `composer.utils.add_vision_dataset_transform`. Inside a `Subset` a shallow
    copy of the dataset is changed, because other subsets of it may be used for evaluation. Persistent workers already
    have a copy of the dataset; the next iteration starts new workers.

    Args:
        dataloader: A `torch.utils.data.DataLoader`, or another object with a `dataset`. The dataset has an attribute
            `transform`, like those of torchvision, or is a `torch.utils.data.Subset` of such a dataset.
        transform: A function that takes an image and returns one.

    Raises:
        TypeError: There is no such dataset.
        ValueError: The dataset has joint transforms of image and target, which would ignore the transform.
    """
    if has_dataset_transform(dataloader, transform):
        return
    _check(dataloader, transform, _advice(transform))
    add_vision_dataset_transform(_own_dataset(dataloader), transform)
    if getattr(dataloader, "_iterator", None) is not None:
        dataloader._iterator = None


def _contains(existing: Any, transform: Callable[[Any], Any]) -> bool:
    if existing is transform:
        return True
    steps = getattr(existing, "transforms", None)
    return isinstance(steps, (list, tuple)) and any(_contains(step, transform) for step in steps)


def _training_dataloader(state: State) -> Any:
    """Return `state.train_dataloader`, or the active dataloader in a loop that sets only that."""
    return state.dataloader if state.train_dataloader is None else state.train_dataloader


def _check(dataloader: Any, transform: Callable[[Any], Any], advice: str) -> None:
    if not hasattr(dataloader, "dataset"):
        raise TypeError(
            f"`train_dataloader` must be a `torch.utils.data.DataLoader`, or have a `dataset` like one, got "
            f"{type(dataloader).__name__}. {advice}"
        )
    dataset = _whole(dataloader.dataset)
    if not hasattr(dataset, "transform"):
        raise TypeError(
            f"The dataset must have an attribute `transform`, or be a `torch.utils.data.Subset` of such a dataset, got "
            f"{type(dataset).__name__}. Add the attribute, and apply it to images in `__getitem__`. {advice}"
        )
    joint = getattr(dataset, "transforms", None)
    if joint is not None and dataset.transform is None and type(joint).__name__ != "StandardTransform":
        raise ValueError(
            f"The dataset must not have joint `transforms` of images and targets, got {joint!r}, which would ignore "
            f"a `transform`. {_advice(transform)}"
        )


def _whole(dataset: Any) -> Any:
    """Return the dataset that a subset, or a subset of a subset, is a part of."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _nested_datasets(dataset: Any) -> list[Any]:
    """Return a dataset and all datasets that it is a subset or concatenation of."""
    parts = dataset.datasets if isinstance(dataset, ConcatDataset) else [getattr(dataset, "dataset", None)]
    return [dataset, *(inner for part in parts if part is not None for inner in _nested_datasets(part))]


def _own_dataset(holder: Any) -> Any:
    """Return the dataset of a dataloader or subset; inside a subset, replace it by a copy first."""
    dataset = holder.dataset
    if isinstance(holder, Subset):
        dataset = holder.dataset = copy.copy(dataset)
    return _own_dataset(dataset) if isinstance(dataset, Subset) else dataset


def _advice(transform: Callable[[Any], Any]) -> str:
    return f"Or apply `{type(transform).__name__}` in the dataset yourself, without the algorithm."
