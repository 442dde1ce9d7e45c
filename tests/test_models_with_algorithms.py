"""An algorithm trains every kind of vision model, says that it finds nothing to do there, or refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_runs import CLASSES, LANGUAGE, LOWER_PRECISION, Images, make, noise
from PIL import Image
from torch.utils.data import DataLoader, Dataset, TensorDataset

from composer import Trainer
from composer.algorithms.stochastic_depth import apply_stochastic_depth
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Precision
from composer.models import (
    ComposerModel,
    UNet,
    UNet3D,
    composer_deeplabv3,
    composer_efficientnetb0,
    composer_resnet,
    composer_resnet_cifar,
    composer_timm,
    mnist_model,
    vit_small_patch16,
)

AUGMENTATIONS = frozenset({"AugMix", "RandAugment"})  # of images alone: masks would not follow
# Of layers that most models do not have: other normalizations than of batches, dropout, bottlenecks.
NEVER = frozenset(LOWER_PRECISION | {"GyroDropout", "StochasticDepth"})
OF_IMAGES = {"BlurPool", "Factorize", "SqueezeExcite"}  # they change 2-D convolutions
SIZE = (AssertionError, "Wrong image (height|width)! Expected 16")
# The first layers of these models have fewer filters than whitening needs, or more.
MISFIT: dict[str, tuple[type[Exception], str]] = {"Whitening": (ValueError, r"must have one group and 2 \* ")}
RESIZED_TARGETS = {"ProgressiveResizing": {"delay_fraction": 0.3, "finetune_fraction": 0.3, "resize_targets": True}}


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        model: Makes the smallest one.
        data: Makes its data.
        idle: Algorithms that find nothing to change.
        refused: Algorithms that cannot work on it, and their errors.
        left_out: Algorithms that cannot work on such data.
        arguments: Of algorithms, where they differ from those for other kinds.
    """

    model: Callable[[], ComposerModel]
    data: Callable[[], Dataset[Any]] = noise
    idle: frozenset[str] = frozenset()
    refused: dict[str, tuple[type[Exception], str]] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)


class GreyImages(Images):
    """Images of one channel, shape (1, H, W)."""

    def __init__(self) -> None:
        pixels = np.random.default_rng(5).integers(0, 256, (8, 16, 16), dtype=np.uint8)
        super().__init__([], [index % 4 for index in range(8)])
        self.images = [Image.fromarray(image) for image in pixels]


