"""Survives a scheduler that kills it: the same command is launched until the run is complete."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingScheduler

folder = Path(sys.argv[1])


class Killed(Callback):
    """The scheduler, which kills the run once at each of these batches."""

    def batch_end(self, state, logger):
        batch = state.timestamp.batch.value
        marker = folder / f"killed{batch}"
        if batch in (6, 11) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(save_folder, callbacks):
    drawn = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(32, 8, generator=drawn), torch.randint(0, 4, (32,), generator=drawn))
    torch.manual_seed(2)
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 4))
    model = ComposerClassifier(network, num_classes=4)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8, shuffle=True),
        max_duration="4ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        schedulers=CosineAnnealingScheduler(),
        callbacks=callbacks,
        save_folder=str(folder / save_folder),
        save_interval="2ba",
        autoresume=True,
        run_name="resumed",
        device="cpu",
        seed=3,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return network.state_dict()


if len(sys.argv) > 2:
    torch.save(train("killed", [Killed()]), folder / "weights.pt")
else:
    launches = 0
    while launches < 10:
        launches += 1
        if subprocess.run([sys.executable, __file__, str(folder), "launched"], check=False).returncode == 0:
            break
    assert launches == 3, launches
    for name, value in train("whole", []).items():
        torch.testing.assert_close(torch.load(folder / "weights.pt", weights_only=True)[name], value, rtol=0, atol=0)
