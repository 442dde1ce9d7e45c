"""Models and data on which every algorithm acts, and the algorithms with arguments for them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy
from torchvision.datasets import VisionDataset
from torchvision.models.resnet import Bottleneck
from torchvision.transforms import ToTensor
from transformers import BertConfig, BertModel

from composer.core import Algorithm
from composer.loss import soft_cross_entropy
from composer.models import ComposerModel
from tools.pairs import classes, judge

CLASSES = {cls.__name__: cls for cls in classes()}


def teacher() -> torch.nn.Module:
    """Return a classifier of images of any size, with the same weights each time."""
    linear = torch.nn.Linear(3, 4)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(12.0).view(4, 3).sin())
        linear.bias.zero_()
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), linear)


def index_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the indices of the classes, of shape (N,), of a batch of `captioned`."""
    return batch["index"].flatten()


# Small enough for the models here, and acting within three epochs of one batch.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Alibi": {"max_sequence_length": 32},
    "BatchSizeWarmup": {"initial_batch_size": 2, "duration": "12sp"},
    "BlurPool": {"min_channels": 0},
    "ChunkedCrossEntropy": {"head_name": "last", "target_key": index_of},
    "Distillation": {"teacher": teacher()},
    "EMA": {"half_life": "2ba"},
    "EMANesterov": {"beta": 1.0, "decay": 0.9, "begin": "1ba", "end": "1dur"},
    "Factorize": {"min_channels": 4, "min_features": 4, "latent_channels": 4, "latent_features": 4},
    "GhostBatchNorm": {"ghost_batch_size": 4},
    "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 0.1},
    "LAWA": {"num_snapshots": 2, "interval": "1ba"},
    "LayerFreezing": {"freeze_start": 0.0, "freeze_level": 0.5},
    "LogitSoftcap": {"final": 5.0, "attention": 5.0, "head_name": "head"},
    "Muon": {"lr": 0.02},
    "PostHocEMA": {"snapshot_interval": "1ba"},
    "ProgressiveResizing": {"delay_fraction": 0.3, "finetune_fraction": 0.3},
    "QKNorm": {"query_name": "query", "key_name": "key", "head_dim": 8},
    "SAM": {"rho": 0.05, "interval": 2},
    "SOAP": {"lr": 0.003},
    "SWA": {"swa_start": "1ep", "swa_end": "2ep", "update_interval": "1ep"},
    "ScaleSchedule": {"ratio": 2.0},
    "ScheduleFree": {"warmup": "2ba"},
    "SelectiveBackprop": {"start": 0.0, "end": 1.0, "interrupt": 0},
    "SeqLengthWarmup": {"duration": 0.5, "min_seq_length": 8, "max_seq_length": 16},
    "SequencePacking": {"length": 16},  # a row for each text, with its image
    "SqueezeExcite": {"min_channels": 4},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck", "drop_rate": 0.5},
    "Whitening": {"num_images": 8, "bias_duration": "1ep"},
    "ZLoss": {"coefficient": 0.1},
}
# What differs from the arguments of a run of three batches, so that an algorithm acts before, at and after each death.
LONGER: dict[str, dict[str, Any]] = {
    # Normalization needs two examples, also after `SelectiveBackprop` has kept half of them.
    "BatchSizeWarmup": {"initial_batch_size": 4, "duration": "12sp"},
    "EMA": {"half_life": "4ba", "ema_start": "2ba"},
    "GyroDropout": {"p": 0.25, "sigma": 16, "tau": 4},  # other masks every three batches
    "LAWA": {"num_snapshots": 3, "interval": "2ba"},
    "LayerFreezing": {"freeze_start": 0.0, "freeze_level": 1.0},
    "PostHocEMA": {"update_interval": "2ba", "snapshot_interval": "1ep"},
    "ProgressiveResizing": {"mode": "crop", "delay_fraction": 0.1, "finetune_fraction": 0.1, "size_increment": 2},
    "SWA": {
        "swa_start": "0.1dur",
        "swa_end": "0.8dur",
        "update_interval": "1ba",
        "schedule_swa_lr": True,
        "swa_lr": 0.5,
    },
    "SelectiveBackprop": {"start": 0.0, "end": 0.9, "interrupt": 3},
    "SeqLengthWarmup": {"duration": 0.9, "min_seq_length": 4, "max_seq_length": 16, "step_size": 3},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck", "drop_rate": 0.9, "drop_warmup": "9ba"},
    "Whitening": {"num_images": 8, "bias_duration": "4ba"},
}
# What wins public records together, all of it begun or ended within nine batches.
RECORD: dict[str, dict[str, Any]] = {
    "Muon": {
        "lr": 0.02,
        "weight_decay": 0.1,
        "momentum": (0.9, 0.99),
        "momentum_start": "0.2dur",
        "momentum_after": (0.8, 0.95),
        "row_floor": 0.4,
        "soap_beta": 0.9,
        "soap_frequency": 2,
    },
    "Hyperball": {"lr": 0.02},
    "CautiousDecay": {"weight_decay": 1.0},
    "EMANesterov": {"decay": 0.9, "begin": "2ba", "end": "0.8dur"},
    "EMA": {"half_life": "3ba", "ema_start": "2ba", "blend": 0.6},
}
LANGUAGE = {
    "Alibi",
    "ChunkedCrossEntropy",
    "GatedLinearUnits",
    "LogitSoftcap",
    "QKNorm",
    "SeqLengthWarmup",
    "SequencePacking",
}
Norm = Callable[[int], torch.nn.Module]
WITHOUT_LOGITS = {"ChunkedCrossEntropy"}  # in training, so that there are no training metrics
LOWER_PRECISION = {"FusedLayerNorm", "LowPrecisionGroupNorm", "LowPrecisionLayerNorm"}


