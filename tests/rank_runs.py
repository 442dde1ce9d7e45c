"""Runs of one algorithm on parts of every batch, and what two such runs together should end with."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from algorithm_runs import LANGUAGE, LOWER_PRECISION, Captioned, Classifier, captioned, make, noise
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, default_collate

from composer import Trainer
from composer.core import Algorithm, Engine, Precision, State
from composer.optim import LinearWithWarmupScheduler
from composer.utils import reproducibility

SEED, EPOCHS, BATCHES, SIZE = 3, 3, 2, 8  # the size is that of the whole batch
WHOLE, HALVES = (0, SIZE), ((0, 4), (4, SIZE))  # rows of each batch
Found = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An algorithm and how it is run.

    Attributes:
        name: Its class.
        arguments: Its arguments.
        is_same_seed: Whether all ranks draw the same random numbers.
        is_batch_normalized: Whether the model has statistics of batches.
        is_plain: Whether it is left out; everything else stays as it is.
        patches: What is put in the place of functions that draw.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    is_same_seed: bool = False
    is_batch_normalized: bool = False
    is_plain: bool = False
    patches: dict[str, Any] = field(default_factory=dict)


def model_for(case: Case) -> Classifier:
    norm = torch.nn.BatchNorm2d if case.is_batch_normalized else partial(torch.nn.GroupNorm, 2)
    kind = Captioned if case.name in LANGUAGE else Classifier
    return kind(norm=norm, dropout=0.0).double()


def in_float64(has_text: bool, examples: list[Any]) -> Any:
    batch = captioned(examples) if has_text else default_collate(examples)
    items = batch.items() if has_text else enumerate(batch)
    cast = {key: value.double() if value.is_floating_point() else value for key, value in items}
    return cast if has_text else [*cast.values()]


class Rows(DistributedSampler[Any]):
    """Some rows of every batch."""

    def __init__(self, dataset: Any, start: int, stop: int) -> None:
        super().__init__(dataset, num_replicas=SIZE, rank=start)
        self.order = [batch * SIZE + row for batch in range(BATCHES) for row in range(start, stop)]

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def loader_of(case: Case, rows: tuple[int, int]) -> DataLoader[Any]:
    images, (start, stop) = noise(BATCHES * SIZE), rows
    collate = partial(in_float64, case.name in LANGUAGE)
    return DataLoader(images, batch_size=stop - start, sampler=Rows(images, start, stop), collate_fn=collate)


def algorithms_of(case: Case) -> list[Algorithm]:
    keys = {"input_key": "image", "target_key": "label"} if case.name in LANGUAGE else {}
    return [] if case.is_plain else [make(case.name, keys, case.arguments)]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@contextlib.contextmanager
def in_place(case: Case) -> Iterator[None]:
    """Apply the patches of a case."""
    with contextlib.ExitStack() as stack:
        for target, function in case.patches.items():
            stack.enter_context(mock.patch(target, function))
        if case.name == "NoOpModel":  # makes a parameter of its own
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        yield


def train(case: Case, rows: tuple[int, int], microbatch_size: int | None = None) -> Found:
    """Train on some rows of every batch, together with the other ranks if there are any."""
    model = model_for(case)
    with in_place(case):
        trainer = Trainer(
            model=model,
            train_dataloader=loader_of(case, rows),
            max_duration=f"{EPOCHS}ep",
            optimizers=optimizer_of(model),
            schedulers=LinearWithWarmupScheduler("2ba") if case.name == "ScaleSchedule" else None,
            algorithms=algorithms_of(case),
            device_train_microbatch_size=microbatch_size,
            # Autocast leaves float64 as it is.
            precision=Precision.AMP_BF16 if case.name in LOWER_PRECISION else Precision.FP32,
            progress_bar=False,
            device="cpu",
            seed=SEED,
        )
        wrapped = trainer.state.model
        if case.is_same_seed:
            torch.manual_seed(SEED)
        trainer.fit()
    found = found_in(trainer.state)
    found["loss"] = trainer.state.total_loss_dict["loss/train/total"]
    if isinstance(wrapped, DistributedDataParallel):
        found["looks_for_unused"] = wrapped.find_unused_parameters
    trainer.close()
    return found


def found_in(state: State) -> Found:
    model: Any = state.model.module if state.is_model_ddp else state.model
    return {
        "weights": {name: weight.detach().clone() for name, weight in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "algorithms": [copy.deepcopy(algorithm.state_dict()) for algorithm in state.algorithms],
        "samples": state.timestamp.sample.value,
    }


# ---- the same without several processes ----


class Share:
    """A run on the rows of one rank, in this process, up to what the ranks do together.

    Args:
        case: The algorithm.
        rows: Of each batch.
        seed: Of what is drawn in training.
    """

    def __init__(self, case: Case, rows: tuple[int, int], seed: int) -> None:
        reproducibility.seed_all(SEED)
        self.model = model_for(case)
        self.optimizer = optimizer_of(self.model)
        self.loader = loader_of(case, rows)
        self.state = State(
            model=self.model,
            max_duration=f"{EPOCHS}ep",
            rank_zero_seed=SEED,
            train_dataloader=self.loader,
            dataloader=self.loader,
            dataloader_label="train",
            optimizers=self.optimizer,
            algorithms=algorithms_of(case),
        )
        self.engine = Engine(self.state)
        self._announce("init", "before_load", "after_load")
        torch.manual_seed(seed)
        self._announce("fit_start")
        self._random = torch.get_rng_state()
        self.parameters = list(self.model.parameters())

    def _announce(self, *events: str) -> None:
        for event in events:
            self.engine.run_event(event)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the generator of this rank within the context."""
        torch.set_rng_state(self._random)
        yield
        self._random = torch.get_rng_state()

    def gradients(self) -> None:
        """The gradients of the next batch."""
        state = self.state
        if state.timestamp.batch_in_epoch == 0:
            self._batches = iter(self.loader)
        state.batch = next(self._batches)
        self._announce("after_dataloader", "batch_start", "before_train_batch")
        self.optimizer.zero_grad()
        self._announce("before_forward")
        state.outputs = self.model(state.batch)
        self._announce("after_forward", "before_loss")
        state.loss = self.model.loss(state.outputs, state.batch)
        self._announce("after_loss", "before_backward")
        state.loss.backward()
        self._announce("after_backward")

    def step(self) -> None:
        """One step along whatever the gradients are now."""
        self._announce("after_train_batch")
        self.optimizer.step()
        self.state.timestamp = self.state.timestamp.to_next_batch(SIZE)
        self._announce("batch_end")
        if self.state.timestamp.batch_in_epoch == BATCHES:
            self.state.timestamp = self.state.timestamp.to_next_epoch()
            self._announce("epoch_end")


