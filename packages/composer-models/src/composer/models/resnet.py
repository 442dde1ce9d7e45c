"""Residual networks for ImageNet: torchvision's ResNet-18, -34, -50, -101 and -152."""

from __future__ import annotations

import logging

import torchvision
from torchvision.models import WeightsEnum

from composer.loss import loss_registry
from composer.models._building import (
    Initializers,
    as_initializers,
    initialize,
    load_all_but,
    pretrained,
)
from composer.models.initializers import Initializer
from composer.models.tasks import ComposerClassifier
from composer.utils import check_finite

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_log = logging.getLogger(__name__)


def composer_resnet(
    model_name: str,
    num_classes: int = 1000,
    weights: str | WeightsEnum | None = None,
    groups: int = 1,
    width_per_group: int = 64,
    initializers: Initializers = None,
    loss_name: str = "soft_cross_entropy",
) -> ComposerClassifier:
    """Create a classifier of images of shape (N, 3, H, W) from a residual network of torchvision.

    The names of its weights are torchvision's with the prefix `module.`. If `weights` are for another number of
    classes, the last layer is newly initialized.

    Args:
        model_name: "resnet18", "resnet34", "resnet50", "resnet101" or "resnet152".
        num_classes: Number of classes.
        weights: Pretrained weights by name, for example "IMAGENET1K_V2", or as a member of torchvision's enum. None: no
            pretrained weights.
        groups: Groups of the 3x3 convolutions of the three deeper networks (ResNeXt).
        width_per_group: Channels of a group in the first stage of the three deeper networks.
        initializers: Applied in this order to layers that `weights` does not set. None: torchvision's initialization.
        loss_name: A name in `composer.loss.loss_registry`: "soft_cross_entropy" or
            "binary_cross_entropy_with_logits". The latter trains better with the initializer
            "linear_log_constant_bias"; a warning is logged if it is missing.

    Raises:
        ValueError: A name is unknown, `num_classes` is below 1, or the weights are for other `groups` or
            `width_per_group`.

    Example:
        >>> import torch
        >>> model = composer_resnet("resnet18", num_classes=10)
        >>> model((torch.zeros(2, 3, 64, 64), None)).shape
        torch.Size([2, 10])

    Source: He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, table 1. Groups: Xie et al.,
    "Aggregated Residual Transformations", arXiv:1611.05431. Binary cross entropy: Wightman et al., "ResNet strikes
    back", arXiv:2110.00476.
    Differs: the stride of a bottleneck is in its 3x3 convolution ("ResNet v1.5"). MosaicML's published recipes use the
    initializers "kaiming_normal" and "bn_uniform", which are not the default here.
    """
    if model_name not in RESNETS:
        raise ValueError(f"`model_name` must be one of {list(RESNETS)}, got {model_name!r}.")
    check_finite(num_classes=num_classes, least=1)
    if loss_name not in loss_registry:
        raise ValueError(f"`loss_name` must be one of {sorted(loss_registry)}, got {loss_name!r}.")
    if weights is not None and (groups, width_per_group) != (1, 64):
        raise ValueError(
            f"`weights` must be None with other groups than torchvision's, got {str(weights)!r} for {groups=}, "
            f"{width_per_group=}. Leave `groups` and `width_per_group` at 1 and 64."
        )
    if loss_name == "binary_cross_entropy_with_logits" and (
        Initializer.LINEAR_LOG_CONSTANT_BIAS not in as_initializers(initializers)
    ):
        _log.warning(
            "Binary cross entropy trains better when the outputs start near 1/n. Pass the initializer "
            "'linear_log_constant_bias'."
        )
    network = torchvision.models.get_model(
        model_name, weights=None, num_classes=num_classes, groups=groups, width_per_group=width_per_group
    )
    initialize(network, initializers)
    if weights is not None:
        load_all_but(network, pretrained(model_name, weights), head="fc")
    return ComposerClassifier(network, num_classes=num_classes, loss_fn=loss_registry[loss_name])
