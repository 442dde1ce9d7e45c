"""The hyperparameters of a recipe, in groups. The command line and its help are made from these classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from composer.core import Algorithm
from composer.utils.reproducibility import MAX_SEED

__all__ = ["Data", "Network", "Recipe", "Runs", "Training"]


@dataclass(frozen=True)
class Data:
    """What is trained on, and how it is batched.

    Args:
        data: A folder with Fashion-MNIST (FashionMNIST/raw/) or CIFAR-10 (cifar-10-batches-py/), laid out as
            torchvision does. None is the handwritten digits of scikit-learn.
        train_samples: Train on the first images of the training set, so many. None is all.
        test_samples: Test on the first images of the test set, so many. None is all.
        batch_size: Images per training batch. What does not fill a batch is left out of an epoch.
        shift: Move each training image by up to this many pixels in each direction, at random. None is 1 for images of
            up to 16 pixels, and an eighth of their size for larger ones.
    """

    data: Path | None = None
    train_samples: int | None = None
    test_samples: int | None = None
    batch_size: int = 50
    shift: int | None = None

    def __post_init__(self) -> None:
        _check_at_least("train_samples", self.train_samples, 1)
        _check_at_least("test_samples", self.test_samples, 1)
        _check_at_least("batch_size", self.batch_size, 1)
        _check_at_least("shift", self.shift, 0)


@dataclass(frozen=True)
class Network:
    """The residual network.

    Args:
        width: Channels of its first stage; the second has twice, the third four times as many.
        blocks: Residual blocks per stage.
    """

    width: int = 16
    blocks: int = 1

    def __post_init__(self) -> None:
        _check_at_least("width", self.width, 1)
        _check_at_least("blocks", self.blocks, 1)


@dataclass(frozen=True)
class Training:
    """How long and how fast both recipes train: SGD with momentum, the learning rate rising, then falling to 0.

    Args:
        epochs: Passes over the training images.
        lr: The highest learning rate.
        momentum: The momentum of SGD, with Nesterov's look-ahead.
        weight_decay: The L2 penalty, on all weights.
        warmup: The part of the training in which the learning rate rises, in [0, 1). It then falls as a cosine.
    """

    epochs: int = 20
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup: float = 0.2

    def __post_init__(self) -> None:
        _check_at_least("epochs", self.epochs, 1)
        _check_at_least("weight_decay", self.weight_decay, 0)
        if not 0 < self.lr < math.inf:
            raise ValueError(f"`lr` must be positive and finite, got {self.lr!r}.")
        for name in ("momentum", "warmup"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"`{name}` must be in [0, 1), got {value!r}.")


@dataclass(frozen=True)
class Runs:
    """How often to repeat the training, and on what.

    Args:
        seeds: Train this often, each time from another seed.
        seed: The first seed; the others follow it.
        device: Where to train. None is a GPU if there is one.
        precision: The numerical precision. None is fp16 on a GPU and fp32 elsewhere.
        threads: Threads of the CPU. One is fast for images this small, leaves the other cores alone, and gives the same
            numbers whatever the number of cores. None leaves torch's number.
        progress: Show a progress bar for each training run.
    """

    seeds: int = 5
    seed: int = 0
    device: Literal["cpu", "gpu", "mps"] | None = None
    precision: Literal["fp32", "amp_fp16", "amp_bf16"] | None = None
    threads: int | None = 1
    progress: bool = True

    def __post_init__(self) -> None:
        _check_at_least("seeds", self.seeds, 1)
        _check_at_least("threads", self.threads, 1)
        last = MAX_SEED + 1 - self.seeds
        if not 0 <= self.seed <= last:
            raise ValueError(f"`seed` must be from 0 to {last}, so that all seeds are below 2**32, got {self.seed!r}.")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training: data, network, optimisation, algorithms.

    Args:
        name: What it is called in tables, plots and progress bars.
        algorithms: The methods to compose, in the order in which the engine gets them. Every run trains with copies.
        data: What is trained on.
        network: The network.
        training: The optimisation.
    """

    name: str
    algorithms: Sequence[Algorithm] = ()
    data: Data = field(default_factory=Data)
    network: Network = field(default_factory=Network)
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        for algorithm in self.algorithms:
            if not isinstance(algorithm, Algorithm):
                raise TypeError(f"`algorithms` must hold `Algorithm` objects, got {algorithm!r}.")


def _check_at_least(name: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value!r}.")
