"""The networks for CIFAR and MNIST, ViT, and those of timm."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from composer.models import (
    MNISTNet,
    ResNet9,
    ResNetCIFAR,
    composer_resnet_cifar,
    composer_timm,
    mnist_model,
    vit_small_patch16,
)

# --- CIFAR and MNIST --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "network"), [("resnet_9", ResNet9), ("resnet9", ResNet9), ("resnet_20", ResNetCIFAR)])
def test_names_have_an_underscore_or_not(name, network):
    assert type(composer_resnet_cifar(name).module) is network


def test_the_name_must_be_known():
    with pytest.raises(ValueError, match="must be 'resnet_9', 'resnet_20' or 'resnet_56', got 'resnet_32'"):
        composer_resnet_cifar("resnet_32")


@pytest.mark.parametrize("depth", [2, 9, 18, 21])
def test_the_depth_must_be_six_n_plus_two(depth):
    with pytest.raises(ValueError, match=f"`depth` must be 6n . 2 for n of at least 1, got {depth}"):
        ResNetCIFAR(depth)


@pytest.mark.parametrize("network", [lambda **given: ResNetCIFAR(20, **given), ResNet9, MNISTNet])
@pytest.mark.parametrize("name", ["num_classes", "in_channels"])
def test_numbers_must_be_positive(network, name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        network(**{name: 0})


def scales(model):
    return [module.weight for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize("make", [partial(composer_resnet_cifar, "resnet_20"), mnist_model])
def test_initializers_are_applied(make):
    assert all(weight.eq(1).all() for weight in scales(make()))
    assert not any(weight.eq(1).any() for weight in scales(make(initializers=["bn_uniform"])))


def test_resnet9_is_written_out():
    """The graph of the network in Page's notebook: `residual` adds the ReLU of its second convolution."""
    torch.manual_seed(1)
    network = ResNet9().eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
    layers = iter([module for module in network.modules() if isinstance(module, nn.Conv2d | nn.BatchNorm2d)])

    def conv_bn(x):
        conv, norm = next(layers), next(layers)
        x = nn.functional.conv2d(x, conv.weight, padding=1)
        x = nn.functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
        return x.clamp(min=0)

    def halve(x):
        return nn.functional.max_pool2d(x, 2)

    def residual(x):
        return x + conv_bn(conv_bn(x))

    x = torch.randn(2, 3, 32, 32)
    hidden = residual(halve(conv_bn(conv_bn(x))))
    hidden = halve(conv_bn(hidden))
    hidden = residual(halve(conv_bn(hidden)))
    expected = 0.125 * hidden.amax(dim=(2, 3)) @ network.fc.weight.T

    torch.testing.assert_close(expected, network(x))


def test_convolutions_of_resnet20_start_as_he_et_al_do():
    spreads = [
        module.weight.std() * (module.weight[0].numel() / 2) ** 0.5
        for module in ResNetCIFAR(20).modules()
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 2000
    ]

    torch.testing.assert_close(torch.ones(len(spreads)), torch.stack(spreads).detach(), rtol=0.1, atol=0)


def test_resnet20_has_three_stages():
    network = ResNetCIFAR(20)
    x = torch.zeros(1, 3, 32, 32)
    x = network.conv1(x)
    shapes = [tuple((x := layer(x)).shape[1:]) for layer in (network.layer1, network.layer2, network.layer3)]

    assert [(16, 32, 32), (32, 16, 16), (64, 8, 8)] == shapes


# --- ViT --------------------------------------------------------------------------------------------------------------


def test_names_of_a_vit_s_weights_are_torchvisions():
    with torch.device("meta"):
        expected = torchvision.models.vit_b_16(weights=None)
        model = vit_small_patch16()

    assert list(expected.state_dict()) == list(model.module.state_dict())


def test_a_vit_takes_images_of_any_channels():
    torch.manual_seed(1)
    model = vit_small_patch16(5, image_size=32, channels=8, num_layers=1)
    spread = model.module.conv_proj.weight.std()

    assert (2, 5) == model((torch.zeros(2, 8, 32, 32), None)).shape
    assert pytest.approx((8 * 16**2) ** -0.5, rel=0.02) == spread.item()
    assert not model.module.conv_proj.bias.any()


