"""`apply_cautious_decay` on single weights."""

from __future__ import annotations

import pytest
import torch

from composer.algorithms.cautious_decay import apply_cautious_decay


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_each_element_is_decayed_if_the_step_moved_it_towards_zero(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    before = torch.randn(6, 5).to(dtype)
    weight = before - 0.5 * torch.randn(6, 5).to(dtype)
    expected = [
        [new * (1 - 0.1 * 2.0) if (old - new) * new > 0 else new for old, new in zip(olds, news, strict=True)]
        for olds, news in zip(before.tolist(), weight.tolist(), strict=True)
    ]

    apply_cautious_decay([weight], [before], 0.1, 2.0)
    torch.testing.assert_close(weight, torch.tensor(expected, dtype=dtype))
    assert dtype == weight.dtype


def test_small_weights_and_updates_are_decayed_in_half_precision() -> None:
    before = torch.tensor([4e-5], dtype=torch.float16)
    weight = torch.tensor([2e-5], dtype=torch.float16)  # the product with the update, 4e-10, would be 0
    apply_cautious_decay([weight], [before], 1.0, 0.5)

    assert pytest.approx(1e-5, rel=0.02) == weight.item()


def test_what_did_not_move_stays_and_nan_is_not_hidden() -> None:
    weight = torch.tensor([1.0, -0.0, float("nan")])
    apply_cautious_decay([weight], [torch.tensor([1.0, -0.0, 1.0])], 0.5, 1.0)

    assert [1.0, 0.0] == weight[:2].tolist()
    assert weight[2].isnan()


def test_each_weight_has_its_learning_rate() -> None:
    weights = [torch.ones(2), torch.ones(2), torch.ones(2)]
    before = [2 * torch.ones(2) for _ in weights]
    apply_cautious_decay(weights[:2], before[:2], [0.1, 0.2], 1.0)
    apply_cautious_decay(weights[2:], before[2:], torch.tensor(0.3), 1.0)

    assert [0.9, 0.8, 0.7] == [pytest.approx(weight[0].item()) for weight in weights]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`weight_decay` must not be negative"):
        apply_cautious_decay([], [], 0.1, -1.0)
    with pytest.raises(ValueError, match="must have the same lengths, got 1, 0 and 1"):
        apply_cautious_decay([torch.ones(1)], [], 0.1, 1.0)
