"""Tests of the training loop: events, durations, repeated fits, and warnings about losses that are not finite."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from composer.core import Callback, DataSpec, Event, State, Time, Timestamp
from composer.loggers import Logger
from composer.testing import EventCounterCallback, RandomClassificationDataset, SimpleModel, deep_compare

MakeTrainer = Any  # the fixture's class, in conftest.py
STEPS = 4  # 16 samples in batches of 4


class EventOrder(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.events.append(event.value)


def test_the_events_of_a_run_come_in_their_order(make_trainer: MakeTrainer) -> None:
    order = EventOrder()
    make_trainer(
        train_dataloader=make_trainer.loader(8),
        eval_dataloader=make_trainer.loader(4),
        max_duration="1ep",
        callbacks=order,
    ).fit()
    batch = [
        "after_dataloader",
        "batch_start",
        "before_train_batch",
        *("before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"),
        "after_train_batch",
        "batch_end",
        "batch_checkpoint",
        "before_dataloader",
    ]
    evaluation = [
        "eval_before_all",
        "eval_start",
        *("eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end"),
        "eval_end",
        "eval_after_all",
    ]

    assert [
        *("init", "before_load", "after_load", "fit_start", "iteration_start", "epoch_start", "before_dataloader"),
        *batch,
        *batch,
        "epoch_end",
        *evaluation,
        "epoch_checkpoint",
        "fit_end",
    ] == order.events


def test_event_counts_with_microbatches_and_two_epochs(make_trainer: MakeTrainer) -> None:
    counter = EventCounterCallback()
    make_trainer(callbacks=counter, device_train_microbatch_size=2).fit()
    counts = counter.event_to_num_calls

    assert 2 * STEPS == counts[Event.BATCH_END] == counts[Event.BEFORE_TRAIN_BATCH]
    assert 4 * STEPS == counts[Event.BEFORE_FORWARD] == counts[Event.AFTER_BACKWARD]
    assert 2 * STEPS + 2 == counts[Event.BEFORE_DATALOADER]
    assert 2 * STEPS == counts[Event.AFTER_DATALOADER]
    assert (1, 0) == (counts[Event.ITERATION_START], counts[Event.ITERATION_END])


@pytest.mark.parametrize(
    ("duration", "batches", "epochs", "samples"),
    [("2ep", 8, 2, 32), (2, 8, 2, 32), ("3ba", 3, 0, 12), ("4ba", 4, 1, 16), ("6ba", 6, 1, 24), ("10sp", 3, 0, 12)],
)
def test_durations_end_the_run_after_the_batch_that_reaches_them(
    make_trainer: MakeTrainer, duration: Any, batches: int, epochs: int, samples: int
) -> None:
    trainer = make_trainer(max_duration=duration)
    trainer.fit()
    now = trainer.state.timestamp

    assert (batches, epochs, samples) == (now.batch.value, now.epoch.value, now.sample.value)


def test_a_run_in_tokens_overshoots_to_the_end_of_the_batch(make_trainer: MakeTrainer) -> None:
    spec = DataSpec(make_trainer.loader(), get_num_tokens_in_batch=lambda batch: 8 * len(batch[0]))
    trainer = make_trainer(train_dataloader=spec, max_duration="60tok")
    trainer.fit()

    assert (2, 64) == (trainer.state.timestamp.batch.value, trainer.state.timestamp.token.value)


def test_fit_can_go_on_for_a_duration(make_trainer: MakeTrainer) -> None:
    whole, parts = make_trainer(max_duration="3ep"), make_trainer(max_duration=None)
    whole.fit()
    for _ in range(3):
        parts.fit(duration="1ep")

    assert whole.state.timestamp.batch == parts.state.timestamp.batch
    deep_compare(whole.state.model.state_dict(), parts.state.model.state_dict())


def test_a_fit_that_ends_inside_an_epoch_is_continued_there(make_trainer: MakeTrainer) -> None:
    whole, parts, order = make_trainer(max_duration="2ep"), make_trainer(max_duration="3ba"), EventOrder()
    whole.fit()
    parts.fit()
    parts.state.callbacks.append(order)
    parts.fit(duration="5ba")

    deep_compare(whole.state.model.state_dict(), parts.state.model.state_dict())
    assert 1 == order.events.count("epoch_start")
    assert "2ep" == str(parts.state.timestamp.epoch)


def test_a_finished_run_must_be_told_how_to_go_on(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_duration="1ep")
    trainer.fit()
    with pytest.raises(ValueError, match=r"Please provide the `duration` or specify `reset_time=True`"):
        trainer.fit()
    trainer.fit(reset_time=True)
    assert "1ep" == str(trainer.state.timestamp.epoch)
    trainer.state.max_duration = "2ep"  # type: ignore[assignment]
    trainer.fit()
    assert "2ep" == str(trainer.state.timestamp.epoch)


def test_stop_training_ends_after_the_batch(make_trainer: MakeTrainer) -> None:
    class Stop(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch == "3ba":
                state.stop_training()

    trainer = make_trainer(callbacks=Stop(), max_duration="9ep")
    trainer.fit()

    assert "3ba" == str(trainer.state.timestamp.batch)


def test_an_endless_loader_trains_for_a_number_of_batches(make_trainer: MakeTrainer) -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from RandomClassificationDataset(size=8)

    loader = torch.utils.data.DataLoader(Endless(), batch_size=4)
    trainer = make_trainer(train_dataloader=loader, max_duration="5ba")
    trainer.fit()
    assert 5 == trainer.state.timestamp.batch.value
    trainer = make_trainer(train_dataloader=loader, max_duration="2ep", train_subset_num_batches=3)
    trainer.fit()
    assert 6 == trainer.state.timestamp.batch.value


def test_iterations_group_epochs(make_trainer: MakeTrainer) -> None:
    counter = EventCounterCallback()
    trainer = make_trainer(callbacks=counter, max_duration="5ep")
    trainer.state._iteration_length = "2ep"  # type: ignore[assignment]
    trainer.fit()

    assert "2iter" == str(trainer.state.timestamp.iteration)
    assert "1ep" == str(trainer.state.timestamp.epoch_in_iteration)
    counts = counter.event_to_num_calls
    assert (3, 2, 2) == (
        counts[Event.ITERATION_START],
        counts[Event.ITERATION_END],
        counts[Event.ITERATION_CHECKPOINT],
    )


def test_a_list_of_batches_is_a_loader(make_trainer: MakeTrainer) -> None:
    batches = list(make_trainer.loader())
    listed, loaded = make_trainer(train_dataloader=batches, eval_dataloader=batches), make_trainer()
    for trainer in (listed, loaded):
        trainer.fit()

    deep_compare(loaded.state.model.state_dict(), listed.state.model.state_dict())
    assert "Accuracy" in listed.state.eval_metric_values


def test_an_epoch_without_batches_is_an_error(make_trainer: MakeTrainer) -> None:
    once = iter(list(make_trainer.loader()))

    class Once:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[Any]:
            return once

    trainer = make_trainer(train_dataloader=Once(), max_duration="2ep")
    with pytest.raises(
        RuntimeError, match=r"epoch 1, although it had yielded 4 .*No batches were trained for global rank 0"
    ):
        trainer.fit()
    assert 4 == trainer.state.timestamp.batch.value


def test_time_of_evaluation_is_not_training_time(make_trainer: MakeTrainer) -> None:
    import time

    class Slow(Callback):
        def eval_start(self, state: State, logger: Logger) -> None:
            time.sleep(0.3)

    trainer = make_trainer(
        callbacks=Slow(), eval_dataloader=make_trainer.loader(4), max_duration="1ep", eval_interval="1ba"
    )
    start = time.perf_counter()
    trainer.fit()
    outside = time.perf_counter() - start

    # Four evaluations sleep 0.3 s each; whatever the machine does, training cannot have had that time.
    assert trainer.state.timestamp.total_wct.total_seconds() <= outside - 4 * 0.3


def test_the_timestamp_before_the_step_is_kept(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(max_duration="2ba")
    trainer.fit()

    assert isinstance(trainer.state.previous_timestamp, Timestamp)
    assert Time(1, "ba") == trainer.state.previous_timestamp.batch


class Broken(SimpleModel):
    """Has a loss of NaN in some batches."""

    def __init__(self, broken: Callable[[int], bool]) -> None:
        super().__init__()
        self.broken, self.batch = broken, -1

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.batch += 1
        return super().loss(outputs, batch) * (float("nan") if self.broken(self.batch) else 1.0)


def warnings_of(make_trainer: MakeTrainer, broken: Callable[[int], bool], **arguments: Any) -> list[str]:
    trainer = make_trainer(model=Broken(broken), **arguments)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit()
    return [str(warning.message) for warning in caught if "NaN or infinite" in str(warning.message)]


@pytest.mark.parametrize("duration", ["1ba", "1ep", "40ba"])
def test_losses_that_stay_nan_warn_once(make_trainer: MakeTrainer, duration: str) -> None:
    (told,) = warnings_of(make_trainer, lambda batch: True, max_duration=duration)

    number = min(4, int(duration[:-2]) if duration.endswith("ba") else 4)
    assert f"in all of the last {number} batches, up to batch {number - 1}, counted from 0" in told
    assert "`NaNMonitor`" in told


def test_a_short_run_that_ends_with_nan_is_told(make_trainer: MakeTrainer) -> None:
    (told,) = warnings_of(make_trainer, lambda batch: batch >= 3, max_duration="8ba")

    assert "in all of the last 5 batches, up to batch 7, counted from 0" in told


@pytest.mark.parametrize(("first", "at"), [(4, 15), (24, 31), (25, 63)])
def test_losses_that_become_nan_are_told_within_a_long_epoch(make_trainer: MakeTrainer, first: int, at: int) -> None:
    """After 16, 32, 64, ... batches, if the last 8 losses are NaN."""
    batches = list(make_trainer.loader()) * 20
    (told,) = warnings_of(make_trainer, lambda batch: batch >= first, train_dataloader=batches, max_duration="1ep")

    assert f"in all of the last 8 batches, up to batch {at}, counted from 0" in told


def test_losses_of_an_earlier_fit_do_not_count(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(model=Broken(lambda batch: batch >= 3), max_duration="4ba")
    trainer.fit()
    with pytest.warns(UserWarning, match="NaN or infinite in all of the last 1 batches, up to batch 4"):
        trainer.fit(duration="1ba")


@pytest.mark.parametrize(
    "change", [lambda losses: losses.clear(), lambda losses: losses.update({"loss/train/total": "x"})]
)
def test_a_user_may_change_the_losses(make_trainer: MakeTrainer, change: Callable[[dict[str, Any]], None]) -> None:
    class Change(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            change(state.total_loss_dict)

    (told,) = warnings_of(make_trainer, lambda batch: True, max_duration="5ep", callbacks=Change())
    assert "in all of the last 4 batches" in told


def test_drawing_within_an_epoch_does_not_hide_losses_of_nan(make_trainer: MakeTrainer) -> None:
    pytest.importorskip("matplotlib.pyplot", reason="needs matplotlib")

    class Draw(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch == "10ba":
                trainer.plot("loss/train/total")

    batches = list(make_trainer.loader()) * 20
    trainer = make_trainer(
        model=Broken(lambda batch: batch >= 8), train_dataloader=batches, max_duration="1ep", callbacks=Draw()
    )
    with pytest.warns(UserWarning, match="NaN or infinite in all of the last 8 batches, up to batch 15"):
        trainer.fit()


def test_warnings_as_errors_leave_each_batch_once_in_the_history(make_trainer: MakeTrainer) -> None:
    batches = list(make_trainer.loader()) * 10
    trainer = make_trainer(model=Broken(lambda batch: True), train_dataloader=batches, max_duration="1ep")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="NaN or infinite"):
            trainer.fit()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit()

    assert list(range(len(batches))) == [at for at, _ in trainer._history.series()["loss/train/total"]]


def test_losses_that_stay_infinite_are_told_too(make_trainer: MakeTrainer) -> None:
    class Infinite(Broken):
        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return 0 * outputs.sum() + float("inf")

    trainer = make_trainer(model=Infinite(lambda batch: False), max_duration="1ep")
    with pytest.warns(UserWarning, match="NaN or infinite in all of the last 4 batches"):
        trainer.fit()


def test_single_losses_of_nan_are_not_told(make_trainer: MakeTrainer) -> None:
    class Harmless(Broken):
        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return super().loss(outputs, batch).detach() + 0 * outputs.sum()

    trainer = make_trainer(model=Harmless(lambda batch: batch in (3, 7)), max_duration="2ep")
    trainer.fit()

    assert trainer.state.timestamp.batch == 8
