"""`Trainer.plot`: the losses and metrics of a run, with an `InMemoryLogger` and without any logger."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.core import Callback, State
from composer.loggers import InMemoryLogger, Logger
from composer.trainer.history import _MAX_LOSSES, RunHistory

pyplot = pytest.importorskip("matplotlib.pyplot", reason="needs matplotlib")
BATCHES = 5


class Losses(Callback):
    """The loss of each batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        self.values.append(float(state.total_loss_dict["loss/train/total"]))


def make(**arguments: Any) -> Trainer:
    torch.manual_seed(0)
    data = [(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(BATCHES)]
    arguments = {"max_duration": "2ep", "eval_dataloader": data} | arguments
    return Trainer(
        model=torch.nn.Linear(3, 2),
        loss=F.cross_entropy,
        metrics=MulticlassAccuracy(2),
        train_dataloader=data,
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        device="cpu",
        progress_bar=False,
        **arguments,
    )


def curves(figure: Any) -> dict[str, tuple[list[float], list[float]]]:
    """The points of each curve by its name."""
    lines = [line for axes in figure.axes for line in axes.lines]
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in lines}


def test_a_run_without_loggers_is_drawn() -> None:
    losses = Losses()
    trainer = make(callbacks=losses)
    trainer.fit()
    drawn = curves(trainer.plot())

    assert drawn["loss/train/total"] == (list(range(2 * BATCHES)), losses.values)
    at, values = drawn["metrics/eval/MulticlassAccuracy"]
    assert [BATCHES, 2 * BATCHES] == at
    assert trainer.state.eval_metric_values["MulticlassAccuracy"].item() == values[-1]
    assert drawn.keys() == {"loss/train/total", "metrics/eval/MulticlassAccuracy"}

    trainer.fit(duration="1ep")
    assert 3 * BATCHES == len(curves(trainer.plot("loss"))["loss/train/total"][0])
    with pytest.raises(ValueError, match=r"got \['lr'\]. There are: loss/train/total, metrics/eval.*InMemoryLogger"):
        trainer.plot("lr")


def test_with_a_logger_that_stores_values_they_are_the_same_and_more() -> None:
    trainer, logged = make(), make(loggers=InMemoryLogger())
    trainer.fit()
    logged.fit()
    drawn, more = curves(trainer.plot()), curves(logged.plot())

    assert drawn.items() <= more.items()
    assert more.keys() - drawn.keys() == {"metrics/train/MulticlassAccuracy"}
    with pytest.raises(ValueError, match=r"There are: .*trainer/device_train_microbatch_size\.$"):
        logged.plot("nothing")


@pytest.mark.parametrize("loggers", [(), InMemoryLogger()])
def test_before_training_there_is_nothing_to_draw(loggers: Any) -> None:
    trainer = make(loggers=loggers)
    with pytest.raises(ValueError, match=r"nothing to draw yet\. Call `fit` or `eval` first"):
        trainer.plot()
    trainer.eval()

    assert ["metrics/eval/MulticlassAccuracy"] == list(curves(trainer.plot()))
    trainer.close()


@pytest.mark.parametrize("name", [5, ["loss"], None])
def test_names_must_be_strings(name: Any) -> None:
    trainer = make()
    trainer.eval()
    with pytest.raises(
        TypeError, match=rf"`names` must be strings, got {re.escape(repr(name))}\. Pass them one by one"
    ):
        trainer.plot(name)
    trainer.close()


def test_of_a_long_run_evenly_spaced_losses_are_stored() -> None:
    history = RunHistory()
    for batch in range(5 * _MAX_LOSSES + 3):
        history.recent.append((batch, {"loss/train/total": torch.tensor(float(batch))}))
        if len(history.recent) == 16:
            history.drop_recent(keep=8)
    points = history.series()["loss/train/total"]

    assert [(at, float(value)) for at, value in points] == [(8 * i, 8.0 * i) for i in range(len(points))]
    assert _MAX_LOSSES // 2 < len(points) <= _MAX_LOSSES


def test_a_step_reads_no_value_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    for name in ("item", "tolist", "cpu", "numpy", "__float__", "__bool__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _of=original, _name=name, **k: read.append(_name) or _of(self, *a, **k)
        )
    history = RunHistory()
    for batch in range(_MAX_LOSSES + 1):
        history.recent.append((batch, {"loss/train/total": torch.zeros(())}))
        if len(history.recent) == 16:
            history.drop_recent(keep=0)
    history.add_metrics(1, {"metrics/eval/Accuracy": torch.ones(()), "metrics/eval/Matrix": torch.eye(2)})

    assert [] == read
    assert {"loss/train/total", "metrics/eval/Accuracy"} == history.series().keys()


def test_it_needs_neither_a_callback_nor_a_logger() -> None:
    trainer = make()

    assert [] == trainer.state.callbacks
    assert () == trainer.logger.destinations
