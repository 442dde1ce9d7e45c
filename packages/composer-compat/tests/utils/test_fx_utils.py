"""Surgery on graphs of real networks: what they compute afterwards is compared with what they computed before."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from composer.utils.fx_utils import apply_stochastic_residual, count_op_instances, fuse_parallel_linears, replace_op


class Attention(nn.Module):
    """A block of a transformer: attention and a feed-forward network, both with a shortcut."""

    def __init__(self, width: int = 8, heads: int = 2, biases: tuple[bool, bool, bool] = (True,) * 3) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias) for bias in biases)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        seen = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.out(seen) + x  # the shortcut is the second input
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int = 2, **kwargs: Any) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(11, 8), nn.Embedding(7, 8)
        self.layers = nn.Sequential(*(Attention(**kwargs) for _ in range(layers)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.ones_like(ids).cumsum(-1) - 1
        return self.layers(self.token(ids) + self.position(positions))


def ids() -> torch.Tensor:
    return torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(0))


def resnet() -> tuple[GraphModule, torch.Tensor]:
    torch.manual_seed(0)
    return symbolic_trace(torchvision.models.resnet18(num_classes=5)), torch.rand(2, 3, 32, 32)


def gap(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first - second).detach().abs().max())


# ---- counting and replacing


class Operations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu = nn.Linear(3, 3), nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.linear(x)) + torch.relu(x)
        return nn.functional.relu(self.relu(y)) + x.relu().exp()


@pytest.mark.parametrize(
    ("ops", "count"),
    [
        (nn.ReLU, 2),
        (nn.Module, 3),
        (torch.relu, 1),
        ("relu", 1),
        ([nn.functional.relu, "exp"], 2),
        ((nn.ReLU, torch.relu, nn.functional.relu, "relu"), 5),
        (operator.add, 2),
        (torch.sigmoid, 0),
        ([], 0),
    ],
)
def test_operations_are_counted(ops: Any, count: int) -> None:
    assert count == count_op_instances(symbolic_trace(Operations()), ops)


def test_operations_are_replaced() -> None:
    gm, x = symbolic_trace(Operations()), torch.randn(4, 3)
    w, b = gm.linear.weight, gm.linear.bias
    returned = replace_op(gm, [nn.ReLU, torch.relu, "relu"], torch.tanh)

    assert returned is gm
    assert 4 == count_op_instances(gm, torch.tanh)
    assert not hasattr(gm, "relu")
    expected = torch.relu(torch.tanh(torch.tanh(x @ w.T + b) + torch.tanh(x))) + torch.tanh(x).exp()
    torch.testing.assert_close(gm(x), expected)


def test_an_operation_of_itself_is_replaced_once() -> None:
    gm = symbolic_trace(nn.Sequential(nn.ReLU(), nn.ReLU()))
    replace_op(gm, nn.ReLU, lambda x: torch.relu(x) + 1)

    assert [3.0] == gm(torch.tensor([1.0])).tolist()


@pytest.mark.parametrize("function", [count_op_instances, replace_op, fuse_parallel_linears, apply_stochastic_residual])
def test_a_module_without_a_graph_is_refused(function: Any) -> None:
    arguments = {count_op_instances: [nn.ReLU], replace_op: [nn.ReLU, torch.tanh]}.get(function, [])
    with pytest.raises(ValueError, match=r"`gm` must be a `torch.fx.GraphModule`, got ReLU"):
        function(nn.ReLU(), *arguments)


def test_other_operations_are_refused() -> None:
    gm = symbolic_trace(nn.ReLU())
    with pytest.raises(TypeError, match="An operation must be a function, the name of a method or a class"):
        count_op_instances(gm, 3)  # type: ignore[arg-type]
    for wrong in (nn.GELU, nn.GELU(), "gelu"):
        with pytest.raises(TypeError, match="`tgt_op` must be a function"):
            replace_op(gm, nn.ReLU, wrong)  # type: ignore[arg-type]


# ---- linear layers


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans(), st.integers(0, 1000))
def test_fused_layers_compute_what_their_parts_did(outputs: list[int], bias: bool, seed: int) -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, size, bias, dtype=torch.float64) for size in outputs)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([(index + 1) * layer(x) for index, layer in enumerate(self.layers)], -1)

    torch.manual_seed(seed)
    gm, x = symbolic_trace(Parallel()), torch.randn(2, 4, 3, dtype=torch.float64)
    expected = gm(x)
    fuse_parallel_linears(gm, keep_weights=True)

    assert gap(expected, gm(x)) < 1e-12
    assert 1 == count_op_instances(gm, nn.Linear)
    assert (len(outputs) > 1) == hasattr(gm, "fused_linear_0")


@pytest.mark.parametrize("keep_weights", [False, True])
def test_queries_keys_and_values_are_fused(keep_weights: bool) -> None:
    torch.manual_seed(0)
    model = Transformer()
    gm = symbolic_trace(model)
    expected = gm(ids())
    expected.sum().backward()
    gradients = [model.layers[0].q.weight.grad, model.layers[0].v.weight.grad]
    gm = fuse_parallel_linears(gm, keep_weights=keep_weights)

    assert 12 - 2 * 2 == count_op_instances(gm, nn.Linear)
    assert 2 == count_op_instances(gm, torch.split)
    assert not hasattr(gm.get_submodule("layers.0"), "q")
    if not keep_weights:
        assert gap(expected, gm(ids())) > 1e-3
        return
    assert gap(expected, gm(ids())) < 1e-6
    gm(ids()).sum().backward()
    fused = gm.fused_linear_0.weight.grad
    assert gap(gradients[0], fused[:8]) < 1e-5
    assert gap(gradients[1], fused[16:]) < 1e-5


def mixed() -> GraphModule:
    return symbolic_trace(Attention(biases=(True, False, True)))


def called_twice() -> GraphModule:
    model = Attention()
    model.q = model.k
    return symbolic_trace(model)


def tied() -> GraphModule:
    model = Attention()
    model.q.weight = model.out.weight
    return symbolic_trace(model)


def other_dtype() -> GraphModule:
    gm = symbolic_trace(Attention())
    gm.v.double()
    return gm


@pytest.mark.parametrize(("make", "outputs"), [(mixed, []), (called_twice, []), (tied, [16]), (other_dtype, [])])
def test_layers_that_differ_or_are_shared_are_not_fused(make: Any, outputs: list[int]) -> None:
    gm = fuse_parallel_linears(make())

    assert outputs == [m.out_features for name, m in gm.named_children() if name.startswith("fused")]


def test_frozen_layers_stay_frozen() -> None:
    some, every = symbolic_trace(Attention()), symbolic_trace(Attention())
    some.q.requires_grad_(False)
    every.requires_grad_(False)
    fuse_parallel_linears(some, keep_weights=True)
    fuse_parallel_linears(every, keep_weights=True)

    assert not hasattr(some, "fused_linear_0")
    assert not every.fused_linear_0.weight.requires_grad


def test_names_in_use_are_skipped() -> None:
    gm = symbolic_trace(Attention())
    gm.fused_linear_0 = nn.Identity()

    assert 24 == fuse_parallel_linears(gm).fused_linear_1.out_features


# ---- residual blocks


def test_all_blocks_of_a_residual_network_are_found() -> None:
    gm, x = resnet()
    plain = copy.deepcopy(gm).eval()
    _, count = apply_stochastic_residual(gm, drop_rate=0.0)

    assert 8 == count  # 3 of them with a projection
    gm.eval()
    assert gap(plain(x), gm(x)) < 1e-6
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in gm.parameters())


def test_both_blocks_of_each_layer_of_a_transformer_are_found() -> None:
    torch.manual_seed(0)
    gm = symbolic_trace(Transformer())
    expected = gm(ids())
    returned, count = apply_stochastic_residual(gm, drop_rate=0.0)

    assert returned is gm
    assert 4 == count  # the sum of embeddings is none
    assert gap(expected, gm(ids())) < 1e-6


def test_a_skipped_block_is_its_shortcut() -> None:
    gm, x = resnet()
    plain = copy.deepcopy(gm)
    apply_stochastic_residual(gm, drop_rate=1.0)
    gm(x).sum().backward()

    net = plain
    y = net.maxpool(net.relu(net.bn1(net.conv1(x))))
    for layer in (net.layer1, net.layer2, net.layer3, net.layer4):
        first = layer.get_submodule("0")
        y = torch.relu(torch.relu(first.downsample.get_submodule("1")(first.downsample.get_submodule("0")(y)))
                       if hasattr(first, "downsample") else y)  # fmt: skip
    assert gap(net.fc(net.avgpool(y).flatten(1)), gm(x)) < 1e-5
    block = gm.stochastic_residual_0
    assert all(p.grad is None for p in block.branch.parameters())
    assert gm.conv1.weight.grad is not None


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(torch.tanh(self.linear(x)), x)


def test_blocks_are_skipped_with_their_probability() -> None:
    torch.manual_seed(0)
    gm, x = symbolic_trace(Sum()), torch.randn(3, 2)
    branch = torch.tanh(gm.linear(x))
    apply_stochastic_residual(gm, drop_rate=0.3)
    outputs = [gm(x) for _ in range(1000)]
    skipped = sum(torch.equal(x, y) for y in outputs)

    assert 240 < skipped < 360  # four standard deviations
    assert all(torch.equal(x, y) or torch.equal(x + branch, y) for y in outputs)
    torch.testing.assert_close(gm.eval()(x), x + 0.7 * branch)


class Masked(nn.Module):
    """A branch with a second input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(2, 2, bias=False)
        self.scale.weight.data = torch.diag(torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x += mask * self.scale(x)
        return x


def test_a_branch_may_have_other_inputs() -> None:
    gm = symbolic_trace(Masked())
    _, count = apply_stochastic_residual(gm, drop_rate=0.5)
    x, mask = torch.ones(4, 2), torch.tensor([1.0, 0.0])

    assert 1 == count
    torch.testing.assert_close(gm.eval()(x, mask), torch.tensor([[2.0, 1.0]] * 4))


class NoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        without_parameters = x + torch.relu(x)
        equal = self.one(x) + self.two(x)
        used_elsewhere = self.three(x)
        return without_parameters, equal, x + used_elsewhere, used_elsewhere, x + 1, x + x, torch.add(x, x, alpha=2)


def test_other_additions_are_no_blocks() -> None:
    gm = symbolic_trace(NoBlocks())
    before = str(gm.graph)

    assert 0 == apply_stochastic_residual(gm)[1]
    assert before == str(gm.graph)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="`drop_rate` must be"):
        apply_stochastic_residual(symbolic_trace(Sum()), rate)
