"""The recipes of `composer-train segmentation`: a U-Net that finds clothes in scenes made of Fashion-MNIST."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from composer.algorithms.blurpool import BlurPool
from composer.algorithms.channels_last import ChannelsLast
from composer.algorithms.ema import EMA
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.progressive_resizing import ProgressiveResizing
from composer.algorithms.scale_schedule import ScaleSchedule
from composer.algorithms.weight_standardization import WeightStandardization
from composer.datasets import load_fashion_mnist
from composer.models import ComposerModel
from composer.recipes._images import Augmentation, ImageSet, load_split
from composer.recipes._recipe import AdamW, Metric, Task, check_at_least, find_data

Norm: TypeAlias = Literal["batch", "group", "instance"]

_ITEM = 28  # pixels
_CLASSES = 10
_TRANSPARENT_BELOW = 32  # darker pixels of an item show what is behind it


@dataclass(frozen=True)
class Data:
    """Scenes of Fashion-MNIST items at random positions, some behind others, on a noisy background.

    Every pixel has a class: 0 for the background, otherwise the label of the item plus 1. Training scenes have training
    items, test scenes have test items; all are the same in every run.

    Args:
        data: The root folder passed to torchvision, which holds FashionMNIST/raw. None: the environment variable
            COMPOSER_DATA.
        train_samples: Number of training scenes.
        test_samples: Number of test scenes.
        validation_samples: Hold out this many items from the end of the training set, and use them for the test scenes
            instead of the test set, for choosing hyperparameters. None: use the test set.
        batch_size: Scenes per training batch. An incomplete last batch is dropped.
        size: Height and width of a scene, in pixels.
        items: Items per scene.
        noise: Background pixels are random in [0, noise).
        shift: Shift training scenes at random by up to this many pixels in each direction, with a reflected border.
    """

    data: Path | None = None
    train_samples: int = 4000
    test_samples: int = 1000
    validation_samples: int | None = None
    batch_size: int = 16
    size: int = 64
    items: int = 4
    noise: int = 128
    shift: int = 4

    def __post_init__(self) -> None:
        least = {"train_samples": 1, "test_samples": 1, "validation_samples": 1, "batch_size": 1}
        for name, value in (least | {"size": _ITEM, "items": 1, "shift": 0}).items():
            check_at_least(name, getattr(self, name), value)
        if not 1 <= self.noise <= 256:
            raise ValueError(f"`noise` must be from 1 to 256, got {self.noise!r}.")

    def load(self) -> ImageSet:
        """Make the scenes.

        Raises:
            FileNotFoundError: Fashion-MNIST does not exist; the message has the command that downloads it.
            ValueError: A file has unexpected contents, or no item would remain for training.
        """
        make = partial(make_scenes, size=self.size, items=self.items, noise=self.noise)
        held_out = self.validation_samples
        train, test = load_split(load_fashion_mnist, find_data(self.data), held_out)
        return ImageSet(
            "scenes of Fashion-MNIST",
            make(*train, self.train_samples, seed=1),
            make(*test, self.test_samples, seed=2),
            _CLASSES + 1,
            self.batch_size,
            Augmentation(self.shift, flip=True, border="reflect"),
            validation=held_out is not None,
        )


def make_scenes(
    images: Tensor, labels: Tensor, count: int, *, size: int, items: int, noise: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Place images at random positions in scenes.

    Args:
        images: Shape (N, 1, h, w), uint8, bright on black.
        labels: Shape (N,), class indices from 0.
        count: Number of scenes.
        size: Height and width of a scene, at least h and w.
        items: Images per scene; later ones hide earlier ones.
        noise: Background pixels are random in [0, noise).
        seed: The seed.

    Returns:
        Scenes, shape (count, 1, size, size), uint8, and the class of each pixel, shape (count, size, size), uint8: 0
        for the background, otherwise the label plus 1.

    Example:
        >>> images = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8)
        >>> scenes, classes = make_scenes(images, torch.tensor([4]), 1, size=4, items=1, noise=9, seed=0)
        >>> scenes.shape, int((classes == 5).sum()), bool((scenes[0] == 255).eq(classes == 5).all())
        (torch.Size([1, 1, 4, 4]), 4, True)
    """
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=generator)

    height, width = images.shape[2:]
    scenes = below(noise, count, size, size).to(torch.uint8)
    classes = torch.zeros_like(scenes)
    scene = torch.arange(count)[:, None, None]
    for _ in range(items):
        chosen = below(len(images), count)
        rows = (below(size - height + 1, count)[:, None] + torch.arange(height))[:, :, None]
        columns = (below(size - width + 1, count)[:, None] + torch.arange(width))[:, None]
        item = images[chosen, 0]
        visible = item >= _TRANSPARENT_BELOW
        scenes[scene, rows, columns] = torch.where(visible, item, scenes[scene, rows, columns])
        label = (labels[chosen] + 1).to(torch.uint8)[:, None, None]
        classes[scene, rows, columns] = torch.where(visible, label, classes[scene, rows, columns])
    return scenes[:, None], classes


@dataclass(frozen=True)
class Network:
    """The U-Net of `composer-models`.

    Args:
        width: Channels at the full resolution; they double with each level.
        levels: Number of resolutions, each half of the one before.
        norm: The normalization after each convolution. Torch supports "instance" only in the contiguous layout.
    """

    width: int = 8
    levels: int = 4
    norm: Norm = "batch"

    def build(self, dataset: ImageSet) -> ComposerModel:
        """Return a new network for the scenes of a dataset."""
        from composer.models import UNet

        return UNet(
            dataset.num_classes - 1,
            in_channels=dataset.shape[0],
            width=self.width,
            levels=self.levels,
            norm=self.norm,
        )


TASK = Task(
    name="segmentation",
    summary=(
        "Train a U-Net to find and tell apart the items of Fashion-MNIST in scenes of several of them, first plainly "
        "and then with composed algorithms, and compare."
    ),
    data=Data(),
    network=Network(),
    training=AdamW(epochs=8, lr=1.2e-2, beta2=0.99, weight_decay=0.01),
    metrics=(
        Metric("Dice", "Dice coefficient", unit="%", digits=2),
        Metric("CrossEntropy", "cross entropy", higher_is_better=False),
    ),
    algorithms={
        "blurpool": BlurPool,
        "channels_last": ChannelsLast,
        "ema": EMA,
        "gradient_clipping": GradientClipping,
        "progressive_resizing": ProgressiveResizing,
        "scale_schedule": ScaleSchedule,
        "weight_standardization": WeightStandardization,
    },
    chosen=("ema", "weight_standardization"),
    tuned={
        "ema": {"half_life": "20ba", "update_interval": "5ba"},
        "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
        "progressive_resizing": {"initial_scale": 0.5, "resize_targets": True},
        "scale_schedule": {"ratio": 0.8},
    },
)
"""The defaults of `composer-train segmentation`, and its algorithms."""
plain, composed = TASK.plain, TASK.composed
