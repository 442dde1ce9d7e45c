"""The recipes of `composer-train digits`: a small residual network on handwritten digits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from composer.algorithms.blurpool import BlurPool
from composer.algorithms.channels_last import ChannelsLast
from composer.algorithms.ema import EMA
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.mixup import MixUp
from composer.algorithms.muon import Muon
from composer.algorithms.progressive_resizing import ProgressiveResizing
from composer.algorithms.sam import SAM
from composer.algorithms.weight_standardization import WeightStandardization
from composer.models import ComposerClassifier
from composer.recipes._images import CLASSIFICATION, Augmentation, ImageSet, check_samples, first
from composer.recipes._networks import ResNet
from composer.recipes._recipe import AdamW, Runs, Task

_TRAIN, _TEST = 500, 797  # the first and the last images; those in between are for choosing hyperparameters


@dataclass(frozen=True)
class Data:
    """The handwritten digits of scikit-learn, doubled in size.

    Args:
        train_samples: Train only on this many images, from the first. None: all.
        test_samples: Test only on this many images, from the first. None: all.
        validation_samples: Test on this many images that are in neither set, instead of the test set, for choosing
            hyperparameters. None: use the test set.
        batch_size: Images per training batch. An incomplete last batch is dropped.
        shift: Shift training images at random by up to this many pixels in each direction.
    """

    train_samples: int | None = None
    test_samples: int | None = None
    validation_samples: int | None = None
    batch_size: int = 50
    shift: int = 1

    def __post_init__(self) -> None:
        check_samples(vars(self))

    def load(self) -> ImageSet:
        """Read the digits."""
        images, labels = _read()
        # Images are ordered by writer, so the two ends have different writers.
        if self.validation_samples is None:
            test = first("test_samples", self.test_samples, images[-_TEST:], labels[-_TEST:])
        else:
            test = first("validation_samples", self.validation_samples, images[_TRAIN:-_TEST], labels[_TRAIN:-_TEST])
        return ImageSet(
            "the handwritten digits of scikit-learn",
            first("train_samples", self.train_samples, images[:_TRAIN], labels[:_TRAIN]),
            test,
            num_classes=10,
            batch_size=self.batch_size,
            augmentation=Augmentation(shift=self.shift),
            validation=self.validation_samples is not None,
        )


@dataclass(frozen=True)
class Network:
    """The residual network.

    Args:
        width: Channels of the first stage; the second has twice, the third four times as many.
        blocks: Residual blocks per stage.
    """

    width: int = 16
    blocks: int = 1

    def build(self, dataset: ImageSet) -> ComposerClassifier:
        """Return a new network for the images and classes of a dataset."""
        network = ResNet(dataset.num_classes, dataset.shape[0], width=self.width, blocks=self.blocks)
        return ComposerClassifier(network, train_metrics={})  # meaningless on mixed images


def _read() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) * (255 / 16)  # the pixels are in 0 to 16
    doubled = torch.nn.functional.interpolate(pixels, scale_factor=2, mode="bilinear")
    return doubled.round().to(torch.uint8), torch.tensor(labels, dtype=torch.int64)


TASK = Task(
    name="digits",
    summary=(
        "Train a small residual network on the handwritten digits of scikit-learn from several seeds, first plainly "
        "and then with composed algorithms, with the same budget, and compare. Nothing is downloaded."
    ),
    data=Data(),
    network=Network(),
    training=AdamW(epochs=20, lr=1.5e-2, weight_decay=1.0),
    metrics=CLASSIFICATION,
    algorithms={
        "blurpool": BlurPool,
        "channels_last": ChannelsLast,
        "ema": EMA,
        "label_smoothing": LabelSmoothing,
        "mixup": MixUp,
        "muon": Muon,
        "progressive_resizing": ProgressiveResizing,
        "sam": SAM,
        "weight_standardization": WeightStandardization,
    },
    chosen=("channels_last", "ema", "label_smoothing", "muon", "weight_standardization"),
    tuned={"ema": {"half_life": "5ba"}, "label_smoothing": {"smoothing": 0.1}, "mixup": {"alpha": 0.2}},
    runs=Runs(seeds=5, threads=1),  # fast for small images, and independent of the number of cores
)
"""The defaults of `composer-train digits`, and its algorithms."""
plain, composed = TASK.plain, TASK.composed
