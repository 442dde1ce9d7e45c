"""The losses against torch's operators and against loops over pixels."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.loss import binary_cross_entropy_with_logits, loss_registry, soft_cross_entropy
from composer.loss.utils import (
    _one_hot,
    check_for_index_targets,
    dense_targets,
    ensure_targets_one_hot,
    ignored_label,
    infer_target_type,
)
from composer.models import ModuleWithLoss

INDEX_DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REDUCTIONS = ["none", "mean", "sum"]
SHAPES = [(6, 5), (3, 5, 4), (2, 5, 3, 4)]


def probabilities(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.softmax(torch.randn(shape), dim=1)


@pytest.fixture
def no_host_reads() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("loss", "label"),
    [
        (F.cross_entropy, -100),
        (soft_cross_entropy, -100),
        (functools.partial(F.cross_entropy, ignore_index=255), 255),
        (functools.partial(F.cross_entropy, reduction="sum"), -100),
        (torch.nn.CrossEntropyLoss(ignore_index=255), 255),
        (torch.nn.NLLLoss(), -100),
        (ModuleWithLoss(torch.nn.Linear(2, 3), torch.nn.CrossEntropyLoss(ignore_index=-1)), -1),
        (F.mse_loss, None),
        (torch.nn.MSELoss(), None),
        (lambda outputs, targets: F.cross_entropy(outputs, targets.long()), None),
    ],
)
def test_the_ignored_label_is_found_where_a_loss_says_it(loss: object, label: int | None) -> None:
    assert label == ignored_label(loss)


class TestTargetKinds:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_equal_shapes_are_one_hot_and_one_dimension_less_is_indices(self, shape: tuple[int, ...]) -> None:
        assert "one_hot" == infer_target_type(torch.zeros(shape), torch.zeros(shape))
        assert "indices" == infer_target_type(torch.zeros(shape), torch.zeros(shape[:1] + shape[2:]))

    @pytest.mark.parametrize("target", [(6, 4), (6, 5, 1), ()])
    def test_other_shapes_are_refused(self, target: tuple[int, ...]) -> None:
        with pytest.raises(RuntimeError, match=r"`targets` must have the shape of `input`, \(6, 5\)"):
            infer_target_type(torch.zeros(6, 5), torch.zeros(target))

    def test_indices_have_an_integer_dtype(self) -> None:
        others = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool]

        assert all(check_for_index_targets(torch.zeros(2, dtype=dtype)) for dtype in INDEX_DTYPES)
        assert not any(check_for_index_targets(torch.zeros(2, dtype=dtype)) for dtype in others)


class TestOneHot:
    @pytest.mark.parametrize("dtype", INDEX_DTYPES)
    @pytest.mark.parametrize("dim", [-1, 0, 1, 2, -2])
    def test_it_is_torch_one_hot_along_any_dimension(self, dtype: torch.dtype, dim: int) -> None:
        labels = torch.randint(5, (3, 4))

        actual = _one_hot(labels.to(dtype), num_classes=6, dim=dim)

        assert torch.equal(F.one_hot(labels, 6).movedim(-1, dim), actual)

    def test_the_number_of_classes_is_inferred(self) -> None:
        labels = torch.tensor([3, 0, 2])

        assert torch.equal(F.one_hot(labels), _one_hot(labels))

    def test_a_negative_label_gives_zeros_with_a_warning(self) -> None:
        with pytest.warns(
            UserWarning, match="Negative label indices are being ignored in conversion to one-hot labels"
        ):
            actual = ensure_targets_one_hot(torch.zeros(3, 2), torch.tensor([1, -1, 0]))

        assert [[0, 1], [0, 0], [1, 0]] == actual.tolist()

    @pytest.mark.parametrize("ignored", [-100, 255, 1])
    @pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8])
    @pytest.mark.parametrize("compiling", [False, True])
    def test_an_ignored_label_gives_zeros_and_the_others_its_share(
        self, ignored: int, dtype: torch.dtype, compiling: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While compiling, as on an accelerator, no value may be read."""
        labels = torch.tensor([[0, 2], [max(ignored, 1), 0]]).to(dtype)
        marked = labels.long() == ignored
        if dtype is not torch.uint8:
            labels[1, 0] = ignored
            marked[1, 0] = True
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
        actual = dense_targets(labels, 3, smoothing=0.3, ignore_index=ignored, rescale=True)

        expected = (0.7 * F.one_hot(labels.long().clamp(0, 2), 3) + 0.1).masked_fill(marked[..., None], 0)
        torch.testing.assert_close((4 / (~marked).sum() * expected).movedim(-1, 1), actual)

    def test_only_ignored_labels_give_zeros(self) -> None:
        assert 0 == dense_targets(torch.tensor([9, 9]), 3, ignore_index=9, rescale=True).abs().sum()

    def test_no_labels_give_no_rows(self) -> None:
        assert (0, 4) == tuple(_one_hot(torch.zeros(0, dtype=torch.int64), num_classes=4).shape)

    @pytest.mark.parametrize("shape", SHAPES)
    def test_the_result_has_the_shape_of_the_input_and_is_float(self, shape: tuple[int, ...]) -> None:
        labels = torch.randint(5, shape[:1] + shape[2:])

        actual = ensure_targets_one_hot(torch.zeros(shape, dtype=torch.float16), labels)

        assert torch.float32 == actual.dtype
        assert torch.equal(F.one_hot(labels, 5).movedim(-1, 1).float(), actual)

    def test_dense_targets_are_only_cast(self) -> None:
        targets = torch.rand(3, 2, dtype=torch.float64)

        assert torch.equal(targets.float(), ensure_targets_one_hot(torch.zeros(3, 2), targets))

    def test_the_number_of_classes_can_be_larger(self) -> None:
        assert (2, 7) == tuple(ensure_targets_one_hot(torch.zeros(2, 3), torch.tensor([0, 2]), num_classes=7).shape)

    def test_a_label_that_is_too_large_is_refused(self) -> None:
        with pytest.raises(ValueError, match="Class indices must be below 3, the number of classes, got 3"):
            _one_hot(torch.tensor([0, 3]), num_classes=3)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
    def test_labels_that_are_not_integers_are_refused(self, dtype: torch.dtype) -> None:
        with pytest.raises(ValueError, match="`labels` must contain class indices, got dtype"):
            _one_hot(torch.zeros(2, dtype=dtype))


