from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from composer.recipes import SGD, AdamW, Recipe, Runs, digits, fashion_mnist, segmentation, tiny_lm
from composer.recipes import cifar10_resnet9 as cifar10
from composer.recipes._images import CLASSIFICATION


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        (digits.Data, {"train_samples": 0}, "`train_samples` must be at least 1, got 0"),
        (digits.Data, {"test_samples": 0}, "`test_samples` must be at least 1, got 0"),
        (digits.Data, {"validation_samples": 0}, "`validation_samples` must be at least 1, got 0"),
        (
            digits.Data,
            {"validation_samples": 9, "test_samples": 9},
            "`test_samples` and `validation_samples` cannot be combined",
        ),
        (digits.Data, {"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        (digits.Data, {"shift": -1}, "`shift` must be at least 0, got -1"),
        (fashion_mnist.Data, {"train_samples": 0}, "`train_samples` must be at least 1, got 0"),
        (fashion_mnist.Data, {"test_samples": 0}, "`test_samples` must be at least 1, got 0"),
        (fashion_mnist.Data, {"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        (fashion_mnist.Data, {"shift": -1}, "`shift` must be at least 0, got -1"),
        (cifar10.Data, {"shift": -1}, "`shift` must be at least 0, got -1"),
        (cifar10.Data, {"cutout_size": -1}, "`cutout_size` must be at least 0, got -1"),
        (tiny_lm.Data, {"characters": 0}, "`characters` must be at least 1, got 0"),
        (tiny_lm.Data, {"validation_characters": 0}, "`validation_characters` must be at least 1, got 0"),
        (tiny_lm.Data, {"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        (tiny_lm.Data, {"seq_length": 1}, "`seq_length` must be at least 2, got 1"),
        (tiny_lm.Network, {"width": 0}, "`width` must be at least 1, got 0"),
        (tiny_lm.Network, {"layers": 0}, "`layers` must be at least 1, got 0"),
        (tiny_lm.Network, {"heads": 0}, "`heads` must be at least 1, got 0"),
        (tiny_lm.Network, {"width": 10, "heads": 4}, "`width` must be a multiple of `heads`, got 10 and 4"),
        (tiny_lm.Network, {"dropout": 1.0}, r"`dropout` must be in \[0, 1\), got 1.0"),
        (tiny_lm.Network, {"dropout": -0.1}, r"`dropout` must be in \[0, 1\), got -0.1"),
        (segmentation.Data, {"train_samples": 0}, "`train_samples` must be at least 1, got 0"),
        (segmentation.Data, {"validation_samples": 0}, "`validation_samples` must be at least 1, got 0"),
        (segmentation.Data, {"size": 27}, "`size` must be at least 28, got 27"),
        (segmentation.Data, {"items": 0}, "`items` must be at least 1, got 0"),
        (segmentation.Data, {"noise": 0}, "`noise` must be from 1 to 256, got 0"),
        (segmentation.Data, {"noise": 257}, "`noise` must be from 1 to 256, got 257"),
        *(
            case
            for group in (SGD, AdamW)
            for case in (
                (group, {"epochs": 0}, "`epochs` must be positive and finite, got 0"),
                (group, {"epochs": math.inf}, "`epochs` must be positive and finite, got inf"),
                (group, {"lr": 0.0}, "`lr` must be positive and finite, got 0.0"),
                (group, {"lr": math.nan}, "`lr` must be positive and finite, got nan"),
                (group, {"lr": math.inf}, "`lr` must be positive and finite, got inf"),
                (group, {"weight_decay": -1e-4}, "`weight_decay` must be at least 0, got -0.0001"),
                (group, {"warmup": -0.1}, r"`warmup` must be in \[0, 1\), got -0.1"),
                (group, {"warmup": 1.0}, r"`warmup` must be in \[0, 1\), got 1.0"),
            )
        ),
        (SGD, {"momentum": 1.0}, r"`momentum` must be in \[0, 1\), got 1.0"),
        (AdamW, {"beta1": 1.0}, r"`beta1` must be in \[0, 1\), got 1.0"),
        (AdamW, {"beta2": -0.5}, r"`beta2` must be in \[0, 1\), got -0.5"),
        (Runs, {"seeds": 0}, "`seeds` must be at least 1, got 0"),
        (Runs, {"threads": 0}, "`threads` must be at least 1, got 0"),
        (Runs, {"seed": -1}, "`seed` must be from 0 to .*, got -1"),
        (Runs, {"seeds": 3, "seed": 2**32 - 2}, "`seed` must be from 0 to 4294967293, .*got 4294967294"),
        (Runs, {"eval_interval": "0ep"}, "`eval_interval` must be positive, got '0ep'"),
        (Runs, {"eval_interval": "often"}, "often"),
    ],
)
def test_values_that_cannot_work_are_refused(group: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group(**values)


def test_the_last_seed_may_be_the_last_one_that_there_is() -> None:
    assert 2**32 - 1 == Runs(seeds=2, seed=2**32 - 2).seed + 1


def recipe(**changes: Any) -> Recipe:
    parts = {"data": digits.Data(), "network": digits.Network(), "training": SGD(), "metrics": CLASSIFICATION}
    return Recipe("wrong", **{**parts, **changes})


def test_only_algorithms_can_be_composed() -> None:
    with pytest.raises(TypeError, match="`algorithms` must be `Algorithm` objects, got 'mixup'"):
        recipe(algorithms=["mixup"])


def test_something_must_be_measured() -> None:
    with pytest.raises(ValueError, match="`metrics` must have at least one metric, got none"):
        recipe(metrics=())


def test_sgd_decays_all_weights_and_looks_ahead_if_it_has_momentum() -> None:
    model = nn.Linear(2, 3)
    (group,) = SGD(lr=0.3, momentum=0.8, weight_decay=0.01).optimizer(model).param_groups
    (still,) = SGD(momentum=0).optimizer(model).param_groups

    assert (0.3, 0.8, 0.01, True) == tuple(group[key] for key in ("lr", "momentum", "weight_decay", "nesterov"))
    assert [id(p) for p in model.parameters()] == [id(p) for p in group["params"]]
    assert not still["nesterov"]


def test_adamw_decays_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Conv1d(1, 1, 2))
    optimizer = AdamW(lr=0.3, beta1=0.7, beta2=0.8, weight_decay=0.2).optimizer(model)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}

    assert isinstance(optimizer, torch.optim.AdamW)
    assert {
        ("0.weight", 0.2),
        ("0.bias", 0.0),
        ("1.weight", 0.0),
        ("1.bias", 0.0),
        ("2.weight", 0.2),
        ("2.bias", 0.0),
    } == {(name, decays[id(p)]) for name, p in model.named_parameters()}
    assert all((0.3, (0.7, 0.8)) == (group["lr"], group["betas"]) for group in optimizer.param_groups)


def test_adamw_trains_a_model_without_matrices() -> None:
    (group,) = AdamW().optimizer(nn.LayerNorm(3)).param_groups

    assert 2 == len(group["params"])
