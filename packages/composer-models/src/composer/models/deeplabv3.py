"""DeepLabv3 and DeepLabv3+ with a residual network as backbone."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torchvision.models import WeightsEnum
from torchvision.models.resnet import BasicBlock
from torchvision.models.segmentation.deeplabv3 import ASPP, DeepLabHead

from composer.models._building import Initializers, initialize, pretrained
from composer.models._segmentation import SegmentationLoss
from composer.models.resnet import RESNETS
from composer.models.tasks import ComposerClassifier
from composer.utils import check_finite, dist

_RATES = (12, 24, 36)  # of the paper, for features at 1/8 of the resolution


def composer_deeplabv3(
    num_classes: int,
    backbone_arch: str = "resnet101",
    backbone_weights: str | WeightsEnum | None = None,
    sync_bn: bool = True,
    use_plus: bool = True,
    ignore_index: int = -1,
    cross_entropy_weight: float = 1.0,
    dice_weight: float = 0.0,
    initializers: Initializers = (),
) -> ComposerClassifier:
    """Create a DeepLabv3+ or DeepLabv3 segmentation model, with the cross entropy and the mean IoU as metrics.

    Images have shape (N, 3, H, W), targets are class indices of shape (N, H, W) or probabilities of shape (N, C, H, W),
    scores have shape (N, C, H, W). Without the plus, the names of the weights are those of torchvision's
    `deeplabv3_resnet50` and `deeplabv3_resnet101` with the prefix `module.`.

    Args:
        num_classes: Number of classes C.
        backbone_arch: "resnet18", "resnet34", "resnet50", "resnet101" or "resnet152".
        backbone_weights: torchvision's weights for the backbone by name, for example "IMAGENET1K_V2". None: no weights.
        sync_bn: Use the batches of all processes for batch normalization. Without effect if there is one process when
            the model is built.
        use_plus: Use the decoder of DeepLabv3+.
        ignore_index: Pixels with this target are ignored by the loss and the metrics.
        cross_entropy_weight: Weight of the cross entropy in the loss.
        dice_weight: Weight of the Dice loss in the loss.
        initializers: Applied in this order to layers that `backbone_weights` does not set.

    Raises:
        ValueError: A name is unknown, `num_classes` is below 1, or a weight is negative or both are 0.

    Example:
        >>> model = composer_deeplabv3(num_classes=21, backbone_arch="resnet18").eval()
        >>> model((torch.zeros(1, 3, 64, 64), None)).shape
        torch.Size([1, 21, 64, 64])

    Source: see `DeepLabV3`.
    Differs: ResNet-18, -34 and -152 are also supported.
    """
    from torchmetrics import MetricCollection  # slow to import

    from composer.metrics import CrossEntropy, MIoU

    check_finite(num_classes=num_classes, least=1)
    loss = SegmentationLoss(cross_entropy_weight, dice_weight, ignore_index)
    network = DeepLabV3(num_classes, backbone_arch, use_plus=use_plus)
    initialize(network, initializers)
    if backbone_weights is not None:
        state = pretrained(backbone_arch, backbone_weights)
        network.backbone.load_state_dict({name: value for name, value in state.items() if not name.startswith("fc.")})
    if sync_bn and dist.get_world_size() > 1:
        _synchronize(network)
    metrics = [MetricCollection([CrossEntropy(ignore_index), MIoU(num_classes, ignore_index)]) for _ in range(2)]
    return ComposerClassifier(network, num_classes, train_metrics=metrics[0], val_metrics=metrics[1], loss_fn=loss)


class DeepLabV3(nn.Module):
    """A segmentation network: a dilated ResNet, pyramid pooling with dilated convolutions, and a decoder.

    The last two stages of the backbone are dilated in place of their strides, so features have 1/8 of the resolution.
    They go through parallel convolutions with dilations 12, 24 and 36 (ASPP). In DeepLabv3+ the result is enlarged to
    1/4 of the resolution and concatenated with 48 channels made from the first stage; two 3x3 convolutions follow.
    Scores are interpolated to the size of the images.

    Args:
        num_classes: Number of classes.
        backbone_arch: "resnet18", "resnet34", "resnet50", "resnet101" or "resnet152".
        use_plus: Use the decoder of DeepLabv3+.

    Raises:
        ValueError: The name is unknown, or `num_classes` is below 1.

    Example:
        >>> DeepLabV3(4, "resnet18").eval()(torch.zeros(1, 3, 32, 48)).shape
        torch.Size([1, 4, 32, 48])

    Source: Chen et al., "Rethinking Atrous Convolution for Semantic Image Segmentation", arXiv:1706.05587, section 3.3;
    Chen et al., "Encoder-Decoder with Atrous Separable Convolution", arXiv:1802.02611, section 3 (the plus). The
    backbone, ASPP and DeepLabv3's head are torchvision's.
    Differs: no multi-grid dilations. As in torchvision, half of the features after ASPP are dropped in training. With
    the plus, the 3x3 convolutions of ASPP and of the decoder are separable.
    """

    def __init__(self, num_classes: int, backbone_arch: str = "resnet101", *, use_plus: bool = True) -> None:
        super().__init__()
        check_finite(num_classes=num_classes, least=1)
        self.num_classes = num_classes
        self.use_plus = use_plus
        self.backbone = _Backbone(backbone_arch)
        low, high = self.backbone.channels
        self.classifier: nn.Module = _Decoder(low, high, num_classes) if use_plus else DeepLabHead(high, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, shape (N, num_classes, H, W), of images, shape (N, 3, H, W).

        A training batch must have at least 2 examples, because ASPP normalizes a mean over all positions.
        """
        low, high = self.backbone(x)
        scores = self.classifier(low, high) if self.use_plus else self.classifier(high)
        return F.interpolate(scores, size=x.shape[-2:], mode="bilinear", align_corners=False)


