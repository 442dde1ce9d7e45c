"""A run that is stopped and resumed equals the run that was not, bit for bit."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from composer.checkpoint.safe_load import _allowed
from composer.core import Callback, DataSpec, Event, State, Timestamp
from composer.loggers import Logger, LoggerDestination
from composer.optim import ExponentialScheduler
from composer.testing import SimpleModelWithDropout, deep_compare, run_on_ranks
from composer.trainer import Trainer
from composer.trainer.metrics import TrainMetrics
from composer.trainer.resume.generators import generators_of, set_states, states_of
from composer.trainer.resume.loader import LoaderPosition
from composer.utils import dist, reproducibility

SAFE = _allowed()  # what checkpoints may hold besides tensors and plain values
EPOCHS = 3  # of four batches of four samples


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that can be told apart; a transform draws noise for them."""

    def __init__(self, transform: Callable[[], float] | None = None, size: int = 16) -> None:
        self.transform, self.size = transform, size
        self.calls = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        noise = 0.0 if self.transform is None else self.transform()
        return torch.tensor([float(index), noise]), torch.tensor(index % 2)


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """A stream that starts somewhere else in every epoch."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        first = random.randrange(100)
        for index in range(first, first + 16):
            yield torch.tensor([float(index), 0.0]), torch.tensor(index % 2)

    def __len__(self) -> int:
        return 16


class KeepsItsPlace:
    """A loader with its own position, which shuffles through the global generator."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.next, self.loaded, self.drawn = 0, False, 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        if not self.loaded:
            self.order, self.next = torch.randperm(16).tolist(), 0
        self.loaded = False
        while self.next < 4:
            rows = self.order[4 * self.next : 4 * self.next + 4]
            self.next += 1
            self.drawn += 1
            yield torch.tensor([[float(row), 0.0] for row in rows]), torch.tensor(rows) % 2

    def state_dict(self) -> dict[str, Any]:
        return {"order": list(self.order), "next": self.next}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.order, self.next = saved["order"], saved["next"]
        self.loaded = self.next > 0


class OwnGenerators:
    """A transform with a generator of every kind, some well hidden."""

    __slots__ = ("draws",)

    def __init__(self) -> None:
        generator, legacy = torch.Generator().manual_seed(1), np.random.RandomState(2)
        self.draws = [
            partial(torch.rand, 1, generator=generator),
            lambda: legacy.rand() + 1,
            random.Random(3).random,
            *(Numpy(kind).draw for kind in ("PCG64", "MT19937", "Philox", "SFC64")),
        ]

    def __call__(self) -> float:
        return sum(float(draw()) for draw in self.draws)


class Numpy:
    def __init__(self, kind: str) -> None:
        self.generator = np.random.Generator(getattr(np.random, kind)(4))

    def draw(self) -> float:
        return float(self.generator.random())


def all_globals() -> float:
    return random.random() + float(np.random.rand()) + float(torch.rand(1))  # noqa: NPY002


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def batches() -> list[Any]:
    return list(DataLoader(Samples(), 4))


class DrawnAtFirst(Samples):
    """Keeps what it draws when it is first accessed, and a generator that is seeded then."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: float | None = None
        self.generator: Any = None

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kept is None:
            self.kept, self.generator = all_globals(), np.random.default_rng(np.random.randint(99))  # noqa: NPY002
        x, y = super().__getitem__(index)
        return x + torch.tensor([0.0, self.kept + self.generator.random()]), y


class LengthDrawnAtFirst(Samples):
    """Has between 13 and 16 samples, which is drawn when it is first asked for."""

    def __len__(self) -> int:
        if self.size == 16:
            self.size -= int(torch.randint(1, 4, ()))
        return self.size


class OrderDrawnAtFirst:
    """A sampler with one random order for all epochs."""

    def __init__(self) -> None:
        self.order: list[int] = []

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        self.order = self.order or torch.randperm(16).tolist()
        return iter(self.order)


class StreamDrawnAtFirst(Stream):
    """A stream that keeps what it draws when it is first iterated."""

    kept: float | None = None

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self.kept is None:
            self.kept = all_globals()
        for x, y in super().__iter__():
            yield x + torch.tensor([0.0, self.kept]), y


class LoaderDrawnAtFirst:
    """A loader of one's own with batches that are drawn when it is first iterated."""

    kept: torch.Tensor | None = None

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        if self.kept is None:
            self.kept = torch.rand(4, 4, 2) + all_globals()
        for x in self.kept:
            yield x, torch.tensor([0, 1, 0, 1])


