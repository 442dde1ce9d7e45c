"""The recipes of `composer-train cifar10_resnet20`: the residual network of the ResNet paper on CIFAR-10."""

from __future__ import annotations

from composer.recipes._recipe import SGD
from composer.recipes._vision import Cifar10 as Data
from composer.recipes._vision import Network, make_task

__all__ = ["TASK", "Data", "Network", "composed", "plain"]

TASK = make_task("ResNet-20", Network("resnet20"), Data(batch_size=128), SGD(epochs=30, lr=0.2))
"""The defaults of `composer-train cifar10_resnet20`, and its algorithms."""
plain, composed = TASK.plain, TASK.composed
