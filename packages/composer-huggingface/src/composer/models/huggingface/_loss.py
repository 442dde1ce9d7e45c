"""Metric of the loss that a model of transformers returns; a separate module, because it imports torchmetrics."""

from __future__ import annotations

from typing import Any

import torch

from composer.models.mean_loss import MeanLoss


class LabelLoss(MeanLoss):
    """The mean of the loss over all labels. Batches without labels, for which there is no loss, do not count.

    Args:
        ignored: The label that does not count; None: the loss is a mean over examples.
    """

    needs_batch = True

    def __init__(self, ignored: int | None = -100) -> None:
        super().__init__()
        self.ignored = ignored

    def update(self, batch: Any, outputs: Any, labels: torch.Tensor | None) -> None:  # type: ignore[override]
        """Add a batch.

        Args:
            batch: Not used.
            outputs: The outputs of the model, with the mean loss.
            labels: The labels: indices, of which `ignored` does not count, or numbers for each example.
        """
        loss = outputs.get("loss")
        if loss is None or labels is None:
            return
        count: Any = len(labels)
        if self.ignored is not None and not labels.is_floating_point():
            count = (labels != self.ignored).sum()
        super().update(loss, count)
