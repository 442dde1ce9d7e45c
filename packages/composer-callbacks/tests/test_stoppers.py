"""`EarlyStopper` and `ThresholdStopper`."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torchmetrics import MeanMetric

from composer.callbacks.early_stopper import EarlyStopper
from composer.callbacks.threshold_stopper import ThresholdStopper
from composer.core import Callback, Engine, Event, State, TimeUnit

NAN = float("nan")


class Sets(Callback):
    """Replaces the metric, as of the number of epochs or batches."""

    def __init__(self, label: str, values: list[float], unit: str) -> None:
        self.label, self.values, self.unit = label, values, unit

    def _set(self, state: State) -> None:
        metric = MeanMetric()
        metric.update(self.values[min(len(self.values) - 1, state.timestamp.get(self.unit).value)])
        metrics = {"MulticlassAccuracy": metric, "Loss": metric}
        if self.label == "train":
            state.train_metrics = metrics
        else:
            state.eval_metrics[self.label] = metrics

    def batch_end(self, state: Any, logger: Any) -> None:
        self._set(state)

    def epoch_end(self, state: Any, logger: Any) -> None:
        self._set(state)

    def eval_end(self, state: Any, logger: Any) -> None:
        self._set(state)


@pytest.mark.parametrize("values", [[0.1, 0.2], [0.1, 0.5, 0.4, 0.6], [0.1, 0.2, 0.3, 0.35, 0.5]])
@pytest.mark.parametrize("label", ["train", "eval"])
@pytest.mark.parametrize("unit", ["ep", "ba"])
@pytest.mark.parametrize("patience", [2, 3])
def test_a_run_continues_for_the_patience(
    run: Any, make_loader: Any, values: list[float], label: str, unit: str, patience: int
) -> None:
    stopper = EarlyStopper("MulticlassAccuracy", label, patience=f"{patience}{unit}")
    evaluation = {"eval_dataloader": make_loader(), "eval_interval": f"1{unit}"} if label == "eval" else {}
    done = run([Sets(label, values, unit), stopper], max_duration="20ep", **evaluation).fit()

    assert done.state.timestamp.get(unit).value == len(values) + patience
    assert stopper.best is not None
    assert stopper.best.item() == pytest.approx(max(values))


class Value:
    """A metric with a given value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def compute(self) -> Any:
        return self.value


def epochs_run(
    callback: Callback, values: list[Any], name: str = "MulticlassAccuracy", event: str = "epoch_end"
) -> int:
    """Return the number of epochs until training is stopped; 0 if it is not."""
    state = State(torch.nn.Linear(1, 1), max_duration="99ep", dataloader=[0], callbacks=callback)
    engine = Engine(state)
    for number, value in enumerate(values, start=1):
        state.train_metrics = {name: Value(value if isinstance(value, torch.Tensor) else torch.tensor(value))}
        state.timestamp = state.timestamp.to_next_batch(1).to_next_epoch()
        engine.run_event(event)
        if str(state.max_duration) != "99ep":
            return number
    return 0


@pytest.mark.parametrize(
    ("name", "comp", "values", "stopped"),
    [
        ("Accuracy", None, [0.5, 0.4, 0.3], 3),
        ("Accuracy", None, [0.3, 0.4, 0.5], 0),
        ("CrossEntropyLoss", None, [0.3, 0.4, 0.5], 3),
        ("MeanError", None, [0.5, 0.4, 0.3], 0),
        ("LanguagePerplexity", None, [0.5, 0.4, 0.3], 0),
        ("Loss", "greater", [0.5, 0.4, 0.3], 3),
        ("Accuracy", "LT", [0.5, 0.4, 0.3], 0),
        ("Accuracy", torch.less, [0.5, 0.4, 0.3], 0),
        ("Accuracy", operator.lt, [0.5, 0.4, 0.3], 0),
        ("Accuracy", None, [NAN, 0.4, 0.5], 0),
        ("Accuracy", None, [0.5, NAN, NAN], 3),
    ],
)
def test_the_comparison_is_given_or_follows_from_the_name(
    name: str, comp: Any, values: list[float], stopped: int
) -> None:
    assert epochs_run(EarlyStopper(name, "train", comp=comp), values, name) == stopped


def test_small_improvements_do_not_count() -> None:
    assert epochs_run(EarlyStopper("A", "train", min_delta=0.1), [0.1, 0.15, 0.19], "A") == 3
    assert epochs_run(EarlyStopper("A", "train", min_delta=0.1), [0.1, 0.25, 0.45], "A") == 0


def test_other_loaders_are_not_looked_at() -> None:
    assert epochs_run(EarlyStopper("A", "eval"), [0.1, 0.1, 0.1], "A") == 0
    assert epochs_run(ThresholdStopper("A", "eval", 0.0), [0.1], "A") == 0


@pytest.mark.parametrize("make", [lambda: EarlyStopper("A", "evl"), lambda: ThresholdStopper("A", "evl", 0.5)])
def test_a_label_that_nothing_has_is_a_warning(run: Any, make_loader: Any, make: Any) -> None:
    with pytest.warns(UserWarning, match="reads metrics of 'evl', .* one of 'train', 'eval'"):
        run(make(), eval_dataloader=make_loader(), max_duration="1ba").fit()