def seeded_length() -> Any:
    """Whoever makes a loader accesses its length before there is a run: the program seeds that."""
    torch.manual_seed(6)
    return DataLoader(LengthDrawnAtFirst(), 4, shuffle=True)


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(Samples(), 4, shuffle=True),
    "own generator": lambda: DataLoader(Samples(), 4, shuffle=True, generator=generator()),
    "global transform": lambda: DataLoader(Samples(all_globals), 4, shuffle=True),
    "own transform": lambda: DataLoader(Samples(OwnGenerators()), 4, shuffle=True),
    "replacement": lambda: DataLoader(Samples(), 4, sampler=RandomSampler(Samples(), True, 16, generator())),
    "weighted": lambda: DataLoader(Samples(), 4, sampler=WeightedRandomSampler([1.0] * 16, 16)),
    "drop_last": lambda: DataLoader(Samples(size=18), 4, shuffle=True, drop_last=True),
    "batch sampler": lambda: DataLoader(
        Samples(all_globals), batch_sampler=BatchSampler(RandomSampler(range(14)), 4, False)
    ),
    "own batch sampler": lambda: DataLoader(Samples(), batch_sampler=[[3, 1, 2, 5], [0, 4], [6, 7, 8], [9]]),
    "no batching": lambda: DataLoader(batches(), batch_size=None, shuffle=True),  # type: ignore[arg-type]
    "distributed": lambda: DataLoader(Samples(all_globals), 4, sampler=DistributedSampler(Samples(), 1, 0, seed=3)),
    "stream": lambda: DataLoader(Stream(), 4),
    "list": batches,
    "own state": KeepsItsPlace,
    "drawn at first": lambda: DataLoader(DrawnAtFirst(), 4, shuffle=True),
    "length drawn at first": seeded_length,
    "order drawn at first": lambda: DataLoader(Samples(all_globals), 4, sampler=OrderDrawnAtFirst()),
    "stream drawn at first": lambda: DataLoader(StreamDrawnAtFirst(), 4),
    "loader drawn at first": LoaderDrawnAtFirst,
}
WITH_WORKERS: dict[str, Callable[[], Any]] = {
    "workers": lambda: DataLoader(Samples(all_globals), 4, shuffle=True, num_workers=2),
    "workers, own transform": lambda: DataLoader(Samples(OwnGenerators()), 4, shuffle=True, num_workers=1),
}


