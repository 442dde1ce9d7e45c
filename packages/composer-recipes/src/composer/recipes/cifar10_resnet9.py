"""The recipes of `composer-train cifar10_resnet9`: a fast residual network on CIFAR-10."""

from __future__ import annotations

from composer.recipes._recipe import SGD
from composer.recipes._vision import Cifar10 as Data
from composer.recipes._vision import Network, make_task

__all__ = ["TASK", "Data", "Network", "composed", "plain"]

TASK = make_task("ResNet-9", Network("resnet9"), Data(batch_size=512, cutout_size=8), SGD(epochs=24, lr=0.4))
"""The defaults of `composer-train cifar10_resnet9`, and its algorithms."""
plain, composed = TASK.plain, TASK.composed
