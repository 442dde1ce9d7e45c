"""`EMA` at its events, in a loop with evaluations and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer.algorithms.ema import EMA, EMAParameters
from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import (
    AVERAGES_WEIGHTS,
    CHANGES_MEMORY_FORMAT,
    REPLACES_CONVS,
    Algorithm,
    Callback,
    ConflictError,
    Engine,
    Event,
    Placement,
    State,
    Time,
)
from composer.core.logging import Logger
from composer.testing import SimpleConvModel, deep_compare

EPOCHS, BATCHES = 2, 3


class Saver(Callback):
    """Saves a copy of the state and of the weights of the model at each checkpoint."""

    def __init__(self, save_interval: Callable[[State, Event], bool] | str) -> None:
        self.save_interval = save_interval
        self.saved: list[dict[str, Any]] = []

    def batch_checkpoint(self, state: State, logger: Any) -> None:
        self._save(state, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Any) -> None:
        self._save(state, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Any) -> None:
        self._save(state, Event.ITERATION_CHECKPOINT)

    def _save(self, state: State, event: Event) -> None:
        if callable(self.save_interval) and self.save_interval(state, event):
            self.saved.append(copy.deepcopy(state.state_dict()))


class Watcher(Callback):
    """Notes at every event whether the averages are in the model."""

    def __init__(self, ema: EMA) -> None:
        self.ema = ema
        self.seen: list[tuple[str, bool]] = []

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        self.seen.append((event.value, self.ema.ema_weights_active))


class Run:
    """A training loop of `EPOCHS` epochs of `BATCHES` batches, with an evaluation after each."""

    def __init__(self, *algorithms: Algorithm, callbacks: Any = ()) -> None:
        generator = torch.Generator().manual_seed(3)
        self.batches = [
            (torch.randn(4, 3, 8, 8, generator=generator), torch.tensor([0, 1, 1, 0])) for _ in range(BATCHES)
        ]
        self.model = SimpleConvModel(norm="batch")
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.state = State(
            model=self.model,
            max_duration=f"{EPOCHS}ep",
            dataloader=self.batches,
            optimizers=optimizer,
            algorithms=algorithms,
            callbacks=callbacks,
        )
        self.engine = Engine(self.state)
        self.weights: list[torch.Tensor] = []  # of the first layer, after each batch
        self.evaluated: list[torch.Tensor] = []  # of the first layer, in each evaluation
        for event in ("init", "before_load", "after_load"):
            self.engine.run_event(event)

    def fit(self) -> Run:
        state, event = self.state, self.engine.run_event
        event("fit_start")
        while state.timestamp < state.max_duration:
            if state.timestamp.batch_in_epoch == "0ba":
                event("epoch_start")
            for batch in self.batches[int(state.timestamp.batch_in_epoch) :]:
                self._batch(batch)
            self._advance(state.timestamp.to_next_epoch())
            event("epoch_end")
            self._evaluate()
            event("epoch_checkpoint")
            event("iteration_end")
            event("iteration_checkpoint")
        event("fit_end")
        return self

    def _batch(self, batch: Any) -> None:
        state, event = self.state, self.engine.run_event
        event("before_dataloader")
        state.batch = batch
        event("after_dataloader")
        event("batch_start")
        state.optimizers.zero_grad()
        self.model.loss(self.model(batch), batch).backward()
        state.optimizers.step()
        self.weights.append(self.first_layer())
        self._advance(state.timestamp.to_next_batch(samples=4))
        event("batch_end")
        self._evaluate()
        event("batch_checkpoint")

    def _evaluate(self) -> None:
        self.engine.run_event("eval_start")
        self.evaluated.append(self.first_layer())
        self.engine.run_event("eval_end")

    def _advance(self, timestamp: Any) -> None:
        self.state.previous_timestamp, self.state.timestamp = self.state.timestamp, timestamp

    def first_layer(self) -> torch.Tensor:
        return self.model.conv1.weight.detach().clone()


def average_of(weights: list[torch.Tensor], smoothing: float, warmup: bool = True) -> torch.Tensor:
    average = weights[0].double()
    for k, weight in enumerate(weights[1:], start=1):
        kept = min(smoothing, k / (k + 9)) if warmup else smoothing
        average = kept * average + (1 - kept) * weight.double()
    return average.float()


def stored(ema: EMA) -> torch.Tensor:
    assert ema.ema_model is not None
    return ema.ema_model.named_parameters_dict["module.0.weight"]


def every_batch(state: State, event: Event) -> bool:
    return event is Event.BATCH_CHECKPOINT


def every_epoch(state: State, event: Event) -> bool:
    return event is Event.EPOCH_CHECKPOINT


# ---- arguments ----


@given(half_life=st.integers(1, 10**6), update_interval=st.integers(1, 1000), unit=st.sampled_from(["ba", "ep"]))
def test_after_a_half_life_old_weights_count_half(half_life: int, update_interval: int, unit: str) -> None:
    ema = EMA(half_life=f"{half_life}{unit}", update_interval=f"{update_interval}{unit}")

    assert ema.smoothing ** (half_life / update_interval) == pytest.approx(0.5)


def test_the_defaults() -> None:
    ema = EMA()

    assert Time(1, "ba") == ema.update_interval
    assert Event.BATCH_END is ema.update_event
    assert 2 ** (-1 / 1000) == ema.smoothing
    assert Time(0.0, "dur") == ema.ema_start
    assert (None, False, False) == (ema.ema_model, ema.ema_started, ema.ema_weights_active)


def test_the_unit_of_the_half_life_decides_when_to_update() -> None:
    ema = EMA(half_life="3ep")

    assert Time(1, "ep") == ema.update_interval
    assert Event.EPOCH_END is ema.update_event


def test_a_smoothing_alone_updates_every_batch() -> None:
    ema = EMA(half_life=None, smoothing=0.9)

    assert Time(1, "ba") == ema.update_interval
    assert 0.9 == ema.smoothing
    assert Event.EPOCH_END is EMA(half_life=None, smoothing=0.9, update_interval="2ep").update_event


def test_a_smoothing_of_0_averages_nothing() -> None:
    run = Run(ema := EMA(half_life=None, smoothing=0.0)).fit()

    assert torch.equal(run.weights[-1], stored(ema))


def test_a_half_life_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match="`half_life` must be at least 1, got '0ba'"):
        EMA(half_life="0ba")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"half_life": None}, "Exactly one of `half_life` and `smoothing` must be given, got None and None"),
        ({"smoothing": 0.9}, "Exactly one .* got '1000ba' and 0.9. Pass `half_life=None` with a `smoothing`"),
        (
            {"half_life": "9ba", "update_interval": 1},
            "`update_interval` must be a time string, a `Time` or None",
        ),
        ({"half_life": "9ba", "update_interval": "1ep"}, "must have the same unit, got '9ba' and '1ep'"),
        ({"half_life": "9sp"}, "must be in 'ba' or 'ep', got '1sp'"),
        ({"half_life": None, "smoothing": 0.9, "update_interval": "1tok"}, "must be in 'ba' or 'ep', got '1tok'"),
        ({"half_life": "-1ba"}, "`half_life` must be at least 1, got '-1ba'"),
        ({"update_interval": "0ba"}, "`update_interval` must be at least 1, got '0ba'"),
        ({"ema_start": "-1ba"}, "`ema_start` must be at least 0, got '-1ba'"),
        ({"ema_start": "1.5dur"}, "`ema_start` must be from '0dur' to '1dur', the end of the run, got '1.5dur'"),
        ({"half_life": None, "smoothing": 1.1}, r"`smoothing` must be in \[0, 1\], got 1.1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EMA(**arguments)


def test_a_start_after_the_end_of_the_run_raises_a_warning() -> None:
    ema, state = EMA(ema_start="50ba"), State(model=torch.nn.Linear(1, 1), max_duration="16ba")
    ema.apply(Event.INIT, state, Logger(state))
    assert ema.match(Event.FIT_START, state)
    with pytest.warns(UserWarning, match="`EMA` does nothing in this `fit`: `ema_start` is '50ba', .* ends at '16ba'"):
        ema.apply(Event.FIT_START, state, Logger(state))


@pytest.mark.parametrize("argument", ["half_life", "ema_start"])
@pytest.mark.parametrize("value", [5, 0.5])
def test_a_time_has_a_unit(argument: str, value: float) -> None:
    with pytest.raises(TypeError, match=f"`{argument}` must be a time string or a `Time`, got {value}"):
        EMA(**{argument: value})  # type: ignore[arg-type]


def test_times_may_be_objects() -> None:
    texts = EMA(half_life="100ba", ema_start="0.5dur", update_interval="10ba")
    times = EMA(half_life=Time(100, "ba"), ema_start=Time(0.5, "dur"), update_interval=Time(10, "ba"))

    assert repr(texts) == repr(times)
    assert texts.smoothing == times.smoothing
    assert (texts.ema_start, texts.update_interval) == (times.ema_start, times.update_interval)


def test_the_representation_is_the_constructor_call() -> None:
    expected = "EMA(half_life=None,smoothing=0.9,ema_start='0.5dur',update_interval='2ba',warmup=True,blend=1.0)"

    assert expected == repr(EMA(half_life=None, smoothing=0.9, ema_start="0.5dur", update_interval="2ba"))


# ---- the average ----


@pytest.mark.parametrize(
    ("ema_start", "first"), [("0.0dur", 1), ("1ba", 1), ("3ba", 3), ("0.5dur", 3), ("1ep", 4), ("13sp", 4)]
)
def test_the_average_starts_at_the_first_update_after_its_start(ema_start: str, first: int) -> None:
    """The first epoch is over only after the EPOCH_END that follows batch 3."""
    run = Run(EMA(half_life="2ba", ema_start=ema_start)).fit()

    torch.testing.assert_close(average_of(run.weights[first - 1 :], 2**-0.5), run.first_layer())


def test_updates_are_made_every_interval() -> None:
    run = Run(EMA(half_life="2ba", update_interval="2ba")).fit()

    torch.testing.assert_close(average_of(run.weights[1::2], 0.5), run.first_layer())


@pytest.mark.parametrize("arguments", [{}, {"half_life": "1ep"}, {"half_life": None, "smoothing": 0.9999}])
def test_the_beginning_of_a_short_run_hardly_counts(arguments: dict[str, Any]) -> None:
    """A half-life that is much longer than the run does not keep the untrained weights."""
    model = torch.nn.Linear(1, 1, bias=False)
    state = State(model=model, max_duration="80ba", dataloader=[0], algorithms=EMA(**arguments))
    engine = Engine(state)
    engine.run_event("init")
    engine.run_event("fit_start")
    for batch in range(80):
        torch.nn.init.constant_(model.weight, float(batch < 20))
        state.timestamp = state.timestamp.to_next_batch().to_next_epoch()
        engine.run_event("batch_end")
        engine.run_event("epoch_end")
    engine.run_event("fit_end")

    assert model.weight.item() < 1e-3


def test_without_warmup_the_half_life_holds_from_the_beginning() -> None:
    run = Run(EMA(half_life="1ba", warmup=False)).fit()

    torch.testing.assert_close(average_of(run.weights, 0.5, warmup=False), run.first_layer())


@pytest.mark.parametrize(
    ("half_life", "end", "share"),
    [("1000ba", "80ba", "95%"), ("3ba", "2ep", "31%"), ("3ep", "9ba", "63%"), ("20ba", "60ba", "13%")],
)
def test_first_weights_that_stay_heavy_without_warmup_raise_a_warning(half_life: str, end: str, share: str) -> None:
    run = Run(EMA(half_life=half_life, warmup=False))
    run.state.max_duration = end
    with pytest.warns(NotIntendedUseWarning, match=f"first weights weigh {share} at the end of the run, .* '{end}'"):
        run.engine.run_event("fit_start")


@pytest.mark.parametrize(("half_life", "end"), [("20ba", "80ba"), ("1ep", "5ep"), ("1000ba", "9sp")])
def test_first_weights_that_fade_or_a_run_of_unknown_length_raise_no_warning(half_life: str, end: str) -> None:
    run = Run(EMA(half_life=half_life, warmup=False))
    run.state.max_duration = end
    run.engine.run_event("fit_start")


def test_updates_can_be_made_every_epoch() -> None:
    run = Run(EMA(half_life="1ep")).fit()

    torch.testing.assert_close(average_of([run.weights[2], run.weights[5]], 0.5), run.first_layer())


def test_buffers_are_averaged_and_counters_copied() -> None:
    run = Run(ema := EMA(half_life="2ba")).fit()
    assert ema.ema_model is not None
    counter = ema.ema_model.named_buffers_dict["module.2.num_batches_tracked"]

    assert EPOCHS * BATCHES == counter.item()
    assert not torch.equal(run.model.module[2].running_var, ema.ema_model.named_buffers_dict["module.2.running_var"])


# ---- swapping ----


def test_evaluations_see_the_averages() -> None:
    run = Run(EMA(half_life="2ba")).fit()
    last_batch, last_epoch = run.evaluated[-2:]

    torch.testing.assert_close(average_of(run.weights, 2**-0.5), last_batch)
    assert torch.equal(last_batch, last_epoch)


def test_evaluations_before_the_start_see_the_training_weights() -> None:
    run = Run(EMA(half_life="2ba", ema_start="3ba")).fit()

    assert torch.equal(run.weights[0], run.evaluated[0])
    assert torch.equal(run.weights[1], run.evaluated[1])


@pytest.mark.parametrize("half_life", ["2ba", "1ep"])
def test_training_does_not_change_bit_for_bit(half_life: str) -> None:
    plain = Run().fit()
    averaged = Run(ema := EMA(half_life=half_life), callbacks=[Saver(every_batch)]).fit()
    averages = copy.deepcopy(averaged.model.state_dict())
    ema.get_training_model(averaged.model)

    assert any(not torch.equal(averages[name], value) for name, value in averaged.model.state_dict().items())
    deep_compare(plain.state.state_dict()["optimizers"], averaged.state.state_dict()["optimizers"])
    deep_compare(plain.model.state_dict(), averaged.model.state_dict())
    deep_compare(plain.weights, averaged.weights)


def test_a_checkpoint_holds_the_averages() -> None:
    ema, saver = EMA(half_life="2ba"), Saver(every_epoch)
    run = Run(ema, callbacks=[saver]).fit()
    saved = saver.saved[-1]

    assert EPOCHS == len(saver.saved)
    torch.testing.assert_close(average_of(run.weights, 2**-0.5), saved["model"]["conv1.weight"])
    assert saved["algorithms"][0][1]["ema_weights_active"]


def test_the_averages_are_in_the_model_only_at_the_right_events() -> None:
    ema = EMA(half_life="2ba")
    watcher = Watcher(ema)
    Run(ema, callbacks=[Saver(lambda state, event: event in ema.checkpoint_events), watcher]).fit()
    active = {event for event, with_averages in watcher.seen if with_averages}

    assert {"eval_start", "batch_checkpoint", "epoch_checkpoint", "iteration_checkpoint", "fit_end"} == active


def test_a_fit_ends_with_the_averages_and_another_continues_from_the_training_weights() -> None:
    whole, run = Run(EMA(half_life="2ba")), Run(EMA(half_life="2ba"))
    run.state.max_duration = f"{EPOCHS * BATCHES - 2}ba"
    run.fit()
    torch.testing.assert_close(average_of(run.weights, 2**-0.5), run.first_layer())
    run._evaluate()
    torch.testing.assert_close(average_of(run.weights, 2**-0.5), run.first_layer())
    run.state.max_duration = f"{EPOCHS}ep"
    run.fit()
    whole.fit()

    deep_compare(whole.weights, run.weights)
    deep_compare(whole.model.state_dict(), run.model.state_dict())


def set_by_loading(model: torch.nn.Module, names: set[str]) -> None:
    saved = model.state_dict()
    model.load_state_dict({name: tensor + 1 if name in names else tensor for name, tensor in saved.items()})


def set_by_data(model: torch.nn.Module, names: set[str]) -> None:
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.data.add_(1)


def one_epoch_more(run: Run) -> dict[str, torch.Tensor]:
    """Train on, and return the weights that training began with."""
    begun = len(run.weights)
    for group in run.state.optimizers[0].param_groups:
        group.update(lr=0.0)
    run.state.max_duration = Time(int(run.state.timestamp.epoch) + 1, "ep")
    run.fit()
    assert len(run.weights) == begun + BATCHES
    return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


@pytest.mark.parametrize("change", [set_by_loading, set_by_data])
@pytest.mark.parametrize("evaluate", [False, True])
def test_weights_changed_between_two_fits_are_trained_on(change: Any, evaluate: bool, caplog: Any) -> None:
    run = Run(EMA(half_life="2ba")).fit()
    names = {name for name, _ in run.model.named_parameters()}
    change(run.model, names)
    current = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    if evaluate:
        run._evaluate()
    deep_compare(current, one_epoch_more(run))

    assert torch.equal(current["module.0.weight"], run.weights[-1])
    assert f"{len(names)} parameters (module.0.weight, " in caplog.text


@pytest.mark.parametrize("change", [set_by_loading, set_by_data])
def test_only_parameters_changed_between_two_fits_are_adopted(change: Any, caplog: Any) -> None:
    run = Run(ema := EMA(half_life="2ba")).fit()
    assert ema.ema_model is not None
    training = {name: tensor.clone() for name, tensor in ema.ema_model.named_parameters()}
    averages = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    last = list(averages)[-1]
    change(run.model, {last})
    run.engine.run_event("fit_start")

    for name, parameter in run.model.named_parameters():
        assert torch.equal(averages[name] + 1 if name == last else training[name], parameter)
    for name, average in ema.ema_model.named_parameters():
        assert torch.equal(averages[name] + 1 if name == last else averages[name], average)
    assert f"1 parameters ({last}) were changed" in caplog.text


def test_weights_that_were_only_moved_between_two_fits_are_not_changed(caplog: Any) -> None:
    whole, run = Run(EMA(half_life="2ba")), Run(EMA(half_life="2ba"))
    run.state.max_duration = "1ep"
    run.fit()
    run.model.load_state_dict(copy.deepcopy(run.model.state_dict()))
    run.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter in run.model.parameters():
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    for name, buffer in run.model.named_buffers():  # as an evaluation may
        if "running" in name:
            buffer.add_(1)
    run.state.max_duration = f"{EPOCHS}ep"
    run.fit()
    whole.fit()

    deep_compare(whole.weights, run.weights)
    deep_compare(dict(whole.model.named_parameters()), dict(run.model.named_parameters()))
    assert "changed" not in caplog.text


def test_weights_changed_after_a_checkpoint_was_loaded_are_trained_on() -> None:
    first = Run(EMA(half_life="2ba")).fit()
    saved = copy.deepcopy(first.state.state_dict())
    run = Run(EMA(half_life="2ba"))
    run.state.load_state_dict(saved)
    run.engine.run_event("after_load")
    set_by_data(run.model, {"module.0.weight"})
    current = run.first_layer()
    one_epoch_more(run)

    assert torch.equal(current, run.weights[0])


@pytest.mark.parametrize("event", ["before_dataloader", "batch_start", "epoch_start", "iteration_start", "fit_start"])
def test_whatever_comes_after_a_checkpoint_finds_the_training_weights(event: str) -> None:
    run = Run(ema := EMA(half_life="2ba"), callbacks=[Saver(every_batch)])
    run.engine.run_event("fit_start")
    for batch in run.batches[:2]:
        run._batch(batch)
    held = ema.ema_weights_active
    run.engine.run_event(event)

    assert held
    assert torch.equal(run.weights[-1], run.first_layer())


@pytest.mark.parametrize(
    "event",
    [
        Event.BEFORE_DATALOADER,
        Event.BATCH_START,
        Event.EPOCH_START,
        Event.ITERATION_START,
        Event.EPOCH_END,
        Event.ITERATION_END,
    ],
)
@pytest.mark.parametrize("checkpoint", [Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT])
def test_whatever_event_follows_a_checkpoint_finds_the_training_weights(checkpoint: Event, event: Event) -> None:
    """A custom loop need not announce all of them."""
    ema, model = EMA(half_life="1ba"), SimpleConvModel()
    state = State(
        model=model,
        max_duration="2ep",
        dataloader=[0],
        algorithms=ema,
        callbacks=Saver(lambda state, event: True),
    )
    engine = Engine(state)
    for each in (Event.INIT, Event.FIT_START, Event.BATCH_START):
        engine.run_event(each)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    state.timestamp = state.timestamp.to_next_batch(samples=4)
    engine.run_event(Event.BATCH_END)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    expected = copy.deepcopy(model.state_dict())
    engine.run_event(checkpoint)

    assert ema.ema_weights_active
    engine.run_event(event)
    assert not ema.ema_weights_active
    deep_compare(expected, model.state_dict())


def test_restoring_the_training_weights_between_two_updates_does_not_average() -> None:
    found = []
    for save_interval in (every_batch, ""):
        ema = EMA(half_life="2ep", update_interval="2ep")
        torch.manual_seed(0)
        run = Run(ema, callbacks=Saver(save_interval))
        run.state.max_duration = Time.from_timestring("3ep")  # the last of which is no second one
        run.fit()
        found.append(stored(ema))

    assert torch.equal(*found)


def test_the_averages_are_not_swapped_in_if_nothing_is_saved() -> None:
    ema = EMA(half_life="2ba")
    watcher = Watcher(ema)
    Run(ema, callbacks=[Saver(lambda state, event: False), Saver("1ep"), watcher]).fit()

    assert {"eval_start", "fit_end"} == {event for event, with_averages in watcher.seen if with_averages}


def test_after_a_checkpoint_the_average_follows_the_training_weights() -> None:
    """The averages are in the model when EPOCH_END comes, at which they are updated."""
    run = Run(EMA(half_life="1ep"), callbacks=[Saver(every_batch)]).fit()

    torch.testing.assert_close(average_of([run.weights[2], run.weights[5]], 0.5), run.first_layer())


def test_predictions_are_made_with_what_the_model_holds() -> None:
    run = Run(EMA(half_life="2ba"))
    run.engine.run_event("fit_start")
    run._batch(run.batches[0])
    run.engine.run_event("predict_start")
    assert torch.equal(run.weights[-1], run.first_layer())

    run = Run(EMA(half_life="2ba")).fit()
    run.engine.run_event("predict_start")
    torch.testing.assert_close(average_of(run.weights, 2**-0.5), run.first_layer())


def test_either_set_of_weights_can_be_written_into_a_model() -> None:
    run, other = Run(ema := EMA(half_life="2ba")).fit(), SimpleConvModel(norm="batch")
    run.engine.run_event("fit_start")

    assert other is ema.get_ema_model(other)
    assert torch.equal(stored(ema), other.conv1.weight)
    with pytest.raises(ValueError, match=r"holds its training weights already\. Use that model as it is"):
        ema.get_training_model(other)
    run.engine.run_event("eval_start")
    ema.get_training_model(other)
    assert torch.equal(run.weights[-1], other.conv1.weight)
    with pytest.raises(ValueError, match="The EMA weights are in the model of the run already"):
        ema.get_ema_model(other)


def test_averages_that_do_not_exist_cannot_be_written() -> None:
    with pytest.raises(RuntimeError, match=r"There are no averages yet\. Train beyond `ema_start`, which is '0\.0dur'"):
        EMA().get_ema_model(torch.nn.Linear(1, 1))


def test_a_second_run_starts_again() -> None:
    ema = EMA(half_life="2ba")
    first = Run(ema).fit()
    first.engine.close()
    expected = stored(ema).clone()
    second = Run(ema)
    assert not ema.ema_started
    second.fit()

    assert torch.equal(expected, stored(ema))


# ---- saving and loading ----


@pytest.mark.parametrize("half_life", ["2ba", "1ep"])
@pytest.mark.parametrize("when", [every_batch, every_epoch])
def test_a_run_resumed_from_any_checkpoint_continues_identically(half_life: str, when: Any) -> None:
    saver = Saver(when)
    expected = Run(EMA(half_life=half_life), callbacks=[saver]).fit()
    for saved in saver.saved[:-1]:
        resumed = Run(EMA(half_life=half_life), callbacks=[Saver(when)])
        resumed.state.load_state_dict(copy.deepcopy(saved))
        resumed.fit()

        deep_compare(expected.model.state_dict(), resumed.model.state_dict())
        deep_compare(expected.state.state_dict()["optimizers"], resumed.state.state_dict()["optimizers"])
        deep_compare(expected.state.algorithms[0].state_dict(), resumed.state.algorithms[0].state_dict())


def test_a_loaded_checkpoint_can_be_evaluated() -> None:
    saver = Saver(every_epoch)
    expected = Run(EMA(half_life="2ba"), callbacks=[saver]).fit()
    resumed = Run(EMA(half_life="2ba"))
    resumed.state.load_state_dict(saver.saved[-1])
    for _ in range(2):
        resumed._evaluate()

    assert torch.equal(expected.evaluated[-1], resumed.evaluated[0])
    assert torch.equal(expected.evaluated[-1], resumed.evaluated[1])
    assert torch.equal(expected.first_layer(), resumed.first_layer())


def test_the_layout_of_the_saved_state() -> None:
    Run(ema := EMA(half_life="2ba")).fit()
    saved = ema.state_dict()

    assert {"repr", "ema_model", "ema_weights_active", "ema_started", "num_updates"} == saved.keys()
    assert {"named_parameters_dict", "named_buffers_dict"} == saved["ema_model"].keys()


def test_the_state_can_be_saved_and_loaded_before_init() -> None:
    ema = EMA()
    expected = {"repr": repr(ema), "ema_model": None, "ema_weights_active": False, "ema_started": False}
    expected["num_updates"] = 0
    ema.load_state_dict(ema.state_dict())
    assert expected == ema.state_dict()

    Run(trained := EMA(half_life="2ba")).fit()
    ema.load_state_dict(trained.state_dict())
    assert torch.equal(stored(trained), stored(ema))


@pytest.mark.parametrize("active", [False, True])
def test_checkpoints_with_both_sets_of_weights_are_read(active: bool) -> None:
    """The format before version 0.13: the set of weights that the model does not hold is used."""
    training, average = SimpleConvModel(norm="batch"), SimpleConvModel(norm="batch", seed=1)
    Run(ema := EMA())
    old = {"training_model": training.state_dict(), "ema_model": average.state_dict()}
    ema.load_state_dict({**old, "ema_weights_active": active, "ema_started": True})

    assert torch.equal((training if active else average).conv1.weight, stored(ema))
    assert ema.ema_model is not None
    assert "module.2.running_var" in ema.ema_model.named_buffers_dict
    assert active == ema.ema_weights_active


def test_averages_saved_without_a_number_of_updates_continue_without_warmup() -> None:
    saver = Saver(every_batch)
    Run(EMA(half_life="2ba"), callbacks=[saver]).fit()
    saved = saver.saved[3]  # after 4 batches
    first = saved["model"]["module.0.weight"]
    del saved["algorithms"][0][1]["num_updates"]
    resumed = Run(EMA(half_life="2ba"))
    resumed.state.load_state_dict(saved)
    resumed.fit()

    assert EPOCHS * BATCHES - 4 == len(resumed.weights)
    torch.testing.assert_close(average_of([first, *resumed.weights], 2**-0.5, warmup=False), resumed.first_layer())


# ---- among other algorithms ----


class Surgery(Algorithm):
    """Replaces a layer at INIT, or changes the memory format."""

    events = frozenset({Event.INIT})

    def __init__(self, effect: str) -> None:
        self.effect = effect
        self.placement = Placement(provides={effect})

    def apply(self, event: Event, state: State, logger: Any) -> None:
        if self.effect == CHANGES_MEMORY_FORMAT:
            state.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        else:
            state.model.module[1] = torch.nn.Conv2d(8, 4, kernel_size=5)  # type: ignore[index,operator,union-attr]


@pytest.mark.parametrize("effect", [CHANGES_MEMORY_FORMAT, REPLACES_CONVS])
@pytest.mark.parametrize("ema_first", [False, True])
def test_the_averages_are_those_of_the_finished_model_in_either_order(effect: str, ema_first: bool) -> None:
    ema, surgery = EMA(), Surgery(effect)
    run = Run(*((ema, surgery) if ema_first else (surgery, ema)))
    assert ema.ema_model is not None

    for name, parameter in run.model.named_parameters():
        average = ema.ema_model.named_parameters_dict[name]
        assert (parameter.shape, parameter.stride()) == (average.shape, average.stride())


def test_two_averages_cannot_share_a_model() -> None:
    with pytest.raises(ConflictError, match=r"`EMA` .*Remove one of the two"):
        Run(EMA(), EMA(half_life="2ba"))


def test_other_averaging_is_discouraged() -> None:
    with pytest.warns(NotIntendedUseWarning, match="`EMA` should not be used together with `Surgery`"):
        Run(EMA(), Surgery(AVERAGES_WEIGHTS))


def test_averages_set_by_hand_are_used() -> None:
    """`apply` acts on its event, independently of `match`."""
    run = Run(ema := EMA(half_life=None, smoothing=0.5, warmup=False))
    ema.ema_model = EMAParameters(run.model)
    before = run.first_layer()
    with torch.no_grad():
        run.model.conv1.weight += 1
    for event in (Event.BATCH_END, Event.EVAL_START):
        ema.apply(event, run.state, run.engine.logger)

    torch.testing.assert_close(before + 0.5, run.first_layer())
