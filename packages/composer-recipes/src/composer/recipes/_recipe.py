"""Recipes and tasks: their parts, the hyperparameters that all of them share, and their defaults.

The command line and its help are generated from these classes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from composer.core import Algorithm, State, Time
from composer.devices import Device
from composer.models import ComposerModel
from composer.optim import ComposerScheduler
from composer.utils.reproducibility import MAX_SEED


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


@dataclass(frozen=True)
class SGD:
    """Training with SGD and Nesterov momentum; linear warmup, then cosine decay to 0.

    Args:
        epochs: Passes over the training samples.
        lr: The peak learning rate.
        momentum: The Nesterov momentum, in [0, 1).
        weight_decay: The L2 penalty on all weights.
        warmup: The fraction of the training with a rising learning rate, in [0, 1); cosine decay follows.
    """

    epochs: float = 20
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup: float = 0.2

    def __post_init__(self) -> None:
        check_training(self.epochs, self.lr, self.weight_decay, self.warmup)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum` must be in [0, 1), got {self.momentum!r}.")

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of a model's parameters."""
        return torch.optim.SGD(
            model.parameters(),
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.momentum > 0,
        )

    def schedule(self) -> ComposerScheduler:
        """Return the learning rate schedule."""
        return warmup_and_cosine(self.warmup)


@dataclass(frozen=True)
class AdamW:
    """Training with AdamW; linear warmup, then cosine decay to 0.

    Args:
        epochs: Passes over the training samples.
        lr: The peak learning rate.
        beta1: Decay of the running average of gradients, in [0, 1).
        beta2: Decay of the running average of squared gradients, in [0, 1).
        weight_decay: The decoupled weight decay of matrices; vectors (biases, normalization) have none.
        warmup: The fraction of the training with a rising learning rate, in [0, 1); cosine decay follows.
    """

    epochs: float = 3
    lr: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    warmup: float = 0.1

    def __post_init__(self) -> None:
        check_training(self.epochs, self.lr, self.weight_decay, self.warmup)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be in [0, 1), got {getattr(self, name)!r}.")

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of a model's parameters."""
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=self.lr, betas=(self.beta1, self.beta2))

    def schedule(self) -> ComposerScheduler:
        """Return the learning rate schedule."""
        return warmup_and_cosine(self.warmup)


@dataclass(frozen=True)
class Runs:
    """Number of runs, and how they are computed.

    Args:
        seeds: Number of runs, each with another seed.
        seed: The first seed; the others follow it.
        device: The training device; "cuda" is another name of "gpu". None: a GPU if available, otherwise the CPU.
        precision: The numerical precision. None: fp16 on a GPU, otherwise fp32.
        threads: Number of CPU threads. None: torch's default, one per core. It changes the last digits of results.
        eval_interval: Time between evaluations, such as 1ep or 100ba. Evaluations do not count as training time.
        deterministic: Use only deterministic operations: the same seed gives the same numbers. Slower on a GPU.
        compile: Compile the "model", or the whole "step": the loss with the forward pass, and the optimizer where torch
            allows it. A short run before the first one compiles, too; what later seeds compile counts as training time.
        progress: Show a progress bar for each training run.
        save_folder: A folder, or the URI of one in a store, to which each run is saved when it is evaluated. The same
            command continues from there if it is interrupted. Runs with other options are saved separately. None: runs
            are not saved.
    """

    seeds: int = 1
    seed: int = 0
    device: Literal["cpu", "gpu", "cuda", "mps"] | None = None
    precision: Literal["fp32", "amp_fp16", "amp_bf16"] | None = None
    threads: int | None = None
    eval_interval: str = "1ep"
    deterministic: bool = True
    compile: Literal["model", "step"] | None = None
    progress: bool = True
    save_folder: str | None = None

    def __post_init__(self) -> None:
        check_at_least("seeds", self.seeds, 1)
        check_at_least("threads", self.threads, 1)
        last = MAX_SEED + 1 - self.seeds
        if not 0 <= self.seed <= last:
            raise ValueError(f"`seed` must be from 0 to {last}, so that all seeds are below 2**32, got {self.seed!r}.")
        if self.save_folder == "":
            raise ValueError("`save_folder` must be a folder or a URI, got an empty text.")
        if Time.from_input(self.eval_interval).value <= 0:
            raise ValueError(f"`eval_interval` must be positive, got {self.eval_interval!r}.")


@dataclass(frozen=True)
class Recipe:
    """Complete description of a training: data, network, optimization, algorithms.

    Args:
        name: The name in tables, plots and progress bars.
        data: The training and test data.
        network: The network.
        training: The optimization.
        metrics: Evaluation metrics; recipes are compared by the first one.
        algorithms: The algorithms to compose, in the order for the engine. Every run trains with copies.
    """

    name: str
    data: DataSource
    network: NetworkPlan
    training: TrainingPlan
    metrics: Sequence[Metric]
    algorithms: Sequence[Algorithm] = ()

    def __post_init__(self) -> None:
        if not self.metrics:
            raise ValueError("`metrics` must have at least one metric, got none.")
        for algorithm in self.algorithms:
            if not isinstance(algorithm, Algorithm):
                raise TypeError(f"`algorithms` must be `Algorithm` objects, got {algorithm!r}.")


