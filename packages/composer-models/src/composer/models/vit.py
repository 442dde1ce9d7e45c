"""Vision transformers: ViT-S/16."""

from __future__ import annotations

import math

from torch import nn
from torchvision.models import VisionTransformer

from composer.models.tasks import ComposerClassifier
from composer.utils import check_finite

_PATCH = 16
_WIDTH = 384


def vit_small_patch16(
    num_classes: int = 1000,
    image_size: int = 224,
    channels: int = 3,
    dropout: float = 0.0,
    embedding_dropout: float = 0.0,
    *,
    num_layers: int = 12,
) -> ComposerClassifier:
    """Create a ViT-S/16 classifier of images of shape (N, channels, image_size, image_size).

    It has patches of 16x16 pixels, and 12 layers of width 384 with 6 heads. The network is torchvision's
    `VisionTransformer`; the names of its weights have the prefix `module.`. Positions are learned for one size, so
    methods that change the size of images, such as progressive resizing, cannot be used.

    Args:
        num_classes: Number of classes.
        image_size: Height and width of the images, a multiple of 16.
        channels: Channels of the images.
        dropout: Dropout probability of attention weights and of the outputs of attention and feed-forward layers.
        embedding_dropout: Dropout probability of patch embeddings.
        num_layers: Number of layers; fewer than 12 for small data.

    Raises:
        ValueError: `image_size` is not a multiple of 16, a number is below 1, or a probability is outside [0, 1].

    Example:
        >>> import torch
        >>> model = vit_small_patch16(num_classes=10, image_size=32, num_layers=2)
        >>> model((torch.zeros(2, 3, 32, 32), None)).shape
        torch.Size([2, 10])

    Source: Touvron et al., "Training data-efficient image transformers", arXiv:2012.12877, table 1 (DeiT-S);
    Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv:2010.11929, section 3.1.
    Differs: the last layer is initialized to 0, so only it has a gradient in the first step.
    """
    check_finite(num_classes=num_classes, channels=channels, num_layers=num_layers, least=1)
    check_finite("Use 0 to switch it off.", dropout=dropout, embedding_dropout=embedding_dropout, least=0, most=1)
    if image_size < _PATCH or image_size % _PATCH:
        raise ValueError(f"`image_size` must be a multiple of {_PATCH}, got {image_size!r}. Resize the images.")
    network = VisionTransformer(
        image_size=image_size,
        patch_size=_PATCH,
        num_layers=num_layers,
        num_heads=6,
        hidden_dim=_WIDTH,
        mlp_dim=4 * _WIDTH,
        dropout=dropout,
        attention_dropout=dropout,
        num_classes=num_classes,
    )
    network.encoder.dropout.p = embedding_dropout
    if channels != 3:
        network.conv_proj = patches = nn.Conv2d(channels, _WIDTH, _PATCH, stride=_PATCH)
        # torchvision's own initialization of this layer.
        nn.init.trunc_normal_(patches.weight, std=math.sqrt(1 / (channels * _PATCH**2)))
        nn.init.zeros_(patches.bias)  # type: ignore[arg-type]
    return ComposerClassifier(network, num_classes=num_classes)
