"""The recipes of `composer-train fashion_mnist`: a small convolutional network on Fashion-MNIST."""

from __future__ import annotations

from dataclasses import dataclass

from composer.models import ComposerClassifier
from composer.recipes._images import CLASSIFICATION, ImageSet
from composer.recipes._networks import ConvNet
from composer.recipes._recipe import AdamW, Task
from composer.recipes._vision import ALGORITHMS
from composer.recipes._vision import FashionMNIST as Data

__all__ = ["TASK", "Data", "Network", "composed", "plain"]


@dataclass(frozen=True)
class Network:
    """The convolutional network.

    Args:
        width: Channels of the first of five convolutions; the next two have twice, the last two four times as many.
        grid: Rows and columns of the grid of average-pooled windows that the linear layer gets.
    """

    width: int = 16
    grid: int = 3

    def build(self, dataset: ImageSet) -> ComposerClassifier:
        """Return a new network for the images and classes of a dataset."""
        network = ConvNet(dataset.num_classes, dataset.shape[0], width=self.width, grid=self.grid)
        return ComposerClassifier(network, train_metrics={})


TASK = Task(
    name="fashion_mnist",
    summary=(
        "Train a network of five convolutions on Fashion-MNIST, first plainly and then with composed algorithms that "
        "get to the same accuracy sooner, and compare."
    ),
    data=Data(),
    network=Network(),
    training=AdamW(epochs=3, lr=1e-2),
    metrics=CLASSIFICATION,
    algorithms=ALGORITHMS,
    chosen=("channels_last", "label_smoothing", "muon", "scale_schedule"),
    tuned={
        "ema": {"half_life": "100ba", "update_interval": "5ba"},
        "gradient_clipping": {"clipping_type": "norm", "clipping_threshold": 1.0},
        "label_smoothing": {"smoothing": 0.1},
        "layer_freezing": {"freeze_start": 0.2, "freeze_level": 0.5},
        "progressive_resizing": {"initial_scale": 0.7, "finetune_fraction": 0.5, "delay_fraction": 0.2},
        "scale_schedule": {"ratio": 0.7},
    },
)
"""The defaults of `composer-train fashion_mnist`, and its algorithms."""
plain, composed = TASK.plain, TASK.composed
