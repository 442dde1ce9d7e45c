"""Both losses of an interpolated loss are computed against smoothed targets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from composer import Trainer
from composer.algorithms import SAM, CutMix, LabelSmoothing, MixUp, SelectiveBackprop
from composer.core import Callback, Engine, State
from composer.loggers import Logger
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


class Recorder(Callback):
    """Keeps the losses that go backward, and what a direct computation gives for each."""

    def __init__(self, mixing: Any) -> None:
        self.mixing = mixing
        self.losses: list[torch.Tensor] = []
        self.expected: list[torch.Tensor] = []
        self.targets: list[torch.Tensor] = []

    def before_backward(self, state: State, logger: Logger) -> None:
        mixing, own = self.mixing, state.batch[1]
        indices = mixing.indices if isinstance(mixing, MixUp) else mixing._indices
        weight = mixing.mixing if isinstance(mixing, MixUp) else 1 - mixing._adjusted_lambda
        first, second = (F.cross_entropy(state.outputs, y, label_smoothing=0.3) for y in (own, own[indices]))
        self.losses.append(state.loss.detach())  # type: ignore[union-attr]
        self.expected.append(((1 - weight) * first + weight * second).detach())
        self.targets.append(own)


@pytest.mark.parametrize("cls", [MixUp, CutMix])
def test_so_is_every_loss_of_a_step_with_two_passes_over_a_pruned_batch(cls: Any) -> None:
    """SAM computes two losses for each microbatch, and SelectiveBackprop one more for each batch, of plain targets."""
    torch.manual_seed(0)
    mixing = cls(interpolate_loss=True)
    recorder = Recorder(mixing)
    model = SimpleModel()
    plain: list[torch.Tensor] = []
    loss = model.loss
    model.loss = lambda outputs, batch, *args, **kwargs: (  # type: ignore[method-assign]
        plain.append(batch[1]) if kwargs.get("reduction") == "none" else None,
        loss(outputs, batch, *args, **kwargs),
    )[1]
    data = [(torch.rand(8, 1, 4, 4), torch.arange(8).remainder(2)) for _ in range(3)]
    Trainer(
        model=model,
        train_dataloader=data,
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
        algorithms=[
            LabelSmoothing(0.3),
            mixing,
            SAM(rho=0.5),
            SelectiveBackprop(start=0.0, end=1.0, keep=0.5, interrupt=0),
        ],
        callbacks=recorder,
        device_train_microbatch_size=2,
        progress_bar=False,
        device="cpu",
    ).fit()

    assert 3 * 2 * 2 == len(recorder.losses)
    torch.testing.assert_close(recorder.expected, recorder.losses)
    assert all(targets.shape == (2,) and targets.dtype is torch.int64 for targets in recorder.targets)
    assert [(8,)] * 3 == [targets.shape for targets in plain]
