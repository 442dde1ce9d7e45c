"""Batches that are dicts, for methods and models that read them by index: the error says which keys there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from composer import Trainer
from composer.algorithms.colout import ColOut
from composer.algorithms.cutmix import CutMix
from composer.algorithms.cutout import CutOut
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.mixup import MixUp
from composer.algorithms.progressive_resizing import ProgressiveResizing
from composer.algorithms.selective_backprop import SelectiveBackprop
from composer.core import Algorithm, DataSpec
from composer.models import ComposerClassifier, ComposerModel

READERS: list[Callable[..., Algorithm]] = [
    ColOut,
    CutMix,
    CutOut,
    LabelSmoothing,
    MixUp,
    ProgressiveResizing,
    lambda **keys: SelectiveBackprop(start=0.0, end=0.5, interrupt=0, **keys),
]
IDS = ["ColOut", "CutMix", "CutOut", "LabelSmoothing", "MixUp", "ProgressiveResizing", "SelectiveBackprop"]


class OfDicts(ComposerModel):
    """Reads images and labels by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch["image"])

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, batch["label"], *args, **kwargs)


def train(model: ComposerModel, data: Any, *algorithms: Algorithm) -> None:
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        max_duration="2ba",
        algorithms=list(algorithms),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        seed=0,
        progress_bar=False,
    )
    try:
        trainer.fit()
    finally:
        trainer.close()


def batches() -> list[dict[str, torch.Tensor]]:
    return [{"image": torch.randn(4, 3, 16, 16), "label": torch.tensor([0, 1, 0, 1])} for _ in range(2)]


@pytest.mark.parametrize("make", READERS, ids=IDS)
def test_a_method_that_reads_by_index_names_the_keys_and_its_arguments(make: Callable[..., Algorithm]) -> None:
    message = r"keys 'image', 'label', and has no [01]. .* `input_key='image'` and `target_key='label'`"
    with pytest.raises(KeyError, match=message):
        train(OfDicts(), batches(), make())


@pytest.mark.parametrize("make", READERS, ids=IDS)
def test_it_trains_with_those_arguments(make: Callable[..., Algorithm]) -> None:
    keys = {"target_key": "label"} if make is LabelSmoothing else {"input_key": "image"}
    if make not in (LabelSmoothing, CutOut):
        keys["target_key"] = "label"
    train(OfDicts(), batches(), make(**keys))


def test_a_classifier_says_how_to_make_pairs_of_a_dict() -> None:
    layers = OfDicts().layers
    model = ComposerClassifier(layers, num_classes=2)
    with pytest.raises(
        TypeError, match=r"pair of inputs and targets for `ComposerClassifier`, got a dict with the keys"
    ):
        train(model, batches())
    train(model, DataSpec(batches(), batch_transforms=lambda batch: (batch["image"], batch["label"])))
