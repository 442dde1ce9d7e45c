"""Tests of training metrics and of the values that are logged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shared_runs import Quiet
from torchmetrics import MeanMetric

from composer.core import Callback, State
from composer.devices import DeviceCPU
from composer.loggers import InMemoryLogger, Logger, LoggerDestination
from composer.models.base import of_outputs_alone
from composer.testing import SimpleModel
from composer.trainer.metrics import move_metrics

MakeTrainer = Any  # the fixture's class, in conftest.py
STEPS = 4  # 16 samples in batches of 4


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
    batch = sorted([*time, "loss/train/total", "trainer/device_train_microbatch_size", "metrics/train/Accuracy"])

    assert [
        ["time/epoch"],
        *([batch] * STEPS),
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


class Averaged(SimpleModel):
    """Its metric is the mean of the outputs, which differs between batches."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"Mean": MeanMetric()}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs.detach())


@pytest.mark.parametrize("size", [None, 2])
def test_metrics_begin_anew_with_each_batch(make_trainer: MakeTrainer, size: int | None) -> None:
    outputs: list[torch.Tensor] = []
    means: list[torch.Tensor] = []

    class Keep(Callback):
        def after_loss(self, state: State, logger: Logger) -> None:
            outputs.append(state.outputs.detach())

        def batch_end(self, state: State, logger: Logger) -> None:
            torch.testing.assert_close(torch.cat(outputs).mean(), state.train_metric_values["Mean"])
            means.append(torch.cat(outputs).mean())
            outputs.clear()

    make_trainer(model=Averaged(), callbacks=Keep(), device_train_microbatch_size=size).fit()

    assert len({mean.item() for mean in means}) == len(means) == 2 * STEPS


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


class Accumulated(SimpleModel):
    """Its metrics add up in double precision."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"Targets": MeanMetric().set_dtype(torch.float64)}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(batch[1].double() / 3)


def test_metrics_keep_their_dtype(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(model=Accumulated(), eval_dataloader=make_trainer.loader(4), max_duration="1ep")
    trainer.fit()

    for metrics in (trainer.state.train_metrics, *trainer.state.eval_metrics.values()):
        assert getattr(metrics["Targets"], "dtype", torch.float64) == torch.float64
        assert metrics["Targets"].compute().dtype == torch.float64


def test_metrics_move_to_the_device() -> None:
    metrics = {"Targets": MeanMetric()}

    class Meta(DeviceCPU):
        _device = torch.device("meta")

    move_metrics(metrics, Meta())

    assert metrics["Targets"].device == torch.device("meta")
