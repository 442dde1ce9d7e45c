"""Optimizers of other libraries train in fp16: a batch whose gradients overflow is skipped, and the next one is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import lion_pytorch
import prodigyopt
import pytest
import pytorch_optimizer
import schedulefree
import timm.optim
import torch

from composer import Trainer
from composer.algorithms.gradient_clipping import GradientClipping
from composer.algorithms.sam import SAM
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.testing import RandomClassificationDataset, SimpleModel, deep_compare
from composer.utils.reproducibility import seed_context

Make = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def schedule_free(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = schedulefree.AdamWScheduleFree(parameters, lr=1e-2, foreach=False)
    optimizer.train()
    return optimizer


OPTIMIZERS: dict[str, Make] = {
    "timm-lamb": lambda parameters: timm.optim.Lamb(parameters, lr=1e-2),
    "timm-lookahead": lambda parameters: timm.optim.Lookahead(timm.optim.Adan(parameters, lr=1e-2)),
    "schedulefree": schedule_free,
    "pytorch_optimizer-adabelief": lambda parameters: pytorch_optimizer.AdaBelief(parameters, lr=1e-2),
    "lion-pytorch": lambda parameters: lion_pytorch.Lion(parameters, lr=1e-3),
    "prodigyopt": lambda parameters: prodigyopt.Prodigy(parameters, lr=1.0),
}

ALGORITHMS: dict[str, Callable[[], list[Algorithm]]] = {
    "alone": list,
    "clipped": lambda: [GradientClipping(clipping_type="norm", clipping_threshold=1.0)],
    "sam": lambda: [SAM(rho=0.05)],
}


class OverflowsOnce(SimpleModel):
    """Has gradients beyond fp16's range in the passes of its second batch."""

    overflowing = False

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return super().loss(outputs, batch).float() * (1e30 if self.overflowing else 1.0)


class Watch(Algorithm):
    """Lets the second batch overflow; keeps the weights and the scale after each batch, and norms of the gradients."""

    events = frozenset({Event.BATCH_START, Event.AFTER_TRAIN_BATCH, Event.BATCH_END})

    def __init__(self, model: OverflowsOnce) -> None:
        self.model = model
        self.weights: list[list[torch.Tensor]] = []
        self.scales: list[float] = []
        self.norms: list[float] = []

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        assert state.scaler is not None
        if event is Event.BATCH_START:
            self.model.overflowing = state.timestamp.batch == 1
        elif event is Event.AFTER_TRAIN_BATCH:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))
        else:
            self.weights.append([p.detach().clone() for p in self.model.parameters()])
            self.scales.append(state.scaler.get_scale())


def watch(make: Make, algorithms: list[Algorithm], precision: str = "amp_fp16") -> Watch:
    with seed_context(0):
        model = OverflowsOnce()
    watcher = Watch(model)
    loader = torch.utils.data.DataLoader(RandomClassificationDataset(size=12), batch_size=4)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        max_duration="3ba",
        optimizers=make(model.parameters()),
        algorithms=[*algorithms, watcher],
        precision=precision,
        device="cpu",
        seed=0,
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return watcher


@pytest.mark.parametrize("algorithms", ALGORITHMS.values(), ids=ALGORITHMS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_batch_that_overflows_is_skipped(make: Make, algorithms: Callable[[], list[Algorithm]]) -> None:
    seen = watch(make, algorithms())
    first, second, third = seen.weights

    assert all(bool(weight.isfinite().all()) for weights in seen.weights for weight in weights)
    deep_compare(first, second)
    assert any(not torch.equal(before, after) for before, after in zip(second, third, strict=True))
    assert [1.0, 0.5, 0.5] == [scale / seen.scales[0] for scale in seen.scales]


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_are_unscaled_exactly_once(make: Make) -> None:
    norms = watch(make, []).norms
    expected = watch(lambda parameters: torch.optim.SGD(parameters, lr=0.1), []).norms

    torch.testing.assert_close(norms[0], expected[0], rtol=1e-3, atol=0.0)
