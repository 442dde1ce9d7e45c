"""Methods that replace layers, on networks of others, beside each other, and with optimizers made before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from surgery_checks import IDLE, METHODS, check, check_idle
from torch import nn
from torch.nn.utils import parametrize

from composer import functional as cf
from composer.algorithms.blurpool import BlurConv2d
from composer.algorithms.ghost_batchnorm import GhostBatchNorm2d
from composer.algorithms.sam import SAMOptimizer
from composer.algorithms.squeeze_excite import SqueezeExciteConv2d
from composer.models import composer_resnet_cifar

NETWORKS = ["test_resnet", "test_nfnet", "test_convnext", "test_vit", "tf_mobilenetv3_small_minimal_100"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("network", NETWORKS)
def test_a_network_of_timm_is_changed_only_where_it_should_be(network: str, method: str) -> None:
    pytest.importorskip("timm")

    assert [] == check(network, method)


@pytest.mark.parametrize("method", IDLE)
def test_a_method_that_matches_nothing_changes_no_bit(method: str) -> None:
    pytest.importorskip("timm")

    assert all(check_idle(network, method) for network in NETWORKS[:3])


def plain(model: nn.Module) -> list[str]:
    """The convolutions whose weights are not standardized."""
    found = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    return [name for name in found if not parametrize.is_parametrized(model.get_submodule(name), "weight")]


@pytest.mark.parametrize(
    "other",
    [
        cf.apply_blurpool,
        lambda model: cf.apply_ghost_batchnorm(model, 2),
        lambda model: cf.apply_squeeze_excite(model, 4, 16),
    ],
)
def test_the_last_convolutions_are_found_beside_layers_of_other_methods(
    other: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The shortcut of a block is defined after the convolution that runs after it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Conv2d(16, 16, 3, stride=2)
            self.first = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2), nn.BatchNorm2d(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.first(x))  # type: ignore[no-any-return]

    model = Block()
    other(model)
    cf.apply_weight_standardization(model, 1)

    assert 1 == len(plain(model))
    assert plain(model)[0].startswith("last")
    assert [] == caplog.records


def optimizers(model: nn.Module) -> Iterator[torch.optim.Optimizer]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    yield torch.optim.AdamW(copy_groups(groups), lr=1e-3, foreach=True)
    yield torch.optim.AdamW(copy_groups(groups), lr=1e-3, fused=True)
    yield SAMOptimizer(torch.optim.SGD(copy_groups(groups), lr=1e-3, momentum=0.9))


def copy_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**group, "params": list(group["params"])} for group in groups]


@pytest.mark.parametrize("index", range(3))
def test_weights_and_biases_stay_in_groups_of_their_own(index: int) -> None:
    """Whatever layers come in, one after the other, and with a schedule made before."""
    model = composer_resnet_cifar("resnet_9", 4)
    optimizer = list(optimizers(model))[index]
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    cf.apply_squeeze_excite(model, 4, 64, optimizers=optimizer)
    cf.apply_blurpool(model, optimizers=optimizer)
    cf.apply_ghost_batchnorm(model, 2, optimizers=optimizer)
    cf.apply_factorization(model, min_channels=128, min_features=64, optimizers=optimizer)

    groups = [set(group["params"]) for group in optimizer.param_groups]
    assert {p for p in model.parameters() if p.dim() > 1} == groups[0]
    assert {p for p in model.parameters() if p.dim() <= 1} == groups[1]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(lambda: torch.zeros(()))
    schedule.step()
    assert [5e-4, 5e-4] == [group["lr"] for group in optimizer.param_groups]


def test_with_layer_wise_learning_rates_new_parameters_get_those_of_their_layer() -> None:
    timm_optim = pytest.importorskip("timm.optim")
    import timm

    model = timm.create_model("test_vit", pretrained=False, num_classes=4)
    optimizer = torch.optim.AdamW(timm_optim.param_groups_layer_decay(model, 0.05, layer_decay=0.75), lr=1e-3)
    before = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    scales = {name: scale_of(m.weight, optimizer) for name, m in before.items()}
    cf.apply_factorization(model, min_features=32, latent_features=8, optimizers=optimizer)

    changed = [name for name, m in before.items() if model.get_submodule(name) is not m]
    assert len(changed) > 2
    for name in changed:
        for key, p in model.get_submodule(name).named_parameters():
            assert (scales[name][0], 0.05 if p.dim() > 1 else 0.0) == scale_of(p, optimizer), f"{name}.{key}"
    assert set(model.parameters()) == {p for group in optimizer.param_groups for p in group["params"]}


def scale_of(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    (group,) = [g for g in optimizer.param_groups if any(parameter is p for p in g["params"])]
    return group["lr_scale"], group["weight_decay"]


def blurred(model: nn.Module) -> None:
    cf.apply_blurpool(model)


def ghosts(model: nn.Module) -> None:
    cf.apply_ghost_batchnorm(model, 2)


def excited(model: nn.Module) -> None:
    torch.manual_seed(1)
    cf.apply_squeeze_excite(model, 4, 16)


def factors(model: nn.Module) -> None:
    torch.manual_seed(1)
    cf.apply_factorization(model, min_channels=16, min_features=16)


def mixed(model: nn.Module) -> None:
    cf.apply_fused_layernorm(model)


CHANGES = [blurred, ghosts, excited, factors, mixed, cf.apply_channels_last, cf.apply_weight_standardization]


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(16, 16, 3, stride=2), nn.BatchNorm2d(16), nn.Flatten(), nn.LayerNorm(144), nn.Linear(144, 16)
    )


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: torch.compile(m, backend="eager"), nn.Sequential])
def test_a_wrapped_model_computes_what_the_changed_model_computes(change: Any, wrap: Any) -> None:
    """Also one that has run before, as compiled models keep what they saw."""
    model, wrapped, x = small(), wrap(small()), torch.randn(4, 16, 8, 8)
    before = wrapped.eval()(x)
    change(model)
    change(wrapped)
    expected = model.eval()(x)

    torch.testing.assert_close(expected, wrapped.eval()(x))
    if change not in (mixed, ghosts, cf.apply_channels_last):
        assert not torch.equal(before, expected)


def test_a_model_compiled_in_place_computes_what_the_changed_model_computes() -> None:
    for change in (blurred, ghosts, mixed):
        model, compiled, x = small().eval(), small().eval(), torch.randn(4, 16, 8, 8)
        compiled.compile(backend="eager")
        compiled(x)
        change(model)
        change(compiled)

        torch.testing.assert_close(model(x), compiled(x))


@pytest.mark.parametrize(
    ("change", "kind"), [(blurred, BlurConv2d), (ghosts, GhostBatchNorm2d), (excited, SqueezeExciteConv2d)]
)
def test_a_layer_used_twice_is_replaced_by_one_layer_used_twice(change: Any, kind: type[nn.Module]) -> None:
    shared = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16))
    model = nn.ModuleDict({"first": shared, "second": nn.Sequential(shared[0], shared[1])})
    change(model)

    assert 1 == sum(isinstance(m, kind) for m in model.modules())
    assert all(a is b for a, b in zip(model["first"], model["second"], strict=True))


def same(expected: Any, actual: Any) -> bool:
    return all(a is b for a, b in zip(expected, actual, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: cf.apply_low_precision_layernorm(model, "amp_bf16"),
        lambda model: cf.apply_low_precision_groupnorm(model, "amp_bf16"),
        cf.apply_fused_layernorm,
    ],
)
def test_norms_keep_their_parameters_hooks_and_attributes(change: Any) -> None:
    calls: list[int] = []
    layers: list[Any] = [nn.LayerNorm(4), nn.GroupNorm(2, 4)]
    for layer in layers:
        layer.own = "kept"
        layer.register_forward_hook(lambda *_: calls.append(1))
        layer.eval()
    model: Any = nn.Sequential(*layers)
    change(model)
    ((old, new),) = [(layer, m) for m, layer in zip(model, layers, strict=True) if m is not layer]
    x = torch.randn(2, 4)
    expected = old(x)
    calls.clear()

    assert torch.equal(expected, new(x))
    assert same(old.parameters(), new.parameters())
    assert [1] == calls
    assert ("kept", False) == (new.own, new.training)
    assert torch.equal(expected, copy.deepcopy(new)(x))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_layers_stay() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    torch.manual_seed(0)
    quantised = torch.ao.quantization.quantize_dynamic(model[:2], {nn.Linear})  # type: ignore[attr-defined,unused-ignore]
    both = nn.Sequential(quantised, model[2])
    x = torch.randn(2, 32)
    expected = quantised(x)
    cf.apply_factorization(both, min_features=16)

    assert torch.equal(expected, both[0](x))