class TestSoftCrossEntropy:
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("weighted", [False, True])
    def test_indices_are_torch_cross_entropy(self, reduction: str, shape: tuple[int, ...], weighted: bool) -> None:
        logits, target = torch.randn(shape), torch.randint(5, shape[:1] + shape[2:])
        target[0] = 1
        weight = torch.rand(5) if weighted else None

        expected = F.cross_entropy(logits, target, weight=weight, ignore_index=1, reduction=reduction)

        assert torch.equal(expected, soft_cross_entropy(logits, target, weight, 1, reduction))

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("weighted", [False, True])
    def test_probabilities_are_torch_cross_entropy(
        self, reduction: str, shape: tuple[int, ...], weighted: bool
    ) -> None:
        logits, target = torch.randn(shape), probabilities(shape)
        weight = torch.rand(5) if weighted else None

        expected = F.cross_entropy(logits, target, weight=weight, reduction=reduction)
        actual = soft_cross_entropy(logits, target, weight, reduction=reduction)

        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("weighted", [False, True])
    def test_probabilities_against_a_loop(self, weighted: bool) -> None:
        logits, target = torch.randn(3, 5, 2), probabilities((3, 5, 2))
        weight = torch.rand(5) if weighted else torch.ones(5)

        expected = torch.zeros(3, 2)
        for n, c, s in itertools.product(range(3), range(5), range(2)):
            log_probability = logits[n, c, s] - logits[n, :, s].exp().sum().log()
            expected[n, s] -= weight[c] * target[n, c, s] * log_probability
        actual = soft_cross_entropy(logits, target, weight, reduction="none")

        torch.testing.assert_close(actual, expected)

    def test_rows_of_zeros_do_not_count(self) -> None:
        logits, target = torch.randn(6, 5), probabilities((6, 5))
        target[[1, 4]] = 0

        with pytest.warns(UserWarning, match="Some targets have less than 1 total probability: their sum is 4 for 6"):
            actual = soft_cross_entropy(logits, target)

        kept = [0, 2, 3, 5]
        torch.testing.assert_close(actual, F.cross_entropy(logits[kept], target[kept]))

    def test_one_hot_integers_are_probabilities(self) -> None:
        logits, target = torch.randn(6, 5), torch.randint(5, (6,))

        actual = soft_cross_entropy(logits, F.one_hot(target, 5))

        torch.testing.assert_close(actual, F.cross_entropy(logits, target))

    @settings(deadline=None)  # a busy machine is no failure
    @given(st.integers(1, 64), st.integers(2, 50), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    def test_rounding_of_the_targets_is_no_missing_mass(self, rows: int, classes: int, dtype: torch.dtype) -> None:
        """Warnings are errors here: mixed and smoothed targets add up to 1 only nearly."""
        target = probabilities((rows, classes)).to(dtype)

        assert torch.isfinite(soft_cross_entropy(torch.randn(rows, classes), target))

    def test_the_mass_of_a_map_in_half_precision_does_not_overflow(self) -> None:
        target = torch.full((1, 2, 300, 300), 0.5, dtype=torch.float16)

        actual = soft_cross_entropy(torch.zeros(1, 2, 300, 300), target)

        torch.testing.assert_close(actual, torch.tensor(math.log(2)))

    def test_gradients_are_those_of_torch(self) -> None:
        logits, target = torch.randn(4, 5, requires_grad=True), probabilities((4, 5))

        (expected,) = torch.autograd.grad(F.cross_entropy(logits, target), logits)
        (actual,) = torch.autograd.grad(soft_cross_entropy(logits, target), logits)

        torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-6)

    def test_without_any_mass_there_is_no_mean(self) -> None:
        with pytest.raises(ValueError, match=r"`target` must have a positive sum for the mean, got 0\.0"):
            soft_cross_entropy(torch.zeros(2, 3), torch.zeros(2, 3))

    @pytest.mark.parametrize("reduction", ["none", "sum"])
    def test_without_any_mass_the_other_reductions_are_zero(self, reduction: str) -> None:
        assert 0 == soft_cross_entropy(torch.zeros(2, 3), torch.zeros(2, 3), reduction=reduction).sum()

    @pytest.mark.parametrize("target", [torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)], ids=["dense", "indices"])
    def test_an_unknown_reduction_is_refused(self, target: torch.Tensor) -> None:
        with pytest.raises(ValueError, match="median"):
            soft_cross_entropy(torch.zeros(2, 3), target, reduction="median")

    def test_an_index_to_ignore_has_no_meaning_for_probabilities(self) -> None:
        logits, target = torch.randn(2, 3), probabilities((2, 3))

        assert torch.equal(soft_cross_entropy(logits, target), soft_cross_entropy(logits, target, ignore_index=1))

    def test_it_compiles_to_one_graph(self) -> None:
        logits, target = torch.randn(4, 5), probabilities((4, 5))

        compiled = torch.compile(soft_cross_entropy, fullgraph=True, backend="eager")

        torch.testing.assert_close(compiled(logits, target), F.cross_entropy(logits, target))


