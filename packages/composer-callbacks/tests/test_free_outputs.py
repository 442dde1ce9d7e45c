from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.callbacks.free_outputs import FreeOutputs
from composer.core import Callback
from composer.testing import SimpleModel


class Looks(Callback):
    """Notes how many outputs there are before and after the backward pass."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def before_loss(self, state: Any, logger: Any) -> None:
        self.seen.append(("loss", state.outputs.numel()))

    def before_backward(self, state: Any, logger: Any) -> None:
        self.seen.append(("backward", state.outputs.numel()))


def test_outputs_are_gone_before_the_backward_pass_and_training_is_the_same(run: Any) -> None:
    looks, models = Looks(), [SimpleModel(), SimpleModel()]
    run([FreeOutputs(), looks], model=models[0]).fit()
    run([], model=models[1]).fit()

    assert looks.seen == [("loss", 4), ("backward", 0)] * 8
    for freed, kept in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(freed, kept)


def test_training_metrics_are_refused(run: Any) -> None:
    with pytest.raises(ValueError, match=r"must not be used with training metrics.*MulticlassAccuracy"):
        run(FreeOutputs()).fit()
