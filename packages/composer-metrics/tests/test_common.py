"""Properties of every metric."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torchmetrics import MetricCollection

from composer.metrics import CrossEntropy, Dice, LossMetric, MIoU

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def states_of(metric):
    metric.persistent(True)
    return metric.state_dict()


def value_of(metric, batches):
    for batch in batches:
        metric.update(*batch)
    return metric.compute()


def test_the_value_equals_a_slow_reference(case, draw):
    batches = draw(case, 6, 9, 4)

    assert pytest.approx(case.reference(batches), rel=1e-5) == value_of(case.make(), batches).item()


def test_updates_in_pieces_equal_one_update(pooled, draw):
    (whole,) = draw(pooled, 12)
    pieces = list(zip(*(tensor.split(5) for tensor in whole), strict=True))

    torch.testing.assert_close(value_of(pooled.make(), [whole]), value_of(pooled.make(), pieces))


@pytest.mark.parametrize(
    ("metric", "other"),
    [
        (CrossEntropy(), ("preds", "target")),
        (LossMetric(torch.nn.functional.cross_entropy), ("preds", "target")),
        (Dice(num_classes=3), ("pred", "targets")),
    ],
)
def test_batches_may_be_passed_by_name(metric, other):
    preds, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    expected = value_of(metric, [(preds, targets)])
    for names in (("preds", "targets"), other):
        metric.reset()
        MetricCollection([metric]).update(**dict(zip(names, (preds, targets), strict=True)), unknown=1)

        assert torch.equal(expected, metric.compute())


def test_every_batch_weighs_the_same_in_a_mean_over_batches(draw):
    metric = LossMetric(torch.nn.functional.mse_loss)
    metric.update(torch.zeros(1), torch.full((1,), 2.0))
    metric.update(torch.zeros(9), torch.zeros(9))

    assert metric.compute().item() == 2.0


def test_update_reads_nothing_from_the_device(case, draw):
    """The meta device has no values, so reading one is an error."""
    metric = case.make().to("meta")
    (batch,) = draw(case, 6)
    metric.update(*(tensor.to("meta") for tensor in batch))

    assert "meta" == metric.compute().device.type


@pytest.mark.gpu
@needs_cuda
def test_update_does_not_make_the_host_wait(case, draw):
    metric = case.make().to("cuda")
    batches = [[tensor.to("cuda") for tensor in batch] for batch in draw(case, 6, 6)]
    metric.update(*batches[0])  # loads kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        metric.update(*batches[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert pytest.approx(case.reference(draw(case, 6, 6)), rel=1e-4) == metric.compute().item()


@pytest.mark.gpu
@needs_cuda
def test_the_value_is_available_under_deterministic_algorithms(case, draw):
    batches = draw(case, 6, 6)
    torch.use_deterministic_algorithms(True)
    try:
        value = value_of(case.make().to("cuda"), [[tensor.to("cuda") for tensor in batch] for batch in batches])
    finally:
        torch.use_deterministic_algorithms(False)

    assert pytest.approx(case.reference(batches), rel=1e-4) == value.item()


def test_inputs_are_not_modified(case, draw):
    (batch,) = draw(case, 6)
    before = [tensor.clone() for tensor in batch]
    case.make().update(*batch)

    assert all(torch.equal(old, new) for old, new in zip(before, batch, strict=True))


def test_many_updates_keep_no_graph(case, draw):
    """The Trainer measures training batches on outputs that require gradients, under no_grad."""
    logits, targets = draw(case, 6)[0]
    metric = case.make()
    with torch.no_grad():
        metric.update(logits.requires_grad_(), targets)

    assert not any(state.requires_grad for state in states_of(metric).values())


def test_half_precision_scores_are_counted_in_float32(case, draw):
    batches = [(scores.bfloat16(), targets) for scores, targets in draw(case, 6, 9)]
    if case.make()._get_name() == "LossMetric":
        batches = [(scores, targets.bfloat16()) for scores, targets in batches]
    rel = 0.01 if case.make()._get_name() == "LossMetric" else 1e-5

    assert pytest.approx(case.reference(batches), rel=rel) == value_of(case.make(), batches).item()


def test_forward_returns_the_value_of_the_batch_and_accumulates(case, draw):
    batches = draw(case, 6, 9)
    metric = case.make()
    values = [metric(*batch).item() for batch in batches]

    assert [pytest.approx(case.reference([batch]), rel=1e-5) for batch in batches] == values
    assert pytest.approx(case.reference(batches), rel=1e-5) == metric.compute().item()


def test_reset_forgets_everything(case, draw):
    first, second = draw(case, 6, 9)
    metric = case.make()
    value_of(metric, [first])
    metric.reset()

    assert value_of(case.make(), [second]) == value_of(metric, [second])


def test_two_metrics_share_no_state(case, draw):
    """`add_state` must not hand the same tensor to two states or two objects."""
    batches = draw(case, 6)
    first, second = case.make(), case.make()
    second.update(*batches[0])
    first.update(*batches[0])

    assert second.compute() == first.compute()


def test_states_can_be_saved_and_loaded(case, draw):
    first, second = draw(case, 6, 9)
    metric, restored = case.make(), case.make()
    metric.update(*first)
    restored.persistent(True)
    restored.load_state_dict(states_of(metric))
    restored.update(*second)

    assert pytest.approx(case.reference([first, second]), rel=1e-5) == restored.compute().item()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
def test_a_copy_goes_its_own_way(case, draw, clone):
    first, second = draw(case, 6, 9)
    metric = case.make()
    metric.update(*first)
    copied = clone(metric)
    copied.update(*second)

    assert pytest.approx(case.reference([first]), rel=1e-5) == metric.compute().item()
    assert pytest.approx(case.reference([first, second]), rel=1e-5) == copied.compute().item()


def test_a_module_that_holds_the_metric_can_be_scripted(case):
    class Holder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.metric = case.make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit and a property of torchmetrics are deprecated
        scripted = torch.jit.script(Holder())

    assert 2 == scripted(torch.ones(())).item()


def test_only_the_state_of_the_batch_is_needed_in_forward(case):
    assert case.make().full_state_update is False


def test_counts_stay_exact_beyond_the_precision_of_float32(case):
    counts = [state for state in states_of(case.make()).values() if state.dtype != torch.float32]

    assert all(state.dtype in (torch.int64, torch.float64) for state in counts)
    assert counts


@pytest.mark.parametrize("make", [MIoU, Dice])
@pytest.mark.parametrize("num_classes", [0, -1])
def test_the_number_of_classes_must_be_positive(make, num_classes):
    with pytest.raises(ValueError, match=f"`num_classes` must be at least 1, got {num_classes}"):
        make(num_classes)


def test_defaults_are_those_of_the_public_api():
    metric = CrossEntropy()

    assert (-100, False) == (metric.ignore_index, metric.dist_sync_on_step)
    assert -1 == MIoU(3).ignore_index
