"""`SWA` in runs of several epochs, with the engine."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import SWALR, AveragedModel

from composer.algorithms.swa import SWA
from composer.algorithms.warnings import NoEffectWarning, NotIntendedUseWarning
from composer.core import AVERAGES_WEIGHTS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger
from composer.testing import deep_compare

BATCHES = 3  # in an epoch


def start(algorithm: SWA, scheduled: bool = False, dtype: torch.dtype = torch.float64, **options: Any) -> State:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step)) if scheduled else None
    state = State(
        model=model,
        max_duration="10ep",
        dataloader=[0] * BATCHES,
        optimizers=optimizer,
        schedulers=scheduler,
        algorithms=algorithm,
        **options,
    )
    Engine(state).run_event("init")
    return state


def train(state: State, epochs: int, seen: list[Any] | None = None) -> list[float]:
    """Batches depend on the time only. `seen` takes the weights and the learning rate after every epoch's training.

    Returns the learning rate of every batch.
    """
    used = []
    engine = Engine(state)
    engine.run_event("fit_start")
    optimizer, weight = state.optimizers[0], next(state.model.parameters())
    for _ in range(epochs):
        for _ in range(BATCHES):
            generator = torch.Generator().manual_seed(int(state.timestamp.batch))
            optimizer.zero_grad()
            x = torch.randn(5, 3, generator=generator, dtype=torch.float64).to(weight.dtype)
            state.model(x).square().mean().mul(0.1).backward()
            used.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            for scheduler in state.schedulers:
                scheduler.step()
            state.timestamp = state.timestamp.to_next_batch()
            before = copy.deepcopy(state.model.state_dict())
            engine.run_event("batch_end")
        state.timestamp = state.timestamp.to_next_epoch()
        engine.run_event("epoch_end")
        if seen is not None:
            seen.append((before, optimizer.param_groups[0]["lr"]))
    return used


def weights_of(state: State) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in state.model.parameters()]


def test_late_weights_are_averaged_and_put_into_the_model() -> None:
    """As torch averages them; here after epochs 5, 6, 7 and 8, of 10."""
    state = start(SWA(swa_start="0.5dur", swa_end="0.75dur"))
    expected = AveragedModel(state.model)
    addresses = [parameter.data_ptr() for parameter in state.model.parameters()]
    seen: list[Any] = []
    train(state, 8, seen)
    for weights, _ in seen[4:]:
        other = copy.deepcopy(state.model)
        other.load_state_dict(weights)
        expected.update_parameters(other)

    for ours, theirs in zip(state.model.parameters(), expected.module.parameters(), strict=True):
        torch.testing.assert_close(theirs, ours)
    assert addresses == [parameter.data_ptr() for parameter in state.model.parameters()]
    assert torch.equal(seen[-1][0]["1.running_mean"], state.model[1].running_mean)  # type: ignore[index,arg-type,union-attr]


def test_training_goes_on_from_the_average() -> None:
    state = start(SWA(swa_start="0.5dur", swa_end="0.75dur"))
    train(state, 8)
    average = copy.deepcopy(state.model)
    train(state, 1)

    assert state.algorithms[0].swa_completed  # type: ignore[attr-defined]
    assert not torch.equal(average[0].weight, state.model[0].weight)  # type: ignore[index,union-attr]
    assert not torch.equal(average[1].running_mean, state.model[1].running_mean)  # type: ignore[index,union-attr]


def test_before_the_start_and_until_the_end_training_is_not_touched() -> None:
    with_swa, without = start(SWA("0.5dur", "0.9dur")), start(SWA("0.98dur", "0.99dur"))
    train(with_swa, 8)
    train(without, 8)

    deep_compare(without.model.state_dict(), with_swa.model.state_dict())
    assert 4 == with_swa.algorithms[0].num_averaged  # type: ignore[attr-defined]
    assert without.algorithms[0].swa_model is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(("interval", "expected"), [("1ep", 5), ("2ep", 3), ("1ba", 12), ("2ba", 6), ("5ba", 3)])
def test_intervals_count_from_the_start(interval: str, expected: int) -> None:
    """From the end of epoch 4, at which no batch ends any more, to that of epoch 8, with 12 batches between them."""
    swa = SWA("4ep", "9ep", interval)
    train(start(swa), 8)

    assert expected == swa.num_averaged


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_of_narrow_weights_are_wide(dtype: torch.dtype) -> None:
    swa = SWA("0.1dur", "0.9dur")
    state = start(swa)
    state.model.to(dtype)
    for i in range(1, 9):
        torch.nn.init.constant_(next(state.model.parameters()), 1 + 2.0 ** (-7) * i)
        state.timestamp = state.timestamp.copy(epoch=i)
        swa.apply(Event.EPOCH_END, state, Logger(state))
    assert swa.swa_model is not None
    average = swa.swa_model.named_parameters_dict["0.weight"]

    assert average.dtype is torch.float32
    torch.testing.assert_close(torch.full((4, 3), 1 + 2.0 ** (-7) * 4.5), average)


@pytest.mark.parametrize("strategy", ["linear", "Cosine"])
@pytest.mark.parametrize("swa_lr", [0.5, 0.0])
def test_the_learning_rate_follows_the_strategy(strategy: str, swa_lr: float) -> None:
    """As torch's `SWALR`, which nothing disturbs, takes it there."""
    swa = SWA("3ep", "9ep", "1ep", True, strategy, 4, swa_lr)
    state, seen = start(swa), []  # type: ignore[var-annotated]
    train(state, 8, seen)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.1)
    expected, scheduler = [0.1, 0.1], SWALR(optimizer, swa_lr, 4, swa.anneal_strategy)  # type: ignore[arg-type]
    for _ in range(6):
        optimizer.step()
        scheduler.step()
        expected.append(optimizer.param_groups[0]["lr"])

    assert pytest.approx(expected) == [lr for _, lr in seen]


