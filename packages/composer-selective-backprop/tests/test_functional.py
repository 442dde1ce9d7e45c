"""The functions, against what a sequence of draws would give."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms import selective_backprop as package
from composer.algorithms.selective_backprop import do_selective_backprop, select_using_loss, should_selective_backprop
from composer.algorithms.selective_backprop.selective_backprop import _select_rows, selective_backprop


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


def loss_of_outputs(outputs: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """The outputs are the losses."""
    return outputs if reduction == "none" else outputs.mean()


def inclusion(weights: list[float], draws: int) -> list[float]:
    """The probability that each of few items is among those drawn one after the other, in proportion to weights."""
    found = [0.0] * len(weights)

    def draw(left: tuple[int, ...], probability: float, drawn: int) -> None:
        total = sum(weights[i] for i in left)
        for i in left:
            p = probability * weights[i] / total
            found[i] += p
            if drawn > 1:
                draw(tuple(j for j in left if j != i), p, drawn - 1)

    draw(tuple(range(len(weights))), 1.0, draws)
    return found


def test_the_registered_functions_are_these() -> None:
    assert cf.select_using_loss is select_using_loss
    assert cf.should_selective_backprop is should_selective_backprop
    assert cf.selective_backprop is selective_backprop
    assert cf.do_selective_backprop is do_selective_backprop


def test_a_star_import_gives_the_class_and_the_functions() -> None:
    """But not `selective_backprop`, which would hide the module of that name."""
    assert {"SelectiveBackprop", "do_selective_backprop", "select_using_loss", "should_selective_backprop"} == set(
        package.__all__
    )
    assert isinstance(package.selective_backprop, ModuleType)


@pytest.mark.parametrize(
    ("duration", "batch", "start", "end", "interrupt", "expected"),
    [
        (0.5, 0, 0.5, 0.9, 0, True),
        (0.4999, 0, 0.5, 0.9, 0, False),
        (0.9, 0, 0.5, 0.9, 0, False),
        (0.8999, 0, 0.5, 0.9, 0, True),
        (0.6, 0, 0.5, 0.9, 2, True),
        (0.6, 1, 0.5, 0.9, 2, False),
        (0.6, 2, 0.5, 0.9, 3, False),
        (0.6, 3, 0.5, 0.9, 3, True),
        (0.6, 0, 0.5, 0.9, 1, False),
        (10, 0, 5, 10, 0, False),
        (5, 0, 5, 10, 0, True),
    ],
)
def test_batches_are_pruned_within_the_interval_but_for_interruptions(
    duration: float, batch: int, start: float, end: float, interrupt: int, expected: bool
) -> None:
    assert expected is should_selective_backprop(duration, batch, start, end, interrupt)
    assert expected is do_selective_backprop(duration, batch, start, end, interrupt)


@pytest.mark.parametrize(
    ("shape", "scale"), [((10,), 1), ((10, 4), 1), ((10, 3, 8, 8), 1), ((10, 3, 8, 8), 0.75), ((10, 3, 8, 8), 0.5)]
)
@pytest.mark.parametrize("keep", [0.5, 0.75, 1])
def test_rows_are_kept_at_full_size(shape: tuple[int, ...], scale: float, keep: float) -> None:
    x, y = torch.randn(shape), torch.arange(10)
    seen = []

    def model(input: torch.Tensor) -> torch.Tensor:
        seen.append(input.shape)
        return input.reshape(10, -1).mean(1)

    kept, target = select_using_loss(x, y, model, loss_of_outputs, keep, scale)

    assert int(10 * keep) == len(kept)
    assert len(set(target.tolist())) == len(target)
    assert torch.equal(x[target], kept)
    assert [torch.Size(shape[:2] + tuple(int(scale * n) for n in shape[2:]))] == seen


@pytest.mark.parametrize(("shape", "smaller"), [((4, 2, 8), (4, 2, 4)), ((4, 2, 8, 6, 4), (4, 2, 4, 3, 2))])
def test_signals_and_volumes_can_be_made_smaller(shape: tuple[int, ...], smaller: tuple[int, ...]) -> None:
    def model(input: torch.Tensor) -> torch.Tensor:
        assert smaller == input.shape
        return input.flatten(1).sum(1)

    select_using_loss(torch.zeros(shape), torch.zeros(4), model, loss_of_outputs, 0.5, 0.5)


@pytest.mark.parametrize(("n", "keep"), [(8, 0.5), (5, 0.4), (6, 0.2), (4, 0.25), (4, 0.75)])
def test_high_losses_are_kept_as_often_as_draws_in_sequence_say(n: int, keep: float) -> None:
    torch.manual_seed(0)
    losses = torch.randperm(n).double()  # the loss is the position
    trials, counts = 10_000, torch.zeros(n)
    for _ in range(trials):
        counts[select_using_loss(losses, losses, identity, loss_of_outputs, keep)[0].long()] += 1
    expected = inclusion([((i + 0.5) / n) ** (1 / keep - 1) for i in range(n)], int(keep * n))

    # The standard error of a frequency is at most 0.5 / sqrt(10000) = 0.005; 4 of them are allowed.
    torch.testing.assert_close(torch.tensor(expected), counts / trials, atol=0.02, rtol=0)


def test_the_first_drawn_follows_the_weights() -> None:
    torch.manual_seed(1)
    losses = torch.arange(4.0)
    firsts = [int(select_using_loss(losses, losses, identity, loss_of_outputs, 0.5)[0][0]) for _ in range(8000)]
    weights = [0.5, 1.5, 2.5, 3.5]

    for i in range(4):  # the standard error is at most 0.0056
        assert math.isclose(weights[i] / 8, firsts.count(i) / 8000, abs_tol=0.025)


@given(n=st.integers(1, 300), keep=st.floats(1e-6, 1), seed=st.integers(0, 100))
def test_at_least_one_example_is_kept_and_none_twice(n: int, keep: float, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(n)
    kept, target = select_using_loss(x, torch.arange(n), identity, loss_of_outputs, keep)

    assert max(int(keep * n), 1) == len(kept)
    assert len(set(target.tolist())) == len(target)


def test_an_empty_batch_stays_empty() -> None:
    kept, target = select_using_loss(torch.zeros(0, 3), torch.zeros(0), identity, loss_of_outputs)

    assert (0, 3) == kept.shape
    assert (0,) == target.shape


def test_a_tiny_share_is_the_highest_losses() -> None:
    """As numbers the weights of most would be zero, and fewer than asked for could be drawn."""
    losses = torch.arange(1000.0)
    kept, _ = select_using_loss(losses, losses, identity, loss_of_outputs, 0.01)

    assert 10 == len(kept)
    assert kept.min() > 900


def test_losses_of_several_values_count_by_their_mean() -> None:
    x = torch.tensor([[[9.0, 0.0]], [[1.0, 1.0]], [[5.0, 6.0]]])
    torch.manual_seed(0)
    kept = [int(select_using_loss(x, torch.arange(3), identity, loss_of_outputs, 0.05)[1]) for _ in range(50)]

    assert kept.count(2) > 40


def test_nan_is_the_highest_loss() -> None:
    x = torch.tensor([1.0, float("nan"), 2.0])
    kept = [int(select_using_loss(x, torch.arange(3), identity, loss_of_outputs, 0.02)[1]) for _ in range(20)]

    assert kept.count(1) > 15


def test_a_custom_generator_determines_the_draw() -> None:
    x = torch.randn(20)
    first, second = (
        select_using_loss(x, torch.arange(20), identity, loss_of_outputs, generator=torch.Generator().manual_seed(3))[1]
        for _ in range(2)
    )

    assert torch.equal(first, second)


def test_no_gradient_is_computed_but_flows_through_what_is_kept() -> None:
    x = torch.randn(8, 3, requires_grad=True)
    model = torch.nn.Linear(3, 2)
    kept, target = select_using_loss(x, torch.zeros(8, dtype=torch.long), model, F.cross_entropy, 0.5)
    kept.sum().backward()

    assert model.weight.grad is None
    assert x.grad is not None
    assert 4 * 3 == x.grad.sum()
    assert 4 == len(target)


class Replaces(torch.nn.Module):
    """Replaces its buffer by a new tensor in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count: torch.Tensor = self.count + 1
        return x