def masked(*shape: int) -> Dataset[Any]:
    """Images or volumes of a shape (channels, ...), and masks of three classes."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(4, *shape, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (4, *shape[1:]), generator=generator))


KINDS = {
    "ResNet-9": Kind(lambda: composer_resnet_cifar("resnet_9", 4), idle=NEVER),
    "MNIST": Kind(lambda: mnist_model(4), data=GreyImages, idle=NEVER),
    "EfficientNet": Kind(
        lambda: composer_efficientnetb0(4),
        idle=NEVER - {"GyroDropout"},
        # Its last layers see one pixel per image: normalized over two examples, gradients overflow on some processors.
        arguments={"BatchSizeWarmup": {"initial_batch_size": 4, "duration": "12sp"}},
    ),
    "ViT": Kind(
        lambda: vit_small_patch16(4, image_size=16, num_layers=1, dropout=0.1),
        idle=frozenset({"GhostBatchNorm", "LowPrecisionGroupNorm", "SqueezeExcite", "StochasticDepth"}),
        refused={"ColOut": SIZE, "ProgressiveResizing": SIZE},
    ),
    "DeepLab": Kind(
        lambda: composer_deeplabv3(3, "resnet18"),
        data=lambda: masked(3, 16, 16),
        idle=NEVER - {"GyroDropout"},
        left_out=AUGMENTATIONS,
        arguments=RESIZED_TARGETS,
    ),
    "U-Net": Kind(
        lambda: UNet(2, in_channels=3, width=8, levels=3, norm="batch"),
        data=lambda: masked(3, 16, 16),
        idle=NEVER,
        left_out=AUGMENTATIONS,
        arguments=RESIZED_TARGETS,
    ),
    "3-D U-Net": Kind(
        lambda: UNet3D(2, in_channels=1, width=4, levels=2, norm="group"),
        data=lambda: masked(1, 8, 8, 8),
        idle=NEVER - {"LowPrecisionGroupNorm"} | OF_IMAGES | {"GhostBatchNorm", "Whitening"},
        refused={
            "CutMix": (ValueError, "."),
            "ProgressiveResizing": (ValueError, r"must have shape \(N, C, H, W\) to be resized"),
        },
        left_out=AUGMENTATIONS,
    ),
}
# What depends on the layers of a model, or on the size of its images. All others are tried with images and with masks.
OF_LAYERS = set().union(*(facts.idle | facts.refused.keys() for facts in KINDS.values()), MISFIT)
OF_LAYERS |= {"ChannelsLast", "LayerFreezing", "WeightStandardization"}
PAIRS = [
    (kind, name)
    for kind, facts in KINDS.items()
    for name in sorted(CLASSES.keys() - LANGUAGE - facts.left_out)
    if kind in ("ResNet-9", "U-Net") or name in OF_LAYERS
]


def trainer_of(model: ComposerModel, data: Dataset[Any], *names: str, **arguments: Any) -> Trainer:
    """Return a trainer of three steps, one in each epoch, which evaluates if there are no algorithms."""
    loader = DataLoader(data, batch_size=8)
    return Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=None if names else loader,
        max_duration="3ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        algorithms=[make(name, {}, arguments.get(name)) for name in names],
        precision=Precision.AMP_BF16 if LOWER_PRECISION & set(names) else Precision.FP32,
        progress_bar=False,
        device="cpu",
        seed=3,
    )


def train(trainer: Trainer, **arguments: Any) -> None:
    before = {key: value.clone() for key, value in trainer.state.model.state_dict().items()}
    try:
        trainer.fit(**arguments)
    finally:
        trainer.close()
    after = trainer.state.model.state_dict()

    assert torch.isfinite(torch.as_tensor(trainer.state.total_loss_dict["loss/train/total"]))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_trained_and_evaluated_with_its_own_metrics(kind: str) -> None:
    torch.manual_seed(0)
    model = KINDS[kind].model()
    trainer = trainer_of(model, KINDS[kind].data())
    train(trainer)
    metrics = trainer.state.eval_metrics["eval"]

    assert set(metrics) == set(model.get_metrics(is_train=False))
    assert all(torch.isfinite(metric.compute()) for metric in metrics.values())


@pytest.mark.parametrize(("kind", "name"), PAIRS, ids=["+".join(pair) for pair in PAIRS])
def test_an_algorithm_trains_a_model_or_says_why_not(kind: str, name: str) -> None:
    torch.manual_seed(0)
    facts = KINDS[kind]
    model, data = facts.model(), facts.data()
    arguments = {"Distillation": {"teacher": facts.model()}} | facts.arguments
    refused = (MISFIT if name not in facts.idle else {}) | facts.refused
    if name in refused:
        error, message = refused[name]
        with pytest.raises(error, match=message):
            train(trainer_of(model, data, name, **arguments))
    elif name in facts.idle:
        with pytest.warns(NoEffectWarning):
            train(trainer_of(model, data, name, **arguments), duration="1ba")
    else:
        train(trainer_of(model, data, name, **arguments))


def test_the_published_recipe_trains_a_resnet() -> None:
    """The algorithms of MosaicML's longest recipe for ResNet-50."""
    names = ("BlurPool", "ChannelsLast", "EMA", "ProgressiveResizing", "LabelSmoothing", "MixUp", "SAM", "ColOut")
    model = composer_resnet("resnet50", 4, initializers=["kaiming_normal", "bn_uniform"])

    train(trainer_of(model, noise(), *names, "RandAugment", "StochasticDepth"))


def test_algorithms_train_a_network_of_timm() -> None:
    pytest.importorskip("timm")
    model = composer_timm("resnet10t", num_classes=4)

    train(trainer_of(model, noise(), "BlurPool", "ChannelsLast", "SqueezeExcite", "EMA"))


@pytest.mark.parametrize(("name", "cls", "count"), [("resnet_9", "_Residual", 2), ("resnet_20", "BasicBlock", 9)])
def test_blocks_of_the_residual_networks_for_cifar_can_be_skipped(name: str, cls: str, count: int) -> None:
    model = composer_resnet_cifar(name)
    apply_stochastic_depth(model, lambda module: type(module).__name__ == cls, drop_distribution="uniform")

    assert [pytest.approx(0.2)] * count == [float(m.drop_rate) for m in model.modules() if type(m).__name__ == cls]
    assert torch.isfinite(model((torch.randn(2, 3, 32, 32), None))).all()
