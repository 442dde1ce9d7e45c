"""Residual networks for images of 32x32 pixels: ResNet-20, ResNet-56, and the fast ResNet-9."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from composer.models._building import Initializers, initialize
from composer.models.tasks import ComposerClassifier
from composer.utils import check_finite


def composer_resnet_cifar(
    model_name: str, num_classes: int = 10, initializers: Initializers = None
) -> ComposerClassifier:
    """Create a residual classifier of images of shape (N, 3, 32, 32).

    Args:
        model_name: "resnet_9", "resnet_20" or "resnet_56"; also without the underscore.
        num_classes: Number of classes.
        initializers: Applied in this order. None: the initialization of the network.

    Raises:
        ValueError: The name is unknown, or `num_classes` is below 1.

    Example:
        >>> import torch
        >>> model = composer_resnet_cifar("resnet_20")
        >>> model((torch.zeros(2, 3, 32, 32), None)).shape
        torch.Size([2, 10])

    Source: see `ResNetCIFAR` and `ResNet9`.
    """
    network: nn.Module
    match model_name.replace("_", ""):
        case "resnet9":
            network = ResNet9(num_classes)
        case "resnet20":
            network = ResNetCIFAR(20, num_classes)
        case "resnet56":
            network = ResNetCIFAR(56, num_classes)
        case _:
            raise ValueError(
                f"`model_name` must be 'resnet_9', 'resnet_20' or 'resnet_56', got {model_name!r}. "
                f"For other depths wrap `ResNetCIFAR(depth)` in a `ComposerClassifier`."
            )
    initialize(network, initializers)
    return ComposerClassifier(network, num_classes=num_classes)


class ResNetCIFAR(nn.Module):
    """The residual network with 6n + 2 layers: three stages of n blocks, with 16, 32 and 64 channels.

    Args:
        depth: 6n + 2 for an integer n: 20, 32, 44, 56, 110.
        num_classes: Number of classes.
        in_channels: Channels of the images.

    Raises:
        ValueError: `depth` is not 6n + 2, or a number is below 1.

    Example:
        >>> import torch
        >>> ResNetCIFAR(20)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    Source: He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, section 4.2. The blocks are
    torchvision's `BasicBlock`.
    Differs: the shortcut of the first block of a stage is a strided 1x1 convolution with batch normalization (the
    paper's option B), not a padded identity (A): 0.3% more parameters.
    """

    def __init__(self, depth: int, num_classes: int = 10, *, in_channels: int = 3) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"`depth` must be 6n + 2 for n of at least 1, got {depth!r}. Use 20 or 56.")
        check_finite(num_classes=num_classes, in_channels=in_channels, least=1)
        self.num_classes = num_classes
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(16, 16, depth // 6, stride=1)
        self.layer2 = _stage(16, 32, depth // 6, stride=2)
        self.layer3 = _stage(32, 64, depth // 6, stride=2)
        self.fc = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, shape (N, num_classes), of images, shape (N, in_channels, H, W)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        scores: Tensor = self.fc(x.mean(dim=(2, 3)))
        return scores


class ResNet9(nn.Module):
    """The residual network of the DAWNBench entry for CIFAR-10, with few, wide layers for high GPU utilization.

    A 3x3 convolution; three layers of a 3x3 convolution and max pooling, with 128, 256 and 512 channels, the first and
    the last followed by a residual block; the maximum over all positions; a linear layer, whose scores are scaled by
    1/8. Every convolution has batch normalization and ReLU. All operations preserve the channels-last layout and run in
    bfloat16 under autocast.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        scale: Factor of the scores.

    Raises:
        ValueError: A number is below 1.

    Example:
        >>> import torch
        >>> ResNet9()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    Source: Page, "How to Train Your ResNet", parts 3 and 4, myrtle.ai, 2018 (the network of the DAWNBench entry).
    Differs: none.
    """

    def __init__(self, num_classes: int = 10, *, in_channels: int = 3, scale: float = 0.125) -> None:
        super().__init__()
        check_finite(num_classes=num_classes, in_channels=in_channels, least=1)
        self.num_classes = num_classes
        self.scale = scale
        self.prep = _conv(in_channels, 64)
        self.layer1 = nn.Sequential(_conv(64, 128), nn.MaxPool2d(2), _Residual(128))
        self.layer2 = nn.Sequential(_conv(128, 256), nn.MaxPool2d(2))
        self.layer3 = nn.Sequential(_conv(256, 512), nn.MaxPool2d(2), _Residual(512))
        self.fc = nn.Linear(512, num_classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, shape (N, num_classes), of images, shape (N, in_channels, H, W), H and W at least 8."""
        x = self.layer3(self.layer2(self.layer1(self.prep(x))))
        # Not an adaptive layer: its backward pass has no deterministic form on CUDA.
        x = F.max_pool2d(x, kernel_size=x.shape[-2:]).flatten(1)
        scores: Tensor = self.fc(x) * self.scale
        return scores


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, channels)
        self.conv2 = _conv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.conv2(self.conv1(x))
        return result


def _conv(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    shortcut = None
    if stride > 1:
        shortcut = nn.Sequential(nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))
    first = BasicBlock(in_channels, channels, stride, shortcut)
    return nn.Sequential(first, *(BasicBlock(channels, channels) for _ in range(blocks - 1)))
