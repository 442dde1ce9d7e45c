"""Datasets, loaders and runs for the tests of resumption."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
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
from torchmetrics.classification import MulticlassAccuracy

from composer.checkpoint.safe_load import ALLOWED_TYPES
from composer.core import Callback, Event, State
from composer.loggers import Logger, LoggerDestination
from composer.testing import SimpleModelWithDropout, deep_compare
from composer.trainer import Trainer
from composer.utils import reproducibility

SAFE = ALLOWED_TYPES  # what checkpoints may hold besides tensors and plain values
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


class OwnGenerator:
    """A transform with a generator of its own, which no checkpoint holds."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __call__(self) -> float:
        return float(self.generator.random())


def all_globals() -> float:
    return random.random() + float(np.random.rand()) + float(torch.rand(1))  # noqa: NPY002


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def batches() -> list[Any]:
    return list(DataLoader(Samples(), 4))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(Samples(), 4, shuffle=True),
    "own generator": lambda: DataLoader(Samples(), 4, shuffle=True, generator=generator()),
    "global transform": lambda: DataLoader(Samples(all_globals), 4, shuffle=True),
    "replacement": lambda: DataLoader(Samples(), 4, sampler=RandomSampler(Samples(), True, 16, generator())),
    "weighted": lambda: DataLoader(Samples(), 4, sampler=WeightedRandomSampler([1.0] * 16, 16)),
    "drop_last": lambda: DataLoader(Samples(size=18), 4, shuffle=True, drop_last=True),
    "batch sampler": lambda: DataLoader(
        Samples(all_globals), batch_sampler=BatchSampler(RandomSampler(range(14), generator=generator()), 4, False)
    ),
    "own batch sampler": lambda: DataLoader(Samples(), batch_sampler=[[3, 1, 2, 5], [0, 4], [6, 7, 8], [9]]),
    "no batching": lambda: DataLoader(batches(), batch_size=None, shuffle=True),  # type: ignore[arg-type]
    "distributed": lambda: DataLoader(Samples(all_globals), 4, sampler=DistributedSampler(Samples(), 1, 0, seed=3)),
    "stream": lambda: DataLoader(Stream(), 4),
    "list": batches,
    "own state": KeepsItsPlace,
}
WITH_WORKERS: dict[str, Callable[[], Any]] = {
    "workers": lambda: DataLoader(Samples(all_globals), 4, shuffle=True, num_workers=2),
    "workers, own transform": lambda: DataLoader(Samples(OwnGenerator()), 4, shuffle=True, num_workers=1),
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


def batches_of(size: int) -> Any:
    return DataLoader(Samples(), size)
