"""Methods that add transforms to one data set give one pipeline, whatever the order of listing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import FakeData

from composer import Trainer
from composer.algorithms import AugMix, ColOut, RandAugment
from composer.core import Algorithm
from composer.datasets import DeviceLoader
from composer.models import ComposerClassifier
from composer.testing import deep_compare

MAKERS = {"RandAugment": RandAugment, "AugMix": AugMix, "ColOut": lambda: ColOut(batch=False)}
ORDERED = ["RandAugmentTransform", "AugmentAndMixTransform", "ColOutTransform", "ToTensor"]


def train(names: tuple[str, ...], num_workers: int = 0) -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(4, 4)
    )
    dataset = FakeData(16, (3, 16, 16), num_classes=4, transform=transforms.ToTensor())
    algorithms: list[Algorithm] = [MAKERS[name]() for name in names]
    trainer = Trainer(
        model=ComposerClassifier(model, num_classes=4),
        train_dataloader=DataLoader(
            dataset, batch_size=4, num_workers=num_workers, persistent_workers=bool(num_workers)
        ),
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=algorithms,
        progress_bar=False,
        device="cpu",
        seed=3,
    )
    trainer.fit()
    trainer.fit(duration="1ep")
    trainer.close()
    return {"steps": [type(step).__name__ for step in dataset.transform.transforms], "weights": model.state_dict()}


@pytest.mark.parametrize("number", [2, 3])
def test_every_order_gives_the_same_images_and_a_second_fit_adds_nothing(number: int) -> None:
    for names in itertools.combinations(MAKERS, number):
        first, *others = [train(order) for order in itertools.permutations(names)]
        for other in others:
            deep_compare(first, other)
        assert len(names) + 1 == len(first["steps"])
        assert first["steps"] == [step for step in ORDERED if step in first["steps"]]


def test_workers_that_persist_give_the_same_in_every_order() -> None:
    first, second = (train(order, num_workers=1) for order in (("ColOut", "AugMix"), ("AugMix", "ColOut")))

    deep_compare(first, second)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("RandAugment", "ImageTransform"), ("AugMix", "ImageTransform"), ("ColOut", r"Use `ColOut\(batch=True\)`")],
)
def test_the_trainer_says_at_construction_what_to_use_with_a_loader_on_the_device(name: str, advice: str) -> None:
    images = torch.zeros(8, 3, 16, 16, dtype=torch.uint8)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 4))
    with pytest.raises(TypeError, match=f"got DeviceLoader.*{advice}"):
        Trainer(
            model=ComposerClassifier(model, num_classes=4),
            train_dataloader=DeviceLoader(images, torch.zeros(8, dtype=torch.int64), batch_size=4),
            max_duration="1ep",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            algorithms=MAKERS[name](),
            progress_bar=False,
            device="cpu",
        )
