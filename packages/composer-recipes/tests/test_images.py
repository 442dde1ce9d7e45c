from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from composer.datasets import load_cifar10, load_fashion_mnist
from composer.devices import DeviceCPU
from composer.recipes import cifar10_resnet9, digits, fashion_mnist, segmentation
from composer.recipes._images import Augmentation, ImageSet, first, per_process, standardization


def random_set(count: int = 12, channels: int = 3, size: int = 6, batch_size: int = 4, **how: Any) -> ImageSet:
    """Images whose labels are their numbers."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (count, channels, size, size), generator=generator, dtype=torch.uint8)
    pair = images, torch.arange(count)
    return ImageSet("random", pair, pair, count, batch_size, Augmentation(**how))


def standardized(images: Tensor, of: Tensor) -> np.ndarray:
    """The slow reference, by numpy in double precision."""
    pixels = of.numpy().astype(np.float64)
    mean, std = (value(pixels, axis=(0, 2, 3))[:, None, None] for value in (np.mean, np.std))
    result: np.ndarray = (images.numpy() - mean) / std
    return result


def on_process(rank: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this be one of several processes of a launcher."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(count))


def test_the_digits_are_split_at_both_ends_and_doubled_in_size() -> None:
    pixels, labels = load_digits(return_X_y=True)

    images = digits.Data().load()

    assert (500, 1, 16, 16) == tuple(images.train[0].shape)
    assert (797, 1, 16, 16) == tuple(images.test[0].shape)
    assert labels[:500].tolist() == images.train[1].tolist()
    assert labels[1000:].tolist() == images.test[1].tolist()
    assert (10, (1, 16, 16), 50) == (images.num_classes, images.shape, images.batch_size)
    brightness = images.test[0].double().mean(dim=(1, 2, 3)) / 255 * 16
    # Bilinear doubling keeps the weight of all pixels but those at the border; rounding to bytes moves a mean by less
    # than half a step, 16 / 255 / 2 = 0.03.
    assert torch.allclose(torch.tensor(pixels[1000:].mean(axis=1)), brightness, rtol=0, atol=0.05)


def test_mean_and_deviation_are_those_of_all_pixels_of_a_channel() -> None:
    images = random_set(40).train[0]
    pixels = images.numpy().astype(np.float64)

    mean, std = standardization(images)

    # Double precision: sums of at most 1440 bytes.
    assert np.allclose(pixels.mean(axis=(0, 2, 3)), mean, rtol=1e-12, atol=0)
    assert np.allclose(pixels.std(axis=(0, 2, 3)), std, rtol=1e-12, atol=0)


def test_a_channel_without_contrast_is_not_divided_by_zero() -> None:
    images = random_set(8, channels=2).train[0].clone()
    images[:, 1] = 77

    mean, std = standardization(images)
    train, _ = ImageSet("flat", (images, torch.arange(8)), (images, torch.arange(8)), 8, 4, Augmentation()).loaders(
        0, DeviceCPU()
    )

    assert (77.0, 1.0) == (mean[1], std[1])
    for batch, _labels in train:
        assert batch.isfinite().all()
        assert torch.equal(torch.zeros(4, 6, 6), batch[:, 1])


def test_both_parts_are_standardized_by_the_training_images_and_only_training_is_shuffled() -> None:
    images = random_set(10)
    other = random_set(7).test[0] // 2
    dataset = ImageSet("random", images.train, (other, torch.arange(7)), 10, 4, Augmentation())

    train, test = dataset.loaders(3, DeviceCPU())
    epochs = [[int(label) for _, labels in train for label in labels] for _ in range(2)]

    assert [len(set(epoch)) for epoch in epochs] == [8, 8]  # what does not fill a batch is left out
    assert epochs[0] != epochs[1]
    for batch, labels in train:
        # float32: one subtraction and one product, of values up to a few units
        np.testing.assert_allclose(standardized(images.train[0][labels], images.train[0]), batch, rtol=1e-5, atol=1e-6)
    ((batch, labels),) = test
    assert list(range(7)) == labels.tolist()
    np.testing.assert_allclose(standardized(other, images.train[0]), batch, rtol=1e-5, atol=1e-6)


def moved(image: Tensor, down: int, right: int) -> Tensor:
    """The slow reference: every pixel on its own; what comes in is black."""
    result = torch.zeros_like(image)
    _, height, width = image.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row - down < height and 0 <= column - right < width:
                result[:, row, column] = image[:, row - down, column - right]
    return result


def test_training_images_are_shifted_and_mirrored_and_test_images_are_not() -> None:
    image = random_set(1, channels=1, batch_size=1).train[0]
    images = image.expand(450, -1, -1, -1).contiguous()
    dataset = ImageSet("one", (images, torch.arange(450)), (images, torch.arange(450)), 450, 450, Augmentation(1, True))
    shifts = [moved(image[0], down, right) for down in (-1, 0, 1) for right in (-1, 0, 1)]
    mean, std = standardization(images)
    expected = [(each.float() - mean[0]) / std[0] for shift in shifts for each in (shift, shift.flip(2))]

    train, test = dataset.loaders(0, DeviceCPU())
    ((batch, _),) = train
    counts = [sum(torch.allclose(each, got, atol=1e-5) for got in batch) for each in expected]

    assert 450 == sum(counts)
    assert min(counts) > 5  # 25 on average, with a standard deviation of 4.9: 4 of them
    for unchanged, _labels in test:
        assert torch.allclose(expected[8].expand_as(unchanged), unchanged, atol=1e-5)


def test_squares_are_cut_out_of_training_images() -> None:
    images = torch.full((6, 1, 8, 8), 200, dtype=torch.uint8)
    images[0] = 0  # so that the mean is another value
    pair = images, torch.arange(6)
    train, _ = ImageSet("flat", pair, pair, 6, 6, Augmentation(cutout=3)).loaders(0, DeviceCPU())

    ((batch, _),) = train

    cut = (batch == 0).sum(dim=(1, 2, 3))
    assert cut.max() <= 9
    assert cut.min() >= 1  # the centre is inside


def test_the_batches_depend_only_on_the_seed() -> None:
    dataset = random_set(shift=2, flip=True)

    def batches(seed: int, state: int) -> list[Tensor]:
        torch.manual_seed(state)
        train, _ = dataset.loaders(seed, DeviceCPU())
        return [batch for _ in range(2) for batch, _ in train]

    first_, second, other = batches(5, 1), batches(5, 2), batches(6, 1)

    assert all(torch.equal(a, b) for a, b in zip(first_, second, strict=True))
    assert not torch.equal(first_[0], other[0])


def test_the_images_are_not_changed() -> None:
    dataset = random_set(shift=2, flip=True, cutout=2)
    before = dataset.train[0].clone()
    for loader in dataset.loaders(0, DeviceCPU()):
        for batch, _ in loader:
            batch.zero_()

    assert torch.equal(before, dataset.train[0])


@pytest.mark.parametrize("count", [2, 4])
def test_processes_share_each_batch_evenly(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = random_set(shift=1, flip=True)
    whole, test = dataset.loaders(5, DeviceCPU())
    expected = [*whole, *test]
    shares = []
    for rank in range(count):
        on_process(rank, count, monkeypatch)
        train, test = dataset.loaders(5, DeviceCPU())
        shares.append([*train, *test])

    for batch, (inputs, labels) in enumerate(expected):
        for rank, share in enumerate(shares):
            assert torch.equal(inputs[rank::count], share[batch][0])
            assert torch.equal(labels[rank::count], share[batch][1])


def test_a_batch_that_cannot_be_shared_evenly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_process(0, 3, monkeypatch)

    assert 4 == per_process(12)
    with pytest.raises(ValueError, match="`batch_size` must be a multiple of the number of processes, 3, got 4"):
        random_set()


def test_a_batch_holds_at_most_all_images() -> None:
    with pytest.raises(ValueError, match="`batch_size` must be at most 12, the number of training images, got 13"):
        random_set(batch_size=13)


def test_an_image_cannot_be_shifted_out_of_itself() -> None:
    with pytest.raises(ValueError, match="`shift` must be below 6, the size of the images, got 6"):
        random_set(shift=6)


def test_the_first_images_are_taken() -> None:
    images, labels = torch.arange(5)[:, None], torch.arange(5)

    assert [0, 1, 2] == first("some", 3, images, labels)[1].tolist()
    assert 5 == len(first("some", None, images, labels)[0]) == len(first("some", 5, images, labels)[0])
    with pytest.raises(ValueError, match="`some` must be at most 5, the number of images, got 6"):
        first("some", 6, images, labels)


def test_the_data_are_described_in_a_line() -> None:
    dataset = random_set(1200, size=2, shift=1, flip=True, cutout=1)
    expected = "random: 1,200 images to train on, 1,200 to test, 3x2x2 pixels, 1200 classes"

    assert expected == dataset.describe()


@pytest.mark.parametrize(
    ("source", "load", "name", "shape", "augmentation"),
    [
        (fashion_mnist.Data, load_fashion_mnist, "Fashion-MNIST", (1, 28, 28), Augmentation(3, False)),
        (cifar10_resnet9.Data, load_cifar10, "CIFAR-10", (3, 32, 32), Augmentation(3, False, 0, "reflect")),
    ],
)
def test_samples_are_the_first_ones_of_the_files(
    source: Any, load: Any, name: str, shape: tuple[int, ...], augmentation: Augmentation, data: Path
) -> None:
    whole = source(data=data, batch_size=10).load()
    part = source(data=data, batch_size=10, train_samples=12, test_samples=7, shift=3, flip=False).load()

    for is_train, all_of_them, some, count in ((True, whole.train, part.train, 12), (False, whole.test, part.test, 7)):
        images, labels = load(data, is_train)
        assert torch.equal(images, all_of_them[0])
        assert torch.equal(labels, all_of_them[1])
        assert torch.equal(images[:count], some[0])
        assert torch.equal(labels[:count], some[1])
    assert (name, shape, 10) == (part.name, part.shape, part.num_classes)
    assert augmentation == part.augmentation


@pytest.mark.parametrize(
    ("source", "load"), [(fashion_mnist.Data, load_fashion_mnist), (cifar10_resnet9.Data, load_cifar10)]
)
def test_the_last_training_images_can_be_held_out(source: Any, load: Any, data: Path) -> None:
    dataset = source(data=data, batch_size=10, validation_samples=8, train_samples=12).load()
    images, labels = load(data, True)

    for split, part in ((dataset.train, slice(12)), (dataset.test, slice(-8, None))):
        assert torch.equal(images[part], split[0])
        assert torch.equal(labels[part], split[1])
    assert dataset.validation
    assert "12 images to train on, 8 to validate" in dataset.describe()
    assert not source(data=data, batch_size=10).load().validation


def test_digits_are_validated_on_images_of_neither_set() -> None:
    splits = [digits.Data(validation_samples=count).load().test for count in (500, 20)]
    train, test = (digits.Data().load().train, digits.Data().load().test)

    assert torch.equal(splits[0][0][:20], splits[1][0])
    assert torch.equal(splits[0][1][:20], splits[1][1])
    whole = torch.cat([train[0], splits[0][0], test[0]])
    assert (500, 500, 797, 1797) == (len(train[0]), len(splits[0][0]), len(test[0]), len(whole))
    assert 1797 == len({image.numpy().tobytes() for image in whole})


def test_cifar_images_are_cut_with_cutout_size(data: Path) -> None:
    images = cifar10_resnet9.Data(data=data, batch_size=10, cutout_size=8).load()

    assert Augmentation(4, True, 8, "reflect") == images.augmentation


@pytest.mark.parametrize("source", [fashion_mnist.Data, cifar10_resnet9.Data])
def test_the_environment_variable_names_the_data_folder(
    source: Any, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSER_DATA", str(data))

    assert 30 == source(batch_size=10).load().num_train


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (fashion_mnist.Data, r"FashionMNIST was not found.*\n.*FashionMNIST\(.*download=True"),
        (cifar10_resnet9.Data, r"CIFAR10 was not found.*\n.*CIFAR10\(.*download=True"),
    ],
)
def test_the_error_for_missing_data_has_their_path_and_the_command(source: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=message):
        source(data=tmp_path).load()


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        (digits.Data, {"train_samples": 501}, "`train_samples` must be at most 500"),
        (digits.Data, {"test_samples": 798}, "`test_samples` must be at most 797"),
        (digits.Data, {"batch_size": 501}, "`batch_size` must be at most 500, the number of training images"),
        (fashion_mnist.Data, {"train_samples": 31}, "`train_samples` must be at most 30"),
        (cifar10_resnet9.Data, {"test_samples": 21}, "`test_samples` must be at most 20"),
        (digits.Data, {"validation_samples": 501}, "`validation_samples` must be at most 500"),
        (fashion_mnist.Data, {"validation_samples": 30}, "`validation_samples` must be below 30"),
        (fashion_mnist.Data, {"validation_samples": 9, "train_samples": 22}, "`train_samples` must be at most 21"),
        (segmentation.Data, {"validation_samples": 30}, "`validation_samples` must be below 30"),
    ],
)
def test_requesting_too_many_samples_is_an_error(
    source: Any, arguments: dict[str, int], message: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSER_DATA", str(data))

    with pytest.raises(ValueError, match=message):
        source(**arguments).load()
