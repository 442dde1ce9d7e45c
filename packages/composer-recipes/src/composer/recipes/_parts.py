"""The interfaces of a recipe's parts (data, network, training), and its metrics."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from composer.devices import Device
from composer.models import ComposerModel
from composer.optim import ComposerScheduler


class Dataset(Protocol):
    """Loaded data, ready for training.

    Attributes:
        name: Its name.
        num_train: Number of training samples.
        num_test: Number of test samples.
        batch_size: Training samples per batch, summed over all processes.
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
        """Return one line about the data and their split."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return a description as values that JSON can represent."""
        ...

    def loaders(self, seed: int, device: Device) -> tuple[Any, Any]:
        """Return data loaders for training and testing; each process gets its share.

        Args:
            seed: Seed of the order and the augmentation of the training samples.
            device: The training device.
        """
        ...


class DataSource(Protocol):
    """Hyperparameters of data: a frozen dataclass."""

    def load(self) -> Dataset:
        """Read the data.

        Raises:
            FileNotFoundError: A file does not exist; the message says how to get it.
            ValueError: There are fewer samples than requested, or a file has unexpected contents.
        """
        ...


class NetworkPlan(Protocol):
    """Hyperparameters of a network: a frozen dataclass."""

    def build(self, dataset: Any) -> ComposerModel:
        """Return a new network, initialized with torch's global generator.

        Args:
            dataset: The data, which determine the sizes of inputs and outputs.
        """
        ...


class TrainingPlan(Protocol):
    """Hyperparameters of the optimization: a frozen dataclass."""

    @property
    def epochs(self) -> float: ...

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of a model's parameters."""
        ...

    def schedule(self) -> ComposerScheduler:
        """Return the learning rate schedule."""
        ...


@dataclass(frozen=True)
class Metric:
    """A metric on the test samples, and its format.

    Args:
        key: The name in the model's evaluation metrics.
        title: The name in tables and plots.
        scale: Factor of displayed values.
        unit: Unit of displayed values.
        digits: Decimals of displayed values.
        higher_is_better: True for accuracies, False for losses.

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
        """Return a value, and its spread if given, as text."""
        deviation = "" if spread is None else f" +- {self.scale * spread:.{self.digits}f}"
        return f"{self.scale * value:.{self.digits}f}{deviation}{self.unit}"

    def reaches(self, value: float, goal: float) -> bool:
        """Return True if a value is at least as good as a goal."""
        return value >= goal if self.higher_is_better else value <= goal


def find_data(given: Path | None) -> Path:
    """Return the folder with datasets: the given one, or that of the environment variable COMPOSER_DATA.

    Args:
        given: The option `--data`.

    Raises:
        FileNotFoundError: Neither is set.
    """
    root = given if given is not None else os.environ.get("COMPOSER_DATA")
    if not root:
        raise FileNotFoundError(
            "`data` must name the folder that holds the dataset, got none. Pass `--data`, or set the environment "
            "variable COMPOSER_DATA."
        )
    return Path(root)
