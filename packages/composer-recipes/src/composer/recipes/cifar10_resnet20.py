"""The recipes of `composer-train cifar10_resnet20`: the residual network of the ResNet paper on CIFAR-10."""

from __future__ import annotations

from composer.recipes._cifar import Network
from composer.recipes._hparams import SGD
from composer.recipes._images import CLASSIFICATION
from composer.recipes._task import Task
from composer.recipes._vision import ALGORITHMS
from composer.recipes._vision import Cifar10 as Data

__all__ = ["TASK", "Data", "Network", "composed", "plain"]

TASK = Task(
    name="cifar10_resnet20",
    summary=(
        "Train ResNet-20 on CIFAR-10, first plainly and then with composed algorithms, and compare. It is made for a "
        "GPU; on a CPU an epoch takes minutes."
    ),
    data=Data(batch_size=128),
    network=Network("resnet20"),
    training=SGD(epochs=30, lr=0.2),
    metrics=CLASSIFICATION,
    algorithms=ALGORITHMS,
    chosen=("channels_last", "ema", "label_smoothing", "progressive_resizing", "scale_schedule"),
    tuned={
        "ema": {"half_life": "100ba"},
        "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
        "label_smoothing": {"smoothing": 0.1},
        "progressive_resizing": {"initial_scale": 0.75, "finetune_fraction": 0.3, "delay_fraction": 0.3},
        "scale_schedule": {"ratio": 0.75},
    },
)
plain, composed = TASK.plain, TASK.composed
