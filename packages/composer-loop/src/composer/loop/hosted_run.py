"""A run inside an existing training loop: your own, or that of another library."""

from __future__ import annotations

import operator
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, SupportsIndex

import torch

from composer.core.algorithm import Algorithm
from composer.core.callback import Callback
from composer.core.data_spec import (
    DataSpec,
    check_ends,
    check_yields_batches,
    report_empty_epoch,
    unchanged,
    warn_of_longer_epoch,
)
from composer.core.deferred_value import DeferredValue
from composer.core.engine import Engine, Plan
from composer.core.event import Event
from composer.core.logging import Logger, LoggerDestination
from composer.core.precision import Precision
from composer.core.saving.optimizers import named
from composer.core.state import State
from composer.core.time import TimeInput, TimeUnit
from composer.loop.driver import Driver, active_dataloader, copied, zero_grad
from composer.loop.failed_step import describe_failed_step
from composer.loop.generators import global_states, set_global_states
from composer.loop.loss_terms import Count, LossTerms, share_of
from composer.loop.position import LoaderPosition, set_epoch
from composer.loop.refusals import HostFeatures, Problem, algorithms_in, argument_problems, failures, raise_all
from composer.loop.swapped_weights import swap_out, weights_to_save
from composer.models.base import ComposerModel, total_loss
from composer.utils import dist
from composer.utils.iter_helpers import ensure_tuple
from composer.utils.misc import model_eval_mode, needs_closure
from composer.utils.reproducibility import seed_context

__all__ = ["HostedRun", "algorithms_in", "total_loss"]

_END = object()  # marks the end of a loader

# The phases of a run, as messages name them; each allows some of the methods.
_CREATED, _READY, _FIT, _EPOCH = (
    "before `init`",
    "outside `begin_fit` and `end_fit`",
    "between two epochs",
    "in an epoch",
)
_BATCH, _PASS, _LOSS = "before a forward pass", "in a forward pass", "after the loss"
_GRADIENTS, _EVALUATION = "after a backward pass", "in an evaluation"


