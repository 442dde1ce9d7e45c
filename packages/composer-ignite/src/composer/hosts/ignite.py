"""`IgniteRun`: our algorithms in the engines of PyTorch-Ignite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from ignite.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from ignite.engine.deterministic import DeterministicEngine
from ignite.utils import convert_tensor
from torch.nn.parallel import DistributedDataParallel

from composer.core import (
    CHANGES_BATCH_SIZE,
    REPLACES_MODEL,
    REPLACES_OPTIMIZER,
    SCALES_SCHEDULE,
    WRAPS_OPTIMIZER,
    Algorithm,
    Callback,
    Event,
    Plan,
    Precision,
    TimeUnit,
)
from composer.core.time import TimeInput
from composer.loggers import LoggerDestination
from composer.loop import HostedRun
from composer.models import ComposerModel
from composer.models.base import total_loss
from composer.utils.misc import needs_closure

_FEATURES: dict[Event | str, str] = {
    REPLACES_MODEL: "Pass the model that you want to train to `IgniteRun`.",
    SCALES_SCHEDULE: "Set `max_duration`, `max_epochs` and the schedules of Ignite.",
    CHANGES_BATCH_SIZE: "Ignite counts the batches of an epoch before training. Use the `Trainer` of composer.",
}
_HOOKS = {
    **dict.fromkeys((Event.INIT, Event.BEFORE_LOAD), "the constructor"),
    **dict.fromkeys((Event.AFTER_LOAD, Event.FIT_START), "STARTED"),
    **dict.fromkeys((Event.ITERATION_START, Event.EPOCH_START), "EPOCH_STARTED"),
    **dict.fromkeys((Event.BEFORE_DATALOADER, Event.AFTER_DATALOADER, Event.BATCH_START), "prepare_batch"),
    **dict.fromkeys((Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD, Event.AFTER_FORWARD), "model_fn"),
    **dict.fromkeys((Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.BEFORE_BACKWARD), "model_fn"),
    **dict.fromkeys((Event.AFTER_BACKWARD, Event.AFTER_TRAIN_BATCH), "the optimizer's step"),
    **dict.fromkeys((Event.BATCH_END, Event.BATCH_CHECKPOINT), "ITERATION_COMPLETED"),
    **dict.fromkeys((Event.EPOCH_END, Event.EPOCH_CHECKPOINT), "EPOCH_COMPLETED"),
    Event.FIT_END: "COMPLETED",
    **dict.fromkeys((Event.EVAL_BEFORE_ALL, Event.EVAL_STANDALONE_START, Event.EVAL_START), "STARTED of the evaluator"),
    **dict.fromkeys((Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END, Event.EVAL_END), "COMPLETED of the evaluator"),
    **dict.fromkeys((Event.EVAL_BATCH_START, Event.EVAL_BEFORE_FORWARD), "model_fn of the evaluator"),
    **dict.fromkeys((Event.EVAL_AFTER_FORWARD, Event.EVAL_BATCH_END), "model_fn of the evaluator"),
}


class IgniteRun:
    """Runs algorithms in the engines of PyTorch-Ignite, which it creates as `create_supervised_trainer` does.

    A training program is::

        run = IgniteRun(net, [MixUp(), EMA()], optimizer=optimizer, loss=loss, max_duration="2ep")
        trainer = run.create_supervised_trainer()
        evaluator = run.create_supervised_evaluator(metrics={"accuracy": Accuracy()})
        trainer.run(loader, max_epochs=2)

    With the same seed and the same batches the weights equal those of composer's own `Trainer`, bit for bit. An
    optimizer that needs several gradients per step (`SAM`) gets them by repeating the passes of the step.

    Ignite divides the loss of each batch by `gradient_accumulation_steps`, and DDP averages ranks, so that batches
    count the same in a step, however many samples or labels they have. `Trainer` and `HostedRun` weight them by these.

    `Checkpoint(run.to_save(trainer), ...)` saves the state of the run, and the weights that algorithms want saved, such
    as averages. `Checkpoint.load_objects(run.to_save(trainer), checkpoint)` restores both; `trainer.run` then continues
    after the last batch that was trained on. So does another `trainer.run` after an exception.

    Args:
        model: A `ComposerModel`, which has a loss; or any module, with `loss`.
        algorithms: The algorithms. They change the model and the optimizer in the constructor.
        optimizer: The optimizer.
        max_duration: The length of the run: a time string, a `Time` or a number of epochs. The trainer is terminated
            when it is reached.
        forward: `forward(module, batch) -> outputs`. None: `module(inputs)`, the first part of the batch.
        loss: `loss(outputs, batch) -> loss`; with an argument `reduction` if an algorithm needs the loss per example.
        precision: A `Precision` or its name. Outputs and loss are computed in it. For fp16, use "fp32" and `amp_mode`.
        callbacks: Callbacks of composer.
        loggers: Loggers of composer.
        seed: The seed of the random numbers of training, which are kept apart from the global ones.

    Attributes:
        run: The `HostedRun`.
        optimizers: The optimizer, as algorithms have wrapped it, and those that algorithms have added.

    Raises:
        ConflictError: Ignite does not support an algorithm.
        TypeError: `model` is not a module.
        ValueError: `optimizer` or `max_duration` is None, there is no loss, or `precision` is fp16.

    Example:
        >>> net = torch.nn.Linear(3, 2)
        >>> run = IgniteRun(
        ...     net,
        ...     optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        ...     loss=lambda outputs, batch: torch.nn.functional.cross_entropy(outputs, batch[1]),
        ...     max_duration="2ep",
        ... )
        >>> trainer = run.create_supervised_trainer()
        >>> trainer.run([(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))], max_epochs=2).iteration
        2
    """

    def __init__(
        self,
        model: torch.nn.Module,
        algorithms: Algorithm | Sequence[Algorithm] = (),
        *,
        optimizer: torch.optim.Optimizer,
        max_duration: TimeInput,
        forward: Callable[[Any, Any], Any] | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        precision: str | Precision = Precision.FP32,
        callbacks: Callback | Sequence[Callback] = (),
        loggers: LoggerDestination | Sequence[LoggerDestination] = (),
        seed: int = 0,
    ) -> None:
        for name, value, example in (
            ("optimizer", optimizer, "torch.optim.AdamW(model.parameters())"),
            ("max_duration", max_duration, "'10ep'"),
        ):
            if value is None:
                raise ValueError(f"`{name}` must be given, got None. Pass for example `{name}={example}`.")
        self._precision = Precision(precision)
        if self._precision is Precision.AMP_FP16:
            raise ValueError(
                "`precision` must not be 'amp_fp16', which needs a scaler. Use 'amp_bf16', or "
                "`create_supervised_trainer(amp_mode='amp', scaler=True)`."
            )
        if loss is None and _is_plain(model):
            raise ValueError(
                f"`loss` must be given for a model that is not a `ComposerModel`, got {type(model).__name__}. Pass "
                f"`loss=lambda outputs, batch: ...`."
            )
        self.run = HostedRun(
            model,
            algorithms,
            optimizers=optimizer,
            max_duration=max_duration,
            forward=forward,
            loss=loss,
            precision=precision,
            callbacks=callbacks,
            loggers=loggers,
            seed=seed,
            unavailable=_FEATURES,
            hooks=_HOOKS,
        )
        self.run.init()
        self.optimizers = self.run.take_optimizers()
        self.optimizers[0].register_step_pre_hook(self._before_step)
        if len(self.optimizers) > 1:
            self.optimizers[0].register_step_post_hook(self._after_step)
        self._trainer: Engine | None = None
        self._batch: Any = None
        self._repeats = False  # the optimizer computes several gradients in a step
        self._loss: torch.Tensor | None = None  # of the last batch, until its backward pass is announced
        self._is_training = self._is_evaluating = self._is_interrupted = self._is_completed = False

    @property
    def model(self) -> Any:
        """The model, as algorithms have changed it."""
        return self.run.model

    @property
    def find_unused_parameters(self) -> bool:
        """True if parameters may get no gradient: the argument for `DistributedDataParallel`."""
        return self.run.find_unused_parameters

    # ---- the engines ----

    def create_supervised_trainer(
        self,
        model: torch.nn.Module | None = None,
        *,
        device: str | torch.device | None = None,
        non_blocking: bool = False,
        prepare_batch: Callable[[Any, Any, bool], Any] = convert_tensor,
        output_transform: Callable[[Any, Any, Any, torch.Tensor], Any] | None = None,
        deterministic: bool = False,
        amp_mode: str | None = None,
        scaler: Any = False,
        gradient_accumulation_steps: int = 1,
    ) -> Engine:
        """Create the engine that trains, like `ignite.engine.create_supervised_trainer`, and announce events from it.

        `model_fn` and `loss_fn` are those of the run; `x` and `y` in `output_transform` are the parts of a batch that
        is a pair; otherwise both are the batch.

        Args:
            model: A wrapped form of the model, such as a `DistributedDataParallel`; None: the model.
            device: The device to move batches to.
            non_blocking: Move them asynchronously.
            prepare_batch: `prepare_batch(batch, device, non_blocking)` returns the batch for the algorithms.
            output_transform: Computes `engine.state.output` from `x, y, y_pred, loss`. None: `loss.item()`.
            deterministic: Create a `DeterministicEngine`, which seeds the global generators for each epoch.
            amp_mode: "amp" for float16 on CUDA, or None.
            scaler: A `GradScaler` for "amp", or True.
            gradient_accumulation_steps: Batches per step of the optimizer; a divisor of the length of an epoch.

        Raises:
            ConflictError: An algorithm does not work with these arguments.
            RuntimeError: There is a trainer already.
            ValueError: `amp_mode` is unknown or set together with `precision`, or `model` does not look for unused
                parameters, although an algorithm leaves some unused.
        """
        if self._trainer is not None:
            raise RuntimeError("`create_supervised_trainer` must be called once. Create a new `IgniteRun` for another.")
        if amp_mode not in (None, "amp"):
            raise ValueError(f"`amp_mode` must be 'amp' or None, got {amp_mode!r}. Use `precision='amp_bf16'`.")
        if amp_mode is not None and self._precision is not Precision.FP32:
            raise ValueError(
                f"`amp_mode` must be None with `precision={self._precision.value!r}`, got {amp_mode!r}. Use one."
            )
        features = dict(_FEATURES)
        if scaler:
            for effect in (WRAPS_OPTIMIZER, REPLACES_OPTIMIZER):
                features[effect] = "The scaler of `amp_mode` steps one plain optimizer. Use `precision='amp_bf16'`."
        run = self.run
        run.reconfigure(accumulate=gradient_accumulation_steps, precision=self._precision, unavailable=features)
        if model is not None:
            if isinstance(model, DistributedDataParallel) and run.find_unused_parameters > model.find_unused_parameters:
                raise ValueError(
                    "`model` must look for unused parameters, since an algorithm leaves some unused. Wrap it with "
                    "`find_unused_parameters=run.find_unused_parameters`."
                )
            run.use_model(model)
        options: dict[str, Any] = {} if output_transform is None else {"output_transform": output_transform}
        trainer = create_supervised_trainer(
            run.model if model is None else model,
            self.optimizers[0],
            self._get_loss,
            device=device,
            non_blocking=non_blocking,
            prepare_batch=functools.partial(self._prepare, prepare_batch, run.after_dataloader),
            model_fn=self._compute_loss,
            deterministic=deterministic,
            amp_mode=amp_mode,
            scaler=scaler,
            gradient_accumulation_steps=gradient_accumulation_steps,
            **options,
        )
        for event, handler in (
            (Events.STARTED, self._start),
            (Events.EPOCH_STARTED, self._start_epoch),
            (Events.ITERATION_COMPLETED, self._complete_iteration),
            (Events.EPOCH_COMPLETED, self._complete_epoch),
            (Events.COMPLETED, self._complete),
            (Events.INTERRUPT, self._interrupt),
        ):
            trainer.add_event_handler(event, handler)
        _run_finally(trainer, self._leave_training, self._continued, functools.partial(self._fail, trainer))
        self._trainer = trainer
        return trainer

    def create_supervised_evaluator(
        self,
        *,
        metrics: dict[str, Any] | None = None,
        device: str | torch.device | None = None,
        non_blocking: bool = False,
        prepare_batch: Callable[[Any, Any, bool], Any] = convert_tensor,
        output_transform: Callable[[Any, Any, Any], Any] | None = None,
        label: str = "eval",
    ) -> Engine:
        """Create an engine that evaluates, like `ignite.engine.create_supervised_evaluator`, with all algorithms.

        Args:
            metrics: Metrics of Ignite, computed from `(y_pred, y)`.
            device: The device to move batches to.
            non_blocking: Move them asynchronously.
            prepare_batch: `prepare_batch(batch, device, non_blocking)` returns the batch for the algorithms.
            output_transform: Computes `engine.state.output` from `x, y, y_pred`. None: `(y_pred, y)`.
            label: The name of the data.
        """
        options: dict[str, Any] = {} if output_transform is None else {"output_transform": output_transform}
        evaluator = create_supervised_evaluator(
            self.run.model,
            metrics=metrics,
            device=device,
            non_blocking=non_blocking,
            prepare_batch=functools.partial(self._prepare, prepare_batch, lambda batch: batch),
            model_fn=lambda model, x: self.run.eval_forward(self._batch),
            **options,
        )
        self.attach_evaluator(evaluator, label)
        return evaluator

    def attach_evaluator(self, evaluator: Engine, label: str = "eval") -> None:
        """Announce the evaluations of a custom engine, so that it evaluates averages if an algorithm keeps them.

        Args:
            evaluator: The engine.
            label: The name of its data.
        """

        def start(engine: Engine) -> None:
            self.run.begin_evaluation(_iterable(engine.state.dataloader), label)
            self._is_evaluating = True

        evaluator.add_event_handler(Events.STARTED, start)
        evaluator.add_event_handler(Events.COMPLETED, lambda engine: self._leave_evaluation())
        _run_finally(evaluator, self._leave_evaluation)

    # ---- the functions of the trainer ----

    def _prepare(
        self, prepare: Callable[..., Any], announce: Callable[[Any], Any], batch: Any, device: Any, non_blocking: bool
    ) -> Any:
        self._batch = batch = announce(prepare(batch, device, non_blocking))
        return batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, batch)

    def _compute_loss(self, model: torch.nn.Module, x: Any) -> Any:
        self._loss = total_loss(self.run.loss(self._batch))
        return self.run.state.outputs

    def _get_loss(self, y_pred: Any, y: Any) -> Any:
        return self._loss

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Announce the events after the backward pass, and give the optimizer a closure if it needs one."""
        run = self.run
        if self._loss is None:
            return None  # the user's own step
        self._after_backward()
        run.after_gradients()
        return ((optimizer, run.closure(self._repeat_pass)), {}) if self._repeats else None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Step the optimizers that algorithms have added, which the trainer does not know."""
        for each in self.optimizers[1:]:
            each.step()
            each.zero_grad()

    def _repeat_pass(self, batch: Any) -> None:
        """Repeat a forward and backward pass of the step."""
        run = self.run
        (total_loss(run.loss(batch)) / run.accumulate).backward()  # type: ignore[no-untyped-call]
        run.after_backward()

    def _after_backward(self) -> None:
        if self._loss is not None:
            self._loss = None
            self.run.after_backward()

    # ---- the handlers of the trainer ----

    def _start(self, engine: Engine) -> None:
        run, state = self.run, engine.state
        if run.is_over():
            raise ValueError(
                f"`max_duration` must be longer than what is trained, got {str(run.state.max_duration)!r}. To train "
                f"longer, set `run.run.state.max_duration`, for example to '4ep'. For another run, create another "
                f"`IgniteRun`."
            )
        duration = run.state.max_duration
        if duration is not None and duration.unit is TimeUnit.EPOCH and state.max_epochs not in (None, duration.value):
            raise ValueError(
                f"`max_epochs` must be {duration.value}, the `max_duration` of the run, got {state.max_epochs}. "
                f"Algorithms act at fractions of the run."
            )
        if state.epoch_length is None or state.epoch_length % run.accumulate:
            raise ValueError(
                f"`epoch_length` must be a multiple of `gradient_accumulation_steps={run.accumulate}`, got "
                f"{state.epoch_length}. Ignite would make a step of the batches of two epochs."
            )
        if duration is not None and duration.unit is TimeUnit.BATCH:
            epochs = -(-duration.value * run.accumulate // state.epoch_length)
            if (state.max_epochs or 0) < epochs and state.max_iters is None:
                raise ValueError(
                    f"`max_epochs` must be at least {epochs}, so that `max_duration` {str(duration)!r} is reached in "
                    f"epochs of {state.epoch_length} batches, got {state.max_epochs}. Pass `max_epochs={epochs}`."
                )
        now = run.state.timestamp
        if self._is_completed and state.iteration == 0:  # after a run that has ended, Ignite starts counting again
            self._set_progress(state)
        if state.iteration != now.batch * run.accumulate:
            raise ValueError(
                f"The trainer must continue where the run does, but is at iteration {state.iteration}, and the run at "
                f"{now.batch.value * run.accumulate}. Save and load all of `run.to_save(trainer)`."
            )
        run.begin_fit(_iterable(_whole(state.dataloader)))
        run.state.dataloader_len = state.epoch_length // run.accumulate
        self._is_training, self._loss = True, None
        self._repeats = needs_closure(self.optimizers[0])
        run.catch_up(state.iteration // state.epoch_length)

    def _start_epoch(self, engine: Engine) -> None:
        run = self.run
        run.begin_epoch()
        _set_epoch(engine.state.dataloader, run)

    def _complete_iteration(self, engine: Engine) -> None:
        run = self.run
        self._after_backward()
        if engine.state.iteration % run.accumulate == 0:
            run.end_batch()
            if run.is_over() and engine.state.iteration % (engine.state.epoch_length or 1):
                engine.terminate()

    def _complete_epoch(self, engine: Engine) -> None:
        self.run.end_epoch()
        if self.run.is_over() and engine.state.epoch != engine.state.max_epochs:
            engine.terminate()

    def _complete(self, engine: Engine) -> None:
        if engine.state.iteration % self.run.accumulate == 0:  # else another handler has ended the run within a step
            self.run.end_fit()
            self._is_training, self._is_completed = False, True

    def _interrupt(self, engine: Engine) -> None:
        self.run.pause()
        self._is_interrupted = True

    def _continued(self, loader: Any) -> Any:
        """Return the data of `trainer.run`, without the batches of the epoch that were trained on."""
        run = self.run
        done = run.state.timestamp.batch_in_epoch.value * run.accumulate
        if loader is None or self._is_training:
            return loader
        _set_epoch(loader, run)  # workers begin to read before the epoch starts
        # A `DeterministicEngine` skips them itself.
        return _Continued(loader, done) if done and not isinstance(self._trainer, DeterministicEngine) else loader

    def _fail(self, trainer: Engine, error: BaseException) -> None:
        """After an exception, let the next `trainer.run` continue from the last step that was finished."""
        self.run.describe_failure(error)
        trainer._internal_run_generator = None  # else, the next `run` would end immediately
        if self._is_training:
            self._set_progress(trainer.state)

    def _set_progress(self, state: Any) -> None:
        """Set the counters of the trainer to those of the run."""
        run = self.run
        state.iteration = run.state.timestamp.batch.value * run.accumulate
        state.epoch = state.iteration // state.epoch_length

    def _leave_training(self) -> None:
        if self._is_training and not self._is_interrupted:
            self.run.abort()
            self._is_training, self._loss = False, None
        self._is_interrupted = False

    def _leave_evaluation(self) -> None:
        if self._is_evaluating:
            self._is_evaluating = False
            self.run.end_evaluation()

    # ---- saving ----

    def to_save(self, trainer: Engine) -> dict[str, Any]:
        """Return the objects for Ignite's `Checkpoint`, in the order in which they must be loaded.

        Args:
            trainer: The trainer.
        """
        names = ["optimizer", *(f"optimizer_{i}" for i in range(1, len(self.optimizers)))]
        optimizers = dict(zip(names, self.optimizers, strict=True))
        return {"model": _SavedModel(self.run), "composer": self, **optimizers, "trainer": trainer}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, without the model and the optimizers.

        Raises:
            RuntimeError: A step is not finished: its gradients would not be saved.
        """
        if self._is_training and self._trainer is not None and self._trainer.state.iteration % self.run.accumulate:
            raise RuntimeError(
                f"`Checkpoint` must be saved between two steps: the gradients of a step that is not finished are not "
                f"saved. Save it at `Events.ITERATION_COMPLETED(every={self.run.accumulate})`, or after an epoch."
            )
        with self.run.saving():
            return self.run.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the run: after the weights of the model, before the states of the optimizers.

        Args:
            state_dict: The result of `state_dict`.
        """
        self.run.load_state_dict(state_dict)

    def explain(self) -> Plan:
        """Return what acts at each event, in which order and why, and the part of Ignite that announces it."""
        return self.run.explain()


class _SavedModel:
    """The weights of a model that algorithms want saved.

    Args:
        run: The run.
    """

    def __init__(self, run: HostedRun) -> None:
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        with self._run.saving():
            weights: dict[str, Any] = self._run.model.state_dict()
            return weights

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._run.model.load_state_dict(state_dict)


class _Continued:
    """A loader whose first iteration skips the batches that were trained on.

    Args:
        loader: The loader.
        done: The number of batches that were trained on.
    """

    def __init__(self, loader: Any, done: int) -> None:
        self.loader, self._done = loader, done

    def __iter__(self) -> Iterator[Any]:
        done, self._done = self._done, 0
        return islice(self.loader, done, None)

    def __len__(self) -> int:
        return len(self.loader)


def _whole(loader: Any) -> Any:
    """Return the loader that a `_Continued` wraps, or the loader itself."""
    return loader.loader if isinstance(loader, _Continued) else loader


def _set_epoch(loader: Any, run: HostedRun) -> None:
    set_epoch = getattr(getattr(_whole(loader), "sampler", None), "set_epoch", None)
    if set_epoch is not None:
        set_epoch(run.state.timestamp.epoch.value)


def _run_finally(
    engine: Engine,
    leave: Callable[[], None],
    change: Callable[[Any], Any] = lambda data: data,
    fail: Callable[[BaseException], None] = lambda error: None,
) -> None:
    """Call `leave` after each `engine.run`, even if it fails: a handler of EXCEPTION_RAISED would hide the error.

    Args:
        engine: The engine.
        leave: Called at the end.
        change: Applied to the data of `engine.run`.
        fail: Called with an exception, before `leave`.
    """
    original = engine.run

    @functools.wraps(original)
    def run(data: Any = None, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(change(data), *args, **kwargs)
        except BaseException as error:
            fail(error)
            raise
        finally:
            leave()

    engine.run = run  # type: ignore[method-assign]


def _is_plain(model: Any) -> bool:
    return isinstance(model, torch.nn.Module) and not isinstance(model, ComposerModel)


def _iterable(loader: Any) -> Iterable[Any]:
    return [] if loader is None else loader
