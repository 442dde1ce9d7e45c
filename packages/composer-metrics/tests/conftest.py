"""Every metric with data and a slow, obvious reference, so that all of them go through the same tests."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torchmetrics 1.0 imports distutils
    from torchmetrics import Metric

    from composer.metrics import (
        BinaryF1Score,
        CrossEntropy,
        Dice,
        LanguageCrossEntropy,
        LanguagePerplexity,
        LossMetric,
        MaskedAccuracy,
        MIoU,
    )

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """One metric, a batch of data for it, and its value for a list of batches, computed example by example."""

    make: Callable[[], Metric]
    batch: Callable[[torch.Generator, int], Batch]
    reference: Callable[[list[Batch]], float]
    pooled: bool  # the value does not depend on the split into batches


def nll(logits: list[float], target: int) -> float:
    return math.log(math.fsum(math.exp(logit) for logit in logits)) - logits[target]


def mean(values: Iterable[float]) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


def rows_of(batches: list[Batch], dim: int) -> list[tuple[list[float], int]]:
    """Every set of class scores with its target."""
    return [
        (scores, target)
        for logits, targets in batches
        for scores, target in zip(
            logits.double().movedim(dim, -1).flatten(end_dim=-2).tolist(), targets.flatten().tolist(), strict=True
        )
    ]


def predictions(batches: list[Batch], dim: int) -> list[tuple[int, int]]:
    return [(scores.index(max(scores)), target) for scores, target in rows_of(batches, dim)]


def mean_cross_entropy(batches: list[Batch]) -> float:
    return mean(mean(nll(*row) for row in rows_of([batch], 1) if row[1] != -100) for batch in batches)


def mean_square(batches: list[Batch]) -> float:
    return mean(mean(((a - b) ** 2).flatten().tolist()) for a, b in batches)


def miou(batches: list[Batch], num_classes: int = 4, ignore_index: int = -1) -> float:
    pixels = [(pred, target) for pred, target in predictions(batches, 1) if target != ignore_index]
    scores = []
    for label in range(num_classes):
        both = sum(pred == label == target for pred, target in pixels)
        either = sum(label in pixel for pixel in pixels)
        if either:
            scores.append(both / either)
    return 100 * mean(scores) if scores else math.nan


def dice(batches: list[Batch], num_classes: int = 4) -> float:
    pixels = predictions(batches, 1)
    scores = []
    for label in range(1, num_classes):
        both = sum(pred == label == target for pred, target in pixels)
        total = sum(pred == label for pred, _ in pixels) + sum(target == label for _, target in pixels)
        if total:
            scores.append(2 * both / total)
    return round(100 * mean(scores), 2) if scores else math.nan


def masked_accuracy(batches: list[Batch]) -> float:
    kept = [(pred, target) for pred, target in predictions(batches, -1) if target != -100]
    return mean(pred == target for pred, target in kept) if kept else math.nan


def token_cross_entropy(batches: list[Batch]) -> float:
    return mean(nll(*row) for row in rows_of(batches, -1) if row[1] != -100)


def f1(batches: list[Batch]) -> float:
    pairs = predictions(batches, 1)
    hits, misses, alarms = pairs.count((1, 1)), pairs.count((0, 1)), pairs.count((1, 0))
    return 2 * hits / (2 * hits + misses + alarms) if hits + misses + alarms else 0.0


def classes(*shape: int, num_classes: int, ignored: int | None = None) -> Callable[[torch.Generator, int], Batch]:
    """Logits (N, C, *shape) and indices (N, *shape), a few of them ignored."""

    def draw(generator: torch.Generator, size: int) -> Batch:
        logits = torch.randn(size, num_classes, *shape, generator=generator)
        targets = torch.randint(num_classes, (size, *shape), generator=generator)
        if ignored is not None:
            targets[torch.rand(targets.shape, generator=generator) < 0.2] = ignored
        return logits, targets

    return draw


def tokens(generator: torch.Generator, size: int) -> Batch:
    logits, targets = classes(5, num_classes=7, ignored=-100)(generator, size)
    return logits.movedim(1, -1), targets


def pairs(generator: torch.Generator, size: int) -> Batch:
    return torch.randn(size, 3, generator=generator), torch.randn(size, 3, generator=generator)


CASES = {
    "CrossEntropy": Case(CrossEntropy, classes(num_classes=5, ignored=-100), mean_cross_entropy, pooled=False),
    "LossMetric": Case(lambda: LossMetric(torch.nn.functional.mse_loss), pairs, mean_square, pooled=False),
    "MIoU": Case(lambda: MIoU(4), classes(3, 5, num_classes=4, ignored=-1), miou, pooled=True),
    "Dice": Case(lambda: Dice(4), classes(3, 5, num_classes=4), dice, pooled=True),
    "MaskedAccuracy": Case(MaskedAccuracy, tokens, masked_accuracy, pooled=True),
    "LanguageCrossEntropy": Case(LanguageCrossEntropy, tokens, token_cross_entropy, pooled=True),
    "LanguagePerplexity": Case(
        LanguagePerplexity, tokens, lambda batches: math.exp(token_cross_entropy(batches)), pooled=True
    ),
    "BinaryF1Score": Case(BinaryF1Score, classes(num_classes=2), f1, pooled=True),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="session")
def cases() -> list[Case]:
    return list(CASES.values())


@pytest.fixture(params=[name for name, case in CASES.items() if case.pooled])
def pooled(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="session")
def draw() -> Callable[..., list[Batch]]:
    def draw(case: Case, *sizes: int, seed: int = 0) -> list[Batch]:
        generator = torch.Generator().manual_seed(seed)
        return [case.batch(generator, size) for size in sizes]

    return draw


@pytest.fixture(scope="session")
def reference() -> dict[str, Callable[..., Any]]:
    return {"miou": miou, "dice": dice, "masked_accuracy": masked_accuracy, "f1": f1}
