"""Data and algorithms of the recipes for Fashion-MNIST and CIFAR-10, and the residual networks for the latter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from composer.algorithms.blurpool import BlurPool
from composer.algorithms.channels_last import ChannelsLast
from composer.algorithms.cutmix import CutMix
from composer.algorithms.cutout import CutOut
from composer.algorithms.ema import EMA
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.layer_freezing import LayerFreezing
from composer.algorithms.mixup import MixUp
from composer.algorithms.muon import Muon
from composer.algorithms.progressive_resizing import ProgressiveResizing
from composer.algorithms.sam import SAM
from composer.algorithms.scale_schedule import ScaleSchedule
from composer.algorithms.selective_backprop import SelectiveBackprop
from composer.algorithms.squeeze_excite import SqueezeExcite
from composer.algorithms.weight_standardization import WeightStandardization
from composer.core import Algorithm
from composer.datasets import load_cifar10, load_fashion_mnist
from composer.models import ComposerClassifier
from composer.models.resnet_cifar import ResNet9, ResNetCIFAR
from composer.recipes._images import CLASSIFICATION, Augmentation, ImageSet, check_samples, first, load_split
from composer.recipes._recipe import SGD, Task, check_at_least, find_data

ALGORITHMS: Mapping[str, type[Algorithm]] = {
    "blurpool": BlurPool,
    "channels_last": ChannelsLast,
    "cutmix": CutMix,
    "cutout": CutOut,
    "ema": EMA,
    "gradient_clipping": GradientClipping,
    "label_smoothing": LabelSmoothing,
    "layer_freezing": LayerFreezing,
    "mixup": MixUp,
    "muon": Muon,
    "progressive_resizing": ProgressiveResizing,
    "sam": SAM,
    "scale_schedule": ScaleSchedule,
    "selective_backprop": SelectiveBackprop,
    "squeeze_excite": SqueezeExcite,
    "weight_standardization": WeightStandardization,
}


@dataclass(frozen=True)
class FashionMNIST:
    """Fashion-MNIST: 60,000 images of clothes to train on, 10,000 to test, 28x28 pixels, 10 classes.

    Args:
        data: The root folder passed to torchvision, which holds FashionMNIST/raw. None: the environment variable
            COMPOSER_DATA.
        train_samples: Train only on this many images, from the first. None: all.
        test_samples: Test only on this many images, from the first. None: all.
        validation_samples: Hold out this many images from the end of the training set, and test on them instead of the
            test set, for choosing hyperparameters. None: use the test set.
        batch_size: Images per training batch. An incomplete last batch is dropped.
        shift: Shift training images at random by up to this many pixels in each direction.
        flip: Mirror training images with probability 0.5.
    """

    data: Path | None = None
    train_samples: int | None = None
    test_samples: int | None = None
    validation_samples: int | None = None
    batch_size: int = 128
    shift: int = 0
    flip: bool = True

    def __post_init__(self) -> None:
        check_samples(vars(self))

    def load(self) -> ImageSet:
        """Read the images.

        Raises:
            FileNotFoundError: A file does not exist; the message has the command that downloads it.
            ValueError: There are fewer images than requested, or a file has unexpected contents.
        """
        return _load("Fashion-MNIST", load_fashion_mnist, self, Augmentation(self.shift, self.flip))


@dataclass(frozen=True)
class Cifar10:
    """CIFAR-10: 50,000 photographs to train on, 10,000 to test, 3x32x32 pixels, 10 classes.

    Args:
        data: The root folder passed to torchvision, which holds cifar-10-batches-py. None: the environment variable
            COMPOSER_DATA.
        train_samples: Train only on this many images, from the first. None: all.
        test_samples: Test only on this many images, from the first. None: all.
        validation_samples: Hold out this many images from the end of the training set, and test on them instead of the
            test set, for choosing hyperparameters. None: use the test set.
        batch_size: Images per training batch. An incomplete last batch is dropped.
        shift: Shift training images at random by up to this many pixels in each direction, with a reflected border.
        flip: Mirror training images with probability 0.5.
        cutout_size: Side in pixels of the square that is cut out of each training image. 0: none.
    """

    data: Path | None = None
    train_samples: int | None = None
    test_samples: int | None = None
    validation_samples: int | None = None
    batch_size: int = 128
    shift: int = 4
    flip: bool = True
    cutout_size: int = 0

    def __post_init__(self) -> None:
        check_samples(vars(self))
        check_at_least("cutout_size", self.cutout_size, 0)

    def load(self) -> ImageSet:
        """Read the images.

        Raises:
            FileNotFoundError: A file does not exist; the message has the command that downloads it.
            ValueError: There are fewer images than requested, or a file has unexpected contents.
        """
        return _load("CIFAR-10", load_cifar10, self, Augmentation(self.shift, self.flip, self.cutout_size, "reflect"))


def _load(
    name: str,
    load: Callable[[Path, bool], tuple[Tensor, Tensor]],
    data: FashionMNIST | Cifar10,
    augmentation: Augmentation,
) -> ImageSet:
    held_out = data.validation_samples
    train, test = load_split(load, find_data(data.data), held_out)
    train = first("train_samples", data.train_samples, *train)
    test = first("test_samples", data.test_samples, *test)
    return ImageSet(name, train, test, 10, data.batch_size, augmentation, validation=held_out is not None)


@dataclass(frozen=True)
class Network:
    """A residual network for CIFAR-10 of `composer-models`.

    Args:
        model: The architecture.
    """

    model: Literal["resnet9", "resnet20", "resnet56"] = "resnet9"

    def build(self, dataset: ImageSet) -> ComposerClassifier:
        """Return a new network for the classes of a dataset."""
        classes = dataset.num_classes
        network = ResNet9(classes) if self.model == "resnet9" else ResNetCIFAR(int(self.model[6:]), classes)
        return ComposerClassifier(network, train_metrics={}, num_classes=classes)


def make_task(title: str, network: Network, data: Cifar10, training: SGD) -> Task:
    """Return a task on CIFAR-10.

    Args:
        title: The name of the network in the help.
        network: The network.
        data: The data.
        training: The optimization.
    """
    return Task(
        name=f"cifar10_{network.model}",
        summary=(
            f"Train {title} on CIFAR-10, first plainly and then with composed algorithms, and compare. It is made for "
            f"a GPU; on a CPU an epoch takes minutes."
        ),
        data=data,
        network=network,
        training=training,
        metrics=CLASSIFICATION,
        algorithms=ALGORITHMS,
        chosen=("channels_last", "label_smoothing", "scale_schedule", "weight_standardization"),
        tuned={
            "ema": {"half_life": "100ba", "update_interval": "5ba"},
            "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
            "label_smoothing": {"smoothing": 0.1},
            "progressive_resizing": {"initial_scale": 0.75, "finetune_fraction": 0.3, "delay_fraction": 0.3},
            "scale_schedule": {"ratio": 0.75},
        },
    )
