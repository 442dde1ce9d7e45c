from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from composer.datasets import load_fashion_mnist
from composer.devices import DeviceCPU
from composer.recipes.segmentation import Data, Network, make_scenes

SIZE, ITEM, COUNT = 9, 4, 40


def pictures(count: int = 5) -> tuple[Tensor, Tensor]:
    """Small items, some of whose pixels are too faint to hide anything, and their labels."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randint(0, 256, (count, 1, ITEM, ITEM), generator=generator, dtype=torch.uint8)
    images[::2] //= 4
    images[:, 0, 0, 0], images[:, 0, 0, 1] = 32, 31
    return images, torch.arange(count)


def painted(images: Tensor, labels: Tensor, count: int, size: int, items: int, noise: int, seed: int) -> list[Tensor]:
    """The slow reference: pixel by pixel, item after item.

    It draws the same numbers in the same order: the backgrounds, then for each item of all scenes which one it is, its
    first row and its first column.
    """
    generator = torch.Generator().manual_seed(seed)
    height, width = images.shape[2:]
    scenes = torch.randint(noise, (count, size, size), generator=generator).to(torch.uint8)
    classes = torch.zeros(count, size, size, dtype=torch.uint8)
    for _ in range(items):
        chosen = torch.randint(len(images), (count,), generator=generator).tolist()
        tops = torch.randint(size - height + 1, (count,), generator=generator).tolist()
        lefts = torch.randint(size - width + 1, (count,), generator=generator).tolist()
        for scene, (item, top, left) in enumerate(zip(chosen, tops, lefts, strict=True)):
            for row in range(height):
                for column in range(width):
                    if images[item, 0, row, column] >= 32:
                        scenes[scene, top + row, left + column] = images[item, 0, row, column]
                        classes[scene, top + row, left + column] = labels[item] + 1
    return [scenes[:, None], classes]


@pytest.mark.parametrize("items", [1, 3])
def test_scenes_are_those_that_are_painted_pixel_by_pixel(items: int) -> None:
    images, labels = pictures()
    expected = painted(images, labels, COUNT, SIZE, items, 20, seed=3)

    scenes, classes = make_scenes(images, labels, COUNT, size=SIZE, items=items, noise=20, seed=3)

    assert torch.equal(expected[0], scenes)
    assert torch.equal(expected[1], classes)
    assert (torch.uint8, torch.uint8) == (scenes.dtype, classes.dtype)


def test_an_item_lies_wherever_there_is_room_for_it() -> None:
    image = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)

    scenes, classes = make_scenes(image, torch.tensor([4]), 400, size=4, items=1, noise=9, seed=0)

    assert torch.equal(scenes[:, 0] == 255, classes == 5)
    assert [4] * 400 == (classes == 5).sum(dim=(1, 2)).tolist()
    corners = (classes == 5).flatten(1).int().argmax(dim=1)  # the first pixel of each
    counts = torch.bincount(corners, minlength=16).view(4, 4)[:3, :3]
    assert 400 == int(counts.sum())
    assert int(counts.min()) > 19  # 44 on average, with a standard deviation of 6.3: 4 of them


def test_the_background_is_noise_of_all_values_below_the_limit() -> None:
    faint = torch.full((1, 1, 2, 2), 31, dtype=torch.uint8)

    scenes, classes = make_scenes(faint, torch.tensor([4]), 20, size=9, items=3, noise=7, seed=0)

    assert list(range(7)) == scenes.unique().tolist()
    assert [0] == classes.unique().tolist()


def test_later_items_hide_earlier_ones_and_do_not_hide_where_they_are_faint() -> None:
    images = torch.tensor([[[[200, 200]]], [[[100, 0]]]], dtype=torch.uint8)  # the second one hides the left half
    scenes, classes = make_scenes(images, torch.tensor([0, 1]), 50, size=2, items=2, noise=1, seed=0)
    rows = {tuple(row) for scene in scenes[:, 0].tolist() for row in scene}

    # Both may lie in the same row, in either order: the second on the first, hidden by it, or each alone.
    assert {(0, 0), (200, 200), (100, 200), (100, 0)} == rows
    assert torch.equal(torch.where(scenes[:, 0] == 200, 1, torch.where(scenes[:, 0] == 100, 2, 0)), classes)


def test_the_scenes_depend_only_on_the_seed() -> None:
    images, labels = pictures()

    def make(seed: int, state: int) -> Tensor:
        torch.manual_seed(state)
        return make_scenes(images, labels, 4, size=SIZE, items=2, noise=20, seed=seed)[0]

    assert torch.equal(make(1, 1), make(1, 2))
    assert not torch.equal(make(1, 1), make(2, 1))


def test_training_and_test_scenes_are_made_of_their_own_images(data: Path) -> None:
    dataset = Data(data=data, train_samples=6, test_samples=5, batch_size=3, size=30, items=2, noise=9).load()

    for is_train, (scenes, classes), seed in ((True, dataset.train, 1), (False, dataset.test, 2)):
        images, labels = load_fashion_mnist(data, is_train)
        expected = painted(images, labels, len(scenes), 30, 2, 9, seed)
        assert torch.equal(expected[0], scenes)
        assert torch.equal(expected[1], classes)
    assert (6, 5, 11, (1, 30, 30)) == (dataset.num_train, dataset.num_test, dataset.num_classes, dataset.shape)
    assert "scenes of Fashion-MNIST: 6 images to train on, 5 to test, 1x30x30 pixels, 11 classes" == dataset.describe()


def test_test_scenes_can_be_made_of_items_held_out(data: Path) -> None:
    dataset = Data(data=data, train_samples=6, test_samples=5, batch_size=3, size=30, validation_samples=9).load()
    images, labels = load_fashion_mnist(data, True)

    for (scenes, classes), part, seed in ((dataset.train, slice(21), 1), (dataset.test, slice(21, 30), 2)):
        expected = painted(images[part], labels[part], len(scenes), 30, 4, 128, seed)
        assert torch.equal(expected[0], scenes)
        assert torch.equal(expected[1], classes)
    assert dataset.validation


def test_classes_are_moved_with_their_pixels(data: Path) -> None:
    dataset = Data(data=data, train_samples=8, test_samples=2, batch_size=8, size=40, items=1, noise=1, shift=6).load()
    train, _ = dataset.loaders(0, DeviceCPU())

    ((scenes, classes),) = train
    black = scenes.min()

    assert torch.int64 == classes.dtype
    assert torch.equal(scenes[:, 0] > black, classes > 0)  # with this noise all of the background is black
    moved = sum(not any(torch.equal(each.long(), there) for there in dataset.train[1]) for each in classes)
    assert moved == 8


def test_the_network_has_a_score_for_each_class_and_pixel(data: Path) -> None:
    dataset = Data(data=data, train_samples=4, test_samples=2, batch_size=2, size=32).load()
    model = Network(width=4, levels=2).build(dataset)
    images, classes = next(iter(dataset.loaders(0, DeviceCPU())[0]))

    scores = model((images, classes))

    assert (2, 11, 32, 32) == tuple(scores.shape)
    assert torch.isfinite(model.loss(scores, (images, classes)))


@pytest.mark.parametrize(
    ("norm", "kind"), [("batch", nn.BatchNorm2d), ("group", nn.GroupNorm), ("instance", nn.InstanceNorm2d)]
)
def test_the_network_has_the_requested_normalization(
    norm: Literal["batch", "group", "instance"], kind: type[nn.Module], data: Path
) -> None:
    dataset = Data(data=data, train_samples=4, test_samples=2, batch_size=2, size=32).load()
    model = Network(width=4, levels=2, norm=norm).build(dataset)
    kinds = {type(m) for m in model.modules() if isinstance(m, nn.BatchNorm2d | nn.GroupNorm | nn.InstanceNorm2d)}

    assert {kind} == kinds


def test_scenes_need_the_items(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="FashionMNIST was not found"):
        Data(data=tmp_path).load()
