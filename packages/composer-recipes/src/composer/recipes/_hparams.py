"""The hyperparameters that all recipes share. The command line and its help are made from these classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from composer.core import Algorithm, State, Time
from composer.optim import ComposerScheduler
from composer.recipes._parts import DataSource, Metric, NetworkPlan, TrainingPlan
from composer.utils.reproducibility import MAX_SEED

__all__ = ["SGD", "AdamW", "Recipe", "Runs", "check_at_least"]


@dataclass(frozen=True)
class SGD:
    """Training by SGD with momentum; the learning rate rises, then falls to 0 as a cosine.

    Args:
        epochs: Passes over the training samples.
        lr: The highest learning rate.
        momentum: The momentum, with Nesterov's look-ahead.
        weight_decay: The L2 penalty, on all weights.
        warmup: The part of the training in which the learning rate rises, in [0, 1). It then falls as a cosine.
    """

    epochs: float = 20
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup: float = 0.2

    def __post_init__(self) -> None:
        _check_training(self.epochs, self.lr, self.weight_decay, self.warmup)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum` must be in [0, 1), got {self.momentum!r}.")

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model's weights."""
        return torch.optim.SGD(
            model.parameters(),
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.momentum > 0,
        )

    def schedule(self) -> ComposerScheduler:
        """The course of the learning rate."""
        return _rise_and_fall(self.warmup)


@dataclass(frozen=True)
class AdamW:
    """Training by AdamW; the learning rate rises, then falls to 0 as a cosine.

    Args:
        epochs: Passes over the training samples.
        lr: The highest learning rate.
        beta1: How much the average of the gradients keeps in a step, in [0, 1).
        beta2: How much the average of their squares keeps in a step, in [0, 1).
        weight_decay: The decoupled weight decay, of matrices; vectors (biases, normalisation) have none.
        warmup: The part of the training in which the learning rate rises, in [0, 1). It then falls as a cosine.
    """

    epochs: float = 3
    lr: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    warmup: float = 0.1

    def __post_init__(self) -> None:
        _check_training(self.epochs, self.lr, self.weight_decay, self.warmup)
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be in [0, 1), got {getattr(self, name)!r}.")

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The optimizer of a model's weights."""
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=self.lr, betas=(self.beta1, self.beta2))

    def schedule(self) -> ComposerScheduler:
        """The course of the learning rate."""
        return _rise_and_fall(self.warmup)


@dataclass(frozen=True)
class Runs:
    """How often to repeat the training, and on what.

    Args:
        seeds: Train this often, each time from another seed.
        seed: The first seed; the others follow it.
        device: Where to train; "cuda" is another name of "gpu". None is a GPU if there is one.
        precision: The numerical precision. None is fp16 on a GPU and fp32 elsewhere.
        threads: Threads of the CPU. None is torch's number: as many as there are cores. The numbers of a run depend on
            it in their last digits.
        eval_interval: How often to test: a time such as 1ep or 100ba. The time that tests take is not counted.
        deterministic: Use deterministic operations only, so that the same seed gives the same numbers; slower on a GPU.
        progress: Show a progress bar for each training run.
    """

    seeds: int = 1
    seed: int = 0
    device: Literal["cpu", "gpu", "cuda", "mps"] | None = None
    precision: Literal["fp32", "amp_fp16", "amp_bf16"] | None = None
    threads: int | None = None
    eval_interval: str = "1ep"
    deterministic: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        check_at_least("seeds", self.seeds, 1)
        check_at_least("threads", self.threads, 1)
        last = MAX_SEED + 1 - self.seeds
        if not 0 <= self.seed <= last:
            raise ValueError(f"`seed` must be from 0 to {last}, so that all seeds are below 2**32, got {self.seed!r}.")
        if Time.from_input(self.eval_interval).value <= 0:
            raise ValueError(f"`eval_interval` must be positive, got {self.eval_interval!r}.")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training: data, network, optimisation, algorithms.

    Args:
        name: What it is called in tables, plots and progress bars.
        data: What is trained on.
        network: The network.
        training: The optimisation.
        metrics: What it is measured by; the first one is what is compared.
        algorithms: The methods to compose, in the order in which the engine gets them. Every run trains with copies.
    """

    name: str
    data: DataSource
    network: NetworkPlan
    training: TrainingPlan
    metrics: Sequence[Metric]
    algorithms: Sequence[Algorithm] = ()

    def __post_init__(self) -> None:
        if not self.metrics:
            raise ValueError("`metrics` must name at least one metric, got none.")
        for algorithm in self.algorithms:
            if not isinstance(algorithm, Algorithm):
                raise TypeError(f"`algorithms` must hold `Algorithm` objects, got {algorithm!r}.")


def check_at_least(name: str, value: float | None, least: float) -> None:
    """Refuse a number below `least`; None passes.

    Raises:
        ValueError: It is.
    """
    if value is not None and value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value!r}.")


def _check_training(epochs: float, lr: float, weight_decay: float, warmup: float) -> None:
    if not 0 < epochs < math.inf:
        raise ValueError(f"`epochs` must be positive and finite, got {epochs!r}.")
    check_at_least("weight_decay", weight_decay, 0)
    if not 0 < lr < math.inf:
        raise ValueError(f"`lr` must be positive and finite, got {lr!r}.")
    if not 0 <= warmup < 1:
        raise ValueError(f"`warmup` must be in [0, 1), got {warmup!r}.")


def _rise_and_fall(warmup: float) -> ComposerScheduler:
    """The part of the highest learning rate: rises evenly, then falls to 0 as a cosine.

    In fractions of the run, so that a run that an algorithm shortens has all of it; the warm-up of
    `CosineAnnealingWithWarmupScheduler` keeps its length then.
    """

    def multiplier(state: State, ssr: float = 1.0) -> float:
        elapsed = state.get_elapsed_duration()
        assert elapsed is not None, "every run has a length"
        done = float(elapsed)
        if done < warmup:
            return done / warmup
        return (1 + math.cos(math.pi * (done - warmup) / (1 - warmup))) / 2

    return multiplier
