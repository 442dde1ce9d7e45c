"""Tasks on images: digits (a smoke test), Fashion-MNIST with a short and a long budget, and CIFAR-10."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from composer.devices import Device
from composer.evidence.task import Grid, Part, Task, Variant
from composer.recipes import SGD, AdamW, Metric
from composer.recipes import digits as digits_recipe
from composer.recipes import fashion_mnist as fashion_recipe
from composer.recipes.cifar10_resnet20 import Data as Cifar10Data

ACCURACY = Metric("MulticlassAccuracy", "accuracy", scale=100, unit="%", digits=2)
_WARMUP = Grid((0.1, 0.3), low=0.01, high=0.9)
_BATCH = {"batch_size": Grid((64, 128), low=16, high=512)}
_ADAMW = {"lr": Grid((5e-3, 1e-2)), "weight_decay": Grid((0.01, 0.1)), "warmup": _WARMUP, **_BATCH}
_SGD = {
    "lr": Grid((0.15, 0.3)),
    "momentum": Grid((0.8, 0.9), high=0.99),
    "weight_decay": Grid((5e-4, 5e-3)),
    "warmup": _WARMUP,
    **_BATCH,
}


@dataclass(frozen=True)
class Images:
    """Images with fixed parts.

    Attributes:
        tuning: The training part, and the validation part as what is tested.
        final: The same training part, and the test part.
    """

    tuning: Any
    final: Any

    def loaders(self, part: Part, seed: int, device: Device, **batch_size: int) -> tuple[Any, Any]:
        """Return loaders of the training part and of another part; see `Parts`."""
        images = replace(self.tuning if part == "validation" else self.final, **batch_size)
        loaders: tuple[Any, Any] = images.loaders(seed, device)
        return loaders

    def digest(self) -> str:
        """Return a checksum of all parts."""
        sums = hashlib.sha256()
        for tensors in (self.tuning.train, self.tuning.test, self.final.train, self.final.test):
            for tensor in tensors:
                sums.update(tensor.contiguous().numpy().tobytes())
        return sums.hexdigest()[:16]


@dataclass(frozen=True)
class ImagesSGD(SGD):
    """SGD with a batch size to tune.

    Args:
        batch_size: Images per batch.
    """

    batch_size: int = 128


@dataclass(frozen=True)
class ImagesAdamW(AdamW):
    """AdamW with a batch size to tune.

    Args:
        batch_size: Images per batch.
    """

    batch_size: int = 128


def _load(source: Any, validation: int, folder: Path | None) -> Images:
    """Load images whose training part is the same for validation and test."""
    source = replace(source, data=folder) if hasattr(source, "data") else source
    return Images(replace(source, validation_samples=validation).load(), source.load())


def build(network: Any, images: Images) -> Any:
    """Return a network whose weights have the memory format that is fastest for convolutions: it is part of plain."""
    return network.build(images.tuning).to(memory_format=torch.channels_last)


def _variants(network: Any, lr: float, sgd_lr: float, batch_size: int = 128) -> dict[str, Variant]:
    return {
        "adamw": Variant(partial(build, network), ImagesAdamW(lr=lr, warmup=0.3, batch_size=batch_size), _ADAMW),
        "sgd": Variant(partial(build, network), ImagesSGD(lr=sgd_lr, warmup=0.3, batch_size=batch_size), _SGD),
    }


_COMMON: dict[str, Any] = {
    "metric": ACCURACY,
    "kind": "images",
    "base": {"Muon": "adamw"},  # the learning rate of AdamW transfers to Muon
    "not_judged": {"ChannelsLast": "it is part of plain"},
}


def digits() -> Task:
    """Return the smoke test: the handwritten digits of scikit-learn, with a short search.

    Its results are not evidence.
    """
    plain = _variants(digits_recipe.Network(width=8), lr=1e-2, sgd_lr=1.0, batch_size=50)["adamw"]
    return Task(
        name="digits",
        version=2,
        summary="A smoke test, not evidence: a small ResNet on 500 handwritten digits of scikit-learn.",
        data=partial(_load, digits_recipe.Data(), 400),
        variants={"adamw": replace(plain, grid={"lr": _ADAMW["lr"]})},
        steps=100,
        ladder=(0.5, 1.0),
        **_COMMON,
    )


def fashion_mnist() -> Task:
    """Return the task with 20,000 images of Fashion-MNIST and a budget of a few epochs."""
    return Task(
        name="fashion_mnist",
        version=2,
        summary="Five convolutions on 20,000 images of Fashion-MNIST.",
        data=partial(_load, fashion_recipe.Data(train_samples=20_000), 10_000),
        variants=_variants(fashion_recipe.Network(width=8), lr=1e-2, sgd_lr=0.3),
        steps=800,
        ladder=(0.5, 0.75, 1.0, 1.5),
        judges_regularizers=False,
        **_COMMON,
    )


def fashion_mnist_long() -> Task:
    """Return the task with a long budget for few images, which overfits without regularization."""
    return Task(
        name="fashion_mnist_long",
        version=2,
        summary="Five convolutions on 5,000 images of Fashion-MNIST, for 50 epochs: long enough for regularizers.",
        data=partial(_load, fashion_recipe.Data(train_samples=5_000), 10_000),
        variants=_variants(fashion_recipe.Network(width=8), lr=1e-2, sgd_lr=0.3),
        steps=1_950,
        ladder=(0.5, 1.0),
        **_COMMON,
    )


def cifar10() -> Task:
    """Return the task with 10,000 images of CIFAR-10."""
    return Task(
        name="cifar10",
        version=2,
        summary="Five convolutions on 10,000 images of CIFAR-10.",
        data=partial(_load, Cifar10Data(train_samples=10_000), 10_000),
        variants=_variants(fashion_recipe.Network(width=8), lr=1e-2, sgd_lr=0.3),
        steps=800,
        ladder=(0.5, 0.75, 1.0, 1.5),
        judges_regularizers=False,
        **_COMMON,
    )
