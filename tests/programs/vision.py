"""Trains an image classifier from scratch with methods, a schedule, evaluation and checkpoints."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import BlurPool, ChannelsLast, LabelSmoothing
from composer.callbacks import LRMonitor, SpeedMonitor
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer.optim import CosineAnnealingWithWarmupScheduler, DecoupledSGDW
from composer.utils import dist

folder = Path(sys.argv[1])
drawn = torch.Generator().manual_seed(1)
images = torch.randn(48, 3, 16, 16, generator=drawn)
labels = torch.randint(0, 10, (48,), generator=drawn)
train_set, eval_set = TensorDataset(images[:32], labels[:32]), TensorDataset(images[32:], labels[32:])

torch.manual_seed(2)
network = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1, bias=False),
    torch.nn.BatchNorm2d(16),
    torch.nn.ReLU(),
    torch.nn.Conv2d(16, 16, 3, stride=2, padding=1),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(2),
    torch.nn.Flatten(),
    torch.nn.Linear(256, 10),
)
model = ComposerClassifier(network, num_classes=10)
memory = InMemoryLogger()
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(train_set, batch_size=8, sampler=dist.get_sampler(train_set, shuffle=True)),
    eval_dataloader=DataLoader(eval_set, batch_size=8),
    eval_interval="1ep",
    max_duration="3ep",
    optimizers=DecoupledSGDW(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4),
    schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="1ep", alpha_f=0.01),
    algorithms=[
        BlurPool(replace_convs=True, replace_maxpools=True, blur_first=True),
        ChannelsLast(),
        LabelSmoothing(0.1),
    ],
    callbacks=[LRMonitor(), SpeedMonitor(window_size=2)],
    loggers=memory,
    save_folder=str(folder / "checkpoints"),
    save_interval="1ep",
    save_num_checkpoints_to_keep=2,
    run_name="vision",
    device="cpu",
    seed=17,
    progress_bar=False,
)
trainer.fit()

assert trainer.state.timestamp.epoch == "3ep"
assert len(list((folder / "checkpoints").glob("ep*.pt"))) == 2
assert len(memory.data["metrics/eval/MulticlassAccuracy"]) == 3
assert memory.data["lr-DecoupledSGDW/group0"][-1][1] < 0.05
trainer.close()
torch.save(network.state_dict(), folder / "weights.pt")
