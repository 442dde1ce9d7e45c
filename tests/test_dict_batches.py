"""Batches that are dicts: methods find inputs and targets as in pairs, or an error says which keys there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from composer import Trainer
from composer.algorithms.colout import ColOut
from composer.algorithms.cutmix import CutMix
from composer.algorithms.cutout import CutOut
from composer.algorithms.distillation import Distillation
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.mixup import MixUp
from composer.algorithms.progressive_resizing import ProgressiveResizing
from composer.algorithms.selective_backprop import SelectiveBackprop
from composer.algorithms.test_time_augmentation import TestTimeAugmentation
from composer.algorithms.whitening import Whitening
from composer.algorithms.z_loss import ZLoss
from composer.core import Algorithm, DataSpec
from composer.models import ComposerClassifier, ComposerModel
from composer.testing import deep_compare

METHODS: dict[str, Callable[..., Algorithm]] = {
    "ColOut": lambda: ColOut(0.3),
    "CutMix": lambda: CutMix(alpha=1.0),
    "CutOut": lambda: CutOut(1, 0.5),
    "Distillation": lambda: Distillation(network()),
    "LabelSmoothing": lambda: LabelSmoothing(0.1),
    "MixUp": lambda: MixUp(alpha=1.0),
    "MixUp of losses": lambda: MixUp(alpha=1.0, interpolate_loss=True),
    "ProgressiveResizing": lambda: ProgressiveResizing(initial_scale=0.5, finetune_fraction=0.0, delay_fraction=0.9),
    "SelectiveBackprop": lambda: SelectiveBackprop(start=0.0, end=1.0, interrupt=0, scale_factor=0.5),
    "TestTimeAugmentation": lambda: TestTimeAugmentation(shift=1),
    "Whitening": lambda: Whitening(num_images=8),
    "ZLoss": lambda: ZLoss(0.1),
}
READERS = set(METHODS) - {"Distillation", "TestTimeAugmentation", "Whitening"}


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 24, 2),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(24, 3),
    )


class OfDicts(ComposerModel):
    """Reads images and labels by name."""

    def __init__(self, image: str = "image", label: str = "label") -> None:
        super().__init__()
        self.image, self.label = image, label
        self.layers = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 2))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.layers(batch[self.image])

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return F.cross_entropy(outputs, batch[self.label], *args, **kwargs)


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


def trained(batches: list[Any], name: str, **keys: Any) -> Any:
    trainer = Trainer(
        model=network(),
        loss=F.cross_entropy,
        train_dataloader=batches,
        eval_dataloader=batches,
        max_duration="2ep",
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        algorithms=[METHODS[name]()],
        seed=3,
        device="cpu",
        progress_bar=False,
        **keys,
    )
    trainer.fit()
    trainer.close()
    return trainer.state.model.state_dict(), trainer.state.eval_metric_values


@pytest.mark.parametrize("name", METHODS)
def test_named_parts_train_as_pairs_do(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    pairs = [
        (torch.randn(4, 3, 8, 8, generator=generator), torch.randint(3, (4,), generator=generator)) for _ in range(2)
    ]
    expected = trained(pairs, name)

    deep_compare(expected, trained([{"pixel_values": x, "labels": y} for x, y in pairs], name))
    deep_compare(expected, trained([{"a": x, "b": y} for x, y in pairs], name, input_key="a", target_key="b"))


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_method_without_a_key_for_unusual_names_lists_the_names(name: str) -> None:
    unusual = [{"picture": each["image"], "answer": each["label"]} for each in batches()]
    with pytest.raises(KeyError, match=r"keys 'picture', 'answer', and has no [01]. .* `input_key='picture'`"):
        train(OfDicts("picture", "answer"), unusual, METHODS[name]())


def test_a_classifier_says_how_to_make_pairs_of_a_dict() -> None:
    layers = OfDicts().layers
    model = ComposerClassifier(layers, num_classes=2)
    with pytest.raises(
        TypeError, match=r"pair of inputs and targets for `ComposerClassifier`, got a dict with the keys"
    ):
        train(model, batches())
    train(model, DataSpec(batches(), batch_transforms=lambda batch: (batch["image"], batch["label"])))
