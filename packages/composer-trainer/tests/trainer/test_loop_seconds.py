"""Runs whose length is a time, by a clock that only goes on by hand."""

from __future__ import annotations

import datetime
import math
from itertools import accumulate, cycle, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer.checkpoint import read_checkpoint
from composer.core import Callback, Event, State, Time
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.optim import CosineAnnealingScheduler, CosineAnnealingWithWarmupScheduler, LinearScheduler
from composer.testing import assert_resumes_exactly, deep_compare, run_on_ranks
from composer.trainer import Trainer

MakeTrainer = Any  # the fixture's class, in conftest.py


class Clock:
    """Stands for the module `time` in `composer.trainer.loop`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stops the run's clock."""
    stopped = Clock()
    monkeypatch.setattr("composer.trainer.loop.time", stopped)
    return stopped


class Lasts(Callback):
    """Lets events last some seconds, and notes how far the run was when each batch began, and its learning rate."""

    def __init__(self, clock: Clock, *batches: float, **events: float) -> None:
        self.clock, self.batches, self.seconds = clock, batches, events
        self.began: list[float] = []
        self.elapsed: list[float] = []
        self.rates: list[float] = []
        self.events: list[str] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.events.append(event.value)
        self.clock.now += self.seconds.get(event.value, 0.0)
        if event is Event.BATCH_START:
            elapsed = state.get_elapsed_duration()
            assert elapsed is not None
            self.elapsed.append(elapsed.value)
            self.began.append(state.timestamp.total_wct.total_seconds())
            self.rates.append(state.optimizers[0].param_groups[0]["lr"])
            self.clock.now += self.batches[state.timestamp.batch.value % len(self.batches)]


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("3sec", 3), (Time(3, "sec"), 3), ("40s", 40), ("1m", 60), ("1h20m40s", 4840), ("1e2sec", 100)],
)
def test_a_time_is_a_length_of_a_run(make_trainer: MakeTrainer, clock: Clock, duration: Any, seconds: int) -> None:
    at_init = make_trainer(max_duration=duration)
    at_fit = make_trainer(max_duration=None, callbacks=Lasts(clock, seconds / 4))
    at_fit.fit(duration=duration)

    assert f"{seconds}sec" == str(at_init.state.max_duration) == str(at_fit.state.max_duration)
    assert 4 == at_fit.state.timestamp.batch.value


@pytest.mark.parametrize(
    ("duration", "error", "message"),
    [
        ("1.5sec", TypeError, r"`max_duration` must be a time, got '1.5sec'.* must be an int for the unit 'sec'"),
        ("90m", ValueError, r"got '90m'.* at most 23 hours, 59 minutes and 59 seconds. Write longer times in seconds"),
        ("0sec", ValueError, r"`max_duration` must be positive, got '0sec'"),
        (datetime.timedelta(seconds=3), TypeError, r"`max_duration` must be a number of epochs, a time string or a"),
    ],
)
def test_what_is_no_whole_time_is_refused(
    make_trainer: MakeTrainer, duration: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_trainer(max_duration=duration)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seconds=st.integers(1, 5), eighths=st.lists(st.integers(1, 32), min_size=1, max_size=5))
def test_no_batch_begins_after_the_time_is_up(
    make_trainer: MakeTrainer, clock: Clock, seconds: int, eighths: list[int]
) -> None:
    lasts = Lasts(clock, *(eighth / 8 for eighth in eighths))
    trainer = make_trainer(max_duration=f"{seconds}sec", callbacks=lasts)
    trainer.fit()

    ends = [*accumulate(islice(cycle(lasts.batches), len(lasts.began)))]
    assert [*lasts.began, trainer.state.timestamp.total_wct.total_seconds()] == [0.0, *ends]
    assert max(lasts.began) < seconds <= ends[-1]


@pytest.mark.parametrize("number", [1, 4, 6])  # in an epoch of four batches: within one, and at the end of one
def test_events_are_those_of_a_run_of_as_many_batches(make_trainer: MakeTrainer, clock: Clock, number: int) -> None:
    runs = [(Lasts(clock, 1.0), f"{number}sec"), (Lasts(clock, 1.0), f"{number}ba")]
    evaluation = {"eval_dataloader": make_trainer.loader(4), "eval_interval": "1ba"}
    trainers = [make_trainer(callbacks=lasts, max_duration=duration, **evaluation) for lasts, duration in runs]
    for trainer in trainers:
        trainer.fit()

    (seconds, _), (batches, _) = runs
    assert batches.events == seconds.events
    assert batches.elapsed == seconds.elapsed
    deep_compare(*(trainer.state.timestamp.state_dict() for trainer in trainers))
    deep_compare(*(trainer.state.model.state_dict() for trainer in trainers))


