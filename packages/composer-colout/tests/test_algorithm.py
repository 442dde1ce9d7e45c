"""`ColOut` at its events, with the engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms
from torchvision.datasets import FakeData

from composer.algorithms.colout import ColOut, ColOutTransform
from composer.core import (
    AUGMENTS_IMAGES,
    MIXES_AUGMENTATIONS,
    PRUNES_BATCH,
    Algorithm,
    Engine,
    Event,
    Placement,
    State,
)
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


def drop(algorithm: ColOut, batch: Any) -> Any:
    """The batch after AFTER_DATALOADER."""
    state = State(model=SimpleModel(), max_duration="1ep", dataloader=[0], algorithms=algorithm)
    engine = Engine(state)
    state.batch = batch
    engine.run_event("after_dataloader")
    return state.batch


# ---- of a batch


def test_all_images_of_a_batch_lose_the_same_pixels() -> None:
    x, y = torch.rand(3, 32, 40).expand(4, 3, 32, 40), torch.arange(4)
    smaller, target = drop(ColOut(0.25, 0.5), (x, y))

    assert (4, 3, 24, 20) == smaller.shape
    assert torch.equal(smaller[:1].expand_as(smaller), smaller)
    assert target is y


def test_targets_that_are_images_lose_them_too() -> None:
    x = torch.rand(4, 1, 16, 16)
    smaller, target = drop(ColOut(), (x, x[:, 0]))
    same, left = drop(ColOut(resize_target=False), (x, x[:, 0]))

    assert torch.equal(smaller[:, 0], target)
    assert (4, 1, 13, 13) == same.shape
    assert torch.equal(x[:, 0], left)
    with pytest.raises(ValueError, match=r"must have the size of the input, \(16, 16\), to be resized, got \(4, 4\)"):
        drop(ColOut(resize_target=True), (x, torch.zeros(4, 4, 4)))


@pytest.mark.parametrize("target", [torch.empty(0), None, ["a", "b"]])
def test_other_targets_stay(target: Any) -> None:
    assert drop(ColOut(), (torch.rand(2, 3, 8, 8), target))[1] is target


def test_images_of_other_batches_are_found_by_key() -> None:
    batch = {"image": torch.rand(2, 3, 8, 8), "mask": torch.zeros(2, 8, 8), "id": [1, 2]}
    smaller = drop(ColOut(input_key="image", target_key="mask"), batch)

    assert ((2, 3, 6, 6), (2, 6, 6), [1, 2]) == (smaller["image"].shape, smaller["mask"].shape, smaller["id"])


def test_targets_that_stay_need_not_exist() -> None:
    assert (2, 3, 6, 6) == drop(ColOut(resize_target=False), [torch.rand(2, 3, 8, 8)])[0].shape


def test_only_tensors_lose_pixels() -> None:
    with pytest.raises(TypeError, match=r"`ColOut` drops rows and columns of a tensor .*got list. Point `input_key`"):
        drop(ColOut(), ([1, 2], None))


class Prunes(Algorithm):
    """A method that selects examples by their unchanged images."""

    events = frozenset({Event.AFTER_DATALOADER})
    placement = Placement(provides={PRUNES_BATCH}, before={"transforms_batch"})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen = state.batch[0].shape


@pytest.mark.parametrize("reverse", [False, True])
def test_methods_that_prune_the_batch_get_full_images_in_any_order_of_the_list(reverse: bool) -> None:
    prunes = Prunes()
    algorithms: list[Algorithm] = [prunes, ColOut()]
    state = State(model=SimpleModel(), max_duration="1ep", dataloader=[0])
    engine = Engine(state, algorithms=algorithms[::-1] if reverse else algorithms)
    state.batch = (torch.zeros(2, 3, 8, 8), None)
    engine.run_event("after_dataloader")

    assert (2, 3, 8, 8) == prunes.seen
    assert (2, 3, 6, 6) == state.batch[0].shape


# ---- of each image


def test_each_image_loses_its_own_before_it_becomes_a_tensor() -> None:
    pipeline = transforms.Compose([transforms.CenterCrop(16), transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
    dataset = FakeData(8, (3, 16, 16), transform=pipeline)
    assert (3, 16, 16) == dataset[0][0].shape
    start(DataLoader(dataset), ColOut(batch=False))

    assert ["CenterCrop", "ColOutTransform", "ToTensor", "Normalize"] == steps(dataset)
    assert (3, 13, 13) == dataset[0][0].shape
    assert not torch.equal(dataset[0][0], dataset[0][0])


def test_arguments_reach_the_transform(pictures: Any) -> None:
    dataset = pictures()
    start(DataLoader(dataset), ColOut(0.1, 0.2, batch=False, resize_target=False))

    assert "ColOutTransform(p_row=0.1, p_col=0.2, resize_target=False)" == repr(dataset.transform)


def test_each_mode_acts_at_its_event_only(pictures: Any) -> None:
    state = start(DataLoader(pictures()))

    others = [Event.INIT, Event.BEFORE_LOAD, Event.FIT_START]
    for batch, events in ((True, [Event.AFTER_DATALOADER]), (False, [*others, Event.AFTER_DATALOADER])):
        assert events == [each for each in Event if ColOut(batch=batch).match(each, state)]


class Augments(Algorithm):
    """A method that must come first."""

    events = frozenset({Event.FIT_START})

    def __init__(self, effect: str) -> None:
        self.placement = Placement(provides={effect})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen = state.train_dataloader.dataset.transform


@pytest.mark.parametrize("effect", [AUGMENTS_IMAGES, MIXES_AUGMENTATIONS])
@pytest.mark.parametrize("reverse", [False, True])
def test_augmented_images_lose_pixels_in_any_order_of_the_list(pictures: Any, effect: str, reverse: bool) -> None:
    augments, drops = Augments(effect), ColOut(batch=False)
    start(DataLoader(pictures()), *([drops, augments] if reverse else [augments, drops]))

    assert augments.seen is None


def test_a_loader_without_a_dataset_transform_is_refused_at_init() -> None:
    """For example, a loader of tensors on the device."""
    state = State(model=SimpleModel(), dataloader=[torch.zeros(2)], algorithms=ColOut(batch=False))

    with pytest.raises(TypeError, match=r"got list. .*ColOut.batch=True"):
        Engine(state).run_event("init")


def test_data_without_a_transform_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must have an attribute `transform`.*got TensorDataset.*`ColOutTransform`"):
        start(DataLoader(TensorDataset(torch.zeros(2))), ColOut(batch=False))
    with pytest.raises(TypeError, match=r"`train_dataloader` must be a `torch.utils.data.DataLoader`.*got list"):
        start([torch.zeros(2)], ColOut(batch=False))


def test_arguments_are_checked_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`p_row` must be in \[0, 1\], got 1.5"):
        ColOut(p_row=1.5)
    with pytest.raises(ValueError, match=r"`resize_target` must be True, False or 'auto', got 'always'"):
        ColOut(resize_target="always")
    with pytest.raises(NotImplementedError, match=r"`resize_target` must not be True with `batch=False`"):
        ColOut(batch=False, resize_target=True)


def test_the_transform_is_registered_beside_the_algorithm() -> None:
    from composer import algorithms

    assert algorithms.ColOutTransform is ColOutTransform


@pytest.mark.parametrize("shape", [(4, 16), (4,)])
def test_a_batch_that_holds_no_images_is_refused(shape: tuple[int, ...]) -> None:
    """Whole examples of token ids or rows of features would be dropped."""
    with pytest.raises(ValueError, match=r"batch of images of shape .* Point `input_key` at the images"):
        drop(ColOut(), (torch.ones(shape), torch.arange(4)))


@pytest.mark.parametrize(
    "target",
    [torch.zeros(2, 4, 4), torch.zeros(2, 5, 4), [{"boxes": torch.zeros(1, 4)}] * 2, {"mask": torch.zeros(2, 8, 8)}],
)
def test_targets_with_other_positions_are_refused(target: Any) -> None:
    with pytest.raises(ValueError, match=r"Targets with positions must have a value for each pixel .* by `ColOut`"):
        drop(ColOut(), (torch.zeros(2, 3, 8, 8), target))
