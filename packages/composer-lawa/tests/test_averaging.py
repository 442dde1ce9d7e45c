"""`average_weights` and `average_checkpoints`."""

from __future__ import annotations

import builtins
import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.lawa import average_checkpoints, average_weights
from composer.checkpoint import save_checkpoint
from composer.core import State
from composer.testing import SimpleConvModel, deep_compare


def models(count: int, dtype: torch.dtype = torch.float64) -> list[torch.nn.Module]:
    found = []
    for seed in range(count):
        model = SimpleConvModel(norm="batch", seed=seed).to(dtype)
        model.module[2].running_var.add_(seed)  # type: ignore[operator,union-attr,index]
        model.module[2].num_batches_tracked.add_(10 * seed)  # type: ignore[operator,union-attr,index]
        found.append(model)
    return found


@settings(deadline=None, max_examples=20)
@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=3), min_size=1, max_size=8))
def test_the_mean_is_that_of_the_obvious_sum(rows: list[list[float]]) -> None:
    weights = [{"w": torch.tensor(row, dtype=torch.float64)} for row in rows]
    expected = torch.tensor([sum(column) / len(rows) for column in zip(*rows, strict=True)], dtype=torch.float64)

    torch.testing.assert_close(expected, average_weights(weights)["w"], atol=1e-12, rtol=1e-15)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(-10, 10)), min_size=1, max_size=8))
def test_factors_weigh_the_sum(terms: list[tuple[float, float]]) -> None:
    weights = [{"w": torch.tensor([value], dtype=torch.float64)} for value, _ in terms]
    found = average_weights(iter(weights), [factor for _, factor in terms])["w"].item()

    assert sum(value * factor for value, factor in terms) == pytest.approx(found, abs=1e-9)


def test_a_model_and_its_state_dict_are_the_same() -> None:
    some = models(3)
    expected = {name: value.clone() for name, value in some[0].state_dict().items()}
    found = average_weights([some[0], some[1].state_dict(), torch.nn.parallel.DataParallel(some[2]).module])

    assert found.keys() == expected.keys()
    deep_compare(average_weights(some), found)
    deep_compare(expected, some[0].state_dict())
    some[0].load_state_dict(found)


def test_integers_are_those_of_the_last() -> None:
    found = average_weights(models(3))["module.2.num_batches_tracked"]

    assert (20, torch.int64) == (found.item(), found.dtype)


@pytest.mark.parametrize("spectral_norm", [torch.nn.utils.spectral_norm, torch.nn.utils.parametrizations.spectral_norm])
@pytest.mark.parametrize("as_model", [True, False])
def test_power_iteration_vectors_are_those_of_the_last(spectral_norm: Any, as_model: bool) -> None:
    some = [torch.nn.Sequential(spectral_norm(torch.nn.Linear(3, 3))) for _ in range(3)]
    for model in some:
        model.register_buffer("mask", torch.tensor([0, -torch.inf]))
    found = average_weights(some if as_model else [model.state_dict() for model in some])
    buffers, parameters = dict(some[-1].named_buffers()), list(some[0].named_parameters())

    deep_compare(buffers, {name: found.pop(name) for name in buffers})
    assert {name for name, _ in parameters} == found.keys()
    for name, value in found.items():
        torch.testing.assert_close(sum(model.get_parameter(name) for model in some) / 3, value)


