"""One training batch: microbatches, forward, loss, backward, optimizer step.

Everything here runs once per step, so it avoids work that can be done once per `fit`, and never reads a tensor.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from composer.core import DataSpec, Engine, Event, Precision, State
from composer.models import ComposerModel
from composer.trainer._context import autocast, device_type
from composer.trainer._lockstep import LockStepSearch
from composer.trainer._microbatch import MicrobatchSearch
from composer.trainer._parallel import SingleProcess
from composer.trainer._scaler import ClosureGradScaler
from composer.trainer._train_metrics import TrainMetrics

__all__ = ["BatchTrainer", "needs_closure"]

_log = logging.getLogger(__name__)


class BatchTrainer:
    """Trains one batch at a time.

    Args:
        state: The run's state.
        engine: Announces the events of a batch.
        model: The user's model, whose `loss` and `update_metric` are called; `state.model` may be a wrapper around it.
        parallel: What other processes do.
        metrics: Takes the outputs for the training metrics.
        count_tokens: Whether microbatches weigh by their loss-generating tokens instead of their samples.
    """

    def __init__(
        self,
        state: State,
        engine: Engine,
        model: ComposerModel,
        parallel: SingleProcess,
        metrics: TrainMetrics,
        count_tokens: bool,
    ) -> None:
        self.state, self.engine, self.model = state, engine, model
        self.parallel, self.metrics, self.count_tokens = parallel, metrics, count_tokens
        self.losses: dict[str, torch.Tensor] = {}
        self._spec: DataSpec
        self._batch: Any = None
        self._num_samples: float = 0
        self._microbatches: Sequence[Any] = ()
        self._scaling = False
        self._closure_needed = False
        self._mean_count: float | None = None  # of this batch over ranks, once asked
        self._told_of_empty = False
        self._search, self._lock_step = MicrobatchSearch(state), LockStepSearch(state, parallel)
        # Of the pass that is running.
        self._logged = self.losses
        self._measured: TrainMetrics | None = None
        self._ddp_sync, self._create_graph = True, False

    def prepare(self, data_spec: DataSpec) -> None:
        """Decide, once per `fit`, what every step needs.

        Args:
            data_spec: Splits and counts the batches.
        """
        state = self.state
        self._spec = data_spec
        self._microbatch_transforms = data_spec.microbatch_transforms
        self._to_device = state.device.batch_to_device
        self._scaling = state.precision is Precision.AMP_FP16
        self._closure_needed = any(needs_closure(optimizer) for optimizer in state.optimizers)
        if self._closure_needed and self._scaling and not isinstance(state.scaler, ClosureGradScaler):
            state.scaler = ClosureGradScaler(device_type(state))
        if state.auto_microbatching:
            self._lock_step.check()
        # Autocast contexts are built anew for each use; without autocast there is nothing to enter at all.
        self._autocast = state.precision is not Precision.FP32 or torch.is_autocast_enabled(device_type(state))

    def train(self, num_samples: float) -> dict[str, torch.Tensor]:
        """Train on `state.batch`: forward, backward and one optimizer step.

        Args:
            num_samples: Samples in the batch.

        Returns:
            The detached losses by key (`loss/train/total`, ...), on the device.
        """
        state = self.state
        batch = self._batch = state.batch
        if state.algorithms:  # an algorithm may have dropped or added rows
            num_samples = self._spec.get_num_samples_in_batch(batch)
        self._num_samples, self._mean_count = num_samples, None
        self.losses = {}
        optimizer, scaler = state.optimizers[0], state.scaler if self._scaling else None
        closure = self._searching_closure if state.auto_microbatching else self._closure
        if not self._closure_needed:
            closure()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        elif isinstance(scaler, ClosureGradScaler):
            scaler.step(optimizer, closure=closure)
        else:
            optimizer.step(closure=closure)  # type: ignore[arg-type]
        if scaler is not None:
            scaler.update()
        return self.losses

    def _searching_closure(self, ddp_sync: bool = True, loss_dict: dict[str, torch.Tensor] | None = None) -> Any:
        """`_closure` with microbatches as large as fit the memory, of all ranks."""
        if self.parallel.world_size == 1:
            return self._search.run(lambda: self._closure(ddp_sync, loss_dict))
        if self._mean_count is None:  # the first pass of this batch; later ones and other tries communicate nothing
            self._average(self._count(microbatch) for microbatch in self._split())
            self.parallel.prepare_lone_passes()
        self._lock_step.run(lambda: self._compute(False, loss_dict), self._num_samples)
        if ddp_sync:
            self.parallel.average_gradients()
        return self._finish()

    def _split(self) -> Sequence[Any]:
        size = self.state.device_train_microbatch_size
        if size is None or self._num_samples <= size:
            return (self._batch,)
        return self._spec.split_batch(self._batch, size)

    def _closure(self, ddp_sync: bool = True, loss_dict: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        """Gradients of the whole batch.

        Args:
            ddp_sync: Whether gradients are exchanged between ranks.
            loss_dict: Takes the losses of a pass that is not to be logged and does not count for the metrics.

        Returns:
            The total loss, detached, on the device.
        """
        self._compute(ddp_sync, loss_dict)
        return self._finish()

    def _compute(self, ddp_sync: bool, loss_dict: dict[str, torch.Tensor] | None) -> None:
        """Forward and backward of all microbatches; see `_closure`."""
        state, run_event = self.state, self.engine.run_event
        microbatches = self._microbatches = self._split()
        self._ddp_sync = ddp_sync
        self._logged = self.losses if loss_dict is None else loss_dict
        self._logged.clear()
        self._measured = self.metrics if loss_dict is None and self.metrics.wanted else None
        if self._measured is not None:
            self._measured.begin()
        run_event(Event.BEFORE_TRAIN_BATCH)
        for optimizer in state.optimizers:
            _drop_gradients(optimizer)
        self._create_graph = bool(state.algorithms) and any(a.backwards_create_graph for a in state.algorithms)
        if len(microbatches) == 1 and self.parallel.world_size == 1 and not self.count_tokens:
            self._train_microbatch(microbatches[0], 1.0, last=True)
        else:
            counts = [self._count(microbatch) for microbatch in microbatches]
            total = self._average(counts)
            for i, (microbatch, count) in enumerate(zip(microbatches, counts, strict=True), start=1):
                self._train_microbatch(microbatch, count / total if count else 0.0, last=i == len(counts))
        state.batch = self._batch

    def _finish(self) -> torch.Tensor:
        """What is done with the gradients before the step; returns the total loss."""
        state = self.state
        if self._scaling and state.scaler is not None:
            for optimizer in state.optimizers:
                state.scaler.unscale_(optimizer)
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        return self._logged["loss/train/total"]

    def _train_microbatch(self, microbatch: Any, weight: float, last: bool) -> None:
        state, metrics = self.state, self._measured
        batch = state.batch = self._microbatch_transforms(self._to_device(microbatch))
        clean = None if metrics is None else _kept(batch)
        context = self.parallel.backward_context(last, self._ddp_sync)
        if context is None:
            self._forward_and_backward(weight)
        else:
            with context:
                self._forward_and_backward(weight)
        if metrics is not None:
            metrics.collect(clean, state.outputs, len(self._microbatches) == 1)

    def _forward_and_backward(self, weight: float) -> None:
        state, run_event = self.state, self.engine.run_event
        run_event(Event.BEFORE_FORWARD)
        if self._autocast:
            state.outputs = self._in_precision(state.model, state.batch)
        else:
            state.outputs = state.model(state.batch)
        run_event(Event.AFTER_FORWARD)
        run_event(Event.BEFORE_LOSS)
        if self._autocast:
            state.loss = self._in_precision(self.model.loss, state.outputs, state.batch)
        else:
            state.loss = self.model.loss(state.outputs, state.batch)
        run_event(Event.AFTER_LOSS)
        run_event(Event.BEFORE_BACKWARD)
        total = _total(state.loss)
        _add_losses(self._logged, state.loss, total, weight)
        if weight == 0.0:
            # A mean over no token is nan, and so are its gradients, which 0 does not silence. All ranks need the pass.
            for tensor in _tensors(state.outputs):
                if tensor.grad_fn is not None:
                    tensor.register_hook(torch.zeros_like)  # type: ignore[no-untyped-call]
        if weight != 1.0:
            total = total * weight
        if self._scaling and state.scaler is not None:
            total = state.scaler.scale(total)
        total.backward(create_graph=self._create_graph)  # type: ignore[no-untyped-call]
        run_event(Event.AFTER_BACKWARD)

    def _in_precision(self, function: Callable[..., Any], *args: Any) -> Any:
        with autocast(self.state):
            return function(*args)

    def _average(self, counts: Iterable[float]) -> float:
        """The batch size that microbatches are weighed by, averaged over ranks; asked once per batch.

        Raises:
            ValueError: Nothing on any rank counts, and it is samples, or tokens that nobody counts.
        """
        if self._mean_count is None:
            counts = list(counts)
            self._mean_count = self.parallel.mean_count(sum(counts), len(counts))
            if self._mean_count == 0:
                self._check_empty()
        return self._mean_count

    def _check_empty(self) -> None:
        if not self.count_tokens:
            raise ValueError("The batch has no samples that count on any rank. Leave such batches out.")
        if not self._spec.has_token_counter:
            raise ValueError(
                "`accumulate_train_batch_on_tokens=True` needs the number of tokens, which is not known: a batch is no "
                "dict with 'input_ids'. Pass "
                "`train_dataloader=DataSpec(dataloader, get_num_tokens_in_batch=...)`, or leave the argument out."
            )
        if not self._told_of_empty:
            self._told_of_empty = True
            _log.warning(
                "No token of batch %d generates loss, says `get_num_tokens_in_batch`: such batches have zero gradients "
                "and a logged loss of 0. This is said once.",
                self.state.timestamp.batch.value,
            )

    def _count(self, microbatch: Any) -> float:
        if self.count_tokens:
            return self._spec.get_num_tokens_in_batch(microbatch, token_type="loss_generating")
        return self._spec.get_num_samples_in_batch(microbatch)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer must run the forward and backward pass itself.

    It must if its `step` requires a closure (LBFGS), or if it declares so: with an attribute `needs_closure = True`, or
    with `_step_supports_amp_closure = True`, which also promises to skip the step if the closure returns None. A `step`
    that merely allows a closure calls it first and once, which is the same as stepping after the pass, except that it
    does not know None, the sign of an overflow in fp16. So it gets none.

    Args:
        optimizer: The optimizer as it is stepped, with all wrappers.
    """
    for declared in ("_step_supports_amp_closure", "needs_closure"):
        if getattr(optimizer, declared, False):
            return True
    if getattr(optimizer, "single_pass", False):
        return False
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.zero_grad(set_to_none=True)`."""
    zero_grad = optimizer.zero_grad
    if getattr(zero_grad, "__func__", None) is not torch.optim.Optimizer.zero_grad:
        zero_grad(set_to_none=True)
        return
    # What torch's own does, without the profiler record around it, which takes longer than the rest.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _kept(batch: Any) -> Any:
    # Algorithms replace what is in the batch; a container of one's own keeps what was there before.
    if isinstance(batch, dict):
        return batch.copy()
    return list(batch) if isinstance(batch, list) else batch


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested mappings, sequences and objects with attributes."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif isinstance(outputs, Sequence) and not isinstance(outputs, (str, bytes)):
        for value in outputs:
            yield from _tensors(value)
    elif hasattr(outputs, "__dict__") and not isinstance(outputs, type):
        for value in vars(outputs).values():
            yield from (value,) if isinstance(value, torch.Tensor) else ()


def _total(loss: Any) -> torch.Tensor:
    """The scalar to differentiate: the entry "total" of a dict, otherwise the sum of the means of all losses."""
    if isinstance(loss, torch.Tensor):
        return loss if loss.dim() == 0 else loss.mean()
    if isinstance(loss, Mapping):
        if "total" in loss:
            return _total(loss["total"])
        loss = tuple(loss.values())
    if not isinstance(loss, Sequence) or isinstance(loss, str) or not loss:
        raise TypeError(
            f"`loss` must be a tensor, a sequence of tensors or a dict of tensors, got {type(loss).__name__}. "
            f"Check what the model's `loss` method returns."
        )
    return sum((_total(part) for part in loss[1:]), start=_total(loss[0]))


def _add_losses(losses: dict[str, torch.Tensor], loss: Any, total: torch.Tensor, weight: float) -> None:
    """Add a microbatch's share to the logged losses."""
    if weight == 1.0 and isinstance(loss, torch.Tensor):  # nearly always, and every step
        losses["loss/train/total"] = total.detach()
        return
    parts = {"total": total}
    if isinstance(loss, Mapping):
        parts.update((key, _total(part)) for key, part in loss.items() if key != "total")
    elif not isinstance(loss, torch.Tensor) and len(loss) > 1:
        parts.update((f"loss{i}", _total(part)) for i, part in enumerate(loss))
    for name, part in parts.items():
        share = part.detach() if weight == 1.0 else part.detach() * weight if weight else torch.zeros_like(part)
        key = f"loss/train/{name}"
        losses[key] = share if key not in losses else losses[key] + share
