"""`displace_weights` against the formula of the paper."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from composer.algorithms.ema_nesterov import displace_weights


@pytest.mark.parametrize("beta", [0.0, 0.3, torch.tensor(0.6, dtype=torch.float64)])
def test_weights_move_by_the_average_change(beta: Any) -> None:
    """The average of the weights gives the same displacement as that of their changes, in the paper."""
    generator = torch.Generator().manual_seed(0)
    trajectory = torch.randn(30, 3, 2, generator=generator, dtype=torch.float64).cumsum(0)
    average, change, decay = trajectory[0].clone(), torch.zeros(3, 2, dtype=torch.float64), 0.9
    for old, new in itertools.pairwise(trajectory):
        change = decay * change + (1 - decay) * (new - old)
        average = decay * average + (1 - decay) * new
    weight, kept = trajectory[-1].clone(), average.clone()

    displace_weights([weight], [average], beta, decay)

    torch.testing.assert_close(trajectory[-1] + beta * change, weight)
    assert torch.equal(kept, average)


def test_tensors_of_several_dtypes_keep_theirs() -> None:
    weights = [torch.ones(2, dtype=torch.bfloat16), torch.ones(3, dtype=torch.float64)]

    displace_weights(weights, [torch.zeros(2), torch.zeros(3, dtype=torch.float64)], beta=1.0, decay=0.5)

    assert [(torch.bfloat16, 2.0), (torch.float64, 2.0)] == [(w.dtype, w[0].item()) for w in weights]


def test_parameters_of_a_model_are_moved_without_a_graph() -> None:
    model = torch.nn.Linear(2, 2)
    averages = [torch.zeros_like(parameter) for parameter in model.parameters()]
    expected = [2 * parameter.detach() for parameter in model.parameters()]

    displace_weights(model.parameters(), averages, beta=1.0, decay=0.5)

    for weight, parameter in zip(expected, model.parameters(), strict=True):
        torch.testing.assert_close(weight, parameter.detach())
        assert parameter.is_leaf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta": -0.1}, "`beta` must not be negative, got -0.1. Use 0.3 to 0.6."),
        ({"beta": float("nan")}, "`beta` must be finite"),
        ({"decay": 1.0}, "`decay` must be below 1, got 1.0. Use 0.99."),
        ({"decay": 0.4}, "`decay` must be at least 0.5, got 0.4"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        displace_weights([torch.ones(1)], [torch.zeros(1)], **arguments)