class Journal(LoggerDestination):
    """Notes batches, random draws at every event that a resumed run repeats, losses and metrics."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, Any]] = []
        self.draws: list[tuple[int, Any]] = []
        self.metrics: list[tuple[int, str, Any]] = []
        self.samples: list[list[int]] = []  # by epoch

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.FIT_START:
            all_globals()
        if event is Event.FIT_START and not self.samples and state.timestamp.batch_in_epoch.value:
            self.samples.append([])
        if event is Event.EPOCH_START:
            self.samples.append([])
        if event is Event.AFTER_DATALOADER:
            self.batches.append((state.timestamp.batch.value, state.batch[0].clone()))
            self.samples[-1] += state.batch[0][:, 0].int().tolist()
        if event in (Event.BEFORE_DATALOADER, Event.EPOCH_START, Event.EPOCH_END, Event.BATCH_START):
            self.draws.append((state.timestamp.batch.value, all_globals()))

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.metrics += [(-1 if step is None else step, name, float(value)) for name, value in metrics.items()]


class Quiet(Journal):
    """Draws nothing where a run in two parts has events of its own."""

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is not Event.FIT_START:
            super().run_event(event, state, logger)
        elif not self.samples and state.timestamp.batch_in_epoch.value:
            self.samples.append([])


class Snapshots(Callback):
    """Writes what a checkpoint would hold, after some batches or epochs."""

    def __init__(self, *when: str) -> None:
        self.when = when
        self.taken: list[bytes] = []
        self.trainer: Trainer

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if str(state.timestamp.batch) in self.when:
            self.take(state)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        if str(state.timestamp.epoch) in self.when:
            self.take(state)

    def take(self, state: State) -> None:
        saved = {
            "state": state.state_dict(),
            "resumption": [self.trainer._progress.loader.state_dict()],
            "rng": reproducibility.get_rng_state(),
        }
        content = io.BytesIO()
        torch.save(saved, content)
        self.taken.append(content.getvalue())


class Run:
    """A trainer over a loader, with what it notes."""

    def __init__(
        self, loader: Any, *snapshots: str, seed: int = 0, journal: Journal | None = None, **kwargs: Any
    ) -> None:
        metric = {"Accuracy": MulticlassAccuracy(num_classes=2, average="micro", validate_args=False)}
        model = SimpleModelWithDropout(num_features=2, train_metrics=metric)
        self.journal, self.snapshots = journal or Journal(), Snapshots(*snapshots)
        defaults: dict[str, Any] = {"max_duration": f"{EPOCHS}ep", "callbacks": [self.snapshots]}
        self.trainer = self.snapshots.trainer = Trainer(
            model=model,
            train_dataloader=loader,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
            loggers=self.journal,
            progress_bar=False,
            device="cpu",
            seed=seed,
            **{**defaults, **kwargs},
        )
        self.state = self.trainer.state

    def fit(self, **kwargs: Any) -> Run:
        self.trainer.fit(**kwargs)
        return self

    def load(self, content: bytes, *without: str) -> Run:
        with torch.serialization.safe_globals(SAFE):
            saved = torch.load(io.BytesIO(content), weights_only=True)
        self.state.load_state_dict(saved["state"])
        for key in without:
            saved[key] = None
        self.trainer._progress.loader.load_state_dict(saved["resumption"], saved["rng"])
        return self


def assert_same_end(whole: Run, resumed: Run) -> None:
    """Weights, momentum, generators, and everything that the resumed run noted are those of the other."""
    for now, then in ((resumed.journal.batches, whole.journal.batches), (resumed.journal.draws, whole.journal.draws)):
        deep_compare(then[len(then) - len(now) :], now)
    count = len(resumed.journal.metrics)
    deep_compare(whole.journal.metrics[-count:], resumed.journal.metrics)
    deep_compare(whole.state.model.state_dict(), resumed.state.model.state_dict())
    deep_compare(whole.state.optimizers[0].state_dict(), resumed.state.optimizers[0].state_dict())
    assert whole.state.timestamp.batch == resumed.state.timestamp.batch
    assert whole.state.timestamp.sample == resumed.state.timestamp.sample
    assert whole.state.timestamp.epoch == resumed.state.timestamp.epoch
    deep_compare(
        whole.trainer._progress.loader.state_dict()["generators"],
        resumed.trainer._progress.loader.state_dict()["generators"],
    )


WHEN = ("2ba", "4ba", "1ep", "7ba", "8ba", "2ep")


@pytest.mark.parametrize("name", LOADERS)
def test_a_resumed_run_equals_the_uninterrupted_one(name: str) -> None:
    untouched, whole = Run(LOADERS[name]()).fit(), Run(LOADERS[name](), *WHEN).fit()
    ends = reproducibility.get_rng_state()

    assert len(WHEN) == len(whole.snapshots.taken)
    assert_same_end(untouched, whole)  # a snapshot changes nothing
    for snapshot in whole.snapshots.taken:
        resumed = Run(LOADERS[name](), seed=99).load(snapshot).fit()
        assert_same_end(whole, resumed)
        deep_compare(ends, reproducibility.get_rng_state())


EVALUATED: dict[str, Callable[[], Any]] = {
    name: LOADERS[name] for name in ("drawn at first", "own generator", "own transform", "loader drawn at first")
}


@pytest.mark.parametrize("name", EVALUATED)
def test_what_a_run_is_evaluated_on_is_the_same_when_it_is_resumed(name: str) -> None:
    def run(*when: str) -> Run:
        loader = DataLoader(Samples(), 4, shuffle=True)
        options: dict[str, Any] = {"eval_dataloader": EVALUATED[name](), "eval_interval": "3ba"}
        made = Run(loader, *when, seed=0 if when else 99, **options)
        made.state.train_metrics, made.state.eval_metrics["eval"] = {}, {"Mean": MeanMetric()}
        made.trainer._model.update_metric = lambda batch, outputs, metric: metric.update(batch[0])  # type: ignore[method-assign]
        return made

    whole = run("2ba", "4ba", "1ep", "7ba").fit()
    for snapshot in whole.snapshots.taken:
        assert_same_end(whole, run().load(snapshot).fit())
    logged = [value for _, key, value in whole.journal.metrics if key == "metrics/eval/Mean"]
    assert 4 == len(logged)


class Lost(BaseException):
    """The process is lost."""


class Loses(Callback):
    """Loses the process at an event after the last batch."""

    def __init__(self, event: Event | None) -> None:
        self.event = event

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is self.event and state.timestamp.batch == 12:
            raise Lost


@pytest.mark.parametrize("eval_interval", ["1ep", "6ba"])
@pytest.mark.parametrize("save_interval", ["1ep", "1ba"])
@pytest.mark.parametrize("event", [Event.EPOCH_END, Event.FIT_END])
def test_a_run_killed_after_its_last_batch_still_ends_its_epoch_and_evaluates_once(
    event: Event, save_interval: str, eval_interval: str, tmp_path: Path
) -> None:
    """A run in batches is over before its last epoch has ended."""

    def end(folder: str, event: Event | None, seed: int) -> dict[str, Any]:
        reproducibility.seed_all(seed)  # `Run` takes what is drawn before it begins
        loaders = [DataLoader(Samples(all_globals), 4, shuffle=True) for _ in range(2)]
        run = Run(
            loaders[0],
            schedulers=ExponentialScheduler(0.5),
            step_schedulers_every_batch=False,
            eval_dataloader=loaders[1],
            eval_interval=eval_interval,
            max_duration="12ba",
            callbacks=[Loses(event)],
            save_folder=tmp_path / folder,
            save_interval=save_interval,
            run_name="run",
            autoresume=True,
        )
        with pytest.raises(Lost) if event is not None else nullcontext():
            run.fit()
        run.trainer.close()
        return {
            "model": run.state.model.state_dict(),
            "rates": [group["lr"] for group in run.state.optimizers[0].param_groups],
            "time": [getattr(run.state.timestamp, unit).value for unit in ("batch", "epoch", "sample")],
            "rng": reproducibility.get_rng_state(),
        }

    whole = end("whole", None, 1)
    end("killed", event, 1)

    deep_compare(whole, end("killed", None, 2))


@pytest.mark.parametrize("name", WITH_WORKERS)
def test_augmentation_in_worker_processes_goes_on_where_it_was(name: str) -> None:
    whole = Run(WITH_WORKERS[name](), "2ba", "1ep", max_duration="2ep").fit()
    for snapshot in whole.snapshots.taken:
        assert_same_end(whole, Run(WITH_WORKERS[name](), seed=99, max_duration="2ep").load(snapshot).fit())


@pytest.mark.parametrize("name", ["global transform", "stream", "own state"])
def test_a_run_may_be_resumed_twice_in_one_epoch(name: str) -> None:
    whole = Run(LOADERS[name](), "5ba").fit()
    once = Run(LOADERS[name](), "6ba", seed=98).load(whole.snapshots.taken[0]).fit()
    at_once = once.snapshots.taken[0]
    twice = Run(LOADERS[name](), seed=99).load(at_once)
    deep_compare(twice.trainer._progress.loader._saved[0], twice.trainer._progress.loader.state_dict())  # type: ignore[index]

    assert_same_end(whole, twice.fit())


def test_microbatches_change_nothing_about_it() -> None:
    whole = Run(LOADERS["global transform"](), "6ba", device_train_microbatch_size=2).fit()
    resumed = Run(LOADERS["global transform"](), seed=99, device_train_microbatch_size=2)

    assert_same_end(whole, resumed.load(whole.snapshots.taken[0]).fit())


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_s_loader_resumes_by_its_own_state(workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return torchdata.StatefulDataLoader(Samples(all_globals), 4, shuffle=True, num_workers=workers)

    when = ("3ba", "4ba", "1ep") if workers == 0 else ("3ba",)
    whole = Run(make(), *when, max_duration="2ep").fit()
    for snapshot in whole.snapshots.taken:
        resumed = Run(make(), max_duration="2ep").load(snapshot).fit()
        if workers == 0:
            assert_same_end(whole, resumed)
        assert whole.journal.samples[-1] == resumed.journal.samples[-1]


def test_a_loader_with_its_own_state_draws_nothing_twice() -> None:
    whole = Run(KeepsItsPlace(), "6ba").fit()
    loader = KeepsItsPlace()
    Run(loader).load(whole.snapshots.taken[0]).fit()

    assert 6 == loader.drawn


def test_skipped_samples_are_neither_loaded_nor_transformed(caplog: pytest.LogCaptureFixture) -> None:
    whole = Run(DataLoader(Samples(), 4, shuffle=True), "7ba").fit()
    data = Samples()
    Run(DataLoader(data, 4, shuffle=True)).load(whole.snapshots.taken[0]).fit()

    assert (5 + 1) * 4 == data.calls  # the run's first batch again, as the data set may keep what it draws then
    assert "once more" not in caplog.text


def test_what_is_loaded_again_is_announced_with_the_way_out(caplog: pytest.LogCaptureFixture) -> None:
    whole = Run(batches(), "7ba").fit()
    Run(batches()).load(whole.snapshots.taken[0]).fit()

    assert ["Loading 3 batches again to "] == [record.getMessage()[:27] for record in caplog.records]
    assert "`spin_dataloaders=False`" in caplog.text


def test_without_spinning_the_epoch_has_as_many_batches_but_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    whole = Run(DataLoader(Samples(OwnGenerators()), 4), "6ba").fit()
    resumed = Run(DataLoader(Samples(OwnGenerators()), 4), "7ba", seed=9).load(whole.snapshots.taken[0])
    resumed.trainer._progress.loader.spin = False
    resumed.fit()

    assert [list(range(8)), list(range(16))] == resumed.journal.samples
    assert whole.state.timestamp.batch == resumed.state.timestamp.batch
    assert whole.state.timestamp.epoch == resumed.state.timestamp.epoch
    twice = Run(DataLoader(Samples(OwnGenerators()), 4)).load(resumed.snapshots.taken[0]).fit()
    assert_same_end(resumed, twice)


@pytest.mark.parametrize("size", [2, 3, 8, 16])
@pytest.mark.parametrize("drop_last", [False, True])
def test_with_another_batch_size_no_sample_is_lost_or_trained_twice(size: int, drop_last: bool) -> None:
    def make(batch_size: int) -> Any:
        return DataLoader(Samples(size=20), batch_size, shuffle=True, drop_last=drop_last)

    whole = Run(make(4), "3ba").fit()
    resumed = Run(make(size), "4ba", seed=9, max_duration="2ep").load(whole.snapshots.taken[0]).fit()
    before, after = whole.journal.samples[0][:12], resumed.journal.samples[0]

    expected = 8 // size * size if drop_last else 8
    assert expected == len(after)
    assert whole.journal.samples[0][12 : 12 + expected] == after
    assert not set(before) & set(after)
    assert "2ep" == str(resumed.state.timestamp.epoch)
    if resumed.snapshots.taken and expected:
        again = Run(make(size), max_duration="2ep").load(resumed.snapshots.taken[0]).fit()
        assert_same_end(resumed, again)


def test_with_another_batch_size_a_run_in_batches_closes_the_epoch_at_its_end() -> None:
    def make(batch_size: int) -> Any:
        return DataLoader(Samples(), batch_size, shuffle=True)

    whole = Run(make(4), "2ba").fit()
    resumed = Run(make(2), max_duration="6ba").load(whole.snapshots.taken[0]).fit()

    now = resumed.state.timestamp
    assert (6, 1, 0) == (now.batch.value, now.epoch.value, now.batch_in_epoch.value)


def test_with_another_batch_size_workers_skip_whole_batches_and_say_what_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = Run(batches_of(4), "1ba").fit()
    resumed = Run(DataLoader(Samples(), 3, num_workers=1), max_duration="1ep").load(whole.snapshots.taken[0]).fit()

    assert [list(range(6, 16))] == resumed.journal.samples
    assert "2 samples are left out" in caplog.text


def batches_of(size: int) -> Any:
    return DataLoader(Samples(), size)


def test_the_last_batch_s_metrics_are_logged_once_more_when_only_the_epoch_s_end_is_left() -> None:
    whole = Run(batches_of(4), "12ba").fit()
    resumed = Run(batches_of(4), seed=3).load(whole.snapshots.taken[0]).fit()
    logged = [(name, value) for _, name, value in resumed.journal.metrics if name.startswith("metrics/")]

    assert [whole.journal.metrics[-6][1:]] == logged
    assert not resumed.journal.batches
    assert f"{EPOCHS}ep" == str(resumed.state.timestamp.epoch)


# ---- without a place in the checkpoint


@pytest.mark.parametrize("when", ["1ep", "6ba"])
def test_a_checkpoint_without_a_place_starts_the_loader_once_per_epoch(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Any:
        return DataLoader(Samples(), 4, shuffle=True, generator=generator())

    whole = Run(make(), when).fit()
    resumed = Run(make()).load(whole.snapshots.taken[0], "resumption").fit()

    assert_same_end(whole, resumed)
    assert "starting the loader 1 times" in caplog.text


def test_without_spinning_a_checkpoint_without_a_place_costs_nothing() -> None:
    whole, data = Run(batches_of(4), "6ba").fit(), Samples()
    resumed = Run(DataLoader(data, 4)).load(whole.snapshots.taken[0], "resumption")
    resumed.trainer._progress.loader.spin = False
    resumed.fit()

    assert 6 * 4 == data.calls
    assert whole.state.timestamp.batch == resumed.state.timestamp.batch


def test_generators_that_stay_as_they_are_are_not_touched() -> None:
    whole = Run(batches_of(4), "1ep").fit()
    resumed = Run(batches_of(4), seed=7, callbacks=[]).load(whole.snapshots.taken[0], "rng")
    resumed.trainer._progress.loader.begin()

    assert torch.equal(torch.Generator().manual_seed(7).get_state(), torch.get_rng_state())


@pytest.mark.parametrize("saved", [[], {}, [None]])
def test_what_is_no_place_is_refused(saved: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a list of one dict per rank.*load_ignore_keys"):
        Run(batches_of(4)).trainer._progress.loader.load_state_dict(saved, None)


# ---- data sets that resume themselves, and iterations


class Streaming(Dataset[Any]):
    """Numbers its samples through the epoch, as streaming data sets do, and saves how far it was."""

    def __init__(self) -> None:
        self.first = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(self.first + index), 0.0]), torch.tensor(index % 2)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        return {"first": num_samples}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.first = saved["first"]


def test_a_data_set_that_resumes_itself_is_not_skipped_through() -> None:
    whole = Run(DataLoader(Streaming(), 4), "3ba", max_duration="1ep").fit()
    resumed = Run(DataLoader(Streaming(), 4), max_duration="1ep").load(whole.snapshots.taken[0]).fit()

    assert [[12, 13, 14, 15]] == resumed.journal.samples
    assert not resumed.state.dataset_resumption


def test_a_loader_s_own_state_is_used_whatever_spinning_says() -> None:
    whole = Run(KeepsItsPlace(), "6ba").fit()
    resumed = Run(KeepsItsPlace(), spin_dataloaders=False).load(whole.snapshots.taken[0]).fit()

    assert_same_end(whole, resumed)


class Iterations(Callback):
    def __init__(self) -> None:
        self.ended: list[int] = []

    def iteration_end(self, state: State, logger: Logger) -> None:
        self.ended.append(state.timestamp.batch.value)


@pytest.mark.parametrize("name", ["own transform", "own state"])
@pytest.mark.parametrize(("length", "when", "ends"), [("2ep", "2ep", [8, 16]), ("8tok", "6ba", [6, 8, 10, 12, 14])])
def test_an_iteration_that_was_about_to_end_ends_in_the_resumed_run(
    length: str, when: str, ends: list[int], name: str
) -> None:
    def make(*snapshots: str) -> tuple[Run, Iterations]:
        spec = DataSpec(LOADERS[name](), get_num_tokens_in_batch=lambda batch: len(batch[0]))
        iterations = Iterations()
        run = Run(spec, *snapshots, max_duration="16ba")
        run.state.callbacks.append(iterations)
        run.state._iteration_length = length  # type: ignore[assignment]
        return run, iterations

    whole, all_ends = make(when)
    whole.fit()
    resumed, later_ends = make()
    assert_same_end(whole, resumed.load(whole.snapshots.taken[0]).fit())

    assert ends == later_ends.ended == all_ends.ended[-len(ends) :]


def test_a_place_of_another_version_counts_as_none() -> None:
    whole = Run(batches_of(4), "1ep").fit()
    resumed = Run(batches_of(4)).load(whole.snapshots.taken[0])
    saved: Any = resumed.trainer._progress.loader._saved
    del saved[0]["place"]

    assert_same_end(whole, resumed.fit())


# ---- several fits


@pytest.mark.parametrize("name", ["global transform", "own transform", "stream", "own state"])
def test_a_second_fit_goes_on_as_if_it_were_one(name: str) -> None:
    whole = Run(LOADERS[name](), max_duration="8ba", journal=Quiet()).fit()
    parts = Run(LOADERS[name](), max_duration="3ba", journal=Quiet()).fit().fit(duration="5ba")

    deep_compare(whole.journal.batches, parts.journal.batches)
    deep_compare(whole.state.model.state_dict(), parts.state.model.state_dict())
    assert whole.state.timestamp.epoch == parts.state.timestamp.epoch


def test_a_second_fit_goes_on_with_workers_which_do_not_outlive_the_first() -> None:
    whole = Run(WITH_WORKERS["workers"](), max_duration="4ba", journal=Quiet()).fit()
    parts = Run(WITH_WORKERS["workers"](), max_duration="2ba", journal=Quiet()).fit()
    assert parts.trainer._progress.loader._iterator is None
    parts.fit(duration="2ba")

    deep_compare(whole.journal.batches, parts.journal.batches)


def test_a_one_shot_iterable_loses_nothing_between_fits() -> None:
    parts = Run(iter(batches()), max_duration="1ba").fit().fit(duration="2ba")

    assert [list(range(12))] == parts.journal.samples


def test_a_fit_that_failed_is_repeated_from_the_last_finished_batch() -> None:
    class Fails(Callback):
        def before_forward(self, state: State, logger: Logger) -> None:
            if state.timestamp.batch == 2 and not self.done:
                self.done = True
                raise RuntimeError("once")

        done = False

    whole = Run(DataLoader(Samples(), 4, shuffle=True)).fit()
    run = Run(DataLoader(Samples(), 4, shuffle=True), callbacks=[Fails()])
    with pytest.raises(RuntimeError, match="once"):
        run.fit()
    run.fit()

    assert whole.journal.samples[0] == run.journal.samples[0][:12] + run.journal.samples[0][16:]


@pytest.mark.parametrize("size", [12, 16, 40])
@pytest.mark.parametrize("workers", [0, 1])
def test_another_loader_in_mid_epoch_starts_at_its_beginning(size: int, workers: int) -> None:
    run = Run(DataLoader(Samples(), 4, num_workers=workers), max_duration="3ba").fit()
    run.fit(train_dataloader=DataLoader(Samples(size=size), 4, num_workers=workers), duration="1ep")

    assert [[*range(12), *range(size)]] == run.journal.samples
    now = run.state.timestamp
    assert (1, 0, 3 + size // 4) == (now.epoch.value, now.batch_in_epoch.value, now.batch.value)
    run.fit(duration="1ep")
    assert list(range(size)) == run.journal.samples[1]


class Cut:
    """Samples 0 to 23 in batches, whose size it does not tell."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return math.ceil(24 / self.size)

    def __iter__(self) -> Iterator[Any]:
        yield from DataLoader(Samples(size=24), self.size)


