"""Stochastic blocks against torchvision's own, and what is drawn."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import resnet18, resnet50
from torchvision.models.resnet import Bottleneck

from composer import functional as cf
from composer.algorithms.stochastic_depth import apply_stochastic_depth
from composer.algorithms.stochastic_depth.stochastic_depth import _STOCHASTIC_LAYER_MAPPING
from composer.algorithms.stochastic_depth.stochastic_layers import (
    BlockStochasticModule,
    make_resnet_bottleneck_stochastic,
)
from composer.algorithms.warnings import NoEffectWarning

METHODS = ["block", "sample"]


def draw(*shape: int) -> torch.Tensor:
    """Images behind a ReLU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).relu()


def block(rate: float, method: str, down: bool = False) -> Any:
    torch.manual_seed(0)
    downsample = nn.Sequential(nn.Conv2d(8, 8, 1, 2, bias=False), nn.BatchNorm2d(8)) if down else None
    plain = Bottleneck(8, 2, 2 if down else 1, downsample)
    nn.init.normal_(plain.bn3.bias)
    return make_resnet_bottleneck_stochastic(plain, 0, 1, rate, "linear", method)


def parts(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The branch and the shortcut, from torchvision's own layers."""
    out = module.relu(module.bn1(module.conv1(x)))
    out = module.bn3(module.conv3(module.relu(module.bn2(module.conv2(out)))))
    return out, x if module.downsample is None else module.downsample(x)


def test_the_registered_function_is_this_one() -> None:
    assert apply_stochastic_depth is cf.apply_stochastic_depth
    assert {"ResNetBottleneck": (Bottleneck, make_resnet_bottleneck_stochastic)} == _STOCHASTIC_LAYER_MAPPING


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("down", [False, True])
class TestBlocks:
    def test_in_evaluation_the_branch_is_scaled_by_the_probability_to_keep_it(self, method: str, down: bool) -> None:
        module, x = block(0.3, method, down).eval(), draw(4, 8, 6, 6)
        branch, shortcut = parts(module, x)

        torch.testing.assert_close((0.7 * branch + shortcut).relu(), module(x))

    def test_with_rate_0_it_is_the_block_of_torchvision(self, method: str, down: bool) -> None:
        module, x = block(0.0, method, down), draw(4, 8, 6, 6)
        for training in (True, False):
            output = module.train(training)(x)
            torch.testing.assert_close(Bottleneck.forward(module, x), output)
            assert output is not x

    def test_with_rate_1_it_is_the_shortcut(self, method: str, down: bool) -> None:
        module, x = block(1.0, method, down), draw(4, 8, 6, 6)
        output = module(x)

        torch.testing.assert_close(parts(module, x)[1].relu(), output)
        assert (method == "block" and not down) == (output is x)

    def test_it_can_be_copied_and_pickled(self, method: str, down: bool) -> None:
        module, x = block(0.3, method, down).eval(), draw(4, 8, 6, 6)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            other.drop_rate = torch.tensor(1.0)
            assert not torch.equal(module(x), other(x))
            torch.testing.assert_close(parts(other, x)[1].relu(), other(x))


def test_a_skipped_block_computes_nothing_and_gets_no_gradient() -> None:
    module, x = block(1.0, "block"), draw(4, 8, 6, 6).requires_grad_()
    module.conv1.register_forward_hook(lambda *_: pytest.fail("it was computed"))
    module(x).sum().backward()

    assert all(parameter.grad is None for parameter in module.parameters())
    assert 0 == module.bn1.num_batches_tracked


@pytest.mark.parametrize("rate", [0.2, 0.7])
def test_blocks_are_skipped_as_often_as_they_should_be(rate: float) -> None:
    torch.manual_seed(1)
    module, x, n = block(rate, "block"), draw(1, 8, 1, 1).expand(2, -1, -1, -1), 2000
    skipped = sum(module(x) is x for _ in range(n))

    # The binomial standard deviation times 4: exceeded by chance once in 16000 seeds.
    assert abs(skipped - n * rate) < 4 * math.sqrt(n * rate * (1 - rate))


@pytest.mark.parametrize("rate", [0.2, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_example_is_dropped_as_often_as_it_should_be(rate: float, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    module, n = block(rate, "sample").to(dtype), 4000
    x = draw(n, 8, 2, 2).to(dtype)
    output, (branch, _) = module(x), parts(module, x)
    dropped = (output == x).flatten(1).all(1)

    assert abs(int(dropped.sum()) - n * rate) < 4 * math.sqrt(n * rate * (1 - rate))
    assert dtype is output.dtype
    torch.testing.assert_close((branch + x).relu()[~dropped], output[~dropped])


def test_draws_come_from_torch_alone() -> None:
    for method in METHODS:
        module, x = block(0.5, method), draw(16, 8, 2, 2)
        outputs = []
        for _ in range(2):
            torch.manual_seed(3)
            outputs.append([module(x) for _ in range(8)])
        assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
        assert not all(torch.equal(outputs[0][0], other) for other in outputs[0])


def test_dropping_by_example_compiles_to_one_graph() -> None:
    module, x = block(0.5, "sample"), draw(16, 8, 2, 2)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.manual_seed(3)
    expected = module(x)
    torch.manual_seed(3)

    torch.testing.assert_close(expected, compiled(x))


def test_drawing_by_example_happens_on_the_device_of_the_images() -> None:
    module = block(0.5, "sample").to("meta")

    assert "meta" == module(torch.zeros(4, 8, 2, 2, device="meta")).device.type


@pytest.mark.parametrize("residual", [None, nn.Linear(3, 3)])
def test_a_stochastic_module_adds_or_skips(residual: nn.Module | None) -> None:
    main, x = nn.Linear(3, 3), draw(2, 3)
    module = BlockStochasticModule(main, residual, drop_rate=0.25)
    rest = x if residual is None else residual(x)

    torch.testing.assert_close(0.75 * main(x) + rest, module.eval()(x))
    module.train()
    module.drop_rate = torch.tensor(0.0)
    torch.testing.assert_close(main(x) + rest, module(x))
    module.drop_rate = torch.tensor(1.0)
    torch.testing.assert_close(rest, module(x))


class TestApply:
    def test_rates_grow_linearly_or_are_all_the_same(self) -> None:
        model = resnet50(num_classes=2)
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        blocks: list[Any] = [module for module in model.modules() if isinstance(module, Bottleneck)]
        for method in METHODS:
            apply_stochastic_depth(model, "ResNetBottleneck", method, 0.2, "linear")
            rates = [float(b.drop_rate) for b in blocks]
            assert pytest.approx([0.0125 * i for i in range(1, 17)]) == rates
            apply_stochastic_depth(model, "ResNetBottleneck", method, 0.2, "uniform")
            assert pytest.approx([0.2] * 16) == [float(b.drop_rate) for b in blocks]

        assert blocks == [module for module in model.modules() if isinstance(module, Bottleneck)]
        assert list(weights) == list(model.state_dict())
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in weights.items())

    def test_subclasses_are_not_changed(self) -> None:
        class Other(Bottleneck):
            pass

        model = nn.Sequential(Other(4, 1), Bottleneck(4, 1))
        apply_stochastic_depth(model, "ResNetBottleneck", drop_rate=0.5)

        assert Other is type(model[0])
        assert 0.5 == float(model[1].drop_rate)  # type: ignore[arg-type]

    @pytest.mark.parametrize("model", [nn.Linear(2, 2), resnet18(), Bottleneck(4, 1)])
    def test_a_model_without_blocks_raises_a_warning(self, model: nn.Module) -> None:
        with pytest.warns(NoEffectWarning, match=r"`apply_stochastic_depth` had no effect: the model has no ResNetBot"):
            apply_stochastic_depth(model, "ResNetBottleneck")

    @pytest.mark.parametrize("method", METHODS)
    def test_export(self, method: str, model: nn.Module) -> None:
        apply_stochastic_depth(model, "ResNetBottleneck", method)
        layers: Any = model.eval().module
        x = draw(2, 3, 16, 16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated; torch 2.6 wants tensors to be buffers
            scripted = torch.jit.script(layers)  # type: ignore[no-untyped-call]
            exported = torch.export.export(layers, (x,)).module()

        torch.testing.assert_close(layers(x), scripted(x))
        torch.testing.assert_close(layers(x), torch.fx.symbolic_trace(layers)(x))
        torch.testing.assert_close(layers(x), exported(x))


def test_the_shortcut_is_first_where_modules_change_their_input_in_place() -> None:
    module = BlockStochasticModule(torch.nn.ReLU(inplace=True), torch.nn.Identity(), drop_rate=0.0)
    clone = BlockStochasticModule(torch.nn.ReLU(inplace=True), Doubled(), drop_rate=0.0)
    x = torch.tensor([-1.0, 2.0])

    for mode in (True, False):
        assert [0.0, 4.0] == module.train(mode)(x.clone()).tolist()
        assert [-2.0, 6.0] == clone.train(mode)(x.clone()).tolist()


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x
