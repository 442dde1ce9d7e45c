"""U-Nets for images and for volumes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer.models._segmentation import SegmentationLoss
from composer.models.tasks import ComposerClassifier
from composer.utils import check_finite

if TYPE_CHECKING:
    from torchmetrics import MetricCollection  # slow to import, so at run time only when there are metrics

    from composer.metrics import Dice

_CONVS: dict[int, Any] = {2: nn.Conv2d, 3: nn.Conv3d}
_UP_CONVS: dict[int, Any] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_NORMS: dict[str, dict[int, Callable[[int], nn.Module]]] = {
    "batch": {2: nn.BatchNorm2d, 3: nn.BatchNorm3d},
    "instance": {
        2: lambda channels: nn.InstanceNorm2d(channels, affine=True),
        3: lambda channels: nn.InstanceNorm3d(channels, affine=True),
    },
    # Channels must be a multiple of the groups.
    "group": dict.fromkeys((2, 3), lambda channels: nn.GroupNorm(math.gcd(8, channels), channels)),
}


class UNet(ComposerClassifier):
    """A U-Net for segmentation of images. Its loss is the sum of the cross entropy and the Dice loss.

    Images have shape (N, in_channels, H, W), H and W at least 2 ** levels; targets are class indices of shape
    (N, H, W), 0 for the background; scores have shape (N, num_classes + 1, H, W). The Dice loss is over the
    foreground. Metrics are `Dice` in training, `CrossEntropy` and `Dice` in evaluation.

    Args:
        num_classes: Number of classes without the background.
        in_channels: Channels of the images; the default is for the four modalities of BraTS.
        width: Channels at the full resolution; they double with each level.
        levels: Number of resolutions, each half of the previous one.
        norm: "instance", "batch" or "group" normalization. Torch supports the first only in the contiguous layout, so
            use another one with channels-last.

    Attributes:
        num_classes: Number of classes, including the background.

    Raises:
        ValueError: A number is below 1, or the normalization is unknown.

    Example:
        >>> model = UNet(num_classes=3, width=8)
        >>> model((torch.zeros(1, 4, 64, 64), None)).shape
        torch.Size([1, 4, 64, 64])

    Source: Ronneberger et al., "U-Net", arXiv:1505.04597, section 2. Loss, normalization, strides and leaky ReLU:
    Isensee et al., "nnU-Net", Nature Methods 18, 2021, methods.
    Differs: convolutions are padded, and strided convolutions replace pooling. The reference implementation has more
    layers, so weights cannot be exchanged.
    """

    def __init__(
        self,
        num_classes: int = 3,
        *,
        in_channels: int = 4,
        width: int = 64,
        levels: int = 5,
        norm: str = "instance",
    ) -> None:
        check_finite(num_classes=num_classes, least=1)
        module = UNetModule(2, in_channels, num_classes + 1, width, levels, norm)
        super().__init__(module, num_classes + 1, *_metrics(num_classes), loss_fn=_loss())

    def inference2d(self, image: Tensor) -> Tensor:
        """Return class scores of volumes, with the slices of each volume as a batch.

        Args:
            image: Volumes, shape (N, in_channels, D, H, W).

        Returns:
            Shape (N, num_classes + 1, D, H, W).
        """
        return torch.stack([self.module(volume.transpose(0, 1)).transpose(0, 1) for volume in image])


class UNet3D(ComposerClassifier):
    """A U-Net for segmentation of volumes; otherwise like `UNet`.

    Volumes have shape (N, in_channels, D, H, W), targets (N, D, H, W), scores (N, num_classes + 1, D, H, W).

    Args:
        num_classes: Number of classes without the background.
        in_channels: Channels of the volumes; the default is for the four modalities of BraTS.
        width: Half of the channels at the full resolution; they double with each level.
        levels: Number of resolutions, each half of the previous one.
        norm: "instance", "batch" or "group" normalization.

    Attributes:
        num_classes: Number of classes, including the background.

    Raises:
        ValueError: A number is below 1, or the normalization is unknown.

    Example:
        >>> model = UNet3D(num_classes=3, width=4, levels=3)
        >>> model((torch.zeros(1, 4, 16, 16, 16), None)).shape
        torch.Size([1, 4, 16, 16, 16])

    Source: Cicek et al., "3D U-Net", arXiv:1606.06650, section 2: the first convolution of a level of the encoder has
    half of its channels. Otherwise see `UNet`.
    Differs: see `UNet`.
    """

    def __init__(
        self,
        num_classes: int = 3,
        *,
        in_channels: int = 4,
        width: int = 32,
        levels: int = 4,
        norm: str = "instance",
    ) -> None:
        check_finite(num_classes=num_classes, least=1)
        module = UNetModule(3, in_channels, num_classes + 1, width, levels, norm)
        super().__init__(module, num_classes + 1, *_metrics(num_classes), loss_fn=_loss())


class UNetModule(nn.Module):
    """The network of `UNet` (2 dimensions) and `UNet3D` (3 dimensions).

    Every level of the encoder has two convolutions of size 3, the first with stride 2 except at the top. The two of the
    decoder get the level below, upsampled by a transposed convolution, and the features of the encoder.

    Args:
        dims: 2 or 3.
        in_channels: Channels of the inputs.
        num_classes: Channels of the scores.
        width: Channels of the first convolution.
        levels: Number of resolutions.
        norm: "instance", "batch" or "group".

    Raises:
        ValueError: A number is below 1, `dims` is not 2 or 3, or the normalization is unknown.
    """

    def __init__(
        self, dims: int, in_channels: int, num_classes: int, width: int, levels: int, norm: str = "instance"
    ) -> None:
        super().__init__()
        if dims not in _CONVS:
            raise ValueError(f"`dims` must be 2 or 3, got {dims!r}.")
        check_finite(in_channels=in_channels, num_classes=num_classes, width=width, levels=levels, least=1)
        if norm not in _NORMS:
            raise ValueError(f"`norm` must be one of {sorted(_NORMS)}, got {norm!r}.")
        self.dims = dims
        self.num_classes = num_classes
        firsts = [width * 2**level for level in range(levels)]
        channels = [first * (dims - 1) for first in firsts]
        self.down, self.enlarge, self.up = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for before, first, after in zip([in_channels, *channels[:-1]], firsts, channels, strict=True):
            stride = 2 if len(self.down) > 0 else 1
            self.down.append(nn.Sequential(_conv(dims, before, first, norm, stride), _conv(dims, first, after, norm)))
        for above, below in reversed(list(pairwise(channels))):
            enlarged = above if dims == 2 else below
            self.enlarge.append(_UP_CONVS[dims](below, enlarged, 2, stride=2, bias=dims == 2))
            self.up.append(nn.Sequential(_conv(dims, enlarged + above, above, norm), _conv(dims, above, above, norm)))
        self.classifier = _CONVS[dims](channels[0], num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, shape (N, num_classes, ...), of images or volumes, shape (N, in_channels, ...)."""
        skipped = []
        for level in self.down:
            x = level(x)
            skipped.append(x)
        skipped.pop()
        for enlarge, level in zip(self.enlarge, self.up, strict=True):
            skip = skipped.pop()
            x = level(torch.cat((_crop(enlarge(x), skip), skip), dim=1))
        scores: Tensor = self.classifier(x)
        return scores


def _crop(x: Tensor, like: Tensor) -> Tensor:
    """Crop the extra row or column that upsampling adds if the target size is odd."""
    surplus = [large - small for large, small in zip(x.shape[2:], like.shape[2:], strict=True)]
    return x if not any(surplus) else F.pad(x, [pad for extra in reversed(surplus) for pad in (0, -extra)])


def _conv(dims: int, in_channels: int, out_channels: int, norm: str, stride: int = 1) -> nn.Sequential:
    conv = _CONVS[dims](in_channels, out_channels, 3, stride, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, a=0.01)
    return nn.Sequential(conv, _NORMS[norm][dims](out_channels), nn.LeakyReLU(0.01, inplace=True))


def _loss() -> SegmentationLoss:
    return SegmentationLoss(cross_entropy_weight=1.0, dice_weight=1.0, dice_of_background=False)


def _metrics(num_classes: int) -> tuple[Dice, MetricCollection]:
    from torchmetrics import MetricCollection

    from composer.metrics import CrossEntropy, Dice

    return Dice(num_classes), MetricCollection([CrossEntropy(), Dice(num_classes)])