@pytest.mark.parametrize(("before", "after", "left_out"), [(4, 4, 0), (4, 6, 0), (4, 2, 0), (4, 8, 4), (2, 24, 18)])
def test_batches_of_another_size_go_on_after_as_many_samples(
    before: int, after: int, left_out: int, caplog: pytest.LogCaptureFixture
) -> None:
    seen = 3 * before
    snapshot = Run(Cut(before), "3ba", max_duration="3ba").fit().snapshots.taken[0]
    resumed = Run(Cut(after), max_duration="1ep", journal=Quiet()).load(snapshot).fit()

    assert [list(range(seen + left_out, 24))] == resumed.journal.samples
    assert resumed.state.timestamp.epoch == 1
    assert (f"{left_out} samples are left out" in caplog.text) == bool(left_out)


def test_the_same_loader_given_again_goes_on_where_it_was() -> None:
    loader = DataLoader(Samples(), 4)
    run = Run(loader, max_duration="1ba").fit().fit(train_dataloader=loader, duration="1ep")

    assert [list(range(16))] == run.journal.samples


@pytest.mark.parametrize(("subset", "then"), [(1, range(4)), (3, range(12)), (4, range(12, 16))])
def test_a_subset_that_the_epoch_has_had_already_begins_at_its_beginning(subset: int, then: range) -> None:
    run = Run(batches_of(4), max_duration="3ba").fit().fit(duration="1ep", train_subset_num_batches=subset)

    assert [[*range(12), *then]] == run.journal.samples
    assert "1ep" == str(run.state.timestamp.epoch)


