from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import functional as tv

from composer.datasets import ImageTransform, NormalizationFn
from composer.datasets.image_transform import crop_and_flip, cut_out

MODES = ["constant", "reflect"]


def random_images(count: int = 6, channels: int = 3, height: int = 7, width: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 256, (count, channels, height, width), generator=generator, dtype=torch.uint8)


def slow(image: Tensor, top: int, left: int, mirrored: bool, padding: int, mode: str, fill: int = 0) -> Tensor:
    """One image by torchvision."""
    options: dict[str, Any] = {"fill": fill} if mode == "constant" else {}
    padded = tv.pad(image, [padding] * 4, padding_mode=mode, **options)
    cropped = tv.crop(padded, top, left, *image.shape[1:])
    return tv.hflip(cropped) if mirrored else cropped


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=30)
@given(data=st.data(), padding=st.integers(0, 6), fill=st.integers(0, 9))
def test_a_gather_equals_torchvision_image_by_image(mode: str, data: st.DataObject, padding: int, fill: int) -> None:
    images = random_images()
    places = st.lists(st.integers(0, 2 * padding), min_size=6, max_size=6)
    top, left = data.draw(places), data.draw(places)
    mirrored = data.draw(st.lists(st.booleans(), min_size=6, max_size=6))
    before = images.clone()

    batch = crop_and_flip(
        images, torch.tensor(top), torch.tensor(left), torch.tensor(mirrored), padding, mode, fill=fill
    )

    expected = [slow(*each, padding, mode, fill) for each in zip(images, top, left, mirrored, strict=True)]
    assert torch.equal(torch.stack(expected), batch)
    assert torch.equal(before, images)


@given(st.lists(st.tuples(st.integers(-3, 8), st.integers(-3, 9)), min_size=2, max_size=2), st.integers(1, 5))
def test_squares_are_cut_pixel_by_pixel(places: list[tuple[int, int]], size: int) -> None:
    images = random_images(2).float()
    expected = images.clone()
    for image, (top, left) in zip(expected, places, strict=True):
        for row in range(max(top, 0), min(top + size, 7)):
            for column in range(max(left, 0), min(left + size, 9)):
                image[:, row, column] = 0.0
    top, left = torch.tensor(places).unbind(1)

    assert torch.equal(expected, cut_out(images, top, left, size))


def apply(transform: ImageTransform, images: Tensor, targets: Tensor | None = None, seed: int = 0) -> Any:
    drawn = transform.draw(images.shape, torch.Generator().manual_seed(seed))
    return transform(images, targets, drawn)


def test_shifts_flips_and_squares_are_uniform_and_independent() -> None:
    transform = ImageTransform(flip=True, padding=2, cutout=1)
    drawn = transform.draw(torch.Size((20_000, 1, 6, 8)), torch.Generator().manual_seed(0))

    for values, limit in zip(drawn, (5, 5, 2, 6, 8), strict=True):
        counts = values.bincount(minlength=limit).double()
        assert limit == len(counts)
        assert (counts / 20_000 - 1 / limit).abs().max() < 0.02
    correlation = torch.corrcoef(torch.stack(drawn).double()) - torch.eye(5)
    assert correlation.abs().max() < 0.03


def test_a_square_is_centred_on_its_place_and_zero_after_normalisation() -> None:
    transform = ImageTransform(cutout=3, mean=[100.0], std=[50.0])
    images = torch.full((1, 1, 9, 9), 200, dtype=torch.uint8)
    place = (torch.tensor([4]), torch.tensor([0]))

    out = transform(images, None, place)[0, 0]

    expected = torch.full((9, 9), 2.0)
    expected[3:6, :2] = 0.0
    assert torch.equal(expected, out)


def test_normalisation_is_that_of_normalization_fn() -> None:
    images = random_images()
    mean, std = [120.0, 110.0, 100.0], [60.0, 61.0, 62.0]
    expected, _ = NormalizationFn(mean, std)((images, torch.zeros(6)))

    assert torch.equal(expected, apply(ImageTransform(mean=mean, std=std), images))
    assert torch.equal(expected.bfloat16(), apply(ImageTransform(mean=mean, std=std, dtype=torch.bfloat16), images))


def test_without_arguments_images_stay_as_they_are() -> None:
    images = random_images()

    assert images.dtype == apply(ImageTransform(), images).dtype
    assert torch.equal(images, apply(ImageTransform(), images))
    assert torch.float16 == apply(ImageTransform(dtype=torch.float16), images).dtype


def test_channels_last_is_only_another_layout() -> None:
    images = random_images()
    options: dict[str, Any] = {"flip": True, "padding": 2, "mean": [1.0] * 3, "std": [2.0] * 3}
    plain = apply(ImageTransform(**options), images)
    channels_last = apply(ImageTransform(**options, memory_format=torch.channels_last), images)

    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, channels_last)


def test_targets_with_a_class_per_pixel_move_with_their_images() -> None:
    images = random_images(50, channels=1)
    masks = images[:, 0].clone()
    moved, targets = apply(ImageTransform(flip=True, padding=3, ignore_index=0), images, masks)
    _, ignored = apply(ImageTransform(padding=3), images, masks)

    assert torch.equal(moved[:, 0].long(), targets)
    assert -100 == ignored.min()


def test_class_indices_are_passed_on() -> None:
    labels = torch.arange(6)

    assert apply(ImageTransform(flip=True), random_images(), labels)[1] is labels


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"padding": -1}, "`padding` must not be negative, got -1"),
        ({"cutout": -1}, "`cutout` must not be negative, got -1"),
        ({"padding_mode": "wrap"}, "`padding_mode` must be one of constant, reflect, got 'wrap'"),
        ({"mean": [1.0]}, "`mean` and `std` must be given together"),
        ({"mean": [1.0], "std": [1.0, 2.0]}, "one value per channel each"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageTransform(**arguments)


def test_an_image_cannot_be_shifted_out_of_itself() -> None:
    with pytest.raises(ValueError, match="`padding` must be below the size of the images, 7 x 9, got 7"):
        apply(ImageTransform(padding=7), random_images())


def test_targets_with_a_value_per_class_and_pixel_move_with_their_images() -> None:
    images = torch.randint(1, 256, (6, 3, 8, 8), dtype=torch.uint8)
    moved, targets = apply(ImageTransform(flip=True, padding=3), images, images.float())

    assert torch.equal(moved.float(), targets)


def test_boxes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Targets with positions .* by `ImageTransform`, got shape \(2, 5, 4\)"):
        apply(ImageTransform(flip=True), torch.zeros(2, 3, 8, 8), torch.zeros(2, 5, 4))
