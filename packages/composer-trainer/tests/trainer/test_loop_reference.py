"""The loop skips what a run does not need. Here it is compared with a loop that is written out and skips nothing."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from composer.core import Algorithm, Callback, Event, State
from composer.loggers import InMemoryLogger, Logger
from composer.optim import CosineAnnealingScheduler
from composer.testing import SimpleModel, deep_compare

MakeTrainer = Any  # the fixture's class, in conftest.py

BATCH, MICROBATCH = (
    "before_dataloader after_dataloader batch_start before_train_batch".split(),
    "before_forward after_forward before_loss after_loss before_backward after_backward".split(),
)
END = "after_train_batch batch_end batch_checkpoint".split()


class Hearing(Callback):
    """Is called at every event."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        self.events.append(event.value)


class Matching(Algorithm):
    """Is asked at every event, and acts at none."""

    def match(self, event: Event, state: State) -> bool:
        return False

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        raise AssertionError


class WithClosure(torch.optim.SGD):
    """Calls its closure, as SAM and LBFGS do; the step is that of SGD."""

    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


class Reference:
    """Trains by hand, and records events, losses and learning rates."""

    def __init__(self, model: SimpleModel, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.events: list[str] = []
        self.losses: list[float] = []

    def train(self, loader: Any, microbatch_size: int, bf16: bool, rates: list[float]) -> None:
        for (inputs, targets), rate in zip(loader, rates, strict=True):
            self.events += BATCH
            self.optimizer.zero_grad()
            self.losses.append(0.0)
            for x, y in zip(inputs.split(microbatch_size), targets.split(microbatch_size), strict=True):
                with torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else nullcontext():
                    loss = cross_entropy(self.model((x, y)), y)
                weighted = loss * (len(x) / len(inputs)) if len(x) < len(inputs) else loss
                weighted.backward()
                self.losses[-1] += weighted.item()
                self.events += MICROBATCH
            self.optimizer.param_groups[0]["lr"] = rate
            self.optimizer.step()
            self.events += END


# What the loop specialises on.
OBSERVERS: dict[str, Any] = {
    "nobody": dict,
    "a callback at every event": lambda: {"callbacks": Hearing()},
    "an algorithm asked at every event": lambda: {"algorithms": Matching()},
    "a logger": lambda: {"loggers": InMemoryLogger()},
    "all of them": lambda: {"callbacks": Hearing(), "algorithms": Matching(), "loggers": InMemoryLogger()},
}
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"device_train_microbatch_size": 3},
    "bf16": {"precision": "amp_bf16"},
    "bf16 in microbatches": {"precision": "amp_bf16", "device_train_microbatch_size": 2},
    "a schedule": {"schedulers": CosineAnnealingScheduler()},
}


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, WithClosure], ids=["step", "closure"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("observers", OBSERVERS)
def test_it_equals_a_loop_written_out(make_trainer: MakeTrainer, observers: str, run: str, optimizer: Any) -> None:
    torch.manual_seed(0)
    model, twin = SimpleModel(), SimpleModel()
    twin.load_state_dict(model.state_dict())
    arguments = {**OBSERVERS[observers](), **RUNS[run]}
    by_hand = Reference(twin, torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9))
    steps = 4
    # A schedule is read before the batch is counted, so the first two batches have the initial rate.
    times = [max(0, step - 1) / steps for step in range(steps)]
    factors = [(1 + math.cos(math.pi * time)) / 2 for time in times]
    rates = [0.1 * factor if "schedulers" in arguments else 0.1 for factor in factors]
    loader = list(make_trainer.loader(16))
    by_hand.train(loader, arguments.get("device_train_microbatch_size", 4), "precision" in arguments, rates)

    trainer = make_trainer(
        model=model,
        train_dataloader=loader,
        optimizers=optimizer(model.parameters(), lr=0.1, momentum=0.9),
        max_duration="1ep",
        **arguments,
    )
    trainer.fit()

    deep_compare(twin.state_dict(), model.state_dict(), rtol=1e-6, atol=1e-7)
    assert trainer.state.total_loss_dict["loss/train/total"] == pytest.approx(by_hand.losses[-1], rel=1e-6)
    assert trainer.state.timestamp.batch == "4ba"
    assert trainer.state.timestamp.sample == "16sp"
    for callback in trainer.state.callbacks:
        if isinstance(callback, Hearing):
            start, end = callback.events.index("epoch_start") + 1, callback.events.index("epoch_end")
            assert [*by_hand.events, "before_dataloader"] == callback.events[start:end]


@pytest.mark.parametrize("event", [*BATCH, *MICROBATCH, *END, "eval_batch_start", "eval_before_forward"])
def test_an_event_runs_for_its_only_listener(make_trainer: MakeTrainer, event: str) -> None:
    def count(self: Any, state: State, logger: Logger) -> None:
        self.calls += 1

    listener = type("Listener", (Callback,), {"calls": 0, event: count})()
    make_trainer(
        callbacks=listener, max_duration="4ba", precision="amp_bf16", eval_dataloader=make_trainer.loader(16)
    ).fit()

    assert listener.calls == 4
