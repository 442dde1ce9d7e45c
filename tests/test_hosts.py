"""Every algorithm inside the loops of other libraries: the weights of our `Trainer`, or a refusal that says why."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
from algorithm_runs import Captioned, Classifier
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
    precision_of,
    refused_when_constructed,
    sampled_but,
    sgd,
    with_trainer,
)

from composer.algorithms.warnings import NoEffectWarning, NotIntendedUseWarning
from composer.core import Precision
from composer.hosts.lightning import ComposeCallback
from composer.testing import deep_compare

REFUSED_BY_LIGHTNING = {
    **dict.fromkeys(("AlternatingFlip", "AugMix", "RandAugment"), "Lightning loads a batch before training begins"),
    "BatchSizeWarmup": "The host loads and counts batches in advance",
    **dict.fromkeys(("Muon", "SOAP", "ScheduleFree"), "Create that optimizer in `configure_optimizers`"),
    "NoOpModel": "Pass the model that you want to train",
    "ScaleSchedule": "Set `max_epochs`",
    "TestTimeAugmentation": "`validation_step` and `predict_step` run the model themselves",
}


@pytest.fixture(autouse=True)
def quiet() -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for category in (NoEffectWarning, NotIntendedUseWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", module="lightning")
        warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec|batch_size).*")
        yield


class Hosted(pl.LightningModule):
    """The methods that a model of ours lacks in Lightning."""

    logger: Any = None  # Lightning has a property, which a model of ours cannot set

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.composer.loss(batch)  # type: ignore[operator, union-attr]

    def configure_optimizers(self) -> Any:
        return sgd(self)


class HostedClassifier(Hosted, Classifier):
    """Classifies images."""


class HostedCaptioned(Hosted, Captioned):
    """Classifies images with texts."""


def with_lightning(names: Sequence[str], is_lower: bool = False, accumulate: int = 1) -> dict[str, Any]:
    is_text = "input_ids" in next(iter(loader_of(names)))
    model: Any = HostedCaptioned() if is_text else HostedClassifier()
    callback = ComposeCallback(
        algorithms_of(names), forward=lambda module, batch: module(batch), loss=model.loss, seed=SEED
    )
    precision = precision_of(names, is_lower)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
        precision="bf16-mixed" if precision is Precision.AMP_BF16 else "32-true",
    )
    trainer.fit(model, loader_of(names, BATCH // accumulate))
    return clone(model.state_dict())


@pytest.mark.parametrize("label", CASES)
def test_lightning_gives_the_weights_of_our_trainer(label: str) -> None:
    if label in REFUSED_BY_LIGHTNING:
        with refused_when_constructed("lightning", REFUSED_BY_LIGHTNING[label]):
            with_lightning(CASES[label])
    else:
        deep_compare(with_trainer(CASES[label]), with_lightning(CASES[label]))


@pytest.mark.parametrize("label", sampled_but(REFUSED_BY_LIGHTNING))
def test_lightning_with_two_batches_per_step(label: str) -> None:
    check_two_batches_per_step(label, with_lightning(CASES[label], accumulate=2))


@pytest.mark.parametrize("label", sampled_but(REFUSED_BY_LIGHTNING))
def test_lightning_in_bfloat16(label: str) -> None:
    check_bfloat16(label, with_lightning(CASES[label], is_lower=True))
