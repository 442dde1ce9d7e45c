"""The loss as a metric. In a separate module, because torchmetrics is only imported when it is needed."""

from __future__ import annotations

import torch
from torchmetrics import Metric


class MeanLoss(Metric):
    """The mean of a loss over all examples; batches may have different sizes.

    Example:
        >>> metric = MeanLoss()
        >>> metric.update(torch.tensor(1.0), 3)
        >>> metric.update(torch.tensor(5.0), 1)
        >>> metric.compute()
        tensor(2.)
    """

    full_state_update = False
    higher_is_better = False
    total: torch.Tensor
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss: torch.Tensor, num_examples: int | torch.Tensor) -> None:
        """Add a batch.

        Args:
            loss: The mean loss of the batch, one element. It does not count if there are no examples.
            num_examples: The number of examples in the batch, or of the labels that the mean is over.
        """
        count = torch.as_tensor(num_examples, device=loss.device)
        self.total += torch.where(count > 0, loss.detach().float() * count, 0.0)
        self.count += count

    def compute(self) -> torch.Tensor:
        """Return the mean loss; NaN before the first batch."""
        return self.total / self.count
