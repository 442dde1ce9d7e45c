"""The Dice loss against a loop over pixels."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from composer.loss import DiceLoss

REDUCTIONS = ["none", "mean", "sum"]


def probabilities(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.softmax(torch.randn(shape), dim=1)


def dice_by_hand(prediction: torch.Tensor, target: torch.Tensor, squared: bool, jaccard: bool) -> float:
    """The loss of one class of one example, pixel by pixel."""
    overlap = prediction_sum = target_sum = 0.0
    for p, t in zip(prediction.flatten().tolist(), target.flatten().tolist(), strict=True):
        overlap += p * t
        prediction_sum += p * p if squared else p
        target_sum += t * t if squared else t
    union = prediction_sum + target_sum
    if jaccard:
        union = 2 * (union - overlap)
    return 1 - (2 * overlap + 1e-5) / (union + 1e-5)


class TestDiceLoss:
    @pytest.mark.parametrize("squared", [False, True])
    @pytest.mark.parametrize("jaccard", [False, True])
    @pytest.mark.parametrize("batch", [False, True])
    def test_it_is_the_formula_pixel_by_pixel(self, squared: bool, jaccard: bool, batch: bool) -> None:
        prediction, target = torch.rand(2, 3, 4, 5), torch.rand(2, 3, 4, 5)

        if batch:
            cells = [dice_by_hand(prediction[:, c], target[:, c], squared, jaccard) for c in range(3)]
        else:
            cells = [
                dice_by_hand(prediction[n, c], target[n, c], squared, jaccard)
                for n, c in itertools.product(range(2), range(3))
            ]
        expected = torch.tensor(cells)

        for reduction in REDUCTIONS:
            loss = DiceLoss(squared_pred=squared, jaccard=jaccard, batch=batch, reduction=reduction)(prediction, target)
            wanted = expected.view_as(loss) if reduction == "none" else getattr(expected, reduction)()
            torch.testing.assert_close(loss, wanted)

    def test_a_perfect_prediction_has_no_loss(self) -> None:
        target = torch.randint(3, (2, 8, 8))
        logits = 100 * F.one_hot(target, 3).movedim(-1, 1).float() - 50

        assert DiceLoss(softmax=True)(logits, target) < 1e-6
        assert DiceLoss(sigmoid=True)(logits, target) < 1e-6
        assert DiceLoss(sigmoid=True)(-logits, target) > 0.5

    def test_sigmoid_and_softmax_are_applied_to_logits(self) -> None:
        logits, target = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))

        torch.testing.assert_close(DiceLoss(sigmoid=True)(logits, target), DiceLoss()(logits.sigmoid(), target))
        torch.testing.assert_close(DiceLoss(softmax=True)(logits, target), DiceLoss()(logits.softmax(1), target))

    def test_pixels_without_a_target_are_taken_out_of_the_prediction(self) -> None:
        prediction, target = torch.rand(1, 3, 10), torch.randint(3, (1, 10))
        target[0, 7:] = -1

        actual = DiceLoss()(prediction, target)

        torch.testing.assert_close(actual, DiceLoss()(prediction[..., :7], target[..., :7]))

    def test_absent_classes_can_be_left_out(self) -> None:
        prediction, target = torch.rand(2, 3, 10), torch.randint(2, (2, 10))  # no pixel of class 2
        target[:, 0], target[:, 1] = 0, 1
        cells = DiceLoss(reduction="none")(prediction, target)[:, :2]

        actual = {
            reduction: DiceLoss(ignore_absent_classes=True, reduction=reduction)(prediction, target)
            for reduction in REDUCTIONS
        }

        torch.testing.assert_close(actual["mean"], cells.mean())
        torch.testing.assert_close(actual["sum"], cells.sum())
        torch.testing.assert_close(actual["none"], cells.flatten())

    def test_a_batch_without_any_class_has_no_loss(self) -> None:
        prediction = torch.rand(1, 2, 4, requires_grad=True)

        loss = DiceLoss(ignore_absent_classes=True)(prediction, torch.zeros(1, 2, 4))
        loss.backward()

        assert 0 == loss
        assert prediction.grad is not None
        assert 0 == prediction.grad.abs().sum()

    def test_half_precision_does_not_overflow(self) -> None:
        prediction = torch.ones(1, 1, 300, 300, dtype=torch.float16)

        assert DiceLoss()(prediction, torch.zeros(1, 300, 300, dtype=torch.int64)) < 1e-6

    def test_an_unknown_reduction_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`reduction` must be one of"):
            DiceLoss(reduction="median")

    def test_sigmoid_and_softmax_exclude_each_other(self) -> None:
        with pytest.raises(ValueError, match="`softmax` must be False if `sigmoid` is True"):
            DiceLoss(sigmoid=True, softmax=True)

    def test_without_spatial_dimensions_the_batch_is_needed(self) -> None:
        with pytest.raises(ValueError, match=r"`input` must have spatial dimensions, got shape \(4, 3\)"):
            DiceLoss()(torch.rand(4, 3), torch.rand(4, 3))

        assert (3,) == tuple(DiceLoss(batch=True, reduction="none")(torch.rand(4, 3), torch.rand(4, 3)).shape)
