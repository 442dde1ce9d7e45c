"""A run on several machines that continues by itself; `test_two_machines.py` starts it. Arguments: a folder.

While the file `hold-<batch>` is in the folder, the run waits after that batch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from composer.algorithms import EMA, LabelSmoothing
from composer.core import Callback, State
from composer.loggers import Logger
from composer.testing import RandomClassificationDataset, SimpleModelWithDropout
from composer.trainer import Trainer
from composer.utils import dist


class Hold(Callback):
    """Waits after a batch as long as a file says so."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value
        with open(self.folder / f"batch{batch}-rank{dist.get_global_rank()}", "a") as file:
            file.write(".")
        while (self.folder / f"hold-{batch}").exists():
            time.sleep(0.02)


def train(folder: Path) -> None:
    """Start the run, or continue it, and write the weights that it ends with."""
    torch.set_num_threads(1)
    data = RandomClassificationDataset(shape=(4,), size=64)
    model = SimpleModelWithDropout(num_features=4)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4, sampler=dist.get_sampler(data, shuffle=True)),
        max_duration="3ep",
        optimizers=torch.optim.Adam(model.parameters(), lr=1e-2),
        algorithms=[EMA(half_life="4ba"), LabelSmoothing(0.1)],
        callbacks=[Hold(folder)],
        seed=1,
        run_name="run",
        save_folder=str(folder / "saved"),
        save_interval="2ba",
        autoresume=True,
        dist_timeout=20,  # two busy machines start some seconds apart
        progress_bar=False,
        device="cpu",
    )
    trainer.fit()
    if dist.get_global_rank() == 0:
        torch.save((trainer.state.timestamp.batch.value, trainer.state.model.state_dict()), folder / "ended.pt")
    trainer.close()


if __name__ == "__main__":
    train(Path(sys.argv[1]))
