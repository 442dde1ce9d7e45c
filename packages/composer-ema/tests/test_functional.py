"""`compute_ema` against the closed form of an exponential average."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.ema import EMAParameters, compute_ema


class Net(torch.nn.Module):
    """Parameters, one of them frozen and one under two names; buffers of floats, of integers and not persistent."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(3)
        self.frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.to(dtype)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def stored_in(average: torch.nn.Module | EMAParameters) -> dict[str, torch.Tensor]:
    if isinstance(average, torch.nn.Module):
        return dict(average.state_dict())
    return {**average.named_parameters_dict, **average.named_buffers_dict}


@torch.no_grad()
def shake(model: torch.nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Give every tensor new values; return copies of them."""
    for tensor in tensors_of(model).values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        else:
            tensor += 1
    return {name: tensor.clone() for name, tensor in tensors_of(model).items()}


@settings(deadline=None, max_examples=30)
@given(smoothing=st.floats(0, 1), updates=st.integers(1, 6), seed=st.integers(0, 1000), module=st.booleans())
def test_an_average_has_its_closed_form(smoothing: float, updates: int, seed: int, module: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = Net()
    first = shake(model, generator)
    average = copy.deepcopy(model) if module else EMAParameters(model)
    values = []
    for _ in range(updates):
        values.append(shake(model, generator))
        compute_ema(model, average, smoothing)

    for name, stored in stored_in(average).items():
        if name == "second.weight":
            continue  # another name of `first.weight`
        if name in ("norm.num_batches_tracked", "cache"):
            assert torch.equal(values[-1][name], stored)
            continue
        expected = smoothing**updates * first[name]
        for age, value in enumerate(reversed(values)):
            expected = expected + (1 - smoothing) * smoothing**age * value[name]
        torch.testing.assert_close(expected, stored, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("smoothing", [0, 0.5, 0.99, 1])
def test_common_smoothings(smoothing: float) -> None:
    model, average = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    before = copy.deepcopy(average)
    cf.compute_ema(model, average, smoothing=smoothing)

    expected = smoothing * before.weight + (1 - smoothing) * model.weight
    torch.testing.assert_close(expected, average.weight)


def test_smoothing_0_copies_and_smoothing_1_keeps_bit_for_bit() -> None:
    model = torch.nn.Linear(5, 5)
    averages = EMAParameters(torch.nn.Linear(5, 5))
    before = averages.named_parameters_dict["weight"].clone()

    compute_ema(model, averages, smoothing=1)
    assert torch.equal(before, averages.named_parameters_dict["weight"])
    compute_ema(model, averages, smoothing=0)
    assert torch.equal(model.weight, averages.named_parameters_dict["weight"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_low_precision_weights_move(dtype: torch.dtype) -> None:
    """In bfloat16, 1 + 0.0001 is 1: an average of that dtype would never move."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    torch.nn.init.zeros_(model.weight)
    averages = EMAParameters(model)
    torch.nn.init.ones_(model.weight)
    for _ in range(1000):
        compute_ema(model, averages, smoothing=0.9999)

    average = averages.named_parameters_dict["weight"]
    assert average.dtype is torch.float32
    torch.testing.assert_close(1 - 0.9999**1000, average.item(), atol=1e-4, rtol=0)


def test_a_module_of_another_dtype_can_hold_the_averages() -> None:
    model, average = Net(torch.bfloat16), Net(torch.float32)
    shake(model, torch.Generator().manual_seed(0))
    compute_ema(model, average, smoothing=0.5)

    torch.testing.assert_close(model.norm.weight.float() / 2 + 0.5, average.norm.weight)


def test_only_tensors_of_both_models_are_averaged() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1)})
    average = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1), "c": torch.nn.Linear(1, 1)})
    untouched = copy.deepcopy(average["c"].state_dict())
    compute_ema(model, average, smoothing=0)

    assert torch.equal(model["a"].weight, average["a"].weight)
    assert torch.equal(untouched["weight"], average["c"].weight)


