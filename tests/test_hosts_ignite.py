"""Every algorithm in the engines of PyTorch-Ignite: the weights of our `Trainer`, or a refusal that says why."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from test_hosted_run import (
    BATCH,
    CASES,
    EPOCHS,
    SEED,
    algorithms_of,
    check_bfloat16,
    check_two_batches_per_step,
    clone,
    loader_of,
    model_of,
    precision_of,
    refused_when_constructed,
    sampled_but,
    sgd,
    with_trainer,
)

from composer.algorithms.warnings import NoEffectWarning, NotIntendedUseWarning
from composer.hosts.ignite import IgniteRun
from composer.testing import deep_compare

REFUSED_BY_IGNITE: dict[str, str] = {
    "BatchSizeWarmup": "The host loads and counts batches in advance",
    "NoOpModel": "Pass the model that you want to train",
    "ScaleSchedule": "Set `max_duration`, `max_epochs`",
}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        for category in (NoEffectWarning, NotIntendedUseWarning):
            warnings.simplefilter("ignore", category)
        yield


def with_ignite(names: Sequence[str], is_lower: bool = False, accumulate: int = 1) -> dict[str, Any]:
    model = model_of(names)
    run = IgniteRun(
        model,
        algorithms_of(names),
        optimizer=sgd(model),
        max_duration=f"{EPOCHS}ep",
        precision=precision_of(names, is_lower),
        seed=SEED,
    )
    trainer = run.create_supervised_trainer(gradient_accumulation_steps=accumulate)
    trainer.run(loader_of(names, BATCH // accumulate), max_epochs=EPOCHS)
    return clone(run.model.state_dict())


@pytest.mark.parametrize("label", CASES)
def test_ignite_gives_the_weights_of_our_trainer(label: str) -> None:
    if label in REFUSED_BY_IGNITE:
        with refused_when_constructed("ignite", REFUSED_BY_IGNITE[label]):
            with_ignite(CASES[label])
    else:
        deep_compare(with_trainer(CASES[label]), with_ignite(CASES[label]))


@pytest.mark.parametrize("label", sampled_but(REFUSED_BY_IGNITE))
def test_ignite_with_two_batches_per_step(label: str) -> None:
    check_two_batches_per_step(label, with_ignite(CASES[label], accumulate=2))


@pytest.mark.parametrize("label", sampled_but(REFUSED_BY_IGNITE))
def test_ignite_in_bfloat16(label: str) -> None:
    check_bfloat16(label, with_ignite(CASES[label], is_lower=True))