def check_at_least(name: str, value: float | None, least: float) -> None:
    """Raise a ValueError for a number below `least`. None is accepted."""
    if value is not None and value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value!r}.")


def check_training(epochs: float, lr: float, weight_decay: float, warmup: float = 0.0) -> None:
    """Raise a ValueError for hyperparameters of an optimization that are out of range."""
    if not 0 < epochs < math.inf:
        raise ValueError(f"`epochs` must be positive and finite, got {epochs!r}.")
    check_at_least("weight_decay", weight_decay, 0)
    if not 0 < lr < math.inf:
        raise ValueError(f"`lr` must be positive and finite, got {lr!r}.")
    if not 0 <= warmup < 1:
        raise ValueError(f"`warmup` must be in [0, 1), got {warmup!r}.")


def warmup_and_cosine(warmup: float) -> ComposerScheduler:
    """Return a schedule of linear warmup and cosine decay, both in fractions of the run.

    If an algorithm shortens the run, the warmup gets shorter too; that of `CosineAnnealingWithWarmupScheduler` does
    not.
    """

    def multiplier(state: State, ssr: float = 1.0) -> float:
        elapsed = state.get_elapsed_duration()
        assert elapsed is not None, "every run has a length"
        done = float(elapsed)
        if done < warmup:
            return done / warmup
        return (1 + math.cos(math.pi * (done - warmup) / (1 - warmup))) / 2

    return multiplier


@dataclass(frozen=True)
class Task:
    """Defaults of the plain and the composed recipe of `composer-train NAME`, and the available algorithms.

    Attributes:
        name: The name on the command line.
        summary: A few sentences for its help.
        data: Default data.
        network: Default network.
        training: Default optimization of both recipes, tuned for the plain one.
        metrics: Evaluation metrics; recipes are compared by the first one.
        algorithms: The available algorithms, by their names on the command line.
        chosen: The algorithms of the composed recipe by default.
        tuned: Arguments that replace the defaults of an algorithm, by name.
        runs: Default number of runs and how they are computed.
        fitted: Returns arguments of algorithms that depend on the data, by name.
        stacks: Files of options that `--config` takes by name.
    """

    name: str
    summary: str
    data: DataSource
    network: NetworkPlan
    training: TrainingPlan
    metrics: Sequence[Metric]
    algorithms: Mapping[str, type[Algorithm]]
    chosen: Sequence[str]
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    runs: Runs = field(default_factory=Runs)
    fitted: Callable[[Any], Mapping[str, Mapping[str, Any]]] = lambda data: {}
    stacks: Mapping[str, Path] = field(default_factory=dict)

    def plain(
        self, data: DataSource | None = None, network: NetworkPlan | None = None, training: TrainingPlan | None = None
    ) -> Recipe:
        """Return the recipe without algorithms.

        Args:
            data: The data. None: the default.
            network: The network. None: the default.
            training: The optimization. None: the default.
        """
        return Recipe("plain", data or self.data, network or self.network, training or self.training, self.metrics)

    def composed(
        self,
        data: DataSource | None = None,
        network: NetworkPlan | None = None,
        training: TrainingPlan | None = None,
        algorithms: Sequence[Algorithm] | None = None,
    ) -> Recipe:
        """Return the recipe with algorithms.

        Args:
            data: The data. None: the default.
            network: The network. None: the default.
            training: The optimization. None: the default.
            algorithms: The algorithms. None: `chosen`, with the arguments of `tuned`.
        """
        chosen = self.make_algorithms(data=data) if algorithms is None else algorithms
        parts = data or self.data, network or self.network, training or self.training
        return Recipe("composed", *parts, self.metrics, chosen)

    def make_algorithms(
        self,
        names: Sequence[str] | None = None,
        arguments: Mapping[str, Mapping[str, Any]] | None = None,
        data: DataSource | None = None,
    ) -> list[Algorithm]:
        """Construct algorithms by name.

        Args:
            names: Keys of `algorithms`. None: `chosen`.
            arguments: Arguments by name. None: `tuned`.
            data: The data they are for. None: the default.

        Raises:
            ValueError: A name is unknown, or an argument is invalid.
        """
        arguments = self.tuned if arguments is None else arguments
        fitted = self.fitted(data or self.data)
        algorithms = []
        for name in self.chosen if names is None else names:
            if name not in self.algorithms:
                raise ValueError(f"`names` must be among {', '.join(self.algorithms)}, got {name!r}.")
            algorithms.append(self.algorithms[name](**arguments.get(name, {}), **fitted.get(name, {})))
        return algorithms
