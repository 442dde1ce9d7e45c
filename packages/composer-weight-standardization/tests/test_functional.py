"""The parametrization against a loop over filters, and which convolutions get it."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import spectral_norm

from composer import functional as cf
from composer.algorithms.warnings import NoEffectWarning
from composer.algorithms.weight_standardization import WeightStandardizer, apply_weight_standardization


def draw(*shape: int) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 1


def slow_standardize(weight: torch.Tensor) -> torch.Tensor:
    """Plain arithmetic, filter by filter."""
    filters = []
    for w in weight:
        mean = w.sum() / w.numel()
        variance = ((w - mean) ** 2).sum() / w.numel()
        filters.append((w - mean) / (variance + 1e-10).sqrt())
    return torch.stack(filters)


def standardized(model: nn.Module) -> list[bool]:
    """For each convolution in definition order whether its weight is standardized."""
    convs = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    return [parametrize.is_parametrized(conv, "weight") for conv in convs]


class TestFormula:
    @settings(deadline=None)
    @given(shape=st.lists(st.integers(1, 5), min_size=2, max_size=5), scale=st.floats(1e-3, 1e3))
    def test_it_is_a_loop_over_filters(self, shape: list[int], scale: float) -> None:
        weight = scale * draw(*shape)
        before = weight.clone()

        torch.testing.assert_close(slow_standardize(weight), WeightStandardizer()(weight), atol=1e-9, rtol=1e-9)
        assert torch.equal(before, weight)

    def test_gradients_go_through_it(self) -> None:
        weight, g = draw(4, 3, 2, 2).requires_grad_(), draw(4, 3, 2, 2).cos()
        expected = torch.autograd.grad(slow_standardize(weight), weight, g)

        torch.testing.assert_close(expected, torch.autograd.grad(WeightStandardizer()(weight), weight, g))

    def test_a_constant_filter_is_zero(self) -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert torch.equal(torch.zeros(2, 3, dtype=dtype), WeightStandardizer()(torch.full((2, 3), 5, dtype=dtype)))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
    def test_dtypes_are_kept(self, dtype: torch.dtype) -> None:
        actual = WeightStandardizer()(draw(4, 8, 3, 3).to(dtype))

        assert dtype is actual.dtype
        torch.testing.assert_close(
            torch.ones(4).double(), actual.double().std((1, 2, 3), correction=0), atol=0.01, rtol=0
        )

    @pytest.mark.parametrize(
        ("shape", "layout"),
        [
            ((4, 3, 2), torch.contiguous_format),
            ((4, 3, 3, 2), torch.contiguous_format),
            ((4, 3, 1, 1), torch.contiguous_format),
            ((4, 3, 3, 2), torch.channels_last),
            ((4, 3, 1, 1), torch.channels_last),
            ((4, 1, 3, 3), torch.channels_last),  # images of one channel: the stride of a size of 1 is free
            ((4, 1, 3, 3), torch.contiguous_format),
            ((4, 1, 1, 3), torch.channels_last),
            ((4, 1, 3, 1), torch.channels_last),
            ((4, 3, 3, 2, 2), torch.channels_last_3d),
        ],
    )
    def test_strides_are_kept(self, shape: tuple[int, ...], layout: torch.memory_format) -> None:
        """Those of a first convolution decide the layout of all feature maps."""
        weight = draw(*shape).contiguous(memory_format=layout)
        if layout is not torch.contiguous_format:
            weight = torch.empty(shape, memory_format=layout, dtype=torch.float64).copy_(weight)

        assert weight.stride() == WeightStandardizer()(weight).stride()


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
def test_convolutions_of_every_number_of_dimensions_use_standardized_weights(kind: Any) -> None:
    conv = kind(4, 6, 3, groups=2)
    original = conv.weight
    assert 1 == apply_weight_standardization(nn.Sequential(conv))
    flat = conv.weight.detach().flatten(1)

    torch.testing.assert_close(torch.zeros(6), flat.mean(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.ones(6), flat.var(1, correction=0))
    assert conv.parametrizations.weight.original is original


def test_a_convolution_that_is_the_model_is_standardized() -> None:
    conv = nn.Conv2d(3, 4, 3)
    expected = slow_standardize(conv.weight)
    apply_weight_standardization(conv)
    x = torch.randn(1, 3, 5, 5)

    torch.testing.assert_close(F.conv2d(x, expected, conv.bias), conv(x))


@pytest.mark.filterwarnings("ignore::composer.algorithms.warnings.NoEffectWarning")
@pytest.mark.parametrize("ignored", [0, 1, 2, 3])
def test_the_last_layers_stay(ignored: int) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    count = max(2 - ignored, 0)

    assert count == apply_weight_standardization(model, ignored)
    assert [i < count for i in range(2)] == standardized(model)


class Backwards(nn.Module):
    """Runs its convolutions in the reverse of their definition, the second not at all."""

    def __init__(self, kind: type[nn.Conv2d] = nn.Conv2d) -> None:
        super().__init__()
        self.third, self.unused, self.second, self.first = (kind(3, 3, 3, padding=1) for _ in range(4))

    def forward(self, batch: Any) -> torch.Tensor:
        x, _ = batch
        return self.third(self.second(self.first(x)).relu())  # type: ignore[no-any-return]


class OwnConv(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


@pytest.mark.parametrize("kind", [nn.Conv2d, OwnConv])
def test_the_last_layers_are_those_that_run_last(kind: type[nn.Conv2d], caplog: pytest.LogCaptureFixture) -> None:
    for ignored, expected in ((1, [False, True, True, True]), (2, [False, True, False, True])):
        model = Backwards(kind)
        apply_weight_standardization(model, ignored)
        assert expected == standardized(model)
    assert [] == caplog.records


def test_a_layer_that_runs_twice_counts_where_it_runs_last() -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(conv, nn.Conv2d(3, 3, 3), conv)

    assert 1 == apply_weight_standardization(model, 1)
    assert [False, True] == standardized(model)


class Untraceable(Backwards):
    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) if batch[0].sum() > 0 else batch[0]


def test_without_a_trace_the_last_layers_are_those_defined_last(caplog: pytest.LogCaptureFixture) -> None:
    model = Untraceable()
    with caplog.at_level(logging.WARNING):
        assert 3 == apply_weight_standardization(model, 1)

    assert [True, True, True, False] == standardized(model)
    assert ["WARNING"] == [record.levelname for record in caplog.records]
    assert "could not trace the model" in caplog.text
    assert "Traceback" not in caplog.text


class Branching(nn.Module):
    """Cannot be traced, but has no convolution either."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def test_only_modules_with_convolutions_must_be_traceable(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 3), Branching(), nn.Conv2d(3, 3, 3))

    assert 1 == apply_weight_standardization(model, 1)
    assert [True, False] == standardized(model)
    assert [] == caplog.records


