"""Every pair of algorithms trains alike in both orders of listing, or is refused for the declared reason."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import VisionDataset
from torchvision.models.resnet import Bottleneck
from torchvision.transforms import ToTensor
from transformers import BertConfig, BertModel

from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning, NotIntendedUseWarning
from composer.core import Algorithm, ConflictError, Precision
from composer.loss import soft_cross_entropy
from composer.models import ComposerModel
from composer.recipes import Data
from composer.recipes._data import load_images
from composer.testing import deep_compare
from tools.pairs import classes, judge, pairs, text_of
from tools.workspace import Workspace

CLASSES = {cls.__name__: cls for cls in classes()}
# Small enough for the models here, and acting within three epochs of one batch.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Alibi": {"max_sequence_length": 32},
    "BlurPool": {"min_channels": 0},
    "EMA": {"half_life": "2ba"},
    "Factorize": {"min_channels": 4, "min_features": 4, "latent_channels": 2, "latent_features": 2},
    "GhostBatchNorm": {"ghost_batch_size": 4},
    "GradientClipping": {"clipping_type": "norm", "clipping_threshold": 0.1},
    "LayerFreezing": {"freeze_start": 0.0, "freeze_level": 0.5},
    "ProgressiveResizing": {"delay_fraction": 0.3, "finetune_fraction": 0.3},
    "SAM": {"rho": 0.05, "interval": 2},
    "SWA": {"swa_start": "1ep", "swa_end": "2ep", "update_interval": "1ep"},
    "ScaleSchedule": {"ratio": 2.0},
    "SelectiveBackprop": {"start": 0.0, "end": 1.0, "interrupt": 0},
    "SeqLengthWarmup": {"duration": 0.5, "min_seq_length": 8, "max_seq_length": 16},
    "SqueezeExcite": {"min_channels": 4},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck", "drop_rate": 0.5},
}
LANGUAGE = {"Alibi", "GatedLinearUnits", "SeqLengthWarmup"}
LOWER_PRECISION = {"FusedLayerNorm", "LowPrecisionGroupNorm", "LowPrecisionLayerNorm"}
PAIRS = list(itertools.combinations(sorted(CLASSES), 2))


class Images(VisionDataset):
    """Images, shape (N, H, W, 3), uint8, and their classes."""

    def __init__(self, pixels: Any, targets: Any) -> None:
        super().__init__("", transform=ToTensor())
        self.images = [Image.fromarray(image) for image in pixels]
        self.targets = list(targets)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        assert self.transform is not None
        return self.transform(self.images[index]), self.targets[index]


def noise() -> Images:
    """Eight images of four classes."""
    return Images(np.random.default_rng(5).integers(0, 256, (8, 16, 16, 3), dtype=np.uint8), [0, 1, 2, 3] * 2)


class Vision(torch.nn.Sequential):
    """A small network with a layer of every kind that some algorithm changes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(
            torch.nn.Conv2d(3, 16, 3, stride=2, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            Bottleneck(16, 4),
            torch.nn.Conv2d(16, 16, 3, padding=1),
            torch.nn.GroupNorm(4, 16),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.LayerNorm(16),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(16, num_classes),
        )


class Classifier(ComposerModel):
    """Classifies pairs of images and targets."""

    def __init__(self, num_classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.vision = Vision(num_classes)

    def forward(self, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.vision(batch[0])
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return soft_cross_entropy(outputs, batch[1], *args, **kwargs)


class Captioned(Classifier):
    """Classifies dictionaries of an image and a text, for the algorithms of language models."""

    def __init__(self) -> None:
        super().__init__()
        self.text = BertModel(
            BertConfig(
                vocab_size=32,
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=32,
            ),
            add_pooling_layer=False,
        )
        self.head = torch.nn.Linear(16, 4)

    def forward(self, batch: Any) -> torch.Tensor:
        hidden = self.text(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        outputs: torch.Tensor = self.vision(batch["image"]) + self.head(hidden.mean(1))
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return soft_cross_entropy(outputs, batch["label"], *args, **kwargs)


def captioned(examples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    images, labels = torch.utils.data.default_collate(examples)
    text = torch.arange(16).repeat(len(labels), 1).add(labels[:, None]).remainder(32)
    dense = torch.nn.functional.one_hot(labels, 4).float()
    return {"image": images, "input_ids": text, "attention_mask": torch.ones_like(text), "label": dense}


def make(name: str, keys: dict[str, str]) -> Algorithm:
    algorithm = CLASSES[name](**ARGUMENTS.get(name, {}))
    for key, value in keys.items():
        if hasattr(algorithm, key):
            setattr(algorithm, key, value)
    return algorithm


def train(names: tuple[str, ...]) -> dict[str, Any]:
    """The result of three steps, one in each epoch."""
    is_language = bool(LANGUAGE & set(names))
    model = Captioned() if is_language else Classifier()
    keys = {"input_key": "image", "target_key": "label"} if is_language else {}
    loader = torch.utils.data.DataLoader(noise(), batch_size=8, collate_fn=captioned if is_language else None)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        max_duration="3ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=[make(name, keys) for name in names],
        precision=Precision.AMP_BF16 if LOWER_PRECISION & set(names) else Precision.FP32,
        progress_bar=False,
        device="cpu",
        seed=3,
    )
    before = {key: value.clone() for key, value in trainer.state.model.state_dict().items()}
    trainer.fit()
    after = trainer.state.model.state_dict()
    loss = trainer.state.total_loss_dict["loss/train/total"]
    trainer.close()
    assert torch.isfinite(torch.as_tensor(loss))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    return {"weights": after, "loss": loss}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_algorithm_trains_alone(name: str) -> None:
    train((name,))


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair_trains_alike_in_both_orders_or_is_refused(pair: tuple[str, str]) -> None:
    expected = judge(*(CLASSES[name](**ARGUMENTS.get(name, {})) for name in pair))
    if expected.refused:
        with pytest.raises(ConflictError, match="cannot be used together"):
            train(pair)
        return
    with warnings.catch_warnings():
        if expected.discouraged:
            warnings.simplefilter("ignore", NotIntendedUseWarning)
        if "NoOpModel" in pair:  # which leaves the other one nothing to change
            warnings.simplefilter("ignore", NoEffectWarning)
        deep_compare(train(pair), train(pair[::-1]))


def test_all_vision_algorithms_run_together_for_an_epoch_of_the_digits() -> None:
    chosen: list[str] = []
    for name in sorted(CLASSES.keys() - LANGUAGE - {"NoOpModel"}):
        made = [CLASSES[each](**ARGUMENTS.get(each, {})) for each in (*chosen, name)]
        if not any(judge(one, made[-1]).refused for one in made[:-1]):
            chosen.append(name)
    digits = load_images(Data(train_samples=256))
    pixels = digits.train_images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    loader = torch.utils.data.DataLoader(Images(pixels, digits.train_labels), batch_size=64)
    model = Classifier(digits.num_classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotIntendedUseWarning)
        trainer = Trainer(
            model=model,
            train_dataloader=loader,
            max_duration="1ep",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            algorithms=[make(name, {}) for name in chosen],
            precision=Precision.AMP_BF16,
            progress_bar=False,
            device="cpu",
            seed=3,
        )
    before = {key: value.clone() for key, value in trainer.state.model.state_dict().items()}
    trainer.fit()
    after = trainer.state.model.state_dict()
    trainer.close()

    assert len(chosen) >= 24
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert all(torch.isfinite(value).all() for value in after.values())


def test_the_published_table_is_what_the_algorithms_declare() -> None:
    published = Workspace()["composer-all"].path / "COMPOSITION.md"

    assert text_of(pairs()) == published.read_text(encoding="utf-8")
