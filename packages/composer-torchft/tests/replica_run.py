"""A replica group: a short run that writes what it does to `group<index>.<rank>.jsonl`, its weights to a file.

Its argument is a JSON object with options, see `main`; the groups are described by the environment variables.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from composer.algorithms.ema import EMA
from composer.checkpoint.sharded_tensors import gather_tensors
from composer.core import Callback, State
from composer.loggers import Logger
from composer.torchft import get_sampler
from composer.trainer import Trainer
from composer.utils import dist

SIZE = 64  # samples in an epoch
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Images whose first value is the number of the sample."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        self.images, self.labels = torch.randn(SIZE, 8, generator=numbers), torch.randint(4, (SIZE,), generator=numbers)
        self.images[:, 0] = torch.arange(SIZE) / SIZE

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


def numbers_of(images: torch.Tensor) -> list[int]:
    """Return the numbers of the samples of a batch, of shape (N, 8)."""
    return [round(value * SIZE) for value in images[:, 0].tolist()]


def loader_of(groups: int, group: int, batch: int, shuffle: bool = False) -> DataLoader[Any]:
    """Return the loader of a group."""
    data = Numbered()
    return DataLoader(data, batch_size=batch, sampler=get_sampler(data, shuffle=shuffle, groups=groups, group=group))


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def slowing(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule that goes wrong if its own count of steps is lost."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))


class Diary(Callback):
    """Writes a line for each batch: when it ended, its number, its samples, and those of all groups so far."""

    def __init__(self, path: Path, groups: int, seconds: float, patience: float, dies_at: int, stops_at: int) -> None:
        self.path, self.groups, self.seconds, self.patience = path, groups, seconds, patience
        self.dies_at, self.stops_at = dies_at, stops_at

    def before_forward(self, state: State, logger: Logger) -> None:
        mark = self.path.with_suffix(".died")
        if state.timestamp.batch == self.dies_at and not mark.exists():  # when the others wait for its gradients
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def batch_end(self, state: State, logger: Logger) -> None:
        now = state.timestamp
        drawn = numbers_of(state.batch[0])
        with self.path.open("a") as file:
            file.write(json.dumps([time.time(), now.batch.value, drawn, now.sample.value]) + "\n")
        if now.batch == self.stops_at:
            state.stop_training()
        before = 0 if state.previous_timestamp is None else state.previous_timestamp.sample.value
        is_complete = now.sample.value - before == self.groups * dist.get_world_size() * len(drawn)
        time.sleep(self.seconds if is_complete else self.seconds + self.patience)


def main(
    folder: str,
    optimizer: str = "AdamW",
    duration: str = "2ep",
    batch: int = 16,
    seconds: float = 0.0,
    patience: float = 0.0,
    timeout: float = 60.0,
    saves: bool = False,
    shuffle: bool = False,
    dies_at: int = -1,
    stops_at: int = -1,
    averages: bool = False,
) -> None:
    """Train.

    Args:
        folder: Where to write.
        optimizer: A key of `OPTIMIZERS`.
        duration: The length of the run.
        batch: The samples of a batch of all groups.
        seconds: How long a batch takes.
        patience: How much longer it takes while a group is missing, so that it returns before the run ends.
        timeout: `dist_timeout`.
        saves: Group 0 saves a checkpoint after every batch, and continues from the newest one.
        shuffle: Shuffle the samples.
        dies_at: The batch in which the last rank of the last group kills itself.
        stops_at: The batch after which the first rank of the first group ends the run.
        averages: Average the weights, so that those at the end depend on all steps.
    """
    groups, group = int(os.environ["NUM_REPLICA_GROUPS"]), int(os.environ["REPLICA_GROUP_ID"])
    rank, ranks = dist.get_global_rank(), dist.get_world_size()
    model = make_model()
    optimizers = OPTIMIZERS[optimizer](model.parameters())
    trainer = Trainer(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizers=optimizers,
        schedulers=slowing(optimizers),
        step_schedulers_every_batch=True,
        train_dataloader=loader_of(groups, group, batch // groups // ranks, shuffle),
        max_duration=duration,
        callbacks=Diary(
            Path(folder, f"group{group}.{rank}.jsonl"),
            groups,
            seconds,
            patience,
            dies_at if group == groups - 1 and rank == ranks - 1 else -1,
            stops_at if group == rank == 0 else -1,
        ),
        algorithms=[EMA(half_life="10ba", update_interval="1ba")] if averages else None,
        parallelism_config={"torchft": {"fsdp": {}} if ranks > 1 else {}},
        dist_timeout=timeout,
        device="cpu",
        precision="fp32",
        progress_bar=False,
        run_name="run",
        autoresume=saves and group == 0,
        save_folder=f"{folder}/checkpoints" if saves and group == 0 else None,
        save_interval="1ba" if saves and group == 0 else "1ep",
    )
    trainer.fit()
    saved = {**gather_tensors(model.state_dict()), "batch": torch.tensor(trainer.state.timestamp.batch.value)}
    if rank == 0:
        torch.save(saved, Path(folder, f"group{group}.pt"))
    trainer.close()


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
