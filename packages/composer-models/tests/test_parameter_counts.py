"""The number of parameters is the published one: the layers are those of the paper."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import get_model_weights

from composer.models import (
    UNet,
    UNet3D,
    composer_deeplabv3,
    composer_efficientnetb0,
    composer_resnet,
    composer_resnet_cifar,
    composer_timm,
    mnist_model,
    vit_small_patch16,
)
from composer.models.unet import UNetModule

README = Path(__file__).resolve().parent.parent / "README.md"
CIFAR = (3, 32, 32)
IMAGENET = (3, 224, 224)
TABLE = {
    "mnist_model()": (mnist_model, (1, 28, 28)),
    **{
        f'composer_resnet_cifar("{name}")': (lambda name=name: composer_resnet_cifar(name), CIFAR)
        for name in ("resnet_9", "resnet_20", "resnet_56")
    },
    **{
        f'composer_resnet("{name}")': (lambda name=name: composer_resnet(name), IMAGENET)
        for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
    },
    "composer_efficientnetb0()": (composer_efficientnetb0, IMAGENET),
    "vit_small_patch16()": (vit_small_patch16, IMAGENET),
    "composer_deeplabv3(150)": (lambda: composer_deeplabv3(150), (3, 512, 512)),
    "composer_deeplabv3(150, use_plus=False)": (lambda: composer_deeplabv3(150, use_plus=False), (3, 512, 512)),
    "UNet()": (UNet, (4, 192, 160)),
    "UNet3D()": (UNet3D, (4, 128, 128, 128)),
}


def count(make) -> int:
    with torch.device("meta"):  # makes no values
        return sum(parameter.numel() for parameter in make().parameters())


@pytest.mark.parametrize(("row", "make", "shape"), [(row, *facts) for row, facts in TABLE.items()], ids=list(TABLE))
def test_the_readme_has_the_number_of_parameters_and_the_size_of_the_input(row, make, shape):
    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{row}`")]

    assert 1 == len(rows)
    assert [f"{count(make):,}", "x".join(map(str, shape))] == [cell.strip() for cell in rows[0].split("|")[2:4]]


def test_the_readme_has_every_row():
    rows = re.findall(r"^\| `(.*?)` \| [\d,]+ \|", README.read_text(encoding="utf-8"), re.MULTILINE)

    assert list(TABLE) == rows


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"])
def test_resnets_have_the_parameters_that_torchvision_publishes(name):
    assert get_model_weights(name).DEFAULT.meta["num_params"] == count(lambda: composer_resnet(name))


def test_efficientnet_has_the_parameters_that_torchvision_publishes():
    published = get_model_weights("efficientnet_b0").DEFAULT.meta["num_params"]

    assert published == 5_288_548 == count(composer_efficientnetb0)  # 5.3M: table 2 of the paper


def test_vit_small_has_the_parameters_of_the_paper():
    """22M: table 1 of DeiT; exactly: timm's `vit_small_patch16_224`, which has the same layers under other names."""
    assert 22_050_664 == count(vit_small_patch16)
    assert 22_050_664 == count(lambda: composer_timm("vit_small_patch16_224"))


@pytest.mark.parametrize(("depth", "published", "blocks"), [(20, 0.27, 9), (56, 0.85, 27)])
def test_cifar_resnets_have_the_parameters_of_the_paper(depth, published, blocks):
    """Table 6 of the paper has no parameters in shortcuts; those here have two convolutions."""
    shortcuts = 16 * 32 + 2 * 32 + 32 * 64 + 2 * 64

    assert published == round((count(lambda: composer_resnet_cifar(f"resnet_{depth}")) - shortcuts) / 1e6, 2)
    assert blocks == sum(
        type(module).__name__ == "BasicBlock" for module in composer_resnet_cifar(f"resnet_{depth}").modules()
    )


def test_resnet9_has_the_parameters_of_page_s_network():
    convolutions = [(3, 64), (64, 128), (128, 128), (128, 128), (128, 256), (256, 512), (512, 512), (512, 512)]
    expected = sum(9 * before * after + 2 * after for before, after in convolutions) + 512 * 10

    assert expected == 6_573_120 == count(lambda: composer_resnet_cifar("resnet_9"))  # 6.6M: part 4 of the series


@pytest.mark.parametrize(("backbone", "auxiliary"), [("resnet50", 2_365_205), ("resnet101", 2_365_205)])
def test_deeplabv3_has_the_parameters_that_torchvision_publishes(backbone, auxiliary):
    """Without those of torchvision's auxiliary classifier, an `FCNHead(1024, 21)`."""
    published = get_model_weights(f"deeplabv3_{backbone}").DEFAULT.meta["num_params"]

    assert published - auxiliary == count(lambda: composer_deeplabv3(21, backbone, use_plus=False))


def test_the_decoder_of_deeplabv3_plus_has_the_parameters_of_its_layers():
    def conv(before, after):
        return before * after + 2 * after

    def separable(before, after):
        return 9 * before + 2 * before + conv(before, after)

    aspp = conv(2048, 256) + 3 * separable(2048, 256) + conv(2048, 256) + conv(5 * 256, 256)
    decoder = conv(256, 48) + separable(48 + 256, 256) + separable(256, 256) + 256 * 21 + 21
    backbone = get_model_weights("resnet50").DEFAULT.meta["num_params"] - 1000 * 2049

    assert backbone + aspp + decoder == count(lambda: composer_deeplabv3(21, "resnet50"))


def test_the_u_net_has_the_parameters_of_the_common_implementation():
    """31,037,698 for RGB and two classes: milesial/Pytorch-UNet, the paper's layers with batch normalization."""
    assert 31_037_698 == count(lambda: UNet(1, in_channels=3))


def test_the_3d_u_net_has_the_parameters_of_the_paper():
    """19069955: section 2 of the paper, which does not count the scales of its normalization."""
    network = UNetModule(3, in_channels=3, num_classes=3, width=32, levels=4, norm="batch")
    scales = sum(module.weight.numel() for module in network.modules() if isinstance(module, nn.BatchNorm3d))

    assert 19_069_955 == count(lambda: network) - scales
