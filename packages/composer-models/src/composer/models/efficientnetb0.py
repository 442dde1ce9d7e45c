"""EfficientNet-B0 of torchvision."""

from __future__ import annotations

from torchvision.models import WeightsEnum, efficientnet_b0

from composer.models._building import load_all_but, pretrained
from composer.models.tasks import ComposerClassifier
from composer.utils import check_finite


def composer_efficientnetb0(
    num_classes: int = 1000, drop_connect_rate: float = 0.2, *, weights: str | WeightsEnum | None = None
) -> ComposerClassifier:
    """Create a classifier of images of shape (N, 3, H, W) from torchvision's EfficientNet-B0.

    The names of its weights are torchvision's with the prefix `module.`. If `weights` are for another number of
    classes, the last layer is newly initialized.

    Args:
        num_classes: Number of classes.
        drop_connect_rate: Probability to skip the last block for an example; for earlier blocks it is smaller, in
            proportion to their depth.
        weights: Pretrained weights by name, for example "IMAGENET1K_V1", or as a member of torchvision's enum. None: no
            pretrained weights.

    Raises:
        ValueError: `num_classes` is below 1, `drop_connect_rate` is outside [0, 1], or the weights are unknown.

    Example:
        >>> import torch
        >>> model = composer_efficientnetb0(num_classes=10)
        >>> model((torch.zeros(2, 3, 32, 32), None)).shape
        torch.Size([2, 10])

    Source: Tan, Le, "EfficientNet", arXiv:1905.11946, table 1.
    Differs: batch normalization has momentum 0.1 and epsilon 1e-5, torch's defaults.
    """
    check_finite(num_classes=num_classes, least=1)
    check_finite("Use 0 to switch it off.", drop_connect_rate=drop_connect_rate, least=0, most=1)
    network = efficientnet_b0(num_classes=num_classes, stochastic_depth_prob=drop_connect_rate)
    if weights is not None:
        load_all_but(network, pretrained("efficientnet_b0", weights), head="classifier.1")
    return ComposerClassifier(network, num_classes=num_classes)
