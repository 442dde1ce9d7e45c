"""A training loop with evaluations and checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

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
    """Epochs of `BATCHES` batches, in their order, with an evaluation after each batch.

    Args:
        algorithms: The algorithms.
        make_optimizer: Makes the optimizers of the parameters; SGD by default.
        callbacks: The callbacks.
        norm: The normalization of the model, "group" or "batch".
        evaluated: Evaluate after each batch.

    Attributes:
        trained: All weights and buffers after each batch.
        evaluated: The same in each evaluation.
    """

    def __init__(
        self,
        *algorithms: Algorithm,
        make_optimizer: Any = None,
        callbacks: Any = (),
        norm: str = "group",
        evaluates: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        examples = [(torch.randn(3, 8, 8, generator=generator, dtype=torch.float64), i % 2) for i in range(4 * BATCHES)]
        self.loader = DataLoader(examples, batch_size=4)  # type: ignore[arg-type]
        torch.manual_seed(0)
        self.model = SimpleConvModel(norm=norm).double()
        make = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        self.evaluates = evaluates
        self.state = State(
            model=self.model,
            max_duration="2ep",
            dataloader=self.loader,
            optimizers=make(list(self.model.parameters())),
            algorithms=algorithms,
            callbacks=callbacks,
            run_name="run",
        )
        self.state.train_dataloader = self.loader
        self.engine = Engine(self.state)
        self.trained: list[dict[str, torch.Tensor]] = []
        self.evaluated: list[dict[str, torch.Tensor]] = []
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
            for batch in list(self.loader)[int(state.timestamp.batch_in_epoch) :]:
                self.step(batch)
                if state.is_over():
                    break
            if state.timestamp.batch_in_epoch == f"{BATCHES}ba":
                self._advance(state.timestamp.to_next_epoch())
                event("epoch_end")
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
        for scheduler in state.schedulers:
            scheduler.step()
        self.trained.append(self.tensors())
        self._advance(state.timestamp.to_next_batch(samples=4))
        event("batch_end")
        if self.evaluates:
            self.evaluate()
        event("batch_checkpoint")

    def evaluate(self, kind: str = "eval") -> dict[str, torch.Tensor]:
        training = self.model.training
        self.model.eval()
        self.engine.run_event(f"{kind}_start")
        found = self.tensors()
        self.evaluated.append(found)
        self.engine.run_event(f"{kind}_end")
        self.model.train(training)
        return found

    def _advance(self, timestamp: Any) -> None:
        self.state.previous_timestamp, self.state.timestamp = self.state.timestamp, timestamp

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def average(self) -> dict[str, torch.Tensor]:
        """x of all parameters, computed from y and z."""
        found = {}
        for name, parameter in self.model.named_parameters():
            for optimizer in self.state.optimizers:
                entry = optimizer.state.get(parameter)
                if entry:
                    group = optimizer.param_groups[0]
                    first = group["betas"][0] if "betas" in group else group["momentum"]
                    found[name] = (parameter.detach() - (1 - first) * entry["z"]) / first
        return found


@pytest.fixture
def make_run() -> type[Run]:
    return Run


@pytest.fixture
def make_saver() -> type[Saver]:
    return Saver
