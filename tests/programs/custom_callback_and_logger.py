"""Defines a callback with a state, a callback that changes the run, and a logger that writes CSV."""

import csv
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Time, TimeUnit, Trainer
from composer.loggers import LoggerDestination
from composer.models import ComposerClassifier

folder = Path(sys.argv[1])


class CSVLogger(LoggerDestination):
    def __init__(self, path):
        self.path, self.rows, self.hyperparameters = path, [], {}

    def log_hyperparameters(self, hyperparameters):
        self.hyperparameters.update(hyperparameters)

    def log_metrics(self, metrics, step=None):
        self.rows += [(step, name, float(value)) for name, value in metrics.items()]

    def post_close(self):
        with open(self.path, "w", newline="") as file:
            csv.writer(file).writerows(self.rows)


class LossAverage(Callback):
    def __init__(self):
        self.total, self.batches = 0.0, 0

    def batch_end(self, state, logger):
        self.total, self.batches = self.total + state.loss.item(), self.batches + 1

    def epoch_end(self, state, logger):
        logger.log_metrics({"loss/average": self.total / self.batches})

    def state_dict(self):
        return {"total": self.total, "batches": self.batches}

    def load_state_dict(self, state):
        self.total, self.batches = state["total"], state["batches"]


class StopAt(Callback):
    def batch_end(self, state, logger):
        if state.timestamp.batch >= Time(10, TimeUnit.BATCH):
            state.stop_training()


drawn = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(32, 8, generator=drawn), torch.randint(0, 4, (32,), generator=drawn))


def train(duration, callbacks, **arguments):
    torch.manual_seed(2)
    model = ComposerClassifier(torch.nn.Linear(8, 4), num_classes=4)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8),
        max_duration=duration,
        optimizers=torch.optim.Adam(model.parameters(), lr=0.01),
        callbacks=callbacks,
        device="cpu",
        seed=3,
        progress_bar=False,
        **arguments,
    )
    trainer.fit()
    trainer.close()
    return trainer


logger = CSVLogger(folder / "metrics.csv")
average = LossAverage()
trainer = train("5ep", [average, StopAt()], loggers=[logger], save_folder=str(folder / "saved"), save_interval="4ba")
assert trainer.state.timestamp.batch == "10ba"
assert average.batches == 10
names = {name for _, name, _ in logger.rows}
assert {"loss/train/total", "loss/average", "metrics/train/MulticlassAccuracy"} <= names, names
assert logger.hyperparameters["num_nodes"] == 1
assert len((folder / "metrics.csv").read_text().splitlines()) == len(logger.rows)

resumed = LossAverage()
trainer = train("3ep", [resumed], load_path=str(folder / "saved" / "ep1-ba8-rank0.pt"))
assert resumed.batches == 12
torch.save(trainer.state.model.module.state_dict(), folder / "weights.pt")
