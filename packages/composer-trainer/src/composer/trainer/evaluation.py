"""Evaluation, in `fit` and in `Trainer.eval`, and prediction."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

from composer.core import DataSpec, Engine, Evaluator, Event, State, Timestamp
from composer.core.display import number
from composer.core.precision import precision_context_of
from composer.devices import DeviceCPU
from composer.loggers import Logger
from composer.loop.driver import Driver, active_dataloader
from composer.loop.generators import keep_global_states
from composer.loop.position import set_epoch
from composer.models import ComposerModel
from composer.trainer.history import RunHistory
from composer.trainer.metrics import move_metrics
from composer.trainer.microbatch import adjust_device_eval_microbatch_size, eval_search, is_cuda_oom
from composer.trainer.optimizers import OptimizerModes
from composer.trainer.strategy import Strategy
from composer.utils import dist, model_eval_mode
from composer.utils.html import heat_map, table


class Evaluation:
    """Runs evaluators.

    Args:
        state: The run's state.
        driver: Announces the events.
        logger: Receives the metrics.
        model: The user's model, unwrapped.
        strategy: Runs the steps of all ranks.
        history: Receives the metrics, for `Trainer.plot`.

    Attributes:
        modes: Switches the modes of schedule-free optimizers.
    """

    def __init__(
        self,
        state: State,
        driver: Driver,
        logger: Logger,
        model: ComposerModel,
        strategy: Strategy,
        history: RunHistory,
    ) -> None:
        self._history = history
        self.state, self.driver, self.logger, self.model, self.strategy = state, driver, logger, model, strategy
        self._forward_pass = ForwardPass(self._outputs_of, state, strategy, fp8=False)
        self.modes = OptimizerModes(state)
        # The batch at which each evaluator last ran in `fit`, by label: in this process, and in the one that saved.
        self.evaluated_at: dict[str, int] = {}
        self.restored_at: dict[str, int] = {}

    def run_due(self, event: Event) -> bool:
        """Run the evaluators that are due.

        Args:
            event: BATCH_END, EPOCH_END or FIT_END.

        Returns:
            True if any evaluator ran.
        """
        evaluators = self.state.evaluators
        due = [e for e in evaluators if e.eval_interval is not None and e.eval_interval(self.state, event)]
        batch = self.state.timestamp.batches
        if event is Event.FIT_END:  # the intervals do not know what ran before this process was launched
            due = [e for e in due if self.restored_at.get(e.label) != batch]
        if not due:
            return False
        with torch.no_grad(), model_eval_mode(self.state.model), self.modes.evaluating():
            self.driver.begin_evaluations(is_standalone=False)
            self.run(due)
            self.driver.end_evaluations(is_standalone=False)
        self.evaluated_at.update((evaluator.label, batch) for evaluator in due)
        return True

    def run_standalone(self, extra: Sequence[Evaluator], subset: int) -> Results:
        """Evaluate outside `fit`.

        Args:
            extra: Evaluators for this call only; empty: those of the run.
            subset: The number of batches of each evaluator; -1: its own setting.

        Returns:
            The computed metrics of each evaluator.

        Raises:
            ValueError: There are no evaluators.
        """
        state = self.state
        own = list(state.evaluators)
        if not extra and not own:
            raise ValueError("There is nothing to evaluate. Pass `eval_dataloader` to the `Trainer` or to `eval`.")
        labels = {evaluator.label for evaluator in own}
        for evaluator in extra:
            if evaluator.label in labels:
                warnings.warn(
                    f"The label {evaluator.label!r} is already used; its earlier results are replaced. Pass an "
                    f"`Evaluator` with another label.",
                    stacklevel=3,
                )
        state.evaluators = [*own, *extra]
        try:
            with self.strategy.report_lost_ranks():
                self.driver.begin_evaluations(is_standalone=True)
                results = self.run(extra or own, subset)
                self.driver.end_evaluations(is_standalone=True)
            return results
        finally:
            state.evaluators = own

    def run(self, evaluators: Sequence[Evaluator], subset_num_batches: int = -1) -> Results:
        """Run evaluators one after the other, in eval mode and without gradients.

        Args:
            evaluators: The evaluators.
            subset_num_batches: The number of batches of each; -1: its own setting.

        Returns:
            The computed metrics of each evaluator.
        """
        results = Results()
        # Iterators of loaders draw their seed from the global generator, so more evaluations would change the training.
        with keep_global_states(), torch.no_grad(), model_eval_mode(self.state.model), self.modes.evaluating():
            for evaluator in evaluators:
                subset = evaluator.subset_num_batches if subset_num_batches == -1 else subset_num_batches
                results[evaluator.label] = self._evaluate(evaluator, -1 if subset is None else subset)
        return results

    def _evaluate(self, evaluator: Evaluator, subset: int) -> dict[str, Any]:
        state, spec = self.state, evaluator.dataloader
        with active_dataloader(state, spec.dataloader, evaluator.label, subset):
            self.driver.begin_evaluation()
            # Every rank evaluates the buffers that are saved. Not earlier: EVAL_START may have swapped weights.
            self.strategy.broadcast_buffers(self.model)
            metrics = state.eval_metrics[evaluator.label]
            move_metrics(metrics, state.device)
            for metric in metrics.values():
                metric.reset()
            set_epoch(spec.dataloader, state.timestamp.batches)
            tail, self._lap_start = PaddingDetector(spec.dataloader), time.perf_counter()
            searches = evaluator.auto_microbatching
            with eval_search(evaluator, state, self.strategy) if searches else self._forward_pass:
                for batch in itertools.islice(spec.dataloader, state.dataloader_limit):
                    self._eval_batch(evaluator, batch, metrics, tail)
            if not state.eval_timestamp.batches and not tail.found:
                warnings.warn(
                    f"No batches were evaluated for global rank {dist.get_global_rank()}: the loader of the evaluator "
                    f"{evaluator.label!r} yielded nothing.",
                    stacklevel=2,
                )
            values = {name: metric.compute() for name, metric in metrics.items()}
            state.eval_metric_values.update(values)
            named = {f"metrics/{evaluator.label}/{name}": value for name, value in values.items()}
            self.logger.log_metrics(named)
            self._history.add_metrics(state.timestamp.batches, named)
            self.driver.end_evaluation()
        return values

    def _eval_batch(self, evaluator: Evaluator, batch: Any, metrics: dict[str, Any], tail: PaddingDetector) -> None:
        state, spec = self.state, evaluator.dataloader
        batch = spec.batch_transforms(batch)
        samples, tokens = spec.count_batch(batch)
        if tail.ends_batch(samples):
            samples -= 1
            if not samples:
                if self.strategy.collective_forward:
                    self._forward_pass.set_filler(spec.microbatch_transforms(state.device.batch_to_device(batch)))
                return
            batch = spec.split_batch(batch, samples)[0]
            tokens = spec.get_num_tokens_in_batch(batch)
        batch = self.driver.begin_eval_batch(batch)
        size: float | None = evaluator.device_eval_microbatch_size
        pending = [batch] if size is None or samples <= size else list(spec.split_batch(batch, size))
        while pending:
            microbatch = pending.pop(0)
            try:
                microbatch_on_device = spec.microbatch_transforms(state.device.batch_to_device(microbatch))
                self.driver.eval_forward(microbatch_on_device, self._forward_pass)
            except RuntimeError as error:
                if not (evaluator.auto_microbatching and is_cuda_oom(error)):
                    raise
                state.outputs = None
                # A microbatch from before the last halving only has to be split again.
                if spec.get_num_samples_in_batch(microbatch) <= (evaluator.device_eval_microbatch_size or 1):
                    adjust_device_eval_microbatch_size(evaluator)
                pending[:0] = spec.split_batch(microbatch, evaluator.device_eval_microbatch_size or 1)
                continue
            for metric in metrics.values():
                outputs = self.model.update_metric(state.batch, state.outputs, metric)
                state.metric_outputs = dict(outputs) if isinstance(outputs, dict) else {}
        state.batch = batch
        if evaluator.auto_microbatching:
            key = f"trainer/{evaluator.label}/device_eval_microbatch_size"
            self.logger.log_metrics({key: evaluator.device_eval_microbatch_size})
        now = time.perf_counter()
        lap, self._lap_start = now - self._lap_start, now
        self.driver.end_eval_batch(samples, tokens, lap)

    def _outputs_of(self, batch: Any) -> Any:
        return self.model.eval_forward(batch)  # `model` may be replaced


class Results(dict[str, dict[str, Any]]):
    """The computed metrics of an evaluation: label of the evaluator -> name -> value. A notebook shows a table.

    Example:
        >>> results = Results(eval={"MulticlassAccuracy": torch.tensor(0.75)})
        >>> results["eval"]["MulticlassAccuracy"].item()
        0.75
    """

    def _repr_html_(self) -> str:
        rows: list[tuple[str, str, str]] = []
        heat_maps = ""
        for label, values in self.items():
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.ndim == 2 and max(value.shape) <= _HEAT_MAP:
                    heat_maps += heat_map(f"{label} {name}", value.tolist())
                else:
                    rows.append((label, name, number(value)))
        return table("Evaluation", rows, ("evaluator", "metric", "value")) + heat_maps


def predict(
    state: State,
    engine: Engine,
    spec: DataSpec,
    subset_num_batches: int,
    return_outputs: bool,
    strategy: Strategy,
    modes: OptimizerModes,
) -> list[Any]:
    """Run the model over a loader, in eval mode and without gradients.

    Args:
        state: The run's state; its active loader, batch and outputs are restored afterwards.
        engine: Announces the events.
        spec: The data.
        subset_num_batches: The number of batches to use; -1: until the loader ends.
        return_outputs: Return the outputs.
        strategy: Runs the steps of all ranks.
        modes: Switches the modes of schedule-free optimizers.

    Returns:
        The outputs of each batch, on the CPU; an empty list without `return_outputs`.
    """
    strategy.check_loader(spec.dataloader, "dataloader")
    outputs: list[Any] = []
    # DDP broadcasts buffers in every forward pass, and ranks may have different numbers of batches.
    model: Any = state.model.module if state.is_model_ddp else state.model
    cpu, forward = DeviceCPU(), ForwardPass(model, state, strategy)
    with (
        # Ranks with an unsharded model may predict alone.
        strategy.report_lost_ranks() if strategy.collective_forward else nullcontext(),
        keep_global_states(),
        torch.no_grad(),
        model_eval_mode(state.model),
        modes.evaluating(),
        active_dataloader(state, spec.dataloader, "predict", subset_num_batches),
    ):
        state.predict_timestamp, lap_start = Timestamp(), time.perf_counter()
        engine.run_event(Event.PREDICT_START)
        with forward:
            for batch in itertools.islice(spec.dataloader, state.dataloader_limit):
                batch = spec.batch_transforms(batch)
                samples, tokens = spec.count_batch(batch)
                state.batch = spec.microbatch_transforms(state.device.batch_to_device(batch))
                engine.run_event(Event.PREDICT_BATCH_START)
                engine.run_event(Event.PREDICT_BEFORE_FORWARD)
                state.outputs = forward(state.batch)
                engine.run_event(Event.PREDICT_AFTER_FORWARD)
                if return_outputs:
                    outputs.append(cpu.batch_to_device(state.outputs))
                now = time.perf_counter()
                state.predict_timestamp = state.predict_timestamp.to_next_batch(samples, tokens, now - lap_start)
                lap_start = now
                engine.run_event(Event.PREDICT_BATCH_END)
        engine.run_event(Event.PREDICT_END)
    return outputs


_HEAT_MAP = 32  # rows and columns that a notebook shows
_NO_BATCH = object()


class ForwardPass:
    """The forward passes of one evaluation or prediction, where ranks may have different numbers of batches.

    A forward pass of a sharded model gathers weights, so all ranks must run it together. A rank without a batch repeats
    its last one and drops the outputs until all ranks are done. Used as a context manager: leaving it waits for them.

    Args:
        forward: Computes the outputs of a batch on the device.
        state: The run's state.
        strategy: Runs the steps of all ranks.
        fp8: Allow FP8.
    """

    def __init__(self, forward: Callable[[Any], Any], state: State, strategy: Strategy, fp8: bool = True) -> None:
        self._forward, self._state, self._strategy, self._fp8 = forward, state, strategy, fp8
        self._filler = _NO_BATCH  # the batch that is repeated when this rank has no other

    def __enter__(self) -> ForwardPass:
        self._strategy.reshard()  # the weights may have changed since
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._strategy.collective_forward:
            while self._any_has_batch(False):
                self._run(self._filler)
            self._filler = _NO_BATCH
        self._strategy.reshard()

    def __call__(self, batch: Any) -> Any:
        """Return the outputs for a batch on the device.

        Raises:
            RuntimeError: Another rank has no batch at all.
        """
        if self._strategy.collective_forward:
            self.set_filler(batch)
            self._any_has_batch(True)
        return self._run(batch)

    def set_filler(self, batch: Any) -> None:
        """Set the batch to repeat when this rank has no other."""
        self._filler = batch

    def _any_has_batch(self, has_batch: bool) -> bool:
        """Return True if any rank still has a batch."""
        ranks = self._strategy.all_gather((has_batch, self._filler is _NO_BATCH))
        result = any(has for has, _ in ranks)
        if result and any(no_filler for _, no_filler in ranks):
            raise RuntimeError(
                "All ranks need at least one batch to run a sharded model together, but the loader of some rank was "
                "empty. Give every rank a part of the data."
            )
        return result

    def _run(self, batch: Any) -> Any:
        with precision_context_of(self._state, self._fp8):
            return self._forward(batch)


class PaddingDetector:
    """Detects the sample that a distributed sampler repeats, so that evaluation counts every sample once.

    `DistributedSampler` appends the first samples of its order until all ranks have the same number: at most one per
    rank, which is the last sample of the last ranks.

    Args:
        dataloader: The loader to evaluate, before its iteration.

    Attributes:
        found: The repeated sample was reached.
    """

    def __init__(self, dataloader: Any) -> None:
        self.found = False
        self._seen: float = 0
        self._last = 0  # the number of samples of this rank if the last one is repeated, otherwise 0
        batch_sampler = getattr(dataloader, "batch_sampler", None)
        samplers = (getattr(dataloader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
        distributed = (each for each in samplers if isinstance(each, DistributedSampler))
        # A subclass with another order may pad differently, so it is left alone.
        plain = (each for each in distributed if type(each).__iter__ is DistributedSampler.__iter__)
        sampler = next(plain, None)
        if sampler is not None and not sampler.drop_last:
            padding = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
            if sampler.rank >= sampler.num_replicas - padding:
                self._last = sampler.num_samples

    def ends_batch(self, samples: float) -> bool:
        """Return True if a batch ends with the repeated sample. Call it for every batch, in order.

        Args:
            samples: The number of samples in the batch.
        """
        self._seen += samples
        self.found = self._last > 0 and self._seen == self._last
        return self.found
