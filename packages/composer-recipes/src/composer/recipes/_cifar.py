"""Network and algorithms of the recipes for CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from composer.models import ComposerClassifier
from composer.models.resnet_cifar import ResNet9, ResNetCIFAR
from composer.recipes._hparams import SGD
from composer.recipes._images import CLASSIFICATION, ImageSet
from composer.recipes._task import Task
from composer.recipes._vision import ALGORITHMS, Cifar10


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
