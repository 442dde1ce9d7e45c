"""Both losses of an interpolated loss are computed against smoothed targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from composer.algorithms import CutMix, LabelSmoothing, MixUp
from composer.core import Engine, State
from composer.testing import SimpleModel


@pytest.mark.parametrize("interpolate_loss", [True, False])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("smoothing_first", [True, False])
@pytest.mark.parametrize("cls", [MixUp, CutMix])
def test_the_loss_is_that_against_both_smoothed_targets(
    cls: Any, smoothing_first: bool, dense: bool, interpolate_loss: bool
) -> None:
    torch.manual_seed(0)
    labels = torch.arange(8).remainder(2)
    targets = F.one_hot(labels, 2).float() if dense else labels
    mixing, smoothing = cls(interpolate_loss=interpolate_loss), LabelSmoothing(0.3)
    order = (smoothing, mixing) if smoothing_first else (mixing, smoothing)
    state = State(model=SimpleModel(), max_duration="1ep", dataloader=[0], algorithms=order)
    engine = Engine(state)
    for microbatch in (slice(0, 5), slice(5, 8)):
        state.batch = (torch.rand(8, 1, 4, 4)[microbatch], targets[microbatch])
        engine.run_event("before_forward")
        state.outputs = state.model(state.batch)
        engine.run_event("before_loss")
        state.loss = state.model.loss(state.outputs, state.batch)  # type: ignore[operator]
        engine.run_event("after_loss")
        engine.run_event("before_backward")
        indices = mixing.indices if cls is MixUp else mixing._indices
        weight = mixing.mixing if cls is MixUp else 1 - mixing._adjusted_lambda
        own = labels[microbatch]
        first, second = (F.cross_entropy(state.outputs, y, label_smoothing=0.3) for y in (own, own[indices]))

        torch.testing.assert_close((1 - weight) * first + weight * second, state.loss)
        if interpolate_loss:
            assert torch.equal(targets[microbatch], state.batch[1])
