from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.metrics import CrossEntropy, Dice, LossMetric, MIoU


def as_logits(predictions, num_classes):
    """Class scores with these largest classes, shape (N, C, ...)."""
    return torch.nn.functional.one_hot(torch.as_tensor(predictions), num_classes).movedim(-1, 1).float()


@st.composite
def segmentations(draw, smallest):
    num_classes = draw(st.integers(1, 5))
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    size = math.prod(shape)
    predictions = draw(st.lists(st.integers(0, num_classes - 1), min_size=size, max_size=size))
    targets = draw(st.lists(st.integers(smallest, num_classes - 1), min_size=size, max_size=size))
    return num_classes, torch.tensor(predictions).view(shape), torch.tensor(targets).view(shape)


def close(expected, actual):
    return (math.isnan(expected) and math.isnan(actual)) or math.isclose(expected, actual, abs_tol=1e-9)


@settings(deadline=None)
@given(segmentations(smallest=-1))
def test_miou_equals_counting_pixels(reference, example):
    num_classes, predictions, targets = example
    metric = MIoU(num_classes)
    batch = as_logits(predictions, num_classes), targets
    metric.update(*batch)

    assert close(reference["miou"]([batch], num_classes), metric.compute().item())


def test_miou_is_a_percentage_in_float64():
    metric = MIoU(2)
    metric.update(as_logits([[0, 1]], 2), torch.tensor([[0, 1]]))

    assert torch.equal(torch.tensor(100.0, dtype=torch.float64), metric.compute())


def test_miou_leaves_out_classes_that_do_not_occur():
    metric = MIoU(5)
    metric.update(as_logits([[3, 3]], 5), torch.tensor([[3, 4]]))

    assert 25.0 == metric.compute().item()  # class 3: 1/2, class 4: 0


def test_miou_without_any_pixel_is_nan():
    metric = MIoU(2)
    metric.update(as_logits([[0, 1]], 2), torch.tensor([[-1, -1]]))

    assert metric.compute().isnan()


def test_miou_ignores_another_index_in_an_unsigned_mask():
    metric = MIoU(2, ignore_index=255)
    metric.update(as_logits([[0, 1, 1]], 2), torch.tensor([[0, 1, 255]], dtype=torch.uint8))

    assert 100.0 == metric.compute().item()


def test_miou_does_not_take_255_for_the_ignored_minus_one():
    """In uint8 arithmetic 255 and -1 are the same number."""
    metric = MIoU(2)
    metric.update(as_logits([[0, 1, 1]], 2), torch.tensor([[0, 1, 255]], dtype=torch.uint8))

    assert 75.0 == metric.compute().item()


def test_miou_counts_a_target_out_of_range_against_the_predicted_class():
    metric = MIoU(2)
    metric.update(as_logits([[0, 0, 1]], 2), torch.tensor([[0, 7, 1]]))

    assert 75.0 == metric.compute().item()


@settings(deadline=None)
@given(segmentations(smallest=0))
def test_dice_equals_counting_pixels(reference, example):
    num_classes, predictions, targets = example
    channels = max(num_classes, 2)
    batch = as_logits(predictions, channels), targets
    metric = Dice(channels)
    metric.update(*batch)

    assert close(reference["dice"]([batch], channels), metric.compute().item())


def test_dice_counts_the_background_or_not():
    batch = as_logits([[0, 1, 2, 2]], 3), torch.tensor([[0, 1, 1, 2]])
    with_background, without = Dice(3), Dice(2)
    with_background.update(*batch)
    without.update(*batch)

    assert 66.67 == with_background.compute().item() == without.compute().item()


def test_dice_does_not_depend_on_the_background():
    perfect = torch.tensor([[1, 2, 0, 0]])
    metric = Dice(3)
    metric.update(as_logits([[1, 2, 0, 0]], 3), perfect)

    assert 100.0 == metric.compute().item()


def test_dice_without_any_foreground_is_nan():
    metric = Dice(2)
    metric.update(as_logits([[0, 0]], 2), torch.tensor([[0, 0]]))

    assert metric.compute().isnan()


