"""Small models, whose weights are determined by a seed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from composer.loss import soft_cross_entropy
from composer.loss.utils import loss_for
from composer.models.base import ComposerModel


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the CPU generator for the body, then restore its state."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


class _Model(ComposerModel):
    """A model with given metrics. A metric is any object with `update(outputs, targets)`."""

    def __init__(
        self, train_metrics: Mapping[str, Any] | None = None, eval_metrics: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        # In dicts instead of submodules, so that metrics are not in the state dict of the model.
        self.train_metrics = dict(train_metrics or {})
        self.eval_metrics = dict(eval_metrics or {})

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return self.train_metrics if is_train else self.eval_metrics

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs, self._targets(batch))

    def _targets(self, batch: Any) -> torch.Tensor:
        targets: torch.Tensor = batch[1]
        return targets


class _Classifier(_Model):
    """A classifier of sequential layers, with the loss `loss_fn`. A batch is `(inputs, targets)`."""

    def __init__(self, module: torch.nn.Sequential, num_classes: int, **metrics: Mapping[str, Any] | None) -> None:
        super().__init__(**metrics)
        self.module = module
        self.num_classes = num_classes
        self.loss_fn: Callable[..., torch.Tensor] = soft_cross_entropy

    def forward(self, batch: Any) -> torch.Tensor:
        outputs: torch.Tensor = self.module(batch[0])
        return outputs

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        targets = self._targets(batch)
        loss: torch.Tensor = loss_for(self.loss_fn, targets)(outputs, targets, *args, **kwargs)
        return loss


class SimpleModel(_Classifier):
    """Two linear layers on averaged images. A batch is `(images of shape (N, num_features, H, W), indices)`.

    Args:
        num_features: Channels of the input.
        num_classes: Number of classes.
        bias: True if the linear layers have a bias.
        seed: The seed of the weights.
        **metrics: `train_metrics` and `eval_metrics`, each by name.

    Attributes:
        fc1: The first linear layer, also `module[2]`.
        fc2: The second linear layer, also `module[4]`.
    """

    def __init__(
        self,
        num_features: int = 1,
        num_classes: int = 2,
        bias: bool = True,
        *,
        seed: int = 0,
        **metrics: Mapping[str, Any] | None,
    ) -> None:
        with _seeded(seed):
            fc1 = torch.nn.Linear(num_features, 5, bias=bias)
            fc2 = torch.nn.Linear(5, num_classes, bias=bias)
        layers = (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), fc1, torch.nn.ReLU(), fc2)
        super().__init__(torch.nn.Sequential(*layers), num_classes, **metrics)
        self.num_features = num_features
        self.fc1 = fc1
        self.fc2 = fc2


class SimpleModelWithDropout(_Classifier):
    """Two linear layers with dropout between them. A batch is `(inputs of num_features values each, indices)`.

    Args:
        num_features: Values of one input.
        num_classes: Number of classes.
        p: The dropout probability.
        seed: The seed of the weights.
        **metrics: `train_metrics` and `eval_metrics`, each by name.

    Attributes:
        fc1: The first linear layer, also `module[1]`.
        dropout: The dropout, also `module[3]`.
        fc2: The second linear layer, also `module[4]`.
    """

    def __init__(
        self,
        num_features: int = 64,
        num_classes: int = 10,
        p: float = 0.5,
        *,
        seed: int = 0,
        **metrics: Mapping[str, Any] | None,
    ) -> None:
        with _seeded(seed):
            fc1 = torch.nn.Linear(num_features, 32)
            fc2 = torch.nn.Linear(32, num_classes)
        dropout = torch.nn.Dropout(p)
        layers = (torch.nn.Flatten(), fc1, torch.nn.ReLU(), dropout, fc2)
        super().__init__(torch.nn.Sequential(*layers), num_classes, **metrics)
        self.fc1 = fc1
        self.dropout = dropout
        self.fc2 = fc2


class SimpleConvModel(_Classifier):
    """Two strided convolutions and two linear layers. A batch is `(images, indices)`.

    Args:
        num_channels: Channels of the images.
        num_classes: Number of classes.
        norm: The normalization after the convolutions: "batch", "instance", "group" or None.
        norm_affine: True if the normalization has a weight and a bias.
        seed: The seed of the weights.
        **metrics: `train_metrics` and `eval_metrics`, each by name.

    Attributes:
        conv1: The first convolution, also in `module`.
        conv2: The second convolution, also in `module`.
    """

    def __init__(
        self,
        num_channels: int = 3,
        num_classes: int = 2,
        norm: str | None = None,
        norm_affine: bool = True,
        *,
        seed: int = 0,
        **metrics: Mapping[str, Any] | None,
    ) -> None:
        with _seeded(seed):
            conv1 = torch.nn.Conv2d(num_channels, 8, kernel_size=3, padding=1, stride=2)
            conv2 = torch.nn.Conv2d(8, 4, kernel_size=3, padding=1, stride=2)
            linear1, linear2 = torch.nn.Linear(4, 16), torch.nn.Linear(16, num_classes)
        norms: dict[str | None, list[torch.nn.Module]] = {
            None: [],
            "batch": [torch.nn.BatchNorm2d(4, affine=norm_affine)],
            "instance": [torch.nn.InstanceNorm2d(4, affine=norm_affine)],
            "group": [torch.nn.GroupNorm(2, 4, affine=norm_affine)],
        }
        layers = [conv1, conv2, *norms[norm], torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), linear1, linear2]
        super().__init__(torch.nn.Sequential(*layers), num_classes, **metrics)
        self.conv1 = conv1
        self.conv2 = conv2


class ConvModel(_Classifier):
    """Three convolutions with batch norm, max pooling and two linear layers, for images of 32 channels.

    A batch is `(images, indices)`. Every layer is also an attribute.

    Args:
        num_classes: Number of classes.
        seed: The seed of the weights.
        **metrics: `train_metrics` and `eval_metrics`, each by name.
    """

    def __init__(
        self,
        num_classes: int = 10,
        *,
        seed: int = 0,
        **metrics: Mapping[str, Any] | None,
    ) -> None:
        with _seeded(seed):
            conv1 = torch.nn.Conv2d(32, 8, kernel_size=3, padding=1, stride=2, bias=False)
            conv2 = torch.nn.Conv2d(8, 32, kernel_size=3, padding=1, stride=2, bias=False)
            conv3 = torch.nn.Conv2d(32, 64, kernel_size=3, padding=1, stride=1, bias=False)
            linear1, linear2 = torch.nn.Linear(64, 48), torch.nn.Linear(48, num_classes)
        bn = torch.nn.BatchNorm2d(64)
        pool1 = torch.nn.MaxPool2d(kernel_size=2, stride=2, padding=1)
        pool2, flatten = torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
        layers = (conv1, conv2, conv3, bn, pool1, pool2, flatten, linear1, linear2)
        super().__init__(torch.nn.Sequential(*layers), num_classes, **metrics)
        self.conv1, self.conv2, self.conv3 = conv1, conv2, conv3
        self.bn = bn
        self.pool1, self.pool2 = pool1, pool2
        self.flatten = flatten
        self.linear1, self.linear2 = linear1, linear2


class SimpleSegmentationModel(_Classifier):
    """Two convolutions that preserve the image size. A batch is `(images, indices of shape (N, H, W))`.

    Args:
        num_channels: Channels of the images.
        num_classes: Number of classes.
        seed: The seed of the weights.
        **metrics: `train_metrics` and `eval_metrics`, each by name.
    """

    def __init__(
        self,
        num_channels: int = 3,
        num_classes: int = 2,
        *,
        seed: int = 0,
        **metrics: Mapping[str, Any] | None,
    ) -> None:
        with _seeded(seed):
            conv1 = torch.nn.Conv2d(num_channels, 4, kernel_size=3, padding=1)
            conv2 = torch.nn.Conv2d(4, num_classes, kernel_size=1)
        module = torch.nn.Sequential(conv1, torch.nn.ReLU(), conv2)
        super().__init__(module, num_classes, **metrics)
        self.conv1 = conv1
        self.conv2 = conv2


class SimpleTransformerModel(_Model):
    """One transformer layer that predicts a token at every position.

    A batch is a dict of `input_ids`, `labels` and optionally `attention_mask`, each of shape (N, sequence length). The
    label -100 is ignored.

    Args:
        vocab_size: Number of different tokens.
        max_sequence_length: The maximum sequence length.
        width: The embedding size; a multiple of 2, the number of attention heads.
        p: The dropout probability.
        seed: The seed of the weights.
        **metrics: `train_metrics` and `eval_metrics`, each by name.
    """

    def __init__(
        self,
        vocab_size: int = 32,
        max_sequence_length: int = 64,
        width: int = 16,
        p: float = 0.0,
        *,
        seed: int = 0,
        **metrics: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(**metrics)
        self.num_classes = vocab_size
        with _seeded(seed):
            self.embedding = torch.nn.Embedding(vocab_size, width)
            self.positions = torch.nn.Embedding(max_sequence_length, width)
            self.layer = _TransformerLayer(width, p)
            self.head = torch.nn.Linear(width, vocab_size)

    def forward(self, batch: Any) -> torch.Tensor:
        tokens = batch["input_ids"]
        mask = batch.get("attention_mask")
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: torch.Tensor = self.head(self.layer(x, None if mask is None else mask.bool()[:, None, None, :]))
        return logits

    def loss(self, outputs: torch.Tensor, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return F.cross_entropy(outputs.transpose(1, 2), batch["labels"], *args, **kwargs)

    def _targets(self, batch: Any) -> torch.Tensor:
        targets: torch.Tensor = batch["labels"]
        return targets


class _TransformerLayer(torch.nn.Module):
    """A pre-norm transformer layer with two attention heads."""

    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.dropout = torch.nn.Dropout(p)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        # (N, S, 3 * width) -> three of (N, heads, S, width / heads)
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x