class _Backbone(nn.Module):
    """A ResNet of torchvision without its last layer; returns the features at 1/4 and at 1/8 of the resolution."""

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in RESNETS:
            raise ValueError(f"`backbone_arch` must be one of {list(RESNETS)}, got {name!r}.")
        is_deep = name not in ("resnet18", "resnet34")
        dilation = {"replace_stride_with_dilation": [False, True, True]} if is_deep else {}
        network = torchvision.models.get_model(name, weights=None, **dilation)
        if not is_deep:  # not supported by torchvision
            _dilate(network.layer3, 2)
            _dilate(network.layer4, 4)
        self.conv1, self.bn1, self.relu, self.maxpool = network.conv1, network.bn1, network.relu, network.maxpool
        self.layer1, self.layer2 = network.layer1, network.layer2
        self.layer3, self.layer4 = network.layer3, network.layer4
        self.channels = (network.fc.in_features // 8, network.fc.in_features)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        low = self.layer1(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return low, self.layer4(self.layer3(self.layer2(low)))


class _Decoder(nn.Module):
    """The head of DeepLabv3+."""

    def __init__(self, low_channels: int, high_channels: int, num_classes: int) -> None:
        super().__init__()
        self.aspp = ASPP(high_channels, _RATES)
        for index, rate in enumerate(_RATES, start=1):
            self.aspp.convs[index] = _separable(high_channels, 256, rate)
        self.project = nn.Sequential(nn.Conv2d(low_channels, 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU())
        self.fuse = nn.Sequential(_separable(48 + 256, 256), _separable(256, 256))
        self.classifier = nn.Conv2d(256, num_classes, 1)

    def forward(self, low: Tensor, high: Tensor) -> Tensor:
        high = F.interpolate(self.aspp(high), size=low.shape[-2:], mode="bilinear", align_corners=False)
        scores: Tensor = self.classifier(self.fuse(torch.cat((self.project(low), high), dim=1)))
        return scores


def _separable(in_channels: int, out_channels: int, dilation: int = 1) -> nn.Sequential:
    """A 3x3 convolution per channel, then a 1x1 convolution, both with batch normalization and ReLU."""
    return nn.Sequential(
        nn.Conv2d(in_channels, in_channels, 3, padding=dilation, dilation=dilation, groups=in_channels, bias=False),
        nn.BatchNorm2d(in_channels),
        nn.ReLU(),
        nn.Conv2d(in_channels, out_channels, 1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


def _dilate(stage: nn.Sequential, dilation: int) -> None:
    """Replace the stride of a stage of basic blocks by a dilation: the same values, at more positions."""
    for block in stage:
        assert isinstance(block, BasicBlock)
        for conv in (block.conv1, block.conv2):
            # The input of the strided convolution still has the distances of the previous stage.
            rate = dilation // 2 if conv.stride != (1, 1) else dilation
            conv.stride, conv.dilation, conv.padding = (1, 1), (rate, rate), (rate, rate)
        if block.downsample is not None:
            block.downsample[0].stride = (1, 1)


def _synchronize(network: nn.Module) -> None:
    if not (torch.cuda.is_available() or torch.xpu.is_available()):
        warnings.warn(
            "`sync_bn=True` is skipped: torch synchronizes batch normalization only on GPUs, and there is none. "
            "Every process normalizes its own batch.",
            stacklevel=3,
        )
        return
    # In place, except for a network that is a single layer.
    nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
