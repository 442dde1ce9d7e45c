"""Small networks for small images: a residual network and a plain one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from composer.utils import check_finite


class ResNet(nn.Module):
    """A residual network in three stages; the second and the third halve the resolution and double the channels.

    A 3x3 convolution, then `blocks` residual blocks of two 3x3 convolutions per stage, the mean over all positions, and
    a linear layer. Every convolution is followed by batch normalization. Where a block changes the shape, its shortcut
    is a strided 1x1 convolution. The scale of the last normalization of a block is initialized to 0.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        width: Channels of the first stage.
        blocks: Residual blocks per stage.

    Raises:
        ValueError: A number is below 1.

    Example:
        >>> network = ResNet(num_classes=10, in_channels=1)
        >>> network(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])

    Source: He et al., "Deep Residual Learning for Image Recognition", arXiv:1512.03385, section 4.2. The
    initialization to 0: Goyal et al., "Accurate, Large Minibatch SGD", arXiv:1706.02677, section 5.1.
    Differs: projection shortcuts (the paper's option B) instead of padded identities.
    """

    def __init__(self, num_classes: int, in_channels: int, *, width: int = 16, blocks: int = 1) -> None:
        super().__init__()
        check_finite(num_classes=num_classes, in_channels=in_channels, width=width, blocks=blocks, least=1)
        self.num_classes = num_classes
        self.stem = nn.Sequential(*_conv(in_channels, width, 3), nn.ReLU())
        stages = []
        channels = width
        for stage in range(3):
            for block in range(blocks):
                first = block == 0 and stage > 0
                stages.append(_Block(channels, width * 2**stage, stride=2 if first else 1))
                channels = width * 2**stage
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, shape (N, num_classes), of images, shape (N, in_channels, H, W)."""
        features: Tensor = self.stages(self.stem(x))
        scores: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return scores


class ConvNet(nn.Module):
    """A network of five 3x3 convolutions: one at full resolution, two at half, two at a quarter, with max pooling.

    Every convolution is followed by batch normalization and ReLU. Those at half the resolution have twice, those at a
    quarter four times the channels of the first. Average pooling over a grid of windows and a linear layer follow, so
    images may have any size with a position for each window.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        width: Channels of the first convolution.
        grid: Rows and columns of the grid. With more than 1, the linear layer gets positions in the image.

    Raises:
        ValueError: A number is below 1, or an image has fewer than 4 * grid pixels in a direction.

    Example:
        >>> network = ConvNet(num_classes=10, in_channels=1)
        >>> network(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, num_classes: int, in_channels: int, *, width: int = 16, grid: int = 3) -> None:
        super().__init__()
        check_finite(num_classes=num_classes, in_channels=in_channels, width=width, grid=grid, least=1)
        self.num_classes, self.grid = num_classes, grid
        wide, widest = 2 * width, 4 * width
        self.features = nn.Sequential(
            *(*_conv(in_channels, width, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(*_conv(width, wide, 3), nn.ReLU(), *_conv(wide, wide, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(*_conv(wide, widest, 3), nn.ReLU(), *_conv(widest, widest, 3), nn.ReLU()),
        )
        self.classifier = nn.Linear(widest * grid**2, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, shape (N, num_classes), of images, shape (N, in_channels, H, W)."""
        means = _pool_windows(self.features(x), self.grid)
        scores: Tensor = self.classifier(means.flatten(1))
        return scores


class SpeedNet(nn.Module):
    """The network of the CIFAR-10 speed records: a convolution to be whitened, then three groups of two convolutions.

    The first convolution has patches of 2x2 pixels and two filters per value of a patch. Each group halves the
    resolution after its first convolution; batch normalization and GELU follow each one. The largest value of each
    channel goes to a linear layer. Its weights begin with a standard deviation of 1, and its scores are divided by the
    number of channels. The first filters of each 3x3 convolution begin as identities; the scales of the normalizations
    stay 1.

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        width: Channels of the first group; the other two have four times as many.

    Raises:
        ValueError: A number is below 1.

    Example:
        >>> network = SpeedNet(num_classes=10, in_channels=3, width=8)
        >>> network(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])

    Source: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498, sections 2 and 3; the linear
    layer is that of the later version with Muon.
    Differs: the whitened convolution is set by `Whitening`.
    """

    def __init__(self, num_classes: int, in_channels: int, *, width: int = 64) -> None:
        super().__init__()
        check_finite(num_classes=num_classes, in_channels=in_channels, width=width, least=1)
        self.num_classes = num_classes
        channels = 2 * in_channels * 2 * 2
        layers: list[nn.Module] = [nn.Conv2d(in_channels, channels, 2), nn.GELU()]
        nn.init.zeros_(layers[0].bias)  # type: ignore[arg-type]
        for outputs in (width, 4 * width, 4 * width):
            layers += [_identity_conv(channels, outputs), nn.MaxPool2d(2), _fixed_norm(outputs), nn.GELU()]
            layers += [_identity_conv(outputs, outputs), _fixed_norm(outputs), nn.GELU()]
            channels = outputs
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, num_classes, bias=False)
        with torch.no_grad():
            self.classifier.weight /= self.classifier.weight.std()

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, shape (N, num_classes), of images, shape (N, in_channels, H, W) of at least 9 pixels."""
        x = self.features(x)
        # As in the record: where several positions have the largest value, `amax` would divide the gradient among them.
        largest = nn.functional.max_pool2d(x, x.shape[2:]).flatten(1)
        scores: Tensor = self.classifier(largest) / largest.shape[1]
        return scores


class _Block(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_conv(in_channels, out_channels, 3, stride), nn.ReLU(), *_conv(out_channels, out_channels, 3)
        )
        nn.init.zeros_(self.body[-1].weight)  # type: ignore[arg-type]
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(*_conv(in_channels, out_channels, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _conv(in_channels: int, out_channels: int, size: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    conv = nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv, nn.BatchNorm2d(out_channels)


def _identity_conv(in_channels: int, out_channels: int) -> nn.Conv2d:
    conv = nn.Conv2d(in_channels, out_channels, 3, padding="same", bias=False)
    nn.init.dirac_(conv.weight[:in_channels])
    return conv


def _fixed_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    norm.weight.requires_grad_(False)
    return norm


def _pool_windows(x: Tensor, grid: int) -> Tensor:
    """Average-pool with `grid` windows of equal size and stride in each direction.

    The gradient of `adaptive_avg_pool2d` is not deterministic on CUDA.
    """
    height, width = x.shape[2:]
    if min(height, width) < grid:
        raise ValueError(f"Images must have at least {4 * grid} pixels in each direction for a `grid` of {grid}.")
    stride = height // grid, width // grid
    window = height - (grid - 1) * stride[0], width - (grid - 1) * stride[1]
    return nn.functional.avg_pool2d(x, window, stride)
