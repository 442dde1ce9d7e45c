"""A small convolutional network for MNIST and similar datasets."""

from __future__ import annotations

from torch import Tensor, nn

from composer.models._building import Initializers, initialize
from composer.models.tasks import ComposerClassifier
from composer.utils import check_finite


def mnist_model(num_classes: int = 10, initializers: Initializers = None) -> ComposerClassifier:
    """Create a small convolutional classifier of grayscale images of shape (N, 1, 28, 28).

    Args:
        num_classes: Number of classes.
        initializers: Applied in this order. None: torch's initialization.

    Raises:
        ValueError: `num_classes` is below 1.

    Example:
        >>> import torch
        >>> model = mnist_model()
        >>> model((torch.zeros(2, 1, 28, 28), None)).shape
        torch.Size([2, 10])

    Source: none.
    Differs: the layers are not those of MosaicML's Composer, so weights cannot be exchanged.
    """
    network = MNISTNet(num_classes)
    initialize(network, initializers)
    return ComposerClassifier(network, num_classes=num_classes)


class MNISTNet(nn.Module):
    """Three 3x3 convolutions with 16, 32 and 64 channels, batch normalization and ReLU, and a linear layer.

    A 2x2 max pooling follows the first and the second. The linear layer gets the mean over all positions, so images may
    have any size from 4x4.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.

    Raises:
        ValueError: A number is below 1.

    Example:
        >>> import torch
        >>> MNISTNet()(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, num_classes: int = 10, *, in_channels: int = 1) -> None:
        super().__init__()
        check_finite(num_classes=num_classes, in_channels=in_channels, least=1)
        self.num_classes = num_classes
        self.features = nn.Sequential(
            *_conv(in_channels, 16),
            nn.MaxPool2d(2),
            *_conv(16, 32),
            nn.MaxPool2d(2),
            *_conv(32, 64),
        )
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, shape (N, num_classes), of images, shape (N, in_channels, H, W)."""
        scores: Tensor = self.fc(self.features(x).mean(dim=(2, 3)))
        return scores


def _conv(in_channels: int, out_channels: int) -> tuple[nn.Module, ...]:
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
    return conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)
