"""Every pair of algorithms trains, and the order of listing does not matter."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from composer import Trainer, algorithms
from composer.core import Algorithm
from composer.models import ComposerClassifier
from composer.testing import deep_compare

ARGUMENTS: dict[str, dict[str, Any]] = {
    "BlurPool": {"min_channels": 0},
    "EMA": {"half_life": "2ba"},
    "ProgressiveResizing": {"delay_fraction": 0.3, "finetune_fraction": 0.3},
    "SAM": {"rho": 0.05, "interval": 2},
}
NAMES = sorted(
    name
    for name in algorithms.__all__
    if isinstance(cls := getattr(algorithms, name), type) and issubclass(cls, Algorithm)
)


def network() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, stride=2, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, 4),
    )


def train(names: tuple[str, ...]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    batches = [
        (torch.randn(8, 3, 16, 16, generator=generator), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(3)
    ]
    model = ComposerClassifier(network(), num_classes=4)
    trainer = Trainer(
        model=model,
        train_dataloader=batches,
        eval_dataloader=batches,
        max_duration="2ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=[getattr(algorithms, name)(**ARGUMENTS.get(name, {})) for name in names],
        progress_bar=False,
        device="cpu",
        seed=3,
    )
    trainer.fit()
    values = {"loss": trainer.state.total_loss_dict["loss/train/total"], **trainer.state.eval_metric_values}
    trainer.close()
    return {"weights": trainer.state.model.state_dict(), "values": values}


@pytest.mark.parametrize("pair", list(itertools.combinations(NAMES, 2)), ids="+".join)
def test_a_pair_trains_alike_in_both_orders(pair: tuple[str, str]) -> None:
    first, second = train(pair), train(pair[::-1])

    deep_compare(first, second)
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in first["values"].values())
    assert not torch.equal(first["weights"]["module.6.weight"], network().state_dict()["6.weight"])
