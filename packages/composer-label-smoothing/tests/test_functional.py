"""`smooth_labels` against a loop over positions, and its loss against torch's own label smoothing."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.label_smoothing import smooth_labels
from composer.loss import soft_cross_entropy

SHAPES = [(6, 5), (3, 5, 4), (2, 5, 3, 4), (4, 2)]
SMOOTHINGS = [0.0, 0.1, 0.5, 0.9, 1.0]


def slow_smooth(shape: tuple[int, ...], labels: torch.Tensor, smoothing: float) -> torch.Tensor:
    """One value at a time; a negative label is no target."""
    values = torch.zeros(shape)
    for position in itertools.product(*(range(n) for n in labels.shape)):
        for c in range(shape[1]):
            label = int(labels[position])
            target = 1.0 if label == c else 0.0
            if label >= 0:
                values[(position[0], c, *position[1:])] = (1 - smoothing) * target + smoothing / shape[1]
    return values


def draw_labels(shape: tuple[int, ...], lowest: int = 0) -> torch.Tensor:
    return torch.randint(lowest, shape[1], shape[:1] + shape[2:], generator=torch.Generator().manual_seed(3))


def one_hot(shape: tuple[int, ...], labels: torch.Tensor) -> torch.Tensor:
    return slow_smooth(shape, labels, 0.0)


def test_the_function_is_registered() -> None:
    assert smooth_labels is cf.smooth_labels


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_indices_and_dense_targets_follow_the_formula(shape: tuple[int, ...], smoothing: float) -> None:
    labels = draw_labels(shape)
    expected = slow_smooth(shape, labels, smoothing)

    torch.testing.assert_close(expected, smooth_labels(torch.randn(shape), labels, smoothing))
    torch.testing.assert_close(expected, smooth_labels(torch.randn(shape), one_hot(shape, labels), smoothing))


@pytest.mark.parametrize("shape", SHAPES)
def test_ignored_positions_stay_without_a_target(shape: tuple[int, ...]) -> None:
    labels = draw_labels(shape, lowest=-2)
    labels.flatten()[0] = -100
    expected = slow_smooth(shape, labels, 0.2)

    torch.testing.assert_close(expected, smooth_labels(torch.randn(shape), labels, 0.2))
    torch.testing.assert_close(expected, smooth_labels(torch.randn(shape), one_hot(shape, labels), 0.2))


def test_an_empty_batch_stays_empty() -> None:
    assert (0, 5) == smooth_labels(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64)).shape


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_all_integer_dtypes_are_indices(dtype: torch.dtype) -> None:
    logits, labels = torch.randn(6, 5), draw_labels((6, 5))

    assert torch.equal(smooth_labels(logits, labels), smooth_labels(logits, labels.to(dtype)))


@pytest.mark.parametrize(
    ("logits", "target", "expected"),
    [
        (torch.float32, torch.int64, torch.float32),
        (torch.bfloat16, torch.int64, torch.float32),
        (torch.float64, torch.int64, torch.float64),
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float32),
    ],
)
def test_the_result_has_at_least_the_precision_of_float32(
    logits: torch.dtype, target: torch.dtype, expected: torch.dtype
) -> None:
    values = draw_labels((6, 5)) if target is torch.int64 else torch.rand(6, 5, dtype=target)

    assert expected is smooth_labels(torch.randn(6, 5, dtype=logits), values).dtype


@pytest.mark.parametrize("target", [[[1, 1, 0, 1], [0, 0, 0, 0]], [[1], [0]], [1, 0]])
def test_each_label_of_a_multi_label_problem_is_smoothed_by_itself(target: list[Any]) -> None:
    """A label is a problem of two classes: its target goes towards one half, whatever the other labels are."""
    labels = torch.tensor(target)
    actual = smooth_labels(torch.zeros(labels.shape), labels, 0.2, multi_label=True)

    torch.testing.assert_close(torch.where(labels == 1, 0.9, 0.1), actual)


def test_multi_label_targets_have_the_shape_of_the_logits() -> None:
    with pytest.raises(
        ValueError, match=r"`target` must have the shape of `logits`, \(2, 3\), with `multi_label=True`"
    ):
        smooth_labels(torch.zeros(2, 3), torch.tensor([0, 1]), multi_label=True)


def test_the_arguments_are_not_modified() -> None:
    for target in (draw_labels((6, 5), lowest=-1), torch.rand(6, 5)):
        before = target.clone()
        smooth_labels(torch.randn(6, 5), target)

        assert torch.equal(before, target)


@settings(deadline=None)
@given(
    labels=st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 3)), min_size=1, max_size=6),
    weight=st.floats(0, 1),
    smoothing=st.floats(0, 1),
)
def test_smoothing_and_mixing_commute(labels: list[tuple[int, int]], weight: float, smoothing: float) -> None:
    first, second = torch.tensor(labels).unbind(1)
    logits = torch.zeros(len(labels), 4)
    mixed = torch.lerp(one_hot((len(labels), 4), first), one_hot((len(labels), 4), second), weight)
    expected = torch.lerp(smooth_labels(logits, first, smoothing), smooth_labels(logits, second, smoothing), weight)

    torch.testing.assert_close(expected, smooth_labels(logits, mixed, smoothing))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_loss_and_gradient_are_those_of_torch(shape: tuple[int, ...], smoothing: float) -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(shape, dtype=torch.float64, requires_grad=True), draw_labels(shape)
    expected = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    actual = soft_cross_entropy(logits, smooth_labels(logits, labels, smoothing))

    torch.testing.assert_close(expected, actual)
    torch.testing.assert_close(torch.autograd.grad(expected, logits), torch.autograd.grad(actual, logits))


def test_ignored_labels_do_not_count_in_the_loss() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(4, 5), torch.tensor([2, -100, 0, -100])
    smoothed = smooth_labels(logits, labels, 0.3)
    with pytest.warns(UserWarning, match=r"less than 1 total probability"):
        actual = soft_cross_entropy(logits, smoothed)

    torch.testing.assert_close(F.cross_entropy(logits, labels, label_smoothing=0.3), actual)


def test_the_path_without_host_reads_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerators and compiled graphs take it; here both run on the CPU."""
    cases = [(shape, draw_labels(shape, lowest=lowest)) for shape in SHAPES for lowest in (0, -2)]
    expected = [smooth_labels(torch.zeros(shape), labels) for shape, labels in cases]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    for (shape, labels), smoothed in zip(cases, expected, strict=True):
        torch.testing.assert_close(smoothed, smooth_labels(torch.zeros(shape), labels))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("lowest", [0, -2])
