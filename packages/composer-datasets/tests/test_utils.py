from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision import transforms
from torchvision.datasets import FakeData
from torchvision.transforms import v2

from composer.datasets import NormalizationFn, pil_image_collate
from composer.datasets._missing import require
from composer.datasets.utils import add_vision_dataset_transform
from composer.utils import add_vision_dataset_transform as of_core


def test_images_are_normalised_channel_by_channel() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    before, targets = images.clone(), torch.tensor([0, 7])
    mean, std = [1.0, 2.0, 3.0], [4.0, 5.0, 6.0]
    normalized, same = NormalizationFn(mean, std)((images, targets))

    expected = torch.stack([(images[:, c].float() - mean[c]) / std[c] for c in range(3)], dim=1)
    assert torch.equal(expected, normalized)
    assert same is targets
    assert torch.equal(before, images)


def test_floats_are_not_written_to_and_layouts_are_kept() -> None:
    images = torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    normalized, _ = NormalizationFn([1.0] * 3, [2.0] * 3, dtype=torch.bfloat16)((images, torch.zeros(2)))

    assert torch.equal(torch.ones(2, 3, 4, 5), images)
    assert torch.bfloat16 == normalized.dtype
    assert normalized.is_contiguous(memory_format=torch.channels_last)
    assert 0 == normalized.abs().max()


def test_the_background_becomes_a_class_to_ignore() -> None:
    targets = torch.tensor([[0, 1, 150]])
    _, lowered = NormalizationFn([0.0], [1.0], ignore_background=True)((torch.zeros(1, 1, 2, 2), targets))

    assert [[-1, 0, 149]] == lowered.tolist()
    assert [[0, 1, 150]] == targets.tolist()


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ([1.0], [1.0, 2.0], "one value per channel"),
        ([], [], "one value per channel"),
        ([1.0], [0.0], "`std` must be positive"),
    ],
)
def test_bad_constants_are_refused(mean: Any, std: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NormalizationFn(mean, std)


def test_another_number_of_channels_is_refused() -> None:
    with pytest.raises(ValueError, match="must have 1 channels, like `mean`, got shape"):
        NormalizationFn([1.0], [1.0])((torch.zeros(1, 3, 2, 2), torch.zeros(1)))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_images_are_collated_as_bytes(mode: str, memory_format: torch.memory_format) -> None:
    shape = (4, 5, 3) if mode == "RGB" else (4, 5)
    pixels = [np.random.default_rng(i).integers(0, 256, shape, dtype=np.uint8) for i in range(3)]
    pairs = [(Image.fromarray(each), index) for index, each in enumerate(pixels)]
    images, targets = pil_image_collate(pairs, memory_format)

    assert torch.uint8 == images.dtype
    assert images.is_contiguous(memory_format=memory_format)
    for image, each in zip(images, pixels, strict=True):
        assert np.array_equal(each.reshape(4, 5, -1).transpose(2, 0, 1), image.numpy())
    assert torch.equal(torch.arange(3), targets)


def test_annotations_are_collated_as_class_indices() -> None:
    annotation = Image.fromarray(np.full((4, 5), 200, dtype=np.uint8))
    _, targets = pil_image_collate([(Image.new("RGB", (5, 4)), annotation)])

    assert (1, 4, 5) == targets.shape
    assert torch.int64 == targets.dtype
    assert 200 == targets.min() == targets.max()


def test_images_of_different_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="images of a batch must have the same shape"):
        pil_image_collate([(Image.new("RGB", (5, 4)), 0), (Image.new("L", (5, 4)), 0)])
    with pytest.raises(ValueError, match="targets of a batch must have the same shape"):
        pil_image_collate([(Image.new("L", (5, 4)), 0), (Image.new("L", (5, 4)), Image.new("L", (2, 2)))])
    with pytest.raises(ValueError, match="at least one pair"):
        pil_image_collate([])


def test_add_vision_dataset_transform_is_that_of_core() -> None:
    assert add_vision_dataset_transform is of_core


@pytest.mark.parametrize("is_tensor_transform", [False, True])
@pytest.mark.parametrize("version", [transforms, v2], ids=["v1", "v2"])
def test_a_transform_is_added_before_or_after_the_tensor(is_tensor_transform: bool, version: Any) -> None:
    seen = []

    def mirror(image: Any) -> Any:
        seen.append(type(image))
        return image.flip(2) if isinstance(image, torch.Tensor) else ImageOps.mirror(image)

    make = transforms.PILToTensor if version is transforms else v2.ToImage
    steps = version.Compose([version.RandomHorizontalFlip(1.0), make(), version.RandomVerticalFlip(1.0)])
    dataset, plain = (FakeData(2, (3, 4, 5), transform=each) for each in (steps, make()))
    add_vision_dataset_transform(dataset, mirror, is_tensor_transform)

    assert torch.equal(plain[1][0].flip(1), dataset[1][0])  # mirrored twice, and turned upside down
    assert [is_tensor_transform] == [issubclass(each, torch.Tensor) for each in seen]


def test_a_missing_dependency_of_an_optional_package_is_reported_as_such(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacks_something.py").write_text("import what_is_not_there")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'what_is_not_there'"):
        require("lacks_something", "This", "extra")