class HostedRun:
    """A run inside an existing training loop: your own, or that of another library.

    It owns `State` and `Engine`, and announces the events of a run. A loop written by hand stays as short as it was::

        run = HostedRun(
            net, [MixUp(), EMA()], loss=loss, optimizers=optimizer, dataloader=loader, max_duration="2ep"
        )
        run.begin_fit()
        while not run.is_over():
            for batch in run.epoch():
                loss = run.loss(batch)
                run.backward(loss)
                run.step()
        run.end_fit()

    `loss`, `step` and `epoch` are made of smaller methods, with which the adapters in `composer.hosts` announce the
    events from the hooks of another library. In the order of a run: `init`, `take_optimizers`, `begin_fit`,
    `begin_epoch`; for each batch of the loader `after_dataloader`, `before_forward`, `after_forward`, `before_loss`,
    `after_loss`, `after_backward`; for each step of the optimizers `after_gradients` and `end_batch`; `end_epoch`,
    `end_fit`. For the same seed and order of batches the weights equal those that a `Trainer` computes.

    Training has a random state of its own, which starts with `seed`, is saved, and replaces the global one from the
    first batch of an epoch to its end, except during evaluations. So neither evaluations nor random draws between
    epochs change a run. Draws in the body of the loop do: call `pause` before them. Several runs may train in turns,
    each with its own random numbers.

    Several batches of the loader may make one step (`accumulate`). Events of the loader (BEFORE_DATALOADER,
    AFTER_DATALOADER) then occur for each of them, those of a batch once per step. An algorithm that draws or chooses
    once per batch, such as `SelectiveBackprop`, thus does so for each batch of the loader. A batch is trained as a
    whole, even if an algorithm has cut it into more rows; the `Trainer` splits such batches.

    `backward` multiplies the loss of a batch of `epoch` by its share of the step, as the `Trainer` does with
    microbatches and ranks: that of the labels that the loss counts, or of the samples; see
    `composer.loop.loss_terms.LossTerms`. A host that announces the events itself accumulates by its own rule.

    After an exception in the loop, `abort` makes the run ready for another `begin_fit`.

    An optimizer that computes several gradients in a step (`SAM`, LBFGS) gets them by replay: `step` repeats the passes
    of the step with the stored batches and random states.

    Args:
        model: A `ComposerModel`, which has a loss. Or any module, with `forward` and `loss`; without these, the host
            computes the loss, and calls the smaller methods.
        algorithms: The algorithms.
        max_duration: The length of the run: a time string, a `Time` or a number of epochs.
        optimizers: One or several with different parameters; here, or later with `take_optimizers`.
        schedulers: Learning-rate schedulers, stepped by `step` after every step of the optimizers.
        dataloader: The training data, iterated by `epoch`: an iterable of batches, or a `DataSpec`, whose functions
            transform and count them.
        forward: `forward(module, batch) -> outputs`. None: `module(inputs)`, the first part of the batch.
        loss: `loss(outputs, batch) -> loss`; with an argument `reduction` if an algorithm needs the loss per example,
            and an argument or attribute `ignore_index` if it ignores labels.
        accumulate: Batches of the loader per step of the optimizers.
        manual: The loop computes the gradients and steps the optimizers and schedulers itself, as often as it likes in
            a batch, and calls `end_batch` after each batch of `epoch` in place of `loss`, `backward` and `step`.
            Algorithms that act on losses or gradients, or replace optimizers, are refused, and callbacks that do.
            `forward`, `loss` and `precision` are used in evaluations only.
        seed: The seed of the first rank; rank r uses `seed + r`.
        precision: A `Precision` or its name. `loss` computes outputs and loss in it.
        callbacks: Callbacks.
        loggers: Loggers.
        unavailable: Events that the host cannot announce and effects of algorithms that it does not support, with the
            reason or the way out, as a sentence. Algorithms that declare one are refused.
        host_provides: Effects of features of the host, such as CLIPS_GRADIENTS, which algorithms may exclude.
        problems: What the host has found wrong with its own settings; it is raised together with all the rest.
        hooks: Where the host announces events, for `explain`.

    Attributes:
        state: The state.
        engine: The engine.
        accumulate: Batches of the loader per step.
        manual: The loop computes the gradients and steps the optimizers.
        replays: True in training if an optimizer needs the gradients of a step several times; see `closure`.
        replay_index: While a pass is repeated, its index in the step; otherwise None.

    Raises:
        TypeError: `model` is not a module, `forward` or `loss` is not callable, a callback is not a `Callback`, a
            scheduler has no `step`, or `dataloader` yields samples.
        ValueError: `accumulate` is below 1, `forward` is given without `loss`, or an optimizer shares parameters with
            another; or several arguments are wrong: one error names all of them.
        ConflictError: The host does not support an algorithm, or two algorithms exclude each other.

    Example:
        >>> net = torch.nn.Linear(3, 2)
        >>> data = [(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))]
        >>> run = HostedRun(
        ...     net,
        ...     loss=lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch[1]),
        ...     optimizers=torch.optim.SGD(net.parameters(), lr=0.1),
        ...     dataloader=data,
        ...     max_duration="2ep",
        ... )
        >>> run.begin_fit()
        >>> while not run.is_over():
        ...     for batch in run.epoch():
        ...         run.backward(run.loss(batch))
        ...         stepped = run.step()
        >>> run.end_fit()
        >>> run.state.timestamp.sample
        Time(8, TimeUnit.SAMPLE)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        algorithms: Algorithm | Sequence[Algorithm] = (),
        *,
        max_duration: TimeInput,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        schedulers: Any = None,
        dataloader: Iterable[Any] | DataSpec | None = None,
        forward: Callable[[Any, Any], Any] | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        accumulate: int = 1,
        manual: bool = False,
        seed: SupportsIndex = 0,
        precision: str | Precision = Precision.FP32,
        callbacks: Callback | Sequence[Callback] = (),
        loggers: LoggerDestination | Sequence[LoggerDestination] = (),
        unavailable: Mapping[Event | str, str] | None = None,
        host_provides: Iterable[str] = (),
        problems: Iterable[Problem] = (),
        hooks: Mapping[Event, str] | None = None,
    ) -> None:
        found = argument_problems(
            algorithms,
            unavailable=unavailable,
            host_provides=host_provides,
            manual=manual,
            accumulate=accumulate,
            forward=forward,
            loss=loss,
            callbacks=callbacks,
            loggers=loggers,
            schedulers=schedulers,
            seed=seed,
            model=model,
            max_duration=max_duration,
            precision=precision,
        )
        loader_problems = failures(lambda: _check_loader(dataloader))
        raise_all([*problems, *found, *_optimizer_problems(optimizers, model, loss), *loader_problems])
        self.accumulate, self.manual, self._hooks = operator.index(accumulate), manual, dict(hooks or {})
        self.state = state = State(
            model=model if loss is None else _WithLoss(model, forward_inputs if forward is None else forward, loss),
            rank_zero_seed=seed,
            max_duration=max_duration,
            precision=precision,
            optimizers=optimizers,
            schedulers=schedulers,
            algorithms=[*ensure_tuple(algorithms), *([HostFeatures(host_provides)] if host_provides else [])],
            callbacks=[*ensure_tuple(loggers), *ensure_tuple(callbacks)],
        )
        self._spec = dataloader if isinstance(dataloader, DataSpec) else DataSpec([])  # counts and transforms batches
        self._set_loader(dataloader)
        destinations = [each for each in state.callbacks if isinstance(each, LoggerDestination)]
        self.engine = Engine(state, Logger(state, destinations))
        self._driver = Driver(self.engine)
        self._wrapped: Callable[[Any], Any] | None = None
        self._phase, self._before_evaluation = _CREATED, _CREATED
        self._random = _RandomStream(state)
        self._choose_autocast()
        self._is_taken = self._is_marked = self.replays = self._is_announced = self._is_watching_optimizers = False
        self._stepped: str | None = None  # the optimizer that was stepped, by `step` or the loop
        self._is_distributed = False
        self._loaded: dict[str, Any] | None = None
        self._position = LoaderPosition(state, accumulate=self.accumulate)
        self._backward: Callable[[torch.Tensor], object] | None = None
        self._outer = ExitStack()  # restores the loader and the batch after an evaluation
        self._lap_start = time.perf_counter()
        self._first_batch, self._is_described = 0, False  # set by each `begin_fit`
        self._clear()

    def _clear(self) -> None:
        """Forget the batches of the last step."""
        self._samples: float = 0
        self._tokens = 0
        self._has_batch = False
        self._weights: list[Count] = []  # the weights of the batches of the step; empty if the host weights them
        self._next = 0  # the index of the next batch
        self._passes: list[tuple[Any, Count, dict[str, torch.Tensor]]] = []  # batch, weight and random state
        self._weight: Count = 1.0
        self._is_first = True
        self.replay_index: int | None = None
        self._losses: dict[str, torch.Tensor] = {}  # the losses of the passes before any replay

    # ---- before training ----

    @property
    def model(self) -> Any:
        """The user's module, as algorithms have changed it."""
        model = self.state.model
        return model.network if isinstance(model, _WithLoss) else model

    @property
    def find_unused_parameters(self) -> bool:
        """True if parameters may get no gradient; pass it to `DistributedDataParallel`."""
        return any(algorithm.find_unused_parameters for algorithm in self.state.algorithms)

    def reconfigure(
        self,
        *,
        accumulate: int = 1,
        manual: bool = False,
        precision: str | Precision = Precision.FP32,
        unavailable: Mapping[Event | str, str] | None = None,
        host_provides: Iterable[str] = (),
        problems: Iterable[Problem] = (),
    ) -> None:
        """Replace settings of the host between two calls of `begin_fit`; algorithms keep their states.

        Nothing changes if the new settings are refused.

        Args:
            accumulate: As in the constructor, like the others.
            manual: The loop computes the gradients and steps the optimizers.
            precision: The precision.
            unavailable: Events and effects that the host does not support now.
            host_provides: Effects of features that the host has now.
            problems: What the host has found wrong now.

        Raises:
            RuntimeError: Training has begun.
            ValueError: `accumulate` is below 1, or `precision` is unknown.
            ConflictError: The host does not support an algorithm with these settings.
        """
        self._require("reconfigure", _CREATED, _READY, hint="Call `end_fit` first, or `abort` after an exception.")
        algorithms = [each for each in self.state.algorithms if not isinstance(each, HostFeatures)]
        found = argument_problems(
            algorithms,
            unavailable=unavailable,
            host_provides=host_provides,
            manual=manual,
            accumulate=accumulate,
            callbacks=self.state.callbacks,
            precision=precision,
        )
        raise_all([*problems, *found])
        algorithms += [HostFeatures(host_provides)] if host_provides else []
        self.state.algorithms, self.state.precision = algorithms, Precision(precision)
        self.accumulate = self._position.accumulate = operator.index(accumulate)
        self.manual = manual
        self._choose_autocast()
        if self.state.train_dataloader is not None:
            self._set_loader(self.state.train_dataloader)

    def init(self) -> None:
        """Announce INIT, where algorithms change the model, with random numbers that follow from the seed.

        `take_optimizers`, `load_state_dict` and `begin_fit` call it if necessary. Call it before creating the
        optimizers, if they are not given to the constructor.

        Raises:
            RuntimeError: It was called already.
        """
        self._require("init", _CREATED, hint="Create a new `HostedRun` for another run.")
        self._phase = _READY
        with seed_context(self.state.rank_zero_seed):
            self.engine.run_event(Event.INIT)

    def take_optimizers(
        self, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
    ) -> list[torch.optim.Optimizer]:
        """Announce BEFORE_LOAD, where algorithms wrap optimizers, and return those to step from now on.

        Args:
            optimizers: The optimizers; None: those of the constructor.

        Raises:
            RuntimeError: Training has begun.
            ValueError: They share parameters, or train none of the model.
        """
        self._require("take_optimizers", _CREATED, _READY, hint="Call it before `begin_fit`.")
        if self._phase is _CREATED:
            self.init()
        state = self.state
        if optimizers is not None:
            state.optimizers = optimizers
        raise_all(_optimizer_problems(state.optimizers, state.model))
        self.engine.run_event(Event.BEFORE_LOAD)
        if self._loaded is not None and optimizers is not None:  # an algorithm may leave out what it has frozen
            self._load_algorithms(self._loaded)
        self._is_taken = True
        return list(state.optimizers)

    def use_model(self, wrapped: Callable[..., Any]) -> None:
        """Run the forward passes of training with a wrapped form of the model.

        Args:
            wrapped: What the host has made of `model`, such as a `DistributedDataParallel`.
        """
        model = self.state.model
        self._wrapped = (lambda batch: model.call(wrapped, batch)) if isinstance(model, _WithLoss) else wrapped

    def begin_fit(self, dataloader: Iterable[Any] | None = None) -> None:
        """Announce AFTER_LOAD and FIT_START.

        Args:
            dataloader: The training data, if the constructor did not get it.

        Raises:
            RuntimeError: Training has begun already.
            ValueError: There is no training data.
        """
        self._require("begin_fit", _CREATED, _READY, hint="Call `end_fit` first, or `abort` after an exception.")
        if dataloader is not None:
            self._set_loader(dataloader)
        if self.state.dataloader is None:
            raise ValueError(
                "`dataloader` must be given before training, got None. Pass it to `HostedRun` or `begin_fit`."
            )
        if not self._is_taken:
            self.take_optimizers()
        self._position.begin()
        self._position.mark()  # a host may start the loader before the epoch begins
        self._is_marked = True
        with self._random:
            self.engine.run_event(Event.AFTER_LOAD)
            self._driver.begin_fit()
        if self._loaded is not None:
            # Undo the draws of FIT_START: they were made before the run was saved, too.
            is_own = self._loaded["rank"] == dist.get_global_rank()
            self._random.load(self._loaded["random"], is_own)
            if is_own:
                set_global_states({**global_states(), **self._loaded["global"]})
            self._loaded = None
        self.replays = any(needs_closure(optimizer) for optimizer in self.state.optimizers)
        self._is_distributed = dist.get_world_size() > 1
        self._terms = LossTerms(self.state.model, self._spec)
        self._stepped = None
        self._first_batch, self._is_described = self.state.timestamp.batches, False
        self._phase = _FIT
        self._clear()

    def is_over(self) -> bool:
        """Return True if the run has reached `max_duration`."""
        return self.state.is_over()

    @property
    def in_epoch(self) -> bool:
        """True from `begin_epoch` to `end_epoch`."""
        return self._phase in (_EPOCH, _BATCH, _PASS, _LOSS, _GRADIENTS)

    @property
    def in_step(self) -> bool:
        """True from the first batch of a step to `end_batch`."""
        return self.in_epoch and self._has_batch

    # ---- epochs and batches ----

    def pause(self) -> None:
        """Give the global generators back to the host until the next batch, before it draws random numbers itself.

        Raises:
            RuntimeError: A forward or backward pass is not finished, which may still draw numbers of training.
        """
        if self._phase in (_PASS, _LOSS):
            raise RuntimeError(
                f"`pause` must be called between two passes, but the run is {self._phase}. Call `pause` after "
                f"`backward`."
            )
        self._random.leave()

    def epoch(self) -> Iterator[Any]:
        """Iterate over the batches of an epoch, on the model's device, with the events of the epoch and of loading.

        If the run was loaded inside an epoch, the batches that were trained before are drawn and skipped. The iteration
        ends with the loader, or when the run is over.

        Raises:
            RuntimeError: Training has not begun, or a batch was not trained; or the loader yields nothing.
            ValueError: The batches of a step have no samples, or an epoch would never end.

        Warns:
            UserWarning: The loader has no length and `max_duration` is in epochs, or it exceeds its length.
        """
        state, spec = self.state, self._spec
        end, expected = state.max_duration, None
        if state.timestamp.batches == self._first_batch and state.dataloader_limit is None:
            expected = state.dataloader_len
            if end is not None and end.unit is TimeUnit.EPOCH:
                check_ends("dataloader", state.dataloader, "Set `max_duration` in batches, such as '1000ba'.")
        self._begin_epoch()
        self._random.enter()
        set_epoch(state.dataloader, state.timestamp.epochs)
        iterator = self._position.resume()
        while not state.is_over() and not self._position.is_at_end():
            self._random.enter()
            group: list[Any] = []
            for _ in range(self.accumulate):
                self._before_dataloader()
                if iterator is None:
                    iterator = self._position.start()
                batch = next(iterator, _END)
                if batch is not _END:
                    group.append(self.after_dataloader(spec.batch_transforms(batch)))
            if not group:
                break
            dispatch = self.engine.dispatch
            samples = self._samples
            if dispatch.after_dataloader or dispatch.batch_start:  # rows may have been dropped or added
                samples = sum(spec.get_num_samples_in_batch(batch) for batch in group)
            if not samples:
                raise ValueError(
                    "The batches of a step must have samples, got 0. Leave empty batches out of the loader, or correct "
                    "`get_num_samples_in_batch`."
                )
            if self._terms.is_sum or (len(group) == 1 and not self._is_distributed):
                self._weights = [1.0] * len(group)
            else:
                counts = [self._terms.count(batch) for batch in group]
                total: Any = sum(counts)
                if self._is_distributed:
                    total = _sum_over_ranks(state, total) / dist.get_world_size()
                    # Reading the number from an accelerator would wait for it.
                    total = total.item() if total.device.type == "cpu" else total.float()
                self._weights = [share_of(count, total) for count in counts]
            if expected is not None and state.timestamp.batches_in_epoch == expected.value:
                warn_of_longer_epoch(state.dataloader, expected.value)
            for batch in group:
                yield spec.microbatch_transforms(state.device.batch_to_device(batch))
            hint = "Call `end_batch`" if self.manual else "Call `loss`, `backward` and `step`"
            self._require("the iteration of `epoch`", _EPOCH, hint=f"{hint} for each batch.")
        else:  # the run is over, maybe in the middle of an epoch
            if not self._position.is_at_end():
                self._position.finish()
                return
        if not state.timestamp.batches_in_epoch:
            report_empty_epoch(state.timestamp.epochs, state.timestamp.batches - self._first_batch)
        self.end_epoch()

    def _before_dataloader(self) -> None:
        self._is_announced = True
        self._driver.before_dataloader()

    def begin_epoch(self) -> None:
        """Announce EPOCH_START, unless the run was loaded inside an epoch.

        Raises:
            RuntimeError: Training has not begun, or the last epoch has not ended.
        """
        self._begin_epoch()
        if not self._is_marked:
            self._position.mark()
        self._position.leave_to_host()
        self._is_marked = False

    def _begin_epoch(self) -> None:
        if self._phase is not _EPOCH or not self.state.timestamp.batches_in_epoch:  # else: continue in mid-epoch
            self._require("begin_epoch", _FIT, hint="Call `begin_fit` before the first, `end_epoch` after each epoch.")
        self._phase = _EPOCH
        with self._random:
            self._driver.begin_epoch()
        self._lap_start = time.perf_counter()

    def after_dataloader(self, batch: Any) -> Any:
        """Announce AFTER_DATALOADER and, for the first batch of a step, BATCH_START.

        BEFORE_DATALOADER is announced here as well, unless `epoch` draws the batches.

        Args:
            batch: A batch of the loader, on any device.

        Returns:
            The batch as algorithms have changed it.

        Raises:
            RuntimeError: It is called outside an epoch.
        """
        self._require("after_dataloader", _EPOCH, _BATCH, _GRADIENTS, hint="Call `begin_epoch` first.")
        state, spec = self.state, self._spec
        self._random.enter()
        if not self._is_announced:
            self._before_dataloader()
        self._is_announced = False
        self._tokens += spec.get_num_tokens_in_batch(batch)
        is_first, self._has_batch = not self._has_batch, True
        self._samples += spec.get_num_samples_in_batch(batch)
        batch = self._driver.after_dataloader(batch, is_first)
        if state.timestamp.batches == self._first_batch and spec.microbatch_transforms is unchanged:
            self._driver.find_batch_keys()
        self._phase = _BATCH
        return batch

    # ---- one forward and backward pass ----

    def loss(self, batch: Any) -> Any:
        """Compute the loss of a batch, with all events from BEFORE_FORWARD to BEFORE_BACKWARD.

        Args:
            batch: A batch on the model's device; it is not changed.

        Returns:
            The loss, in the form in which the model returns it.

        Raises:
            RuntimeError: There is no function that computes the loss, or the last batch is not finished.
        """
        state = self.state
        if not isinstance(state.model, ComposerModel):
            raise RuntimeError(
                f"`loss` must be known to compute it, but {type(state.model).__name__} is not a `ComposerModel`. Pass "
                f"`HostedRun(..., loss=...)`."
            )
        try:
            batch = self._begin_pass(batch)
            loss = self._driver.compute_loss(batch, state.model, self._wrapped)
        except Exception as error:
            self.describe_failure(error)
            raise
        self._phase = _LOSS
        return loss

    def before_forward(self, batch: Any) -> Any:
        """Announce BEFORE_FORWARD and, in the first pass of a step, BEFORE_TRAIN_BATCH.

        Args:
            batch: A batch on the model's device; algorithms change a copy.

        Returns:
            The batch for the model.

        Raises:
            RuntimeError: It is called before `after_dataloader`, or the last pass is not finished.
        """
        return self._driver.before_forward(self._begin_pass(batch))

    def _begin_pass(self, batch: Any) -> Any:
        """Return a copy of the batch of a pass, after BEFORE_TRAIN_BATCH in the first pass of a step."""
        self._require_phases()
        hint = "Get the batch from `epoch` or `after_dataloader`, then call `backward` and `step`."
        self._require("before_forward", _BATCH, *(() if self._weights else (_GRADIENTS,)), hint=hint)
        self._random.enter()
        if self._weights and self.replay_index is None:
            self._weight = self._weights[self._next]
        if self.replays and self.replay_index is None:
            self._passes.append((batch, self._weight, self._random.current()))
        if self._is_first:
            self._is_first = False
            self._driver.begin_passes(self._losses if self.replay_index is None else {})
        self._phase = _PASS
        return copied(batch)

    def after_forward(self, outputs: Any) -> Any:
        """Announce AFTER_FORWARD.

        Args:
            outputs: The outputs of the model.

        Returns:
            The outputs for the loss.
        """
        self._require("after_forward", _PASS, hint="Call `before_forward` first.")
        return self._driver.after_forward(outputs)

    def before_loss(self) -> Any:
        """Announce BEFORE_LOSS.

        Returns:
            The batch for the loss.
        """
        self._require("before_loss", _PASS, hint="Call `before_forward` first.")
        return self._driver.before_loss()

    def after_loss(self, loss: Any) -> Any:
        """Announce AFTER_LOSS and BEFORE_BACKWARD.

        Args:
            loss: The loss.

        Returns:
            The loss to differentiate, in the same form.
        """
        self._require("after_loss", _PASS, hint="Call `before_forward` first.")
        loss = self._driver.after_loss(loss)
        self._phase = _LOSS
        return loss

    def backward(self, loss: Any, backward: Callable[[torch.Tensor], object] | None = None) -> None:
        """Compute the gradients of a loss, weighted by the batch's share of the step, and announce AFTER_BACKWARD.

        Args:
            loss: The result of `loss`.
            backward: Computes the gradients of a tensor, such as the method of a host; it must not divide by the number
                of batches per step. None: `tensor.backward()`.

        Raises:
            RuntimeError: There is no loss, or `precision` is fp16, whose gradients vanish without a scaler.
        """
        self._require_phases()
        self._require("backward", _LOSS, hint="Call `loss` first.")
        self._random.enter()
        if backward is None and self.state.precision is Precision.AMP_FP16:
            raise RuntimeError(
                "`precision` must not be 'amp_fp16' without a `backward` that scales the loss. Use 'amp_bf16'. Or pass "
                "`backward=lambda loss: scaler.scale(loss).backward()` and, in place of `run.step()`, call "
                "`scaler.unscale_(optimizer)`, `run.after_gradients()`, `scaler.step(optimizer)`, `scaler.update()`, "
                "`optimizer.zero_grad()` and `run.end_batch()`."
            )
        self._backward = backward
        try:
            self._driver.backward(loss, self._weight, backward)
        except Exception as error:
            self.describe_failure(error)
            raise
        self._phase = _GRADIENTS

    def after_backward(self) -> None:
        """Announce AFTER_BACKWARD.

        Raises:
            RuntimeError: There is no loss.
        """
        self._require("after_backward", _LOSS, hint="Call it after `after_loss`.")
        self._phase = _GRADIENTS
        self._driver.after_backward()

    # ---- one step ----

    def step(self) -> bool:
        """Step optimizers and schedulers and clear the gradients, if this was the last batch of the step.

        Returns:
            True if the optimizers stepped.

        Raises:
            RuntimeError: `backward` was not called, or there is no optimizer.
        """
        self._require_phases()
        self._require("step", _GRADIENTS, hint="Call `loss` and `backward` first.")
        self._random.enter()
        if not self._is_watching_optimizers:
            self._is_watching_optimizers = True
            for optimizer in self.state.optimizers:
                inner = getattr(optimizer, "base_optimizer", optimizer)  # the loop steps the wrapped optimizer
                if hasattr(inner, "register_step_post_hook"):
                    inner.register_step_post_hook(self._record_external_step)
        if self._stepped is not None:
            raise RuntimeError(
                f"`step` steps the optimizers, but {self._stepped} has stepped since the last one. Remove "
                f"`optimizer.step()` from the loop."
            )
        self._next += 1
        if self._next < len(self._weights):
            self._phase = _BATCH
            return False
        state = self.state
        if not state.optimizers:
            raise RuntimeError("`optimizers` must be given before `step`. Pass them to `HostedRun`.")
        try:
            self.after_gradients()
            others = list(state.optimizers)
            if self.replays:
                runs_passes = next(i for i, each in enumerate(others) if needs_closure(each))
                others.pop(runs_passes).step(self.closure())  # type: ignore[arg-type]  # torch names the type of its result float
            for optimizer in others:
                optimizer.step()
            for optimizer in state.optimizers:
                zero_grad(optimizer)
            self._driver.step_schedulers()
        except Exception as error:
            self.describe_failure(error)
            raise
        self._stepped = None
        self.end_batch()
        return True

    def _record_external_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            rate = group.get("lr")
            # A step with all learning rates 0 only creates the state of the optimizer.
            if not isinstance(rate, (float, int)) or rate:
                self._stepped = type(optimizer).__name__
                return

    def after_gradients(self) -> None:
        """Announce AFTER_TRAIN_BATCH, where algorithms change the gradients of the whole step."""
        self._driver.end_passes()

    def closure(
        self,
        again: Callable[[Any], object] | None = None,
        first: Callable[[], Any] | None = None,
        then: Callable[[], object] | None = None,
    ) -> Callable[[], torch.Tensor]:
        """Return the closure for an optimizer that computes the gradients of a step several times.

        The first call covers the passes that the host runs. Each later call clears the gradients and repeats all passes
        of the step, with the same random numbers.

        Args:
            again: Computes the gradients of a stored batch. None: `backward(loss(batch))`.
            first: Runs the passes of the host. None: the host has run them.
            then: Called after the passes are repeated. None: `after_gradients`.
        """
        calls = 0

        def run() -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == 1:
                if first is not None:
                    first()
            else:
                self._replay(again)
                (self.after_gradients if then is None else then)()
            total = self._driver.losses.get("loss/train/total")  # None if the host has computed the gradients
            return total_loss(self.state.loss).detach() if total is None else total

        return run

    def _replay(self, again: Callable[[Any], object] | None) -> None:
        """Clear the gradients and repeat the passes of the step; see `closure`."""
        for optimizer in self.state.optimizers:
            zero_grad(optimizer)
        self._is_first = True
        try:
            for i, (batch, weight, random) in enumerate(self._passes):
                self.replay_index, self._weight = i, weight
                self._random.write(random)
                self._phase = _BATCH
                if again is None:
                    self.backward(self.loss(batch), self._backward)
                else:
                    again(batch)
        finally:
            self.replay_index = None

    def end_batch(self) -> None:
        """Count the step and announce BATCH_END and BATCH_CHECKPOINT, after the optimizers have stepped.

        Raises:
            RuntimeError: No gradients were computed.
        """
        phase = _BATCH if self.manual else _GRADIENTS
        self._require("end_batch", phase, hint="Call it after the step of the optimizers.")
        state = self.state
        now = time.perf_counter()
        lap, self._lap_start = now - self._lap_start, now
        samples, tokens = self._samples, self._tokens
        if self._is_distributed:
            total, all_tokens = _sum_over_ranks(state, [samples, tokens]).tolist()
            samples, tokens = int(total) if total.is_integer() else total, int(all_tokens)
        if self._losses and self._weights:  # else a host computes the gradients and weights them itself
            state.total_loss_dict = self._losses
            if self.engine.logger.destinations:
                losses = {key: DeferredValue.of_tensor(loss) for key, loss in self._losses.items()}
                self.engine.logger.log_metrics(losses)
        self._driver.count_batch(samples, tokens, lap)
        self._phase = _EPOCH
        self._clear()
        self._driver.end_batch()

    def end_epoch(self) -> None:
        """Count the epoch and announce EPOCH_END and EPOCH_CHECKPOINT.

        Raises:
            RuntimeError: No epoch has begun, or a step is not finished.
        """
        self._require("end_epoch", _EPOCH, hint="Call `begin_epoch` first, and finish each step.")
        self._random.enter()
        self._finish_epoch()
        self._random.leave()
        self._phase = _FIT

    def _finish_epoch(self) -> None:
        self._position.finish(epoch_ended=True)
        self._driver.end_epoch()

    def catch_up(self, epoch: int) -> None:
        """Announce the ends of epochs that were complete when the host saved its checkpoint, but not announced yet.

        Args:
            epoch: The number of epochs that have ended.

        Raises:
            RuntimeError: It is called outside of `begin_fit` and the first epoch.
        """
        self._require("catch_up", _FIT, hint="Call it after `begin_fit`.")
        with self._random:
            while self.state.timestamp.epochs < epoch:
                self._finish_epoch()

    def end_fit(self) -> None:
        """Announce FIT_END. Averages of the weights, if there are any, are in the model afterwards.

        Raises:
            RuntimeError: Training has not begun, or a step is not finished.
        """
        self._require("end_fit", _FIT, _EPOCH, hint="Call `begin_fit` first, and finish each step.")
        self._random.enter()
        self._driver.end_fit()
        self._random.leave()
        self._phase = _READY

    def abort(self) -> None:
        """Leave training and evaluation after an exception; `begin_fit` then continues the run.

        The host gets the global generators back, and the model the weights of training: EVAL_END ends an evaluation,
        averages that were swapped in for saving are swapped out, and FIT_END is not announced. The unfinished step is
        dropped, with its gradients. Outside of training and evaluation, nothing happens.
        """
        try:
            if self._phase is _EVALUATION:
                self.end_evaluation()
            if self._phase not in (_CREATED, _READY):
                swap_out(self.engine, self.state.algorithms)
                for optimizer in self.state.optimizers:
                    zero_grad(optimizer)
        finally:
            self._random.leave()
            self._position.finish()
            self._is_announced = False
            self._clear()
            if self._phase is not _CREATED:
                self._phase = _READY

    def close(self) -> None:
        """Close callbacks and loggers. Called when the run is garbage-collected, too."""
        self.engine.close()

    # ---- evaluation ----

    @contextmanager
    def evaluation(self, dataloader: Iterable[Any], label: str = "eval") -> Iterator[None]:
        """Evaluate in the body: the model is in eval mode, without gradients, and may have other weights.

        Compute outputs with `eval_forward`, or with the model, if no algorithm acts on evaluations. An exception ends
        the evaluation, too: the run continues with the weights of training.

        Args:
            dataloader: The data to evaluate on.
            label: The name of the data.
        """
        with torch.no_grad(), model_eval_mode(self.state.model):
            self.begin_evaluation(dataloader, label)
            try:
                yield
            finally:  # averages must not stay in the model
                self.end_evaluation()

    def begin_evaluation(self, dataloader: Iterable[Any], label: str = "eval") -> None:
        """Announce EVAL_START, after EVAL_BEFORE_ALL in training and EVAL_STANDALONE_START outside.

        Args:
            dataloader: The data to evaluate on.
            label: The name of the data.

        Raises:
            RuntimeError: A forward or backward pass is not finished, or another evaluation runs.
        """
        hint = "Finish the pass, or call `init` first."
        self._require("begin_evaluation", _READY, _FIT, _EPOCH, _GRADIENTS, hint=hint)
        self._random.leave()
        self._before_evaluation, self._phase = self._phase, _EVALUATION
        self._lap_start -= time.perf_counter()  # `end_evaluation` adds it again: an evaluation is not training time
        self._outer.enter_context(active_dataloader(self.state, dataloader, label))
        try:
            self._driver.begin_evaluations(is_standalone=self._before_evaluation is _READY)
            self._driver.begin_evaluation()
        except BaseException:  # an earlier algorithm may have swapped weights
            self.end_evaluation()
            raise

    def eval_forward(self, batch: Any) -> Any:
        """Compute the outputs of a batch of an evaluation, with all events from EVAL_BATCH_START to EVAL_BATCH_END.

        Args:
            batch: A batch on the model's device; algorithms change a copy.

        Raises:
            RuntimeError: No evaluation runs.
        """
        self._require("eval_forward", _EVALUATION, hint="Call it in `with run.evaluation(dataloader):`.")
        driver, model = self._driver, self.state.model

        def forward(inputs: Any) -> Any:
            with driver.autocast():
                return model.eval_forward(inputs) if isinstance(model, ComposerModel) else model(inputs)

        driver.eval_forward(driver.begin_eval_batch(copied(batch)), forward)
        driver.end_eval_batch(*self._spec.count_batch(batch))
        return self.state.outputs

    def end_evaluation(self) -> None:
        """Announce EVAL_END, and EVAL_AFTER_ALL in training or EVAL_STANDALONE_END outside.

        Raises:
            RuntimeError: No evaluation runs.
        """
        self._require("end_evaluation", _EVALUATION, hint="Call `begin_evaluation` first.")
        try:
            self._driver.end_evaluation()
            self._driver.end_evaluations(is_standalone=self._before_evaluation is _READY)
        finally:
            self._outer.close()
            self._lap_start += time.perf_counter()
            self._phase = self._before_evaluation

    # ---- saving and loading ----

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save the model in the body, with the weights that algorithms want to have saved, such as averages.

        Afterwards the model has the weights of training again, or after `end_fit` the averages. Call the run's
        `state_dict` in the same body, and write or copy the weights there: the tensors of `model.state_dict()` are
        those of the model.
        """
        hint = "Finish the pass, or call `init` first."
        self._require("saving", _READY, _FIT, _EPOCH, _GRADIENTS, _EVALUATION, hint=hint)
        with weights_to_save(self.engine):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs in addition to model and optimizers, which the host saves, in plain types.

        Random numbers are those of this rank.

        Raises:
            RuntimeError: A step of `epoch` is not finished.
        """
        state = self.state
        if self._weights and self._phase in (_PASS, _LOSS, _GRADIENTS):
            raise RuntimeError(
                f"`state_dict` must be called between two steps, but the run is {self._phase}: the gradients are not "
                f"saved. Call it after `step` has returned True."
            )
        random, rank = dict(self._random.current()), dist.get_global_rank()
        python_and_numpy = {name: each for name, each in global_states().items() if name in ("python", "numpy")}
        if self._loaded is not None:  # `begin_fit` has not restored them yet
            random, python_and_numpy, rank = self._loaded["random"], self._loaded["global"], self._loaded["rank"]
        return {
            "timestamp": state.timestamp.state_dict(),
            "algorithms": [(name, algorithm.state_dict()) for name, algorithm in self._named_algorithms()],
            "callbacks": {name: saved for name, each in named(state.callbacks) if (saved := each.state_dict())},
            "schedulers": {name: scheduler.state_dict() for name, scheduler in named(state.schedulers)},
            "random": random,
            "global": python_and_numpy,
            "data": self._position.state_dict(),
            "rank": rank,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned: after the weights of the model, and before the states of the optimizers.

        Args:
            saved: The result of `state_dict`, of a run with the same algorithms.

        Raises:
            RuntimeError: Training has begun.
            ValueError: `saved` is something else.

        Warns:
            UserWarning: The saved run had other algorithms.
        """
        self._require("load_state_dict", _CREATED, _READY, hint="Call it before `begin_fit`.")
        missing = {"timestamp", "algorithms", "callbacks", "schedulers", "random", "global", "data", "rank"} - set(
            saved
        )
        if missing:
            raise ValueError(
                f"`saved` must be a result of `HostedRun.state_dict`, but lacks {', '.join(sorted(missing))}."
            )
        if self._phase is _CREATED:
            self.init()
        different = sorted(dict(saved["algorithms"]).keys() ^ dict(self._named_algorithms()).keys())
        if different:
            warnings.warn(
                f"The saved run and this one have different algorithms: {', '.join(different)}. Resumed training will "
                f"differ from an uninterrupted run: if one of the saved run averaged weights, this one starts from the "
                f"averages, with the optimizer of other weights. Pass the algorithms of the saved run.",
                stacklevel=2,
            )
        state = self.state
        state.timestamp.load_state_dict(saved["timestamp"])
        self._load_algorithms(saved)
        for objects, key in ((state.callbacks, "callbacks"), (state.schedulers, "schedulers")):
            for name, target in named(objects):
                if name in saved[key]:
                    target.load_state_dict(saved[key][name])
        self._position.load_state_dict([saved["data"]], None)
        self._loaded = dict(saved)

    def _named_algorithms(self) -> list[tuple[str, Algorithm]]:
        return named(algorithm for algorithm in self.state.algorithms if not isinstance(algorithm, HostFeatures))

    def _load_algorithms(self, saved: Mapping[str, Any]) -> None:
        states, own = dict(saved["algorithms"]), dict(self._named_algorithms())
        for name in states.keys() & own.keys():
            own[name].load_state_dict(states[name])

    def explain(self) -> Plan:
        """Return the plan of the run: what acts at each event, in which order and why; see `Engine.explain`.

        It includes the hooks from which the host announces the events.
        """
        plan, hooks = self.engine.explain(), self._hooks
        rows = [replace(r, reason=f"{r.reason}; from {hooks[r.event]}") if r.event in hooks else r for r in plan]
        return Plan(rows, plan.notes)

    def describe_failure(self, error: BaseException) -> None:
        """Add to an error what the step saw, if it is the first one since `begin_fit` and not described yet.

        `loss`, `backward` and `step` do so themselves. A host that computes the loss or the gradients itself calls it
        before `abort`.

        Args:
            error: The error of the step; see `composer.loop.failed_step`. Nothing is added to a `KeyboardInterrupt`
                and the like.
        """
        is_first = self._has_batch and self.state.timestamp.batches == self._first_batch
        if is_first and not self._is_described and isinstance(error, Exception):
            self._is_described = True
            describe_failed_step(error, self.state, self.state.batch)

    # ---- checks ----

    def _require(self, action: str, *phases: str, hint: str) -> None:
        if self._phase not in phases:
            raise RuntimeError(
                f"{action if ' ' in action else f'`{action}`'} must be called {' or '.join(phases)}, but the run is "
                f"{self._phase}. {hint}"
            )

    def _require_phases(self) -> None:
        if self.manual:
            raise RuntimeError(
                "With `manual=True` the loop computes losses and gradients itself, and then calls `end_batch`. Call "
                "your own functions, or leave `manual` out."
            )

    def _choose_autocast(self) -> None:
        """Let the driver compute losses in the precision of the run; for FP32, the host may have its own context."""
        if self.state.precision is Precision.FP32:
            self._driver.autocast = nullcontext
        else:
            self._driver.choose_autocast()

    def _set_loader(self, dataloader: Any) -> None:
        state = self.state
        if dataloader is None:
            return
        _check_loader(dataloader)
        if isinstance(dataloader, DataSpec):
            self._spec, dataloader = dataloader, dataloader.dataloader
        state.train_dataloader = dataloader
        state.set_dataloader(dataloader, "train")
        if state.dataloader_len is not None:
            state.dataloader_len = -(-state.dataloader_len.value // self.accumulate)


class _WithLoss(ComposerModel):
    """A module with the functions that compute its outputs and its loss.

    Args:
        network: The module.
        forward: `forward(module, batch) -> outputs`.
        loss: `loss(outputs, batch) -> loss`.
    """

    def __init__(self, network: torch.nn.Module, forward: Callable[[Any, Any], Any], loss: Callable[..., Any]) -> None:
        super().__init__()
        self.network, self.call = network, forward
        vars(self)["loss"] = loss  # unwrapped: algorithms read the signature

    def forward(self, batch: Any) -> Any:
        return self.call(self.network, batch)

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Return a module by its name in the user's module, which is what arguments of algorithms refer to."""
        first, _, _ = target.partition(".")
        return super().get_submodule(f"network.{target}" if first and first != "network" else target)

    def loss(self, outputs: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("each object has its own")


def forward_inputs(module: Any, batch: Any) -> Any:
    """Run a module on the first part of a batch, which is what hosts do without a `forward`.

    Raises:
        TypeError: The batch is neither a tuple nor a list.
    """
    if not isinstance(batch, (tuple, list)):
        raise TypeError(
            f"`forward` must be given for batches that are neither tuples nor lists, got a {type(batch).__name__}. "
            f"Pass for example `forward=lambda module, batch: module(**batch)`."
        )
    return module(batch[0])


class _RandomStream:
    """The random state of training, which is exchanged with the global one.

    Args:
        state: The run's state, with the seed and the model, whose device has a generator too.
    """

    _entered: ClassVar[weakref.ref[_RandomStream] | None] = None

    def __init__(self, state: State) -> None:
        self._state, self._is_inside = state, False
        self._own: dict[str, torch.Tensor] = {}
        self._outer: dict[str, torch.Tensor] = {}
        self._seed: int | None = None

    def enter(self) -> None:
        """Make the global generators continue with the numbers of training."""
        if self._is_inside:
            return
        other = None if _RandomStream._entered is None else _RandomStream._entered()
        if other is not None:  # another run is in an epoch, too
            other.leave()
        _RandomStream._entered = weakref.ref(self)
        self._outer = self._read()
        for kind in self._outer.keys() - self._own.keys():
            seed = self._state.seed if self._seed is None else self._seed
            self._own[kind] = torch.Generator(kind).manual_seed(seed).get_state()
        self.write(self._own)
        self._is_inside = True

    def leave(self, *_: object) -> None:
        """Make the global generators continue with their own numbers."""
        if self._is_inside:
            self._own, self._is_inside = self._read(), False
            self.write(self._outer)
            _RandomStream._entered = None

    __enter__, __exit__ = enter, leave

    def current(self) -> dict[str, torch.Tensor]:
        """Return the random state of training: the state of each generator, by device type."""
        return self._read() if self._is_inside else self._own

    def load(self, saved: Mapping[str, torch.Tensor], is_own: bool) -> None:
        """Restore what `current` returned.

        Args:
            saved: The states.
            is_own: True if this rank saved the states; otherwise the state is derived from the seed and the progress
                of the run.
        """
        self._own = {kind: state.cpu() for kind, state in saved.items()} if is_own else {}
        self._seed = None if is_own else self._state.seed + self._state.timestamp.batches

    def _read(self) -> dict[str, torch.Tensor]:
        states = {"cpu": torch.get_rng_state()}
        device = next((each.device for each in self._state.model.parameters()), None)
        if device is not None and device.type not in ("cpu", "meta"):
            states[device.type] = torch.get_device_module(device).get_rng_state()
        return states

    @staticmethod
    def write(states: Mapping[str, torch.Tensor]) -> None:
        """Set the states of the global generators."""
        for kind, state in states.items():
            module: Any = torch if kind == "cpu" else torch.get_device_module(kind)
            module.set_rng_state(state.cpu())


def _optimizer_problems(optimizers: Any, model: Any, loss: Any = None) -> Iterator[Problem]:
    """Yield a message for each optimizer that has no parameter of the model, or one that another optimizer has."""
    modules = [each for each in (model, loss) if isinstance(each, torch.nn.Module)]
    names = {id(parameter): name for module in modules for name, parameter in module.named_parameters()}
    seen: set[int] = set()
    for optimizer in ensure_tuple(optimizers):
        if not hasattr(optimizer, "param_groups"):
            name = getattr(optimizer, "__name__", repr(optimizer))
            yield TypeError(
                f"`optimizers` must be optimizers, got {name}. Make one of the model's parameters: "
                f"`torch.optim.SGD(model.parameters(), lr=0.1)`."
            )
            continue
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        kind = type(optimizer).__name__
        if own and own.isdisjoint(names) and isinstance(model, torch.nn.Module):
            yield (
                f"`optimizers` must hold parameters of `model`, got {kind}, none of whose {len(own)} parameters is in "
                f"the model. Create it from `run.model.parameters()` after `run.init()`."
            )
        if own & seen:
            shared = ", ".join(sorted(names.get(each, "?") for each in own & seen)[:3])
            yield (
                f"`optimizers` must hold different parameters, but {kind} shares {len(own & seen)} with one before it: "
                f"{shared}. Each parameter is trained by one optimizer."
            )
        seen |= own


def _check_loader(dataloader: Any) -> None:
    """Raise TypeError if training data yields samples."""
    if dataloader is not None:
        check_yields_batches("dataloader", dataloader.dataloader if isinstance(dataloader, DataSpec) else dataloader)


def _sum_over_ranks(state: State, counts: Count | list[float]) -> torch.Tensor:
    device = "cuda" if state.device.torch_type == "cuda" else "cpu"
    total = torch.as_tensor(counts, dtype=torch.float64, device=device).clone()
    dist.all_reduce(total)
    return total
