"""A training loop with evaluations and checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from composer.core import Algorithm, Callback, Engine, Event, State
from composer.testing import SimpleConvModel

BATCHES = 3


class Saver(Callback):
    """Keeps a copy of the state at each checkpoint of one event."""

    def __init__(self, event: Event) -> None:
        self.event = event
        self.saved: list[dict[str, Any]] = []

    def save_interval(self, state: State, event: Event) -> bool:
        return event is self.event

    def run_event(self, event: Event, state: State, logger: Any) -> None:
        if event is self.event:
            self.saved.append(copy.deepcopy(state.state_dict()))


class Run:
    """Epochs of `BATCHES` batches, with an evaluation after each batch and each epoch.

    Attributes:
        weights: Of the first layer, after each batch.
        evaluated: Of the first layer, in each evaluation.
    """

    def __init__(
        self, *algorithms: Algorithm, callbacks: Any = (), norm: str = "group", dtype: Any = torch.float64
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.batches = [
            (torch.randn(4, 3, 8, 8, generator=generator).to(dtype), torch.tensor([0, 1, 1, 0])) for _ in range(BATCHES)
        ]
        self.model = SimpleConvModel(norm=norm).to(dtype)
        self.state = State(
            model=self.model,
            max_duration="2ep",
            dataloader=self.batches,
            optimizers=torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9),
            algorithms=algorithms,
            callbacks=callbacks,
            run_name="run",
        )
        self.engine = Engine(self.state)
        self.weights: list[torch.Tensor] = []
        self.evaluated: list[torch.Tensor] = []
        for event in ("init", "before_load", "after_load"):
            self.engine.run_event(event)

    def fit(self, duration: str | None = None) -> Run:
        state, event = self.state, self.engine.run_event
        state.max_duration = state.max_duration if duration is None else duration
        event("fit_start")
        self.model.train()
        while not state.is_over():
            if state.timestamp.batch_in_epoch == "0ba":
                event("epoch_start")
            for batch in self.batches[int(state.timestamp.batch_in_epoch) :]:
                self.step(batch)
                if state.is_over():
                    break
            else:
                self._advance(state.timestamp.to_next_epoch())
                event("epoch_end")
                self.evaluate()
                event("epoch_checkpoint")
        self.model.eval()
        event("fit_end")
        return self

    def step(self, batch: Any) -> None:
        state, event = self.state, self.engine.run_event
        event("before_dataloader")
        state.batch = batch
        event("after_dataloader")
        event("batch_start")
        state.optimizers.zero_grad()
        self.model.loss(self.model(batch), batch).backward()
        state.optimizers.step()
        self.weights.append(self.first_layer())
        self._advance(state.timestamp.to_next_batch(samples=4))
        event("batch_end")
        self.evaluate()
        event("batch_checkpoint")

    def evaluate(self) -> None:
        training = self.model.training
        self.model.eval()
        self.engine.run_event("eval_start")
        self.evaluated.append(self.first_layer())
        self.engine.run_event("eval_end")
        self.model.train(training)

    def _advance(self, timestamp: Any) -> None:
        self.state.previous_timestamp, self.state.timestamp = self.state.timestamp, timestamp

    def first_layer(self) -> torch.Tensor:
        return self.model.conv1.weight.detach().clone()


@pytest.fixture
def make_run() -> type[Run]:
    return Run


@pytest.fixture
def make_saver() -> type[Saver]:
    return Saver
