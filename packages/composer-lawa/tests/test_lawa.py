"""`LAWA` at its events, in a loop with evaluations and checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from composer.algorithms.lawa import LAWA
from composer.algorithms.utils.batchnorm import recalibrate_batchnorm
from composer.algorithms.warnings import NoEffectWarning, NotIntendedUseWarning
from composer.core import AVERAGES_WEIGHTS, SWAPS_WEIGHTS, Algorithm, ConflictError, Event, Placement, State, Time
from composer.testing import SimpleConvModel, deep_compare


def means(weights: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """After each batch, the mean of the weights after the last of them."""
    return [torch.stack(weights[: i + 1][-min(count, (i + 2) // 2) :]).mean(0) for i in range(len(weights))]


def in_evaluations_of_batches(run: Any) -> list[torch.Tensor]:
    return [run.evaluated[i] for i in (0, 1, 2, 4, 5, 6)]


@pytest.mark.parametrize("count", [1, 2, 4, 10])
def test_the_mean_of_the_last_weights_is_evaluated(count: int, make_run: Any) -> None:
    run = make_run(LAWA(num_snapshots=count, interval="1ba")).fit()

    torch.testing.assert_close(means(run.weights, count), in_evaluations_of_batches(run), atol=1e-15, rtol=1e-15)


def test_every_other_batch_is_stored(make_run: Any) -> None:
    run = make_run(LAWA(num_snapshots=2, interval="2ba")).fit()
    w = run.weights
    expected = [w[0], w[1], w[1], w[3], w[3], (w[3] + w[5]) / 2]

    torch.testing.assert_close(expected, in_evaluations_of_batches(run), atol=1e-15, rtol=1e-15)


def test_the_default_stores_the_end_of_each_epoch(make_run: Any, make_saver: Any) -> None:
    """Also where the model holds the mean when the epoch ends, because a checkpoint came before."""
    run = make_run(LAWA(), callbacks=make_saver(Event.BATCH_CHECKPOINT)).fit("3ep")
    expected = (run.weights[5] + run.weights[8]) / 2

    torch.testing.assert_close(expected, run.first_layer(), atol=1e-15, rtol=1e-15)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_training_does_not_change(norm: str, make_run: Any, make_saver: Any) -> None:
    plain = make_run(norm=norm).fit()
    run = make_run(LAWA(2, "1ba"), callbacks=make_saver(Event.BATCH_CHECKPOINT), norm=norm).fit()

    deep_compare(plain.weights, run.weights)
    run.engine.run_event("fit_start")
    deep_compare(plain.model.state_dict(), run.model.state_dict())


def test_predictions_use_the_mean_in_the_middle_of_training_too(make_run: Any) -> None:
    run = make_run(lawa := LAWA(2, "1ba"))
    run.engine.run_event("fit_start")
    for batch in run.batches:
        run.step(batch)
    run.engine.run_event("predict_start")
    assert lawa.swapped
    torch.testing.assert_close((run.weights[1] + run.weights[2]) / 2, run.first_layer(), atol=1e-15, rtol=0)
    run.engine.run_event("predict_end")

    assert not lawa.swapped
    assert torch.equal(run.weights[2], run.first_layer())


def test_a_checkpoint_holds_the_mean_and_training_goes_on_from_the_training_weights(
    make_run: Any, make_saver: Any
) -> None:
    saver = make_saver(Event.BATCH_CHECKPOINT)
    run = make_run(LAWA(2, "1ba"), callbacks=saver).fit()

    for mean, saved in zip(means(run.weights, 2), saver.saved, strict=True):
        torch.testing.assert_close(mean, saved["model"]["conv1.weight"], atol=1e-15, rtol=0)


@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("event", [Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_resumed_run_continues_identically(
    norm: str, event: Event, dtype: torch.dtype, make_run: Any, make_saver: Any
) -> None:
    saver = make_saver(event)
    whole = make_run(LAWA(2, "1ba"), callbacks=saver, norm=norm, dtype=dtype).fit()
    for saved in saver.saved[:-1]:
        resumed = make_run(LAWA(2, "1ba"), callbacks=make_saver(event), norm=norm, dtype=dtype)
        resumed.state.load_state_dict(copy.deepcopy(saved))
        resumed.engine.run_event("after_load")
        resumed.fit()

        deep_compare(whole.model.state_dict(), resumed.model.state_dict())
        deep_compare(whole.state.state_dict()["optimizers"], resumed.state.state_dict()["optimizers"])
        deep_compare(whole.state.algorithms[0].state_dict(), resumed.state.algorithms[0].state_dict())


def test_another_fit_continues_from_the_training_weights(make_run: Any) -> None:
    whole, run = make_run(LAWA(2, "1ba")).fit("3ep"), make_run(LAWA(2, "1ba"))
    run.fit("2ep")
    torch.testing.assert_close(means(run.weights, 2)[-1], run.first_layer(), atol=1e-15, rtol=0)
    run.evaluate()
    torch.testing.assert_close(means(run.weights, 2)[-1], run.evaluated[-1], atol=1e-15, rtol=0)
    run.fit("3ep")

    deep_compare(whole.weights, run.weights)
    deep_compare(whole.model.state_dict(), run.model.state_dict())


@pytest.mark.parametrize("loaded", [False, True])
def test_weights_changed_between_two_fits_are_trained_on_and_averaged(
    loaded: bool, make_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(lawa := LAWA(2, "1ba")).fit()
    if loaded:
        run.model.load_state_dict({name: value + 1 for name, value in run.model.state_dict().items()})
    else:
        run.model.conv1.weight.data.add_(1)
    current = run.first_layer()
    run.engine.run_event("fit_start")

    assert torch.equal(current, run.first_layer())
    name = "module.0.weight"
    assert torch.equal(current, lawa.average()[name])
    assert "were changed while the averages were in the model" in caplog.text


def test_narrow_weights_have_a_mean_in_float32(make_run: Any) -> None:
    run = make_run(lawa := LAWA(6, "1ba"), dtype=torch.bfloat16).fit()
    mean = lawa.average()["module.0.weight"]

    assert mean.dtype is torch.float32
    assert torch.equal(mean.bfloat16(), run.first_layer())
    torch.testing.assert_close(torch.stack(run.weights[-3:]).double().mean(0).float(), mean)
    assert not torch.equal(mean, mean.bfloat16().float())


def test_stored_weights_are_copies_in_the_dtype_of_the_model(make_run: Any) -> None:
    run = make_run(lawa := LAWA(2, "1ba"), dtype=torch.bfloat16)
    run.engine.run_event("fit_start")
    run.step(run.batches[0])
    before = lawa.average()
    run.model.conv1.weight.data.zero_()
    (snapshot,) = lawa.state_dict()["snapshots"]

    assert snapshot["named_parameters_dict"]["module.0.weight"].dtype is torch.bfloat16
    deep_compare(before, lawa.average())


def test_memory_of_the_oldest_weights_is_used_again(make_run: Any) -> None:
    run = make_run(lawa := LAWA(2, "1ba")).fit()
    addresses = {each["named_parameters_dict"]["module.0.weight"].data_ptr() for each in lawa.state_dict()["snapshots"]}
    run.fit("4ep")

    assert addresses == {
        each["named_parameters_dict"]["module.0.weight"].data_ptr() for each in lawa.state_dict()["snapshots"]
    }


def test_buffers_other_than_running_statistics_are_copied(make_run: Any) -> None:
    run = make_run(LAWA(3, "1ba"), norm="batch")
    run.model.register_buffer("mask", torch.tensor([0, -torch.inf]))
    run.fit()

    assert run.model.module[2].num_batches_tracked.item() == len(run.weights)
    assert run.model.mask.tolist() == [0, -torch.inf]


def test_batch_norm_statistics_are_measured_for_the_mean(make_run: Any) -> None:
    run = make_run(lawa := LAWA(2, "1ba"), norm="batch").fit()
    found = {name: value.clone() for name, value in run.model.named_buffers()}
    recalibrate_batchnorm(run.model, run.batches)

    deep_compare(found, dict(run.model.named_buffers()))
    mean = lawa.average()
    run.model.load_state_dict({**run.model.state_dict(), **found})
    assert not torch.equal(mean["module.2.running_mean"], found["module.2.running_mean"])


def test_without_recalibration_they_are_averaged(make_run: Any) -> None:
    run = make_run(lawa := LAWA(2, "1ba", recalibration_batches=0), norm="batch").fit()

    assert torch.equal(lawa.average()["module.2.running_mean"], run.model.module[2].running_mean)


def test_frozen_parameters_take_no_memory(make_run: Any) -> None:
    run = make_run(lawa := LAWA(2, "1ba"))
    run.model.conv2.weight.requires_grad_(False)
    run.engine.run_event("fit_start")
    run.step(run.batches[0])
    run.step(run.batches[1])
    names = {name for name, parameter in run.model.named_parameters() if parameter.requires_grad}
    assert names == lawa.average().keys()

    run.model.requires_grad_(True)
    run.step(run.batches[2])
    assert names == lawa.average().keys()
    run.step(run.batches[0])
    assert {name for name, _ in run.model.named_parameters()} == lawa.average().keys()


@pytest.mark.parametrize(
    ("num_snapshots", "interval", "stored", "needed"), [(6, "7ba", 0, 3), (1, "7ba", 0, 1), (6, "1ep", 2, 3)]
)
def test_a_run_without_two_snapshots_to_average_warns(
    num_snapshots: int, interval: str, stored: int, needed: int, make_run: Any
) -> None:
    run = make_run(LAWA(num_snapshots, interval))
    with pytest.warns(NoEffectWarning, match=f"stored weights {stored} times, .* is {interval}, and needs {needed}"):
        run.fit()

    assert torch.equal(run.weights[-1], run.first_layer())


def test_a_run_before_the_first_interval_evaluates_its_training_weights(make_run: Any) -> None:
    run = make_run(LAWA(interval="7ba"))
    with pytest.warns(NoEffectWarning):
        run.fit()

    deep_compare(run.weights, in_evaluations_of_batches(run))
    with pytest.raises(RuntimeError, match="There are no weights to average yet"):
        LAWA().average()


def test_a_second_run_starts_again(make_run: Any) -> None:
    run = make_run(lawa := LAWA(2, "1ba")).fit()
    run.engine.close()
    other = make_run(lawa)
    assert (0, False) == (lawa.num_taken, lawa.swapped)
    other.fit()

    deep_compare(run.model.state_dict(), other.model.state_dict())


def test_fewer_snapshots_than_were_saved_are_the_last(make_run: Any) -> None:
    make_run(lawa := LAWA(3, "1ba")).fit()
    other = LAWA(2, "1ba")
    other.load_state_dict(lawa.state_dict())

    deep_compare(lawa.state_dict()["snapshots"][1:], other.state_dict()["snapshots"])


def test_loaded_weights_are_copies(make_run: Any) -> None:
    make_run(lawa := LAWA(2, "1ba")).fit()
    other = LAWA(2, "1ba")
    other.load_state_dict(lawa.state_dict())
    expected = lawa.average()
    for snapshot in lawa.state_dict()["snapshots"]:
        snapshot["named_parameters_dict"]["module.0.weight"].zero_()

    deep_compare(expected, other.average())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_snapshots": 0}, ValueError, "`num_snapshots` must be at least 1, got 0"),
        ({"num_snapshots": 2.5}, TypeError, "`num_snapshots` must be an integer, got 2.5"),
        ({"interval": "0ba"}, ValueError, "`interval` must be at least 1, got '0ba'"),
        ({"interval": "1tok"}, ValueError, "`interval` must be in 'ba' or 'ep'"),
        ({"interval": "0.5dur"}, ValueError, "`interval` must be in 'ba' or 'ep', got '0.5dur'"),
        ({"interval": 3}, TypeError, "`interval` must be a time string or a `Time`, got 3"),
        ({"recalibration_batches": -1}, ValueError, "`recalibration_batches` must not be negative, got -1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        LAWA(**arguments)


def test_times_may_be_objects() -> None:
    assert repr(LAWA(interval=Time(2, "ba"))) == repr(LAWA(interval="2ba"))


def test_data_of_one_pass_are_refused_with_batch_norm(make_run: Any) -> None:
    run = make_run(LAWA(), norm="batch")
    run.state.train_dataloader = iter(run.batches)
    with pytest.raises(ValueError, match="`LAWA` must recalibrate the batch norm layers"):
        run.engine.run_event("fit_start")


class Other(Algorithm):
    """Averages weights, or swaps them."""

    events = frozenset({Event.INIT})

    def __init__(self, effect: str) -> None:
        self.placement = Placement(provides={effect})

    def apply(self, event: Event, state: State, logger: Any) -> None:
        pass


def test_others_that_swap_weights_are_refused(make_run: Any) -> None:
    with pytest.raises(ConflictError, match="`LAWA` cannot be used together with `Other`, which swaps weights"):
        make_run(LAWA(), Other(SWAPS_WEIGHTS))


def test_others_that_average_weights_get_a_warning(make_run: Any) -> None:
    with pytest.warns(NotIntendedUseWarning, match="`LAWA` should not be used together with `Other`"):
        make_run(LAWA(), Other(AVERAGES_WEIGHTS))


def test_a_loader_of_its_own_is_in_the_repr_by_type() -> None:
    assert "recalibration_data=list(...)" in repr(LAWA(recalibration_data=[SimpleConvModel()]))
