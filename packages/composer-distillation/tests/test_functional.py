"""`compute_distillation_loss` against the formula of the paper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.distillation import compute_distillation_loss


def logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_lazy_name_is_the_function() -> None:
    assert cf.compute_distillation_loss is compute_distillation_loss


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(2, 6), st.floats(0.5, 10))
def test_the_gradient_is_that_of_the_paper(batch: int, classes: int, temperature: float) -> None:
    student, teacher = logits(batch, classes).requires_grad_(), logits(batch, classes, seed=1).requires_grad_()
    compute_distillation_loss(student, teacher, temperature).backward()

    # Equation 2: (q - p) / T per position, times T^2, in the mean over positions.
    q, p = (each.detach().div(temperature).softmax(-1) for each in (student, teacher))
    torch.testing.assert_close(student.grad, temperature * (q - p) / batch)
    assert teacher.grad is None


def test_the_value_is_the_divergence() -> None:
    student, teacher = logits(3, 4), logits(3, 4, seed=1)
    p, q = (teacher / 3).softmax(-1), (student / 3).softmax(-1)

    torch.testing.assert_close(compute_distillation_loss(student, teacher, 3.0), 9 * (p * (p / q).log()).sum(-1).mean())


def test_the_mean_is_over_the_positions_that_count() -> None:
    student, teacher = logits(2, 5, 4), logits(2, 5, 4, seed=1)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    chosen = mask.bool()

    expected = compute_distillation_loss(student[chosen], teacher[chosen])
    torch.testing.assert_close(compute_distillation_loss(student, teacher, mask=mask), expected)
    assert 0 == compute_distillation_loss(student, teacher, mask=mask * 0)


def test_classes_may_be_in_another_dimension() -> None:
    student, teacher = logits(2, 5, 4), logits(2, 5, 4, seed=1)

    expected = compute_distillation_loss(student, teacher)
    torch.testing.assert_close(compute_distillation_loss(student.movedim(2, 1), teacher.movedim(2, 1), dim=1), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_it_is_computed_in_32_bits(dtype: torch.dtype) -> None:
    student, teacher = (logits(2, 4, seed=seed).to(dtype) * 100 for seed in (0, 1))

    assert torch.float32 is compute_distillation_loss(student, teacher).dtype
    torch.testing.assert_close(
        compute_distillation_loss(student, teacher), compute_distillation_loss(student.float(), teacher.float())
    )


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([(2, 3), (2, 4)], {}, r"must have the same shape, got \(2, 3\) and \(2, 4\)"),
        ([(2, 3), (2, 3)], {"temperature": 0.0}, "`temperature` must be positive, got 0.0"),
        ([(2, 3), (2, 3)], {"mask": torch.ones(3)}, r"`mask` must have one value per position, shape \(2,\)"),
    ],
)
def test_what_does_not_fit_is_refused(shapes: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_distillation_loss(*(logits(*shape) for shape in shapes), **options)
