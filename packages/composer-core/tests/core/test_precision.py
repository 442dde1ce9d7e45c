"""`Precision` and `get_precision_context` against torch's own autocast."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from composer.core.precision import Precision, get_precision_context, validate_precision
from composer.devices import DeviceCPU

CPU_DTYPES = {"fp32": torch.float32, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


def linear_dtype(device_type: str = "cpu") -> torch.dtype:
    weight = torch.ones(2, 2, device=device_type)
    return torch.nn.functional.linear(weight, weight).dtype


class TestCPU:
    @pytest.mark.parametrize("name", CPU_DTYPES)
    def test_products_have_the_dtype_of_the_precision(self, name: str) -> None:
        with get_precision_context(name, device_type="cpu"):
            actual = linear_dtype()

        assert CPU_DTYPES[name] == actual
        assert torch.float32 == linear_dtype()

    def test_bf16_equals_torch_autocast(self) -> None:
        layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)

        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = layer(x)
        with get_precision_context(Precision.AMP_BF16, device_type="cpu"):
            actual = layer(x)

        assert torch.equal(expected, actual)

    def test_fp32_turns_an_active_autocast_off_and_on_again(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with get_precision_context(Precision.FP32, device_type="cpu"):
                inside = linear_dtype()
            after = linear_dtype()

        assert (torch.float32, torch.bfloat16) == (inside, after)

    def test_fp32_costs_nothing_where_no_autocast_is_active(self) -> None:
        context = get_precision_context(Precision.FP32, device_type="cpu")

        assert context is get_precision_context("fp32", device_type="cpu")
        assert isinstance(context, contextlib.nullcontext)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is the default here")
    def test_the_cpu_is_the_default_without_cuda(self) -> None:
        with get_precision_context("amp_bf16"):
            assert torch.bfloat16 == linear_dtype()

    def test_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(ValueError, match="must be one of 'fp32', 'amp_fp16', 'amp_bf16', 'amp_fp8', got 'fp64'"):
            get_precision_context("fp64")


class TestValidatePrecision:
    @pytest.mark.parametrize("precision", [Precision.FP32, Precision.AMP_FP16, Precision.AMP_BF16])
    def test_the_cpu_takes_what_torch_does(self, precision: Precision) -> None:
        validate_precision(precision, DeviceCPU())

    def test_the_cpu_does_not_take_fp8(self) -> None:
        with pytest.raises(ValueError, match=r"'amp_fp8', which is not supported for CPU training\."):
            validate_precision(Precision.AMP_FP8, DeviceCPU())

    @pytest.mark.parametrize("precision", Precision)
    def test_other_devices_take_everything(self, precision: Precision) -> None:
        validate_precision(precision, SimpleNamespace(name="gpu"))  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCUDA:
    @pytest.mark.parametrize("name", CPU_DTYPES)
    def test_cuda_is_the_default(self, name: str) -> None:
        with get_precision_context(name):
            assert CPU_DTYPES[name] == linear_dtype("cuda")

    def test_fp32_turns_an_active_autocast_off(self) -> None:
        with torch.autocast("cuda"), get_precision_context("fp32"):
            assert torch.float32 == linear_dtype("cuda")
