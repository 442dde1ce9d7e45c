"""Imports that a run needs, for the process from which runs are forked: they take longer than a short run.

Nothing is computed here: a process that has used autograd on a GPU cannot be forked.
"""

import torch._dynamo
import torch._inductor
import torchmetrics
import torchvision

import composer.trainer
from composer.evidence.run import environment

__all__ = ["composer", "environment", "torch", "torchmetrics", "torchvision"]

environment("cpu")  # cached by its argument, and the same in every run on the CPU
