"""A small problem on which adapters of other trainers are compared with our own `Trainer`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from composer.core import Algorithm


class HostProblem:
    """A small problem on which an adapter of another trainer is compared with our own: the weights must be equal.

    It has what reveals differences: batch normalization, dropout and momentum. The data has a fixed order, and its
    loader draws nothing from the global generator.

    Attributes:
        length: Batches per epoch.
        batch_size: Examples per batch.
        epochs: Epochs.
        seed: Seed of training.

    Example:
        >>> network = HostProblem.network()
        >>> inputs, targets = batch = next(iter(HostProblem.loader()))
        >>> HostProblem.loss(network(inputs), batch, reduction="none").shape
        torch.Size([8])
    """

    length, batch_size, epochs, seed = 5, 8, 2, 3

    @staticmethod
    def network() -> torch.nn.Sequential:
        """Return the network, with the same weights every time."""
        torch.manual_seed(1)
        return torch.nn.Sequential(
            torch.nn.Linear(6, 12),
            torch.nn.BatchNorm1d(12),
            torch.nn.Dropout(0.5),
            torch.nn.ReLU(),
            torch.nn.Linear(12, 12),
            torch.nn.ReLU(),
            torch.nn.Linear(12, 4),
        )

    @staticmethod
    def loss(outputs: torch.Tensor, batch: Any, reduction: str = "mean") -> torch.Tensor:
        """Return the cross entropy of the outputs for a batch (inputs, targets)."""
        return cross_entropy(outputs, batch[1], reduction=reduction)

    @staticmethod
    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of a model's parameters."""
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @classmethod
    def dataset(cls) -> TensorDataset:
        """Return the examples: inputs, shape (6,), and class indices."""
        generator, size = torch.Generator().manual_seed(7), cls.length * cls.batch_size
        return TensorDataset(torch.randn(size, 6, generator=generator), torch.randint(4, (size,), generator=generator))

    @classmethod
    def loader(cls, batch_size: int | None = None) -> DataLoader[Any]:
        """Return a loader of the examples.

        Args:
            batch_size: Examples per batch. None: that of the problem.
        """
        return DataLoader(cls.dataset(), batch_size=batch_size or cls.batch_size, generator=torch.Generator())

    @classmethod
    def train(cls, algorithms: Sequence[Algorithm] = (), **options: Any) -> dict[str, torch.Tensor]:
        """Train with our own `Trainer`, from composer-trainer, and return the weights of the network.

        Args:
            algorithms: The algorithms.
            **options: Arguments of the `Trainer`, whose device is the CPU by default.
        """
        from composer import Trainer

        network = cls.network()
        trainer = Trainer(
            model=network,
            loss=cross_entropy,
            optimizers=cls.optimizer(network),
            train_dataloader=cls.loader(),
            max_duration=f"{cls.epochs}ep",
            algorithms=algorithms,
            seed=cls.seed,
            progress_bar=False,
            **{"device": "cpu", **options},
        )
        trainer.fit()
        trainer.close()
        return copy.deepcopy(network.state_dict())
