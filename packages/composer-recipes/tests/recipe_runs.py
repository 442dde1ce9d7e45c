"""Quick runs of the command, and files like those of the data sets."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from composer.recipes import Task

RANDOM = np.random.default_rng(0)
POEM = "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n"

# With the fewest samples and the smallest network that lets every algorithm do something. Where not all of a recipe's
# algorithms can be composed, some are left out: those that exclude each other, or that warn of each other. The residual
# networks on CIFAR-10, which are large, differ from `cifar10_record` in little.
OPTIONS = {
    "digits": (
        "--train_samples 80 --test_samples 20 --batch_size 20 --width 8 --epochs 3 --seeds 2 --algorithms blurpool "
        "channels_last ema label_smoothing mixup progressive_resizing sam --blurpool.min_channels 1 "
        "--ema.half_life 4ba --ema.update_interval 2ba --sam.interval 3"
    ),
    "fashion_mnist": (
        "--train_samples 24 --test_samples 10 --batch_size 4 --width 4 --epochs 2 --eval_interval 5ba --algorithms "
        "cutmix cutout ema gradient_clipping layer_freezing scale_schedule selective_backprop squeeze_excite "
        "weight_standardization --ema.half_life 4ba --ema.update_interval 1ba --layer_freezing.freeze_start 0 "
        "--scale_schedule.ratio 0.5 --squeeze_excite.min_channels 4 --squeeze_excite.latent_channels 2"
    ),
    "cifar10_record": "--train_samples 8 --test_samples 4 --batch_size 4 --epochs 2 --width 4",
    "imagenet_resnet50": (
        "--config mild --compare --model resnet18 --batch_size 4 --train_size 32 --test_resize 36 --test_size 32 "
        "--workers 0 --epochs 1 --warmup_epochs 0.5 --lr 0.01 --ema.half_life 4ba --ema.update_interval 1ba"
    ),
    "tiny_lm": (
        "--characters 800 --batch_size 4 --seq_length 16 --width 8 --layers 1 --heads 2 --epochs 1 --algorithms alibi "
        "ema gradient_clipping muon scale_schedule seq_length_warmup --ema.half_life 4ba "
        "--seq_length_warmup.min_seq_length 8 --scale_schedule.ratio 0.6"
    ),
    "gpt_record": (
        "--config record --compare --characters 800 --batch_size 4 --seq_length 16 --width 16 --layers 2 --heads 2 "
        "--epochs 2"
    ),
    "segmentation": (
        "--train_samples 12 --test_samples 4 --batch_size 4 --size 32 --items 2 --width 4 --levels 2 --epochs 2 "
        "--algorithms blurpool channels_last ema gradient_clipping progressive_resizing scale_schedule "
        "weight_standardization --blurpool.min_channels 1 --ema.half_life 4ba --ema.update_interval 1ba "
        "--scale_schedule.ratio 0.8"
    ),
}
QUIET = "--no-progress --device cpu --threads 1"


@dataclass(frozen=True)
class Commanded:
    """The output of `composer-train RECIPE`, the folder it wrote to, and the content of results.json."""

    text: str
    folder: Path
    results: dict[str, Any]

    @property
    def plain(self) -> dict[str, Any]:
        """The first recipe."""
        recipe: dict[str, Any] = self.results["recipes"][0]
        return recipe

    @property
    def composed(self) -> dict[str, Any]:
        """The second one."""
        recipe: dict[str, Any] = self.results["recipes"][1]
        return recipe


def task_of(name: str) -> Task:
    task: Task = import_module(f"composer.recipes.{name}").TASK
    return task


def write_idx(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.array([0x800 + values.ndim, *values.shape], dtype=">u4")
    path.write_bytes(header.tobytes() + values.astype(np.uint8).tobytes())


def write_photos(root: Path) -> None:
    """Write 12 + 4 bright and dark images in the folders of ImageNet."""
    for part, count in (("train", 12), ("val", 4)):
        for number in range(count):
            path = root / part / ("bright", "dark")[number % 2] / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = RANDOM.integers(0, 128, (44 + number, 60, 3)) + (128, 0)[number % 2]
            Image.fromarray(pixels.astype(np.uint8)).save(path)
