"""`Trainer`: trains, evaluates and predicts with composed algorithms."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch

from composer.core import (
    Algorithm,
    Callback,
    Engine,
    Evaluator,
    Event,
    Precision,
    State,
    Time,
    Timestamp,
)
from composer.core.passes import PassInput
from composer.devices import Device
from composer.loggers import Logger, LoggerDestination
from composer.models import ComposerModel
from composer.trainer import _construction as build
from composer.trainer._construction import generate_run_name as _generate_run_name
from composer.trainer._evaluation import Evaluation
from composer.trainer._fit import FitLoop
from composer.trainer._hparams import log_standard_hparams
from composer.trainer._microbatch import adjust_device_train_microbatch_size as _adjust_device_train_microbatch_size
from composer.trainer._microbatch import is_cuda_oom as _is_cuda_oom
from composer.trainer._parallel import parallel_of_this_process
from composer.trainer._prediction import predict
from composer.trainer._settings import RunSettings
from composer.trainer._train_batch import BatchTrainer
from composer.trainer._train_metrics import TrainMetrics
from composer.utils import ensure_tuple, extract_hparams, get_device, reproducibility

__all__ = ["Trainer", "_adjust_device_train_microbatch_size", "_is_cuda_oom"]

TimeArgument = int | str | Time[Any]
Interval = int | str | Time[Any] | Callable[[State, Event], bool]
Loader = Any  # an iterable of batches, a DataSpec, or a dict of its arguments


class Trainer:
    """Trains a model with composed algorithms.

    Times are a number of epochs or a time string such as `"10ep"`, `"500ba"`; see `Time`. All arguments are checked
    here, before anything runs.

    Args:
        model: A `ComposerModel`; it is moved to the device. One wrapped by `torch.compile` is unwrapped, and compiled
            again when everything is in place.
        train_dataloader: The training data: an iterable of batches, a `DataSpec` or a dict of its arguments. May be
            given to `fit` instead.
        train_dataloader_label: The label of the training data.
        train_subset_num_batches: End each epoch after this many batches; -1: at the loader's end.
        max_duration: How long to train.
        algorithms: The methods to compose, in your order.
        algorithm_passes: Passes that reorder algorithms; see `Engine`.
        optimizers: One optimizer; None is `DecoupledSGDW(lr=0.1)`, with a warning.
        schedulers: Learning-rate schedulers, of `composer.optim` or of torch.
        scale_schedule_ratio: Multiplies `max_duration` and the schedules.
        step_schedulers_every_batch: Step schedulers after every batch, or after every epoch; None: after every batch
            unless one is torch's own.
        eval_dataloader: The evaluation data: as for training, or an `Evaluator`, or a sequence of either.
        eval_interval: How often to evaluate: a time, or a function of state and event; 0 is never. An `Evaluator`'s own
            interval wins.
        eval_subset_num_batches: Batches per evaluation; -1 is all.
        callbacks: Callbacks.
        loggers: Loggers.
        run_name: The run's name; None: of the environment (`COMPOSER_RUN_NAME`, `RUN_NAME`) or made up.
        progress_bar: Show a progress bar.
        log_to_console: Print metrics.
        console_stream: `"stdout"`, `"stderr"` or a text stream; where the progress bar and the console logger write.
        console_log_interval: How often to print, in epochs or batches.
        log_traces: Show in both which algorithms ran.
        auto_log_hparams: Log the arguments of this constructor as hyperparameters.
        device: `"cpu"`, `"gpu"`, `"mps"` or a `Device`; None is a GPU if there is one.
        precision: `"fp32"`, `"amp_fp16"`, `"amp_bf16"`, `"amp_fp8"`; None is fp16 on a GPU and fp32 elsewhere.
        precision_config: Arguments of the FP8 recipe.
        device_train_microbatch_size: Samples per forward and backward pass; gradients accumulate over the batch. None
            is the loader's `batch_size`; `"auto"` searches the largest that fits the GPU.
        accumulate_train_batch_on_tokens: Weigh microbatches by their loss-generating tokens, not their samples.
        seed: The seed of all randomness; None draws one.
        deterministic_mode: Use deterministic operations only.
        python_log_level: Show the library's log records from this level on (`"info"`, `"debug"`).
        compile_config: Arguments of `torch.compile`; `{}` compiles with its defaults, None does not compile.

    Attributes:
        state: The run's `State`.
        logger: Hands what is logged to the loggers.
        engine: Runs the algorithms; `print(trainer.engine.explain())` shows the plan.
        local_hparams: The logged arguments, with `auto_log_hparams`.

    Raises:
        ValueError: An argument has a value that cannot work; the message says what to do.
        TypeError: An argument is of a type that cannot work.

    Example:
        >>> from composer.testing import RandomClassificationDataset, SimpleModel
        >>> loader = torch.utils.data.DataLoader(RandomClassificationDataset(size=16), batch_size=4)
        >>> trainer = Trainer(
        ...     model=(m := SimpleModel()),
        ...     train_dataloader=loader,
        ...     max_duration="2ep",
        ...     progress_bar=False,
        ...     optimizers=torch.optim.SGD(m.parameters(), lr=0.1),
        ...     device="cpu",
        ... )
        >>> trainer.fit()
        >>> trainer.state.timestamp.batch
        Time(8, TimeUnit.BATCH)
    """

    def __init__(
        self,
        *,
        model: ComposerModel,
        train_dataloader: Loader | None = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int = -1,
        max_duration: TimeArgument | None = None,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
        algorithm_passes: PassInput = None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        schedulers: Any = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Loader | Evaluator | Sequence[Evaluator] | None = None,
        eval_interval: Interval = 1,
        eval_subset_num_batches: int = -1,
        callbacks: Callback | Sequence[Callback] | None = None,
        loggers: LoggerDestination | Sequence[LoggerDestination] | None = None,
        run_name: str | None = None,
        progress_bar: bool = True,
        log_to_console: bool = False,
        console_stream: str | TextIO = "stderr",
        console_log_interval: TimeArgument = "1ba",
        log_traces: bool = False,
        auto_log_hparams: bool = False,
        device: str | Device | None = None,
        precision: str | Precision | None = None,
        precision_config: dict[str, Any] | None = None,
        device_train_microbatch_size: float | str | None = None,
        accumulate_train_batch_on_tokens: bool = False,
        seed: int | None = None,
        deterministic_mode: bool = False,
        python_log_level: str | None = None,
        compile_config: dict[str, Any] | None = None,
    ) -> None:
        arguments = locals()
        build.set_python_log_level(python_log_level)
        self.auto_log_hparams, self.python_log_level = auto_log_hparams, python_log_level
        self.accumulate_train_batch_on_tokens = accumulate_train_batch_on_tokens
        run_device = get_device(device)
        run_precision = build.precision_of(precision, run_device)
        self._model, was_compiled = build.check_model(model)
        self._compile_config = {} if was_compiled and compile_config is None else compile_config
        self._parallel = parallel_of_this_process()
        self._build_state(
            run_device,
            run_precision,
            precision_config,
            build.build_optimizer(self._model, optimizers),
            algorithms,
            run_name if run_name is not None else _generate_run_name(),
            self._seed(seed, deterministic_mode),
        )
        destinations, watchers = build.build_loggers(
            loggers,
            callbacks,
            progress_bar=progress_bar,
            log_to_console=log_to_console,
            console_stream=console_stream,
            console_log_interval=console_log_interval,
            log_traces=log_traces,
        )
        self.local_hparams = extract_hparams(arguments) if auto_log_hparams else {}
        self._start_engine(destinations, watchers, algorithm_passes)
        settings = self._settings = RunSettings(self.state, self._model)
        settings.set_train_data(
            train_dataloader, train_dataloader_label, train_subset_num_batches, device_train_microbatch_size
        )
        settings.set_evaluators(eval_dataloader, eval_interval, eval_subset_num_batches)
        settings.set_max_duration(max_duration)
        self.logger.log_hyperparameters({"rank_zero_seed": self.state.rank_zero_seed})
        settings.set_schedulers(schedulers, scale_schedule_ratio, step_schedulers_every_batch)
        self.engine.run_event(Event.BEFORE_LOAD)
        settings.set_scaler()  # an algorithm may have wrapped the optimizer into one that needs closures
        self.engine.run_event(Event.AFTER_LOAD)
        # Surgery drew random numbers; training starts from the seed whatever algorithms did.
        reproducibility.seed_all(self.state.seed)
        self.state.model = self._parallel.wrap(self.state.model)
        if self._compile_config is not None:
            self.state.model.compile(**self._compile_config)

    def fit(
        self,
        *,
        train_dataloader: Loader | None = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int | None = None,
        duration: TimeArgument | None = None,
        reset_time: bool = False,
        schedulers: Any = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Loader | Evaluator | Sequence[Evaluator] | None = None,
        eval_subset_num_batches: int = -1,
        eval_interval: Interval = 1,
        device_train_microbatch_size: float | str | None = None,
        precision: str | Precision | None = None,
    ) -> None:
        """Train until `max_duration`, or for `duration` more. May be called again.

        Arguments that the constructor has too replace what it was given; None leaves it.

        Args:
            train_dataloader: As in the constructor.
            train_dataloader_label: As in the constructor.
            train_subset_num_batches: As in the constructor.
            duration: Train this much longer from where the run is.
            reset_time: Count time from zero again; weights, optimizer and schedulers stay.
            schedulers: As in the constructor.
            scale_schedule_ratio: As in the constructor.
            step_schedulers_every_batch: As in the constructor.
            eval_dataloader: As in the constructor.
            eval_subset_num_batches: As in the constructor.
            eval_interval: As in the constructor.
            device_train_microbatch_size: As in the constructor.
            precision: As in the constructor.

        Raises:
            ValueError: There is no optimizer, no data or no duration, or the run is already at its end.
        """
        state, settings = self.state, self._settings
        if not state.optimizers:
            raise ValueError(
                "No optimizer was specified when constructing the Trainer, and the model had no parameters then. "
                "Pass `optimizers` to the `Trainer`."
            )
        settings.replace_train_data(
            train_dataloader, train_dataloader_label, train_subset_num_batches, device_train_microbatch_size
        )
        if reset_time:
            state.timestamp = Timestamp()
        settings.set_duration(duration)
        if eval_dataloader is not None:
            settings.set_evaluators(eval_dataloader, eval_interval, eval_subset_num_batches)
        settings.set_schedulers(schedulers, scale_schedule_ratio, step_schedulers_every_batch)
        settings.compile_schedulers()
        if precision is not None:
            state.precision = build.precision_of(precision, state.device)
            settings.set_scaler()
        self._loop().run()
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def eval(
        self, eval_dataloader: Loader | Evaluator | Sequence[Evaluator] | None = None, subset_num_batches: int = -1
    ) -> None:
        """Evaluate. Results are in `state.eval_metrics` and, computed, in `state.eval_metric_values`.

        Args:
            eval_dataloader: What to evaluate; None: what the run evaluates.
            subset_num_batches: Batches to use; -1 is all.

        Raises:
            ValueError: There is nothing to evaluate.
        """
        state = self.state
        own = list(state.evaluators)
        extra: list[Evaluator] = []
        if eval_dataloader is not None:
            labels = {evaluator.label for evaluator in own}
            extra = self._settings.evaluators_of(eval_dataloader, 0, subset_num_batches)
            for evaluator in extra:
                if evaluator.label in labels:
                    warnings.warn(
                        f"The label {evaluator.label!r} is used already; its earlier results are replaced. Pass an "
                        f"`Evaluator` with a label of its own.",
                        stacklevel=2,
                    )
        evaluators = extra or own
        if not evaluators:
            raise ValueError("There is nothing to evaluate. Pass `eval_dataloader` to the `Trainer` or to `eval`.")
        state.evaluators = own + extra
        try:
            self.engine.run_event(Event.EVAL_STANDALONE_START)
            self._evaluation.run(evaluators, None if subset_num_batches == -1 else subset_num_batches)
            self.engine.run_event(Event.EVAL_STANDALONE_END)
        finally:
            state.evaluators = own

    def predict(self, dataloader: Loader, subset_num_batches: int = -1, *, return_outputs: bool = True) -> list[Any]:
        """The model's outputs over a loader.

        Args:
            dataloader: The data: an iterable of batches, a `DataSpec` or a dict of its arguments.
            subset_num_batches: Batches to use; -1 is all.
            return_outputs: Whether to keep the outputs; callbacks see them either way.

        Returns:
            The outputs of each batch, on the CPU; an empty list without `return_outputs`.

        Raises:
            ValueError: The loader has no length and no subset is given.
        """
        spec = build.data_spec_of(dataloader, "dataloader")
        return predict(self.state, self.engine, spec, subset_num_batches, return_outputs)

    def close(self) -> None:
        """Close callbacks and loggers. The Trainer cannot be used afterwards. Safe to call twice."""
        self.engine.close()
        self._parallel.barrier()

    # ---- construction ----

    def _seed(self, seed: int | None, deterministic_mode: bool) -> int:
        if deterministic_mode:
            reproducibility.configure_deterministic_mode()
        chosen = reproducibility.get_random_seed() if seed is None else seed
        reproducibility.seed_all(chosen)
        return chosen

    def _build_state(
        self,
        device: Device,
        precision: Precision,
        precision_config: dict[str, Any] | None,
        optimizer: torch.optim.Optimizer | None,
        algorithms: Any,
        run_name: str,
        seed: int,
    ) -> None:
        model = device.module_to_device(self._model)
        if optimizer is not None:
            device.optimizer_to_device(optimizer)
        for algorithm in ensure_tuple(algorithms):
            if not isinstance(algorithm, Algorithm):
                raise TypeError(f"`algorithms` must hold `Algorithm` objects, got {build.described(algorithm)}.")
        self.state = State(
            model=model,
            rank_zero_seed=seed,
            run_name=run_name,
            device=device,
            precision=precision,
            precision_config=precision_config,
            optimizers=optimizer,
            algorithms=ensure_tuple(algorithms),
        )

    def _start_engine(
        self, loggers: Sequence[LoggerDestination], callbacks: Sequence[Callback], passes: PassInput
    ) -> None:
        state = self.state
        self.logger = Logger(state, loggers)
        state.callbacks = [*loggers, *callbacks]
        self.engine = Engine(state, self.logger, passes)
        self._model.logger = self.logger
        self.engine.run_event(Event.INIT)
        # An algorithm may have replaced the model.
        self._model, _ = build.check_model(state.model)
        self._model.logger = self.logger
        log_standard_hparams(state, self.logger, self.local_hparams)
        state.train_metrics = dict(copy.deepcopy(self._model.get_metrics(is_train=True)))
        self._metrics = TrainMetrics(state, self._model, defer=self._parallel.world_size == 1)
        self._evaluation = Evaluation(state, self.engine, self.logger, self._model)

    def _loop(self) -> FitLoop:
        state, spec = self.state, self._settings.train_spec
        assert spec is not None, "`fit` checks that there is training data"
        batches = BatchTrainer(
            state, self.engine, self._model, self._parallel, self._metrics, self.accumulate_train_batch_on_tokens
        )
        return FitLoop(
            state,
            self.engine,
            self.logger,
            spec,
            batches,
            self._metrics,
            self._evaluation,
            self._parallel,
            self._settings.step_every_batch,
        )
