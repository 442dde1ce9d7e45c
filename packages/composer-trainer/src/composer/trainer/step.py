"""One training step: microbatches, forward, loss, backward, optimizer.

Everything here runs once per step, so it avoids work that can be done once per `fit`, and never reads a tensor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from composer.core import DataSpec, Precision, State
from composer.core.data_spec import unchanged
from composer.loop.driver import Driver, add_loss, forward_and_loss, zero_grad
from composer.loop.loss_terms import Count, LossTerms, share_of
from composer.models import ComposerModel
from composer.trainer.metrics import TrainMetrics
from composer.trainer.microbatch import MicrobatchSearch
from composer.trainer.optimizers import needs_closure, prepare_fused_sgd
from composer.trainer.precision import ClosureGradScaler, step_scaled, unscale
from composer.trainer.strategy import Strategy

_log = logging.getLogger(__name__)


class BatchTrainer:
    """Trains one batch at a time.

    Args:
        state: The run's state.
        driver: Announces the events of a step.
        model: The user's model, whose `loss` and `update_metric` are called; `state.model` may wrap it.
        strategy: Runs the steps of all ranks.
        metrics: Collects the outputs for the training metrics.
        count_tokens: Weigh microbatches by the loss-generating tokens that the `DataSpec` counts; see `LossTerms`.
        compile_config: Arguments of `torch.compile` for the loss together with the forward pass, and for the steps of
            the optimizers; None: only `state.model` may be compiled.
        default_microbatch_size: The `state.device_train_microbatch_size` if the user has requested none. Then a batch
            is trained whole, even if algorithms or a collate function have given it more samples.
    """

    def __init__(
        self,
        state: State,
        driver: Driver,
        model: ComposerModel,
        strategy: Strategy,
        metrics: TrainMetrics,
        count_tokens: bool,
        compile_config: dict[str, Any] | None = None,
        default_microbatch_size: float | None = None,
    ) -> None:
        self.state, self.driver, self.model = state, driver, model
        self._whole_size = default_microbatch_size
        self._step_optimizer: Callable[[torch.optim.Optimizer], object] | None = None
        if compile_config is not None:
            driver.compiled = torch.compile(forward_and_loss, **compile_config)
            self._step_optimizer = torch.compile(_step_optimizer, **compile_config)
        self.strategy, self.metrics, self.count_tokens = strategy, metrics, count_tokens
        self.losses: dict[str, torch.Tensor] = {}
        self._spec: DataSpec
        self._batch: Any = None
        self._num_samples: float = 0
        self._microbatches: Sequence[Any] = ()
        self._scaling = False
        self._closure_optimizer: int | None = None
        self._begin_turn: Callable[[int], object] | None = None
        self._forward: Callable[[Any, Any], Any] | None = None  # None: the model is called
        self._compute_gradients: Callable[[torch.Tensor], object] | None = None  # None: by torch
        # The optimizers that step with the gradients of the current pass.
        self._pass_optimizers: Sequence[torch.optim.Optimizer] = ()
        self._mean_count: Count | None = None  # the terms of the batch averaged over ranks, once exchanged
        self._warned_of_empty = False
        self._search = MicrobatchSearch(state, strategy)
        self._pass_metrics: TrainMetrics | None = None  # None: the passes are not counted by the metrics

    def prepare(self, data_spec: DataSpec) -> None:
        """Prepare for the steps of a `fit`.

        Args:
            data_spec: Splits and counts the batches.
        """
        state = self.state
        self._spec = data_spec
        self._terms = LossTerms(self.model, data_spec, self.count_tokens)
        self._dispatch, self._is_distributed = self.driver.dispatch, self.strategy.is_distributed
        self._average_after = self._is_distributed and not self.strategy.averages_in_backward
        self._optimizers = state.optimizers  # this list stays the same object when its contents are replaced
        self._to_device = state.device.batch_to_device
        strategy, kind = self.strategy, type(self.strategy)
        self._scaling = state.precision is Precision.AMP_FP16 and not strategy.scales_losses
        self._forward = None if kind.forward is Strategy.forward else strategy.forward
        plain = kind.backward is Strategy.backward and not self._scaling
        self._compute_gradients = None if plain else self._backward
        # The optimizer that runs the passes itself; the others step with the gradients of its last pass.
        self._closure_optimizer = next((i for i, each in enumerate(state.optimizers) if needs_closure(each)), None)
        self._begin_turn, self._pass_optimizers = getattr(self.model, "begin_turn", None), state.optimizers
        prepare_fused_sgd(state.optimizers)
        if self._closure_optimizer is not None and self._scaling and not isinstance(state.scaler, ClosureGradScaler):
            state.scaler = ClosureGradScaler(state.device.torch_type)
        if state.auto_microbatching:
            self._search.check()
        self.driver.choose_autocast()

    def train(self, num_samples: float) -> dict[str, torch.Tensor]:
        """Train on `state.batch`: forward, backward and one step of every optimizer.

        Args:
            num_samples: Samples in the batch.

        Returns:
            The detached losses by key (`loss/train/total`, ...), on the device.
        """
        state = self.state
        batch = self._batch = state.batch
        if self._dispatch.after_dataloader or self._dispatch.batch_start:  # rows may have been dropped or added
            num_samples = self._spec.get_num_samples_in_batch(batch)
        self._num_samples, self._mean_count = num_samples, None
        self.losses = {}
        scaler = state.scaler if self._scaling else None
        others: list[torch.optim.Optimizer] = self._optimizers
        closure = self._searching_closure if state.auto_microbatching else self._closure
        if self._begin_turn is not None:
            self.losses = self._step_alternately(closure, scaler)
            others = []
        elif self._closure_optimizer is None:
            closure()
        else:
            others = [*self._optimizers]
            optimizer = others.pop(self._closure_optimizer)
            if isinstance(scaler, ClosureGradScaler):
                scaler.step(optimizer, closure=closure, others=others)
            else:
                optimizer.step(closure=closure)  # type: ignore[arg-type]
        self._step(others, scaler)
        if scaler is not None:
            scaler.update()
        if self.driver.compiled is not None:  # a CUDA graph overwrites its outputs in the next step
            self.losses = {key: loss.clone() for key, loss in self.losses.items()}
        return self.losses

    def _step(self, optimizers: Iterable[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None) -> None:
        for optimizer in optimizers:
            if scaler is not None:
                step_scaled(scaler, optimizer)
            elif self._step_optimizer is not None:
                self._step_optimizer(optimizer)
            else:
                optimizer.step()

    def _step_alternately(
        self, closure: Callable[[], Any], scaler: torch.amp.GradScaler | None
    ) -> dict[str, torch.Tensor]:
        """Step each optimizer after forward and backward passes of its own; return the losses summed over turns."""
        assert self._begin_turn is not None, "`train` has checked it"
        losses: dict[str, torch.Tensor] = {}
        for turn, optimizer in enumerate(self._optimizers):
            self._begin_turn(turn)
            self._pass_optimizers, self.losses = (optimizer,), {}
            closure()
            self._step(self._pass_optimizers, scaler)
            for key, loss in self.losses.items():
                add_loss(losses, key, loss)
        self._pass_optimizers = self._optimizers
        return losses

    def _searching_closure(self, ddp_sync: bool = True, loss_dict: dict[str, torch.Tensor] | None = None) -> Any:
        """Run `_closure` with the largest microbatches that fit the memory of all ranks."""
        if self.strategy.world_size == 1:
            return self._search.run(lambda: self._closure(ddp_sync, loss_dict), self._num_samples)
        if self._mean_count is None:  # the first pass of this batch; later passes and attempts do not communicate
            self._average([self._terms.count(microbatch) for microbatch in self._split()])
            self.strategy.prepare_local_passes()
        self._search.run(lambda: self._closure(False, loss_dict, finish=False), self._num_samples)
        if ddp_sync:
            self.strategy.average_gradients()
        return self._finish()

    def _split(self) -> Sequence[Any]:
        size = self.state.device_train_microbatch_size
        if size is None or self._num_samples <= size or size == self._whole_size:
            return (self._batch,)
        parts = self._spec.split_batch(self._batch, size)
        parts = parts if isinstance(parts, list) else list(parts)  # a function of the user may be a generator
        if not parts:
            raise ValueError("`split_batch` must return at least one microbatch, got none.")
        return parts

    def _closure(
        self, ddp_sync: bool = True, loss_dict: dict[str, torch.Tensor] | None = None, finish: bool = True
    ) -> torch.Tensor:
        """Compute the gradients of the whole batch: forward and backward for all microbatches.

        Args:
            ddp_sync: Synchronize gradients between ranks.
            loss_dict: Receives the losses of an additional pass, which is neither logged nor counted by the metrics.
            finish: Process the gradients for the optimizer.

        Returns:
            The total loss, detached, on the device.
        """
        state = self.state
        whole = state.device_train_microbatch_size is None
        microbatches = self._microbatches = (self._batch,) if whole else self._split()
        self._pass_metrics = self.metrics if loss_dict is None and state._train_metrics else None
        if self._pass_metrics is not None:
            self._pass_metrics.begin()
        self.driver.begin_passes(self.losses if loss_dict is None else loss_dict)
        for optimizer in self._optimizers:
            zero_grad(optimizer)
        if len(microbatches) == 1 and not (self._is_distributed or self.count_tokens):
            self._train_microbatch(microbatches[0], 1.0)
        else:
            counts = [self._terms.count(microbatch) for microbatch in microbatches]
            total = self._average(counts)
            for i, (microbatch, count) in enumerate(zip(microbatches, counts, strict=True), start=1):
                weight = 1.0 if self._terms.is_sum else share_of(count, total)
                context = self.strategy.backward_context(i == len(counts), ddp_sync) if self._is_distributed else None
                if context is None:
                    self._train_microbatch(microbatch, weight)
                else:
                    with context:
                        self._train_microbatch(microbatch, weight)
            if ddp_sync and self._average_after:
                self.strategy.average_gradients()
        state.batch = self._batch
        return self._finish() if finish else self.driver.losses["loss/train/total"]

    def _finish(self) -> torch.Tensor:
        """Process the gradients before the optimizer steps; return the total loss."""
        state = self.state
        if self._begin_turn is not None:  # the loss of a turn has gradients for the other networks, too
            for optimizer in self._optimizers:
                if optimizer is not self._pass_optimizers[0]:
                    zero_grad(optimizer)
        if self._scaling and state.scaler is not None:
            unscale(state.scaler, self._pass_optimizers)
        self.driver.end_passes()
        return self.driver.losses["loss/train/total"]

    def _train_microbatch(self, microbatch: Any, weight: Count) -> None:
        """Run forward and backward for a microbatch, which is the fraction `weight` of its batch."""
        state, metrics = self.state, self._pass_metrics
        batch = self._to_device(microbatch)
        if self._spec.microbatch_transforms is not unchanged:
            batch = self._spec.microbatch_transforms(batch)
        original = batch
        if metrics is not None and isinstance(batch, (dict, list)):
            original = batch.copy()  # algorithms replace entries of the batch; the copy still has the old ones
        forward = state.model if self._forward is None else partial(self._forward, state.model)
        loss = self.driver.compute_loss(batch, self.model, forward)
        self.driver.backward(loss, weight, self._compute_gradients)
        if metrics is not None:
            metrics.collect(original, state.outputs, len(self._microbatches) == 1)

    def _backward(self, total: torch.Tensor) -> None:
        scaler = self.state.scaler
        self.strategy.backward(total if scaler is None else scaler.scale(total), self.driver.create_graph)

    def _average(self, counts: Sequence[Count]) -> Count:
        """Return the terms of the loss that weigh microbatches, averaged over ranks; exchanged once per batch.

        Raises:
            ValueError: No rank has samples.
        """
        if self._mean_count is None:
            mean = self._mean_count = self.strategy.mean_count(sum(counts), len(counts))
            if isinstance(mean, torch.Tensor) or mean != 0:
                return mean
            if not any(samples for (samples,) in self.strategy.all_gather((self._num_samples,))):
                raise ValueError("The batch has no samples on any rank. Leave such batches out.")
            if not self._warned_of_empty:
                self._warned_of_empty = True
                _log.warning(
                    "Batch %d has no labels that the loss counts, or no loss-generating tokens according to "
                    "`get_num_tokens_in_batch`. Such batches have zero gradients and a logged loss of 0. This warning "
                    "is shown once.",
                    self.state.timestamp.batch.value,
                )
        return self._mean_count


def _step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer; to be compiled."""
    optimizer.step()
