from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from composer.recipes._batches import EvalBatches, TrainBatches

UNSCALED = {"mean": torch.zeros(1), "std": torch.ones(1)}


def loader(images: Tensor, labels: Tensor | None = None, **arguments: Any) -> TrainBatches:
    labels = torch.arange(len(images)) if labels is None else labels
    return TrainBatches(images, labels, **{"batch_size": 4, **UNSCALED, **arguments})


def random_images(count: int, channels: int = 1, size: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 256, (count, channels, size, size), generator=generator, dtype=torch.uint8)


def labels_of(batches: TrainBatches) -> list[int]:
    return [int(label) for _, labels in batches for label in labels]


def moved(image: Tensor, down: int, right: int) -> Tensor:
    """The slow reference: every pixel on its own; what comes in is black."""
    result = torch.zeros_like(image)
    _, height, width = image.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row - down < height and 0 <= column - right < width:
                result[:, row, column] = image[:, row - down, column - right]
    return result


def test_an_epoch_takes_every_image_once_in_another_order_than_the_one_before() -> None:
    batches = loader(random_images(12))

    first, second = labels_of(batches), labels_of(batches)

    assert list(range(12)) == sorted(first) == sorted(second)
    assert first != second


def test_what_does_not_fill_a_batch_is_left_out_of_the_epoch() -> None:
    batches = loader(random_images(11))

    assert len(batches) == 2
    assert len(set(labels_of(batches))) == 8


def test_without_shifts_images_come_as_they_are() -> None:
    images = random_images(8, channels=3)

    for batch, labels in loader(images):
        assert torch.equal(images[labels].float(), batch)


def test_every_shift_up_to_the_limit_occurs_and_nothing_else() -> None:
    images = random_images(1).expand(400, -1, -1, -1)
    expected = {(down, right): moved(images[0], down, right).float() for down in (-1, 0, 1) for right in (-1, 0, 1)}
    counts = dict.fromkeys(expected, 0)

    for batch, _ in loader(images, shift=1):
        for image in batch:
            counts[next(place for place, shifted in expected.items() if torch.equal(shifted, image))] += 1

    assert sum(counts.values()) == 400
    assert min(counts.values()) > 20  # 44 on average: 4 standard deviations


def test_about_half_of_the_images_are_mirrored() -> None:
    images = random_images(1).expand(400, -1, -1, -1)
    mirrored = sum(
        torch.equal(image, images[0].flip(2).float()) for batch, _ in loader(images, flip=True) for image in batch
    )

    assert 160 < mirrored < 240  # 4 standard deviations


def test_channels_are_normalised_each_on_its_own() -> None:
    images = random_images(4, channels=2)
    mean, std = torch.tensor([10.0, 20.0]), torch.tensor([2.0, 4.0])

    (train, labels), *_ = loader(images, mean=mean, std=std)
    (test, _), *_ = EvalBatches(images, labels, batch_size=4, mean=mean, std=std)

    assert torch.equal((images[labels][:, 1].float() - 20) / 4, train[:, 1])
    assert torch.equal((images[:, 0].float() - 10) / 2, test[:, 0])


def test_the_seed_alone_decides_the_batches() -> None:
    images = random_images(12)
    torch.manual_seed(1)
    first = [batch.clone() for _ in range(2) for batch, _ in loader(images, shift=2, flip=True, seed=5)]
    torch.manual_seed(2)
    second = [batch.clone() for _ in range(2) for batch, _ in loader(images, shift=2, flip=True, seed=5)]
    other = next(iter(loader(images, shift=2, flip=True, seed=6)))[0]

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], other)


def test_the_images_are_not_changed() -> None:
    images = random_images(8)
    before = images.clone()
    for batch, _ in (*loader(images), *EvalBatches(images, torch.arange(8), batch_size=8, **UNSCALED)):
        batch.zero_()

    assert torch.equal(before, images)


def test_testing_takes_all_images_in_their_order() -> None:
    batches = EvalBatches(random_images(10), torch.arange(10), batch_size=4, **UNSCALED)

    assert len(batches) == 3
    assert list(range(10)) == [int(label) for _, labels in batches for label in labels]


@pytest.mark.parametrize("batch_size", [0, 9])
def test_a_batch_holds_from_one_to_all_images(batch_size: int) -> None:
    with pytest.raises(ValueError, match="`batch_size` must be from 1 to the number of training images, 8"):
        loader(random_images(8), batch_size=batch_size)


@pytest.mark.parametrize("shift", [-1, 6])
def test_an_image_cannot_be_shifted_out_of_itself(shift: int) -> None:
    with pytest.raises(ValueError, match="`shift` must be from 0 to below the size of the images, 6"):
        loader(random_images(8), shift=shift)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_batches_of_one_process(world_size: int) -> None:
    images, arguments = random_images(8), {"shift": 1, "flip": True, "seed": 5}
    whole = [*loader(images, **arguments), *EvalBatches(images, torch.arange(8), batch_size=8, **UNSCALED)]
    shares = []
    for rank in range(world_size):
        ranks = {"rank": rank, "world_size": world_size}
        test = EvalBatches(images, torch.arange(8), batch_size=8, **UNSCALED, **ranks)
        shares.append([*loader(images, **arguments, **ranks), *test])

    for batch, (inputs, labels) in enumerate(whole):
        for rank, share in enumerate(shares):
            assert torch.equal(share[batch][0], inputs[rank::world_size])
            assert torch.equal(share[batch][1], labels[rank::world_size])


def test_every_rank_needs_an_image_of_each_batch() -> None:
    with pytest.raises(ValueError, match="must be from the number of processes, 5, to the number of training images"):
        loader(random_images(8), world_size=5)