@pytest.mark.parametrize("metric", [MIoU(3), Dice(3)], ids=["MIoU", "Dice"])
@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        ((2, 3, 4), (2, 1), r"class indices of shape \(2, 4\) for scores of shape \(2, 3, 4\), got \(2, 1\)"),
        ((2, 3, 4), (2, 3, 4), r"class indices of shape \(2, 4\)"),
        ((2, 6, 4), (2, 4), r"\(2, 6, 4\)"),
        ((3,), (3,), r"must have shape \(N, C, \.\.\.\), got \(3,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_an_error(metric, logits, targets, message):
    with pytest.raises(ValueError, match=message):
        metric.update(torch.zeros(logits), torch.zeros(targets, dtype=torch.int64))


def test_miou_takes_scores_of_fewer_classes_but_not_of_more() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 5, generator=generator)
    targets = torch.randint(0, 4, (2, 5), generator=generator)
    fewer, padded = MIoU(4), MIoU(4)
    fewer.update(scores, targets)
    padded.update(torch.cat([scores, torch.full((2, 1, 5), -100.0)], dim=1), targets)

    torch.testing.assert_close(fewer.compute(), padded.compute())
    with pytest.raises(ValueError, match=r"at most 2 classes, got \(2, 3, 5\)"):
        MIoU(2).update(scores, targets)
    with pytest.raises(ValueError, match=r"\(2, 3, 5\)"):
        Dice(4).update(scores, targets)


def test_the_foreground_needs_a_channel():
    with pytest.raises(ValueError, match=r"at least 2 classes, got \(2, 1, 4\)"):
        Dice(1).update(torch.zeros(2, 1, 4), torch.zeros(2, 4, dtype=torch.int64))


def test_cross_entropy_takes_probabilities():
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    indices = torch.tensor([0, 1, 2, 3, 4, 0])
    of_indices, of_probabilities = CrossEntropy(), CrossEntropy()
    of_indices.update(logits, indices)
    of_probabilities.update(logits, torch.nn.functional.one_hot(indices, 5).float())

    torch.testing.assert_close(of_indices.compute(), of_probabilities.compute())


def test_cross_entropy_of_probabilities_reads_nothing_from_the_device():
    metric = CrossEntropy().to("meta")
    metric.update(torch.zeros(6, 5, device="meta"), torch.zeros(6, 5, device="meta"))

    assert "meta" == metric.compute().device.type


def test_cross_entropy_ignores_another_index():
    logits = torch.tensor([[0.0, 0.0], [9.0, 0.0]])
    metric = CrossEntropy(ignore_index=1)
    metric.update(logits, torch.tensor([0, 1]))

    assert pytest.approx(math.log(2)) == metric.compute().item()


def test_cross_entropy_uses_the_states_of_checkpoints():
    metric = CrossEntropy()
    metric.persistent(True)
    metric.update(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    states = {name: state.item() for name, state in metric.state_dict().items()}

    assert {"sum_loss": pytest.approx(math.log(2)), "total_batches": 1} == states


def test_a_loss_metric_takes_whatever_its_function_takes():
    metric = LossMetric(lambda outputs, targets: outputs["score"] - targets)
    metric.update({"score": torch.tensor([3.0])}, 1.0)

    assert 2.0 == metric.compute().item()


def test_a_loss_function_may_return_a_number():
    metric = LossMetric(lambda outputs, targets: 0.5)
    metric.update(None, None)

    assert 0.5 == metric.compute().item()


def test_a_loss_function_must_be_callable():
    with pytest.raises(TypeError, match="`loss_function` must be callable, got 'mse'"):
        LossMetric("mse")


def test_a_loss_function_must_reduce():
    metric = LossMetric(torch.nn.MSELoss(reduction="none"))

    with pytest.raises(ValueError, match=r"one element, got shape \(3,\)\. Use the reduction 'mean'"):
        metric.update(torch.zeros(3), torch.zeros(3))


@pytest.mark.parametrize("ignored", [255, -1, -100])
@pytest.mark.parametrize("make", [MIoU, Dice])
def test_pixels_that_the_loss_ignores_do_not_count(make, ignored):
    """A negative target never counts; another one is given as `ignore_index`."""
    metric, clean = (make(3, ignore_index=ignored) if ignored == 255 else make(3) for _ in range(2))
    metric.update(as_logits([[0, 1, 2, 2, 1]], 3), torch.tensor([[0, 1, 1, ignored, ignored]]))
    clean.update(as_logits([[0, 1, 2]], 3), torch.tensor([[0, 1, 1]]))

    assert clean.compute() == metric.compute()