def in_step(case: Case, *seeds: int) -> list[Found]:
    """Train two shares that average their gradients before each step.

    As `DistributedDataParallel` does, the second gets the buffers of the first before each step.
    """
    shares = [Share(case, rows, seed) for rows, seed in zip(HALVES, seeds, strict=True)]
    for _ in range(EPOCHS * BATCHES):
        for mine, first in zip(shares[1].model.buffers(), shares[0].model.buffers(), strict=True):
            mine.copy_(first)
        for share in shares:
            with share.drawing():
                share.gradients()
        for weights in zip(*(share.parameters for share in shares), strict=True):
            set_mean_gradient(weights)
        for share in shares:
            share.step()
    for share in shares:
        share.engine.run_event("fit_end")
    return [found_in(share.state) for share in shares]


def set_mean_gradient(weights: tuple[torch.nn.Parameter, ...]) -> None:
    """Average gradients. A parameter that no rank used has none; if only some used it, the others count as zero."""
    slopes = [weight.grad for weight in weights if weight.grad is not None]
    for weight in weights if slopes else ():
        weight.grad = torch.stack(slopes).sum(0) / len(weights)


def climbing_apart(case: Case) -> dict[str, torch.Tensor]:
    """SAM, where each half has a neighbourhood of its own: the mean of the gradients there makes the step."""
    model = model_for(case)
    optimizer = optimizer_of(model)
    step = 0
    for _ in range(EPOCHS):
        for batches in zip(*(loader_of(case, rows) for rows in HALVES), strict=True):
            step += 1
            radius = 0.0 if step % case.arguments["interval"] else case.arguments["rho"]
            slopes = [slope_near(model, batch, radius) for batch in batches]
            for weight, *both in zip(model.parameters(), *slopes, strict=True):
                weight.grad = sum(both) / len(both)
            optimizer.step()
    return {name: weight.detach() for name, weight in model.named_parameters()}


def slope_near(model: Classifier, batch: Any, radius: float) -> list[torch.Tensor]:
    """The gradient at the point where the loss of a batch is largest, to first order, within a radius."""
    there = copy.deepcopy(model)
    weights = list(there.parameters())
    if radius:
        slope = torch.autograd.grad(there.loss(there(batch), batch), weights)
        norm = torch.cat([part.flatten() for part in slope]).norm()
        with torch.no_grad():
            for weight, part in zip(weights, slope, strict=True):
                weight += radius * part / norm
    return list(torch.autograd.grad(there.loss(there(batch), batch), weights))
