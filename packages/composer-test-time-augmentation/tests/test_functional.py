"""`average_views` against crops of padded images, one view after the other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.test_time_augmentation import average_views


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classifier(height: int, width: int) -> torch.nn.Module:
    """A classifier that depends on every pixel, and on where it is."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * height * width, 4), torch.nn.Tanh()).double()


def slow_average(model: torch.nn.Module, images: torch.Tensor, shift: int) -> torch.Tensor:
    """As the section of the paper: half plain, half of crops at both corners; of each half, half are mirrored."""
    height, width = images.shape[-2:]
    padded = F.pad(images, (shift,) * 4, "reflect")
    corners = [padded[..., :height, :width], padded[..., 2 * shift :, 2 * shift :]]

    def mirrored_too(views: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = (model(views) + model(views.flip(-1))) / 2
        return result

    return (mirrored_too(images) + sum(map(mirrored_too, corners)) / 2) / 2


def test_the_function_is_registered() -> None:
    assert average_views is cf.average_views


@settings(deadline=None, max_examples=25)
@given(height=st.integers(3, 8), width=st.integers(3, 8), shift=st.integers(1, 2), seed=st.integers(0, 2**31))
def test_level_two_is_the_mean_of_crops_of_the_padded_image(height: int, width: int, shift: int, seed: int) -> None:
    model, images = classifier(height, width), draw(2, 3, height, width, seed=seed)

    torch.testing.assert_close(slow_average(model, images, shift), average_views(model, images, 2, shift))


def test_lower_levels_are_the_image_and_its_mirror_image() -> None:
    model, images = classifier(5, 6), draw(2, 3, 5, 6)

    assert torch.equal(model(images), average_views(model, images, level=0))
    torch.testing.assert_close((model(images) + model(images.flip(3))) / 2, average_views(model, images, level=1))


def test_bytes_are_moved_too() -> None:
    images = torch.arange(12, dtype=torch.uint8).view(1, 1, 3, 4)
    expected = average_views(lambda x: x.flatten(1), images.double())

    assert torch.equal(expected, average_views(lambda x: x.flatten(1).double(), images))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_averaged_in_float32(dtype: torch.dtype) -> None:
    """In 16 bits, the sum of 2048 / 8 and smaller numbers would be rounded after each view."""
    images = (100 * draw(4, 3, 8, 8)).to(dtype)
    expected = average_views(lambda x: x.double().flatten(1), images).to(dtype)
    actual = average_views(lambda x: x.flatten(1), images)

    assert dtype is actual.dtype
    torch.testing.assert_close(expected, actual, rtol=torch.finfo(dtype).eps, atol=0)


def test_the_images_are_not_modified() -> None:
    images = draw(1, 3, 4, 4)
    before = images.clone()
    average_views(classifier(4, 4), images)

    assert torch.equal(before, images)


def test_wrong_arguments_are_refused() -> None:
    model, images = classifier(4, 4), draw(1, 3, 4, 4)

    with pytest.raises(ValueError, match=r"`level` must be 0, 1 or 2, got 3"):
        average_views(model, images, level=3)
    with pytest.raises(ValueError, match=r"`shift` must be at least 1, got 0"):
        average_views(model, images, shift=0)
    with pytest.raises(ValueError, match=r"`shift` must be below the height and width.*got 4 for \(1, 3, 4, 4\)"):
        average_views(model, images, shift=4)
    with pytest.raises(ValueError, match=r"must have shape \(N, C, H, W\).*got \(3, 4, 4\)"):
        average_views(model, images[0])
    with pytest.raises(ValueError, match=r"needs logits of shape .* \(1, classes\), got \(1, 3, 4, 4\)"):
        average_views(torch.nn.Identity(), images)
