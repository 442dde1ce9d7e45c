"""A run that waits in the middle of its training; tests launch it several times with one save folder.

Arguments: the save folder, whether it is divided among ranks, and a folder for signs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from composer.core import Callback, State
from composer.loggers import Logger
from composer.testing import RandomClassificationDataset, SimpleModel
from composer.trainer import Trainer
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config, ParallelismConfig

WAITS_AT, BATCHES = 3, 6


class Wait(Callback):
    """Rank 0 tells its process, and waits in the middle of the training until there is a file `go`."""

    def __init__(self, signs: Path) -> None:
        self.signs = signs

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == WAITS_AT and dist.get_global_rank() == 0:
            (self.signs / "pid.new").write_text(str(os.getpid()))
            (self.signs / "pid.new").rename(self.signs / "pid")
            while not (self.signs / "go").exists():
                time.sleep(0.02)


def train(folder: str, divided: bool, signs: Path) -> None:
    """Start the run or continue it."""
    torch.set_num_threads(1)
    data, model = RandomClassificationDataset(size=64), SimpleModel()
    several = dist.get_world_size() > 1
    more: dict[str, Any] = {"parallelism_config": ParallelismConfig(fsdp=FSDP2Config())} if divided else {}
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4, sampler=dist.get_sampler(data) if several else None),
        max_duration=f"{BATCHES}ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        callbacks=[Wait(signs)],
        seed=1,
        run_name="run",
        save_folder=folder,
        save_interval="1ba",
        autoresume=True,
        progress_bar=False,
        load_progress_bar=False,
        device="cpu",
        **more,
    )
    began = trainer.state.timestamp.batch.value
    trainer.fit()
    trainer.close()
    if dist.get_global_rank() == 0:
        (signs / "ended").write_text(json.dumps([began, trainer.state.timestamp.batch.value]))


if __name__ == "__main__":
    train(sys.argv[1], sys.argv[2] == "divided", Path(sys.argv[3]))
