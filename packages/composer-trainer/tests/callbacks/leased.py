"""A run that waits in the middle of its training; tests launch it several times with one save folder.

Arguments: the save folder, and a folder for signs.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from composer.core import Callback, State
from composer.loggers import Logger
from composer.testing import RandomClassificationDataset, SimpleModel
from composer.trainer import Trainer

WAITS_AT, BATCHES = 3, 6


class Wait(Callback):
    """Tells that it trains, and waits in the middle of the training until there is a file `go`."""

    def __init__(self, signs: Path) -> None:
        self.signs = signs

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == WAITS_AT:
            (self.signs / "waits").touch()
            while not (self.signs / "go").exists():
                time.sleep(0.02)


def train(folder: str, signs: Path) -> None:
    """Start the run or continue it."""
    torch.set_num_threads(1)
    data, model = RandomClassificationDataset(size=64), SimpleModel()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4),
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
    )
    began = trainer.state.timestamp.batch.value
    trainer.fit()
    trainer.close()
    (signs / "ended").write_text(json.dumps([began, trainer.state.timestamp.batch.value]))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    train(sys.argv[1], Path(sys.argv[2]))