class Images(VisionDataset):
    """Images, shape (N, H, W, 3), uint8, and their classes."""

    def __init__(self, pixels: Any, targets: Any, transform: Any = None) -> None:
        super().__init__("", transform=ToTensor() if transform is None else transform)
        self.images = [Image.fromarray(image) for image in pixels]
        self.targets = list(targets)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        assert self.transform is not None
        return self.transform(self.images[index]), self.targets[index]


def noise(count: int = 8, transform: Any = None) -> Images:
    """Images of four classes."""
    pixels = np.random.default_rng(5).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
    return Images(pixels, [index % 4 for index in range(count)], transform)


class Vision(torch.nn.Sequential):
    """A small network with a layer of every kind that some algorithm changes.

    Args:
        num_classes: The number of outputs.
        norm: Makes most of the normalizations, from a number of channels.
        dropout: The probability to drop a feature.
    """

    def __init__(self, num_classes: int, norm: Norm = torch.nn.BatchNorm2d, dropout: float = 0.5) -> None:
        super().__init__(
            torch.nn.Conv2d(3, 24, 2, stride=2),
            norm(24),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(24, 16, 1),
            Bottleneck(16, 4, norm_layer=norm),
            torch.nn.Conv2d(16, 16, 3, padding=1),
            torch.nn.GroupNorm(4, 16),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.LayerNorm(16),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(16, num_classes),
        )


class Classifier(ComposerModel):
    """Classifies pairs of images and targets."""

    def __init__(
        self, num_classes: int = 4, seed: int = 1, norm: Norm = torch.nn.BatchNorm2d, dropout: float = 0.5
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.vision = Vision(num_classes, norm, dropout)

    def forward(self, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.vision(batch[0])
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return soft_cross_entropy(outputs, batch[1], *args, **kwargs)


class Captioned(Classifier):
    """Classifies dictionaries of an image and a text, for the algorithms of language models."""

    def __init__(self, seed: int = 1, norm: Norm = torch.nn.BatchNorm2d, dropout: float = 0.5) -> None:
        super().__init__(seed=seed, norm=norm, dropout=dropout)
        rate = min(dropout, 0.1)
        self.text = BertModel(
            BertConfig(
                vocab_size=32,
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=32,
                hidden_dropout_prob=rate,
                attention_probs_dropout_prob=rate,
            ),
            add_pooling_layer=False,
        )
        self.head = torch.nn.Linear(16, 4)
        self.last = torch.nn.Linear(4, 4)

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = self.text(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        outputs: torch.Tensor = self.last(self.vision(batch["image"]) + self.head(hidden.mean(1)))
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return soft_cross_entropy(outputs, batch["label"], *args, **kwargs)


class Measured(Classifier):
    """With metrics, one of which shows the slightest difference."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {
            "Accuracy": MulticlassAccuracy(num_classes=4, average="micro", validate_args=False),
            "Mean": MeanMetric(nan_strategy=0.0),
        }

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        target = batch["label"].argmax(1) if isinstance(batch, dict) else batch[1]
        metric.update(*((outputs.float(),) if isinstance(metric, MeanMetric) else (outputs, target)))


class MeasuredCaptioned(Measured, Captioned):
    """Both."""


class EvaluatedCaptioned(MeasuredCaptioned):
    """With metrics in evaluation only."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {} if is_train else super().get_metrics(is_train)


class Unmasked(MeasuredCaptioned):
    """Without what makes other libraries read: attention masks (`transformers`) and `MeanMetric` (`torchmetrics`)."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        device = self.last.weight.device
        return {"Accuracy": MulticlassAccuracy(num_classes=4, average="micro", validate_args=False).to(device)}

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = self.text(input_ids=batch["input_ids"]).last_hidden_state
        outputs: torch.Tensor = self.last(self.vision(batch["image"]) + self.head(hidden.mean(1)))
        return outputs


class UnmaskedWithoutMetrics(Unmasked):
    """A model whose outputs may be freed after the step, or are no logits."""

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {}


def captioned(examples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    images, labels = torch.utils.data.default_collate(examples)
    text = torch.arange(16).repeat(len(labels), 1).add(labels[:, None]).remainder(32)
    dense = torch.nn.functional.one_hot(labels, 4).float()
    # The text is first: its length is that of the batch.
    return {
        "input_ids": text,
        "attention_mask": torch.ones_like(text),
        "image": images,
        "label": dense,
        "index": labels[:, None],
    }


def arguments_of(name: str) -> dict[str, Any]:
    """Return the arguments of an algorithm for a run of about nine batches."""
    return LONGER.get(name, ARGUMENTS.get(name, {}))


def make(name: str, keys: dict[str, str], arguments: dict[str, Any] | None = None) -> Algorithm:
    """An algorithm that finds images and labels under keys; `arguments` go before those of the table."""
    # A copy: an algorithm may move what it is given to the device of its run.
    given = ARGUMENTS.get(name, {}) if arguments is None else arguments
    algorithm = CLASSES[name](**copy.deepcopy(given))
    for key, value in keys.items():
        if hasattr(algorithm, key) and key not in given:
            setattr(algorithm, key, value)
    return algorithm


def record_stack(*left_out: str) -> list[Algorithm]:
    """Return the algorithms of `RECORD`."""
    return [CLASSES[name](**arguments) for name, arguments in RECORD.items() if name not in left_out]


def choose(names: Sequence[str]) -> list[str]:
    """Those that may be used together; the first of two that exclude each other."""
    chosen: list[str] = []
    for name in names:
        made = [make(each, {}) for each in (*chosen, name)]
        if not any(judge(one, made[-1]).refused for one in made[:-1]):
            chosen.append(name)
    return chosen