def test_buffers_and_the_mode_stay_as_they_were() -> None:
    norm, replaces = torch.nn.BatchNorm1d(3), Replaces()
    model = torch.nn.Sequential(norm, replaces, torch.nn.Dropout())
    mean, count = norm.running_mean, replaces.count
    select_using_loss(torch.randn(8, 3) + 5, torch.zeros(8, dtype=torch.long), model, F.cross_entropy)

    assert mean is norm.running_mean
    assert torch.equal(torch.zeros(3), mean)
    assert torch.equal(torch.ones(3), norm.running_var)  # type: ignore[arg-type]
    assert 0 == norm.num_batches_tracked
    assert count is replaces.count
    assert 0 == count
    assert all(module.training for module in model.modules())


def test_the_earlier_name_takes_the_same_arguments() -> None:
    x, y = torch.randn(8), torch.arange(8)
    torch.manual_seed(2)
    expected = select_using_loss(x, y, identity, loss_of_outputs, 0.5)
    torch.manual_seed(2)

    assert all(map(torch.equal, expected, selective_backprop(x, y, identity, loss_of_outputs, 0.5)))


@pytest.mark.parametrize("name", ["keep", "scale_factor"])
@pytest.mark.parametrize("value", [0, -0.5, 1.5])
def test_fractions_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` must be in \(0, 1\], got {value}"):
        select_using_loss(torch.zeros(2), torch.zeros(2), identity, loss_of_outputs, **{name: value})


def test_inputs_without_a_size_cannot_be_made_smaller() -> None:
    with pytest.raises(ValueError, match=r"`input` must have 3, 4 or 5 dimensions to be downsampled, got 2"):
        select_using_loss(torch.zeros(2, 2), torch.zeros(2), identity, loss_of_outputs, scale_factor=0.5)


def test_a_loss_that_cannot_be_used_is_refused() -> None:
    no_function: Any = 3
    with pytest.raises(TypeError, match=r"`loss_fun` must be a function, got int"):
        select_using_loss(torch.zeros(2), torch.zeros(2), identity, no_function)
    with pytest.raises(TypeError, match=r"must take a keyword argument `reduction`\."):
        select_using_loss(torch.zeros(2), torch.zeros(2), identity, lambda outputs, target: outputs)
    with pytest.raises(ValueError, match=r"one loss per example with `reduction='none'`, got shape \(\) for 2"):
        select_using_loss(torch.zeros(2), torch.zeros(2), identity, lambda o, t, reduction: o.mean())


def test_a_loss_without_a_signature_is_tried() -> None:
    """As functions written in C, whose `TypeError` says the rest."""
    with pytest.raises(TypeError, match="reduction"):
        select_using_loss(torch.zeros(2), torch.zeros(2), identity, torch.add)


class Fields(NamedTuple):
    image: torch.Tensor
    label: torch.Tensor


@pytest.mark.parametrize("size", [2, 3, 4])
def test_lists_with_an_entry_for_each_example_lose_the_same_ones(size: int) -> None:
    """As many fields as examples, too: fields are no examples."""
    x, indices = torch.arange(size), torch.tensor([1])
    names = [f"{i}.png" for i in range(size)]
    boxes = [torch.full((i + 3, 4), i) for i in range(size)]
    sizes = (torch.full((size,), 7), x)  # fields, as `default_collate` makes them of tuples
    batch = {"image": x, "path": names, "boxes": boxes, "size": sizes, "name": "train", "both": Fields(x, x + 1)}
    kept = _select_rows(batch, indices, size)

    assert [1] == kept["image"].tolist()
    assert ["1.png"] == kept["path"]
    assert torch.equal(boxes[1], kept["boxes"][0])
    assert 1 == len(kept["boxes"])
    assert [[7], [1]] == [part.tolist() for part in kept["size"]]
    assert "train" == kept["name"]
    assert [[1], [2]] == [part.tolist() for part in kept["both"]]
    assert isinstance(kept["both"], Fields)
    assert [[1], ["1.png"]] == [list(part) for part in _select_rows((x, names), indices, size)]