def test_with_a_patience_in_epochs_batches_are_not_looked_at() -> None:
    assert epochs_run(EarlyStopper("A", "train"), [0.1, 0.1, 0.1], "A", "batch_end") == 0
    assert epochs_run(ThresholdStopper("A", "train", 0.0), [0.1], "A", "batch_end") == 0
    assert epochs_run(EarlyStopper("A", "train", patience="1ba"), [0.1, 0.1, 0.1], "A", "batch_end") == 3
    assert epochs_run(ThresholdStopper("A", "train", 0.0, stop_on_batch=True), [0.1], "A", "batch_end") == 1


@pytest.mark.parametrize("make", [lambda: EarlyStopper("A", "train"), lambda: ThresholdStopper("A", "train", 0.5)])
def test_a_metric_that_is_not_there_or_no_number_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"`monitor` must be a metric of 'train', got 'A'. Known metrics: 'B'."):
        epochs_run(make(), [0.1], "B")
    with pytest.raises(ValueError, match=r"'A' has shape \(2,\). Average it"):
        epochs_run(make(), [torch.zeros(2)], "A")


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`comp` must be 'gt', 'greater', 'lt', 'less' or a function of two tensors"):
        EarlyStopper("A", "train", comp="best")
    with pytest.raises(ValueError, match="`comp` must be 'gt'"):
        ThresholdStopper("A", "train", 0.5, comp=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`min_delta` must not be negative"):
        EarlyStopper("A", "train", min_delta=-1)
    for patience in ("3sp", "0.1dur", -1):
        with pytest.raises(ValueError, match="`patience` must be a time in epochs or batches"):
            EarlyStopper("A", "train", patience=patience)


def test_an_int_is_a_patience_in_epochs() -> None:
    assert EarlyStopper("A", "train", patience=2).patience == "2ep"
    assert EarlyStopper("A", "train").patience.unit is TimeUnit.EPOCH


def test_the_best_value_and_its_time_survive_a_resume() -> None:
    before, after = EarlyStopper("A", "train", patience=3), EarlyStopper("A", "train", patience=3)
    after.load_state_dict(before.state_dict())
    assert after.best is after.best_occurred is None
    epochs_run(before, [0.5, 0.4], "A")
    after.load_state_dict(before.state_dict())

    assert after.best == torch.tensor(0.5)
    assert after.best_occurred == before.best_occurred == "1ep"
    # 0.45 would be an improvement on nothing; the run is in its 3rd, 4th and 5th epoch.
    state = State(torch.nn.Linear(1, 1), max_duration="99ep", dataloader=[0], callbacks=after)
    engine = Engine(state)
    assert before.best_occurred is not None
    state.timestamp = before.best_occurred.to_next_epoch()
    for _ in range(3):
        assert str(state.max_duration) == "99ep"
        state.train_metrics = {"A": Value(torch.tensor(0.45))}
        state.timestamp = state.timestamp.to_next_epoch()
        engine.run_event("epoch_end")
    assert state.max_duration == state.timestamp.batch


def test_a_new_run_forgets_the_old_one(run: Any) -> None:
    stopper = EarlyStopper("MulticlassAccuracy", "train")
    epochs_run(stopper, [0.5])
    run(stopper)
    assert stopper.best is stopper.best_occurred is None


@pytest.mark.parametrize(
    ("comp", "threshold", "stopped"), [(None, 0.35, 3), (None, 0.4, 4), ("less", 0.15, 1), (operator.ge, 0.2, 2)]
)
def test_training_ends_when_the_threshold_is_passed(comp: Any, threshold: float, stopped: int) -> None:
    assert epochs_run(ThresholdStopper("A", "train", threshold, comp=comp), [0.1, 0.2, 0.4, 0.41], "A") == stopped


@pytest.mark.parametrize(("label", "unit"), [("train", "ep"), ("eval", "ep"), ("train", "ba"), ("eval", "ba")])
def test_a_run_ends_at_the_threshold(run: Any, make_loader: Any, label: str, unit: str) -> None:
    stopper = ThresholdStopper("MulticlassAccuracy", label, 0.55, stop_on_batch=unit == "ba")
    evaluation = {"eval_dataloader": make_loader(), "eval_interval": f"1{unit}"} if label == "eval" else {}
    done = run([Sets(label, [0.1, 0.5, 0.5, 0.6], unit), stopper], max_duration="20ep", **evaluation).fit()
    assert done.state.timestamp.get(unit).value == 3


def test_they_act_at_no_other_events() -> None:
    for callback in (EarlyStopper("A", "train"), ThresholdStopper("A", "train", 0.5)):
        engine = Engine(State(torch.nn.Linear(1, 1), max_duration="1ep", dataloader=[0], callbacks=callback))
        for event in Event:
            if event not in (Event.EVAL_END, Event.EPOCH_END):
                engine.run_event(event)
        engine.close()
