"""Add a transform to the data set behind a loader, once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset, Subset

from composer.utils.misc import add_vision_dataset_transform

if TYPE_CHECKING:
    from composer.core.state import State

__all__ = [
    "add_dataset_transform",
    "add_training_transform",
    "check_training_transform",
    "has_dataset_transform",
]


def check_training_transform(state: State, transform: Callable[[Any], Any], advice: str) -> None:
    """Check that a transform can be added to the training data set, and would not reach evaluation data.

    Args:
        state: The run; without a training loader nothing is checked.
        transform: What `add_training_transform` will add.
        advice: What to do with a loader that has no data set of images; the last sentence of the message.

    Raises:
        TypeError: The data set of the loader takes no transform.
        ValueError: The data set has joint transforms, or an evaluator reads the same data set.
    """
    dataloader = _training_dataloader(state)
    if dataloader is None:
        return
    _check(dataloader, transform, advice)
    for evaluator in state.evaluators:
        evaluated = getattr(evaluator.dataloader.dataloader, "dataset", None)
        if any(dataset is dataloader.dataset for dataset in _nested_datasets(evaluated)):
            raise ValueError(
                f"The training data set must not be shared with the evaluator {evaluator.label!r}, whose images "
                f"`{type(transform).__name__}` would change too. Give the evaluator its own data set object, such as "
                f"`copy.copy(dataset)`."
            )


def add_training_transform(state: State, transform: Callable[[Any], Any], advice: str) -> None:
    """Add a transform of Pillow images to the training data set, unless it is there; see `add_dataset_transform`.

    Args:
        state: The run, with a training loader.
        transform: Takes an image and returns one.
        advice: As in `check_training_transform`, whose errors this raises.
    """
    check_training_transform(state, transform, advice)
    add_dataset_transform(_training_dataloader(state), transform)


def has_dataset_transform(dataloader: Any, transform: Callable[[Any], Any]) -> bool:
    """Whether the data set of a loader already applies this very transform.

    Args:
        dataloader: The loader; anything else has none.
        transform: The transform; one that is merely equal does not count.
    """
    dataset = getattr(dataloader, "dataset", None)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return _contains(getattr(dataset, "transform", None), transform)


def add_dataset_transform(dataloader: Any, transform: Callable[[Any], Any]) -> None:
    """Add a transform of Pillow images to the data set behind a loader, unless it is there.

    The data set is changed in place as by `composer.utils.add_vision_dataset_transform`. Below a `Subset` it is a
    shallow copy that is changed, because other subsets of the same data set may serve for evaluation. Persistent
    workers that already run have copied the data set before; the next iteration starts new ones.

    Args:
        dataloader: A `torch.utils.data.DataLoader`, or something else with a `dataset`. That has an attribute
            `transform`, as those of torchvision do, or is a `torch.utils.data.Subset` of one that has.
        transform: Takes an image and returns one.

    Raises:
        TypeError: There is no such data set.
        ValueError: The data set has joint transforms of image and target, which would ignore a transform.
    """
    if has_dataset_transform(dataloader, transform):
        return
    _check(dataloader, transform, _way_out(transform))
    add_vision_dataset_transform(_own_dataset(dataloader), transform)
    if getattr(dataloader, "_iterator", None) is not None:
        dataloader._iterator = None


def _contains(existing: Any, transform: Callable[[Any], Any]) -> bool:
    if existing is transform:
        return True
    steps = getattr(existing, "transforms", None)
    return isinstance(steps, (list, tuple)) and any(_contains(step, transform) for step in steps)


def _training_dataloader(state: State) -> Any:
    """`state.train_dataloader`, or the active loader in a loop that sets only that."""
    return state.dataloader if state.train_dataloader is None else state.train_dataloader


def _check(dataloader: Any, transform: Callable[[Any], Any], advice: str) -> None:
    if not hasattr(dataloader, "dataset"):
        raise TypeError(
            f"`train_dataloader` must be a `torch.utils.data.DataLoader`, or have a `dataset` like one, got "
            f"{type(dataloader).__name__}. {advice}"
        )
    dataset = dataloader.dataset
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if not hasattr(dataset, "transform"):
        raise TypeError(
            f"The data set must have an attribute `transform`, or be a `torch.utils.data.Subset` of one that has, got "
            f"{type(dataset).__name__}. Give it one that its `__getitem__` applies to images. {advice}"
        )
    joint = getattr(dataset, "transforms", None)
    if joint is not None and dataset.transform is None and type(joint).__name__ != "StandardTransform":
        raise ValueError(
            f"The data set must not have joint `transforms` of images and targets, got {joint!r}, which would ignore "
            f"a `transform`. {_way_out(transform)}"
        )


def _nested_datasets(dataset: Any) -> list[Any]:
    """A data set, and those that it is a subset or concatenation of."""
    parts = dataset.datasets if isinstance(dataset, ConcatDataset) else [getattr(dataset, "dataset", None)]
    return [dataset, *(inner for part in parts if part is not None for inner in _nested_datasets(part))]


def _own_dataset(holder: Any) -> Any:
    """The data set behind a loader or subset, made a copy of its own below a subset."""
    dataset = holder.dataset
    if isinstance(holder, Subset):
        dataset = holder.dataset = copy.copy(dataset)
    return _own_dataset(dataset) if isinstance(dataset, Subset) else dataset


def _way_out(transform: Callable[[Any], Any]) -> str:
    return f"Or apply `{type(transform).__name__}` in the data set yourself, without the algorithm."
