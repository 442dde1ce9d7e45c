from __future__ import annotations

import logging

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models import ResNet18_Weights, ResNet34_Weights

from composer.loss import binary_cross_entropy_with_logits, soft_cross_entropy
from composer.models import Initializer, composer_efficientnetb0, composer_resnet

INPUT = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def published(tmp_path, monkeypatch):
    """torchvision's weights, or what stands for them, where `torch.hub` keeps what it has downloaded."""
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()

    def publish(weights, name):
        torch.manual_seed(7)
        network = torchvision.models.get_model(name, weights=None)
        torch.save(network.state_dict(), tmp_path / "checkpoints" / weights.url.rsplit("/", 1)[1])
        return network.eval()

    return publish


# --- pretrained weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weights", ["IMAGENET1K_V1", "DEFAULT", "ResNet18_Weights.IMAGENET1K_V1", ResNet18_Weights.IMAGENET1K_V1]
)
def test_pretrained_weights_are_torchvisions(published, weights):
    network = published(ResNet18_Weights.IMAGENET1K_V1, "resnet18")
    model = composer_resnet("resnet18", weights=weights).eval()

    torch.testing.assert_close(network(INPUT), model((INPUT, None)), rtol=0, atol=0)


def test_pretrained_weights_with_other_classes_have_a_new_last_layer(published):
    network = published(ResNet18_Weights.IMAGENET1K_V1, "resnet18")
    model = composer_resnet("resnet18", num_classes=7, weights="IMAGENET1K_V1").eval()
    network.fc = model.module.fc

    assert (2, 7) == model((INPUT, None)).shape
    torch.testing.assert_close(network(INPUT), model((INPUT, None)), rtol=0, atol=0)


def test_initializers_do_not_change_pretrained_weights(published):
    network = published(ResNet18_Weights.IMAGENET1K_V1, "resnet18")
    model = composer_resnet(
        "resnet18", 7, weights="DEFAULT", initializers=["bn_uniform", Initializer.LINEAR_LOG_CONSTANT_BIAS]
    )

    torch.testing.assert_close(network.layer1[0].bn1.weight, model.module.layer1[0].bn1.weight)
    torch.testing.assert_close(torch.full((7,), 1 / 7).log(), model.module.fc.bias.detach())


def test_weights_are_read_without_running_their_code(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    url = ResNet18_Weights.IMAGENET1K_V1.url
    torch.save({"conv1.weight": nn.Linear(1, 1)}, tmp_path / "checkpoints" / url.rsplit("/", 1)[1])

    with pytest.raises(Exception, match=r"[Ww]eights.only"):
        composer_resnet("resnet18", weights="IMAGENET1K_V1")


@pytest.mark.parametrize("weights", ["IMAGENET21K", ResNet34_Weights.IMAGENET1K_V1])
def test_unknown_weights_are_refused(weights):
    with pytest.raises(ValueError, match=r"`weights` of resnet18 must be one of \['IMAGENET1K_V1', 'DEFAULT'\]"):
        composer_resnet("resnet18", weights=weights)


def test_weights_for_other_groups_are_refused():
    with pytest.raises(ValueError, match="`weights` must be None with other groups than torchvision's, got 'DEFAULT'"):
        composer_resnet("resnet50", weights="DEFAULT", groups=32, width_per_group=4)


def test_efficientnet_has_pretrained_weights_too(published):
    from torchvision.models import EfficientNet_B0_Weights

    network = published(EfficientNet_B0_Weights.IMAGENET1K_V1, "efficientnet_b0")
    model = composer_efficientnetb0(weights="IMAGENET1K_V1").eval()
    smaller = composer_efficientnetb0(5, weights="IMAGENET1K_V1").eval()
    network_scores, features = network(INPUT), network.features(INPUT)

    torch.testing.assert_close(network_scores, model((INPUT, None)), rtol=0, atol=0)
    torch.testing.assert_close(features, smaller.module.features(INPUT), rtol=0, atol=0)


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_names_of_weights_are_torchvisions(name):
    with torch.device("meta"):
        expected = torchvision.models.get_model(name, weights=None).state_dict()
        model = composer_resnet(name)

    assert [f"module.{key}" for key in expected] == list(model.state_dict())


def test_groups_make_a_resnext():
    with torch.device("meta"):
        expected = torchvision.models.resnext50_32x4d(weights=None)
        model = composer_resnet("resnet50", groups=32, width_per_group=4)

    assert {key: value.shape for key, value in expected.state_dict().items()} == {
        key: value.shape for key, value in model.module.state_dict().items()
    }


def test_the_name_must_be_known():
    with pytest.raises(ValueError, match=r"`model_name` must be one of \['resnet18', .* got 'resnet_50'"):
        composer_resnet("resnet_50")


@pytest.mark.parametrize("num_classes", [0, -1])
def test_there_must_be_classes(num_classes):
    with pytest.raises(ValueError, match=f"`num_classes` must be at least 1, got {num_classes}"):
        composer_resnet("resnet18", num_classes)


def test_the_loss_must_be_known():
    with pytest.raises(ValueError, match=r"`loss_name` must be one of \['binary_cross_entropy_with_logits', .* 'mse'"):
        composer_resnet("resnet18", loss_name="mse")


def test_the_loss_is_chosen_by_name(caplog):
    with torch.device("meta"), caplog.at_level(logging.WARNING):
        assert composer_resnet("resnet18")._loss_fn is soft_cross_entropy
        kind = {"loss_name": "binary_cross_entropy_with_logits"}
        model = composer_resnet("resnet18", initializers="linear_log_constant_bias", **kind)
        assert [] == caplog.records
        composer_resnet("resnet18", **kind)

    assert model._loss_fn is binary_cross_entropy_with_logits
    assert ["linear_log_constant_bias"] == [text.split("'")[1] for text in (r.message for r in caplog.records)]


@pytest.mark.parametrize("form", ["bn_ones", Initializer.BN_ONES, ["bn_ones"], (Initializer.BN_ONES,)])
def test_initializers_are_members_or_names_one_or_several(form):
    model = composer_resnet("resnet18", 2, initializers=["bn_uniform"])
    again = composer_resnet("resnet18", 2, initializers=form)

    assert not torch.equal(model.module.bn1.weight, torch.ones(64))
    assert torch.equal(again.module.bn1.weight, torch.ones(64))


def test_an_unknown_initializer_is_refused():
    with pytest.raises(ValueError, match="orthogonal"):
        composer_resnet("resnet18", initializers=["orthogonal"])


@pytest.mark.parametrize("rate", [-0.1, 1.1])
def test_drop_connect_must_be_a_probability(rate):
    with pytest.raises(ValueError, match=r"`drop_connect_rate` must be in \[0, 1\]"):
        composer_efficientnetb0(drop_connect_rate=rate)


def test_drop_connect_grows_with_depth():
    model = composer_efficientnetb0(drop_connect_rate=0.32)
    rates = [module.p for module in model.modules() if type(module).__name__ == "StochasticDepth"]

    assert [pytest.approx(0.32 * index / 16) for index in range(16)] == rates
