"""Evaluates on several data sets, each with its own metrics, interval and size."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import DataSpec, Evaluator, Trainer
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier

folder = Path(sys.argv[1])
drawn = torch.Generator().manual_seed(1)


def loader(samples):
    inputs = torch.randn(samples, 8, generator=drawn)
    return DataLoader(TensorDataset(inputs, torch.randint(0, 4, (samples,), generator=drawn)), batch_size=8)


torch.manual_seed(2)
network = torch.nn.Linear(8, 4)
model = ComposerClassifier(network, num_classes=4)
memory = InMemoryLogger()
evaluators = [
    Evaluator(label="near", dataloader=loader(16), metric_names=["MulticlassAccuracy"], eval_interval="2ba"),
    Evaluator(label="far", dataloader=DataSpec(loader(24)), metric_names=["CrossEntropy"], subset_num_batches=2),
]
trainer = Trainer(
    model=model,
    train_dataloader=loader(32),
    eval_dataloader=evaluators,
    eval_interval="1ep",
    max_duration="8ba",
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    loggers=memory,
    device="cpu",
    seed=3,
    progress_bar=False,
)
trainer.fit()
trainer.eval(eval_dataloader=Evaluator(label="late", dataloader=loader(8)))
predictions = trainer.predict(loader(16))

assert len(memory.data["metrics/near/MulticlassAccuracy"]) == 4
assert len(memory.data["metrics/far/CrossEntropy"]) == 2
assert "metrics/far/MulticlassAccuracy" not in memory.data
assert trainer.state.eval_metrics["late"].keys() >= {"MulticlassAccuracy", "CrossEntropy"}
assert [tuple(batch.shape) for batch in predictions] == [(8, 4), (8, 4)]
trainer.close()
torch.save(network.state_dict(), folder / "weights.pt")
