"""The command `composer-datasets`."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from composer.datasets import ImageFiles
from composer.datasets.cli import main


def test_a_folder_of_classes_is_shrunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "in" / name).mkdir(parents=True)
        Image.new("RGB", (40, 20)).save(tmp_path / "in" / name / "1.jpg")

    assert 0 == main(["write", "folder", str(tmp_path / "in"), str(tmp_path / "out"), "--short-side", "10"])
    text, progress = capsys.readouterr()
    assert f"{tmp_path / 'out'}: 2 images, 2 classes, 0.0 MB" in text
    assert "2/2" in progress
    dataset = ImageFiles(tmp_path / "out")
    assert (["cat", "dog"], (3, 10, 20), 1) == (dataset.classes, dataset[1][0].shape, dataset[1][1])


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("write imagenet {0} {0}/out", 1, "No such file or directory: '{0}/train'"),
        ("write folder {0} {0}/out", 1, "Couldn't find any class folder in {0}"),
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
    assert message.format(tmp_path) in capsys.readouterr().err
