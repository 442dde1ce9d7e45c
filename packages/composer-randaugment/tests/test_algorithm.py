"""`RandAugment` at its event, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms
from torchvision.datasets import FakeData

from composer.algorithms.randaugment import RandAugment, RandAugmentTransform
from composer.core import MIXES_AUGMENTATIONS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger
from composer.testing import SimpleModel


def start(loader: Any, *algorithms: Algorithm, fits: int = 1) -> State:
    state = State(model=SimpleModel(), max_duration="1ep", dataloader=loader, algorithms=list(algorithms))
    engine = Engine(state)
    for _ in range(fits):
        engine.run_event("fit_start")
    return state


def steps(dataset: Any) -> list[str]:
    found = getattr(dataset.transform, "transforms", [dataset.transform])
    return [type(step).__name__ for step in found]


def test_images_are_changed_before_they_become_tensors() -> None:
    pipeline = transforms.Compose([transforms.CenterCrop(16), transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
    dataset = FakeData(8, (3, 16, 16), transform=pipeline)
    before = dataset[0][0]
    start(DataLoader(dataset), RandAugment())
    torch.manual_seed(0)

    assert ["CenterCrop", "RandAugmentTransform", "ToTensor", "Normalize"] == steps(dataset)
    assert before.shape == dataset[0][0].shape
    assert not all(torch.equal(before, dataset[0][0]) for _ in range(3))


@pytest.mark.parametrize("transform", [None, transforms.ToTensor()])
def test_any_dataset_with_a_transform_works(pictures: Any, transform: Any) -> None:
    dataset = pictures(transform)
    state = start(DataLoader(dataset, collate_fn=list), RandAugment(severity=3))

    assert "RandAugmentTransform" in steps(dataset)
    assert 8 == len(list(state.train_dataloader))


def test_arguments_reach_the_transform() -> None:
    dataset = FakeData(8)
    start(DataLoader(dataset), RandAugment(severity=3, depth=1, augmentation_set="safe"))

    assert "RandAugmentTransform(severity=3, depth=1, augmentation_set='safe')" == repr(dataset.transform)


class Mixes(Algorithm):
    """A method that must follow."""

    events = frozenset({Event.FIT_START})
    placement = Placement(provides={MIXES_AUGMENTATIONS}, after={"augments_images"})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen = steps(state.train_dataloader.dataset)


@pytest.mark.parametrize("reverse", [False, True])
def test_it_comes_before_methods_that_mix_augmentations_in_any_order(pictures: Any, reverse: bool) -> None:
    mixes = Mixes()
    start(DataLoader(pictures()), *([mixes, RandAugment()] if reverse else [RandAugment(), mixes]))

    assert ["RandAugmentTransform"] == mixes.seen


def test_a_loader_without_a_suitable_dataset_is_refused_immediately() -> None:
    """Like one that keeps tensors on the device."""
    state = State(model=SimpleModel(), dataloader=[torch.zeros(2)], algorithms=RandAugment())

    with pytest.raises(TypeError, match=r"got list. .*DeviceLoader"):
        Engine(state).run_event("init")


def test_data_without_a_transform_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must have an attribute `transform`.*got TensorDataset.*`RandAugmentTransfor"):
        start(DataLoader(TensorDataset(torch.zeros(2))), RandAugment())
    with pytest.raises(TypeError, match=r"`train_dataloader` must be a `torch.utils.data.DataLoader`.*got list"):
        start([torch.zeros(2)], RandAugment())


def test_arguments_are_checked_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`severity` must be in \[0, 10\], got 11"):
        RandAugment(severity=11)
    with pytest.raises(ValueError, match=r"`depth` must not be negative, got -1"):
        RandAugment(depth=-1)
    with pytest.raises(KeyError, match=r"got 'some'"):
        RandAugment(augmentation_set="some")


def test_the_transform_is_registered_beside_the_algorithm() -> None:
    from composer import algorithms

    assert algorithms.RandAugmentTransform is RandAugmentTransform