def test_the_runs_scheduler_does_not_undo_it() -> None:
    """It steps after every batch. Averaging is from the end of epoch 3 to that of epoch 6."""
    state = start(SWA("3ep", "6ep", schedule_swa_lr=True, anneal_steps=2, swa_lr=0.5), scheduled=True)
    used = train(state, 7)
    scheduled = [0.1 / (1 + batch) for batch in range(7 * BATCHES)]
    begin = scheduled[9]

    assert pytest.approx([*scheduled[:9], *[begin + (0.5 - begin) / 2] * 3, *[0.5] * 6, *scheduled[18:]]) == used


def test_without_a_scheduler_and_a_learning_rate_it_stays() -> None:
    state, seen = start(SWA("3ep", "9ep", schedule_swa_lr=True, anneal_steps=2)), []  # type: ignore[var-annotated]
    train(state, 9, seen)

    assert [0.1] * 9 == [lr for _, lr in seen]


def test_a_learning_rate_in_a_tensor_is_changed_in_place() -> None:
    state = start(SWA("1ep", "9ep", schedule_swa_lr=True, anneal_steps=1, swa_lr=0.5))
    rate = state.optimizers[0].param_groups[0]["lr"] = torch.tensor(0.1)
    train(state, 2)

    assert rate is state.optimizers[0].param_groups[0]["lr"]
    assert 0.5 == rate


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("interval", ["1ep", "2ba"])
@pytest.mark.parametrize("at", [2, 4, 6, 8])
def test_resuming_after_any_epoch_is_exact(at: int, interval: str, scheduled: bool) -> None:
    def make() -> State:
        swa = SWA("3ep", "7ep", interval, schedule_swa_lr=scheduled, anneal_steps=3, swa_lr=0.3)
        return start(swa, scheduled)

    expected = make()
    train(expected, 9)
    begun = make()
    train(begun, at)
    saved = copy.deepcopy(begun.state_dict())
    resumed = make()
    resumed.load_state_dict(saved)
    train(resumed, 9 - at)

    for name in ("model", "optimizers", "schedulers", "algorithms"):
        deep_compare(expected.state_dict()[name], resumed.state_dict()[name])


def test_loaded_averages_are_copies() -> None:
    swa, other = SWA("1ep", "9ep"), SWA("1ep", "9ep")
    state = start(swa)
    train(state, 2)
    other.load_state_dict(swa.state_dict())
    before = copy.deepcopy(other.state_dict())
    train(state, 2)

    deep_compare(before, other.state_dict())


