"""The recipes of `composer-train cifar10_record`: the methods of the CIFAR-10 speed records, on their network."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composer.algorithms.alternating_flip import AlternatingFlip
from composer.algorithms.muon import Muon
from composer.algorithms.test_time_augmentation import TestTimeAugmentation
from composer.algorithms.whitening import Whitening
from composer.models import ComposerClassifier
from composer.optim import ComposerScheduler, LinearScheduler
from composer.recipes._images import CLASSIFICATION, ImageSet
from composer.recipes._networks import SpeedNet
from composer.recipes._recipe import Runs, Task, check_at_least, check_training
from composer.recipes._vision import ALGORITHMS
from composer.recipes._vision import Cifar10 as Data

__all__ = ["TASK", "Data", "Network", "Training", "composed", "plain"]


@dataclass(frozen=True)
class Network:
    """The network of the records.

    Args:
        width: Channels of the first group of convolutions; the other two have four times as many.
    """

    width: int = 64

    def build(self, dataset: ImageSet) -> ComposerClassifier:
        """Return a new network for the images and classes of a dataset."""
        network = SpeedNet(dataset.num_classes, dataset.shape[0], width=self.width)
        return ComposerClassifier(network, train_metrics={}, num_classes=dataset.num_classes)


@dataclass(frozen=True)
class Training:
    """SGD with Nesterov momentum and a separate learning rate for biases; all learning rates fall linearly to 0.

    The learning rates are those of the records, for the mean of the loss over a batch instead of its sum.

    Args:
        epochs: Passes over the training samples.
        lr: Learning rate of the filters and the head. `Muon` has its own for the filters.
        bias_factor: The learning rate of biases is larger by this factor.
        momentum: The Nesterov momentum, in [0, 1).
        weight_decay: What the first step removes of each weight: the L2 penalty times the learning rate.

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498, section 3.4.
    """

    epochs: float = 8
    lr: float = 1.5
    bias_factor: float = 64.0
    momentum: float = 0.85
    weight_decay: float = 0.002

    def __post_init__(self) -> None:
        check_training(self.epochs, self.lr, self.weight_decay)
        check_at_least("bias_factor", self.bias_factor, 0)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum` must be in [0, 1), got {self.momentum!r}.")

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of the parameters of a model that are trained."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups = []
        for factor, is_bias in ((1.0, False), (self.bias_factor, True)):
            lr, params = self.lr * factor, [p for p in trained if (p.dim() == 1) == is_bias]
            if params and lr:
                groups.append({"params": params, "lr": lr, "weight_decay": self.weight_decay / lr})
        return torch.optim.SGD(groups, momentum=self.momentum, nesterov=self.momentum > 0)

    def schedule(self) -> ComposerScheduler:
        """Return the learning rate schedule."""
        return LinearScheduler(alpha_f=0.0)


TASK = Task(
    name="cifar10_record",
    summary=(
        "Train the network of the CIFAR-10 speed records for eight epochs, first with SGD alone and then with the "
        "methods of the records, and compare. It is made for a GPU; on a CPU an epoch takes minutes."
    ),
    data=Data(batch_size=2000, shift=2, flip=False),
    network=Network(),
    training=Training(),
    metrics=CLASSIFICATION,
    algorithms={
        **ALGORITHMS,
        "alternating_flip": AlternatingFlip,
        "muon": Muon,
        "test_time_augmentation": TestTimeAugmentation,
        "whitening": Whitening,
    },
    chosen=("whitening", "alternating_flip", "channels_last", "label_smoothing", "muon", "test_time_augmentation"),
    tuned={
        "ema": {"half_life": "20ba", "update_interval": "5ba"},
        "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
        "label_smoothing": {"smoothing": 0.2},
        "muon": {
            "lr": 0.24,
            "weight_decay": 0.0,
            "momentum": 0.6,
            "scale": "original",
            "steps": 3,
            "fixed_norm": True,
        },
        "scale_schedule": {"ratio": 0.75},
    },
    runs=Runs(deterministic=False),
)
plain, composed = TASK.plain, TASK.composed