def test_nothing_is_read_from_the_gpu(lowest: int) -> None:
    logits, labels = torch.randn(6, 5), draw_labels((6, 5), lowest)
    on_device, labels_on_device = logits.cuda(), labels.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = smooth_labels(on_device, labels_on_device)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    torch.testing.assert_close(smooth_labels(logits, labels), actual.cpu())


@pytest.mark.parametrize("smoothing", [-0.1, 1.5])
def test_a_smoothing_outside_its_range_is_refused(smoothing: float) -> None:
    with pytest.raises(ValueError, match=rf"`smoothing` must be in \[0, 1\], got {smoothing}"):
        smooth_labels(torch.zeros(2, 3), torch.tensor([0, 1]), smoothing)


def test_labels_that_are_not_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`labels` must contain class indices, got dtype torch.float32"):
        smooth_labels(torch.zeros(2, 3), torch.tensor([0.0, 1.0]))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"`targets` must have the shape of `input`"):
        smooth_labels(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(RuntimeError, match=r"Dimension 1 of the logits must be the classes"):
        smooth_labels(torch.zeros(2, 7, 5), torch.zeros(2, 7, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(3,), (3, 1), (3, 1, 4, 4)])
def test_one_output_has_no_classes_to_smooth_over(shape: tuple[int, ...]) -> None:
    """The formula would leave binary targets as they are."""
    with pytest.raises(ValueError, match=r"at least two classes in dimension 1, got shape .* use `multi_label=True`"):
        smooth_labels(torch.zeros(shape), torch.ones(shape))


def test_an_index_beyond_the_classes_is_refused() -> None:
    logits, target = torch.zeros(2, 4, 3), torch.tensor([[0, 3, 255], [1, 2, 255]])
    with pytest.raises(ValueError, match=r"below 4, the number of classes, got 255\. .* say so where the loss is made"):
        smooth_labels(logits, target)


@pytest.mark.filterwarnings("ignore:Some targets have less than 1 total probability")  # the ignored positions
@pytest.mark.parametrize("shape", [(6,), (6, 5, 4)])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_the_loss_of_smoothed_targets_is_that_of_torch(shape: tuple[int, ...], is_weighted: bool) -> None:
    """Targets are classes or segmentation maps with ignored positions; `weight` is summed, as torch divides by it."""
    torch.manual_seed(0)
    logits, target = torch.randn(shape[0], 3, *shape[1:]), torch.randint(0, 3, shape)
    target[0] = -100
    weight = torch.tensor([0.5, 1.0, 2.0]) if is_weighted else None
    reduction = "sum" if is_weighted else "mean"
    expected = F.cross_entropy(logits, target, weight, label_smoothing=0.2, reduction=reduction)
    actual = soft_cross_entropy(logits, smooth_labels(logits, target, 0.2), weight, reduction=reduction)

    torch.testing.assert_close(expected, actual)
