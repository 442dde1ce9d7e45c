"""`compute_z_loss` against a loop over positions, and against its gradient in closed form."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.z_loss import compute_z_loss


def draw_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_z_loss(rows: torch.Tensor, counts: list[bool], coefficient: float) -> float:
    """One position after the other; the rows hold the logits of a position."""
    squares = [
        math.log(sum(math.exp(x) for x in row.tolist())) ** 2 for row, count in zip(rows, counts, strict=True) if count
    ]
    return coefficient * sum(squares) / max(len(squares), 1)


def test_the_function_is_registered() -> None:
    assert compute_z_loss is cf.compute_z_loss


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(-1, 3).map(lambda label: -100 if label < 0 else label), min_size=1, max_size=8),
    coefficient=st.floats(0, 10),
    seed=st.integers(0, 2**31),
)
def test_it_is_the_mean_square_of_log_z_over_labeled_positions(
    labels: list[int], coefficient: float, seed: int
) -> None:
    logits = draw_logits(len(labels), 4, seed=seed)
    expected = slow_z_loss(logits, [label >= 0 for label in labels], coefficient)

    assert expected == pytest.approx(compute_z_loss(logits, torch.tensor(labels), coefficient).item())


def test_the_gradient_is_that_of_the_closed_form() -> None:
    """2 c log Z softmax(x), divided by the number of positions that count."""
    logits, labels = draw_logits(6, 5).requires_grad_(), torch.tensor([0, 1, -100, 3, 4, -100])
    compute_z_loss(logits, labels, coefficient=0.3).backward()
    counts = (labels >= 0).double()[:, None]
    expected = 2 * 0.3 * logits.logsumexp(1, keepdim=True) * logits.softmax(1) * counts / 4

    torch.testing.assert_close(expected.detach(), logits.grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 4, 5, 6), (5, 4)])
def test_the_classes_are_the_dimension_that_the_labels_lack(shape: tuple[int, ...]) -> None:
    logits = draw_logits(*shape)
    last = torch.zeros(shape[:-1], dtype=torch.int64)
    last.view(-1)[0] = -100
    rows, counts = logits.flatten(0, -2), (last >= 0).flatten().tolist()

    assert slow_z_loss(rows, counts, 1.0) == pytest.approx(compute_z_loss(logits, last, 1.0).item())
    assert slow_z_loss(rows, counts, 1.0) == pytest.approx(compute_z_loss(logits.movedim(-1, 1), last, 1.0).item())


def test_if_the_classes_may_be_in_two_dimensions_the_last_is_taken_unless_requested() -> None:
    logits, labels = draw_logits(2, 4, 4), torch.zeros(2, 4, dtype=torch.int64)

    torch.testing.assert_close(logits.logsumexp(-1).square().mean(), compute_z_loss(logits, labels, 1.0))
    torch.testing.assert_close(logits.logsumexp(1).square().mean(), compute_z_loss(logits, labels, 1.0, dim=1))
    torch.testing.assert_close(logits.logsumexp(-1).square().mean(), compute_z_loss(logits, coefficient=1.0))


def test_masked_positions_do_not_count() -> None:
    logits, mask = draw_logits(4, 5), torch.tensor([1, 0, 1, 1])
    labels = torch.tensor([0, 0, -100, 0])

    assert slow_z_loss(logits, [True, False, True, True], 1.0) == pytest.approx(
        compute_z_loss(logits, mask=mask, coefficient=1.0).item()
    )
    assert slow_z_loss(logits, [True, False, False, True], 1.0) == pytest.approx(
        compute_z_loss(logits, labels, 1.0, mask=mask.bool()).item()
    )
    assert slow_z_loss(logits, [False, True, False, False], 1.0) == pytest.approx(
        compute_z_loss(logits, torch.tensor([7, 0, 7, 7]), 1.0, ignore_index=7).item()
    )


def test_rows_of_zeros_of_dense_labels_do_not_count() -> None:
    logits = draw_logits(3, 2)
    labels = torch.tensor([[0.5, 0.5], [0.0, 0.0], [1.0, 0.0]])

    assert slow_z_loss(logits, [True, False, True], 1.0) == pytest.approx(compute_z_loss(logits, labels, 1.0).item())


def test_without_positions_that_count_it_is_zero_and_so_is_its_gradient() -> None:
    logits = draw_logits(2, 3).requires_grad_()
    loss = compute_z_loss(logits, torch.tensor([-100, -100]))
    loss.backward()

    assert 0 == loss.item()
    assert torch.equal(torch.zeros(2, 3, dtype=torch.float64), logits.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    """The square of 300 is infinite in fp16."""
    logits = torch.full((4, 2), 300.0, dtype=dtype)
    actual = compute_z_loss(logits, coefficient=1.0)

    assert torch.float32 is actual.dtype
    assert (300 + math.log(2)) ** 2 == pytest.approx(actual.item(), rel=1e-6)


def test_microbatches_weighted_by_their_tokens_give_that_of_the_batch() -> None:
    logits, labels = draw_logits(6, 5), torch.tensor([0, -100, 2, -100, -100, 1])
    parts = [compute_z_loss(logits[part], labels[part]) for part in (slice(0, 3), slice(3, 6))]

    torch.testing.assert_close(compute_z_loss(logits, labels), (2 * parts[0] + parts[1]) / 3)


def test_the_logits_are_not_modified() -> None:
    logits = draw_logits(3, 4)
    before = logits.clone()
    compute_z_loss(logits, torch.tensor([0, 1, -100]))

    assert torch.equal(before, logits)


def test_a_negative_coefficient_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`coefficient` must not be negative, got -1"):
        compute_z_loss(torch.zeros(2, 3), coefficient=-1)


@pytest.mark.parametrize("name", ["labels", "mask"])
def test_labels_and_masks_must_have_one_value_per_position(name: str) -> None:
    with pytest.raises(ValueError, match=rf"`{name}` must have one value per position, shape \(2, 3\).*got \(2, 2\)"):
        compute_z_loss(torch.zeros(2, 3, 5), **{name: torch.zeros(2, 2, dtype=torch.int64)})
