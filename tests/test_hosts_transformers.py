"""Every algorithm inside the `Trainer` of transformers: the weights of our `Trainer`, or a refusal that says why."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from algorithm_runs import ARGUMENTS, LANGUAGE, Captioned, Classifier, captioned, make, noise
from test_hosted_run import (
    BATCH,
    CASES,
    EPOCHS,
    LENGTH,
    OF_TEN_STEPS,
    SEED,
    Shuffled,
    check_bfloat16,
    check_two_batches_per_step,
    clone,
    precision_of,
    refused_when_constructed,
    sampled_but,
    sgd,
    with_trainer,
)
from torch.utils.data import DataLoader, default_collate

from composer.algorithms.warnings import NoEffectWarning, NotIntendedUseWarning
from composer.core import Precision
from composer.hosts.huggingface import ComposerTrainer
from composer.loss import soft_cross_entropy
from composer.testing import deep_compare

REFUSED_BY_TRANSFORMERS = {
    "BatchSizeWarmup": "The host loads and counts batches in advance",
    **dict.fromkeys(("Muon", "SOAP", "ScheduleFree"), "Create that optimizer yourself and pass it"),
    "NoOpModel": "Pass the model that you want to train",
    "ScaleSchedule": "Set `num_train_epochs` or `max_steps`",
    "TestTimeAugmentation": "`prediction_step` runs the model itself",
}


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> Iterator[None]:
    """Each `train` collects garbage, which takes long with the objects of all imported modules."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def quiet() -> Any:
    with warnings.catch_warnings():
        for category in (NoEffectWarning, NotIntendedUseWarning):
            warnings.simplefilter("ignore", category)
        yield


class Hosted(Classifier):
    """Takes what transformers passes."""

    def forward(self, image: Any) -> Any:  # type: ignore[override]
        return self.vision(image)


class HostedCaptioned(Captioned):
    """The same, with texts."""

    def forward(self, **inputs: Any) -> Any:  # type: ignore[override]
        return super().forward(inputs)


def criterion(outputs: Any, labels: Any, num_items_in_batch: Any = None, reduction: str = "mean") -> torch.Tensor:
    return soft_cross_entropy(outputs, labels, reduction=reduction)


def collate(is_text: bool, examples: Any) -> dict[str, Any]:
    if is_text:
        batch = captioned(examples)
        return {**{key: value for key, value in batch.items() if key != "label"}, "labels": batch["label"]}
    images, labels = default_collate(examples)
    return {"image": images, "labels": labels}


def algorithms_of(names: Sequence[str]) -> list[Any]:
    keys = {"input_key": "image", "target_key": "labels"}
    return [make(name, keys, {**ARGUMENTS.get(name, {}), **OF_TEN_STEPS.get(name, {})}) for name in names]


class InTransformers(ComposerTrainer):
    """Iterates over the batches of the other loops, and computes means."""

    loss_is_scaled_for_ga = False
    loader: Any = None

    def get_train_dataloader(self) -> Any:
        return self.loader


def with_transformers(names: Sequence[str], folder: Any, is_lower: bool = False, accumulate: int = 1) -> dict[str, Any]:
    is_text = bool(set(names) & LANGUAGE)
    model: Any = HostedCaptioned() if is_text else Hosted()
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH // accumulate,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.0,
        bf16=precision_of(names, is_lower) is Precision.AMP_BF16,
        seed=SEED,
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    optimizer = sgd(model)
    schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = InTransformers(
        model,
        arguments,
        optimizers=(optimizer, schedule),
        compute_loss_func=criterion,
        algorithms=algorithms_of(names),
    )
    data, generator = noise(BATCH * LENGTH), torch.Generator().manual_seed(11)
    trainer.loader = DataLoader(
        data,
        batch_size=BATCH // accumulate,
        sampler=Shuffled(data, generator),
        generator=generator,
        collate_fn=functools.partial(collate, is_text),
        **({"num_workers": 1} if {"AugMix", "RandAugment"} & set(names) else {}),
    )
    trainer.train()
    return clone(model.state_dict())


@pytest.mark.parametrize("label", CASES)
def test_transformers_gives_the_weights_of_our_trainer(label: str, tmp_path: Any) -> None:
    if label in REFUSED_BY_TRANSFORMERS:
        with refused_when_constructed("huggingface", REFUSED_BY_TRANSFORMERS[label]):
            with_transformers(CASES[label], tmp_path)
    else:
        deep_compare(with_trainer(CASES[label]), with_transformers(CASES[label], tmp_path))


@pytest.mark.parametrize("label", sampled_but(REFUSED_BY_TRANSFORMERS))
def test_transformers_with_two_batches_per_step(label: str, tmp_path: Any) -> None:
    check_two_batches_per_step(label, with_transformers(CASES[label], tmp_path, accumulate=2))


@pytest.mark.parametrize("label", sampled_but(REFUSED_BY_TRANSFORMERS))
def test_transformers_in_bfloat16(label: str, tmp_path: Any) -> None:
    check_bfloat16(label, with_transformers(CASES[label], tmp_path, is_lower=True), float32_outputs=True)
