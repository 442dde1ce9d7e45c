"""Every algorithm in a loop on Accelerate: the weights of our `Trainer`, or a refusal that says why."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
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
from composer.core import Precision
from composer.hosts.accelerate import AcceleratedRun
from composer.testing import deep_compare

REFUSED_BY_ACCELERATE: dict[str, str] = {
    "BatchSizeWarmup": "The host loads and counts batches in advance",
    "NoOpModel": "Pass the model that you want to train",
}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        for category in (NoEffectWarning, NotIntendedUseWarning):
            warnings.simplefilter("ignore", category)
        yield


def with_accelerate(names: Sequence[str], is_lower: bool = False, accumulate: int = 1) -> dict[str, Any]:
    is_lower = precision_of(names, is_lower) is Precision.AMP_BF16
    AcceleratorState._reset_state(reset_partial_state=True)  # settings of the process, of the case before
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate, mixed_precision="bf16" if is_lower else "no"
    )
    model = model_of(names)
    run = AcceleratedRun(accelerator, model, algorithms_of(names), max_duration=f"{EPOCHS}ep", seed=SEED)
    net, optimizer, _ = run.prepare(model, sgd(model), loader_of(names, BATCH // accumulate))
    for batches in run.epochs():
        for batch in batches:
            with accelerator.accumulate(net):
                accelerator.backward(run.loss(batch))
                optimizer.step()
                optimizer.zero_grad()
    return clone(run.run.model.state_dict())


@pytest.mark.parametrize("label", CASES)
def test_accelerate_gives_the_weights_of_our_trainer(label: str) -> None:
    if label in REFUSED_BY_ACCELERATE:
        with refused_when_constructed("accelerate", REFUSED_BY_ACCELERATE[label]):
            with_accelerate(CASES[label])
    else:
        deep_compare(with_trainer(CASES[label]), with_accelerate(CASES[label]))


@pytest.mark.parametrize("label", sampled_but(REFUSED_BY_ACCELERATE))
def test_accelerate_with_two_batches_per_step(label: str) -> None:
    check_two_batches_per_step(label, with_accelerate(CASES[label], accumulate=2))


@pytest.mark.parametrize("label", sampled_but(REFUSED_BY_ACCELERATE))
def test_accelerate_in_bfloat16(label: str) -> None:
    check_bfloat16(label, with_accelerate(CASES[label], is_lower=True), float32_outputs=True)
