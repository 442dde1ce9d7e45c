"""The command `composer-datasets`."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from composer.datasets import ImageFiles, load_cifar10
from composer.datasets.cli import main


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    folder = tmp_path / "in" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        pixels = np.random.default_rng(number).integers(0, 256, (4, 3072), np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [number, 1, 2, 3]}))
    return tmp_path / "in"


def test_cifar_is_written_as_pixels_and_checked(
    cifar: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    assert 0 == main(["write", "cifar10", str(cifar), str(out)])
    text, progress = capsys.readouterr()
    assert f"{out / 'train'}: 20 images, 10 classes, 0.1 MB" in text
    assert "20/20" in progress
    images, labels = load_cifar10(cifar)
    assert torch.equal(images, torch.stack([image for image, _ in ImageFiles(out / "train")]))
    assert labels.tolist() == [label for _, label in ImageFiles(out / "train")]
    assert 4 == len(ImageFiles(out / "test"))

    assert 0 == main(["check", str(out)])
    assert "All images are as they were written." in capsys.readouterr().out
    path = out / "test" / "shard-00000.bin"
    path.write_bytes(b"?" + path.read_bytes()[1:])
    assert 1 == main(["check", str(out)])
    assert "Image 0 of " in capsys.readouterr().err


def test_a_folder_of_classes_is_shrunk(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "in" / name).mkdir(parents=True)
        Image.new("RGB", (40, 20)).save(tmp_path / "in" / name / "1.jpg")

    assert 0 == main(["write", "folder", str(tmp_path / "in"), str(tmp_path / "out"), "--short-side", "10"])
    dataset = ImageFiles(tmp_path / "out")
    assert (["cat", "dog"], (3, 10, 20), 1) == (dataset.classes, dataset[1][0].shape, dataset[1][1])


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("write imagenet {0} {0}/out", 1, "ImageNet was not found: looked for"),
        ("write folder {0}/none {0}/out", 1, "`SRC` must be a folder with a folder for each class"),
        ("write cifar100 {0} {0}/out", 1, "CIFAR-100 was not found"),
        ("check {0}", 1, "A folder of image files was not found"),
        ("write folder {0} {0}/out --max-side 3 --short-side 4", 2, "not allowed with argument"),
        ("write elsewhere {0} {0}/out", 2, "invalid choice: 'elsewhere'"),
        ("", 2, "the following arguments are required"),
    ],
)
def test_mistakes_are_named(
    command: str, status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        ended: object = main(command.format(tmp_path).split())
    except SystemExit as error:
        ended = error.code

    assert status == ended
    assert message in capsys.readouterr().err
