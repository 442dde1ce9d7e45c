from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from composer.devices import DeviceCPU
from composer.recipes import Data
from composer.recipes._data import load_images


def test_the_digits_are_split_at_both_ends_and_doubled_in_size() -> None:
    pixels, labels = load_digits(return_X_y=True)

    images = load_images(Data())

    assert tuple(images.train_images.shape) == (500, 1, 16, 16)
    assert tuple(images.test_images.shape) == (797, 1, 16, 16)
    assert labels[:500].tolist() == images.train_labels.tolist()
    assert labels[1000:].tolist() == images.test_labels.tolist()
    assert images.num_classes == 10
    brightness = images.test_images.double().mean(dim=(1, 2, 3)) / 255 * 16
    assert torch.allclose(torch.tensor(pixels[1000:].mean(axis=1)), brightness, atol=0.05)


def test_digits_are_never_mirrored_but_photographs_are(cifar: Path) -> None:
    assert not load_images(Data()).flip
    assert load_images(Data(data=cifar, batch_size=10)).flip


def test_mean_and_deviation_are_those_of_the_training_images(cifar: Path) -> None:
    images = load_images(Data(data=cifar, train_samples=10, batch_size=10))
    pixels = images.train_images.numpy().astype(np.float64)

    assert np.allclose(pixels.mean(axis=(0, 2, 3)), images.mean)
    assert np.allclose(pixels.std(axis=(0, 2, 3)), images.std)


def test_a_channel_without_contrast_does_not_divide_by_zero(fashion: Path) -> None:
    path = fashion / "FashionMNIST/raw/train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:16] + bytes(30 * 28 * 28))

    train, _ = load_images(Data(data=fashion, batch_size=10)).loaders(0, DeviceCPU())

    assert all(batch.isfinite().all() for batch, _ in train)


@pytest.mark.parametrize("inside", ["", "FashionMNIST/raw"])
def test_fashion_mnist_is_found_in_its_root_and_by_its_own_folder(fashion: Path, inside: str) -> None:
    images = load_images(Data(data=fashion / inside, batch_size=10))

    assert (images.name, images.shape, len(images.test_images)) == ("Fashion-MNIST", (1, 28, 28), 20)
    assert images.shift == 3


def test_fashion_mnist_may_be_compressed(fashion: Path) -> None:
    plain = load_images(Data(data=fashion, batch_size=10))
    for path in list((fashion / "FashionMNIST/raw").iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()

    images = load_images(Data(data=fashion, batch_size=10))

    assert torch.equal(plain.train_images, images.train_images)
    assert torch.equal(plain.test_labels, images.test_labels)


@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_cifar_is_found_in_its_root_and_by_its_own_folder(cifar: Path, inside: str) -> None:
    images = load_images(Data(data=cifar / inside, batch_size=10))
    batch = pickle.loads((cifar / "cifar-10-batches-py/data_batch_2").read_bytes())

    assert (images.name, images.shape, len(images.train_images)) == ("CIFAR-10", (3, 32, 32), 30)
    assert images.shift == 4
    assert batch["data"].reshape(6, 3, 32, 32).tolist() == images.train_images[6:12].tolist()
    assert images.train_labels[6:12].tolist() == [0, 1, 2, 3, 4, 5]


def test_samples_are_the_first_ones(fashion: Path) -> None:
    whole = load_images(Data(data=fashion, batch_size=10))
    part = load_images(Data(data=fashion, batch_size=10, train_samples=12, test_samples=7))

    assert torch.equal(whole.train_images[:12], part.train_images)
    assert torch.equal(whole.test_labels[:7], part.test_labels)


def test_a_folder_without_data_says_what_was_looked_for_and_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither '.*FashionMNIST/raw' nor '.*cifar-10-batches-py'.*download"):
        load_images(Data(data=tmp_path))


def test_an_incomplete_data_set_says_what_is_missing(fashion: Path) -> None:
    (fashion / "FashionMNIST/raw/t10k-images-idx3-ubyte").unlink()

    with pytest.raises(FileNotFoundError, match=r"but t10k-images-idx3-ubyte is missing.*FashionMNIST.*download=True"):
        load_images(Data(data=fashion))


def test_two_data_sets_in_one_folder_are_not_guessed_between(fashion: Path, cifar: Path) -> None:
    assert fashion == cifar

    with pytest.raises(ValueError, match=r"holds both Fashion-MNIST and CIFAR-10. Name the folder of one: '"):
        load_images(Data(data=fashion))


@pytest.mark.parametrize("content", [b"", b"not an image", b"\0\0\x08\x03" + bytes(12) + b"rest"])
def test_a_file_that_is_not_idx_is_refused(fashion: Path, content: bytes) -> None:
    (fashion / "FashionMNIST/raw/train-images-idx3-ubyte").write_bytes(content)

    with pytest.raises(ValueError, match="train-images-idx3-ubyte' must be an IDX file of bytes in 3 dimensions"):
        load_images(Data(data=fashion))


@pytest.mark.parametrize("content", [b"", b"nonsense", pickle.dumps([1]), pickle.dumps({"labels": [1]})])
def test_a_file_that_is_not_a_batch_of_cifar_is_refused(cifar: Path, content: bytes) -> None:
    (cifar / "cifar-10-batches-py/data_batch_3").write_bytes(content)

    with pytest.raises(ValueError, match="data_batch_3' must be a batch of CIFAR-10 for Python"):
        load_images(Data(data=cifar))


class Dangerous:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, ("harm",)


def test_unpickling_runs_no_code(cifar: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (cifar / "cifar-10-batches-py/data_batch_1").write_bytes(pickle.dumps(Dangerous()))

    with pytest.raises(ValueError, match=r"it would import `"):
        load_images(Data(data=cifar))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_samples": 501}, "`train_samples` must be at most 500"),
        ({"test_samples": 798}, "`test_samples` must be at most 797"),
        ({"batch_size": 501}, "`batch_size` must not be above the number of training images, 500"),
    ],
)
def test_more_than_there_is_cannot_be_asked_for(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_images(Data(**arguments))