def test_the_state_dict_has_the_layout_of_torch() -> None:
    swa = SWA("1ep", "9ep")
    state = start(swa)
    train(state, 2)
    saved = swa.state_dict()["swa_model"]
    theirs = AveragedModel(state.model)
    theirs.load_state_dict(saved, strict=False)

    assert {name for name, _ in theirs.named_parameters()} | {"n_averaged"} == set(saved)
    assert 2 == theirs.n_averaged


def test_a_new_run_starts_with_an_empty_average() -> None:
    swa = SWA("1ep", "2ep")
    train(start(swa), 3)
    assert swa.swa_completed
    assert swa.num_averaged == 2
    start(swa)

    assert not swa.swa_completed
    assert swa.swa_model is None
    assert swa.num_averaged == 0


def test_an_average_at_the_very_end_raises_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(start(SWA("0.5dur", "0.97dur")), 10)
    assert "batch norm statistics do not match it" in caplog.text
    with caplog.at_level(logging.WARNING):
        SWA(swa_end="1dur")
    assert "`swa_end` is the end of the run" in caplog.text


def test_scheduling_needs_one_learning_rate() -> None:
    state = start(SWA(schedule_swa_lr=True), scheduled=True)
    state.schedulers = [*state.schedulers, *state.schedulers]
    with pytest.raises(RuntimeError, match=r"one scheduler per optimizer, got 2 for 1\. Use `schedule_swa_lr=False`"):
        train(state, 1)
    state.schedulers = []
    state.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.zeros(()))], "lr": 0.5})
    with pytest.raises(RuntimeError, match=r"one learning rate for all groups, got \[0\.1, 0\.5\]"):
        train(state, 1)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # `train` steps the first optimizer
def test_several_optimizers_follow_one_schedule_and_return_to_their_own() -> None:
    state = start(SWA("1ep", "3ep", update_interval="1ep", schedule_swa_lr=True, swa_lr=0.5, anneal_steps=1))
    parameters = list(state.model.parameters())
    state.optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:2], parameters[2:])]
    state.schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) for optimizer in state.optimizers
    ]
    rates: list[list[float]] = []
    for _ in range(4):
        train(state, 1)
        rates.append([optimizer.param_groups[0]["lr"] for optimizer in state.optimizers])

    assert [0.5, 0.5] in rates
    assert [0.1, 0.1] == rates[-1]


