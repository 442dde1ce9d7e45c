"""`Precision` and `get_precision_context` against torch's own autocast."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer.core import precision as precision_module
from composer.core.precision import Precision, _cpu_autocasts_to, get_precision_context, validate_precision
from composer.devices import DeviceCPU

CPU_DTYPES = {"fp32": torch.float32, "amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}


def linear_dtype(device_type: str = "cpu") -> torch.dtype:
    weight = torch.ones(2, 2, device=device_type)
    return torch.nn.functional.linear(weight, weight).dtype


@pytest.fixture
def no_cpu_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision_module, "_cpu_autocasts_to", lambda dtype: dtype is torch.bfloat16)


class TestCPU:
    @pytest.mark.parametrize("name", CPU_DTYPES)
    def test_products_have_the_dtype_of_the_precision(self, name: str) -> None:
        if not _cpu_autocasts_to(torch.float16) and name == "amp_fp16":
            pytest.skip("this build of torch has no fp16 autocast on the CPU")

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

    @pytest.mark.usefixtures("no_cpu_fp16")
    def test_fp16_is_refused_where_torch_can_not_compute_in_it(self) -> None:
        with pytest.raises(ValueError, match="'amp_fp16', which is not supported for CPU training"):
            get_precision_context("amp_fp16", device_type="cpu")

    def test_a_dtype_that_autocast_does_not_support_is_detected(self) -> None:
        assert not _cpu_autocasts_to(torch.float64)
        assert _cpu_autocasts_to(torch.bfloat16)

    def test_missing_kernels_are_detected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def no_kernel(*args: Any) -> None:
            raise RuntimeError("\"slow_conv2d_cpu\" not implemented for 'Half'")

        monkeypatch.setattr(torch.nn.functional, "conv2d", no_kernel)

        assert not _cpu_autocasts_to.__wrapped__(torch.float16)


class TestValidatePrecision:
    @pytest.mark.parametrize("precision", [Precision.FP32, Precision.AMP_BF16])
    def test_the_cpu_takes_fp32_and_bf16(self, precision: Precision) -> None:
        validate_precision(precision, DeviceCPU())

    def test_the_cpu_does_not_take_fp8(self) -> None:
        with pytest.raises(ValueError, match=r"'amp_fp8', which is not supported for CPU training\."):
            validate_precision(Precision.AMP_FP8, DeviceCPU())

    @pytest.mark.usefixtures("no_cpu_fp16")
    def test_the_cpu_takes_fp16_only_if_torch_does(self) -> None:
        with pytest.raises(ValueError, match="not supported for CPU training"):
            validate_precision(Precision.AMP_FP16, DeviceCPU())

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
