"""Evaluation: of the evaluators that are due during `fit`, and of `Trainer.eval`."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from composer.core import DataSpec, Engine, Evaluator, Event, State, Timestamp
from composer.loggers import Logger
from composer.models import ComposerModel
from composer.trainer._clock import StepTimer
from composer.trainer._context import OptimizerModes, active_dataloader, set_epoch
from composer.trainer._first_access import FirstAccesses
from composer.trainer._lockstep import evaluating_together
from composer.trainer._microbatch import adjust_device_eval_microbatch_size, is_cuda_oom
from composer.trainer._padding import PaddedTail
from composer.trainer._parallel import SingleProcess
from composer.trainer._turns import Turns
from composer.utils import dist, model_eval_mode

__all__ = ["Evaluation"]


class Evaluation:
    """Runs evaluators.

    Args:
        state: The run's state.
        engine: Announces the events.
        logger: Takes the metrics.
        model: The user's model, unwrapped.
        parallel: What other processes do.

    Attributes:
        accesses: When the loaders of the run were first iterated.
        modes: Those of the optimizers.
    """

    def __init__(
        self, state: State, engine: Engine, logger: Logger, model: ComposerModel, parallel: SingleProcess
    ) -> None:
        self.state, self.engine, self.logger, self.model, self.parallel = state, engine, logger, model, parallel
        self._turns = Turns(self._outputs_of, state, parallel, fp8=False)
        self.accesses, self.modes = FirstAccesses(), OptimizerModes(state)

    def run_due(self, event: Event) -> bool:
        """Run the evaluators whose interval says so.

        Args:
            event: BATCH_END, EPOCH_END or FIT_END.

        Returns:
            Whether any ran.
        """
        evaluators = self.state.evaluators
        if not evaluators:
            return False
        due = [e for e in evaluators if e.eval_interval is not None and e.eval_interval(self.state, event)]
        if not due:
            return False
        with torch.no_grad(), model_eval_mode(self.state.model), self.modes.evaluating():
            self.engine.run_event(Event.EVAL_BEFORE_ALL)
            self.run(due)
            self.engine.run_event(Event.EVAL_AFTER_ALL)
        return True

    def run_standalone(self, extra: Sequence[Evaluator], subset: int) -> None:
        """Evaluate outside of `fit`.

        Args:
            extra: What to evaluate, for this time; empty: what the run evaluates.
            subset: Batches to use of each; -1: what the evaluator says.

        Raises:
            ValueError: There is nothing to evaluate.
        """
        state = self.state
        own = list(state.evaluators)
        if not extra and not own:
            raise ValueError("There is nothing to evaluate. Pass `eval_dataloader` to the `Trainer` or to `eval`.")
        labels = {evaluator.label for evaluator in own}
        for evaluator in extra:
            if evaluator.label in labels:
                warnings.warn(
                    f"The label {evaluator.label!r} is used already; its earlier results are replaced. Pass an "
                    f"`Evaluator` with a label of its own.",
                    stacklevel=3,
                )
        state.evaluators = [*own, *extra]
        try:
            with self.parallel.watched():
                self.engine.run_event(Event.EVAL_STANDALONE_START)
                self.run(extra or own, None if subset == -1 else subset)
                self.engine.run_event(Event.EVAL_STANDALONE_END)
        finally:
            state.evaluators = own

    def run(self, evaluators: Sequence[Evaluator], subset_num_batches: int | None = None) -> None:
        """Run evaluators one after the other, in eval mode and without gradients.

        Args:
            evaluators: What to evaluate.
            subset_num_batches: Batches to use of each; None: what the evaluator says.
        """
        with torch.no_grad(), model_eval_mode(self.state.model), self.modes.evaluating():
            for evaluator in evaluators:
                own = -1 if evaluator.subset_num_batches is None else evaluator.subset_num_batches
                self._evaluate(evaluator, own if subset_num_batches is None else subset_num_batches)

    def _evaluate(self, evaluator: Evaluator, subset: int) -> None:
        state, run_event, spec = self.state, self.engine.run_event, evaluator.dataloader
        with active_dataloader(state, spec.dataloader, evaluator.label, subset):
            state.eval_timestamp = Timestamp()
            run_event(Event.EVAL_START)
            # Every rank evaluates the model that is saved; only now, as algorithms may just have swapped weights in.
            self.parallel.equalize_buffers(self.model)
            metrics = state.eval_metrics[evaluator.label]
            for name, metric in metrics.items():
                metrics[name] = state.device.module_to_device(metric)
                metrics[name].reset()
            set_epoch(spec.dataloader, state.timestamp._batch)
            timer, tail = StepTimer(), PaddedTail(spec.dataloader)
            searches = evaluator.auto_microbatching
            with evaluating_together(evaluator, state, self.parallel) if searches else self._turns:
                self.accesses.note(evaluator.label, spec.dataloader, state.timestamp._batch)
                for batch in self._batches(spec):
                    self._eval_batch(evaluator, batch, metrics, timer, tail)
            if not state.eval_timestamp._batch and not tail.found:
                warnings.warn(
                    f"No batches were evaluated for global rank {dist.get_global_rank()}: the loader of the evaluator "
                    f"{evaluator.label!r} yielded nothing.",
                    stacklevel=2,
                )
            self._log(evaluator.label, metrics)
            run_event(Event.EVAL_END)

    def _batches(self, spec: DataSpec) -> Any:
        length = self.state.dataloader_len
        return itertools.islice(iter(spec.dataloader), None if length is None else length.value)

    def _eval_batch(
        self, evaluator: Evaluator, batch: Any, metrics: dict[str, Any], timer: StepTimer, tail: PaddedTail
    ) -> None:
        state, run_event, spec = self.state, self.engine.run_event, evaluator.dataloader
        batch = spec.batch_transforms(batch)
        samples = spec.get_num_samples_in_batch(batch)
        if tail.ends(samples):
            samples -= 1
            if not samples:
                if self.parallel.collective_forward:
                    self._turns.keep(spec.microbatch_transforms(state.device.batch_to_device(batch)))
                return
            batch = spec.split_batch(batch, samples)[0]
        tokens = spec.get_num_tokens_in_batch(batch)
        state.batch = batch
        run_event(Event.EVAL_BATCH_START)
        batch = state.batch
        size: float | None = evaluator.device_eval_microbatch_size
        waiting = [batch] if size is None or samples <= size else list(spec.split_batch(batch, size))
        while waiting:
            microbatch = waiting.pop(0)
            try:
                self._forward(spec, microbatch)
            except RuntimeError as error:
                if not (evaluator.auto_microbatching and is_cuda_oom(error)):
                    raise
                state.outputs = None
                # What was split before the last halving is only split again.
                if spec.get_num_samples_in_batch(microbatch) <= (evaluator.device_eval_microbatch_size or 1):
                    adjust_device_eval_microbatch_size(evaluator)
                waiting[:0] = spec.split_batch(microbatch, evaluator.device_eval_microbatch_size or 1)
                continue
            for metric in metrics.values():
                outputs = self.model.update_metric(state.batch, state.outputs, metric)
                state.metric_outputs = dict(outputs) if isinstance(outputs, dict) else {}
        state.batch = batch
        if evaluator.auto_microbatching:
            key = f"trainer/{evaluator.label}/device_eval_microbatch_size"
            self.logger.log_metrics({key: evaluator.device_eval_microbatch_size})
        state.eval_timestamp = state.eval_timestamp.to_next_batch(samples, tokens, timer.lap())
        run_event(Event.EVAL_BATCH_END)

    def _forward(self, spec: DataSpec, microbatch: Any) -> None:
        state, run_event = self.state, self.engine.run_event
        state.batch = spec.microbatch_transforms(state.device.batch_to_device(microbatch))
        run_event(Event.EVAL_BEFORE_FORWARD)
        state.outputs = self._turns.of(state.batch)
        run_event(Event.EVAL_AFTER_FORWARD)

    def _outputs_of(self, batch: Any) -> Any:
        return self.model.eval_forward(batch)

    def _log(self, label: str, metrics: dict[str, Any]) -> None:
        values = {name: metric.compute() for name, metric in metrics.items()}
        self.state.eval_metric_values.update(values)
        self.logger.log_metrics({f"metrics/{label}/{name}": value for name, value in values.items()})
