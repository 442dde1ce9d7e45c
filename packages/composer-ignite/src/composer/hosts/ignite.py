"""`IgniteRun`: our algorithms in the engines of PyTorch-Ignite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from ignite.engine import Engine, Events, State, create_supervised_evaluator, create_supervised_trainer
from ignite.engine.deterministic import DeterministicEngine
from ignite.utils import convert_tensor
from torch.nn.parallel import DistributedDataParallel

from composer.core import Algorithm, Callback, Event, Plan, Precision, TimeUnit, effects
from composer.core.time import TimeInput
from composer.loggers import LoggerDestination
from composer.loop import HostedRun, refusals, skin
from composer.loop.position import set_epoch
from composer.loop.swapped_weights import swap_in

_UNAVAILABLE: dict[Event | str, str] = {
    **refusals.UNAVAILABLE,
    effects.SCALES_SCHEDULE: "Set `max_duration`, `max_epochs` and the schedules of Ignite.",
}
_WITH_SCALER: dict[Event | str, str] = {
    **dict.fromkeys(
        (effects.WRAPS_OPTIMIZER, effects.REPLACES_OPTIMIZER),
        "The scaler of `amp_mode` steps one plain optimizer. Use `precision='amp_bf16'`.",
    ),
    effects.DISPLACES_WEIGHTS: "It does not see that the scaler of `amp_mode` skips steps. Use `precision='amp_bf16'`.",
}
_HOOKS = skin.hooks_by_event(
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
)


class IgniteRun:
    """Runs algorithms in the engines of PyTorch-Ignite, which it creates as `create_supervised_trainer` does.

    `Checkpoint(run.to_save(trainer), ...)` saves the state of the run, and the weights that algorithms want saved, such
    as averages. `Checkpoint.load_objects(run.to_save(trainer), checkpoint)` restores both; `trainer.run` then continues
    after the last batch that was trained on. So does another `trainer.run` after an exception, with the same
    `max_epochs`. See `HostedRun` for what holds in all loops.

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
        problems = list(refusals.missing_loss(model, loss))
        if not hasattr(optimizer, "param_groups"):
            problems.append(f"`optimizer` must be given, got {optimizer}.")
        is_known = not any(refusals.failures(lambda: Precision(precision)))  # the run refuses what is unknown
        if is_known and Precision(precision) is Precision.AMP_FP16:
            problems.append(
                "`precision` must not be 'amp_fp16', which needs a scaler. Use 'amp_bf16', or "
                "`create_supervised_trainer(amp_mode='amp', scaler=True)`."
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
            unavailable=_UNAVAILABLE,
            problems=problems,
            hooks=_HOOKS,
        )
        self._precision = self.run.state.precision
        self.optimizers = self.run.take_optimizers()
        self._steps = skin.HookedSteps(self.run, self._repeat_backward)
        self._steps.attach(self.optimizers[:1], self.optimizers[1:])
        self._trainer: Engine | None = None
        self._data: Any = None  # the data of the last `trainer.run`
        self._batch: Any = None
        self._loss: Any = None

    @property
    def model(self) -> Any:
        """The model, as algorithms have changed it."""
        return self.run.model

    @property
    def find_unused_parameters(self) -> bool:
        """True if parameters may get no gradient: the argument for `DistributedDataParallel`."""
        return self.run.find_unused_parameters

    def explain(self) -> Plan:
        """Return what acts at each event, in which order and why, and the part of Ignite that announces it."""
        return self.run.explain()

    # ---- the engines ----

    def create_supervised_trainer(
        self,
        model: torch.nn.Module | None = None,
        *,
        prepare_batch: Callable[[Any, Any, bool], Any] = convert_tensor,
        amp_mode: str | None = None,
        scaler: Any = False,
        gradient_accumulation_steps: int = 1,
        **options: Any,
    ) -> Engine:
        """Create the engine that trains, like `ignite.engine.create_supervised_trainer`, and announce events from it.

        `model_fn` and `loss_fn` are those of the run; `x` and `y` in `output_transform` are the parts of a batch that
        is a pair; otherwise both are the batch.

        Args:
            model: A wrapped form of the model, such as a `DistributedDataParallel`; None: the model.
            prepare_batch: `prepare_batch(batch, device, non_blocking)` returns the batch for the algorithms.
            amp_mode: "amp" for float16 on CUDA, or None.
            scaler: A `GradScaler` for "amp", or True.
            gradient_accumulation_steps: Batches per step of the optimizer; a divisor of the length of an epoch.
            **options: Other arguments of Ignite: `device`, `non_blocking`, `output_transform`, `deterministic`.

        Raises:
            ConflictError: An algorithm does not work with these arguments.
            RuntimeError: There is a trainer already.
            ValueError: `amp_mode` is unknown or set together with `precision`, or `model` does not look for unused
                parameters, although an algorithm leaves some unused.
        """
        if self._trainer is not None:
            raise RuntimeError("`create_supervised_trainer` must be called once. Create a new `IgniteRun` for another.")
        run, problems = self.run, list[str]()
        if amp_mode not in (None, "amp"):
            problems.append(f"`amp_mode` must be 'amp' or None, got {amp_mode!r}. Use `precision='amp_bf16'`.")
        elif amp_mode is not None and self._precision is not Precision.FP32:
            problems.append(f"`amp_mode` must be None with `precision={self._precision.value!r}`, got {amp_mode!r}.")
        if isinstance(model, DistributedDataParallel) and run.find_unused_parameters > model.find_unused_parameters:
            problems.append(
                "`model` must look for unused parameters, since an algorithm leaves some unused. Wrap it with "
                "`find_unused_parameters=run.find_unused_parameters`."
            )
        run.reconfigure(
            accumulate=gradient_accumulation_steps,
            precision=self._precision,
            unavailable=_WITH_SCALER if scaler else {},
            problems=problems,
        )
        if model is not None:
            run.use_model(model)
        self._trainer = trainer = create_supervised_trainer(
            run.model if model is None else model,
            self.optimizers[0],
            lambda y_pred, y: self._loss,
            prepare_batch=functools.partial(self._prepare, prepare_batch, run.after_dataloader),
            model_fn=self._compute_loss,
            model_transform=lambda outputs: outputs,
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
        skin.wrap(trainer, "run", self._run_trainer)  # a handler of EXCEPTION_RAISED would hide errors
        return trainer

    def create_supervised_evaluator(
        self,
        *,
        prepare_batch: Callable[[Any, Any, bool], Any] = convert_tensor,
        label: str = "eval",
        **options: Any,
    ) -> Engine:
        """Create an engine that evaluates, like `ignite.engine.create_supervised_evaluator`, with all algorithms.

        Args:
            prepare_batch: `prepare_batch(batch, device, non_blocking)` returns the batch for the algorithms.
            label: The name of the data.
            **options: Other arguments of Ignite: `metrics`, `device`, `non_blocking`, `output_transform`.
        """
        evaluator = create_supervised_evaluator(
            self.run.model,
            prepare_batch=functools.partial(self._prepare, prepare_batch, lambda batch: batch),
            model_fn=lambda model, x: self.run.eval_forward(self._batch),
            **options,
        )
        self.attach_evaluator(evaluator, label)
        return evaluator

    def attach_evaluator(self, evaluator: Engine, label: str = "eval") -> None:
        """Announce the evaluations of a custom engine on data with this name, so that it evaluates averages."""

        def run_evaluator(original: Callable[..., Any], data: Any = None, *args: Any, **kwargs: Any) -> Any:
            with self.run.evaluation([] if data is None else data, label):
                return original(data, *args, **kwargs)

        skin.wrap(evaluator, "run", run_evaluator)

    def _prepare(
        self, prepare: Callable[..., Any], announce: Callable[[Any], Any], batch: Any, device: Any, non_blocking: bool
    ) -> Any:
        self._batch = batch = announce(prepare(batch, device, non_blocking))
        return batch if isinstance(batch, (tuple, list)) and len(batch) == 2 else (batch, batch)

    def _compute_loss(self, model: torch.nn.Module, x: Any) -> Any:
        self._loss = self._steps.loss(self._batch)
        return self.run.state.outputs

    def _repeat_backward(self, loss: torch.Tensor, is_last: bool) -> None:
        (loss / self.run.accumulate).backward()  # type: ignore[no-untyped-call]

    def _run_trainer(self, original: Callable[..., Any], data: Any = None, *args: Any, **kwargs: Any) -> Any:
        run, trainer = self.run, self._trainer
        assert trainer is not None
        self._data = data
        done = run.state.timestamp.batch_in_epoch.value * run.accumulate
        # Ignite continues an interrupted iteration, and a `DeterministicEngine` skips batches itself.
        if done and data is not None and not run.in_epoch and not isinstance(trainer, DeterministicEngine):
            data = _Continued(data, done)
        try:
            result = original(data, *args, **kwargs)
        except BaseException as error:
            run.describe_failure(error)
            run.abort()
            trainer._internal_run_generator = None  # otherwise, the next call would end immediately
            raise
        # Only after an interruption, Ignite keeps the generator, and continues it in the next call.
        (run.abort if trainer._internal_run_generator is None else run.pause)()
        return result

    # ---- the handlers of the trainer ----

    def _start(self, engine: Engine) -> None:
        run, state = self.run, engine.state
        refusals.raise_all(_problems(run, state))
        assert state.epoch_length is not None, "it was checked"
        state.iteration = run.state.timestamp.batch.value * run.accumulate
        state.epoch = state.iteration // state.epoch_length
        run.begin_fit([] if self._data is None else self._data)
        run.state.dataloader_len = state.epoch_length // run.accumulate
        self._steps.clear()
        run.catch_up(state.epoch)

    def _start_epoch(self, engine: Engine) -> None:
        self.run.begin_epoch()
        set_epoch(self._data, self.run.state.timestamp.epoch.value)

    def _complete_iteration(self, engine: Engine) -> None:
        run = self.run
        self._steps.after_backward()
        if engine.state.iteration % run.accumulate == 0:
            self._steps.clear()
            run.end_batch()
            if run.is_over() and not skin.is_epoch_whole(run):
                engine.terminate()

    def _complete_epoch(self, engine: Engine) -> None:
        self.run.end_epoch()
        if self.run.is_over() and engine.state.epoch != engine.state.max_epochs:
            engine.terminate()

    def _complete(self, engine: Engine) -> None:
        if not self.run.in_step:  # otherwise, another handler has ended the run within a step
            self.run.end_fit()

    # ---- saving ----

    def to_save(self, trainer: Engine) -> dict[str, Any]:
        """Return the objects for Ignite's `Checkpoint` of a trainer, in the order in which they must be loaded."""
        run = self.run

        def weights() -> Any:
            swap_in(run.engine)  # not `saving`: Ignite writes the tensors after it has collected all states
            return run.model.state_dict()

        model = SimpleNamespace(state_dict=weights, load_state_dict=run.model.load_state_dict)
        names = ["optimizer", *(f"optimizer_{i}" for i in range(1, len(self.optimizers)))]
        optimizers = dict(zip(names, self.optimizers, strict=True))
        return {"model": model, "composer": self, **optimizers, "trainer": trainer}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, without the model and the optimizers.

        Raises:
            RuntimeError: A step is not finished: its gradients would not be saved.
        """
        if self.run.in_step:
            raise RuntimeError(
                f"`Checkpoint` must be saved between two steps: the gradients of a step that is not finished are not "
                f"saved. Save it at `Events.ITERATION_COMPLETED(every={self.run.accumulate})`, or after an epoch."
            )
        swap_in(self.run.engine)
        return self.run.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the run: after the weights of the model, before the states of the optimizers."""
        self.run.load_state_dict(state_dict)


class _Continued:
    """A loader whose first iteration skips the batches that were trained on."""

    def __init__(self, loader: Any, done: int) -> None:
        self._loader, self._done = loader, done

    def __iter__(self) -> Iterator[Any]:
        done, self._done = self._done, 0
        return islice(self._loader, done, None)

    def __len__(self) -> int:
        return len(self._loader)


def _problems(run: HostedRun, state: State) -> Iterator[str]:
    """Yield a message for each setting that keeps a trainer from training until the end of the run."""
    duration, length, batches = run.state.max_duration, state.epoch_length, run.state.timestamp.batch.value
    assert duration is not None, "the constructor requires it"
    if run.is_over():
        yield (
            f"`max_duration` must be longer than what is trained, got {str(duration)!r}. To train longer, set "
            f"`run.run.state.max_duration`, for example to '4ep'."
        )
    elif duration.unit is TimeUnit.EPOCH and state.max_epochs not in (None, duration.value):
        yield f"`max_epochs` must be {duration.value}, the `max_duration` of the run, got {state.max_epochs}."
    if length is None or length % run.accumulate:
        yield (
            f"`epoch_length` must be a multiple of `gradient_accumulation_steps={run.accumulate}`, got {length}. "
            f"Ignite would make a step of the batches of two epochs."
        )
    elif duration.unit is TimeUnit.BATCH and getattr(state, "max_iters", None) is None:  # older Ignite has none
        epochs = -(-duration.value * run.accumulate // length)
        if (state.max_epochs or 0) < epochs:
            yield f"`max_epochs` must be at least {epochs} to reach {str(duration)!r}, got {state.max_epochs}."
    if state.iteration > (batches + 1) * run.accumulate:  # a step that failed is counted by Ignite only
        yield (
            f"The run must continue where the trainer does, but is at iteration {batches * run.accumulate}, and the "
            f"trainer at {state.iteration}. Save and load all of `run.to_save(trainer)`."
        )
