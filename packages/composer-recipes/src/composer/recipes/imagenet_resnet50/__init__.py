"""The recipes of `composer-train imagenet_resnet50`: ResNet-50 on ImageNet, plain and with three stacks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from composer.algorithms.blurpool import BlurPool
from composer.algorithms.channels_last import ChannelsLast
from composer.algorithms.colout import ColOut
from composer.algorithms.cutmix import CutMix
from composer.algorithms.ema import EMA
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.mixup import MixUp
from composer.algorithms.progressive_resizing import ProgressiveResizing
from composer.algorithms.randaugment import RandAugment
from composer.algorithms.sam import SAM
from composer.algorithms.scale_schedule import ScaleSchedule
from composer.algorithms.stochastic_depth import StochasticDepth
from composer.datasets import build_imagenet_dataloader
from composer.devices import Device
from composer.models import ComposerClassifier
from composer.optim import ComposerScheduler, DecoupledSGDW
from composer.recipes._images import CLASSIFICATION, per_process
from composer.recipes._recipe import Runs, Task, check_at_least, check_training, find_data, warmup_and_cosine
from composer.utils import dist

__all__ = ["STACKS", "TASK", "Data", "Network", "Photos", "Training", "composed", "plain"]

STACKS = {name: Path(__file__).with_name(f"{name}.yaml") for name in ("plain", "mild", "medium", "hot")}
"""Files for `--config`, by name."""

_EVAL_BATCH_SIZE = 256


@dataclass(frozen=True)
class Data:
    """ImageNet, or any other photographs with a folder for each class.

    Args:
        data: The folder with train and val, as unpacked, or as `composer-datasets write imagenet` wrote it, which is
            read faster. None: the environment variable COMPOSER_DATA.
        batch_size: Images per training batch, summed over all processes. An incomplete last batch is dropped.
        train_size: Height and width of the random crops to train on. Crops smaller than those of the test are faster,
            and objects appear at the same size in both.
        test_resize: The shorter side of test images is resized to this.
        test_size: Height and width of the center crops of test images.
        workers: Processes that read images, for each training process. 0: none, it reads them itself.
    """

    data: Path | None = None
    batch_size: int = 2048
    train_size: int = 176
    test_resize: int = 232
    test_size: int = 224
    workers: int = 8

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("train_size", 1), ("test_size", 1), ("workers", 0)):
            check_at_least(name, getattr(self, name), least)
        if self.test_resize < self.test_size:
            raise ValueError(
                f"`test_resize` must be at least `test_size`, got {self.test_resize} and {self.test_size}."
            )

    def load(self) -> Photos:
        """Open the images.

        Raises:
            FileNotFoundError: A folder does not exist; the message has the command that gets it.
            ModuleNotFoundError: A package that reads the files is not installed.
            ValueError: There are fewer training images than in a batch.
        """
        root = find_data(self.data)
        loaders: list[Any] = [
            build_imagenet_dataloader(root, dist.get_world_size(), is_train=part).dataloader for part in (True, False)
        ]
        train, test = (loader.dataset for loader in loaders)
        return Photos(root, len(train), len(test), len(train.classes), self)


@dataclass(frozen=True)
class Photos:
    """Opened photographs.

    Attributes:
        root: The folder with train and val.
        num_train: Number of training images.
        num_test: Number of test images.
        num_classes: Number of classes.
        options: The hyperparameters.
    """

    root: Path
    num_train: int
    num_test: int
    num_classes: int
    options: Data

    def __post_init__(self) -> None:
        per_process(self.batch_size)
        if self.batch_size > self.num_train:
            raise ValueError(
                f"`batch_size` must be at most {self.num_train}, the number of training images, got {self.batch_size}."
            )

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.root.name

    @property
    def batch_size(self) -> int:
        """Images per training batch, summed over all processes."""
        return self.options.batch_size

    def describe(self) -> str:
        """Return one line about the images and their split."""
        options = self.options
        return (
            f"{self.name}: {self.num_train:,} images to train on, {self.num_test:,} to test, {self.num_classes:,} "
            f"classes, {options.train_size} pixels to train, {options.test_size} to test"
        )

    def loaders(self, seed: int, device: Device) -> tuple[Any, Any]:
        """Return loaders for training and testing, whose batches are normalized on a device.

        Args:
            seed: Seed of the order and the crops of the training images.
            device: The device.
        """
        options, processes = self.options, dist.get_world_size()
        shared: dict[str, Any] = {
            "device": device,
            "num_workers": options.workers,
            "persistent_workers": options.workers > 0,
            "pin_memory": device.name == "gpu",
        }
        train = build_imagenet_dataloader(self.root, self.batch_size, crop_size=options.train_size, seed=seed, **shared)
        test = build_imagenet_dataloader(
            self.root,
            _EVAL_BATCH_SIZE * processes,
            is_train=False,
            resize_size=options.test_resize,
            crop_size=options.test_size,
            **shared,
        )
        return train, test


@dataclass(frozen=True)
class Network:
    """A residual network of torchvision, and its loss.

    Args:
        model: The architecture.
        loss: The loss; binary cross entropy treats each class independently.
    """

    model: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet50"
    loss: Literal["soft_cross_entropy", "binary_cross_entropy_with_logits"] = "binary_cross_entropy_with_logits"

    def build(self, dataset: Photos) -> ComposerClassifier:
        """Return a new network for the classes of a dataset."""
        from composer.models import composer_resnet  # imports torchvision, which takes seconds

        binary = self.loss == "binary_cross_entropy_with_logits"
        initializers = ["kaiming_normal", "bn_uniform", *(["linear_log_constant_bias"] if binary else [])]
        model = composer_resnet(self.model, dataset.num_classes, initializers=initializers, loss_name=self.loss)
        model.train_metrics = {}  # meaningless on mixed images
        return model


@dataclass(frozen=True)
class Training:
    """Training with SGD and decoupled weight decay; linear warmup, then cosine decay to 0.

    Args:
        epochs: Passes over the training images.
        lr: The peak learning rate.
        momentum: The momentum, in [0, 1).
        weight_decay: The fraction of the weights that a step removes at the peak learning rate.
        warmup_epochs: Epochs with a rising learning rate, fewer than all; cosine decay follows.
    """

    epochs: float = 36
    lr: float = 2.048
    momentum: float = 0.875
    weight_decay: float = 5e-4
    warmup_epochs: float = 8

    def __post_init__(self) -> None:
        check_training(self.epochs, self.lr, self.weight_decay)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum` must be in [0, 1), got {self.momentum!r}.")
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ValueError(
                f"`warmup_epochs` must be at least 0 and below `epochs`, got {self.warmup_epochs!r} of {self.epochs!r}."
            )

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of a model's parameters."""
        return DecoupledSGDW(model.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def schedule(self) -> ComposerScheduler:
        """Return the learning rate schedule."""
        return warmup_and_cosine(self.warmup_epochs / self.epochs)


TASK = Task(
    name="imagenet_resnet50",
    summary=(
        "Train ResNet-50 on ImageNet with algorithms that get to the same accuracy sooner, or to a higher one. There "
        "are four configurations: `--config plain`, and stacks of algorithms for a short, a medium and a long "
        "training: `--config mild`, `--config medium` and `--config hot`. It is made for several GPUs."
    ),
    data=Data(),
    network=Network(),
    training=Training(),
    metrics=CLASSIFICATION,
    algorithms={
        "blurpool": BlurPool,
        "channels_last": ChannelsLast,
        "colout": ColOut,
        "cutmix": CutMix,
        "ema": EMA,
        "label_smoothing": LabelSmoothing,
        "mixup": MixUp,
        "progressive_resizing": ProgressiveResizing,
        "randaugment": RandAugment,
        "sam": SAM,
        "scale_schedule": ScaleSchedule,
        "stochastic_depth": StochasticDepth,
    },
    chosen=("blurpool", "channels_last", "ema", "label_smoothing", "progressive_resizing"),
    tuned={
        "colout": {"p_row": 0.05, "p_col": 0.05},
        "ema": {"half_life": "100ba", "update_interval": "20ba"},
        "label_smoothing": {"smoothing": 0.08},
        "mixup": {"alpha": 0.2},
        "progressive_resizing": {"initial_scale": 0.5, "delay_fraction": 0.4, "finetune_fraction": 0.2},
        "randaugment": {"severity": 9, "depth": 1},
        "sam": {"rho": 0.5, "interval": 10},
        "stochastic_depth": {"target_layer_name": "ResNetBottleneck", "drop_rate": 0.1},
    },
    runs=Runs(deterministic=False),  # deterministic operations are slower on a GPU
    stacks=STACKS,
)
"""The defaults of `composer-train imagenet_resnet50`, and its algorithms."""
plain, composed = TASK.plain, TASK.composed
