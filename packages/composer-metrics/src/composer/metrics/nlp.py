"""Metrics for language models and text classification."""

# No `from __future__ import annotations`: TorchScript cannot read the annotations of attributes as strings.

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from composer.metrics._functional import check_class_scores, full_precision, logits_of


class MaskedAccuracy(Metric):
    """Fraction of correct predictions among the targets that are not masked, in [0, 1].

    Args:
        ignore_index: Targets of this value are masked.
        dist_sync_on_step: Also synchronize the value that `forward` returns.

    States: `correct` and `total`, int64. Nan if every target is masked.

    Example:
        >>> metric = MaskedAccuracy()
        >>> metric.update(torch.eye(4), torch.tensor([0, 1, 0, -100]))
        >>> metric.compute()
        tensor(0.6667)
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False

    correct: Tensor
    total: Tensor

    def __init__(self, ignore_index: int = -100, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.ignore_index = ignore_index
        self.add_state("correct", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("total", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add one batch.

        Args:
            preds: Class scores, shape (..., C).
            target: Class indices, shape (...).

        Raises:
            ValueError: A shape does not match.
        """
        check_class_scores(preds, target, dim=-1)
        counted = target != self.ignore_index
        self.correct += ((preds.argmax(dim=-1) == target) & counted).sum()
        self.total += counted.sum()

    def compute(self) -> Tensor:
        return self.correct / self.total


class _TokenCrossEntropy(Metric):
    """Sum of the cross entropy over all tokens that are not ignored, and the number of tokens."""

    full_state_update = False
    higher_is_better = False

    sum_loss: Tensor
    total_items: Tensor

    def __init__(self, dist_sync_on_step: bool = False, ignore_index: int = -100) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.ignore_index = ignore_index
        self.add_state("sum_loss", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total_items", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, output: Tensor | Mapping[str, Any], target: Tensor) -> None:
        """Add one batch.

        Args:
            output: Logits of shape (..., V), or a mapping that holds them as "logits".
            target: Token indices, one for every V logits, in any shape.

        Raises:
            TypeError: `output` is neither a tensor nor a mapping.
            KeyError: The mapping has no key "logits".
            ValueError: The number of targets does not match.
        """
        logits = logits_of(output)
        if logits.ndim == 0 or logits.numel() != target.numel() * logits.shape[-1]:
            raise ValueError(
                f"`target` must have one index for each row of the logits, of shape {tuple(logits.shape[:-1])}, "
                f"got {tuple(target.shape)}."
            )
        rows, target = full_precision(logits).reshape(-1, logits.shape[-1]), target.reshape(-1)
        self.sum_loss += F.cross_entropy(rows, target, ignore_index=self.ignore_index, reduction="sum")
        self.total_items += (target != self.ignore_index).sum()


class LanguageCrossEntropy(_TokenCrossEntropy):
    """Cross entropy per token, in nats. Every token has the same weight, whatever its batch.

    Args:
        dist_sync_on_step: Also synchronize the value that `forward` returns.
        ignore_index: Targets of this value do not count.

    States: `sum_loss` (float32), `total_items` (int64). Nan if every target is ignored.

    Example:
        >>> metric = LanguageCrossEntropy()
        >>> metric.update({"logits": torch.zeros(2, 3, 8)}, torch.tensor([[1, 2, 3], [4, -100, -100]]))
        >>> metric.total_items, round(metric.compute().item(), 4)  # log(8)
        (tensor(4), 2.0794)
    """

    def compute(self) -> Tensor:
        return self.sum_loss / self.total_items


class LanguagePerplexity(_TokenCrossEntropy):
    """Perplexity: the exponential of `LanguageCrossEntropy`.

    Args:
        dist_sync_on_step: Also synchronize the value that `forward` returns.
        ignore_index: Targets of this value do not count.

    States: `sum_loss` (float32), `total_items` (int64). Nan if every target is ignored.

    Example:
        >>> metric = LanguagePerplexity()
        >>> metric.update(torch.zeros(2, 3, 8), torch.tensor([[1, 2, 3], [4, -100, -100]]))
        >>> round(metric.compute().item(), 4)
        8.0
    """

    def compute(self) -> Tensor:
        return torch.exp(self.sum_loss / self.total_items)


class BinaryF1Score(Metric):
    """F1 score of class 1 against class 0: `2 TP / (2 TP + FP + FN)`, in [0, 1].

    Args:
        dist_sync_on_step: Also synchronize the value that `forward` returns.

    States: `true_positive`, `false_positive`, `false_negative`, int64. The score is 0 if all three are 0. Targets other
    than 0 and 1, such as padding of -100, do not count.

    Example:
        >>> logits = torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.7, 0.3]])
        >>> metric = BinaryF1Score()
        >>> metric.update(logits, torch.tensor([1, 0, 0]))
        >>> metric.compute()
        tensor(0.6667)
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False

    true_positive: Tensor
    false_positive: Tensor
    false_negative: Tensor

    def __init__(self, dist_sync_on_step: bool = False) -> None:
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.add_state("true_positive", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("false_positive", default=torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("false_negative", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, output: Tensor | Mapping[str, Any], target: Tensor) -> None:
        """Add one batch.

        Args:
            output: Logits of shape (N, 2, ...), or a mapping that holds them as "logits".
            target: Class indices, shape (N, ...).

        Raises:
            TypeError: `output` is neither a tensor nor a mapping.
            KeyError: The mapping has no key "logits".
            ValueError: A shape does not match.
        """
        logits = logits_of(output)
        check_class_scores(logits, target, dim=1, num_classes=2)
        positive = logits.argmax(dim=1) == 1
        self.true_positive += (positive & (target == 1)).sum()
        self.false_positive += (positive & (target == 0)).sum()
        self.false_negative += (~positive & (target == 1)).sum()

    def compute(self) -> Tensor:
        doubled = 2 * self.true_positive
        return doubled / (doubled + self.false_positive + self.false_negative).clamp(min=1)
