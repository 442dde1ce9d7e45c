"""A run in several processes that meets a mishap; `test_lost_ranks.py` starts it with the launcher.

Arguments: what happens to rank 1, a folder, and `dist_timeout`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from composer.core import Callback, State
from composer.loggers import Logger
from composer.testing import RandomClassificationDataset, SimpleModel
from composer.trainer import Trainer
from composer.utils import dist

HAPPENS_AT = 3


class Mishap(Callback):
    """Happens to one rank in the middle of a batch, while the other waits for its gradients."""

    def __init__(self, what: str, folder: Path) -> None:
        self.what, self.folder = what, folder

    def after_forward(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value != HAPPENS_AT or dist.get_global_rank() != 1:
            return
        (self.folder / "when").write_text(str(time.time()))
        if self.what == "raise":
            raise ValueError("this rank cannot go on")
        if self.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self.what == "train on" and state.timestamp.batch.value >= HAPPENS_AT:
            (self.folder / f"trains{dist.get_global_rank()}").touch()
            time.sleep(0.02)


def train(what: str, folder: Path, timeout: float) -> None:
    """Train until the mishap."""
    torch.set_num_threads(1)
    (folder / f"pid{dist.get_global_rank()}").write_text(str(os.getpid()))
    data = RandomClassificationDataset(size=64)
    model = SimpleModel()
    saving = {"save_folder": str(folder / "saved"), "save_interval": "100ep"} if what == "train on" else {}
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4, sampler=dist.get_sampler(data, shuffle=True)),
        max_duration="100ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        callbacks=[Mishap(what, folder)],
        seed=1,
        run_name="run",
        **saving,  # type: ignore[arg-type]
        dist_timeout=timeout,
        progress_bar=False,
        device="cpu",
    )
    trainer.fit()


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