def three_fits(folder: Path, make: Callable[[], Any], second: dict[str, Any], stop: int | None) -> Run:
    callbacks = [] if stop is None else [StopsAt(stop)]
    reproducibility.seed_all(0)
    saving = {"save_folder": folder, "save_interval": "2ba", "run_name": "run", "autoresume": True}
    run = Run(make(), journal=Quiet(), callbacks=callbacks, max_duration="3ba", **saving)
    given = dict(second)
    if "train_dataloader" in given:
        given["train_dataloader"] = given["train_dataloader"]()
    with nullcontext() if stop is None else pytest.raises(InterruptedError):
        run.fit().fit(**given, duration="1ep").fit(duration="3ba")
    run.trainer.close()
    return run


class StopsAt(Callback):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.batch:
            raise InterruptedError("crashed")


def shuffled(transform: Callable[[], float] | None = None, **options: Any) -> Any:
    return DataLoader(Samples(transform, 20), 4, shuffle=True, **options)


SECOND: dict[str, dict[str, Any]] = {
    "loader": {"train_dataloader": shuffled},
    "loader with generators": {"train_dataloader": lambda: shuffled(OwnGenerators(), generator=generator())},
    "worker": {"train_dataloader": lambda: shuffled(num_workers=1)},
    "loader with a state": {"train_dataloader": KeepsItsPlace},
    "drawn at first": {"train_dataloader": lambda: DataLoader(DrawnAtFirst(), 4)},
    "list": {"train_dataloader": batches},
    "subset": {"train_subset_num_batches": 2},
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("stop", [3, 5, 8])
def test_a_relaunch_resumes_a_program_whose_second_fit_has_other_data(tmp_path: Path, name: str, stop: int) -> None:
    whole = three_fits(tmp_path / "whole", shuffled, SECOND[name], None)
    three_fits(tmp_path / "run", shuffled, SECOND[name], min(stop, whole.state.timestamp.batch.value - 1))
    resumed = three_fits(tmp_path / "run", shuffled, SECOND[name], None)

    deep_compare(whole.state.model.state_dict(), resumed.state.model.state_dict())
    deep_compare(whole.state.optimizers[0].state_dict(), resumed.state.optimizers[0].state_dict())
    assert whole.state.timestamp.batch == resumed.state.timestamp.batch
    assert whole.state.timestamp.epoch == resumed.state.timestamp.epoch
    count = len(resumed.journal.batches)
    deep_compare(whole.journal.batches[-count:], resumed.journal.batches)


# ---- generators


def test_generators_are_found_by_path_each_once() -> None:
    found = generators_of(DataLoader(Samples(OwnGenerators()), 4, shuffle=True, generator=generator()))

    assert {
        "generator",
        "dataset.transform.draws.0.keywords.generator",
        "dataset.transform.draws.1.legacy",
        "dataset.transform.draws.3.self.generator",
        "dataset.transform.draws.4.self.generator",
        "dataset.transform.draws.5.self.generator",
        "dataset.transform.draws.6.self.generator",
    } <= found.keys()


def test_a_generator_that_does_not_fit_is_named() -> None:
    saved = states_of(generators_of(SimpleNamespace(a=np.random.default_rng(0), b=random.Random(0))))
    here = generators_of(SimpleNamespace(a=np.random.Generator(np.random.MT19937(0)), c=random.Random(0)))
    with pytest.warns(UserWarning, match=r"not restored.*: (?=.*\ba\b)(?=.*\bb\b)(?=.*\bc\b)"):
        set_states(here, saved)


def test_persistent_workers_are_warned_of() -> None:
    def make() -> Any:
        return DataLoader(Samples(), 4, num_workers=1, persistent_workers=True)

    whole = Run(make(), "1ep", max_duration="2ep").fit()
    resumed = Run(make(), max_duration="2ep").load(whole.snapshots.taken[0])
    with pytest.warns(UserWarning, match="`persistent_workers=True`"):
        resumed.fit()


# ---- several ranks


def share(batch_size: int) -> tuple[State, LoaderPosition]:
    """This rank's part of 24 samples."""
    data = Samples(size=24)
    loader = DataLoader(data, batch_size, sampler=dist.get_sampler(data, shuffle=True, seed=1))
    state = State(model=torch.nn.Linear(1, 1), dataloader=loader)
    return state, LoaderPosition(state, TrainMetrics(state, SimpleModelWithDropout(), defer=False))


def begin_on_a_rank() -> tuple[list[int], dict[str, Any]]:
    """Two batches of two samples, and the place after them."""
    state, position = share(2)
    iterator, drawn = position.start(), []
    for _ in range(2):
        drawn += rows_of(next(iterator))
        state.timestamp = state.timestamp.to_next_batch(2 * dist.get_world_size())
    return drawn, position.state_dict()


def resume_on_a_rank(places: list[dict[str, Any]], batch_size: int) -> tuple[list[int], int | None]:
    """The rest of the epoch, and how many batches it will have had."""
    state, position = share(batch_size)
    state.timestamp = Timestamp(batch=2, batch_in_epoch=2)
    position.load_state_dict(places, None)
    assert position.begin()
    rest = position.resume()
    assert rest is not None
    return [row for batch in rest for row in rows_of(batch)], position.ends_at


def rows_of(batch: Any) -> list[int]:
    rows: list[int] = batch[0][:, 0].int().tolist()
    return rows


def on_two_ranks() -> tuple[Any, ...]:
    drawn, place = begin_on_a_rank()
    places = dist.all_gather_object(place)
    return drawn, places, resume_on_a_rank(places, 2), resume_on_a_rank(places, 4)


def test_ranks_go_on_with_what_no_rank_has_trained(caplog: pytest.LogCaptureFixture) -> None:
    (first, places, *resumed), (second, _, *others) = run_on_ranks(on_two_ranks, 2)
    done, uneven = {*first, *second}, {**places[0], "place": {**places[0]["place"], "world_size": 3, "samples": 3}}
    for ends_at, (rest, end), (other, other_end) in zip((6, 4), resumed, others, strict=True):
        assert [ends_at, ends_at] == [end, other_end]
        assert sorted({*range(24)} - done) == sorted(rest + other)

    rest, end = resume_on_a_rank(places, 4)  # by one rank
    assert 6 == end
    assert sorted({*range(24)} - done) == sorted(rest)
    rest, _ = resume_on_a_rank([uneven], 3)
    assert 24 - 9 == len(rest)
    uneven["place"]["samples"], uneven["place"]["batches"] = None, 1
    assert 24 - 3 * 3 == len(resume_on_a_rank([uneven], 3)[0])
    assert "trained twice" not in caplog.text

    places[0]["place"]["samples"] = 3  # twice that over four: one is left
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_world_size", lambda: 4)
        patch.setattr(dist, "all_gather_object", lambda value: [value])
        resume_on_a_rank(places[:1], 2)
    assert "2 samples are trained twice" in caplog.text
