"""The training loop: events, durations, repeated fits, losses, microbatches, schedules."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from composer.core import Algorithm, Callback, DataSpec, Event, State, Time, Timestamp
from composer.loggers import InMemoryLogger, Logger, LoggerDestination
from composer.models.base import of_outputs_alone
from composer.optim import ConstantScheduler, LinearScheduler
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


def test_arguments_of_the_constructor_and_of_fit_are_the_same(make_trainer: MakeTrainer) -> None:
    at_init = make_trainer(
        eval_dataloader=make_trainer.loader(8),
        eval_interval="2ba",
        schedulers=LinearScheduler(),
        device_train_microbatch_size=2,
        train_subset_num_batches=3,
    )
    at_init.fit()
    at_fit = make_trainer(train_dataloader=None, max_duration=None)
    at_fit.fit(
        train_dataloader=make_trainer.loader(),
        duration="2ep",
        eval_dataloader=make_trainer.loader(8),
        eval_interval="2ba",
        schedulers=LinearScheduler(),
        device_train_microbatch_size=2,
        train_subset_num_batches=3,
    )
    wct = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")

    deep_compare(at_init.state.model.state_dict(), at_fit.state.model.state_dict())
    deep_compare(at_init.state.optimizers[0].state_dict(), at_fit.state.optimizers[0].state_dict())
    deep_compare(at_init.state.timestamp.state_dict(), at_fit.state.timestamp.state_dict(), ignore_keys=wct)
    assert at_init.state.eval_metric_values == at_fit.state.eval_metric_values


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


# ---- gradients ----


@pytest.mark.parametrize("size", [1, 2, 3, 4, 100])
def test_microbatches_equal_one_batch(make_trainer: MakeTrainer, size: int) -> None:
    def train(size: int | None) -> dict[str, Any]:
        model = make_trainer.model().double()
        loader = [(x.double(), y) for x, y in make_trainer.loader()]
        trainer = make_trainer(model=model, train_dataloader=loader, device_train_microbatch_size=size)
        trainer.fit()
        return model.state_dict()

    # float64: sums in another order differ by a few units of 1e-16.
    deep_compare(train(None), train(size), atol=1e-12, rtol=1e-12)


def test_training_equals_a_plain_loop(make_trainer: MakeTrainer) -> None:
    model = make_trainer.model()
    expected = SimpleModel()
    expected.load_state_dict(model.state_dict(), strict=False)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for batch in make_trainer.loader():
            optimizer.zero_grad()
            expected.loss(expected(batch), batch).backward()
            optimizer.step()
    make_trainer(model=model).fit()

    deep_compare(dict(expected.named_parameters()), dict(model.named_parameters()))


class LossOf(SimpleModel):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().loss(outputs, batch)
        half = 0.5 * loss
        return {
            "tensor": loss,
            "rows": loss.expand(4),
            "tuple": (half, half),
            "one": (loss,),
            "dict": {"a": half, "b": half},
            "total": {"total": loss, "shown": 7 * loss},
        }[self.form]


@pytest.mark.parametrize(
    ("form", "keys"),
    [
        ("tensor", {"total"}),
        ("rows", {"total"}),
        ("tuple", {"total", "loss0", "loss1"}),
        ("one", {"total"}),
        ("dict", {"total", "a", "b"}),
        ("total", {"total", "shown"}),
    ],
)
@pytest.mark.parametrize("size", [None, 2])
def test_losses_come_in_several_forms(make_trainer: MakeTrainer, form: str, keys: set[str], size: int | None) -> None:
    plain = make_trainer(model=LossOf("tensor"), device_train_microbatch_size=size)
    other = make_trainer(model=LossOf(form), device_train_microbatch_size=size)
    plain.fit()
    other.fit()

    deep_compare(plain.state.model.state_dict(), other.state.model.state_dict(), atol=1e-6)
    losses = other.state.total_loss_dict
    assert {f"loss/train/{key}" for key in keys} == set(losses)
    assert losses["loss/train/total"] == pytest.approx(plain.state.total_loss_dict["loss/train/total"], rel=1e-5)
    assert all(isinstance(value, float) for value in losses.values())


def test_a_loss_that_is_no_loss_is_refused(make_trainer: MakeTrainer) -> None:
    class Wrong(SimpleModel):
        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return "loss"

    with pytest.raises(
        TypeError, match=r"`loss` must be a tensor, a sequence of tensors or a dict of tensors, got str"
    ):
        make_trainer(model=Wrong()).fit()


def test_microbatches_weigh_by_tokens_if_asked_to(make_trainer: MakeTrainer) -> None:
    class Sum(SimpleModel):
        def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
            return outputs.sum() * 0 + len(batch[0])

    def tokens(batch: Any) -> dict[str, int]:
        return {"total": 100, "loss_generating": 10 ** len(batch[0])}

    spec = DataSpec(make_trainer.loader(3, batch_size=3), get_num_tokens_in_batch=tokens)
    trainer = make_trainer(
        model=Sum(),
        train_dataloader=spec,
        device_train_microbatch_size=2,
        accumulate_train_batch_on_tokens=True,
        max_duration="1ba",
    )
    trainer.fit()

    expected = (2 * 100 + 1 * 10) / 110
    assert trainer.state.total_loss_dict["loss/train/total"] == pytest.approx(expected)


class MaskedRegression(SimpleModel):
    """A mean over the rows that count, so without any of them nan, and so are its gradients."""

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        counts = (batch[1] > 0).float()
        return (outputs.square().sum(dim=1) * counts).sum() / counts.sum()


def count_rows(batch: Any) -> dict[str, int]:
    return {"total": len(batch[1]), "loss_generating": int((batch[1] > 0).sum())}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_what_has_no_token_that_counts_contributes_nothing(make_trainer: MakeTrainer, size: int, caplog: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    masks = [[1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
    batches = [(torch.randn(4, 1, 1, 1, generator=generator), torch.tensor(mask)) for mask in masks]
    model, expected = MaskedRegression(), MaskedRegression()
    expected.load_state_dict(model.state_dict())
    by_hand, losses = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9), []
    for batch in batches:
        by_hand.zero_grad(set_to_none=False)
        if batch[1].any():
            loss = expected.loss(expected(batch), batch)
            loss.backward()
        losses.append(float(loss.detach()) if batch[1].any() else 0.0)
        by_hand.step()
    seen: list[float] = []

    class See(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            seen.append(float(state.total_loss_dict["loss/train/total"]))

    make_trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        train_dataloader=DataSpec(batches, get_num_tokens_in_batch=count_rows),
        device_train_microbatch_size=size,
        accumulate_train_batch_on_tokens=True,
        max_duration="1ep",
        schedulers=None,
        callbacks=[See()],
    ).fit()

    assert losses == pytest.approx(seen)
    for theirs, ours in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours)
    assert "Batch 2 has no loss-generating tokens" in caplog.text


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_that_nobody_counts_cannot_weigh(make_trainer: MakeTrainer, size: int) -> None:
    trainer = make_trainer(
        train_dataloader=make_trainer.loader(4, batch_size=4),
        device_train_microbatch_size=size,
        accumulate_train_batch_on_tokens=True,
        max_duration="1ba",
    )

    with pytest.raises(ValueError, match="needs the number of tokens, which is unknown"):
        trainer.fit()


def test_transforms_see_host_batches_and_device_microbatches(make_trainer: MakeTrainer) -> None:
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[Any], Any]:
        def transform(batch: Any) -> Any:
            seen.append((name, len(batch[0])))
            return batch

        return transform

    spec = DataSpec(make_trainer.loader(), batch_transforms=note("batch"), microbatch_transforms=note("microbatch"))
    make_trainer(train_dataloader=spec, device_train_microbatch_size=2, max_duration="1ba").fit()

    assert [("batch", 4), ("microbatch", 2), ("microbatch", 2)] == seen


def test_gradients_are_cleared_after_fit(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer()
    trainer.fit()

    assert {None} == {parameter.grad for parameter in trainer.state.model.parameters()}


# ---- schedules ----


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    def after_train_batch(self, state: State, logger: Logger) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


def test_schedules_step_every_batch(make_trainer: MakeTrainer) -> None:
    rates = Rates()
    make_trainer(schedulers=LinearScheduler(), callbacks=rates, max_duration="1ep").fit()

    # The rate of a batch is set while the time is still that of the batch before it.
    assert rates.rates == pytest.approx([0.1, 0.1, 0.075, 0.05])


def test_a_second_fit_continues_at_the_last_factor_of_a_schedule(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(schedulers=LinearScheduler(alpha_f=0.5, t_max="2ep"), max_duration="2ep")
    trainer.fit()
    trainer.fit(duration="1ep")

    assert trainer.state.schedulers[0].get_last_lr() == [pytest.approx(0.05)]
    assert trainer.state.timestamp.epoch == 3


@pytest.mark.parametrize(("every_batch", "expected"), [(None, [0.1] * 4 + [0.01] * 4), (True, None)])
def test_torch_schedules_step_every_epoch_unless_told(
    make_trainer: MakeTrainer, every_batch: bool | None, expected: list[float] | None
) -> None:
    rates, model = Rates(), make_trainer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_trainer(
        model=model,
        optimizers=optimizer,
        schedulers=torch.optim.lr_scheduler.StepLR(optimizer, 1),
        step_schedulers_every_batch=every_batch,
        callbacks=rates,
    ).fit()

    assert rates.rates == pytest.approx(expected if expected is not None else [0.1 * 0.1**i for i in range(8)])


def one_cycle(steps: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    return lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)


def cosine(steps: int) -> Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]:
    return lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


@pytest.mark.parametrize("max_duration", ["2ep", "8ba"])
@pytest.mark.parametrize(
    ("make", "every_batch", "message"),
    [
        (
            one_cycle(8),
            None,
            r"`OneCycleLR` has total_steps=8, one step per batch .* 2 in all. Pass `step_sched.*=True`",
        ),
        (cosine(8), None, "`CosineAnnealingLR` has T_max=8, one step per batch of the run, but takes one per epoch, 2"),
        (one_cycle(2), True, "total_steps=2, one step per epoch .* takes one per batch, 8 in all. Leave out `step"),
        (cosine(2), True, "T_max=2, one step per epoch of the run, but takes one per batch, 8 in all"),
        (
            one_cycle(5),
            True,
            "total_steps=5 and fails after these, but takes one step per batch, 8 in all. Give it",
        ),
        (one_cycle(1), None, "total_steps=1 and fails after these, but takes one step per epoch, 2 in all"),
    ],
)
def test_a_torch_schedule_of_the_length_of_other_steps_warns(
    make_trainer: MakeTrainer, make: Any, every_batch: bool | None, message: str, max_duration: str
) -> None:
    model = make_trainer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"model": model, "optimizers": optimizer, "max_duration": max_duration}

    with pytest.warns(UserWarning, match=message) as caught:
        make_trainer(**given, schedulers=make(optimizer), step_schedulers_every_batch=every_batch)

    assert len(caught) == 1


@pytest.mark.parametrize(("make", "every_batch"), [(one_cycle(2), None), (one_cycle(8), True), (cosine(3), None)])
def test_a_torch_schedule_that_fits_its_steps_does_not_warn(
    make_trainer: MakeTrainer, make: Any, every_batch: bool | None
) -> None:
    model = make_trainer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make_trainer(
        model=model, optimizers=optimizer, schedulers=make(optimizer), step_schedulers_every_batch=every_batch
    ).fit()


def test_the_schedule_ratio_scales_the_run(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(schedulers=ConstantScheduler(), scale_schedule_ratio=0.75, max_duration="10ep")

    assert "7ep" == str(trainer.state.max_duration)
    with pytest.raises(ValueError, match=r"`scale_schedule_ratio` 0.01 makes `max_duration` '10ep' zero"):
        make_trainer(schedulers=ConstantScheduler(), scale_schedule_ratio=0.01, max_duration="10ep")
    with pytest.raises(ValueError, match=r"must be 1.0 without `schedulers`"):
        make_trainer(scale_schedule_ratio=0.5)
    with pytest.raises(ValueError, match=r"`scale_schedule_ratio` must be positive"):
        make_trainer(schedulers=ConstantScheduler(), scale_schedule_ratio=0)
    with pytest.raises(ValueError, match=r"`step_schedulers_every_batch` has no effect"):
        make_trainer(step_schedulers_every_batch=True)


@pytest.mark.parametrize(("first", "second", "ratio", "ends"), [("4ep", "2ep", 0.5, 3), ("2ep", "1ep", 2.0, 6)])
def test_the_schedule_ratio_of_fit_scales_what_it_trains(
    make_trainer: MakeTrainer, first: str, second: str, ratio: float, ends: int
) -> None:
    trainer = make_trainer(max_duration=None)
    for duration in (first, second):
        trainer.fit(duration=duration, schedulers=ConstantScheduler(), scale_schedule_ratio=ratio)
    assert ends == trainer.state.timestamp.epoch

    trainer = make_trainer(max_duration=first)  # in two parts, without `duration`
    trainer.fit(duration="1ep")
    trainer.state.max_duration = "5ep"
    trainer.fit(schedulers=ConstantScheduler(), scale_schedule_ratio=ratio)
    assert 1 + 4 * ratio == trainer.state.timestamp.epoch
    with pytest.raises(ValueError, match=r"`scale_schedule_ratio` 0.5 makes `duration` '1ep' zero"):
        trainer.fit(duration="1ep", schedulers=ConstantScheduler(), scale_schedule_ratio=0.5)


# ---- what is logged, and when it is read ----


class Calls(LoggerDestination):
    accepts_deferred = True

    def __init__(self) -> None:
        self.calls: list[list[str]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(sorted(metrics))


def test_metrics_are_logged_in_a_fixed_number_of_calls(make_trainer: MakeTrainer) -> None:
    calls = Calls()
    make_trainer(loggers=calls, eval_dataloader=make_trainer.loader(4), max_duration="1ep").fit()
    time = ["time/batch", "time/batch_in_epoch", "time/sample", "time/sample_in_epoch"]
    batch = [time, ["loss/train/total", "trainer/device_train_microbatch_size"], ["metrics/train/Accuracy"]]

    assert [
        ["time/epoch"],
        *(batch * STEPS),
        ["metrics/train/Accuracy"],
        ["metrics/eval/Accuracy"],
        sorted([*time, "time/epoch"]),
    ] == calls.calls


def test_logged_values_are_those_of_their_batch(make_trainer: MakeTrainer) -> None:
    memory, seen = InMemoryLogger(), []

    class Reading(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            seen.append((float(state.loss.detach()), float(state.train_metrics["Accuracy"].compute())))

    make_trainer(loggers=memory, callbacks=Reading()).fit()

    losses = [value for _, value in memory.data["loss/train/total"]]
    accuracies = [float(value) for _, value in memory.data["metrics/train/Accuracy"]]
    assert [loss for loss, _ in seen] == losses
    # At the end of each epoch the last batch's value is logged again.
    values = [value for _, value in seen]
    assert [*values[:4], values[3], *values[4:], values[7]] == accuracies
    assert list(range(8)) == [int(stamp.batch) for stamp, _ in memory.data["loss/train/total"]]


@pytest.mark.parametrize("size", [None, 2])
def test_train_metrics_are_those_of_the_last_batch(make_trainer: MakeTrainer, size: int | None) -> None:
    outputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Keep(Callback):
        def batch_start(self, state: State, logger: Logger) -> None:
            outputs.clear()

        def after_loss(self, state: State, logger: Logger) -> None:
            outputs.append((state.outputs.detach().argmax(1), state.batch[1]))

    trainer = make_trainer(callbacks=Keep(), device_train_microbatch_size=size)
    trainer.fit()
    predicted, target = (torch.cat(part) for part in zip(*outputs, strict=True))

    expected = (predicted == target).float().mean()
    assert torch.equal(expected, trainer.state.train_metrics["Accuracy"].compute())
    assert torch.equal(expected, trainer.state.train_metric_values["Accuracy"])


def test_a_step_reads_nothing_from_tensors(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading(RuntimeError):
        pass

    class Guard(Callback):
        def epoch_start(self, state: State, logger: Logger) -> None:
            for name in ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "cpu", "__index__"):
                monkeypatch.setattr(torch.Tensor, name, forbidden(name))

        def epoch_end(self, state: State, logger: Logger) -> None:
            monkeypatch.undo()

    def forbidden(name: str) -> Any:
        def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            raise Reading(f"a training step called Tensor.{name}")

        return read

    make_trainer(
        train_dataloader=list(make_trainer.loader()), callbacks=Guard(), loggers=Quiet(), max_duration="1ep"
    ).fit()


class Quiet(LoggerDestination):
    accepts_deferred = True

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        pass


def test_loggers_of_users_get_plain_numbers(make_trainer: MakeTrainer) -> None:
    seen: dict[str, Any] = {}

    class Plain(LoggerDestination):
        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            seen.update(metrics)

    make_trainer(loggers=Plain(), max_duration="1ba").fit()

    assert isinstance(seen["loss/train/total"], float)
    assert isinstance(seen["metrics/train/Accuracy"], torch.Tensor)


def test_a_model_with_its_own_eval_forward_is_measured_through_it(make_trainer: MakeTrainer) -> None:
    modes: list[bool] = []

    class Own(SimpleModel):
        def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
            modes.append(self.training)
            return super().eval_forward(batch, outputs)

    metrics = make_trainer.model().get_metrics(is_train=True)
    model = Own(train_metrics=metrics)
    make_trainer(model=model, max_duration="1ba").fit()

    assert [False] == modes
    assert model.training


def test_an_eval_forward_that_can_wait_is_called_when_somebody_reads(make_trainer: MakeTrainer) -> None:
    calls: list[str] = []

    class Own(SimpleModel):
        @of_outputs_alone
        def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
            calls.append("waits")
            return super().eval_forward(batch, outputs)

    class Overridden(Own):
        def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
            calls.append("is called at once")
            return batch[1] + outputs.sum()

    metrics = make_trainer.model().get_metrics(is_train=True)
    trainer = make_trainer(model=Own(train_metrics=metrics), loggers=Quiet(), max_duration="1ep")
    trainer.fit()
    assert ["waits"] == calls  # of the last batch, at the end
    right = trainer.state.outputs.argmax(1) == trainer.state.batch[1]
    assert torch.equal(right.float().mean(), trainer.state.train_metric_values["Accuracy"])
    make_trainer(model=Overridden(train_metrics=metrics), loggers=Quiet(), max_duration="3ba").fit()
    assert ["is called at once"] * 3 == calls[1:]


def test_hyperparameters_of_every_run_are_logged(make_trainer: MakeTrainer) -> None:
    class Nothing(Algorithm):
        events = frozenset({Event.BATCH_END})

        def apply(self, event: Event, state: State, logger: Logger) -> None:
            pass

    memory = InMemoryLogger()
    make_trainer(loggers=memory, algorithms=Nothing(), auto_log_hparams=True).fit()
    logged = memory.hyperparameters

    assert {
        "composer_version",
        "composer_commit_hash",
        "num_nodes",
        "num_cpus_per_node",
        "node_name",
        "rank_zero_seed",
        "enabled_algorithms/Nothing",
        "max_duration",
        "train_subset_num_batches",
    } <= set(logged)
    assert (1, 0, True, "2ep") == tuple(
        logged[k] for k in ("num_nodes", "rank_zero_seed", "enabled_algorithms/Nothing", "max_duration")
    )


@pytest.mark.parametrize(("variable", "name"), [("node7", "node7"), (None, platform.node())])
def test_the_node_is_named_by_the_variable_or_by_its_host(
    variable: str | None, name: str, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is None:
        monkeypatch.delenv("NODENAME", raising=False)
    else:
        monkeypatch.setenv("NODENAME", variable)
    memory = InMemoryLogger()
    make_trainer(loggers=memory)

    assert memory.hyperparameters["node_name"] == name


def test_an_epoch_without_batches_is_answered(make_trainer: MakeTrainer) -> None:
    once = iter(list(make_trainer.loader()))

    class Once:
        def __len__(self) -> int:
            return 4

        def __iter__(self) -> Iterator[Any]:
            return once

    trainer = make_trainer(train_dataloader=Once(), max_duration="2ep")
    with pytest.warns(UserWarning, match="No batches were trained for global rank 0"):
        trainer.fit()
    assert 4 == trainer.state.timestamp.batch.value
    trainer = make_trainer(train_dataloader=Once(), max_duration="9ba")
    with pytest.raises(RuntimeError, match=r"`max_duration` '9ba' would never be reached"):
        trainer.fit()


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


# ---- losses that are no numbers ----


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


@pytest.mark.parametrize("duration", ["1ba", "3ba", "1ep", "5ep", "40ba"])
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
