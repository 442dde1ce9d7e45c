"""`MixedLayerNorm` against torch's layer, and `apply_fused_layernorm` on models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from composer import functional as cf
from composer.algorithms.fused_layernorm import MixedLayerNorm, apply_fused_layernorm
from composer.algorithms.fused_layernorm import fused_layernorm as module
from composer.algorithms.warnings import NoEffectWarning

DTYPES = [torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).to(dtype)


def norm(**options: Any) -> nn.LayerNorm:
    layer = nn.LayerNorm(6, eps=0.1, **options)
    for parameter in layer.parameters():
        parameter.data += 0.3 * draw(*parameter.shape)
    return layer


def test_the_function_is_registered() -> None:
    assert apply_fused_layernorm is cf.apply_fused_layernorm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("low", DTYPES)
@pytest.mark.parametrize("missing", [(), ("bias",), ("weight",), ("weight", "bias")])
@pytest.mark.parametrize("kernel", [False, True])
def test_under_autocast_the_output_is_rounded_once_to_the_dtype_of_the_input(
    dtype: torch.dtype, low: torch.dtype, missing: tuple[str, ...], kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a device whose kernels do not take inputs and weights of different dtypes."""
    if not kernel:
        monkeypatch.setattr(module, "_takes_mixed", lambda *_: False)
    plain = norm()
    for name in missing:
        setattr(plain, name, None)
    layer, x = MixedLayerNorm.from_layernorm(plain), draw(64, 6, dtype=dtype)
    with torch.autocast("cpu", low):
        actual = layer(x)

    assert dtype is actual.dtype
    expected = plain(x.double() if missing == ("weight", "bias") else x.float())
    # Half a unit in the last place, and a little for sums in another order.
    torch.testing.assert_close(expected.float(), actual.float(), rtol=0.51 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_without_autocast_it_is_the_layer_of_torch(dtype: torch.dtype) -> None:
    plain, x = norm().to(dtype), draw(3, 6, dtype=dtype)

    assert torch.equal(plain(x), MixedLayerNorm.from_layernorm(plain)(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_autocast_wider_inputs_are_normalized_as_before(dtype: torch.dtype) -> None:
    plain, x = norm().to(dtype), draw(3, 6, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain(x), MixedLayerNorm.from_layernorm(plain)(x))
        assert (3, 6) == MixedLayerNorm(6, device="meta")(torch.zeros(3, 6, device="meta", dtype=torch.bfloat16)).shape


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_have_the_dtypes_of_what_they_belong_to(
    kernel: bool, weights: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 has 8 bits: inputs, outputs and weights are off by up to 2**-9 each, and a dozen of them add up."""
    if not kernel:
        monkeypatch.setattr(module, "_takes_mixed", lambda *_: False)
    plain, x, g = norm(), draw(32, 6).bfloat16().requires_grad_(), draw(32, 6).bfloat16()
    layer = MixedLayerNorm.from_layernorm(norm().to(weights))
    expected = torch.autograd.grad(plain(x.float()), [x, *plain.parameters()], g.float())
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    actual = torch.autograd.grad(y, [x, *layer.parameters()], g)

    assert [torch.bfloat16, weights, weights] == [grad.dtype for grad in actual]
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(a.float(), b.float(), atol=0.1, rtol=0.05)


def test_kernels_are_tested_with_weights_of_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    ask = module._takes_mixed.__wrapped__

    assert not ask("mps", torch.bfloat16, True)
    with torch.inference_mode():
        assert [True] * 4 == [ask("cpu", dtype, bias) for dtype in DTYPES for bias in (False, True)]

    def refuses(*_: Any) -> torch.Tensor:
        raise RuntimeError("expected scalar type BFloat16 but found Float")

    monkeypatch.setattr(module.F, "layer_norm", refuses)
    assert not ask("cpu", torch.bfloat16, True)
    # A kernel that misreads the weights gives no error, but other values.
    monkeypatch.setattr(module.F, "layer_norm", lambda x, shape, weight, bias: x * weight.to(x.dtype) * 3)
    assert not ask("cpu", torch.bfloat16, True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_the_output_has_the_dtype_of_the_input(dtype: torch.dtype) -> None:
    plain, x = norm().cuda(), draw(64, 6, dtype=dtype).cuda()
    with torch.autocast("cuda", dtype):
        actual, cast_up = MixedLayerNorm.from_layernorm(plain)(x), plain(x)

    assert (dtype, torch.float32) == (actual.dtype, cast_up.dtype)
    torch.testing.assert_close(cast_up, actual.float(), rtol=0.51 * torch.finfo(dtype).eps, atol=1e-4)


def test_compiled_it_is_one_graph() -> None:
    layer, x = MixedLayerNorm(6), draw(3, 6).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(layer(x), compiled(x))
    assert torch.float32 is compiled(x.float()).dtype


class TestApply:
    def test_layers_are_replaced_and_keep_their_parameters(self) -> None:
        model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(norm(), norm(bias=False), norm(elementwise_affine=False)))
        optimizer = torch.optim.Adam(model.parameters())
        model(draw(2, 6)).sum().backward()
        optimizer.step()
        parameters, state, groups = list(model.parameters()), dict(optimizer.state), list(optimizer.param_groups)
        names = list(model.state_dict())
        model.eval()
        apply_fused_layernorm(model, optimizer)

        assert [MixedLayerNorm] * 3 == [type(layer) for layer in model[1]]
        assert [0.1] * 3 == [layer.eps for layer in model[1]]
        assert [True, True, False] == [layer.elementwise_affine for layer in model[1]]
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert names == list(model.state_dict())
        assert (state, groups) == (dict(optimizer.state), list(optimizer.param_groups))
        assert not any(module.training for module in model.modules())

    def test_applying_it_twice_is_applying_it_once(self) -> None:
        model = nn.Sequential(norm())
        apply_fused_layernorm(model)
        layer = model[0]
        apply_fused_layernorm(model)

        assert layer is model[0]

    def test_subclasses_and_parametrized_layers_stay(self) -> None:
        class ChannelsFirst(nn.LayerNorm):
            def forward(self, input: torch.Tensor) -> torch.Tensor:
                return super().forward(input.transpose(1, -1)).transpose(1, -1)

        class Renamed(nn.LayerNorm):
            pass

        parametrized = weight_norm(norm())
        model = nn.Sequential(ChannelsFirst(6), parametrized, Renamed(6))
        apply_fused_layernorm(model)

        assert [ChannelsFirst, type(parametrized), MixedLayerNorm] == [type(layer) for layer in model]

    @pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2)), nn.LayerNorm(2)])
    def test_a_model_with_nothing_to_replace_gets_a_warning(self, model: nn.Module) -> None:
        with pytest.warns(NoEffectWarning, match=r"`apply_fused_layernorm` changed nothing"):
            apply_fused_layernorm(model)
