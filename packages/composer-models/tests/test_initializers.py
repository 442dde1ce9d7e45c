from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import composer.models
from composer.models.initializers import Initializer


@pytest.fixture
def layers():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "linear": nn.Linear(300, 200),
            "conv": nn.Conv2d(16, 64, 5),
            "norm": nn.BatchNorm2d(5000),
            "conv1d": nn.Conv1d(4, 4, 3),
            "plain": nn.Linear(4, 4, bias=False),
            "fixed": nn.BatchNorm2d(4, affine=False),
        }
    )


def changed(layers, name):
    before = {key: value.clone() for key, value in layers.state_dict().items()}
    layers.apply(Initializer(name).get_initializer())
    return {key for key, value in layers.state_dict().items() if not torch.equal(before[key], value)}


def test_it_is_found_by_name():
    assert composer.models.Initializer is Initializer


def test_members():
    assert [
        "KAIMING_NORMAL",
        "KAIMING_UNIFORM",
        "BN_UNIFORM",
        "BN_ONES",
        "XAVIER_UNIFORM",
        "XAVIER_NORMAL",
        "LINEAR_LOG_CONSTANT_BIAS",
    ] == list(Initializer.__members__)
    assert all(member.value == name.lower() for name, member in Initializer.__members__.items())


@pytest.mark.parametrize("name", ["kaiming_normal", "kaiming_uniform", "xavier_normal", "xavier_uniform"])
def test_weight_initializers_change_linear_and_conv_weights_only(layers, name):
    assert {"linear.weight", "conv.weight", "plain.weight"} == changed(layers, name)


@pytest.mark.parametrize(
    ("name", "variance"),
    [
        ("kaiming_normal", lambda fan_in, fan_out: 2 / fan_in),
        ("kaiming_uniform", lambda fan_in, fan_out: 2 / fan_in),
        ("xavier_normal", lambda fan_in, fan_out: 2 / (fan_in + fan_out)),
        ("xavier_uniform", lambda fan_in, fan_out: 2 / (fan_in + fan_out)),
    ],
)
def test_weights_have_the_variance_of_the_paper(layers, name, variance):
    layers.apply(Initializer(name).get_initializer())

    for weight, fans in ((layers["linear"].weight, (300, 200)), (layers["conv"].weight, (16 * 25, 64 * 25))):
        assert pytest.approx(variance(*fans), rel=0.05) == weight.var().item()
        assert abs(weight.mean().item()) < 0.05 * weight.std().item()
        bounded = weight.abs().max().item() <= math.sqrt(3 * variance(*fans))
        assert bounded is name.endswith("uniform")


def test_bn_uniform_draws_from_zero_to_one(layers):
    with torch.no_grad():
        layers["norm"].bias.fill_(3)

    assert {"norm.weight", "norm.bias"} == changed(layers, "bn_uniform")
    weight = layers["norm"].weight
    assert 0 <= weight.min().item() < 0.01 < 0.99 < weight.max().item() <= 1
    assert pytest.approx(1 / 12, rel=0.05) == weight.var().item()
    assert not layers["norm"].bias.any()


def test_bn_ones(layers):
    with torch.no_grad():
        layers["norm"].weight.fill_(3)
        layers["norm"].bias.fill_(3)

    assert {"norm.weight", "norm.bias"} == changed(layers, "bn_ones")
    assert (layers["norm"].weight == 1).all()
    assert not layers["norm"].bias.any()


def test_log_constant_bias_starts_a_sigmoid_near_one_over_n(layers):
    assert {"linear.bias"} == changed(layers, "linear_log_constant_bias")
    torch.testing.assert_close(torch.full((200,), -math.log(200)), layers["linear"].bias.detach())


def test_parameters_stay_the_same_objects(layers):
    """An optimizer may hold them already."""
    before = dict(layers.named_parameters())
    for initializer in Initializer:
        layers.apply(initializer.get_initializer())

    assert all(parameter is before[name] for name, parameter in layers.named_parameters())
    assert all(parameter.requires_grad and parameter.grad_fn is None for parameter in layers.parameters())


@pytest.mark.parametrize("initializer", Initializer)
def test_a_generator_makes_it_repeatable(layers, initializer):
    states = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        layers.apply(initializer.get_initializer(generator=torch.Generator().manual_seed(0)))
        states.append({name: value.clone() for name, value in layers.state_dict().items()})

    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
