"""Blocks of other classes than torchvision's `Bottleneck`, each against its own forward pass and layers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm.models.resnet
import torch
import torchvision.models.resnet
from torch import nn

from composer.algorithms.stochastic_depth import StochasticDepth, apply_stochastic_depth
from composer.core import Engine, State


class Adapter(nn.Module):
    """A branch of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(self.last(x), x)


class Preserved(nn.Module):
    """A residual block without an activation behind the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.last(self.main(x))


def make_downsample(planes: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, planes, 1, stride, bias=False), nn.BatchNorm2d(planes))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "torchvision basic": lambda: torchvision.models.resnet.BasicBlock(8, 8),
    "torchvision basic, downsample": lambda: torchvision.models.resnet.BasicBlock(8, 16, 2, make_downsample(16, 2)),
    "timm basic": lambda: timm.models.resnet.BasicBlock(8, 8),
    "timm basic, downsample": lambda: timm.models.resnet.BasicBlock(8, 16, 2, make_downsample(16, 2)),
    "timm bottleneck": lambda: timm.models.resnet.Bottleneck(8, 2),
    "timm bottleneck, se": lambda: timm.models.resnet.Bottleneck(8, 4, 2, make_downsample(16, 2), attn_layer="se"),
    "own": Preserved,
    "own, one module": Adapter,
}
METHODS = ["block", "sample"]


def make(name: str, rate: float, method: str) -> tuple[Any, Any]:
    """The plain block, and a stochastic copy."""
    torch.manual_seed(0)
    plain = BLOCKS[name]()
    model = nn.Sequential(copy.deepcopy(plain))
    apply_stochastic_depth(model, type(plain), method, rate)
    return plain, model[0]


def draw() -> torch.Tensor:
    return torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(2))


def skip_only(name: str, block: Any, x: torch.Tensor) -> torch.Tensor:
    shortcut = x if getattr(block, "downsample", None) is None else block.downsample(x)
    return shortcut if name.startswith("own") else shortcut.relu()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("method", METHODS)
class TestBlocks:
    def test_a_block_with_rate_1_is_its_shortcut(self, name: str, method: str) -> None:
        plain, block = make(name, 1.0, method)
        x = draw()
        output = block(x)

        torch.testing.assert_close(skip_only(name, plain, draw()), output)
        assert torch.equal(draw(), x)

    def test_a_block_with_rate_0_is_unchanged(self, name: str, method: str) -> None:
        plain, block = make(name, 0.0, method)
        for training in (True, False):
            assert torch.equal(plain.train(training)(draw()), block.train(training)(draw()))

    def test_in_evaluation_the_branch_is_scaled(self, name: str, method: str) -> None:
        plain, block = (module.eval() for module in make(name, 0.25, method))
        last = next(key for key in ("se", "bn3", "bn2", "last") if getattr(plain, key, None) is not None)
        getattr(plain, last).register_forward_hook(lambda module, args, output: 0.75 * output)

        torch.testing.assert_close(plain(draw()), block(draw()))

    def test_names_and_class_stay_and_copies_are_independent(self, name: str, method: str) -> None:
        plain, block = make(name, 1.0, method)
        assert type(plain) is type(block)
        assert list(plain.state_dict()) == list(block.state_dict())
        for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
            other.drop_rate = torch.tensor(0.0)
            assert torch.equal(plain.eval()(draw()), other.eval()(draw()))
            assert 1.0 == float(block.drop_rate)


@pytest.mark.parametrize("name", BLOCKS)
def test_examples_are_dropped_separately(name: str) -> None:
    torch.manual_seed(3)
    plain, block = (module for module in make(name, 0.5, "sample"))
    x = draw()[:1].repeat(32, 1, 1, 1)
    dropped, kept = skip_only(name, plain, x), plain(x)
    output = block(x)
    is_dropped = [torch.allclose(a, b, atol=1e-5) for a, b in zip(dropped, output, strict=True)]
    is_kept = [torch.allclose(a, b, atol=1e-5) for a, b in zip(kept, output, strict=True)]

    assert all(a != b for a, b in zip(is_dropped, is_kept, strict=True))
    assert 0 < sum(is_dropped) < 32


def test_gradients_pass_a_dropped_block_between_others() -> None:
    model = nn.Sequential(*(torchvision.models.resnet.BasicBlock(8, 8) for _ in range(3)))
    apply_stochastic_depth(model, torchvision.models.resnet.BasicBlock, drop_rate=1.0, drop_distribution="uniform")
    model[0].drop_rate = torch.tensor(0.0)
    model(draw()).sum().backward()

    assert all(parameter.grad is not None for parameter in model[0].parameters())
    assert all(parameter.grad is None for parameter in model[1].parameters())


def test_linear_rates_count_all_blocks_that_a_function_selects() -> None:
    def is_block(module: nn.Module) -> bool:
        return hasattr(module, "downsample") or isinstance(module, Preserved)

    bottleneck = torchvision.models.resnet.Bottleneck(8, 2)
    model = nn.Sequential(BLOCKS["timm basic"](), bottleneck, nn.ReLU(), Preserved(), BLOCKS["torchvision basic"]())
    algorithm = StochasticDepth(is_block, drop_rate=0.4)
    for _ in range(2):  # again: nothing is wrapped twice
        state = State(model=model, max_duration="1ba", algorithms=algorithm)
        Engine(state).run_event("init")

    assert 4 == algorithm.num_stochastic_layers
    assert pytest.approx([0.1, 0.2, 0.3, 0.4]) == [float(model[i].drop_rate) for i in (0, 1, 3, 4)]


def test_a_class_selects_the_blocks_of_a_whole_network() -> None:
    model = torchvision.models.resnet18(num_classes=2)
    names = list(model.state_dict())
    apply_stochastic_depth(model, torchvision.models.resnet.BasicBlock, drop_rate=0.8)
    rates = [float(m.drop_rate) for m in model.modules() if isinstance(m, torchvision.models.resnet.BasicBlock)]

    assert pytest.approx([0.1 * i for i in range(1, 9)]) == rates
    assert names == list(model.state_dict())


@pytest.mark.parametrize("module", [nn.Conv2d(8, 8, 1), nn.Sequential(nn.ReLU()), nn.LSTM(8, 8)])
def test_modules_other_than_residual_blocks_are_refused(module: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"must select residual blocks that compute .*which .*Select fewer modules"):
        apply_stochastic_depth(nn.Sequential(module), type(module))
