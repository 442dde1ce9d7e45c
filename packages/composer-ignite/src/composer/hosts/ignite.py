"""`IgniteRun`: our algorithms in the engines of PyTorch-Ignite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from ignite.engine import Engine, Events, State, create_supervised_evaluator, create_supervised_trainer
from ignite.engine.deterministic import DeterministicEngine
from ignite.utils import convert_tensor
from torch.nn.parallel import DistributedDataParallel

from composer.core import (
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
from composer.loop.hosted_run import algorithms_in
from composer.loop.position import set_epoch
from composer.loop.skin import UNAVAILABLE, conflicts, hooks_by_event, missing_loss, raise_all
from composer.models.base import total_loss
from composer.utils.misc import needs_closure

_FEATURES: dict[Event | str, str] = {
    **UNAVAILABLE,
    SCALES_SCHEDULE: "Set `max_duration`, `max_epochs` and the schedules of Ignite.",
}
_HOOKS = hooks_by_event(
    INIT="the constructor",
    AFTER_LOAD="STARTED",
    ITERATION_START="EPOCH_STARTED",
    BEFORE_DATALOADER="prepare_batch",
    BEFORE_TRAIN_BATCH="model_fn",
    AFTER_BACKWARD="the optimizer's step",
    BATCH_END="ITERATION_COMPLETED",
    EPOCH_END="EPOCH_COMPLETED",
    FIT_END="COMPLETED",
    EVAL_BEFORE_ALL="run of the evaluator",
    EVAL_BATCH_START="model_fn of the evaluator",
    EVAL_END="run of the evaluator",
    PREDICT_START="",
)


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
    after the last batch that was trained on. So does another `trainer.run` after an exception, with the same
    `max_epochs`.

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
        self._algorithms, self._precision = algorithms_in(algorithms), Precision(precision)
        required: dict[str, tuple[Any, str]] = {
            "optimizer": (optimizer, "torch.optim.AdamW(model.parameters())"),
            "max_duration": (max_duration, "'10ep'"),
        }
        problems = [
            f"`{name}` must be given, got None. Pass for example `{name}={example}`."
            for name, (value, example) in required.items()
            if value is None
        ]
        if self._precision is Precision.AMP_FP16:
            problems.append(
                "`precision` must not be 'amp_fp16', which needs a scaler. Use 'amp_bf16', or "
                "`create_supervised_trainer(amp_mode='amp', scaler=True)`."
            )
        raise_all([*problems, *missing_loss(model, loss), *conflicts(self._algorithms, _FEATURES)])
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
            hooks=_HOOKS,
        )
        self.run.init()
        self.optimizers = self.run.take_optimizers()
        self.optimizers[0].register_step_pre_hook(self._before_step)
        if len(self.optimizers) > 1:
            self.optimizers[0].register_step_post_hook(self._after_step)
        self._trainer: Engine | None = None
        self._batch: Any = None
        self._data: Any = None  # the data of the last `trainer.run`
        self._loss: torch.Tensor | None = None  # set from the forward pass until the backward pass is announced

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
        run, problems, features = self.run, list[str](), dict[Event | str, str]()
        if amp_mode not in (None, "amp"):
            problems.append(f"`amp_mode` must be 'amp' or None, got {amp_mode!r}. Use `precision='amp_bf16'`.")
        if amp_mode is not None and self._precision is not Precision.FP32:
            problems.append(
                f"`amp_mode` must be None with `precision={self._precision.value!r}`, got {amp_mode!r}. Use one."
            )
        if isinstance(model, DistributedDataParallel) and run.find_unused_parameters > model.find_unused_parameters:
            problems.append(
                "`model` must look for unused parameters, since an algorithm leaves some unused. Wrap it with "
                "`find_unused_parameters=run.find_unused_parameters`."
            )
        if scaler:
            reason = "The scaler of `amp_mode` steps one plain optimizer. Use `precision='amp_bf16'`."
            features = dict.fromkeys((WRAPS_OPTIMIZER, REPLACES_OPTIMIZER), reason)
        raise_all([*problems, *conflicts(self._algorithms, features)])
        run.reconfigure(accumulate=gradient_accumulation_steps, precision=self._precision)
        if model is not None:
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
        ):
            trainer.add_event_handler(event, handler)
        original = trainer.run

        @functools.wraps(original)  # a handler of EXCEPTION_RAISED would hide errors
        def run_trainer(data: Any = None, *args: Any, **kwargs: Any) -> Any:
            try:
                result = original(self._continued(data), *args, **kwargs)
            except BaseException as error:
                run.describe_failure(error)
                run.abort()
                trainer._internal_run_generator = None  # otherwise, the next call would end immediately
                raise
            # Only after an interruption, Ignite keeps the generator, and continues it in the next call.
            (run.abort if trainer._internal_run_generator is None else run.pause)()
            return result

        trainer.run = run_trainer  # type: ignore[method-assign]
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
        original = evaluator.run

        @functools.wraps(original)
        def run_evaluator(data: Any = None, *args: Any, **kwargs: Any) -> Any:
            with self.run.evaluation([] if data is None else data, label):
                return original(data, *args, **kwargs)

        evaluator.run = run_evaluator  # type: ignore[method-assign]

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
        repeats = run.replays and needs_closure(optimizer)
        return ((optimizer, run.closure(self._repeat_pass)), {}) if repeats else None

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
        raise_all(_problems(run, state))
        assert state.epoch_length is not None, "it was checked"
        state.iteration = run.state.timestamp.batch.value * run.accumulate
        state.epoch = state.iteration // state.epoch_length
        run.begin_fit([] if self._data is None else self._data)
        run.state.dataloader_len = state.epoch_length // run.accumulate
        self._loss = None
        run.catch_up(state.epoch)

    def _start_epoch(self, engine: Engine) -> None:
        self.run.begin_epoch()
        set_epoch(self._data, self.run.state.timestamp.epoch.value)

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

    def _continued(self, data: Any) -> Any:
        """Return the data of `trainer.run`, without the batches of the epoch that were trained on."""
        run, self._data = self.run, data
        done = run.state.timestamp.batch_in_epoch.value * run.accumulate
        # Ignite continues an interrupted iteration, and a `DeterministicEngine` skips batches itself.
        if not done or data is None or run.in_epoch or isinstance(self._trainer, DeterministicEngine):
            return data
        return _Continued(data, done)

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
        if self.run.in_epoch and self._trainer is not None and self._trainer.state.iteration % self.run.accumulate:
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


def _problems(run: HostedRun, state: State) -> Iterator[str]:
    """Yield a message for each setting that keeps a trainer from training until the end of the run.

    Args:
        run: The run.
        state: The state of the trainer.
    """
    duration, length, batches = run.state.max_duration, state.epoch_length, run.state.timestamp.batch.value
    if run.is_over():
        yield (
            f"`max_duration` must be longer than what is trained, got {str(duration)!r}. To train longer, set "
            f"`run.run.state.max_duration`, for example to '4ep'. For another run, create another `IgniteRun`."
        )
    elif duration is not None and duration.unit is TimeUnit.EPOCH and state.max_epochs not in (None, duration.value):
        yield (
            f"`max_epochs` must be {duration.value}, the `max_duration` of the run, got {state.max_epochs}. Algorithms "
            f"act at fractions of the run."
        )
    if length is None or length % run.accumulate:
        yield (
            f"`epoch_length` must be a multiple of `gradient_accumulation_steps={run.accumulate}`, got {length}. "
            f"Ignite would make a step of the batches of two epochs."
        )
    elif duration is not None and duration.unit is TimeUnit.BATCH and state.max_iters is None:
        epochs = -(-duration.value * run.accumulate // length)
        if (state.max_epochs or 0) < epochs:
            yield (
                f"`max_epochs` must be at least {epochs}, so that `max_duration` {str(duration)!r} is reached in "
                f"epochs of {length} batches, got {state.max_epochs}. Pass `max_epochs={epochs}`."
            )
    if state.iteration > (batches + 1) * run.accumulate:  # a step that failed is counted by Ignite only
        yield (
            f"The run must continue where the trainer does, but is at iteration {batches * run.accumulate}, and the "
            f"trainer at {state.iteration}. Save and load all of `run.to_save(trainer)`."
        )