def test_the_kinds_of_dropout_of_a_vit_are_apart():
    network = vit_small_patch16(5, 32, dropout=0.1, embedding_dropout=0.2, num_layers=2).module
    rates = [module.p for module in network.modules() if isinstance(module, nn.Dropout)]

    assert [0.2, *[0.1] * 6] == rates
    assert [0.1, 0.1] == [module.dropout for module in network.modules() if isinstance(module, nn.MultiheadAttention)]


@pytest.mark.parametrize("size", [0, 8, 225])
def test_the_size_of_images_must_be_a_multiple_of_the_patch(size):
    with pytest.raises(ValueError, match=f"`image_size` must be a multiple of 16, got {size}"):
        vit_small_patch16(image_size=size)


@pytest.mark.parametrize("name", ["dropout", "embedding_dropout"])
def test_dropout_must_be_a_probability(name):
    with pytest.raises(ValueError, match=rf"`{name}` must be in \[0, 1\], got 1\.5"):
        vit_small_patch16(**{name: 1.5})


@pytest.mark.parametrize("name", ["num_classes", "channels", "num_layers"])
def test_numbers_of_a_vit_must_be_positive(name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
        vit_small_patch16(**{name: 0})


# --- timm -------------------------------------------------------------------------------------------------------------


def test_names_of_weights_are_timms():
    import timm

    expected = timm.create_model("resnet10t", num_classes=3).state_dict()

    assert [f"module.{key}" for key in expected] == list(composer_timm("resnet10t", num_classes=3).state_dict())


def test_pretrained_weights_are_timms(tmp_path):
    """timm reads a folder as it does a repository of the hub."""
    from timm.models import _hub

    torch.manual_seed(1)
    original = composer_timm("resnet10t", num_classes=3).eval()
    original.module.pretrained_cfg.update(num_classes=3, classifier="fc", first_conv="conv1.0")
    _hub.save_for_hf(original.module, tmp_path, safe_serialization=True)
    loaded = composer_timm(f"local-dir:{tmp_path}", pretrained=True, num_classes=3).eval()
    inputs = torch.randn(2, 3, 32, 32)

    torch.testing.assert_close(original((inputs, None)), loaded((inputs, None)))


def test_options_reach_timm():
    model = composer_timm("resnet10t", num_classes=3, drop_rate=0.3, drop_path_rate=0.2, global_pool="max")

    assert 0.3 == model.module.drop_rate
    assert "max" == model.module.global_pool.pool_type
    assert {"DropPath"} <= {type(module).__name__ for module in model.modules()}


def test_batch_normalization_can_be_changed():
    model = composer_timm("resnet10t", num_classes=3, bn_momentum=0.03, bn_eps=1e-3)
    layers = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]

    assert {(0.03, 1e-3)} == {(layer.momentum, layer.eps) for layer in layers}


@pytest.mark.parametrize("name", ["bn_momentum", "bn_eps"])
def test_batch_normalization_must_be_there_to_be_changed(name):
    with torch.device("meta"), pytest.raises(ValueError, match=f"`{name}` must be None for a network without batch"):
        composer_timm("vit_tiny_patch16_224", **{name: 0.1})


def test_an_option_the_network_does_not_have_is_an_error():
    with torch.device("meta"), pytest.raises(TypeError, match="drop_block_rate"):
        composer_timm("vit_tiny_patch16_224", drop_block_rate=0.1)


def test_a_network_that_timm_does_not_know_is_an_error():
    with pytest.raises(RuntimeError, match="resnet10q"):
        composer_timm("resnet10q")


def test_classes_of_a_network_of_timm_must_be_there():
    with pytest.raises(ValueError, match="`num_classes` must be at least 1, got 0"):
        composer_timm("resnet10t", num_classes=0)


def test_timm_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"Run `pip install composer-models\[timm\]`"):
        composer_timm("resnet18")


def test_a_broken_timm_is_not_a_missing_one(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("import a_module_that_is_not_there\n", encoding="utf-8")
    for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        composer_timm("resnet18")
