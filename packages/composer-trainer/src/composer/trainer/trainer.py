"""`Trainer`: trains, evaluates and predicts with composed algorithms."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TextIO

import torch

from composer.checkpoint import IgnoreKeys, save_checkpoint
from composer.checkpoint.names import check_path
from composer.core import Algorithm, Callback, Evaluator, Event, Precision, State, Time
from composer.core.passes import PassInput
from composer.devices import Device
from composer.distributed import DDPSyncStrategy
from composer.loggers import LoggerDestination
from composer.models import ComposerModel
from composer.trainer import _construction as build
from composer.trainer._arguments import check_arguments
from composer.trainer._checkpointing import (
    LoadOptions,
    build_saver,
    check_autoresume,
    continue_logs,
    training,
    with_prefix,
)
from composer.trainer._construction import generate_run_name as _generate_run_name
from composer.trainer._data_parallel import parallel_of_this_process
from composer.trainer._microbatch import adjust_device_train_microbatch_size as _adjust_device_train_microbatch_size
from composer.trainer._microbatch import is_cuda_oom as _is_cuda_oom
from composer.trainer._parts import TrainerParts, stream_of
from composer.trainer._prediction import predict
from composer.trainer._profiling import RunsProfiler, bind_profiler
from composer.trainer._seeding import seed_run
from composer.trainer._settings import RunSettings
from composer.utils import extract_hparams, get_device
from composer.utils.parallelism import ParallelismConfig

if TYPE_CHECKING:
    from composer.inference import ExportFormat, Transform

__all__ = ["Trainer", "_adjust_device_train_microbatch_size", "_is_cuda_oom"]

TimeArgument = SupportsIndex | str | Time[Any]
Interval = SupportsIndex | str | Time[Any] | Callable[[State, Event], bool]
Loader = Any  # an iterable of batches, a DataSpec, or a dict of its arguments


class Trainer(TrainerParts):
    """Trains a model with composed algorithms.

    Times are a number of epochs or a time string such as `"10ep"`, `"500ba"`; see `Time`. Integers may be of any
    library (`np.int64(3)`); they are kept as plain ints. All arguments are checked here, before anything runs.

    Args:
        model: A `ComposerModel`; it is moved to the device. One wrapped by `torch.compile` is unwrapped, and compiled
            again when everything is in place.
        train_dataloader: The training data: an iterable of batches, a `DataSpec` or a dict of its arguments. May be
            given to `fit` instead.
        train_dataloader_label: The label of the training data.
        train_subset_num_batches: End each epoch after this many batches; -1: at the loader's end. An endless loader
            needs it if `max_duration` is in epochs: otherwise its first epoch does not end.
        max_duration: How long to train. In seconds (`"90sec"`, `"1h20m"`) it is training time, which
            `state.timestamp.total_wct` counts: loading data, training, callbacks and saving count, evaluation and what
            comes before the first batch do not, and a resumed run goes on counting where its checkpoint was. The run
            ends after the batch in which the time is up, by the clock of rank 0 on all ranks. Fractions of the run,
            such as `t_max="1dur"`, are then fractions of this time; so two runs are not equal bit for bit.
        algorithms: The methods to compose, in your order.
        algorithm_passes: Passes that reorder algorithms; see `Engine`.
        optimizers: One optimizer; None is `DecoupledSGDW(lr=0.1)`, with a warning.
        schedulers: Learning-rate schedulers, of `composer.optim` or of torch.
        scale_schedule_ratio: Multiplies `max_duration` and the schedules.
        step_schedulers_every_batch: Step schedulers after every batch, or after every epoch; None: after every batch
            unless one is torch's own.
        eval_dataloader: The evaluation data: as for training, or an `Evaluator`, or a sequence of either. Several
            loaders are labelled "eval", "eval_1", "eval_2" and so on, with a warning.
        eval_interval: How often to evaluate: a time, or a function of state and event; 0 is never. An `Evaluator`'s own
            interval wins.
        eval_subset_num_batches: Batches per evaluation; -1: until the loader ends. An endless loader, which cannot be
            told from others without a length, needs a number.
        callbacks: Callbacks.
        loggers: Loggers.
        run_name: The run's name; None: of the environment (`COMPOSER_RUN_NAME`, `RUN_NAME`) or made up.
        progress_bar: Show a progress bar.
        log_to_console: Print metrics.
        console_stream: `"stdout"`, `"stderr"` or a text stream; where the progress bar and the console logger write. In
            a notebook, which shows `sys.stderr` as an error, `"stderr"` is also stdout.
        console_log_interval: How often to print, in epochs or batches.
        log_traces: Show in both which algorithms ran.
        auto_log_hparams: Log the arguments of this constructor as hyperparameters.
        device: `"cpu"`, `"gpu"`, `"mps"` or a `Device`; None is a GPU if there is one.
        precision: `"fp32"`, `"amp_fp16"`, `"amp_bf16"`, `"amp_fp8"`; None is fp16 on a GPU and fp32 elsewhere.
        precision_config: Arguments of the FP8 recipe.
        device_train_microbatch_size: Samples per forward and backward pass; gradients accumulate over the batch. None
            is the loader's `batch_size`; `"auto"` searches the largest that fits the GPU.
        accumulate_train_batch_on_tokens: Weigh microbatches by their loss-generating tokens, not their samples.
        seed: The seed of all randomness, rank r trains with `seed + r`; None draws one.
        deterministic_mode: Use deterministic operations only.
        dist_timeout: Seconds that a rank waits for the others before it fails.
        ddp_sync_strategy: When ranks exchange gradients: `"single_auto_sync"` once per batch, `"multi_auto_sync"` with
            every microbatch, `"forced_sync"` after the last one. None: with every microbatch if an algorithm leaves
            parameters unused, else once per batch.
        parallelism_config: Divide the model among ranks: `{"fsdp": {...}, "tp": {...}}` with arguments of `FSDPConfig`
            and `TPConfig`, or a `ParallelismConfig`; None: every rank has a whole copy.
        profiler: Profiles some batches, see `composer.profiler.Profiler`. It slows them down, and does not go with the
            microbatch size `"auto"`.
        python_log_level: Show the library's log records from this level on (`"info"`, `"debug"`).
        compile_config: Arguments of `torch.compile`; `{}` compiles with its defaults, None does not compile.
        load_path: A checkpoint to load: a path or a URI; may hold `{run_name}` and `{rank}`.
        load_object_store: Where `load_path` is: an object store, or a logger that keeps files.
        load_weights_only: Load the model only, and train from the beginning.
        load_strict_model_weights: Whether the model's keys must match those of the checkpoint exactly.
        load_progress_bar: Show the progress of downloads.
        load_ignore_keys: What not to load: patterns of paths such as `"state/optimizers/*"`, or a function that removes
            keys.
        load_exclude_algorithms: Class names of algorithms not to apply although the checkpoint's run had them.
        save_folder: Where to save checkpoints: a folder or a URI (`s3://...`); None saves none. This and the next three
            are format strings; see `CheckpointSaver`.
        save_filename: The name of a checkpoint.
        save_latest_filename: The name of the link to the latest checkpoint; None makes none.
        save_overwrite: Whether files in `save_folder` that are newer than the run may be replaced.
        save_interval: How often to save: a time, or a function of state and event.
        save_weights_only: Save the model only.
        save_ignore_keys: What not to save, as `load_ignore_keys`.
        save_num_checkpoints_to_keep: Newest checkpoints to keep; -1 keeps all.
        save_metrics: Save the metrics' states, too.
        save_num_best_checkpoints_to_keep: Best checkpoints to keep besides.
        save_monitor: The metric that tells the best: `"eval/MulticlassAccuracy"`.
        save_monitor_mode: `"max"` or `"min"`.
        save_async: Write checkpoints in the background, from a copy in host memory.
        delivery_timeout: How many seconds the end of the run waits in all for services that fail or hang: the remote
            store, see `CheckpointSaver`, and those of loggers. A saver or logger that is given an argument of this name
            has a time of its own.
        autoresume: Go on from the newest intact checkpoint in `save_folder`, if there is one: the same command starts,
            continues and, once the run is complete, ends at once. A run that was stopped early is complete, too; with
            another `max_duration` than it was launched with it goes on.
        spin_dataloaders: When resuming in mid-epoch, bring the loader to where it was.

    Attributes:
        state: The run's `State`.
        logger: Hands what is logged to the loggers.
        engine: Runs the algorithms; `print(trainer.engine.explain())` shows the plan.
        local_hparams: The logged arguments, with `auto_log_hparams`.

    Raises:
        ValueError: An argument has a value that cannot work; the message says what to do.
        TypeError: An argument is of a type that cannot work.
        FolderInUseError: Another launch saves the same files to `save_folder`; see `CheckpointSaver`.

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
        train_subset_num_batches: SupportsIndex = -1,
        max_duration: TimeArgument | None = None,
        algorithms: Algorithm | Sequence[Algorithm] | None = None,
        algorithm_passes: PassInput = None,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        schedulers: Any = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Loader | Evaluator | Sequence[Evaluator] | Sequence[Loader] | None = None,
        eval_interval: Interval = 1,
        eval_subset_num_batches: SupportsIndex = -1,
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
        device_train_microbatch_size: SupportsIndex | float | str | None = None,
        accumulate_train_batch_on_tokens: bool = False,
        seed: SupportsIndex | None = None,
        deterministic_mode: bool = False,
        dist_timeout: float = 300.0,
        ddp_sync_strategy: str | DDPSyncStrategy | None = None,
        parallelism_config: dict[str, Any] | ParallelismConfig | None = None,
        profiler: RunsProfiler | None = None,
        python_log_level: str | None = None,
        compile_config: dict[str, Any] | None = None,
        load_path: str | os.PathLike[str] | None = None,
        load_object_store: Any = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        load_progress_bar: bool = True,
        load_ignore_keys: IgnoreKeys | None = None,
        load_exclude_algorithms: Sequence[str] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        save_filename: str = "ep{epoch}-ba{batch}-rank{rank}.pt",
        save_latest_filename: str | None = "latest-rank{rank}.pt",
        save_overwrite: bool = False,
        save_interval: Interval = "1ep",
        save_weights_only: bool = False,
        save_ignore_keys: IgnoreKeys | None = None,
        save_num_checkpoints_to_keep: SupportsIndex = -1,
        save_metrics: bool = False,
        save_num_best_checkpoints_to_keep: SupportsIndex = 0,
        save_monitor: str | None = None,
        save_monitor_mode: str = "max",
        save_async: bool = False,
        delivery_timeout: float = 60.0,
        autoresume: bool = False,
        spin_dataloaders: bool = True,
    ) -> None:
        arguments = locals()
        check_arguments(arguments)
        loading = LoadOptions(autoresume, **with_prefix(arguments, "load_"))
        build.set_python_log_level(python_log_level)
        self.auto_log_hparams, self.python_log_level = auto_log_hparams, python_log_level
        self.accumulate_train_batch_on_tokens = accumulate_train_batch_on_tokens
        run_device = get_device(device)
        run_precision = build.precision_of(precision, run_device)
        self._model, was_compiled = build.check_model(model)
        self._compile_config = {} if was_compiled and compile_config is None else compile_config
        self._parallel = parallel_of_this_process(run_device, ddp_sync_strategy, dist_timeout, parallelism_config)
        self._build_state(
            run_device,
            run_precision,
            precision_config,
            build.build_optimizer(self._model, optimizers),
            algorithms,
            self._parallel.agreed(run_name if run_name is not None else _generate_run_name()),
            seed_run(seed, deterministic_mode, self._parallel),
            save_metrics,
        )
        bind_profiler(profiler, self.state, device_train_microbatch_size)
        destinations, watchers = build.build_loggers(
            loggers,
            callbacks,
            progress_bar=progress_bar,
            log_to_console=log_to_console,
            console_stream=console_stream,
            console_log_interval=console_log_interval,
            log_traces=log_traces,
        )
        self._checkpoint_saver, watchers = build_saver(watchers, **with_prefix(arguments, "save_"))
        if autoresume:
            check_autoresume(self._checkpoint_saver, run_name)
            continue_logs(destinations)
        if self._checkpoint_saver is not None:
            self._checkpoint_saver.reserve(self.state)
        self._stream = stream_of(console_stream, shown=progress_bar or log_to_console)
        self.local_hparams = extract_hparams(arguments) if auto_log_hparams else {}
        self._start_engine(destinations, watchers, algorithm_passes, delivery_timeout)
        settings = self._settings = RunSettings(self.state, self._model, self._parallel)
        settings.set_train_data(
            train_dataloader, train_dataloader_label, train_subset_num_batches, device_train_microbatch_size
        )
        settings.set_evaluators(eval_dataloader, eval_interval, eval_subset_num_batches)
        settings.check_schedulers(schedulers, scale_schedule_ratio, step_schedulers_every_batch)
        settings.set_max_duration(max_duration, scale_schedule_ratio)
        settings.set_schedulers(schedulers, scale_schedule_ratio, step_schedulers_every_batch)
        self.engine.run_event(Event.BEFORE_LOAD)
        settings.set_scaler()  # an algorithm may have wrapped the optimizer into one that needs closures
        self._keep_position(spin_dataloaders)
        if not self._load(loading, algorithm_passes):
            self._position.forget_fits()
        self._follow_model()
        self.logger.log_hyperparameters({"rank_zero_seed": self.state.rank_zero_seed})  # a resumed run has its own
        self.engine.run_event(Event.AFTER_LOAD)
        self._settle_model(self._compile_config)

    def fit(
        self,
        *,
        train_dataloader: Loader | None = None,
        train_dataloader_label: str | None = None,
        train_subset_num_batches: SupportsIndex | None = None,
        duration: TimeArgument | None = None,
        reset_time: bool = False,
        schedulers: Any = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Loader | Evaluator | Sequence[Evaluator] | Sequence[Loader] | None = None,
        eval_subset_num_batches: SupportsIndex | None = None,
        eval_interval: Interval | None = None,
        device_train_microbatch_size: SupportsIndex | float | str | None = None,
        precision: str | Precision | None = None,
        spin_dataloaders: bool | None = None,
    ) -> None:
        """Train until `max_duration`, or for `duration` more. May be called again.

        Arguments that the constructor has too replace what it was given; None leaves it. With a new loader, None is the
        constructor's default for its label, interval and number of batches.

        Args:
            train_dataloader: As in the constructor. Another loader than before is iterated from its beginning. If the
                run is in the middle of an epoch, it trains that epoch's remainder: the epoch keeps its number, its
                batches are counted on, and it ends when this loader does.
            train_dataloader_label: As in the constructor.
            train_subset_num_batches: As in the constructor. If the epoch that the run is in the middle of has had as
                many batches already, its loader is iterated from its beginning again, as another loader would be.
            duration: Train this much longer from where the run is. Seconds are counted from the last whole one.
            reset_time: Count time from zero again; weights, optimizer and schedulers stay. Checkpoints then get the
                names of earlier ones, which needs `save_overwrite=True`.
            schedulers: As in the constructor. If a checkpoint was loaded, the settings of the parameter groups (rate,
                momentum, ...) become again what was loaded, because building a scheduler may have changed them.
            scale_schedule_ratio: Multiplies what this call trains, and the schedules that it is given.
            step_schedulers_every_batch: As in the constructor.
            eval_dataloader: As in the constructor.
            eval_subset_num_batches: As in the constructor.
            eval_interval: As in the constructor; without `eval_dataloader` for the evaluators there are.
            device_train_microbatch_size: As in the constructor.
            precision: As in the constructor.
            spin_dataloaders: As in the constructor.

        Raises:
            ValueError: There is no optimizer, no data or no duration, or the run is already at its end (unless it was
                relaunched with `autoresume`: then there is nothing left to do).
            FileExistsError: With `reset_time` and without `save_overwrite`: an earlier `fit` saved checkpoints under
                names that this one would give again.
            SystemExit: After SIGTERM, once the batch is trained and saved; the status is 143.
            KeyboardInterrupt: After SIGINT, likewise.
        """
        state, settings = self.state, self._settings
        check_arguments(
            {
                "train_dataloader_label": "train" if train_dataloader_label is None else train_dataloader_label,
                "reset_time": reset_time,
                "scale_schedule_ratio": scale_schedule_ratio,
                "step_schedulers_every_batch": step_schedulers_every_batch,
                "eval_interval": 1 if eval_interval is None else eval_interval,
                "spin_dataloaders": spin_dataloaders is None or spin_dataloaders,
            }
        )
        if not state.optimizers:
            raise ValueError(
                "No optimizer was specified when constructing the Trainer, and the model had no parameters then. "
                "Pass `optimizers` to the `Trainer`."
            )
        settings.check_schedulers(schedulers, scale_schedule_ratio, step_schedulers_every_batch)
        spec, length = settings.train_spec, state.dataloader_len
        settings.replace_train_data(
            train_dataloader, train_dataloader_label, train_subset_num_batches, device_train_microbatch_size
        )
        begun, ended = self._position.begin_fit(reset_time)
        self._follow_loader(spec, length, state.timestamp if begun is None else begun)
        settings.set_duration(duration, scale_schedule_ratio, begun)
        if ended or self._position.is_complete():
            self._announce(f"This part of the run {state.run_name!r} is complete; nothing is left to train.")
            return
        settings.replace_evaluation(eval_dataloader, eval_interval, eval_subset_num_batches)
        settings.set_schedulers(schedulers, scale_schedule_ratio, step_schedulers_every_batch)
        settings.compile_schedulers()
        if precision is not None:
            state.precision = build.precision_of(precision, state.device)
            settings.set_scaler()
        if spin_dataloaders is not None:
            self._position.loader.spin = spin_dataloaders
        self._position.settle()
        with training(state):
            self._loop().run()
            self._position.complete(self._checkpoint_saver, self.logger)
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def save_checkpoint(
        self, name: str = "ep{epoch}-ba{batch}-rank{rank}", *, weights_only: bool = False
    ) -> str | None:
        """Save the run now, to one file also if it saves in shards otherwise; to be called on every rank.

        Args:
            name: The path, with the variables of a checkpoint's name. An extension such as `.pt` is up to you.
            weights_only: Save the model only.

        Returns:
            The path; None on ranks that do not write.

        Raises:
            TypeError: `name` is no path.
            ValueError: `name` has an unknown field, or is a folder.
        """
        check_path("name", name)
        with self._parallel.watched():
            return save_checkpoint(self.state, name, weights_only=weights_only)

    def save_checkpoint_to_save_folder(self) -> None:
        """Save the run now to `save_folder`, like any other checkpoint there.

        Raises:
            ValueError: There is no `save_folder`.
        """
        if self._checkpoint_saver is None:
            raise ValueError(
                "In order to use save_checkpoint_to_save_folder you must pass a save_folder to the Trainer."
            )
        self._checkpoint_saver.save_now(self.state, self.logger)

    @property
    def saved_checkpoints(self) -> list[str]:
        """The paths of the checkpoints that this run saved and still exist, oldest first."""
        return [] if self._checkpoint_saver is None else self._checkpoint_saver.saved_checkpoints

    def eval(
        self,
        eval_dataloader: Loader | Evaluator | Sequence[Evaluator] | Sequence[Loader] | None = None,
        subset_num_batches: SupportsIndex = -1,
    ) -> None:
        """Evaluate. Results are in `state.eval_metrics` and, computed, in `state.eval_metric_values`.

        Args:
            eval_dataloader: What to evaluate; None: what the run evaluates.
            subset_num_batches: Batches to use of each; -1: those that its `Evaluator` says, else until the loader ends.

        Raises:
            ValueError: There is nothing to evaluate, or `subset_num_batches` is no number of batches.
        """
        subset_num_batches = build.check_subset("subset_num_batches", subset_num_batches)
        given = eval_dataloader is not None
        extra = self._settings.evaluators_of(eval_dataloader, 0, subset_num_batches) if given else []
        self._evaluation.run_standalone(extra, subset_num_batches)

    def predict(
        self, dataloader: Loader, subset_num_batches: SupportsIndex = -1, *, return_outputs: bool = True
    ) -> list[Any]:
        """The model's outputs over a loader.

        Args:
            dataloader: The data: an iterable of batches, a `DataSpec` or a dict of its arguments.
            subset_num_batches: Batches to use; -1: until the loader ends.
            return_outputs: Whether to keep the outputs; callbacks see them either way.

        Returns:
            The outputs of each batch, on the CPU; an empty list without `return_outputs`.

        Raises:
            ValueError: The loader is empty, or `subset_num_batches` is no number of batches.
        """
        spec = build.data_spec_of(dataloader, "dataloader")
        subset = build.check_subset("subset_num_batches", subset_num_batches)
        modes = self._evaluation.modes
        return predict(self.state, self.engine, spec, subset, return_outputs, self._parallel, modes)

    def export_for_inference(
        self,
        save_format: str | ExportFormat,
        save_path: str | os.PathLike[str],
        save_object_store: Any = None,
        sample_input: Any = None,
        transforms: Transform | Sequence[Transform] | None = None,
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
    ) -> None:
        """Export the current model for inference; see `composer.inference.export_for_inference`.

        Args:
            save_format: `"torch_export"` (PyTorch's own format, `.pt2`), `"onnx"`, or `"torchscript"`, which PyTorch
                has deprecated.
            save_path: Where to write: a local path, a URI, or a name in the object store; may contain `{run_name}`.
                Loggers that store files get the file, too.
            save_object_store: An object store.
            sample_input: A batch to call the model with; None: the run's last batch.
            transforms: Functions that take the model and return it, such as `composer.inference.quantize_dynamic`.
            input_names: The names of the inputs.
            output_names: The names of the outputs.

        Raises:
            ModuleNotFoundError: `composer-export` is not installed, or a package that the format or the store needs.
            ValueError: An argument is invalid, no batch has been seen yet, or the model is sharded.
            RuntimeError: The model cannot be exported in this format.
        """
        from composer.utils import export_with_logger  # of composer-export

        export_with_logger(
            model=self.state.model,
            save_format=save_format,
            save_path=save_path,
            logger=self.logger,
            save_object_store=save_object_store,
            sample_input=(self.state.batch if sample_input is None else sample_input, {}),
            transforms=transforms,
            input_names=input_names,
            output_names=output_names,
        )

    def close(self) -> None:
        """Close callbacks and loggers. The Trainer cannot be used afterwards. Safe to call twice."""
        self.engine.close()
        self._parallel.close()
