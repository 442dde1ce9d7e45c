"""The recipes of `composer-train cifar10_record`: the methods of the CIFAR-10 speed records, on their network."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composer.algorithms.alternating_flip import AlternatingFlip
from composer.algorithms.muon import Muon
from composer.algorithms.test_time_augmentation import TestTimeAugmentation
from composer.algorithms.whitening import Whitening
from composer.models import ComposerClassifier
from composer.optim import ComposerScheduler, GroupScheduler, LinearScheduler
from composer.recipes._images import CLASSIFICATION, ImageSet
from composer.recipes._networks import SpeedNet
from composer.recipes._recipe import Runs, Task, check_at_least, check_training
from composer.recipes._vision import ALGORITHMS
from composer.recipes._vision import Cifar10 as Data
from composer.utils import check_finite

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
    """SGD with Nesterov momentum; all learning rates fall linearly to 0.

    The record sums the loss over a batch. The learning rates here are for its mean, so they are those of the record
    times its batch size. The weight decay has the value of the record: it does not depend on the loss.

    Args:
        epochs: Passes over the training samples.
        lr: Learning rate of the filters. `Muon` has its own for them.
        head_lr: Learning rate of the linear layer.
        bias_lr: Learning rate of the biases.
        whitening_bias_epochs: The learning rate of the first convolution's bias falls to 0 within these epochs.
        momentum: The Nesterov momentum, in [0, 1).
        weight_decay: The L2 penalty times the learning rate, the same for all parameters that SGD trains.

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498, section 3.4, for `lr` and
    `momentum`; its later version with Muon, https://github.com/KellerJordan/cifar10-airbench, for the others.
    Differs: the schedule lags by one batch, as all schedules of `composer.optim` do.
    """

    epochs: float = 8
    lr: float = 1.5
    head_lr: float = 0.67 * 2000
    bias_lr: float = 0.053 * 2000
    whitening_bias_epochs: int = 3
    momentum: float = 0.85
    weight_decay: float = 2e-6 * 2000

    def __post_init__(self) -> None:
        check_training(self.epochs, self.lr, self.weight_decay)
        check_finite(head_lr=self.head_lr, bias_lr=self.bias_lr, above=0)
        check_at_least("whitening_bias_epochs", self.whitening_bias_epochs, 1)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"`momentum` must be in [0, 1), got {self.momentum!r}.")

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of the parameters of a model that are trained."""
        rates = {"filters": self.lr, "head": self.head_lr, "biases": self.bias_lr, "whitening_bias": self.bias_lr}
        params: dict[str, list[torch.nn.Parameter]] = {name: [] for name in rates}
        whitening_biases = {id(each.bias) for each in model.modules() if isinstance(each, torch.nn.Conv2d)}
        for parameter in model.parameters():
            if id(parameter) in whitening_biases:
                params["whitening_bias"].append(parameter)
            elif parameter.requires_grad:
                params[{4: "filters", 2: "head", 1: "biases"}[parameter.dim()]].append(parameter)
        groups = [
            {"params": params[name], "lr": lr, "weight_decay": self.weight_decay / lr, "name": name}
            for name, lr in rates.items()
        ]
        return torch.optim.SGD(groups, momentum=self.momentum, nesterov=self.momentum > 0)

    def schedule(self) -> ComposerScheduler:
        """Return the learning rate schedule."""
        whitening_bias = LinearScheduler(t_max=f"{self.whitening_bias_epochs}ep")
        return GroupScheduler(LinearScheduler(), whitening_bias=whitening_bias)


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
