"""The order of events of a fit, an epoch, a step and an evaluation, for every training loop."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from composer.core.algorithm import declared_events
from composer.core.engine import Engine
from composer.core.event import Event
from composer.core.precision import Precision, precision_context_of
from composer.core.state import State
from composer.core.time import Timestamp, TimeUnit
from composer.loop.loss_terms import Count, weighted
from composer.models.base import ComposerModel, total_loss

_BEFORE_OUTPUTS = {Event.AFTER_DATALOADER, Event.BATCH_START, Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD}


class Driver:
    """Announces the events of a run, in the only order there is.

    A loop calls the phases below in the order in which they are written; the `Trainer` does so in a loop of its own,
    and `HostedRun` hands them to loops of others, with checks. A phase takes what the loop has at that point, such as
    the outputs of the model, announces its events, and returns it as algorithms have changed it. Nothing here reads a
    tensor, and an event at which nothing acts costs one comparison.

    Args:
        engine: Runs the algorithms and callbacks of the run.

    Attributes:
        losses: The detached losses of the passes since `begin_passes`, by key (`loss/train/total`, ...).
        create_graph: An algorithm differentiates the gradients of the passes.
        autocast: Returns the context in which `compute_loss` computes outputs and loss.
        compiled: `forward_and_loss`, compiled as one graph. It is used where no algorithm acts between the forward pass
            and the loss. None: the two are called one after the other.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.state, self.dispatch = engine, engine.state, engine.dispatch
        self.losses: dict[str, torch.Tensor] = {}
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.compiled: Callable[..., tuple[Any, Any]] | None = None
        self.create_graph = False

    def choose_autocast(self) -> None:
        """Compute outputs and losses in the precision of the run."""
        if self.state.precision is Precision.AMP_FP8:
            self.autocast = functools.partial(precision_context_of, self.state)
        else:  # any other context can be entered again
            context = precision_context_of(self.state)
            self.autocast = lambda: context

    # ---- a fit and its epochs ----

    def begin_fit(self) -> None:
        """Announce FIT_START."""
        self.engine.run_event(Event.FIT_START)

    def begin_epoch(self) -> None:
        """Announce EPOCH_START, and before it ITERATION_START if an iteration begins.

        In an epoch that is in progress, which a resumed run continues, nothing is announced.
        """
        now = self.state.timestamp
        if now.batches_in_epoch:
            return
        if not now.epochs_in_iteration:
            self.engine.run_event(Event.ITERATION_START)
        self.engine.run_event(Event.EPOCH_START)

    def end_epoch(self, before_checkpoint: Callable[[Event], object] = lambda event: None) -> None:
        """Count the epoch, announce EPOCH_END and EPOCH_CHECKPOINT, and end the iteration if it is over.

        Args:
            before_checkpoint: Called between the two events, for evaluations that are due.
        """
        state = self.state
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_epoch()
        self.engine.run_event(Event.EPOCH_END)
        before_checkpoint(Event.EPOCH_END)
        self.engine.run_event(Event.EPOCH_CHECKPOINT)
        self.end_iteration(TimeUnit.EPOCH)

    def end_iteration(self, unit: TimeUnit) -> bool:
        """Announce ITERATION_END and ITERATION_CHECKPOINT if the length of the iteration is reached.

        Args:
            unit: The unit that has just advanced: EPOCH after an epoch, TOKEN after a batch.

        Returns:
            True if the iteration has ended.
        """
        state, length = self.state, self.state._iteration_length
        if length is None or length.unit is not unit:
            return False
        now = state.timestamp
        if (now.tokens_in_iteration if unit is TimeUnit.TOKEN else now.epochs_in_iteration) < length.value:
            return False
        state.previous_timestamp = now
        state.timestamp = now.to_next_iteration()
        self.engine.run_event(Event.ITERATION_END)
        self.engine.run_event(Event.ITERATION_CHECKPOINT)
        return True

    def end_fit(self) -> None:
        """Announce FIT_END."""
        self.engine.run_event(Event.FIT_END)

    # ---- a batch of the loader ----

    def before_dataloader(self) -> None:
        """Announce BEFORE_DATALOADER."""
        if self.dispatch.before_dataloader:
            self.dispatch.before_dataloader()

    def after_dataloader(self, batch: Any, begins_step: bool = True) -> Any:
        """Announce AFTER_DATALOADER and, for the first batch of a step, BATCH_START.

        Args:
            batch: A batch of the loader; algorithms change a copy, because the loader may yield the same object again.
            begins_step: This is the first batch of a step.
        """
        state, dispatch = self.state, self.dispatch
        state.batch = copied(batch) if dispatch.after_dataloader or dispatch.batch_start else batch
        if dispatch.after_dataloader:
            dispatch.after_dataloader()
        if begins_step and dispatch.batch_start:
            dispatch.batch_start()
        return state.batch

    def find_batch_keys(self) -> None:
        """Find the inputs and targets of the first batch, before anything is computed.

        `Engine.explain` then says how they are named, and an algorithm that first reads the targets after the forward
        pass does not fail there. Loops call it when AFTER_DATALOADER and BATCH_START have run.

        Raises:
            LookupError: The batch has no part with the `target_key` of such an algorithm.
            TypeError: The batch cannot be indexed by it.
        """
        state = self.state
        state.batch_key(0)
        state.batch_key(1)
        for algorithm in state.algorithms:
            events, key = declared_events(algorithm), getattr(algorithm, "target_key", None)
            if isinstance(key, (int, str)) and events and events.isdisjoint(_BEFORE_OUTPUTS):
                state.batch_get_item(key)

    # ---- the passes of a step ----

    def begin_passes(self, losses: dict[str, torch.Tensor]) -> None:
        """Announce BEFORE_TRAIN_BATCH; an optimizer may ask for the passes of one step several times.

        Args:
            losses: Receives the losses of the passes.
        """
        losses.clear()
        self.losses = losses
        if self.dispatch.before_train_batch:
            self.dispatch.before_train_batch()
        algorithms = self.state.algorithms
        self.create_graph = bool(algorithms) and any(each.backwards_create_graph for each in algorithms)

    def compute_loss(self, batch: Any, model: ComposerModel, forward: Callable[[Any], Any] | None = None) -> Any:
        """Compute the loss of a microbatch, with the events from BEFORE_FORWARD to BEFORE_BACKWARD.

        Args:
            batch: The microbatch, on the model's device.
            model: Its `loss` is looked up after the forward pass, since algorithms may replace it.
            forward: `forward(batch) -> outputs`, such as the model in a wrapper. None: the model.
        """
        state, dispatch = self.state, self.dispatch
        forward = model if forward is None else forward
        batch = self.before_forward(batch)
        if dispatch.after_forward or dispatch.before_loss:  # algorithms run in the default precision
            with self.autocast():
                outputs = forward(batch)
            outputs = self.after_forward(outputs)
            batch = self.before_loss()
            with self.autocast():
                computed = model.loss(outputs, batch)
        else:
            with self.autocast():
                if self.compiled is not None:
                    state.outputs, computed = self.compiled(forward, model, batch)
                else:
                    outputs = state.outputs = forward(batch)
                    computed = model.loss(outputs, batch)
        return self.after_loss(computed)

    def before_forward(self, batch: Any) -> Any:
        """Announce BEFORE_FORWARD; return the batch for the model."""
        self.state.batch = batch
        if self.dispatch.before_forward:
            self.dispatch.before_forward()
        return self.state.batch

    def after_forward(self, outputs: Any) -> Any:
        """Announce AFTER_FORWARD; return the outputs for the loss."""
        self.state.outputs = outputs
        if self.dispatch.after_forward:
            self.dispatch.after_forward()
        return self.state.outputs

    def before_loss(self) -> Any:
        """Announce BEFORE_LOSS; return the batch for the loss."""
        if self.dispatch.before_loss:
            self.dispatch.before_loss()
        return self.state.batch

    def after_loss(self, loss: Any) -> Any:
        """Announce AFTER_LOSS and BEFORE_BACKWARD; return the loss to differentiate, in the same form."""
        self.state.loss = loss
        if self.dispatch.after_loss:
            self.dispatch.after_loss()
        if self.dispatch.before_backward:
            self.dispatch.before_backward()
        return self.state.loss

    def backward(self, loss: Any, weight: Count = 1.0, compute: Callable[[torch.Tensor], object] | None = None) -> None:
        """Add the loss of a microbatch to `losses`, compute its gradients, and announce AFTER_BACKWARD.

        Args:
            loss: A tensor, or several by name or in a sequence, which are added.
            weight: The microbatch's share of the step.
            compute: Computes the gradients of a tensor, with `create_graph`. None: `tensor.backward`.
        """
        total = loss if isinstance(loss, torch.Tensor) and loss.dim() == 0 else total_loss(loss)
        is_whole = isinstance(weight, float) and weight == 1.0
        if not is_whole:
            total = weighted(total, weight, self.state.outputs)
        if total is loss and not self.losses:  # the usual case, in every step
            self.losses["loss/train/total"] = total.detach()
        else:
            add_loss(self.losses, "loss/train/total", total.detach())
            parts: Mapping[str, Any] = {}
            if isinstance(loss, Mapping):
                parts = loss
            elif not isinstance(loss, torch.Tensor) and len(loss) > 1:
                parts = {f"loss{i}": part for i, part in enumerate(loss)}
            for key, part in parts.items():
                if key != "total":
                    add_loss(self.losses, f"loss/train/{key}", weighted(total_loss(part).detach(), weight))
        if compute is None:
            total.backward(create_graph=self.create_graph)  # type: ignore[no-untyped-call]
        else:
            compute(total)
        self.after_backward()

    def after_backward(self) -> None:
        """Announce AFTER_BACKWARD."""
        if self.dispatch.after_backward:
            self.dispatch.after_backward()

    def end_passes(self) -> None:
        """Announce AFTER_TRAIN_BATCH, where algorithms change the gradients of the whole step."""
        if self.dispatch.after_train_batch:
            self.dispatch.after_train_batch()

    # ---- the end of a step ----

    def step_schedulers(self) -> None:
        """Step the schedulers.

        Raises:
            ValueError: A learning rate is not finite.
        """
        for scheduler in self.state.schedulers:
            scheduler.step()
            for rate in getattr(scheduler, "get_last_lr", tuple)():
                # A rate in a tensor is not read: that would wait for the device.
                if isinstance(rate, float) and not math.isfinite(rate):
                    raise ValueError(
                        f"`{type(scheduler).__name__}` must return finite learning rates, got {rate!r} after batch "
                        f"{self.state.timestamp.batches}. Every weight would be NaN after the next step. Check how the "
                        f"rate is computed."
                    )

    def count_batch(self, samples: float, tokens: int, seconds: float) -> None:
        """Count a step, before `end_batch`.

        Args:
            samples: The samples of all ranks.
            tokens: The tokens of all ranks.
            seconds: The wall-clock time since the last step.
        """
        state = self.state
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(samples, tokens, seconds)

    def end_batch(self, before_checkpoint: Callable[[Event], object] | None = None) -> None:
        """Announce BATCH_END and BATCH_CHECKPOINT, after the optimizers have stepped and `count_batch`.

        Args:
            before_checkpoint: Called between the two events, for evaluations that are due.
        """
        if self.dispatch.batch_end:
            self.dispatch.batch_end()
        if before_checkpoint is not None:
            before_checkpoint(Event.BATCH_END)
        if self.dispatch.batch_checkpoint:
            self.dispatch.batch_checkpoint()

    # ---- evaluation ----

    def begin_evaluations(self, is_standalone: bool) -> None:
        """Announce EVAL_STANDALONE_START outside of training, EVAL_BEFORE_ALL in training."""
        self.engine.run_event(Event.EVAL_STANDALONE_START if is_standalone else Event.EVAL_BEFORE_ALL)

    def begin_evaluation(self) -> None:
        """Announce EVAL_START, in `active_dataloader`."""
        self.state.eval_timestamp = Timestamp()
        self.engine.run_event(Event.EVAL_START)

    def begin_eval_batch(self, batch: Any) -> Any:
        """Announce EVAL_BATCH_START; return the batch."""
        self.state.batch = batch
        if self.dispatch.eval_batch_start:
            self.dispatch.eval_batch_start()
        return self.state.batch

    def eval_forward(self, batch: Any, forward: Callable[[Any], Any]) -> Any:
        """Compute the outputs of a microbatch, between EVAL_BEFORE_FORWARD and EVAL_AFTER_FORWARD.

        Args:
            batch: The microbatch, on the model's device.
            forward: `forward(batch) -> outputs`.
        """
        state, dispatch = self.state, self.dispatch
        state.batch = batch
        if dispatch.eval_before_forward:
            dispatch.eval_before_forward()
        state.outputs = forward(state.batch)
        if dispatch.eval_after_forward:
            dispatch.eval_after_forward()
        return state.outputs

    def end_eval_batch(self, samples: float, tokens: int, seconds: float = 0.0) -> None:
        """Count a batch of the evaluation, and announce EVAL_BATCH_END."""
        self.state.eval_timestamp = self.state.eval_timestamp.to_next_batch(samples, tokens, seconds)
        if self.dispatch.eval_batch_end:
            self.dispatch.eval_batch_end()

    def end_evaluation(self) -> None:
        """Announce EVAL_END."""
        self.engine.run_event(Event.EVAL_END)

    def end_evaluations(self, is_standalone: bool) -> None:
        """Announce EVAL_STANDALONE_END outside of training, EVAL_AFTER_ALL in training."""
        self.engine.run_event(Event.EVAL_STANDALONE_END if is_standalone else Event.EVAL_AFTER_ALL)