class Averages(Algorithm):
    events = frozenset({Event.BATCH_END})
    placement = Placement(provides={AVERAGES_WEIGHTS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        pass


def test_another_average_is_discouraged() -> None:
    state = State(model=torch.nn.Linear(1, 1))
    with pytest.warns(NotIntendedUseWarning, match="SWA"):
        Engine(state, algorithms=[SWA(), Averages()])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"swa_start": "1ep"}, r"must have the same unit, got '1ep' and '0\.97dur'"),
        ({"swa_start": "1ba", "swa_end": "2ba"}, r"must be in 'dur' or 'ep', got '1ba'"),
        ({"update_interval": "0.1dur"}, r"`update_interval` must be in 'ba' or 'ep', got '0\.1dur'"),
        ({"update_interval": "0ba"}, r"`update_interval` must be at least 1, got '0ba'"),
        ({"swa_start": "0.97dur"}, r"`swa_start` must be before `swa_end`"),
        ({"swa_end": "1.2dur"}, r"`swa_end` must be from '0dur' to '1dur', the end of the run, got '1\.2dur'"),
        ({"anneal_steps": 0}, r"`anneal_steps` must be positive, got 0"),
        ({"anneal_strategy": "steps"}, r"`anneal_strategy` must be 'linear' or 'cos', got 'steps'"),
        ({"swa_lr": -1.0}, r"`swa_lr` must not be negative, got -1\.0"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SWA(**arguments)


def test_strategies_have_several_names() -> None:
    assert ["linear", "linear", "cos", "cos"] == [
        SWA(anneal_strategy=name).anneal_strategy for name in ("LINEAR", "lin", "cos", "cosine")
    ]


def test_once_the_average_is_in_the_model_training_goes_on_undisturbed() -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    swa = SWA(swa_start="0.1dur", swa_end="0.5dur", update_interval="1ba")
    state = State(model=model, max_duration="8ba", dataloader=[0] * 8, algorithms=swa)
    engine = Engine(state)
    engine.run_event("init")
    engine.run_event("fit_start")
    found = []
    for batch in range(1, 9):
        torch.nn.init.constant_(model.weight, batch)
        state.timestamp = state.timestamp.to_next_batch(samples=1)
        engine.run_event("batch_end")
        found.append(model.weight.item())

    assert [1.0, 2.0, 3.0, 2.5, 5.0, 6.0, 7.0, 8.0] == found


def end_fit(state: State, batches: int) -> None:
    """Train so many batches of an epoch that is not finished, without changing a weight, and end."""
    for _ in range(batches):
        state.timestamp = state.timestamp.to_next_batch()
    Engine(state).run_event("fit_end")


def test_a_run_that_ends_in_mid_epoch_ends_with_the_average() -> None:
    """27 of 28 batches are before `swa_end`, and there is no other end of an epoch."""
    state = start(SWA("0.5dur", "0.97dur"))
    state.max_duration = "28ba"  # type: ignore[assignment]
    train(state, 9)
    swa: Any = state.algorithms[0]
    averages = [average.clone() for average in swa.swa_model.named_parameters_dict.values()]
    assert not all(torch.equal(*each) for each in zip(averages, weights_of(state), strict=True))
    end_fit(state, batches=1)

    assert swa.swa_completed
    assert all(torch.equal(*each) for each in zip(averages, weights_of(state), strict=True))


def test_weights_trained_after_the_average_stay_at_the_end() -> None:
    state = start(SWA("0.5dur", "0.75dur"))
    train(state, 10)
    before = copy.deepcopy(state.model.state_dict())
    end_fit(state, batches=0)

    deep_compare(before, state.model.state_dict())


@pytest.mark.parametrize(
    ("swa", "max_duration", "epochs", "batches", "message"),
    [
        (SWA("0.5dur", "0.97dur"), "10ep", 8, 0, "`fit` ended before `swa_end`, which is '0.97dur'"),
        (SWA("5ep", "9ep"), "8ep", 8, 0, "`fit` ended before `swa_end`, which is '9ep'"),
        (SWA("0.5dur", "0.97dur"), "10ep", 3, 0, ""),  # the user may train on
        (SWA("2ep", "9ep"), "3ep", 1, 0, ""),
    ],
)
def test_a_fit_that_ends_without_the_average_warns(
    swa: SWA, max_duration: str, epochs: int, batches: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    state = start(copy.deepcopy(swa))
    state.max_duration = max_duration  # type: ignore[assignment]
    train(state, epochs)
    before = copy.deepcopy(state.model.state_dict())
    caplog.clear()
    end_fit(state, batches)

    deep_compare(before, state.model.state_dict())
    assert message in caplog.text
    assert bool(message) == bool(caplog.records)


@pytest.mark.parametrize(("epochs", "batches", "updates"), [(1, 0, 1), (0, 2, 0)])
def test_a_run_with_fewer_than_two_updates_warns(epochs: int, batches: int, updates: int) -> None:
    state = start(SWA("0.5dur", "0.97dur"))
    state.max_duration = "1ep" if epochs else "2ba"  # type: ignore[assignment]
    with pytest.warns(NoEffectWarning, match=rf"`SWA` averaged nothing: {updates} updates, .* \(1ep\)"):  # noqa: PT031
        train(state, epochs)
        end_fit(state, batches)


def test_frozen_parameters_are_not_averaged() -> None:
    state = start(SWA("0.1dur", "0.5dur"))
    frozen: Any = state.model[2]  # type: ignore[index]
    frozen.requires_grad_(False)
    for epoch in range(8):
        torch.nn.init.constant_(frozen.weight, epoch)  # as the vectors of a spectral norm, which may be parameters
        train(state, 1)

    assert torch.equal(torch.full_like(frozen.weight, 7), frozen.weight)


def test_a_start_after_the_end_of_the_run_raises_a_warning() -> None:
    state = State(model=torch.nn.Linear(1, 1), rank_zero_seed=0, max_duration="2ep")
    with pytest.warns(UserWarning, match="does nothing in this `fit`: `swa_start` is '50ep', .* ends at '2ep'"):
        SWA(swa_start="50ep", swa_end="60ep").apply(Event.FIT_START, state, Logger(state))