class TestBinaryCrossEntropy:
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("scale", [False, True])
    @pytest.mark.parametrize("indices", [False, True])
    def test_it_is_torch_on_one_hot_targets_over_the_batch_size(
        self, reduction: str, scale: bool, indices: bool
    ) -> None:
        logits, target = torch.randn(4, 5), torch.randint(5, (4,))
        dense = F.one_hot(target, 5).float()
        weight, pos_weight = torch.rand(5), torch.rand(5)

        expected = F.binary_cross_entropy_with_logits(logits, dense, weight, reduction=reduction, pos_weight=pos_weight)
        actual = binary_cross_entropy_with_logits(
            logits, target if indices else dense, weight, reduction, pos_weight, scale_by_batch_size=scale
        )

        torch.testing.assert_close(actual, expected / 4 if scale else expected)

    def test_the_default_is_the_sum_over_classes_per_example(self) -> None:
        actual = binary_cross_entropy_with_logits(torch.zeros(2, 3), torch.tensor([0, 2]))

        torch.testing.assert_close(actual, torch.tensor(3 * math.log(2)))

    def test_an_unknown_reduction_is_refused(self) -> None:
        with pytest.raises(ValueError, match="median"):
            binary_cross_entropy_with_logits(torch.zeros(2, 3), torch.tensor([0, 2]), reduction="median")


