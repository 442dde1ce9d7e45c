"""The loss of mixed targets, for models that compute theirs in the forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.algorithms.utils.mixing import mix_loss
from composer.core import State
from composer.testing import SimpleConvModel


class LossOfForward(SimpleConvModel):
    """Computes its loss in `forward`, as models of `transformers` do, and returns it in several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.last: Any = None

    def forward(self, batch: Any) -> Any:
        logits = super().forward(batch)
        self.last = torch.nn.functional.cross_entropy(logits, batch[1])
        return logits if self.way == "attribute" else {"loss": self.last, "logits": logits}

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.way == "added":
            return outputs["loss"] + torch.nn.functional.cross_entropy(outputs["logits"], batch[1])
        loss: torch.Tensor = self.last
        return loss


def mixed_loss(way: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss before and after it is mixed."""
    model = LossOfForward(way)
    state = State(model=model, max_duration="1ep", dataloader=[0])
    state.batch = torch.rand(4, 3, 32, 32), torch.arange(4) % 2
    state.outputs = model(state.batch)
    before = state.loss = model.loss(state.outputs, state.batch)
    mix_loss(state, 1, torch.tensor([1, 2, 3, 0]), 0.5, "MixUp")
    return before, state.loss


@pytest.mark.parametrize("way", ["output", "attribute"])
def test_a_loss_of_the_forward_pass_cannot_be_interpolated(way: str) -> None:
    with pytest.raises(NotImplementedError, match="`MixUp` cannot interpolate the loss of `LossOfForward`"):
        mixed_loss(way)


def test_a_loss_of_the_forward_pass_may_be_one_of_several_terms() -> None:
    torch.manual_seed(0)
    before, after = mixed_loss("added")

    assert not torch.equal(before, after)
