"""The parts of a recipe: where its data come from, its network, its optimisation, and what it is measured by."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from composer.devices import Device
from composer.models import ComposerModel
from composer.optim import ComposerScheduler

__all__ = ["DataSource", "Dataset", "Metric", "NetworkPlan", "TrainingPlan", "find_data"]


class Dataset(Protocol):
    """Data that were read, ready for training.

    Attributes:
        name: What it is called.
        num_train: Number of training samples.
        num_test: Number of test samples.
        batch_size: Training samples per batch, of all processes together.
    """

    @property
    def name(self) -> str: ...
    @property
    def num_train(self) -> int: ...
    @property
    def num_test(self) -> int: ...
    @property
    def batch_size(self) -> int: ...

    def describe(self) -> str:
        """The data and their split, in a line."""
        ...

    def facts(self) -> dict[str, Any]:
        """The same as values that JSON can hold."""
        ...

    def loaders(self, seed: int, device: Device) -> tuple[Any, Any]:
        """What the Trainer takes for training and for testing; of several processes, each has its share.

        Args:
            seed: Of the order of the training samples and of how they are augmented.
            device: Where the batches are made.
        """
        ...


class DataSource(Protocol):
    """The hyperparameters of data: a frozen dataclass."""

    def load(self) -> Dataset:
        """Read the data.

        Raises:
            FileNotFoundError: They are not there; the message says how to get them.
            ValueError: There are fewer than asked for, or a file is not what its name says.
        """
        ...


class NetworkPlan(Protocol):
    """The hyperparameters of a network: a frozen dataclass."""

    def build(self, dataset: Any) -> ComposerModel:
        """A new network, with weights from torch's generator.

        Args:
            dataset: What it is for; it decides the sizes of inputs and outputs.
        """
        ...


class TrainingPlan(Protocol):
    """The hyperparameters of an optimisation: a frozen dataclass."""

    @property
    def epochs(self) -> float: ...

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model's weights."""
        ...

    def schedule(self) -> ComposerScheduler:
        """The course of the learning rate."""
        ...


@dataclass(frozen=True)
class Metric:
    """Something measured on the test samples.

    Args:
        key: Its name in the model's evaluation metrics.
        title: What people call it.
        scale: What its values are multiplied by to be shown.
        unit: What then follows them.
        digits: Decimals shown.
        higher_is_better: Whether it is to grow.

    Example:
        >>> Metric("MulticlassAccuracy", "accuracy", scale=100, unit="%", digits=2).show(0.9358)
        '93.58%'
    """

    key: str
    title: str
    scale: float = 1.0
    unit: str = ""
    digits: int = 4
    higher_is_better: bool = True

    def show(self, value: float, spread: float | None = None) -> str:
        """A value, and its spread if there is one, as text."""
        deviation = "" if spread is None else f" +- {self.scale * spread:.{self.digits}f}"
        return f"{self.scale * value:.{self.digits}f}{deviation}{self.unit}"

    def reaches(self, value: float, goal: float) -> bool:
        """Whether a value is at least as good as another."""
        return value >= goal if self.higher_is_better else value <= goal


def find_data(given: Path | None) -> Path:
    """The folder with data sets: the one that is given, or that of the environment variable COMPOSER_DATA.

    Args:
        given: The option `--data`.

    Raises:
        FileNotFoundError: Neither names one.
    """
    root = given if given is not None else os.environ.get("COMPOSER_DATA")
    if not root:
        raise FileNotFoundError(
            "`data` must name the folder that holds the data set, got none. Give it, or set the environment variable "
            "COMPOSER_DATA."
        )
    return Path(root)
