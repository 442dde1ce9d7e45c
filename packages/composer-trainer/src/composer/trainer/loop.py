"""The training loop: iterations, epochs and batches, with their events in order."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from composer.core import DataSpec, Event, State, TimeUnit
from composer.core.data_spec import report_empty_epoch, unchanged, warn_of_longer_epoch
from composer.loggers import DeferredValue, Logger
from composer.loop.driver import Driver
from composer.loop.failed_step import describe_failed_step
from composer.loop.position import LoaderPosition, set_epoch
from composer.trainer.evaluation import Evaluation
from composer.trainer.history import RunHistory
from composer.trainer.signals import Interruption
from composer.trainer.step import BatchTrainer
from composer.trainer.strategy import Strategy
from composer.utils import dist
from composer.utils.interval_scheduler import check_has_tokens


class _LossMonitor:
    """Warns once if the losses stay NaN or infinite, without waiting for the device in a step.

    The last losses are checked at the end of epochs, at evaluations and, since these may come late, after 16, 32,
    64, ... batches. The result is copied to the host in the background.

    Args:
        recent: The last losses of this `fit`, as in `RunHistory`.
    """

    def __init__(self, recent: Sequence[tuple[int, Mapping[str, torch.Tensor]]]) -> None:
        self._recent = recent
        self._result: tuple[int, int, DeferredValue] | None = None  # minimum number to warn about, last batch, number
        self._warned = False

    def check(self, at_end: bool = False) -> None:
        """Check the last losses.

        During the run, all of the last losses must be bad, since a bad batch may be skipped; at its end, where waiting
        for the result costs nothing, the last two.
        """
        self._warn(at_end)
        # An optimizer that never called its closure leaves no loss.
        last = [losses["loss/train/total"] for _, losses in self._recent[-8:] if losses]
        if last and self._result is None and not self._warned:
            bad = torch.stack([~loss.isfinite() for loss in reversed(last)])
            result = DeferredValue.of_tensor(bad.cumprod(0).sum())  # how many of the last in a row
            DeferredValue.fetch([result])
            self._result = (min(2 if at_end else 8, len(last)), self._recent[-1][0], result)
        self._warn(at_end)

    def _warn(self, wait: bool) -> None:
        if self._result is None or not (wait or self._result[2].ready):
            return
        (least, batch, result), self._result = self._result, None
        number = int(result.value)
        if number < least or self._warned or dist.get_global_rank() != 0:
            return
        self._warned = True
        warnings.warn(
            f"The training loss was NaN or infinite in all of the last {number} batches, up to batch {batch}, counted "
            f"from 0: the model is not learning. Lower the learning rate or warm it up, clip gradients "
            f"with `GradientClipping`, use `precision='amp_bf16'` instead of 'amp_fp16', or look for bad data. The "
            f"callback `NaNMonitor` ends a run at the first such batch.",
            stacklevel=2,
        )


class FitLoop:
    """Runs `fit`.

    Args:
        state: The run's state, with everything in place.
        driver: Announces the events.
        logger: Receives times, losses and metrics.
        data_spec: The training data.
        batches: Trains one batch.
        position: Iterates the training loader.
        evaluation: Runs the evaluators that are due.
        strategy: Runs the steps of all ranks.
        step_every_batch: Step schedulers after every batch, otherwise after every epoch.
        interruption: Receives SIGTERM and SIGINT.
        length: The `max_duration` that the checkpoint of this fit has saved, which replaces the current one. None: keep
            the current one.
        history: Receives the losses, for `Trainer.plot`.
    """

    def __init__(
        self,
        state: State,
        driver: Driver,
        logger: Logger,
        data_spec: DataSpec,
        batches: BatchTrainer,
        position: LoaderPosition,
        evaluation: Evaluation,
        strategy: Strategy,
        step_every_batch: bool,
        interruption: Interruption,
        length: str | None,
        history: RunHistory,
    ) -> None:
        self.state, self.driver, self.logger = state, driver, logger
        self.data_spec, self.batches, self.position = data_spec, batches, position
        self.metrics = batches.metrics
        self.evaluation, self.strategy = evaluation, strategy
        self.step_every_batch, self.interruption = step_every_batch, interruption
        self._schedulers, self._evaluators = state.schedulers, state.evaluators  # lists that stay the same objects
        self._is_distributed = strategy.is_distributed
        self._lap_start = time.perf_counter()
        self._limit, self._length = state.max_duration, length  # the limit is the same on all ranks
        self._stopped_elsewhere = False  # another rank has to stop training
        history.drop_recent(keep=0)  # the recent losses are from an earlier `fit`
        self._history, self._recent, self._losses = history, history.recent, _LossMonitor(history.recent)
        self._num_losses = 0  # losses in this `fit` until the last `_check_recent_losses`
        self._first_batch = state.timestamp.batches  # where this call of `fit` begins
        self._is_first = True  # until the first step

    def run(self) -> None:
        """Train until `state.max_duration`."""
        state = self.state
        with self.interruption, self.strategy.report_lost_ranks():
            for algorithm in state.algorithms:
                self.logger.log_hyperparameters({f"enabled_algorithms/{type(algorithm).__name__}": True})
            self.driver.begin_fit()
            resumed = self.position.begin()
            if self._length is not None:  # after FIT_START, where algorithms may scale the length
                state.max_duration = self._length
                self._limit = state.max_duration
            if resumed:  # the checkpoint may be from just before the end of an iteration
                self.driver.end_iteration(TimeUnit.TOKEN if state.timestamp.batches_in_epoch else TimeUnit.EPOCH)
            self.batches.prepare(self.data_spec)
            state.model.train()
            self.evaluation.modes.train()  # after algorithms have removed their averages from the model
            try:
                if resumed and state.is_over():
                    self._finish_last_epoch()
                while not self._is_over():
                    self._epoch()
            finally:
                self.position.finish()
                self.evaluation.modes.eval()  # before algorithms load their averages into the model
            now = state.timestamp
            self.logger.log_metrics(
                {
                    "time/epoch": now.epochs,
                    "time/batch": now.batches,
                    "time/sample": now.samples,
                    "time/batch_in_epoch": now.batches_in_epoch,
                    "time/sample_in_epoch": now.samples_in_epoch,
                }
            )
            if now.tokens > 0:
                self.logger.log_metrics({"time/token": now.tokens})
                self.logger.log_metrics({"time/token_in_epoch": now.tokens_in_epoch})
            self._losses.check(at_end=True)
            self.driver.end_fit()
            self.evaluation.run_due(Event.FIT_END)
            self.metrics.finish()
            if self.interruption.signal is not None:  # it came after the last batch, as in a long evaluation
                self.interruption.leave(state)

    def _finish_last_epoch(self) -> None:
        """Finish the run of a process that was killed after its last checkpoint, before `fit` returned."""
        at = self.state.timestamp.batches_in_epoch
        # Due evaluations ran before the checkpoint was written; calling the intervals marks them as done.
        for evaluator in self.state.evaluators:
            if evaluator.eval_interval is not None:
                evaluator.eval_interval(self.state, Event.BATCH_END if at else Event.EPOCH_END)
        if at:
            self.position.resume()
            if self.position.ends_at == at:
                self._end_epoch()

    def _epoch(self) -> None:
        state = self.state
        self.driver.begin_epoch()
        start = state.timestamp
        if start.batches_in_epoch == 0:
            self.logger.log_metrics({"time/epoch": start.epochs})
        set_epoch(state.dataloader, start.epochs)
        stopped, expected = False, -1
        if start.batches == self._first_batch and not start.batches_in_epoch and state.dataloader_limit is None:
            expected = -1 if state.dataloader_len is None else state.dataloader_len.value  # only an estimate
        for batch in self._batches():
            if state.timestamp.batches_in_epoch == expected:
                warn_of_longer_epoch(state.dataloader, expected)
            self._batch(batch)
            over = self._is_over() if self._is_distributed else state.is_over()
            if over or (state._iteration_length is not None and self.driver.end_iteration(TimeUnit.TOKEN)):
                stopped = True
                self.position.pause()
                break
        if state.timestamp.batches == start.batches and start.batches_in_epoch == 0 and not self._stopped_elsewhere:
            report_empty_epoch(start.epochs, state.timestamp.batches - self._first_batch)
        if not (stopped or self._stopped_elsewhere) or self.position.ends_at == state.timestamp.batches_in_epoch:
            self._end_epoch()

    def _batches(self) -> Iterator[Any]:
        """Iterate over the remaining batches of the epoch, with the events before and after each is loaded."""
        iterator = self.position.resume()
        if self.state.timestamp.batches == self._first_batch:
            self._lap_start = time.perf_counter()  # advancing a loader is not training time
        while True:
            if self._is_distributed:
                self.strategy.begin_batch()
            self.driver.before_dataloader()
            if iterator is None:
                iterator = self.position.start()
            batch = next(iterator, _END)
            finished = batch is _END
            if self._is_distributed:
                finished, self._stopped_elsewhere = self.strategy.any_finished(finished)
            if self._stopped_elsewhere:
                self._stop()
                # The batch was drawn before the other rank stopped; the next `fit` trains it.
                self.position.put_back(() if batch is _END else (batch,))
            if finished or self._stopped_elsewhere:
                self.driver.engine.run_marker_only_event(Event.AFTER_DATALOADER)
                return
            yield batch

    def _is_over(self) -> bool:
        """Return True if the run is over on every rank."""
        state = self.state
        if not state.is_over():
            self._limit = state.max_duration  # it is extended on every rank
            return False
        if self.strategy.world_size > 1 and not state.is_over(self._limit):
            # Perhaps only this rank has to stop; the others begin a batch, and learn it in their `any_finished`.
            self.strategy.begin_batch()
            self.strategy.any_finished(False, stopped=True)
            self._stop()
        return True

    def _stop(self) -> None:
        self.state.stop_training()
        self._limit = self.state.max_duration

    def _batch(self, batch: Any) -> None:
        state, spec, driver = self.state, self.data_spec, self.driver
        if spec.batch_transforms is not unchanged:
            batch = spec.batch_transforms(batch)
        samples, tokens = spec.count_batch(batch)
        driver.after_dataloader(batch)
        losses = self._first_step(batch, samples) if self._is_first else self.batches.train(samples)
        self._publish(losses, samples, tokens)
        if self.step_every_batch and self._schedulers:
            driver.step_schedulers()
        now = time.perf_counter()
        lap, self._lap_start, ends = now - self._lap_start, now, self.interruption.signal is not None
        if self._is_distributed:
            samples, tokens, ends, lap = self.strategy.sum_counts(samples, tokens, ends, lap)
        driver.count_batch(samples, tokens, lap)
        if not tokens:
            limit = state.max_duration
            if limit is not None and limit.unit is TimeUnit.TOKEN:
                check_has_tokens(state, f"`max_duration` {str(limit)!r}")
        if ends:
            self.interruption.prepare()
        driver.end_batch(self._evaluate if self._evaluators else None)
        if ends:
            self.metrics.finish()
            self.interruption.leave(state)

    def _first_step(self, batch: Any, samples: float) -> dict[str, torch.Tensor]:
        """Train the first batch of a `fit`; an error also says what the step saw."""
        self._is_first = False
        try:
            if self.data_spec.microbatch_transforms is unchanged:
                self.driver.find_batch_keys()
            return self.batches.train(samples)
        except Exception as error:
            describe_failed_step(error, self.state, batch)
            raise

    def _publish(self, losses: dict[str, torch.Tensor], samples: float, tokens: int) -> None:
        """Store the losses and metrics of a batch in the state and log them, with its time, in one call."""
        state, logged = self.state, bool(self.logger.destinations)
        if self._is_distributed:
            losses = self.strategy.mean_losses(losses)
        if len(self._recent) == 16:
            self._check_recent_losses()
        self._recent.append((state.timestamp.batches, losses))
        state.total_loss_dict = losses.copy()  # a user may change it
        metrics = self.metrics if state._train_metrics else None
        if metrics is not None:
            state.train_metric_values = metrics.values().copy()  # reading a value there replaces it with a number
        if not logged:
            return
        now, size = state.timestamp, state.device_train_microbatch_size
        values: dict[str, Any] = {
            "time/batch": now.batches,
            "time/sample": now.samples,
            "time/batch_in_epoch": now.batches_in_epoch,
            "time/sample_in_epoch": now.samples_in_epoch,
            "trainer/device_train_microbatch_size": samples if size is None else size,
        }
        if tokens:
            values["time/token"], values["time/token_in_epoch"] = now.tokens, now.tokens_in_epoch
        for key, loss in losses.items():
            values[key] = DeferredValue.of_tensor(loss)
        if metrics is not None:
            values |= metrics.logged()
        self.logger.log_metrics(values)

    def _check_recent_losses(self) -> None:
        """Do what would take too long in each step, once there are 16 recent losses."""
        self._num_losses = max(self._num_losses + 8, 16)
        if self._num_losses & (self._num_losses - 1) == 0:
            self._losses.check()
        self._history.drop_recent(keep=8)

    def _evaluate(self, event: Event) -> None:
        if self.evaluation.run_due(event):
            self._losses.check()
            self._lap_start = time.perf_counter()  # evaluation is not training time

    def _end_epoch(self) -> None:
        state = self.state
        if self.metrics.enabled:
            state.train_metric_values = self.metrics.values().copy()
            self.logger.log_metrics(self.metrics.logged())
        if not self.step_every_batch:
            self.driver.step_schedulers()
        self.position.finish(epoch_ended=True)
        self.driver.end_epoch(self._evaluate_after_epoch)

    def _evaluate_after_epoch(self, event: Event) -> None:
        self._losses.check()
        self._evaluate(event)


_END = object()
