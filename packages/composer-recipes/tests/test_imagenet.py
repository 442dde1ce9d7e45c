"""`composer-train imagenet_resnet50`: its stacks, on a folder and on image files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recipe_runs import QUIET, task_of

from composer.core import State
from composer.datasets.cli import main as write
from composer.devices import DeviceCPU
from composer.recipes.cli import main
from composer.recipes.imagenet_resnet50 import STACKS, Data, Training

TINY = (
    "--batch_size 4 --train_size 32 --test_resize 36 --test_size 32 --workers 0 --epochs 1 --warmup_epochs 0.5 "
    "--lr 0.01"
)


@pytest.fixture(scope="module")
def files(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")

    assert 0 == write(["write", "imagenet", str(data), str(folder), "--quality", "90", "--processes", "1"])
    return folder


def configuration(stack: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit):
        main(["imagenet_resnet50", f"--config={stack}", "--print_config"])
    options: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return options


MILD = ["blurpool", "channels_last", "ema", "label_smoothing", "progressive_resizing"]


@pytest.mark.parametrize(
    ("stack", "algorithms", "epochs", "weight_decay", "smoothing", "scale"),
    [
        ("mild", MILD, 36, 5e-4, 0.08, 0.5),
        ("medium", [*MILD, "mixup", "sam"], 135, 5e-4, 0.1, 0.5),
        ("hot", [*MILD, "mixup", "sam", "colout", "randaugment", "stochastic_depth"], 270, 3e-4, 0.13, 0.6),
    ],
)
def test_stacks_are_as_published(
    stack: str,
    algorithms: list[str],
    epochs: int,
    weight_decay: float,
    smoothing: float,
    scale: float,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = configuration(stack, capsys)

    assert algorithms == options["algorithms"]
    assert (epochs, weight_decay) == (options["epochs"], options["weight_decay"])
    assert (smoothing, scale) == (
        options["label_smoothing"]["smoothing"],
        options["progressive_resizing"]["initial_scale"],
    )
    shared = {"batch_size": 2048, "lr": 2.048, "momentum": 0.875, "warmup_epochs": 8, "compare": False}
    shared |= {"train_size": 176, "test_resize": 232, "test_size": 224, "model": "resnet50"}
    assert {key: options[key] for key in shared} == shared
    assert ("100ba", "20ba") == (options["ema"]["half_life"], options["ema"]["update_interval"])
    assert (0.4, 0.2) == tuple(options["progressive_resizing"][f"{key}_fraction"] for key in ("delay", "finetune"))
    sam, interval = options["sam"], 5 if stack == "hot" else 10
    assert "sam" not in algorithms or (0.5, interval) == (sam["rho"], sam["interval"])


def test_the_defaults_are_the_mild_stack(capsys: pytest.CaptureFixture[str]) -> None:
    mild = configuration("mild", capsys)
    with pytest.raises(SystemExit):
        main(["imagenet_resnet50", "--print_config"])

    assert {**mild, "compare": True} == yaml.safe_load(capsys.readouterr().out)


def test_a_stack_is_accepted_and_trains(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", "hot", *TINY.split(), *QUIET.split(), "--data", str(files)]
    main(["imagenet_resnet50", *arguments, "--out", str(tmp_path)])
    (recipe,) = json.loads((tmp_path / "results.json").read_text())["recipes"]
    chosen = yaml.safe_load(STACKS["hot"].read_text())["algorithms"]
    names = {task_of("imagenet_resnet50").algorithms[name].__name__ for name in chosen}

    assert "composed" == recipe["name"]
    assert names == set(recipe["runs"][0]["actions"])
    assert all(any(name in line for line in recipe["plan"]) for name in names)
    assert "12 images to train on, 4 to test, 2 classes" in capsys.readouterr().out
    assert 12 == recipe["runs"][0]["samples"]


def test_images_of_files_are_cropped_on_each_rank_and_normalized(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    labels, tested = [], []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        options = Data(files, batch_size=4, train_size=24, test_resize=36, test_size=32, workers=0)
        train, test = options.load().loaders(5, DeviceCPU())
        for images, targets in train.dataloader:
            assert (2, 3, 24, 24) == images.shape
            assert torch.equal(targets, (images.mean((1, 2, 3)) < 0).long())  # class 0 is bright
            labels += targets.tolist()
        for images, targets in test.dataloader:
            assert (3, 32, 32) == images.shape[1:]
            tested += targets.tolist()

    assert [0] * 6 + [1] * 6 == sorted(labels)
    assert [0, 0, 1, 1] == sorted(tested)


def test_the_data_must_fill_a_batch(files: Path) -> None:
    with pytest.raises(ValueError, match="`batch_size` must be at most 12, the number of training images, got 13"):
        Data(files, batch_size=13).load()


def test_the_learning_rate_rises_in_the_warmup_epochs() -> None:
    schedule = Training(epochs=20, warmup_epochs=5).schedule()
    state = State(
        model=torch.nn.Linear(1, 1), max_duration="20ep", rank_zero_seed=0, dataloader=[0], dataloader_label="train"
    )
    values = []
    for _ in range(21):
        values.append(schedule(state))
        state.timestamp = state.timestamp.to_next_batch().to_next_epoch()

    assert [0.0, 0.2, 0.4, 0.6, 0.8, 1.0] == pytest.approx(values[:6])
    assert 0 == pytest.approx(values[20])
    with pytest.raises(ValueError, match=r"`momentum` must be in \[0, 1\), got 1"):
        Training(momentum=1)
    with pytest.raises(ValueError, match="`lr` must be positive and finite"):
        Training(lr=0)