@contextmanager
def active_dataloader(state: State, dataloader: Iterable[Any], label: str, length: int = -1) -> Iterator[None]:
    """Make a loader the active one temporarily; then restore loader, batch and outputs.

    Args:
        state: The run's state.
        dataloader: The loader.
        label: The label of the loader.
        length: The number of batches to use; -1: all.
    """
    before, before_label, before_length = state.dataloader, state.dataloader_label, state.dataloader_len
    batch, outputs = state.batch, state.outputs
    state.set_dataloader(dataloader, label, length)
    try:
        yield
    finally:
        state.set_dataloader(before, before_label, -1 if before_length is None else before_length)
        state.batch, state.outputs = batch, outputs


def forward_and_loss(forward: Callable[[Any], Any], model: ComposerModel, batch: Any) -> tuple[Any, Any]:
    """Return the outputs for a batch and their loss; to be compiled as one graph."""
    outputs = forward(batch)
    return outputs, model.loss(outputs, batch)


def copied(batch: Any) -> Any:
    """Return a batch that can be changed in place; its tensors are the same."""
    return batch if isinstance(batch, (torch.Tensor, tuple)) else copy.copy(batch)


def add_loss(losses: dict[str, torch.Tensor], key: str, share: torch.Tensor) -> None:
    """Add a share of a loss to the losses by key."""
    losses[key] = losses[key] + share if key in losses else share


def zero_grad(optimizer: Any) -> None:
    """Call `optimizer.zero_grad()`."""
    if getattr(optimizer.zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
        optimizer.zero_grad()
        return
    # The same as torch's own, without its profiler record, which takes longer than the rest.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
