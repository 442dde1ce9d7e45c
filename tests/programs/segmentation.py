"""Trains a segmentation model of one's own: two losses, MIoU, pictures of predictions."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from composer import ComposerModel, Trainer
from composer.callbacks import ImageVisualizer
from composer.loggers import LoggerDestination
from composer.loss import DiceLoss, soft_cross_entropy
from composer.metrics import CrossEntropy, MIoU
from composer.optim import DecoupledAdamW, PolynomialScheduler

folder = Path(sys.argv[1])
CLASSES = 3


class Segmenter(ComposerModel):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, CLASSES, 1)
        )
        self.dice = DiceLoss(softmax=True, batch=True)
        self.train_miou = MIoU(CLASSES)
        self.val_metrics = {"MIoU": MIoU(CLASSES), "CrossEntropy": CrossEntropy(ignore_index=-1)}

    def forward(self, batch):
        return self.network(batch[0])

    def loss(self, outputs, batch):
        cross_entropy = soft_cross_entropy(outputs, batch[1], ignore_index=-1)
        dice = self.dice(outputs, batch[1])
        return {"cross_entropy": cross_entropy, "dice": dice, "total": 0.6 * cross_entropy + 0.4 * dice}

    def get_metrics(self, is_train=False):
        return {"MIoU": self.train_miou} if is_train else self.val_metrics

    def update_metric(self, batch, outputs, metric):
        metric.update(outputs, batch[1])


class Pictures(LoggerDestination):
    def __init__(self):
        self.names, self.metrics = [], {}

    def log_images(
        self, images, name="Images", channels_last=False, step=None, masks=None, mask_class_labels=None, use_table=True
    ):
        self.names.append((name, sorted(masks or ())))

    def log_metrics(self, metrics, step=None):
        self.metrics.update(metrics)


drawn = torch.Generator().manual_seed(1)
images = torch.randn(16, 3, 12, 12, generator=drawn)
masks = torch.randint(0, CLASSES, (16, 12, 12), generator=drawn)
data = TensorDataset(images, masks)
torch.manual_seed(2)
model, pictures = Segmenter(), Pictures()
trainer = Trainer(
    model=model,
    train_dataloader=DataLoader(data, batch_size=4),
    eval_dataloader=DataLoader(data, batch_size=8),
    max_duration="3ep",
    optimizers=DecoupledAdamW(model.parameters(), lr=0.01, betas=(0.9, 0.99), weight_decay=1e-5),
    schedulers=PolynomialScheduler(power=0.9),
    callbacks=ImageVisualizer(interval="4ba", mode="segmentation", num_images=2),
    loggers=pictures,
    device="cpu",
    seed=3,
    progress_bar=False,
)
trainer.fit()
trainer.close()

assert ("Images/Train", ["ground_truth", "prediction"]) in pictures.names
assert {"loss/train/cross_entropy", "loss/train/dice", "loss/train/total"} <= pictures.metrics.keys()
assert 0 <= float(pictures.metrics["metrics/eval/MIoU"]) <= 100
torch.save(model.network.state_dict(), folder / "weights.pt")
