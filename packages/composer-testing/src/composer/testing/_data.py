"""Small datasets of random numbers, determined by a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset


class RandomClassificationDataset(TensorDataset):
    """Normal inputs with random class indices.

    Args:
        shape: The shape of one input.
        size: Number of samples.
        num_classes: Number of classes.
        seed: The seed of the samples.

    Attributes:
        x: All inputs, shape (size, *shape).
        y: All class indices, shape (size,).
    """

    def __init__(
        self, shape: tuple[int, ...] = (1, 1, 1), size: int = 100, num_classes: int = 2, *, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_classes = num_classes
        self.x = torch.randn(size, *shape, generator=generator)
        self.y = torch.randint(num_classes, (size,), generator=generator)
        super().__init__(self.x, self.y)


class InfiniteClassificationDataset(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Normal inputs with random class indices, without end.

    Args:
        shape: The shape of one input.
        num_classes: Number of classes.
        seed: The seed of the samples; every iteration starts with it.
    """

    def __init__(self, shape: tuple[int, ...] = (1, 1, 1), num_classes: int = 2, *, seed: int = 0) -> None:
        self.shape = shape
        self.num_classes = num_classes
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            x = torch.randn(self.shape, generator=generator)
            yield x, torch.randint(self.num_classes, (), generator=generator)


class RandomImageDataset(Dataset[tuple[Any, torch.Tensor]]):
    """Images of uniform noise with random class indices.

    Args:
        shape: Channels, height and width.
        size: Number of samples.
        num_classes: Number of classes.
        transform: A function that is applied to an image when it is read.
        seed: The seed of the samples.

    Attributes:
        x: All images, shape (size, *shape), values in [0, 1).
        y: All class indices, shape (size,).
    """

    def __init__(
        self,
        shape: tuple[int, int, int] = (3, 32, 32),
        size: int = 100,
        num_classes: int = 2,
        *,
        transform: Callable[[torch.Tensor], Any] | None = None,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_classes = num_classes
        self.transform = transform
        self.x = torch.rand(size, *shape, generator=generator)
        self.y = torch.randint(num_classes, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, torch.Tensor]:
        image = self.x[index]
        return image if self.transform is None else self.transform(image), self.y[index]


class RandomSegmentationDataset(TensorDataset):
    """Images of normal noise with a random class index per pixel.

    Args:
        shape: Channels, height and width.
        size: Number of samples.
        num_classes: Number of classes.
        seed: The seed of the samples.

    Attributes:
        x: All images, shape (size, *shape).
        y: All class indices, shape (size, height, width).
    """

    def __init__(
        self, shape: tuple[int, int, int] = (3, 16, 16), size: int = 100, num_classes: int = 2, *, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_classes = num_classes
        self.x = torch.randn(size, *shape, generator=generator)
        self.y = torch.randint(num_classes, (size, *shape[1:]), generator=generator)
        super().__init__(self.x, self.y)


class RandomTextDataset(Dataset[dict[str, torch.Tensor]]):
    """Random token sequences, with labels for some tokens.

    A sample has `input_ids`, `attention_mask` (1 everywhere) and `labels`, each of shape (sequence_length,), int64. The
    label is -100 for tokens that are not predicted. The first token of every sequence is predicted.

    Args:
        size: Number of samples.
        vocab_size: Number of different tokens.
        sequence_length: Tokens in a sample.
        masked_fraction: The expected fraction of the other tokens that are predicted.
        seed: The seed of the samples.
    """

    def __init__(
        self,
        size: int = 100,
        vocab_size: int = 32,
        sequence_length: int = 16,
        *,
        masked_fraction: float = 0.3,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab_size = vocab_size
        self.input_ids = torch.randint(vocab_size, (size, sequence_length), generator=generator)
        predicted = torch.rand(size, sequence_length, generator=generator) < masked_fraction
        predicted[:, 0] = True  # the mean over no tokens would be nan
        self.labels = self.input_ids.masked_fill(~predicted, -100)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.input_ids[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": self.labels[index]}
