"""Stops a run when its metric no longer improves, and another one at a threshold; then goes on from it."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.callbacks import EarlyStopper, ThresholdStopper
from composer.models import ComposerClassifier

folder = Path(sys.argv[1])
drawn = torch.Generator().manual_seed(1)
inputs = torch.randn(64, 8, generator=drawn)
targets = (inputs[:, 0] > 0).long()
data = TensorDataset(inputs, targets)


def make_trainer(callback, lr):
    torch.manual_seed(2)
    model = ComposerClassifier(torch.nn.Linear(8, 2), num_classes=2)
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=16),
        eval_dataloader=DataLoader(data, batch_size=32),
        max_duration="50ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=lr),
        callbacks=[callback],
        device="cpu",
        seed=3,
        progress_bar=False,
    )


stopped = make_trainer(EarlyStopper(monitor="MulticlassAccuracy", dataloader_label="eval", patience=2), lr=0.0)
stopped.fit()
assert stopped.state.timestamp.epoch == "4ep", stopped.state.timestamp.epoch
stopped.close()

reached = make_trainer(ThresholdStopper("MulticlassAccuracy", "eval", threshold=0.9), lr=0.5)
reached.fit()
assert 1 <= reached.state.timestamp.epoch.value < 50
assert float(reached.state.eval_metrics["eval"]["MulticlassAccuracy"].compute()) >= 0.9
before = reached.state.timestamp.epoch.value
reached.fit(duration="1ep")
assert reached.state.timestamp.epoch.value == before + 1
reached.close()
torch.save(reached.state.model.module.state_dict(), folder / "weights.pt")
