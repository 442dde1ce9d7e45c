"""`BatchSizeWarmup` at its events, with the engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from composer.algorithms.batch_size_warmup import BatchSizeWarmup, WarmupBatchSampler
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Engine, Event, State
from composer.loggers import LoggerDestination
from composer.testing import SimpleConvModel

DATASET = TensorDataset(torch.arange(40))


class Recorder(LoggerDestination):
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged.append(metrics)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(40))


def loader_of(batch_size: int = 16, **arguments: Any) -> DataLoader[Any]:
    return DataLoader(DATASET, batch_size=batch_size, **arguments)


def start(algorithm: BatchSizeWarmup, loader: Iterable[Any], max_duration: str = "4ep", **arguments: Any) -> Engine:
    state = State(
        model=SimpleConvModel(), max_duration=max_duration, dataloader=loader, algorithms=algorithm, **arguments
    )
    engine = Engine(state)
    engine.run_event(Event.FIT_START)
    return engine


def epoch(engine: Engine) -> list[int]:
    """Run an epoch; return the sizes of its batches."""
    state, loader = engine.state, engine.state.dataloader
    assert loader is not None
    engine.run_event(Event.EPOCH_START)
    sizes = [len(batch) for (batch,) in loader]
    for size in sizes:
        state.timestamp = state.timestamp.to_next_batch(samples=size)
    state.timestamp = state.timestamp.to_next_epoch()
    return sizes


def test_the_warmup_goes_on_in_the_next_epoch() -> None:
    engine = start(BatchSizeWarmup(2, duration="60sp", multiple_of=2, shape="linear"), loader_of())

    first, second, third = epoch(engine), epoch(engine), epoch(engine)

    assert first == [2, 2, 2, 2, 2, 4, 4, 6, 6, 8, 2]
    assert second == [10, 12, 16, 2]
    assert third == [16, 16, 8]


def test_the_length_of_each_epoch_is_known_when_it_begins() -> None:
    engine = start(BatchSizeWarmup(2, duration="60sp"), loader_of())
    lengths = []
    for _ in range(3):
        engine.run_event(Event.EPOCH_START)
        lengths.append(engine.state.dataloader_len)
        assert len(epoch(engine)) == lengths[-1]

    assert lengths[0] > lengths[2] == 3


def test_after_the_run_the_loader_makes_batches_of_full_size() -> None:
    loader = loader_of()
    engine = start(BatchSizeWarmup(2, duration="1dur"), loader)
    epoch(engine)
    engine.run_event(Event.FIT_END)

    assert [len(batch) for (batch,) in loader] == [16, 16, 8]
    assert engine.state.dataloader_len == 3


def test_a_subset_of_the_batches_stays_one() -> None:
    state = State(model=SimpleConvModel(), max_duration="4ep", algorithms=BatchSizeWarmup(2, duration="60sp"))
    state.set_dataloader(loader_of(), "train", 2)

    Engine(state).run_event(Event.FIT_START)

    assert state.dataloader_len == 2


@pytest.mark.parametrize(
    ("duration", "max_duration", "expected"),
    [("30sp", "9ba", 30), ("2ep", "9ba", 80), ("0.5dur", "4ep", 80), ("0.5dur", "50sp", 25), ("0dur", "4ep", 0)],
)
def test_durations_are_counted_in_samples(duration: str, max_duration: str, expected: int) -> None:
    algorithm = BatchSizeWarmup(2, duration=duration)

    start(algorithm, loader_of(), max_duration)

    assert algorithm.state_dict()["plan"]["duration"] == expected


@pytest.mark.parametrize("max_duration", ["9ba", "100tok", "10sec"])
def test_a_fraction_of_a_run_without_a_number_of_samples_is_refused(max_duration: str) -> None:
    with pytest.raises(ValueError, match=f"`duration` must be in 'sp' or 'ep' for a run of {max_duration}"):
        start(BatchSizeWarmup(2, duration="0.5dur"), loader_of(), max_duration)


def test_sizes_are_multiples_of_the_microbatch() -> None:
    whole, split = BatchSizeWarmup(4), BatchSizeWarmup(4)
    start(whole, loader_of(), device_train_microbatch_size=16)
    start(split, loader_of(), device_train_microbatch_size=8)

    assert whole.state_dict()["plan"]["multiple_of"] == 1
    assert split.state_dict()["plan"]["multiple_of"] == 8


def test_the_size_is_logged() -> None:
    recorder = Recorder()
    state = State(
        model=SimpleConvModel(),
        max_duration="4ep",
        dataloader=loader_of(),
        algorithms=BatchSizeWarmup(2, duration="60sp"),
        callbacks=recorder,
    )
    engine = Engine(state)
    engine.run_event(Event.FIT_START)
    state.timestamp = state.timestamp.to_next_batch(samples=59)
    engine.run_event(Event.BATCH_START)

    assert recorder.logged == [{"batch_size_warmup/batch_size": 8}]


def test_a_plan_that_was_saved_is_kept() -> None:
    before, after = BatchSizeWarmup(2, duration="0.5dur"), BatchSizeWarmup(2, duration="0.5dur")
    start(before, loader_of())
    after.load_state_dict(before.state_dict())
    start(after, loader_of(), "8ep")

    assert after.state_dict() == before.state_dict()


def test_a_plan_that_was_saved_is_kept_with_a_warning_of_other_arguments() -> None:
    before, after = BatchSizeWarmup(2, duration="0.5dur"), BatchSizeWarmup(4, duration="0.5dur")
    start(before, loader_of())
    after.load_state_dict(before.state_dict())

    with pytest.warns(UserWarning, match="initial 4, not 2; final 8, not 16 is ignored"):
        start(after, loader_of(8))
    assert after.state_dict()["plan"] == before.state_dict()["plan"]


def test_a_second_fit_keeps_the_sampler_that_workers_have() -> None:
    loader = loader_of(num_workers=1, persistent_workers=True)
    engine = start(BatchSizeWarmup(2, duration="60sp"), loader)
    first = epoch(engine)
    engine.run_event(Event.FIT_START)

    assert first[:3] == [2, 2, 2]
    assert epoch(engine) == [8, 8, 8, 16]


@pytest.mark.parametrize(
    "loader",
    [
        [torch.zeros(2)],
        DataLoader(Numbers(), batch_size=4),
        DataLoader(DATASET, batch_size=None),
        DataLoader(DATASET, batch_sampler=[[0, 1], [2]]),
        DataLoader(DATASET, batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(DATASET), 4, False)),
    ],
)
def test_loaders_whose_batches_cannot_be_made_anew_are_refused(loader: Any) -> None:
    with pytest.raises(ValueError, match=r"`train_dataloader` must be a `torch\.utils\.data\.DataLoader`"):
        start(BatchSizeWarmup(2, duration="8sp"), loader)


def test_a_loader_whose_workers_have_another_sampler_is_refused() -> None:
    loader = loader_of(num_workers=1, persistent_workers=True)
    next(iter(loader))

    with pytest.raises(ValueError, match="must not have been iterated before training"):
        start(BatchSizeWarmup(2), loader)


def test_a_batch_sampler_of_torch_is_replaced() -> None:
    loader = DataLoader(DATASET, batch_sampler=BatchSampler(SequentialSampler(DATASET), 16, drop_last=True))
    start(BatchSizeWarmup(2), loader)

    assert isinstance(loader.batch_sampler, WarmupBatchSampler)
    assert loader.batch_sampler.drop_last


def test_an_initial_size_above_that_of_the_loader_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`initial_batch_size` must not be larger than .* 16, got 17"):
        start(BatchSizeWarmup(17), loader_of())
    state = State(model=SimpleConvModel(), dataloader=loader_of(), algorithms=BatchSizeWarmup(17))
    with pytest.raises(ValueError, match=r"`initial_batch_size` must not be larger than .* 16, got 17"):
        Engine(state).run_event(Event.AFTER_LOAD)  # at the end of a Trainer's construction


def test_the_same_size_has_no_effect() -> None:
    with pytest.warns(NoEffectWarning, match="the batch size of the loader is 16, too"):
        start(BatchSizeWarmup(16), loader_of())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"initial_batch_size": 0}, ValueError, "`initial_batch_size` must be"),
        ({"initial_batch_size": 2, "multiple_of": 0}, ValueError, "`multiple_of` must be"),
        ({"initial_batch_size": 2, "duration": 3}, TypeError, "`duration` must be a time string"),
        ({"initial_batch_size": 2, "duration": "10ba"}, ValueError, "'sp', 'ep' or 'dur'"),
        ({"initial_batch_size": 2, "duration": "1.5ep"}, ValueError, "`duration` must be a time such as"),
        ({"initial_batch_size": 2, "duration": "1.5dur"}, ValueError, "must not be longer than the run"),
        ({"initial_batch_size": 2, "shape": "cubic"}, ValueError, "`shape` must be one of 'linear', 'doubling'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BatchSizeWarmup(**arguments)