def test_the_registry_names_the_functions() -> None:
    assert loss_registry == {
        "binary_cross_entropy_with_logits": binary_cross_entropy_with_logits,
        "soft_cross_entropy": soft_cross_entropy,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("no_host_reads")
class TestCUDA:
    def test_nothing_is_read_from_the_device(self) -> None:
        logits = torch.randn(4, 5, 8, 8, device="cuda")
        dense = torch.softmax(torch.randn(4, 5, 8, 8, device="cuda"), dim=1)
        indices = torch.randint(-1, 5, (4, 8, 8), device="cuda")

        soft_cross_entropy(logits, dense)
        soft_cross_entropy(logits, indices, ignore_index=-1)
        binary_cross_entropy_with_logits(logits, indices)

    def test_rows_of_zeros_do_not_count(self) -> None:
        logits = torch.randn(4, 5, device="cuda")
        dense = torch.softmax(torch.randn(4, 5, device="cuda"), dim=1)
        dense[2].zero_()

        actual = soft_cross_entropy(logits, dense)
        expected = F.cross_entropy(logits, dense, reduction="sum") / dense.sum()

        torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(actual, expected)


class TestTheMeanOfProbabilitiesOnTheCpu:
    @staticmethod
    def draw(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        target = torch.rand(shape, dtype=torch.float64).softmax(1)
        target[0] = 0  # does not count
        return torch.randn(shape, dtype=torch.float64, requires_grad=True), target

    @pytest.mark.filterwarnings("ignore:Some targets have less than 1 total probability")
    @pytest.mark.parametrize("shape", [(5, 3), (2, 3, 4), (2, 3, 2, 2)])
    def test_its_first_and_second_derivatives_are_right(self, shape: tuple[int, ...]) -> None:
        logits, target = self.draw(*shape)
        arguments = (lambda x: soft_cross_entropy(x, target), (logits,))

        assert torch.autograd.gradcheck(*arguments)
        assert torch.autograd.gradgradcheck(*arguments)

    @pytest.mark.filterwarnings("ignore:Some targets have less than 1 total probability")
    def test_it_is_the_formula(self) -> None:
        logits, target = self.draw(6, 4)
        expected = -(target * logits.log_softmax(1)).sum() / target.sum()
        (gradient,) = torch.autograd.grad(3 * soft_cross_entropy(logits, target), logits)

        torch.testing.assert_close(expected, soft_cross_entropy(logits, target))
        torch.testing.assert_close(torch.autograd.grad(3 * expected, logits)[0], gradient)

    def test_functional_transforms_take_it(self) -> None:
        logits, target = torch.randn(3, 4), torch.rand(3, 4).softmax(1)
        expected = (logits.softmax(1) - target) / 3

        actual = torch.func.grad(lambda x: soft_cross_entropy(x, target))(logits)
        torch.testing.assert_close(expected, actual)

    def test_targets_that_are_trained_get_a_gradient(self) -> None:
        logits, target = torch.randn(3, 4), torch.rand(3, 4).softmax(1).requires_grad_()
        soft_cross_entropy(logits, target, reduction="mean").backward()

        assert target.grad is not None
        assert target.grad.any()
