"""`Trainer`: trains, evaluates and predicts with composed algorithms."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch

from composer import checkpoint  # programs of MosaicML's Composer find `composer.trainer.trainer.checkpoint`
from composer.callbacks.checkpoint_saver import hold_leases
from composer.checkpoint.names import check_path
from composer.core import DataSpec, Evaluator
from composer.core.data_spec import check_ends
from composer.core.display import html_of_plan, html_of_state
from composer.core.passes import PassInput
from composer.loop.driver import Driver
from composer.loop.swapped_weights import weights_to_save
from composer.trainer.construction import TrainerParts, pin_batches, resolve_precision
from composer.trainer.construction import generate_run_name as _generate_run_name
from composer.trainer.description import describe_run
from composer.trainer.evaluation import Results, predict
from composer.trainer.loop import FitLoop
from composer.trainer.microbatch import adjust_device_train_microbatch_size as _adjust_device_train_microbatch_size
from composer.trainer.microbatch import is_cuda_oom as _is_cuda_oom
from composer.trainer.options import (
    Algorithms,
    Arguments,
    Callbacks,
    ClassNames,
    CompileConfig,
    ConsoleInterval,
    DeepSpeedConfig,
    Duration,
    EvalInterval,
    FileName,
    Folder,
    Keys,
    Loader,
    LoadPath,
    Loggers,
    LogLevel,
    MicrobatchSize,
    ObjectStore,
    Optimizers,
    Parallelism,
    Positive,
    Profiler,
    RunDevice,
    RunName,
    RunPrecision,
    SaveInterval,
    Seed,
    Settings,
    Stream,
    Subset,
    SyncStrategy,
    Text,
    TrainLoader,
    check_subset,
    data_spec_of,
    done_by,
)
from composer.trainer.plot import plot
from composer.trainer.replaced_names import explain_argument
from composer.trainer.signals import Interruption
from composer.trainer.step import BatchTrainer
from composer.utils.html import details
from composer.utils.import_helpers import import_from_distribution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from composer.inference import ExportFormat, Transform

__all__ = ["Trainer", "_adjust_device_train_microbatch_size", "_generate_run_name", "_is_cuda_oom"]


class Trainer(TrainerParts):
    """Trains a model with composed algorithms.

    Times are a number of epochs or a time string such as `"10ep"` or `"500ba"`; see `Time`. Integers may be of any
    library (`np.int64(3)`). Arguments are checked before anything runs.

    Args:
        model: A `ComposerModel`; any module, with `loss`; or a model of transformers or peft, if composer-huggingface
            is installed. It is moved to the device. A model wrapped by `torch.compile` is unwrapped, and compiled again
            at the end of the construction.
        loss: For any module: `loss(outputs, targets) -> loss`, such as `torch.nn.functional.cross_entropy`; see
            `composer.models.ModuleWithLoss`.
        metrics: For any module: metrics of torchmetrics, for training and evaluation: one, a sequence or a dict. None:
            "Loss" in evaluations, the mean of the loss.
        input_key: For any module: its inputs in a batch: an index, key or attribute name, a sequence of them, or a
            function. None: the first of two parts; of a mapping or dataclass all parts but the targets, by name.
        target_key: Likewise the targets. None: the second of two parts, or the part named "labels" or the like.
        train_dataloader: The training data: an iterable of batches, a `DataSpec` or a dict of its arguments. It can be
            given to `fit` instead. On a GPU, a `DataLoader` with workers is set to pin its batches, so that copies
            to the GPU overlap with computation; the same applies to loaders for evaluation and prediction. On several
            ranks with loaders that save their own state, call `state.stop_training` on all ranks: the others have drawn
            their next batch when one stops, and a checkpoint saved then does not contain it.
        train_dataloader_label: The label of the training data.
        train_subset_num_batches: End each epoch after this many batches; -1: at the loader's end. Required for an
            endless loader if `max_duration` is in epochs: otherwise its first epoch never ends. A loader that is known
            to be endless is then refused, and one without a length is warned of.
        max_duration: How long to train. A duration in seconds (`"90sec"`, `"1h20m"`) is training time, as in
            `state.timestamp.total_wct`: it includes loading data, callbacks and saving, but neither evaluation nor the
            time before the first batch, and a resumed run continues the count of its checkpoint. The run ends after
            the batch in which the time is up, by the clock of rank 0 on all ranks. Fractions of the run such as
            `t_max="1dur"` are then fractions of this time, so two runs are not bit-identical.
        algorithms: The methods to compose, in this order where their placements allow it.
        algorithm_passes: Passes that reorder algorithms; see `Engine`.
        optimizers: One optimizer, or several with different parameters, which step one after another: after one pass,
            or each after its own if the model has a method `begin_turn`; see `ComposerModel`. Or a function that makes
            them of the list of parameters, after algorithms have changed the layers: `lambda parameters:
            SGD(parameters, lr=0.1)`; it may return schedulers of torch, too: `(optimizer, StepLR(optimizer, 10))`. None
            is `DecoupledSGDW(lr=0.1)`, or `AdamW(lr=0.001)` for a module with `loss`, with a warning.
        schedulers: Learning-rate schedulers, of `composer.optim` or of torch. With several optimizers, a schedule of
            `composer.optim` applies to all; `{optimizer: scheduler}` gives each its own. A schedule of `composer.optim`
            sets the rate of batch n from the time of n - 1 batches; torch's schedulers, from n steps.
        scale_schedule_ratio: A factor for `max_duration` and the schedules.
        step_schedulers_every_batch: Step schedulers after every batch, or after every epoch; None: after every batch
            unless one is torch's own.
        eval_dataloader: The evaluation data: like the training data, an `Evaluator`, or a sequence of either. Several
            loaders are labeled "eval", "eval_1", "eval_2" and so on, with a warning.
        eval_interval: How often to evaluate: a time, or a function of state and event; 0: never. The interval of an
            `Evaluator` takes precedence.
        eval_subset_num_batches: Batches per evaluation; -1: until the loader ends. Required for an endless loader.
        callbacks: The callbacks.
        loggers: The loggers. Those in `callbacks` log, too.
        run_name: The run's name; None: the value of `COMPOSER_RUN_NAME` or `RUN_NAME`, or a generated name.
        progress_bar: Show a progress bar.
        log_to_console: Print metrics to the console.
        console_stream: The stream of the progress bar and console logger: `"stdout"`, `"stderr"` or a text stream. In a
            notebook, which shows stderr as an error, `"stderr"` is stdout.
        console_log_interval: How often to print, in epochs or batches.
        log_traces: Show which algorithms ran, with the progress bar or on the console.
        auto_log_hparams: Log the arguments of this constructor as hyperparameters, without passwords in URIs.
        device: `"cpu"`, `"gpu"` or `"cuda"`, `"cuda:1"`, `"mps"`, a `torch.device` or a `Device`; None or `"auto"`: a
            GPU if there is one.
        precision: `"fp32"`, `"amp_fp16"`, `"amp_bf16"`, `"amp_fp8"`, or what other trainers call them (`"bf16-mixed"`,
            `"bf16"`, 16, ...; see `Precision`); None: bf16 on a GPU (fp16 on one that has no bf16), fp32 elsewhere.
        precision_config: Arguments of the FP8 recipe.
        device_train_microbatch_size: Samples per forward and backward pass; gradients accumulate over the batch. None:
            the whole batch; `"auto"`: search for the largest size that fits the GPU.
        accumulate_train_batch_on_tokens: Weigh microbatches by the loss-generating tokens that the
            `get_num_tokens_in_batch` of the `DataSpec` counts. Without such a function, by the labels that the loss
            counts, as without this argument, or by the tokens of a batch without labels.
        seed: The seed of all random generators; rank r trains with `seed + r`. None draws one.
        deterministic_mode: Use deterministic operations only.
        dist_timeout: Seconds that a rank waits for other ranks before it fails.
        ddp_sync_strategy: When ranks synchronize gradients: `"single_auto_sync"` once per batch, `"multi_auto_sync"`
            with every microbatch, `"forced_sync"` after the last one. None: with every microbatch if an algorithm
            leaves parameters unused, after the last one if optimizers take turns, else once per batch.
        parallelism_config: Shard the model among ranks: `{"fsdp": {...}, "tp": {...}}` with arguments of `FSDPConfig`
            and `TPConfig`, or a `ParallelismConfig`; None: every rank has a full copy. Or a strategy of your own: an
            object of a class derived from `composer.trainer.RankStrategy`; or one of an installed package by its name
            in the entry points `composer.strategies`, such as `{"deepspeed": {...}}`.
        deepspeed_config: The same as `parallelism_config={"deepspeed": deepspeed_config}`, as in earlier programs.
        profiler: A `composer.profiler.Profiler`. It slows down the batches that it profiles, and cannot be used with
            the microbatch size `"auto"`.
        python_log_level: Show the library's log records of at least this level (`"info"`, `"debug"`).
        compile_config: Arguments of `torch.compile`; `{}`: compile with its defaults; None: do not compile. A warning
            names a layer that torch cannot train on a CPU in the layout that its compiler chooses, and the way out.
        compile_step: Compile the whole step: the loss in one graph with the forward pass (and so their backward pass),
            unless something acts between them at AFTER_FORWARD or BEFORE_LOSS, and the steps of the optimizers, unless
            gradients are scaled (fp16) or the optimizer runs the passes itself (`SAM`).
        load_path: A checkpoint to load: a path or URI, which may contain `{run_name}` and `{rank}`. Of a `.safetensors`
            file, the weights are loaded, as with `load_weights_only`.
        load_object_store: The object store, or logger that stores files, that contains `load_path`.
        load_weights_only: Load the model only, and start a new run.
        load_strict_model_weights: Require that the model's keys match those of the checkpoint.
        load_progress_bar: Show the progress of downloads.
        load_ignore_keys: What not to load: patterns of paths such as `"state/optimizers/*"`, or a function that removes
            keys.
        load_exclude_algorithms: Class names of algorithms of the checkpoint's run that are not applied.
        branch_duration: How long to train from the checkpoint `load_path` on, instead of until `max_duration`. The run
            branches off the one that saved it, for example with the decay of its schedule (see
            `WarmupStableDecayScheduler`), and continues its weights, optimizers, data and random numbers. It needs
            its own `run_name`. A warning says if its schedule does not continue at the learning rate of the checkpoint.
            With `autoresume`, a relaunch resumes from the branch's own checkpoints and ends at the same time.
        save_folder: The folder for checkpoints: a path or URI (`s3://...`); None: save none. This and the next two
            arguments are format strings; see `CheckpointSaver`.
        save_filename: The file name of a checkpoint.
        save_latest_filename: The name of the link to the latest checkpoint; None: no link.
        save_overwrite: Replace newer files of another run in `save_folder` instead of raising an error.
        save_interval: How often to save: a time, or a function of state and event.
        save_weights_only: Save the model only.
        save_ignore_keys: What not to save, like `load_ignore_keys`. A run that loads the file keeps its own model or
            optimizers; if only some tensors of the model are missing, it needs `load_strict_model_weights=False`.
        save_num_checkpoints_to_keep: The number of newest checkpoints to keep; -1: all.
        save_metrics: Also save the states of metrics.
        save_num_best_checkpoints_to_keep: The number of best checkpoints to keep in addition.
        save_monitor: The metric that ranks checkpoints: `"eval/MulticlassAccuracy"`.
        save_monitor_mode: `"max"` or `"min"`, whichever is better.
        save_async: Write checkpoints in the background, from a copy in host memory.
        delivery_timeout: The total number of seconds that the end of the run waits for services that fail or hang: the
            remote store (see `CheckpointSaver`) and those of loggers. A saver or logger with an argument of this name
            waits separately. The remote store must also answer within this time when the run starts.
        autoresume: Continue from the newest intact checkpoint of the run in `save_folder`, if there is one: the same
            command starts and continues the run and, once it is complete, ends immediately. A run that was stopped
            early is also complete; it continues if `max_duration` differs from that of its launch. Subfolders are
            ignored, except those that `save_filename` or the link to the latest checkpoint lead to.
        spin_dataloaders: When resuming inside an epoch, advance the loader to its position.

    Attributes:
        state: The run's `State`.
        logger: Passes values to the loggers.
        engine: Runs the algorithms; `print(trainer.engine.explain())` shows the plan.
        local_hparams: The logged arguments, with `auto_log_hparams`.

    Raises:
        ValueError: An argument has an invalid value; the message says what to do.
        TypeError: An argument has an invalid type. One error names all that are wrong by themselves.
        FolderInUseError: Another process saves the same files to `save_folder`; see `CheckpointSaver`.

    Warns:
        UserWarning: Arguments have no effect, because one that they need is missing; parameters are in no optimizer; or
            a loader has no length, although epochs are counted.

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

    @done_by("_construct", explain_argument)
    def __init__(
        self,
        *,
        model: torch.nn.Module,
        loss: Callable[..., Any] | None = None,
        metrics: Any = None,
        input_key: Any = None,
        target_key: Any = None,
        train_dataloader: TrainLoader | None = None,
        train_dataloader_label: Text = "train",
        train_subset_num_batches: Subset = -1,
        max_duration: Duration | None = None,
        algorithms: Algorithms | None = None,
        algorithm_passes: PassInput = None,
        optimizers: Optimizers | None = None,
        schedulers: Any = None,
        scale_schedule_ratio: Positive = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Loader | Evaluator | Sequence[Evaluator] | Sequence[Loader] | None = None,
        eval_interval: EvalInterval = 1,
        eval_subset_num_batches: Subset = -1,
        callbacks: Callbacks | None = None,
        loggers: Loggers | None = None,
        run_name: RunName | None = None,
        progress_bar: bool = True,
        log_to_console: bool = False,
        console_stream: Stream = "stderr",
        console_log_interval: ConsoleInterval = "1ba",
        log_traces: bool = False,
        auto_log_hparams: bool = False,
        device: RunDevice | None = None,
        precision: RunPrecision | None = None,
        precision_config: Settings | None = None,
        device_train_microbatch_size: MicrobatchSize | None = None,
        accumulate_train_batch_on_tokens: bool = False,
        seed: Seed | None = None,
        deterministic_mode: bool = False,
        dist_timeout: Positive = 300.0,
        ddp_sync_strategy: SyncStrategy | None = None,
        parallelism_config: Parallelism | None = None,
        deepspeed_config: DeepSpeedConfig | None = None,
        profiler: Profiler | None = None,
        python_log_level: LogLevel | None = None,
        compile_config: CompileConfig | None = None,
        compile_step: bool = False,
        load_path: LoadPath | None = None,
        load_object_store: ObjectStore | None = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        load_progress_bar: bool = True,
        load_ignore_keys: Keys | None = None,
        load_exclude_algorithms: ClassNames | None = None,
        branch_duration: Duration | None = None,
        save_folder: Folder | None = None,
        save_filename: FileName = "ep{epoch}-ba{batch}-rank{rank}.pt",
        save_latest_filename: FileName | None = "latest-rank{rank}.pt",
        save_overwrite: bool = False,
        save_interval: SaveInterval = "1ep",
        save_weights_only: bool = False,
        save_ignore_keys: Keys | None = None,
        save_num_checkpoints_to_keep: SupportsIndex = -1,
        save_metrics: bool = False,
        save_num_best_checkpoints_to_keep: SupportsIndex = 0,
        save_monitor: Text | None = None,
        save_monitor_mode: str = "max",
        save_async: bool = False,
        delivery_timeout: Positive = 60.0,
        autoresume: bool = False,
        spin_dataloaders: bool = True,
    ) -> None: ...

    # ---- training ----

    @done_by("_fit")
    def fit(
        self,
        *,
        train_dataloader: TrainLoader | None = None,
        train_dataloader_label: Text | None = None,
        train_subset_num_batches: Subset | None = None,
        duration: Duration | None = None,
        reset_time: bool = False,
        schedulers: Any = None,
        scale_schedule_ratio: Positive = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Loader | Evaluator | Sequence[Evaluator] | Sequence[Loader] | None = None,
        eval_subset_num_batches: Subset | None = None,
        eval_interval: EvalInterval | None = None,
        device_train_microbatch_size: MicrobatchSize | None = None,
        precision: RunPrecision | None = None,
        spin_dataloaders: bool | None = None,
        compile_config: CompileConfig | None = None,
    ) -> None:
        """Train until `max_duration`, or for `duration`. May be called repeatedly.

        Arguments replace those of the constructor with the same name; None leaves them unchanged. With a new loader,
        None is the constructor's default for its label, interval and number of batches.

        Args:
            train_dataloader: The training data. Another loader than before is iterated from its beginning. If the run
                is inside an epoch, the loader provides the rest of it: the epoch keeps its number, batch counts
                continue, and it ends with this loader.
            train_dataloader_label: The label of the training data.
            train_subset_num_batches: Batches per epoch. If the current epoch has had that many, its loader is iterated
                from its beginning, like another loader.
            duration: How long to train from the current time on. Seconds count from the last full second.
            reset_time: Count time from zero again; weights, optimizer and schedulers keep their state. Checkpoints get
                the names of earlier ones again, which requires `save_overwrite=True`. A call that is refused keeps the
                time.
            schedulers: Learning-rate schedulers. If a checkpoint was loaded, the settings of the parameter groups
                (rate, momentum, ...) are set to the loaded values again, because building a scheduler may change them.
            scale_schedule_ratio: A factor for the length of this call and for the given schedules.
            step_schedulers_every_batch: Step schedulers after every batch, or after every epoch.
            eval_dataloader: The evaluation data.
            eval_subset_num_batches: Batches per evaluation.
            eval_interval: How often to evaluate; without `eval_dataloader`, for the existing evaluators.
            device_train_microbatch_size: Samples per forward and backward pass, or `"auto"`.
            precision: The numerical precision.
            spin_dataloaders: Advance the loader to its position when resuming inside an epoch.
            compile_config: Arguments of `torch.compile`; the model (with `compile_step`, the step) is compiled again.

        Raises:
            ValueError: There is no optimizer, data or duration, or the run is at its end (a run relaunched with
                `autoresume` returns instead).
            FileExistsError: With `reset_time` and without `save_overwrite`, an earlier `fit` has saved checkpoints
                under the names that this call would use.
            SystemExit: After SIGTERM, when the batch is trained and saved; the exit status is 143.
            KeyboardInterrupt: After SIGINT, when the batch is trained and saved.
            OSError: A checkpoint could not be written, or not be uploaded by the end.
            FolderInUseError: Another run saves to `save_folder`.
            LostRankError: Another rank failed, or does not answer.
        """

    def _fit(self, arguments: Arguments) -> None:
        before = self.state.timestamp
        try:
            self._run_fit(arguments)
        except BaseException:
            if not self.state.timestamp.batches:  # refused with `reset_time`, or failed before its first batch ended
                self.state.timestamp = before
            raise

    def _run_fit(self, arguments: Arguments) -> None:
        state, settings, progress = self.state, self._settings, self._progress
        if not state.optimizers:
            raise ValueError(
                "No optimizer was specified when constructing the Trainer, and the model had no parameters then. "
                "Pass `optimizers` to the `Trainer`."
            )
        if self._branch_duration is not None and progress.is_first_fit:
            if arguments.duration is not None:
                raise ValueError(
                    f"`duration` must not be given to the first `fit` with `branch_duration`, got "
                    f"{str(arguments.duration)!r} and {str(self._branch_duration)!r}. Leave one out."
                )
            progress.check_start(self._branch_duration)
            arguments.duration = self._branch_duration
        settings.check_schedulers(arguments.schedulers, arguments)
        old_data, old_length = settings.train_spec, state.dataloader_len
        settings.set_train_data(arguments)
        data, length = settings.train_spec, state.dataloader_len
        if data is None:
            raise ValueError("No `train_dataloader` was given. Pass it to the `Trainer` or to `fit`.")
        begun, ended = progress.begin_fit(arguments.reset_time)
        # The loader is iterated from its beginning if it is another one, or its epoch has already had enough batches. A
        # call that is resumed continues with its own loader.
        is_at_end = length is not None and length != old_length and state.timestamp.batches_in_epoch >= length.value
        if begun is None and old_data is not None and (is_at_end or data.dataloader is not old_data.dataloader):
            self._position.replace_loader()
        settings.set_duration(arguments.duration, arguments.scale_schedule_ratio, begun)
        complete = ended or progress.restore_if_complete()
        # Also in a call that is skipped, since the next call keeps what it is not given anew.
        settings.change_evaluation(arguments)
        if arguments.schedulers is not None:
            settings.set_schedulers(arguments.schedulers, arguments)
        settings.compile_schedulers()
        if arguments.precision is not None:
            precision = resolve_precision(arguments.precision, state.device)
            if precision is not state.precision:
                self._strategy.check_precision(precision)
                state.precision = precision
                settings.set_scaler()
        if arguments.spin_dataloaders is not None:
            self._position.spin = arguments.spin_dataloaders
        if arguments.compile_config is not None:
            self._compile_model(arguments.compile_config)
            if self._compile_step_config is not None:
                self._compile_step_config = arguments.compile_config
            if self.auto_log_hparams:
                self.local_hparams["is_model_compiled"] = True
                self.logger.log_hyperparameters({"is_model_compiled": True})
        if not ended:
            progress.apply()
        if complete:
            if not ended:
                self._position.begin()  # now, because the program may draw random numbers afterwards
            self._announce(f"This part of the run {state.run_name!r} is complete; nothing is left to train.")
            return
        if not self._description_logged and self.logger.destinations:
            self.logger.log_hyperparameters(describe_run(state))
        self._description_logged = True
        with hold_leases(state):
            self._make_loop(data).run()
            progress.complete(self._checkpoint_saver, self.logger)
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _make_loop(self, spec: DataSpec) -> FitLoop:
        state, driver = self.state, Driver(self.engine)
        batches = BatchTrainer(
            state,
            driver,
            self._model,
            self._strategy,
            self._metrics,
            self.accumulate_train_batch_on_tokens,
            self._compile_step_config,
            self._settings.default_microbatch_size,
        )
        return FitLoop(
            state,
            driver,
            self.logger,
            spec,
            batches,
            self._position,
            self._evaluation,
            self._strategy,
            self._settings.step_every_batch,
            Interruption(self._checkpoint_saver, self._announce),
            self._progress.length,
            self._history,
        )

    # ---- in a notebook ----

    def plot(self, *names: str) -> Figure:
        """Draw the losses and metrics of the run over batches.

        Without an `InMemoryLogger`, these are the losses of up to 1024 batches, evenly spaced, and the results of
        evaluations, since this process began the run. With one, all that it has stored, such as training metrics.

        Args:
            *names: What to draw, by logged names or parts of them, such as "Accuracy"; none: all losses and metrics.

        Raises:
            TypeError: One of `names` is not a string.
            ValueError: Nothing was trained or evaluated yet, or no name contains one of `names`.
            MissingConditionalImportError: matplotlib is not installed.
        """
        return plot(self.logger.destinations, self._history, names)

    def __repr__(self) -> str:
        now, end = self.state.timestamp.batch.to_timestring(), self.state.max_duration
        return f"<{type(self).__name__} of {self.state.run_name}, {now} of {end}>"

    def _repr_html_(self) -> str:
        plan = details("Order of algorithms and callbacks: engine.explain()", html_of_plan(self.engine.explain()))
        return html_of_state(self.state, type(self).__name__) + plan

    # ---- checkpoints ----

    def save_checkpoint(
        self, name: str = "ep{epoch}-ba{batch}-rank{rank}", *, weights_only: bool = False
    ) -> str | None:
        """Save the run to one file, even if it saves shards otherwise. Call it on every rank.

        The file has the weights of a scheduled checkpoint: averages such as those of `EMA` in place of the weights of
        training, which are in the state of the algorithm.

        Args:
            name: The path; a format string like `save_filename`. No extension is added.
            weights_only: Save the model only.

        Returns:
            The path; None on ranks that do not write.

        Raises:
            TypeError: `name` is not a path.
            ValueError: `name` has an unknown field, or is a folder.
        """
        check_path("name", name)
        with self._strategy.report_lost_ranks(), weights_to_save(self.engine):
            return checkpoint.save_checkpoint(self.state, name, weights_only=weights_only)

    def save_checkpoint_to_save_folder(self) -> None:
        """Save the run to `save_folder` now, like a scheduled checkpoint.

        Raises:
            ValueError: There is no `save_folder`.
        """
        if self._checkpoint_saver is None:
            raise ValueError(
                "In order to use save_checkpoint_to_save_folder you must pass a save_folder to the Trainer."
            )
        with weights_to_save(self.engine):
            self._checkpoint_saver.save_now(self.state, self.logger)

    @property
    def saved_checkpoints(self) -> list[str]:
        """The paths of this run's existing checkpoints, oldest first."""
        return [] if self._checkpoint_saver is None else self._checkpoint_saver.saved_checkpoints

    # Programs for MosaicML's Composer read these two.

    @property
    def _train_data_spec(self) -> DataSpec | None:
        return self._settings.train_spec

    @property
    def _rng_state(self) -> list[dict[str, Any]] | None:
        return self._position.loaded_generators

    def eval(
        self,
        eval_dataloader: Loader | Evaluator | Sequence[Evaluator] | Sequence[Loader] | None = None,
        subset_num_batches: SupportsIndex = -1,
    ) -> Results:
        """Evaluate. The metrics are in `state.eval_metrics`, their computed values in `state.eval_metric_values`.

        Args:
            eval_dataloader: The evaluation data; None: that of the run.
            subset_num_batches: Batches to use of each loader; -1: the number of its `Evaluator`, or all.

        Returns:
            The computed values by label of the loader and name of the metric, which a notebook shows as a table.

        Raises:
            ValueError: There is no evaluation data, or `subset_num_batches` is not a number of batches.
        """
        subset_num_batches = check_subset("subset_num_batches", subset_num_batches)
        extra: list[Evaluator] = []
        if eval_dataloader is not None:
            extra = self._settings.evaluators_of(eval_dataloader, 0, subset_num_batches)
        return self._evaluation.run_standalone(extra, subset_num_batches)

    def predict(
        self, dataloader: Loader, subset_num_batches: SupportsIndex = -1, *, return_outputs: bool = True
    ) -> list[Any]:
        """Compute the model's outputs over a loader.

        Args:
            dataloader: The data: an iterable of batches, a `DataSpec` or a dict of its arguments.
            subset_num_batches: Batches to use; -1: all.
            return_outputs: Return the outputs; callbacks receive them in any case.

        Returns:
            The outputs of each batch, on the CPU; an empty list without `return_outputs`.

        Raises:
            ValueError: The loader is empty or endless, or `subset_num_batches` is not a number of batches.

        Warns:
            UserWarning: The loader has no length, and `subset_num_batches` is -1.
        """
        spec = data_spec_of("dataloader", dataloader)
        subset = check_subset("subset_num_batches", subset_num_batches)
        if subset == -1:
            check_ends("dataloader", spec.dataloader, "Pass the number of batches: `subset_num_batches=...`.")
        pin_batches(spec.dataloader, self.state.device)
        modes = self._evaluation.modes
        return predict(self.state, self.engine, spec, subset, return_outputs, self._strategy, modes)

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
        public = "Trainer.export_for_inference"
        export = import_from_distribution("composer.inference", "export_with_logger", "composer-export", public)
        export(
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
        self._strategy.close()