def test_only_trainable_parameters_are_stored() -> None:
    parameters = EMAParameters(Net())

    assert dict(parameters.named_parameters()).keys() == {
        *("first.weight", "first.bias", "second.bias", "norm.weight", "norm.bias"),
    }
    assert dict(parameters.named_buffers()).keys() == {
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "cache"),
    }


def test_the_averages_share_no_memory_with_the_model() -> None:
    model = Net()
    averages = EMAParameters(model)
    shake(model, torch.Generator().manual_seed(0))
    compute_ema(model, averages, smoothing=0)
    before = copy.deepcopy(stored_in(averages))
    expected = copy.deepcopy(tensors_of(model))
    shake(model, torch.Generator().manual_seed(1))

    for name, stored in stored_in(averages).items():
        assert torch.equal(before[name], stored)
        assert torch.equal(expected[name].detach(), stored)
        assert not stored.requires_grad


def test_a_replaced_module_is_detected() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    averages = EMAParameters(model)
    compute_ema(model, averages, smoothing=0)
    model[0] = torch.nn.Linear(2, 2)
    model[1].weight = torch.nn.Parameter(torch.ones(2, 2))
    compute_ema(model, averages, smoothing=0)

    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, averages.named_parameters_dict[name])


def test_a_removed_module_keeps_its_average() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1)})
    averages = EMAParameters(model)
    compute_ema(model, averages)
    before = averages.named_parameters_dict["b.weight"].clone()
    del model["b"]
    compute_ema(model, averages)

    assert torch.equal(before, averages.named_parameters_dict["b.weight"])


def test_a_buffer_that_grows_starts_again() -> None:
    model = Net()
    averages = EMAParameters(model)
    model.cache = torch.ones(5)
    compute_ema(model, averages, smoothing=0.9)
    model.cache += 1

    assert torch.equal(torch.ones(5), averages.named_buffers_dict["cache"])


def test_wrappers_do_not_change_the_names() -> None:
    model = torch.nn.Linear(2, 2)
    averages = EMAParameters(model)
    torch.nn.init.ones_(model.weight)
    compute_ema(torch.compile(model), averages, smoothing=0)

    assert torch.equal(torch.ones(2, 2), averages.named_parameters_dict["weight"])


def test_a_smoothing_outside_0_and_1_is_refused() -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"`smoothing` must be in \[0, 1\], got 1.5"):
        compute_ema(model, model, smoothing=1.5)


def test_averages_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`ema_model` must be a `torch\.nn\.Module` or `EMAParameters`, got dict"):
        compute_ema(torch.nn.Linear(1, 1), {})  # type: ignore[arg-type]


def test_averages_of_another_shape_are_refused() -> None:
    small, large = torch.nn.Linear(1, 2), torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"'weight' must have one shape .* got \(2, 3\) and \(2, 1\)"):
        compute_ema(large, small)
    with pytest.raises(RuntimeError, match=r"average of 'weight' has the shape \(2, 1\), but .* has \(2, 3\)"):
        compute_ema(large, EMAParameters(small))


def test_averages_of_another_model_are_refused() -> None:
    other = torch.nn.Sequential(torch.nn.Linear(1, 2))
    with pytest.raises(
        ValueError, match=r"`ema_model` must have the parameters of `model` .* got a Sequential that has"
    ):
        compute_ema(torch.nn.Linear(1, 2), other)


def test_averages_in_the_model_are_not_updated() -> None:
    model = torch.nn.Linear(1, 1)
    averages = EMAParameters(model)
    averages.swap_params(model)
    with pytest.raises(RuntimeError, match=r"The averages are in the model and cannot follow it\. Swap them out"):
        compute_ema(model, averages)


def test_averages_are_not_written_into_a_model_with_other_names() -> None:
    averages = EMAParameters(torch.nn.Sequential(torch.nn.Linear(1, 1)))

    with pytest.raises(ValueError, match=r"`model` must have .* such as '0.weight', but this Linear has none"):
        averages.transfer_ema_params(torch.nn.Linear(1, 1))
