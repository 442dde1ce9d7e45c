"""The layers against a loop over parts, and against torch's own."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from composer.algorithms.ghost_batchnorm import GhostBatchNorm1d, GhostBatchNorm2d, GhostBatchNorm3d
from composer.algorithms.ghost_batchnorm.ghost_batchnorm import _GhostBatchNorm

CASES = [
    (nn.BatchNorm1d, GhostBatchNorm1d, ()),
    (nn.BatchNorm1d, GhostBatchNorm1d, (5,)),
    (nn.BatchNorm2d, GhostBatchNorm2d, (4, 5)),
    (nn.BatchNorm3d, GhostBatchNorm3d, (2, 3, 4)),
]


def draw(*shape: int) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 1


def slow_parts(n: int, size: int) -> list[slice]:
    """As few parts as the size allows, dealt out one example at a time."""
    counts = [0] * math.ceil(n / size)
    for i in range(n):
        counts[i % len(counts)] += 1
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    return [slice(end - count, end) for end, count in zip(ends, counts, strict=True)]


def slow_ghost(x: torch.Tensor, bn: Any, size: int) -> torch.Tensor:
    """Plain arithmetic, part by part; updates the running statistics of `bn`."""
    parts, outputs = slow_parts(len(x), size), []
    dims, shape = [0, *range(2, x.dim())], [1, -1] + [1] * (x.dim() - 2)
    for part in parts:
        mean, var = x[part].mean(dims), x[part].var(dims, correction=0)
        normal = (x[part] - mean.view(shape)) / (var.view(shape) + bn.eps).sqrt()
        outputs.append(normal * bn.weight.view(shape) + bn.bias.view(shape))
        weight = bn.momentum / len(parts)
        bn.running_mean.lerp_(mean, weight)
        bn.running_var.lerp_(x[part].var(dims, correction=1), weight)
    return torch.cat(outputs)


@pytest.mark.parametrize(("kind", "ghost_kind", "dims"), CASES)
@pytest.mark.parametrize("size", [2, 3, 5, 12])
def test_each_ghost_batch_has_mean_0_and_variance_1(kind: Any, ghost_kind: Any, dims: Any, size: int) -> None:
    layer = _GhostBatchNorm.from_batchnorm(kind(3, eps=1e-12).double(), ghost_batch_size=size)
    output = layer(draw(12, 3, *dims)).detach()

    assert type(layer) is ghost_kind
    for part in slow_parts(12, size):
        flat = output[part].transpose(0, 1).flatten(1)
        torch.testing.assert_close(torch.zeros(3).double(), flat.mean(1))
        torch.testing.assert_close(torch.ones(3).double(), flat.var(1, correction=0))


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 12), size=st.integers(1, 14), momentum=st.floats(0, 1))
def test_outputs_and_statistics_are_those_of_a_loop_over_parts(n: int, size: int, momentum: float) -> None:
    bn: Any = nn.BatchNorm2d(3, momentum=momentum).double()
    nn.init.normal_(bn.weight)
    nn.init.normal_(bn.bias)
    reference = copy.deepcopy(bn).requires_grad_(False)
    layer = GhostBatchNorm2d(bn, size)
    x = draw(n, 3, 2, 3)
    before = x.clone()
    expected, actual = slow_ghost(x, reference, size), layer(x)

    torch.testing.assert_close(expected, actual)
    torch.testing.assert_close(reference.running_mean, bn.running_mean)
    torch.testing.assert_close(reference.running_var, bn.running_var)
    assert momentum == bn.momentum
    assert torch.equal(before, x)


def test_gradients_are_those_of_the_parts() -> None:
    x = draw(6, 3, 2, 2).requires_grad_()
    bn = nn.BatchNorm2d(3).double()
    g = draw(6, 3, 2, 2).cos()
    actual = torch.autograd.grad(GhostBatchNorm2d(bn, 2)(x), x, g)[0]
    expected = torch.cat([torch.autograd.grad(bn(part), x, gp)[0][s] for part, gp, s in _thirds(x, g)])

    torch.testing.assert_close(expected, actual)


def _thirds(x: torch.Tensor, g: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, slice]]:
    return [(x[i : i + 2], g[i : i + 2], slice(i, i + 2)) for i in (0, 2, 4)]


@pytest.mark.parametrize("n", [1, 5, 40])
def test_evaluation_is_the_plain_layer(n: int) -> None:
    bn = nn.BatchNorm2d(3).double()
    layer = GhostBatchNorm2d(bn, 8)
    layer(draw(16, 3, 2, 2))
    layer.eval()
    seen: list[int] = []
    bn.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    x = draw(n, 3, 2, 2)

    assert torch.equal(bn(x), layer(x))
    assert [n, n] == seen


def test_without_running_statistics_evaluation_normalizes_parts_too() -> None:
    bn = nn.BatchNorm2d(3, track_running_stats=False).double()
    x = draw(8, 3, 2, 2)
    layer = GhostBatchNorm2d(bn, 4)

    assert torch.equal(layer(x), layer.eval()(x))
    assert not torch.allclose(bn(x), layer(x))


def test_a_normalization_that_is_frozen_stays_frozen() -> None:
    """And is not applied part by part."""
    bn = nn.BatchNorm2d(3).double().eval()
    layer = GhostBatchNorm2d(bn, 4)
    seen: list[int] = []
    bn.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    layer(draw(8, 3, 2, 2))

    assert layer.training
    assert [8] == seen
    assert torch.equal(torch.zeros(3).double(), bn.running_mean)  # type: ignore[arg-type]


def test_a_batch_smaller_than_a_ghost_batch_is_one_part() -> None:
    """The last batch of an epoch, for example."""
    bn = nn.BatchNorm2d(3).double()
    expected, x = copy.deepcopy(bn), draw(5, 3, 2, 2)

    assert torch.equal(expected(x), GhostBatchNorm2d(bn, 8)(x))
    assert torch.equal(expected.running_mean, bn.running_mean)  # type: ignore[arg-type]


def test_a_momentum_of_none_averages_all_ghost_batches() -> None:
    bn = nn.BatchNorm2d(3, momentum=None).double()
    layer, x = GhostBatchNorm2d(bn, 2), draw(12, 3, 2, 2)
    for batch in (x[:4], x[4:]):
        layer(batch)

    torch.testing.assert_close(x.mean([0, 2, 3]), bn.running_mean)
    assert 6 == bn.num_batches_tracked


def test_an_error_leaves_the_momentum_as_it_was() -> None:
    bn = nn.BatchNorm2d(3, momentum=0.25)
    with pytest.raises(RuntimeError, match=r"running_mean should contain 4 elements"):
        GhostBatchNorm2d(bn, 2)(torch.zeros(8, 4, 2, 2))

    assert 0.25 == bn.momentum


def test_an_overridden_forward_is_kept() -> None:
    """Such as that of normalizations with an activation."""

    class NormAndRelu(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    assert (GhostBatchNorm2d(NormAndRelu(3), 4)(torch.randn(8, 3, 2, 2)) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_memory_formats_are_kept(dtype: torch.dtype) -> None:
    x = draw(8, 3, 4, 4).to(dtype, memory_format=torch.channels_last)
    output = GhostBatchNorm2d(nn.BatchNorm2d(3).to(dtype), 4)(x)

    assert dtype is output.dtype
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_modules_that_cannot_be_wrapped_are_refused() -> None:
    with pytest.raises(TypeError, match=r"`module` must be a batch normalization, got GroupNorm"):
        _GhostBatchNorm.from_batchnorm(nn.GroupNorm(1, 2))
    with pytest.raises(ValueError, match=r"`module` must be a `BatchNorm1d`, .* got SyncBatchNorm"):
        _GhostBatchNorm.from_batchnorm(nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match=r"`ghost_batch_size` must be at least 1, got 0"):
        GhostBatchNorm2d(nn.BatchNorm2d(2), 0)


class TestExport:
    def model(self) -> nn.Sequential:
        layer = GhostBatchNorm2d(nn.BatchNorm2d(3).double(), 4)
        layer(draw(8, 3, 2, 2))
        return nn.Sequential(layer)

    def test_torchscript_and_fx_evaluate_it(self) -> None:
        model, x = self.model().eval(), draw(8, 3, 2, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # newer torch calls TorchScript deprecated
            scripted = torch.jit.script(model)

        torch.testing.assert_close(model(x), scripted(x))
        torch.testing.assert_close(model(x), torch.fx.symbolic_trace(model)(x))
        torch.testing.assert_close(model(x), torch.export.export(model, (x,)).module()(x))

    def test_it_compiles_without_a_break(self) -> None:
        model, x = self.model(), draw(8, 3, 2, 2)
        other = copy.deepcopy(model)
        compiled = torch.compile(model, backend="eager", fullgraph=True)

        torch.testing.assert_close(other(x), compiled(x))
        torch.testing.assert_close(other[0].batchnorm.running_mean, model[0].batchnorm.running_mean)
        assert 0.1 == model[0].batchnorm.momentum
