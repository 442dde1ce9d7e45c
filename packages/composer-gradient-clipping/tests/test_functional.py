"""`apply_gradient_clipping` against loops over units, and torch's own functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer import functional as cf
from composer.algorithms.gradient_clipping import apply_agc, apply_gradient_clipping, gradient_clipping
from composer.algorithms.gradient_clipping.gradient_clipping import _apply_agc, _get_clipped_gradient_coeff
from composer.testing import run_on_ranks


def parameter(weight: Any, grad: Any, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.as_tensor(weight, dtype=dtype))
    made.grad = torch.as_tensor(grad, dtype=dtype)
    return made


def grad_of(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    return weight.grad


def slow_adaptive(weight: torch.Tensor, grad: torch.Tensor, threshold: float, eps: float) -> torch.Tensor:
    """Unit by unit, in float64."""
    if weight.dim() > 1:
        return torch.stack([slow_adaptive_unit(w, g, threshold, eps) for w, g in zip(weight, grad, strict=True)])
    return slow_adaptive_unit(weight, grad, threshold, eps)


def slow_adaptive_unit(weight: torch.Tensor, grad: torch.Tensor, threshold: float, eps: float) -> torch.Tensor:
    allowed = threshold * max(weight.double().square().sum().sqrt().item(), eps)
    norm = grad.double().square().sum().sqrt().item()
    return grad * (allowed / norm if norm > allowed else 1.0)


def test_the_functions_are_registered() -> None:
    assert cf.apply_gradient_clipping is apply_gradient_clipping
    assert cf.apply_agc is apply_agc


SHAPES = [(), (1,), (5,), (4, 3), (2, 3, 4), (4, 2, 3, 3), (2, 2, 2, 2, 2)]


@pytest.mark.parametrize("eps", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("threshold", [0.01, 0.5, 10.0])
def test_each_unit_is_limited_by_its_weights(threshold: float, eps: float) -> None:
    torch.manual_seed(0)
    weights = [parameter(torch.randn(s), 3 * torch.randn(s), torch.float64) for s in SHAPES]
    expected = [slow_adaptive(w.detach(), grad_of(w).clone(), threshold, eps) for w in weights]
    apply_gradient_clipping(weights, "adaptive", threshold, eps=eps)

    for weight, limited in zip(weights, expected, strict=True):
        torch.testing.assert_close(limited, weight.grad)


@pytest.mark.parametrize(
    ("weight", "grad", "expected"),
    [
        ([3.0, 4.0], [7.0, 24.0], [0.7, 2.4]),
        ([3.0, 4.0], [0.3, 0.4], [0.3, 0.4]),
        ([0.0, 0.0], [1.0, 2.0], [0.0, 0.0]),
        ([3.0, 4.0], [0.0, 0.0], [0.0, 0.0]),
        ([0.0, 0.0], [0.0, 0.0], [0.0, 0.0]),
        ([[3.0, 4.0], [6.0, 8.0]], [[7.0, 24.0], [0.3, 0.4]], [[0.7, 2.4], [0.3, 0.4]]),
        ([[[3.0], [4.0]]], [[[7.0], [24.0]]], [[[0.7], [2.4]]]),
        ([[[[3.0, 4.0]]], [[[0.0, 0.0]]]], [[[[7.0, 24.0]]], [[[5.0, 6.0]]]], [[[[0.7, 2.4]]], [[[0.0, 0.0]]]]),
    ],
)
def test_worked_examples_are_exact(weight: Any, grad: Any, expected: Any) -> None:
    one = parameter(weight, grad)
    _apply_agc([one], 0.5, eps=0)

    assert torch.equal(torch.tensor(expected), grad_of(one))
    other = parameter(weight, grad)
    factor = _get_clipped_gradient_coeff(other, grad_of(other), 0.5, eps=0)
    assert torch.equal(torch.tensor(expected), grad_of(other) * factor)


def test_with_eps_zero_weights_train() -> None:
    weight = parameter([0.0, 0.0], [3.0, 4.0])
    apply_gradient_clipping([weight], "adaptive", 0.5)

    torch.testing.assert_close(torch.tensor([0.0003, 0.0004]), weight.grad)


@given(
    rows=st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=4),
    scale=st.floats(-1e3, 1e3, width=32),
    threshold=st.floats(1e-6, 2),
    eps=st.sampled_from([0.0, 1e-3]),
)
def test_no_unit_exceeds_its_limit_and_none_grows(
    rows: Sequence[float], scale: float, threshold: float, eps: float
) -> None:
    weight = parameter([[row, 1.0] for row in rows], [[scale * row, scale] for row in rows], torch.float64)
    before = grad_of(weight).clone()
    apply_gradient_clipping(weight, "adaptive", threshold, eps=eps)
    limits = threshold * weight.detach().norm(dim=1).clamp(min=eps)

    assert (grad_of(weight).norm(dim=1) <= limits * (1 + 1e-12)).all()
    assert (grad_of(weight).abs() <= before.abs()).all()
    assert (grad_of(weight) * before >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_narrow_gradients_do_not_overflow(dtype: torch.dtype) -> None:
    """The norm of these is 1.2e5, beyond float16."""
    weight = parameter(torch.ones(4), torch.full((4,), 6e4), dtype)
    apply_gradient_clipping([weight], "adaptive", 1.0)

    torch.testing.assert_close(torch.ones(4, dtype=dtype), weight.grad)


@pytest.mark.parametrize(
    ("kind", "function"), [("norm", torch.nn.utils.clip_grad_norm_), ("value", torch.nn.utils.clip_grad_value_)]
)
def test_norm_and_value_equal_torch(kind: str, function: Any) -> None:
    actual, reference = ([parameter(torch.ones(s), torch.full(s, 2.0)) for s in SHAPES] for _ in range(2))
    apply_gradient_clipping(actual, kind, 0.5)
    function(reference, 0.5)

    for one, other in zip(actual, reference, strict=True):
        assert torch.equal(grad_of(other), grad_of(one))


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_parameters_without_a_gradient_are_skipped(kind: str) -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    apply_gradient_clipping(model, kind, 1e-12)
    empty = torch.nn.ModuleList([torch.nn.ReLU(), torch.nn.Linear(2, 2)])
    apply_gradient_clipping(empty, kind, 1.0)

    assert (model.weight.grad <= 1e-11).all()
    assert model.bias.grad is None


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_without_any_gradient_nothing_happens(kind: str) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1))]
    for some in (parameters, iter(parameters), parameters[0], []):
        apply_gradient_clipping(some, kind, 1.0)

    assert parameters[0].grad is None


@pytest.mark.parametrize(
    ("kind", "where", "function", "keyword"),
    [
        ("norm", torch.nn.utils, "clip_grad_norm_", "max_norm"),
        ("value", torch.nn.utils, "clip_grad_value_", "clip_value"),
        ("adaptive", gradient_clipping, "_apply_agc", "clipping_threshold"),
    ],
)
def test_the_function_behind_a_kind_can_be_replaced(
    monkeypatch: pytest.MonkeyPatch, kind: str, where: Any, function: str, keyword: str
) -> None:
    """It gets what `model.parameters()` returns, also of a model without gradients."""
    replacement, model = Mock(), Mock()
    monkeypatch.setattr(where, function, replacement)
    apply_gradient_clipping(model, kind, 0.1, False)
    apply_gradient_clipping(torch.nn.Linear(2, 2), kind, 0.1, False)

    assert 2 == replacement.call_count
    assert call(model.parameters(), **{keyword: 0.1}) == replacement.call_args_list[0]


def test_an_error_of_torch_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = Mock(side_effect=RuntimeError("no memory"))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_value_", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        apply_gradient_clipping(parameter([1.0], [2.0]), "value", 1.0)


@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_the_weights_stay_and_gradients_keep_their_memory(kind: str) -> None:
    weight = parameter(torch.ones(2, 3), torch.ones(2, 3))
    address = grad_of(weight).data_ptr()
    apply_gradient_clipping([weight], kind, 0.1)

    assert torch.equal(torch.ones(2, 3), weight)
    assert address == grad_of(weight).data_ptr()


def test_agc_uses_its_threshold() -> None:
    one, other = parameter([3.0, 4.0], [7.0, 24.0]), parameter([3.0, 4.0], [7.0, 24.0])
    apply_agc([one], 0.5)
    apply_agc([other])

    torch.testing.assert_close(torch.tensor([0.7, 2.4]), one.grad)
    torch.testing.assert_close(torch.tensor([0.014, 0.048]), other.grad)


def test_parts_are_looked_up_where_they_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[torch.Tensor], float]] = []
    model = torch.nn.Linear(1, 1)
    model.weight.grad = torch.ones(1, 1)

    def agc(parameters: Iterable[torch.Tensor], clipping_threshold: float) -> None:
        calls.append(("adaptive", list(parameters), clipping_threshold))

    monkeypatch.setattr(gradient_clipping, "_apply_agc", agc)
    apply_gradient_clipping(model, "adaptive", 0.1, False)

    assert calls == [("adaptive", list(model.parameters()), 0.1)]


class Wrapped(torch.nn.Module):
    """A substitute for `FullyShardedDataParallel`."""

    def __init__(self, root: bool, *inner: torch.nn.Module) -> None:
        super().__init__()
        self.root, self.inner = root, torch.nn.ModuleList(inner)
        self.calls: list[tuple[float, float]] = []

    def check_is_root(self) -> bool:
        return self.root

    def clip_grad_norm_(self, max_norm: float, norm_type: float) -> None:
        self.calls.append((max_norm, norm_type))


def test_wrapped_models_clip_themselves_at_their_root(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.fsdp

    monkeypatch.setattr(torch.distributed.fsdp, "FullyShardedDataParallel", Wrapped)
    inner = Wrapped(False)
    root = Wrapped(True, inner)
    apply_gradient_clipping(root, "norm", 0.1, fsdp_enabled=True)
    apply_gradient_clipping(torch.nn.ModuleList([root]), "value", 0.2, fsdp_enabled=True)

    assert root.calls == [(0.1, 2.0), (0.2, float("inf"))]
    assert inner.calls == []
    with pytest.raises(ValueError, match=r"`clipping_type` must be 'norm' or 'value' .*got 'adaptive'"):
        apply_gradient_clipping(root, "adaptive", 0.1, fsdp_enabled=True)


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`clipping_type` must be 'norm', 'value' or 'adaptive', got 'cubic'"):
        apply_gradient_clipping(torch.nn.Linear(1, 1), "cubic", 0.1, False)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`clipping_threshold` must be positive, got -1"):
        apply_gradient_clipping(torch.nn.Linear(1, 1), "norm", -1)
    with pytest.raises(ValueError, match=r"`eps` must not be negative, got -1"):
        apply_gradient_clipping(torch.nn.Linear(1, 1), "adaptive", 1, eps=-1)


def clipped(sharded: bool) -> list[torch.Tensor]:
    """The gradients of a model after each kind of clipping."""
    found: list[Any] = []
    for kind in ("norm", "value", "adaptive"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
        x = torch.randn(5, 4)
        if sharded:
            from torch.distributed.fsdp import fully_shard

            fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        model(x).square().sum().backward()
        apply_gradient_clipping(model, kind, 0.05)
        found += [weight.grad for weight in model.parameters()]
    return [grad.full_tensor() if sharded else grad for grad in found]


# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
def test_sharded_gradients_are_clipped_as_whole_ones() -> None:
    expected = clipped(sharded=False)
    for actual in run_on_ranks(clipped, 2, True):
        for one, other in zip(expected, actual, strict=True):
            torch.testing.assert_close(one, other)


def test_both_parts_of_complex_gradients_are_limited_by_value() -> None:
    weights = [torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)), torch.nn.Parameter(torch.zeros(2))]
    weights[0].grad, weights[1].grad = torch.tensor([3 - 0.5j, -3j]), torch.tensor([0.5, 3.0])
    apply_gradient_clipping(weights, "value", 1.0)

    assert [1 - 0.5j, -1j] == weights[0].grad.tolist()
    assert [0.5, 1.0] == weights[1].grad.tolist()


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("kind", ["norm", "value", "adaptive"])
def test_sparse_gradients_are_clipped_as_dense_ones_are(kind: str, dims: int) -> None:
    """Rows come twice, as a token does in a batch, and count as their sum."""
    rows = torch.tensor([[1, 4, 1, 1]])
    shape = (6, 3, 2)[:dims]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    slope = torch.sparse_coo_tensor(rows, torch.randn(4, *shape[1:], generator=generator), shape, check_invariants=True)
    sparse, dense = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    sparse.grad, dense.grad = slope, slope.to_dense()
    apply_gradient_clipping([sparse], kind, 0.1)
    apply_gradient_clipping([dense], kind, 0.1)

    assert sparse.grad.is_sparse
    assert not torch.equal(slope.to_dense(), dense.grad)
    torch.testing.assert_close(sparse.grad.to_dense(), dense.grad)


def test_adaptive_clipping_of_a_gradient_that_is_sparse_within_rows_is_refused() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 3))
    weight.grad = torch.eye(3).to_sparse()
    with pytest.raises(NotImplementedError, match=r"of shape \(3, 3\) is sparse within rows"):
        apply_gradient_clipping([weight], "adaptive", 0.1)
