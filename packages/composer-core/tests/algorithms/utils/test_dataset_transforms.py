"""Transforms are added to the data set behind a loader, once and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, random_split
from torchvision.datasets import VisionDataset

from composer.algorithms.utils import (
    add_dataset_transform,
    add_training_transform,
    check_training_transform,
    has_dataset_transform,
)
from composer.core import Evaluator, State


class Images(Dataset[Any]):
    """Ten numbers, with a transform."""

    def __init__(self, transform: Any = None) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return index if self.transform is None else self.transform(index)


class Vision(VisionDataset):
    """The same, as torchvision makes them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(".", **kwargs)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return index if self.transforms is None else self.transforms(index, 0)[0]


def add_100(number: int) -> int:
    return number + 100


def double(number: int) -> int:
    return 2 * number


@pytest.mark.parametrize("dataset", [Images(), Vision()])
def test_a_transform_is_added_once(dataset: Any) -> None:
    loader = DataLoader(dataset, batch_size=10)
    assert not has_dataset_transform(loader, add_100)

    for transform in (add_100, double, add_100, double):
        add_dataset_transform(loader, transform)

    assert has_dataset_transform(loader, add_100)
    assert 2 * (1 + 100) == dataset[1]
    assert [2 * (i + 100) for i in range(10)] == next(iter(loader)).tolist()


def test_a_transform_is_found_inside_others() -> None:
    inner = SimpleNamespace(transforms=[add_100])
    loader = DataLoader(Images(SimpleNamespace(transforms=[double, inner])))

    assert has_dataset_transform(loader, add_100)


def test_other_subsets_of_a_dataset_are_unchanged() -> None:
    """A random split is the usual way to a validation set, whose images must stay as they are."""
    whole = Images()
    train, test = random_split(whole, [8, 2], generator=torch.Generator().manual_seed(0))
    add_dataset_transform(DataLoader(train), add_100)

    assert min(train[i] for i in range(8)) >= 100
    assert max(test[i] for i in range(2)) < 100
    assert whole.transform is None


def test_subsets_of_subsets_are_unchanged_too() -> None:
    middle = Subset(Images(), range(6))
    train, test = Subset(middle, range(4)), Subset(middle, [4, 5])
    loader = DataLoader(train)
    add_dataset_transform(loader, add_100)
    add_dataset_transform(loader, add_100)

    assert [100, 101, 102, 103] == [train[i] for i in range(4)]
    assert [4, 5] == [test[i] for i in range(2)]
    assert 0 == middle[0]


def test_workers_that_already_run_are_replaced() -> None:
    loader = DataLoader(Images(), batch_size=10, num_workers=1, persistent_workers=True)
    assert list(range(10)) == next(iter(loader)).tolist()
    add_dataset_transform(loader, add_100)

    for _ in range(2):
        assert list(range(100, 110)) == next(iter(loader)).tolist()


def test_data_without_a_transform_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`train_dataloader` must be .* `dataset` like one, got list. Or apply `func"):
        add_dataset_transform([1], add_100)
    for dataset in (TensorDataset(torch.zeros(2)), Subset(TensorDataset(torch.zeros(2)), [0])):
        with pytest.raises(
            TypeError, match=r"must have an attribute `transform`, or be .*, got TensorDataset. Add the attribute"
        ):
            add_dataset_transform(DataLoader(dataset), add_100)
    assert not has_dataset_transform([1], add_100)


def test_joint_transforms_would_ignore_it() -> None:
    dataset = Vision(transforms=lambda image, target: (image, target))
    with pytest.raises(ValueError, match=r"must not have joint `transforms` of images and targets, got <function"):
        add_dataset_transform(DataLoader(dataset), add_100)


ADVICE = "Do something else."


def run_on(loader: Any, *evaluated: Any) -> State:
    state = State(model=torch.nn.Linear(1, 1))
    state.set_dataloader(loader, "train")
    state.evaluators = [Evaluator(label=f"e{i}", dataloader=DataLoader(data)) for i, data in enumerate(evaluated)]
    return state


def test_a_loop_that_sets_only_the_active_loader_trains_on_it() -> None:
    dataset, other = Images(), Images()
    state = run_on(DataLoader(dataset))
    add_training_transform(state, add_100, ADVICE)
    state.train_dataloader = DataLoader(other)
    add_training_transform(state, double, ADVICE)

    assert [101, 2] == [dataset[1], other[1]]


def test_a_data_set_that_is_evaluated_too_is_refused() -> None:
    whole = Images()
    part = Subset(whole, [0, 1])
    shared = [
        (whole, whole),
        (whole, part),
        (part, part),
        (whole, ConcatDataset([Images(), part])),
        (part, Subset(part, [0])),
    ]
    for train, evaluated in shared:
        state = run_on(DataLoader(train), Images(), evaluated)
        with pytest.raises(ValueError, match=r"must not be shared with the evaluator 'e1'.*separate dataset object"):
            check_training_transform(state, add_100, ADVICE)
        with pytest.raises(ValueError, match=r"must not be shared"):
            add_training_transform(state, add_100, ADVICE)
    assert whole.transform is None


def test_training_on_a_subset_of_the_evaluated_dataset_is_allowed() -> None:
    whole = Images()
    train = Subset(whole, [1])
    add_training_transform(run_on(DataLoader(train), whole, Subset(whole, [1])), add_100, ADVICE)

    assert [101, 1] == [train[0], whole[1]]


def test_the_check_gives_advice_and_needs_no_dataloader() -> None:
    check_training_transform(State(model=torch.nn.Linear(1, 1)), add_100, ADVICE)
    for loader in ([1], DataLoader(TensorDataset(torch.zeros(2)))):
        with pytest.raises(TypeError, match=ADVICE):
            check_training_transform(run_on(loader), add_100, ADVICE)
