"""The network of the recipes for CIFAR-10."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from composer.models import ComposerClassifier
from composer.models.resnet_cifar import ResNet9, ResNetCIFAR
from composer.recipes._images import ImageSet

__all__ = ["Network"]


@dataclass(frozen=True)
class Network:
    """A residual network for CIFAR-10 of `composer-models`.

    Args:
        model: Which one.
    """

    model: Literal["resnet9", "resnet20", "resnet56"] = "resnet9"

    def build(self, dataset: ImageSet) -> ComposerClassifier:
        """A new network for so many classes."""
        classes = dataset.num_classes
        network = ResNet9(classes) if self.model == "resnet9" else ResNetCIFAR(int(self.model[6:]), classes)
        return ComposerClassifier(network, train_metrics={}, num_classes=classes)
