from __future__ import annotations

import math
from typing import Any

import pytest

from composer.recipes import Data, Network, Recipe, Runs, Training


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        (Data, {"train_samples": 0}, "`train_samples` must be at least 1, got 0"),
        (Data, {"test_samples": 0}, "`test_samples` must be at least 1, got 0"),
        (Data, {"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        (Data, {"shift": -1}, "`shift` must be at least 0, got -1"),
        (Network, {"width": 0}, "`width` must be at least 1, got 0"),
        (Network, {"blocks": 0}, "`blocks` must be at least 1, got 0"),
        (Training, {"epochs": 0}, "`epochs` must be at least 1, got 0"),
        (Training, {"lr": 0.0}, "`lr` must be positive and finite, got 0.0"),
        (Training, {"lr": math.nan}, "`lr` must be positive and finite, got nan"),
        (Training, {"lr": math.inf}, "`lr` must be positive and finite, got inf"),
        (Training, {"weight_decay": -1e-4}, "`weight_decay` must be at least 0, got -0.0001"),
        (Training, {"momentum": 1.0}, r"`momentum` must be in \[0, 1\), got 1.0"),
        (Training, {"warmup": -0.1}, r"`warmup` must be in \[0, 1\), got -0.1"),
        (Runs, {"seeds": 0}, "`seeds` must be at least 1, got 0"),
        (Runs, {"threads": 0}, "`threads` must be at least 1, got 0"),
        (Runs, {"seed": -1}, "`seed` must be from 0 to .*, got -1"),
        (Runs, {"seed": 2**32 - 2}, "`seed` must be from 0 to 4294967291, .*got 4294967294"),
    ],
)
def test_values_that_cannot_work_are_refused(group: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group(**values)


def test_only_algorithms_can_be_composed() -> None:
    algorithms: Any = ["mixup"]

    with pytest.raises(TypeError, match="`algorithms` must hold `Algorithm` objects, got 'mixup'"):
        Recipe("wrong", algorithms)
