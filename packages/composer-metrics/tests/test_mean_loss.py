"""The loss as a metric of composer-core, which needs torchmetrics: its mean over examples."""

from __future__ import annotations

import torch

from composer.models.mean_loss import MeanLoss


def test_batches_count_by_their_number_of_examples() -> None:
    losses = torch.tensor([3.0, 1.0, 5.0, 0.5, 2.5])
    metric = MeanLoss()
    for batch in losses.split([1, 3, 1]):
        metric.update(batch.mean().requires_grad_().half(), len(batch))

    torch.testing.assert_close(metric.compute(), losses.mean(), rtol=1e-3, atol=0.0)  # a half has 11 bits
    assert not metric.compute().requires_grad

    metric.update(torch.tensor(torch.nan), torch.tensor(0))  # a mean over no labels
    torch.testing.assert_close(metric.compute(), losses.mean(), rtol=1e-3, atol=0.0)

    metric.reset()
    metric.update(torch.tensor(4.0), 2)
    assert 4 == metric.compute()
