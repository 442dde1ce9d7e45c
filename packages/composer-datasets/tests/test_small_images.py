"""CIFAR and MNIST, from small files of the same layout."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torchvision import transforms

from composer import datasets
from composer.algorithms.utils.dataset_transforms import add_dataset_transform
from composer.datasets import DeviceLoader, ImageTransform, ResumableDataLoader
from composer.datasets.device_loader import to_torch_device
from composer.devices import DeviceCPU
from composer.utils import dist

RNG = np.random.default_rng(0)


def write_cifar10(root: Path, per_file: int = 4) -> list[Any]:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    parts = []
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        images = RNG.integers(0, 256, (per_file, 3, 32, 32), dtype=np.uint8)
        labels = RNG.integers(0, 10, per_file).tolist()
        content = {"data": images.reshape(per_file, 3072), "labels": labels, "batch_label": name}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        parts.append((images, labels))
    return parts


def write_cifar100(root: Path) -> None:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for name in ("train", "test"):
        images = RNG.integers(0, 256, (6, 3072), dtype=np.uint8)
        content = {"data": images, "fine_labels": [90, 1, 2, 3, 4, 5], "coarse_labels": [19, 1, 1, 1, 2, 2]}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def idx(array: np.ndarray) -> bytes:
    header = np.array([0x800 + array.ndim, *array.shape], dtype=">u4")
    return header.tobytes() + array.astype(np.uint8).tobytes()


def write_mnist(root: Path, name: str = "MNIST") -> Any:
    folder = root / name / "raw"
    folder.mkdir(parents=True)
    images, labels = RNG.integers(0, 256, (8, 28, 28)), np.arange(8)
    for part in ("train", "t10k"):
        for what, array in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{part}-{what}-ubyte").write_bytes(idx(array))
    return images, labels


def test_cifar10_is_read_in_its_order(tmp_path: Path) -> None:
    parts = write_cifar10(tmp_path)
    images, labels = datasets.load_cifar10(tmp_path)
    test_images, test_labels = datasets.load_cifar10(tmp_path, is_train=False)

    assert np.array_equal(np.concatenate([part[0] for part in parts[:5]]), images.numpy())
    assert [label for part in parts[:5] for label in part[1]] == labels.tolist()
    assert np.array_equal(parts[5][0], test_images.numpy())
    assert parts[5][1] == test_labels.tolist()


def test_cifar100_has_its_hundred_classes_as_labels(tmp_path: Path) -> None:
    write_cifar100(tmp_path)

    assert [90, 1, 2, 3, 4, 5] == datasets.load_cifar100(tmp_path)[1].tolist()


class RunsCode:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("made",))


def test_a_file_of_cifar_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps({"data": RunsCode(), "labels": []}))

    with pytest.raises(pickle.UnpicklingError, match=r"would import `(posix|nt)\.mkdir`"):
        datasets.load_cifar10(tmp_path, is_train=False)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("name", "load"), [("MNIST", datasets.load_mnist), ("FashionMNIST", datasets.load_fashion_mnist)]
)
def test_mnist_is_read(tmp_path: Path, name: str, load: Callable[..., Any]) -> None:
    expected, expected_labels = write_mnist(tmp_path, name)
    images, labels = load(tmp_path)

    assert np.array_equal(expected[:, None], images.numpy())
    assert expected_labels.tolist() == labels.tolist()


BUILDERS = {
    "cifar10": (datasets.build_cifar10_dataloader, write_cifar10, (3, 32, 32)),
    "cifar100": (datasets.build_cifar100_dataloader, write_cifar100, (3, 32, 32)),
    "mnist": (datasets.build_mnist_dataloader, write_mnist, (1, 28, 28)),
    "fashion": (datasets.build_fashion_mnist_dataloader, lambda root: write_mnist(root, "FashionMNIST"), (1, 28, 28)),
}


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("name", BUILDERS)
def test_host_and_device_yield_the_same_test_images(tmp_path: Path, name: str, device: str | None) -> None:
    build, write, shape = BUILDERS[name]
    write(tmp_path)
    train = build(tmp_path, 3, device=device)
    images, labels = train.batch_transforms(next(iter(train.dataloader)))
    test = build(tmp_path, 3, is_train=False, device=device)
    plain = torch.cat([test.batch_transforms(batch)[0] for batch in test.dataloader])
    other = build(tmp_path, 3, is_train=False, device="cpu")

    assert (3, *shape) == images.shape
    assert torch.float32 == images.dtype
    assert torch.int64 == labels.dtype
    assert torch.equal(torch.cat([images for images, _ in other.dataloader]), plain)
    assert len(plain) == test.num_samples
    assert isinstance(train.dataloader, ResumableDataLoader if device is None else DeviceLoader)


def test_training_images_are_augmented_and_their_augmentation_can_be_replaced(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    images, _ = datasets.load_cifar10(tmp_path)
    spec = datasets.build_cifar10_dataloader(tmp_path, 20, shuffle=False, transform=transforms.RandomHorizontalFlip(1))
    on_device = datasets.build_cifar10_dataloader(
        tmp_path, 20, shuffle=False, device=DeviceCPU(), transform=ImageTransform()
    )
    usual = datasets.build_cifar10_dataloader(tmp_path, 20, shuffle=False)

    assert torch.equal(images.flip(3), next(iter(spec.dataloader))[0])
    assert torch.equal(images, next(iter(on_device.dataloader))[0])
    assert not torch.equal(images, next(iter(usual.dataloader))[0])


def test_algorithms_can_add_a_transform(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    spec = datasets.build_mnist_dataloader(tmp_path, 8, is_train=False)
    add_dataset_transform(spec.dataloader, transforms.RandomInvert(1.0))
    plain = datasets.build_mnist_dataloader(tmp_path, 8, is_train=False)

    inverted, same = next(iter(spec.dataloader))[0], next(iter(plain.dataloader))[0]
    assert torch.equal(255 - same, inverted)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "mnist", "fashion_mnist"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_synthetic_versions_need_no_files(name: str, device: str | None) -> None:
    build = getattr(datasets, f"build_synthetic_{name}_dataloader")
    spec = build(4, num_samples=8, is_train=False, device=device)
    images, labels = spec.batch_transforms(next(iter(spec.dataloader)))

    assert 2 == len(spec.dataloader)
    assert (4, (1 if "mnist" in name else 3)) == images.shape[:2]
    assert [0, 1, 2, 3] == labels.tolist()
    assert images.abs().max() < 4


@pytest.mark.parametrize("name", BUILDERS)
def test_the_error_for_missing_files_has_the_command(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        BUILDERS[name][0](tmp_path / "nowhere", 4)

    message = str(caught.value)
    assert str(tmp_path / "nowhere") in message
    assert 'python -c "from torchvision.datasets import ' in message
    assert "download=True" in message


def test_missing_files_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(self: Any) -> None:
        asked.append(self.root)
        if not self._check_exists():
            write_mnist(Path(self.root))

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", download)
    spec = datasets.build_mnist_dataloader(tmp_path, 4, download=True)

    assert ([str(tmp_path)], 8) == (asked, spec.num_samples)


def test_a_device_loader_has_no_workers() -> None:
    with pytest.raises(TypeError, match="no worker processes, so it takes no num_workers"):
        datasets.build_synthetic_mnist_dataloader(4, num_samples=8, device="cpu", num_workers=1)


@pytest.mark.parametrize("size", [0, 3])
def test_the_batch_is_divided_among_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=f"positive multiple of the number of ranks, 2, got {size}"):
        datasets.build_synthetic_mnist_dataloader(size, num_samples=8)


def test_devices_can_be_named_in_any_way() -> None:
    assert (
        torch.device("cpu")
        == to_torch_device("cpu")
        == to_torch_device(DeviceCPU())
        == to_torch_device(torch.device("cpu"))
    )
    assert "cpu" == DeviceLoader(torch.zeros(4), None, 2, device=DeviceCPU()).inputs.device.type


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize("device", ["gpu", "cuda:0"])
def test_an_unavailable_device_is_an_error(device: str) -> None:
    with pytest.raises(ValueError, match=f"`device` must be available, got '{device}' without CUDA"):
        datasets.build_synthetic_mnist_dataloader(4, num_samples=8, device=device)


@pytest.mark.skipif("COMPOSER_DATA" not in os.environ, reason="set COMPOSER_DATA to a folder with the real data sets")
def test_the_constants_are_those_of_the_real_images() -> None:
    root = Path(os.environ["COMPOSER_DATA"])
    from composer.datasets import cifar, mnist

    kinds = {
        "FashionMNIST": (datasets.load_fashion_mnist, mnist._FASHION_MNIST),
        "MNIST": (datasets.load_mnist, mnist._MNIST),
        "cifar-10-batches-py": (datasets.load_cifar10, cifar._CIFAR10),
        "cifar-100-python": (datasets.load_cifar100, cifar._CIFAR100),
    }
    present = [kind for folder, kind in kinds.items() if (root / folder).is_dir()]
    assert present
    for load, kind in present:
        images, labels = load(root)
        pixels = images.double()

        assert kind.num_train == len(labels)
        assert kind.num_classes == len(labels.unique())
        assert torch.allclose(torch.tensor(kind.mean).double(), pixels.mean((0, 2, 3)), atol=0.01)
        assert torch.allclose(torch.tensor(kind.std).double(), pixels.std((0, 2, 3), unbiased=False), atol=0.01)
