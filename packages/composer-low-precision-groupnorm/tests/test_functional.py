"""`LPGroupNorm` against torch's layer, and `apply_low_precision_groupnorm` on models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from composer import functional as cf
from composer.algorithms.low_precision_groupnorm import LPGroupNorm, apply_low_precision_groupnorm
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Precision

DTYPES = [torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def norm(**options: Any) -> nn.GroupNorm:
    layer = nn.GroupNorm(2, 6, eps=0.1, **options)
    for parameter in layer.parameters():
        parameter.data += 0.3 * draw(*parameter.shape)
    return layer


def test_the_registered_function_is_this_one() -> None:
    assert apply_low_precision_groupnorm is cf.apply_low_precision_groupnorm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("missing", [(), ("bias",), ("weight",), ("weight", "bias")])
def test_under_autocast_on_the_cpu_everything_is_computed_in_its_dtype(
    dtype: torch.dtype, given: torch.dtype, missing: tuple[str, ...]
) -> None:
    """Not only under that of CUDA, which is what `torch.is_autocast_enabled()` answers for."""
    plain = norm()
    for name in missing:
        setattr(plain, name, None)
    layer, x = LPGroupNorm.from_groupnorm(plain), draw(3, 6, 5, dtype=given)
    low = [None if p is None else p.detach().to(dtype) for p in (plain.weight, plain.bias)]
    with torch.autocast("cpu", dtype):
        actual = layer(x)

    assert dtype is actual.dtype
    assert torch.equal(F.group_norm(x.to(dtype), 2, *low, 0.1), actual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_autocast_it_is_the_layer_of_torch(dtype: torch.dtype) -> None:
    plain, x = norm().to(dtype), draw(3, 6, 5, dtype=dtype)

    assert torch.equal(plain(x), LPGroupNorm.from_groupnorm(plain)(x))
    with torch.autocast("cuda", torch.bfloat16, enabled=torch.cuda.is_available()):
        assert torch.equal(plain(x), LPGroupNorm.from_groupnorm(plain)(x))


def test_float64_and_meta_tensors_are_not_cast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.float64 is LPGroupNorm(2, 6, dtype=torch.float64)(draw(3, 6, 5, dtype=torch.float64)).dtype
        assert (3, 6, 5) == LPGroupNorm(2, 6, device="meta")(torch.zeros(3, 6, 5, device="meta")).shape


def test_gradients_are_those_of_float32_but_for_rounding() -> None:
    """bfloat16 has 8 bits: values are off by up to 2**-9 each, and the gradient of a weight is a sum of 160."""
    plain, x = norm(), draw(32, 6, 5)
    layer = LPGroupNorm.from_groupnorm(plain)
    g = draw(32, 6, 5)
    expected = torch.autograd.grad(plain(x), list(plain.parameters()), g)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    actual = torch.autograd.grad(y, list(layer.parameters()), g.bfloat16())

    assert {torch.float32} == {grad.dtype for grad in actual}
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(a, b, atol=0.1, rtol=0.05)


def test_compiled_it_is_one_graph() -> None:
    layer, x = LPGroupNorm(2, 6), draw(3, 6, 5)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), compiled(x))
    assert torch.float32 is compiled(x).dtype


def test_the_constructor_is_that_of_torch() -> None:
    layer = LPGroupNorm(2, 6, 0.1, True, "cpu", torch.bfloat16)

    assert (2, 6, 0.1) == (layer.num_groups, layer.num_channels, layer.eps)
    assert torch.bfloat16 is layer.weight.dtype
    assert LPGroupNorm(2, 4, affine=False).weight is None


class TestApply:
    @pytest.mark.parametrize("precision", ["amp_bf16", "amp_fp16", Precision.AMP_BF16])
    def test_layers_are_replaced_and_keep_their_parameters(self, precision: Any) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(norm(), norm(affine=False)))
        optimizer = torch.optim.Adam(model.parameters())
        model(draw(2, 6)).sum().backward()
        optimizer.step()
        parameters, state, groups = list(model.parameters()), dict(optimizer.state), list(optimizer.param_groups)
        names = list(model.state_dict())
        model.eval()
        apply_low_precision_groupnorm(model, precision, optimizer)

        assert [LPGroupNorm] * 2 == [type(layer) for layer in model[1]]
        assert [0.1] * 2 == [layer.eps for layer in model[1]]
        assert [True, False] == [layer.affine for layer in model[1]]
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert names == list(model.state_dict())
        assert (state, groups) == (dict(optimizer.state), list(optimizer.param_groups))
        assert not any(module.training for module in model.modules())

    def test_applying_it_twice_is_the_same_as_once(self) -> None:
        model = nn.Sequential(norm())
        apply_low_precision_groupnorm(model, "amp_bf16")
        layer = model[0]
        apply_low_precision_groupnorm(model, "amp_bf16")

        assert layer is model[0]

    def test_subclasses_that_override_forward_are_not_replaced(self) -> None:
        class ChannelsLast(nn.GroupNorm):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                return super().forward(input.transpose(1, -1)).transpose(1, -1)

        class Renamed(nn.GroupNorm):
            pass

        parametrized = weight_norm(norm())
        model = nn.Sequential(ChannelsLast(2, 6), parametrized, Renamed(2, 6))
        apply_low_precision_groupnorm(model, "amp_bf16")

        assert [ChannelsLast, type(parametrized), LPGroupNorm] == [type(layer) for layer in model]

    @pytest.mark.parametrize("precision", [None, "fp32", Precision.FP32, "amp_fp8"])
    def test_other_precisions_have_no_effect(self, precision: Any) -> None:
        model = nn.Sequential(norm())
        with pytest.warns(
            NoEffectWarning, match=r"`apply_low_precision_groupnorm` only applies to AMP_FP16 and AMP_BF16 precisi"
        ):
            apply_low_precision_groupnorm(model, precision)

        assert type(model[0]) is nn.GroupNorm

    @pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2)), nn.GroupNorm(1, 2)])
    def test_a_model_with_nothing_to_replace_raises_a_warning(self, model: nn.Module) -> None:
        with pytest.warns(NoEffectWarning, match=r"no replaceable `torch.nn.GroupNorm`"):
            apply_low_precision_groupnorm(model, "amp_bf16")

    def test_an_unknown_precision_is_refused(self) -> None:
        with pytest.raises(ValueError, match="amp_int4"):
            apply_low_precision_groupnorm(nn.Sequential(norm()), "amp_int4")

    def test_only_groupnorms_are_converted(self) -> None:
        module: Any = nn.Linear(2, 2)
        with pytest.raises(TypeError, match=r"`module` must be a `torch.nn.GroupNorm`, got Linear"):
            LPGroupNorm.from_groupnorm(module)


def test_the_model_is_returned() -> None:
    model = nn.Sequential(norm())

    assert cf.apply_low_precision_groupnorm(model, Precision.AMP_BF16) is model
    with pytest.warns(NoEffectWarning):
        assert cf.apply_low_precision_groupnorm(model, Precision.FP32) is model
