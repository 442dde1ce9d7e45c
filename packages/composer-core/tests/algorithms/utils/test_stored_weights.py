"""`StoredWeights`: two swaps restore all tensors, bit for bit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from composer.algorithms.utils.stored_weights import StoredWeights
from composer.testing import deep_compare


def make_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3)).to(dtype)


def averaged(model: torch.nn.Module) -> StoredWeights:
    """Averages that differ from the model."""
    averages = StoredWeights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter)
    averages.update(model, 0.7)
    return averages


def copied(of: Any) -> Any:
    return copy.deepcopy(of.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_two_swaps_restore_both_sides(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    averages = averaged(model)
    weights, stored = copied(model), copied(averages)
    addresses = [tensor.data_ptr() for tensor in model.state_dict().values()]

    averages.swap(model)
    assert averages.swapped
    for name, tensor in model.state_dict().items():
        assert torch.equal(
            (stored["named_parameters_dict"] | stored["named_buffers_dict"])[name].to(tensor.dtype), tensor
        )
    for name, tensor in averages.named_parameters():
        assert torch.equal(weights[name], tensor)
    averages.swap(model)

    assert not averages.swapped
    deep_compare(weights, model.state_dict())
    deep_compare(stored, averages.state_dict())
    assert addresses == [tensor.data_ptr() for tensor in model.state_dict().values()]


def test_more_tensors_than_are_swapped_at_once() -> None:
    model = torch.nn.ParameterList(torch.full((1,), float(i)) for i in range(100))
    averages = StoredWeights(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.neg_()
    averages.swap(model)

    assert [float(i) for i in range(100)] == [parameter.item() for parameter in model.parameters()]
    assert [-float(i) for i in range(100)] == [tensor.item() for _, tensor in averages.named_parameters()]


@pytest.mark.parametrize("spectral_norm", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm])
def test_the_average_of_a_spectral_norm_is_normalized(spectral_norm: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(spectral_norm(torch.nn.Linear(8, 8)))
    averages = StoredWeights(model)
    for _ in range(30):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
            model(torch.zeros(1, 8))  # a power iteration
        averages.update(model, 0.9)
    averages.swap(model)
    model.eval()
    model(torch.zeros(1, 8))  # `torch.nn.utils.spectral_norm` computes the weight here

    assert torch.linalg.matrix_norm(model[0].weight, ord=2).item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool])
def test_buffers_other_than_running_statistics_are_copied(dtype: torch.dtype) -> None:
    model = torch.nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.tensor([1.0, -torch.inf]).to(dtype) if dtype.is_floating_point else None)
    model.register_buffer("cache", torch.zeros(2, dtype=dtype))
    averages = StoredWeights(model)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.copy_(torch.ones_like(buffer) if buffer is not model.mask else buffer)
    expected = {"running_mean": torch.full((2,), 0.5), "running_var": torch.ones(2)}
    expected |= {name: buffer.clone() for name, buffer in model.named_buffers() if name not in expected}
    averages.update(model, 0.5)

    deep_compare(expected, dict(averages.named_buffers()))


def test_weights_that_are_not_finite_come_back_too() -> None:
    model = torch.nn.Linear(3, 1, bias=False)
    averages = StoredWeights(model)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([float("nan"), float("-inf"), -0.0]))
    bits = model.weight.detach().view(torch.int32).clone()
    averages.swap(model)
    averages.swap(model)

    assert torch.equal(bits, model.weight.detach().view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_while_swapped_and_loaded_the_swap_is_undone(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    averages = averaged(model)
    weights, stored = copied(model), copied(averages)
    averages.swap(model)

    other, loaded = make_model(dtype), StoredWeights(None)
    other.load_state_dict(copied(model))
    loaded.load_state_dict(copied(averages))
    loaded.swapped = True
    loaded.swap(other)

    deep_compare(weights, other.state_dict())
    deep_compare(stored, loaded.state_dict())


def test_without_the_exact_averages_those_of_the_model_are_taken() -> None:
    """As in checkpoints of other programs, which store averages in the dtype of the model."""
    model = make_model(torch.bfloat16)
    averages = averaged(model)
    averages.swap(model)
    saved = {key: value for key, value in copied(averages).items() if key != "averages"}
    rounded = model[0].weight.detach().clone()  # type: ignore[union-attr]
    loaded = StoredWeights(None)
    loaded.load_state_dict(saved)
    loaded.swapped = True
    loaded.swap(model)

    assert torch.equal(rounded.float(), loaded.named_parameters_dict["0.weight"])


def test_loaded_tensors_are_copied() -> None:
    saved = copied(StoredWeights(make_model()))
    averages = StoredWeights(None)
    averages.load_state_dict(saved)
    saved["named_parameters_dict"]["0.weight"].zero_()

    assert averages.named_parameters_dict["0.weight"].abs().sum() > 0


def test_transferred_averages_leave_the_store_as_it_is() -> None:
    model, other = make_model(), make_model()
    averages = averaged(model)
    stored = copied(averages)
    averages.copy_to(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()

    deep_compare(stored, averages.state_dict())
    assert not torch.equal(model[0].weight, other[0].weight)  # type: ignore[arg-type,union-attr]


def test_averages_take_the_memory_format_and_dtype_of_the_model() -> None:
    """Both can change without a parameter becoming another object."""
    model = torch.nn.Conv2d(2, 3, 3)
    averages = averaged(model)
    model.to(memory_format=torch.channels_last).bfloat16()  # type: ignore[call-overload]
    averages.move_to(model)

    weight = averages.named_parameters_dict["weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.dtype is torch.float32
    averages.update(model, 0)
    assert torch.equal(model.weight.float(), weight)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_has_its_own_averages_and_not_the_model(copied_by: Any) -> None:
    model = make_model()
    averages = averaged(model)
    other = copied_by(averages)
    averages.update(model, 0)

    assert len(pickle.dumps(other)) < 2 * len(pickle.dumps(averages.state_dict()))
    assert not torch.equal(averages.named_parameters_dict["0.weight"], other.named_parameters_dict["0.weight"])


def test_averages_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(ValueError, match="The saved averages must be a dictionary of tensors by name"):
        StoredWeights(None).load_state_dict({"parameters": [torch.zeros(1)]})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_changes_while_swapped_apply_to_both_weight_and_average(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    averages = averaged(model)
    weights, stored = copied(model), copied(averages)
    averages.swap(model)
    averages.record_checksums(model)
    with torch.no_grad():
        model[0].weight.neg_()  # type: ignore[operator,union-attr]
    current = copied(model)["0.weight"]

    assert ["0.weight"] == averages.adopt_changes(model)
    assert [] == averages.adopt_changes(model)
    averages.swap(model)
    deep_compare({**weights, "0.weight": current}, model.state_dict())
    stored["named_parameters_dict"]["0.weight"] = current.to(averages.named_parameters_dict["0.weight"].dtype)
    deep_compare(stored, averages.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("permute", [False, True])
def test_the_smallest_change_of_a_large_tensor_is_detected(dtype: torch.dtype, permute: bool) -> None:
    model = torch.nn.ParameterList([torch.ones(3, 2**21 - 1, dtype=dtype), torch.zeros((), dtype=dtype)])
    with torch.no_grad():
        model[0][0, 0] = 2
    averages = StoredWeights(model)
    averages.swap(model)
    averages.record_checksums(model)
    with torch.no_grad():
        if permute:
            model[0].copy_(model[0].roll(1, dims=1))
        else:
            model[0][2, -1] += torch.finfo(dtype).eps

    assert ["0"] == averages.adopt_changes(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_is_averaged_once_it_becomes_trainable(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).to(dtype)
    model[0].requires_grad_(False)
    averages = StoredWeights(model)
    averages.update(model, 0.5)
    assert {"1.weight", "1.bias"} == set(averages.named_parameters_dict)

    model[0].requires_grad_(True)
    first = model[0].weight.detach().float().clone()  # type: ignore[operator,union-attr]
    averages.update(model, 0.5)
    assert torch.equal(first, averages.named_parameters_dict["0.weight"])
    with torch.no_grad():
        model[0].weight.zero_()  # type: ignore[operator,union-attr]
    averages.update(model, 0.5)
    assert torch.equal(first / 2, averages.named_parameters_dict["0.weight"])