def test_lazy_and_adapted_convolutions_stay_with_a_warning() -> None:
    adapter = nn.ModuleDict({"base_layer": nn.Conv2d(3, 3, 3), "lora_A": nn.Conv2d(3, 1, 3)})
    model = nn.Sequential(adapter, nn.LazyConv2d(3, 3), nn.Conv2d(3, 3, 3))
    with pytest.warns(UserWarning, match=r"(?s)an adapter changes its weight.*\(LazyConv2d\): its shape is not known"):
        assert 1 == apply_weight_standardization(model)

    assert [False, False, False, True] == standardized(model)


def test_nothing_is_traced_when_all_layers_count(caplog: pytest.LogCaptureFixture) -> None:
    assert 4 == apply_weight_standardization(Untraceable())
    assert [] == caplog.records


def test_applying_it_twice_is_the_same_as_once() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    apply_weight_standardization(model)
    once = copy.deepcopy(model)

    assert 2 == apply_weight_standardization(model)
    assert [name for name, _ in once.named_modules()] == [name for name, _ in model.named_modules()]
    assert list(once.state_dict()) == list(model.state_dict())


def test_other_parametrizations_are_applied_first() -> None:
    conv: Any = spectral_norm(nn.Conv2d(3, 4, 3)).eval()
    expected = slow_standardize(conv.weight.detach())
    apply_weight_standardization(conv)

    torch.testing.assert_close(expected, conv.weight.detach(), atol=1e-5, rtol=1e-5)


def test_filters_of_one_element_stay() -> None:
    """They would all become 0."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1, groups=4), nn.Conv2d(4, 4, 1))

    assert 1 == apply_weight_standardization(model)
    assert [False, True] == standardized(model)


def test_the_optimizer_trains_the_same_parameter() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters = list(optimizer.param_groups[0]["params"])
    apply_weight_standardization(model)
    before = model[0].weight.detach().clone()
    model(torch.randn(4, 3, 6, 6)).square().sum().backward()
    optimizer.step()

    assert {id(p) for p in parameters} == {id(p) for p in model.parameters()}
    assert not torch.equal(before, model[0].weight)


def test_it_compiles_without_a_break() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(1, 3, 5, 5)
    apply_weight_standardization(model)

    torch.testing.assert_close(model(x), torch.compile(model, backend="eager", fullgraph=True)(x))


def test_it_is_a_function_of_composer() -> None:
    assert cf.apply_weight_standardization is apply_weight_standardization


def test_a_model_without_convolutions_raises_a_warning() -> None:
    with pytest.warns(NoEffectWarning, match=r"`apply_weight_standardization` had no effect: the model has no"):
        assert 0 == apply_weight_standardization(nn.Linear(2, 2))


def test_a_negative_number_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`n_last_layers_ignore` must not be negative, got -1"):
        apply_weight_standardization(nn.Conv2d(3, 4, 3), -1)


def test_leaving_out_all_convolutions_raises_a_warning() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    with pytest.warns(NoEffectWarning, match="`n_last_layers_ignore=2` leaves out all 2 convolutions"):
        count = apply_weight_standardization(model, n_last_layers_ignore=2)

    assert 0 == count
    assert not any(parametrize.is_parametrized(conv) for conv in model)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("computed_by", [nn.utils.weight_norm, nn.utils.spectral_norm, "prune", "complex"])
def test_a_weight_that_cannot_be_standardized_is_left_and_the_others_are_not(computed_by: Any) -> None:
    dtype = torch.complex64 if computed_by == "complex" else torch.float32
    conv = nn.Conv2d(8, 8, 3, dtype=dtype)
    if computed_by == "prune":
        prune.random_unstructured(conv, "weight", amount=0.5)
    elif computed_by != "complex":
        computed_by(conv)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), conv)
    inputs = torch.randn(2, 8, 5, 5, dtype=dtype)
    before = conv.eval()(inputs)
    with pytest.warns(UserWarning, match=r"`1` \(Conv2d\): its weight is (computed|complex)"):
        count = apply_weight_standardization(model)

    assert 1 == count
    assert parametrize.is_parametrized(model[0], "weight")
    assert torch.equal(before, conv(inputs))