def test_training_time_is_without_evaluation_and_what_comes_before_the_first_batch(
    make_trainer: MakeTrainer, clock: Clock
) -> None:
    lasts = Lasts(clock, 1.0, fit_start=100.0, epoch_start=0.25, eval_batch_start=100.0, batch_checkpoint=0.5)
    trainer = make_trainer(
        callbacks=lasts, max_duration="5sec", eval_dataloader=make_trainer.loader(4), eval_interval="1ba"
    )
    trainer.fit()

    # A second of training, and half a second of saving, which counts with the batch that follows it; so does the start
    # of the second epoch.
    assert lasts.began == [0.0, 1.0, 2.5, 4.0]
    assert 5.5 == trainer.state.timestamp.total_wct.total_seconds()


def test_fits_for_some_seconds_add_up(make_trainer: MakeTrainer, clock: Clock) -> None:
    trainer = make_trainer(max_duration=None, callbacks=Lasts(clock, 0.75))
    ends = []
    for _ in range(3):
        trainer.fit(duration="2sec")
        ends.append(trainer.state.timestamp.total_wct.total_seconds())

    assert [2.25, 4.5, 6.0] == ends  # what a batch takes too long is taken from the next


def test_stopping_and_going_on(make_trainer: MakeTrainer, clock: Clock) -> None:
    class Stop(Callback):
        def batch_end(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch == 1:
                state.stop_training()

    trainer = make_trainer(max_duration="100sec", callbacks=[Lasts(clock, 0.25), Stop()], schedulers=LinearScheduler())
    trainer.fit()
    assert (1, "0sec") == (trainer.state.timestamp.batch.value, str(trainer.state.max_duration))
    with pytest.raises(ValueError, match=r"already at its `max_duration` of '0sec'"):
        trainer.fit()
    trainer.fit(duration="2sec")
    assert 8 == trainer.state.timestamp.batch.value


# ---- schedules ----


def test_schedules_follow_the_time(make_trainer: MakeTrainer, clock: Clock) -> None:
    lasts = Lasts(clock, 0.25, 0.5, 0.125)
    schedule = CosineAnnealingScheduler(alpha_f=0.5)
    trainer = make_trainer(max_duration="2sec", callbacks=lasts, schedulers=schedule)
    trainer.fit()

    # The rate of a batch is set while the time is still that of the batch before it.
    times = [0.0, *lasts.began[:-1]]
    assert len(set(times)) == len(times) - 1 == 6
    assert lasts.rates == pytest.approx([0.1 * (0.75 + 0.25 * math.cos(math.pi * time / 2)) for time in times])
    assert 0.5 == schedule(trainer.state)


def test_a_warm_up_may_be_a_time_in_a_run_of_seconds(make_trainer: MakeTrainer, clock: Clock) -> None:
    lasts = Lasts(clock, 0.25)
    schedule = CosineAnnealingWithWarmupScheduler("1sec", "3sec")
    make_trainer(max_duration="3sec", callbacks=lasts, schedulers=schedule).fit()

    assert lasts.rates[:6] == pytest.approx([0.0, 0.0, 0.025, 0.05, 0.075, 0.1])
    assert all(a > b for a, b in pairwise(lasts.rates[5:]))
    assert lasts.rates[-1] == pytest.approx(0.05 * (1 + math.cos(math.pi * 1.5 / 2)))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (CosineAnnealingWithWarmupScheduler("10ba", "1dur"), "`t_warmup` and `t_max` must convert to the same unit"),
        (CosineAnnealingWithWarmupScheduler("1sec", "2sec"), "must be greater than or equal to max_duration"),
    ],
)
def test_schedules_that_do_not_fit_a_time_are_refused(make_trainer: MakeTrainer, schedule: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(max_duration="3sec", schedulers=schedule)


def test_the_schedule_ratio_scales_a_time(make_trainer: MakeTrainer, clock: Clock) -> None:
    lasts = Lasts(clock, 1.0)
    schedule = CosineAnnealingWithWarmupScheduler("2sec", "8sec", scale_warmup=True)
    make_trainer(max_duration="8sec", callbacks=lasts, schedulers=schedule, scale_schedule_ratio=0.5).fit()

    assert 4 == len(lasts.rates)
    with pytest.raises(ValueError, match=r"`scale_schedule_ratio` 0.1 makes `max_duration` '8sec' zero"):
        make_trainer(max_duration="8sec", schedulers=schedule, scale_schedule_ratio=0.1)


@pytest.mark.filterwarnings("error")
def test_schedulers_of_torch_take_as_many_steps_as_there_are(make_trainer: MakeTrainer, clock: Clock) -> None:
    model = make_trainer.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    lasts = Lasts(clock, 1.0)
    make_trainer(
        model=model,
        optimizers=optimizer,
        schedulers=scheduler,
        step_schedulers_every_batch=True,
        max_duration="4sec",
        callbacks=lasts,
    ).fit()

    assert [pytest.approx(0.0)] == scheduler.get_last_lr()


# ---- intervals, and the end ----


def test_fractions_of_a_time_are_no_whole_seconds(make_trainer: MakeTrainer, clock: Clock, tmp_path: Path) -> None:
    lasts = Lasts(clock, 0.25)
    trainer = make_trainer(
        max_duration="2sec",
        callbacks=lasts,
        eval_dataloader=make_trainer.loader(4),
        eval_interval="0.25dur",
        save_folder=tmp_path,
        save_interval="1sec",
        save_filename="{batch}.pt",
    )
    trainer.fit()

    evaluated = [at for at, event in enumerate(lasts.events) if event == "eval_start"]
    assert [2, 4, 6, 8] == [lasts.events[:at].count("batch_start") for at in evaluated]
    assert ["4.pt", "8.pt"] == [Path(path).name for path in trainer.saved_checkpoints]


def launch(make_trainer: MakeTrainer, clock: Clock, folder: Path, *others: Callback, **options: Any) -> Trainer:
    arguments = {
        "train_dataloader": make_trainer.loader(shuffle=True),
        "max_duration": "4sec",
        "schedulers": CosineAnnealingScheduler(),
        "callbacks": [Lasts(clock, 0.5, 0.75), *others],
        "save_folder": folder,
        "save_interval": "1ba",
        "autoresume": True,
        "run_name": "run",
    }
    trainer: Trainer = make_trainer(**(arguments | options))
    return trainer


@pytest.mark.parametrize("interval", ["1ba", "1ep", "1sec"])
def test_the_last_checkpoint_is_of_the_end_and_its_relaunch_ends_at_once(
    make_trainer: MakeTrainer, clock: Clock, tmp_path: Path, interval: str
) -> None:
    trainer = launch(make_trainer, clock, tmp_path, save_interval=interval)
    trainer.fit()
    content = read_checkpoint(trainer.saved_checkpoints[-1])
    again = launch(make_trainer, clock, tmp_path, save_interval=interval)
    again.fit()

    assert (7, 4.25) == (trainer.state.timestamp.batch.value, trainer.state.timestamp.total_wct.total_seconds())
    assert content["state"]["timestamp"] == {"Timestamp": trainer.state.timestamp.state_dict()}
    deep_compare(content["state"]["model"], trainer.state.model.state_dict())
    deep_compare(again.state.model.state_dict(), trainer.state.model.state_dict())
    assert again.state.timestamp == trainer.state.timestamp
    assert "fit_start" not in again.state.callbacks[0].events


def test_time_before_a_kill_counts_and_what_a_relaunch_takes_to_go_on_does_not(tmp_path: Path) -> None:
    """With equal batches, so that the run which is killed is equal bit for bit."""
    from conftest import MakeTrainer

    clock, make_trainer = Clock(), MakeTrainer()

    class Slow(torch.utils.data.Dataset[Any]):
        """Takes long to come back to its place."""

        def __init__(self) -> None:
            self.data, self.in_batch = make_trainer.loader().dataset, False

        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            clock.now += 0.125
            return self.data[index]

    class Stream(torch.utils.data.DataLoader[Any]):
        """Cannot be told where to go on, so all is loaded again."""

        def __iter__(self) -> Any:
            return super().__iter__()

    def make(folder: Path) -> Trainer:
        loader = Stream(Slow(), batch_size=4)
        return launch(make_trainer, clock, folder, train_dataloader=loader, callbacks=Lasts(clock, 0.5))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("composer.trainer.loop.time", clock)
        report = assert_resumes_exactly(make, kills=[1, 3], folder=tmp_path)

    assert (4, (1, 3)) == (report.batches, report.resumed_from)


# ---- ranks ----

PAIRS = [(torch.full((2, 3), 0.1 * index), torch.zeros(2, 1)) for index in range(5)]


class Regression(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 1)

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return (outputs - batch[1]).square().mean()


def train_by_other_clocks(duration: str) -> dict[str, Any]:
    """On rank 1 time goes three times as fast, and it was started elsewhere."""
    from composer.utils import dist

    clock, rank = Clock(), dist.get_global_rank()
    clock.now *= 1 + rank
    lasts = Lasts(clock, *(0.5 + 1.25 * rank, 0.25 + rank))
    reductions = 0
    original = torch.distributed.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal reductions
        reductions += 1
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("composer.trainer.loop.time", clock)
        model = Regression()
        trainer = Trainer(
            model=model,
            train_dataloader=PAIRS,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            schedulers=CosineAnnealingScheduler(),
            callbacks=lasts,
            max_duration=duration,
            progress_bar=False,
            device="cpu",
            seed=0,
        )
        patch.setattr(torch.distributed, "all_reduce", counted)
        trainer.fit()
    found = {"seconds": trainer.state.timestamp.state_dict(), "reductions": reductions, "events": lasts.events}
    found |= {"began": lasts.began, "elapsed": lasts.elapsed, "rates": lasts.rates}
    trainer.close()
    return found


def on_two_ranks() -> tuple[dict[str, Any], dict[str, Any]]:
    return train_by_other_clocks("3sec"), train_by_other_clocks("8ba")


def test_ranks_go_by_the_clock_of_rank_0() -> None:
    (first, counted), (second, _) = run_on_ranks(on_two_ranks, 2)
    assert first == second
    assert [0.0, 0.5, 0.75, 1.25, 1.5, 2.0, 2.25, 2.75] == first["began"]
    assert len(set(first["rates"])) == 7
    assert (counted["events"], counted["reductions"]) == (first["events"], first["reductions"])