def test_running_statistics_are_averaged() -> None:
    assert torch.equal(average_weights(models(3))["module.2.running_var"], torch.full((4,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_narrow_weights_are_float32(dtype: torch.dtype) -> None:
    """1 and its next neighbour have no mean in between, and many small ones would be lost in the sum."""
    next_one = 1 + torch.finfo(dtype).eps
    weights = [{"w": torch.tensor([value], dtype=dtype)} for value in [1, next_one] * 300]
    found = average_weights(weights)["w"]

    assert found.dtype is torch.float32
    assert found.item() == pytest.approx((1 + next_one) / 2, rel=1e-6)


def test_the_result_has_its_own_memory() -> None:
    (model,) = models(1)
    found = average_weights([model])
    before = copy.deepcopy(found)
    for tensor in model.state_dict().values():
        tensor.zero_()

    deep_compare(before, found)


def test_what_is_no_tensor_is_left_out() -> None:
    assert {"w"} == average_weights([{"w": torch.ones(1), "extra": object()}]).keys()  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("weights", "options", "error", "message"),
    [
        ([], {}, ValueError, "`weights` must have at least one set of weights, got none"),
        ([1], {}, TypeError, "`weights` must be modules or dictionaries of tensors, got int"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], {}, ValueError, "the same names, but a, b is not in all"),
        ([{"a": torch.ones(1)}, {"a": torch.ones(2)}], {}, ValueError, r"shapes, but 'a' has \(1,\) and \(2,\)"),
        ([{"a": torch.ones(1)}], {"coefficients": [1, 2]}, ValueError, "as many as the weights, got 2 for 1"),
        ([{"a": torch.ones(1)}] * 2, {"coefficients": [1]}, ValueError, "as many as the weights, got 1 for more"),
    ],
)
def test_what_cannot_be_averaged_is_refused(weights: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        cf.average_weights(weights, **options)


# ---- checkpoints ----


def save(folder: Path, numbers: list[int], name: str = "ep{epoch}-ba{batch}-rank{rank}.pt") -> dict[int, Any]:
    """Save models under the numbers of their batches; return the weights."""
    saved = {}
    for number in numbers:
        (*_, model) = models(number % 7 + 1, torch.float32)
        state = State(model=model)
        for _ in range(number):
            state.timestamp = state.timestamp.to_next_batch()
        save_checkpoint(state, str(folder / name))
        saved[number] = copy.deepcopy(model.state_dict())
    return saved


def test_the_last_checkpoints_of_a_folder_are_averaged(tmp_path: Path) -> None:
    """By the number of their batches: by name, 9 would be the last."""
    saved = save(tmp_path, [9, 10, 2, 11])
    (tmp_path / "latest-rank0.pt").symlink_to("ep0-ba11-rank0.pt")
    (tmp_path / "notes.txt").write_text("")

    deep_compare(average_weights([saved[10], saved[11]]), average_checkpoints(tmp_path, num_last=2))
    deep_compare(average_weights([saved[n] for n in (2, 9, 10, 11)]), cf.average_checkpoints(str(tmp_path)))


def test_given_paths_are_averaged_in_their_order(tmp_path: Path) -> None:
    saved = save(tmp_path, [1, 2, 3])
    paths = [tmp_path / f"ep0-ba{number}-rank0.pt" for number in (3, 1)]
    found = average_checkpoints(paths)
    deep_compare(average_weights([saved[3], saved[1]]), found)
    deep_compare(average_weights([saved[1]]), average_checkpoints(paths, num_last=1))
    deep_compare(average_weights([saved[3]]), average_checkpoints(paths[0]))

    SimpleConvModel(norm="batch").load_state_dict(found)


@pytest.mark.parametrize("num_last", [3, 1])
def test_too_few_checkpoints_are_an_error(num_last: int, tmp_path: Path) -> None:
    save(tmp_path, [1, 2])
    shutil.copy(tmp_path / "ep0-ba1-rank0.pt", tmp_path / "other.pt")
    if num_last == 1:
        with pytest.raises(ValueError, match="`paths` must have at least one checkpoint, got 0"):
            average_checkpoints([])
        return
    with pytest.raises(ValueError, match="`paths` must have 3 checkpoints, got 2 in"):
        average_checkpoints(tmp_path, num_last=3)


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="`paths` must exist, got"):
        average_checkpoints(tmp_path / "nowhere")


def test_a_checkpoint_without_a_model_is_an_error(tmp_path: Path) -> None:
    torch.save({"state": {"timestamp": 1}}, tmp_path / "ba1.pt")
    with pytest.raises(ValueError, match=r"`paths` must be checkpoints with a model, but '.*ba1\.pt' has none"):
        average_checkpoints(tmp_path)


@pytest.mark.parametrize("num_last", [0, -1])
def test_a_number_of_checkpoints_must_be_positive(num_last: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`num_last` must be at least 1"):
        average_checkpoints(tmp_path, num_last=num_last)


def test_without_the_package_of_checkpoints_its_name_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("composer.checkpoint"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr("composer.utils.import_helpers.import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"is part of `composer-checkpoint`.*pip install composer-checkpoint"):
        average_checkpoints(["a.pt"])
