"""The construction of a `Trainer`, top to bottom: `TrainerParts._construct` names the steps in their order.

`RunSettings`, below it, holds what `fit` can change later: data, evaluators, length, schedules and scaler.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import platform
import random
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from composer import checkpoint
from composer.callbacks.checkpoint_saver import CheckpointSaver
from composer.checkpoint.autoresume import find_checkpoint
from composer.checkpoint.resume import RunProgress
from composer.checkpoint.storage import without_password
from composer.core import (
    Algorithm,
    Callback,
    DataSpec,
    Engine,
    Evaluator,
    Event,
    Precision,
    State,
    Time,
    Timestamp,
    TimeUnit,
    ensure_data_spec,
)
from composer.core.data_spec import check_ends, check_microbatch_size, is_endless
from composer.core.precision import validate_precision
from composer.devices import Device
from composer.loggers import Logger, LoggerDestination
from composer.loggers.console_logger import ConsoleLogger
from composer.loggers.file_logger import FileLogger
from composer.loggers.progress_bar_logger import ProgressBarLogger
from composer.loop.driver import Driver
from composer.loop.position import LoaderPosition
from composer.models import ComposerModel
from composer.models.module_with_loss import ModuleWithLoss, as_composer_model, user_model_name
from composer.optim import compile_composer_scheduler, scale_pytorch_scheduler
from composer.trainer.data_parallel import DataParallel
from composer.trainer.evaluation import Evaluation
from composer.trainer.history import RunHistory
from composer.trainer.metrics import TrainMetrics
from composer.trainer.microbatch import check_local_forward
from composer.trainer.optimizers import (
    OptimizerFactory,
    build_optimizers,
    check_alternating_optimizers,
    check_optimizers,
    check_schedulers,
)
from composer.trainer.options import Arguments, described, is_function
from composer.trainer.precision import ClosureGradScaler
from composer.trainer.remote_files import RemoteFiles, check_uris
from composer.trainer.strategy import Strategy
from composer.utils import (
    dist,
    ensure_tuple,
    extract_hparams,
    get_device,
    is_uri,
    needs_closure,
    parse_uri,
    reproducibility,
)
from composer.utils.collect_env import get_composer_env
from composer.utils.module_surgery import warn_about_narrow_convolutions
from composer.utils.numbers import plain_number
from composer.utils.terminal import open_stream

log = logging.getLogger(__name__)

_NCCL_EXTRA_SECONDS = 15.0
_LAST_EXCHANGE_SECONDS = 0.1

_ADJECTIVES = "amber bold brisk calm clever eager fair gentle keen lively lucid merry noble quiet swift vivid".split()
_NOUNS = "badger beaver cedar comet falcon fjord harbor heron lynx maple meadow otter raven sparrow willow wren".split()


class TrainerParts:
    """Builds the parts of a `Trainer`, and nothing else; see there for the public attributes."""

    state: State
    logger: Logger
    engine: Engine

    def _construct(self, arguments: Arguments) -> None:
        self._check_branch(arguments)
        self.auto_log_hparams, self.python_log_level = arguments.auto_log_hparams, arguments.python_log_level
        if self.python_log_level is not None:
            rank = os.environ.get("RANK", "0")
            logging.basicConfig(
                format=f"%(asctime)s: rank{rank}[%(process)d][%(threadName)s]: %(levelname)s: %(name)s: %(message)s",
                stream=open_stream("stderr"),
            )
            logging.getLogger("composer").setLevel(self.python_log_level)
        # The stream for messages to the user; None: show nothing.
        is_shown = arguments.progress_bar or arguments.log_to_console
        self._stream = open_stream(arguments.console_stream) if is_shown else None
        self._description_logged = False

        compile_config = self._build_state(arguments)
        self._build_engine(arguments)
        optimizers, schedulers = self._run_init(arguments)
        # After INIT, where algorithms may replace the model and its metrics, and scale the length of the run.
        settings = self._settings = RunSettings(self.state, self._model, self._strategy)
        settings.set_train_data(arguments)
        if arguments.eval_dataloader is not None:
            settings.set_evaluators(arguments)
        settings.check_schedulers(schedulers, arguments)
        if arguments.max_duration is not None:
            settings.set_max_duration(arguments.max_duration, arguments.scale_schedule_ratio)
        if schedulers is not None:
            settings.set_schedulers(schedulers, arguments)
        self.engine.run_event(Event.BEFORE_LOAD)
        settings.set_scaler()  # after INIT, where an algorithm may wrap the optimizer in one that needs closures
        self._load(arguments)
        self.engine.run_event(Event.AFTER_LOAD)
        if hasattr(self._model, "begin_turn"):
            check_alternating_optimizers(self._model, optimizers, self.state.optimizers)
        if self.state.algorithms:
            self._evaluation.modes.check()
        # Module surgery has drawn random numbers; reseed, so that training is the same whatever the algorithms.
        reproducibility.seed_all(self.state.seed)
        self._wrap()
        if compile_config is not None:
            self._compile_model(compile_config)

    def _check_branch(self, arguments: Arguments) -> None:
        """Check the arguments of a branch of a run, and what `load_path` loads.

        Raises:
            ValueError: A run branches off nothing, or off weights alone, or has a length, too.
        """
        path, duration = arguments.load_path, arguments.branch_duration
        self._branch_duration = duration
        # A `.safetensors` file holds nothing but weights.
        self._loads_weights_only = arguments.load_weights_only or (path is not None and path.endswith(".safetensors"))
        if duration is None:
            return
        if path is None:
            raise ValueError("`branch_duration` needs `load_path`, the checkpoint that the run branches off.")
        if self._loads_weights_only:
            raise ValueError(
                f"`load_weights_only` must be False with `branch_duration`, and `load_path` not a `.safetensors` file, "
                f"got {arguments.load_weights_only!r} and {without_password(path)!r}: a branch continues the "
                f"optimizers and the data. Load a checkpoint of a run, or give `max_duration` to a new run."
            )
        if arguments.max_duration is not None:
            raise ValueError(
                f"`max_duration` must not be given with `branch_duration`, got {str(arguments.max_duration)!r} and "
                f"{str(duration)!r}: a branch ends that long after its checkpoint. Leave one out."
            )

    def _build_state(self, arguments: Arguments) -> dict[str, Any] | None:
        """Connect the ranks, place model and optimizers on the device, the same on all ranks, and make the state.

        Returns:
            The arguments of `torch.compile`; None: the model is not compiled.
        """
        model = arguments.model
        compile_config: dict[str, Any] | None = arguments.compile_config
        original = getattr(model, "_orig_mod", None)
        if original is not None:
            log.warning(
                "`model` is already compiled with `torch.compile`: it is unwrapped, and compiled again at the end."
            )
            model = original
        if compile_config is None and (original is not None or arguments.compile_step):
            compile_config = {}
        model = self._model = as_composer_model(
            model,
            arguments.loss,
            arguments.metrics,
            input_key=arguments.input_key,
            target_key=arguments.target_key,
        )
        device = get_device() if arguments.device is None else arguments.device
        precision = resolve_precision(arguments.precision, device)
        strategy = self._strategy = _strategy_of(arguments)
        _connect(strategy, device, arguments.dist_timeout)
        strategy.check_precision(precision)
        optimizers = [] if is_function(arguments.optimizers) else build_optimizers(model, arguments.optimizers)
        if arguments.deterministic_mode:
            reproducibility.configure_deterministic_mode()
        # All ranks have the same name and seed, so that module surgery makes the same choices everywhere.
        largest = reproducibility.MAX_SEED - (strategy.world_size - 1)
        drawn = reproducibility.get_random_seed() % (largest + 1) if arguments.seed is None else arguments.seed
        name = generate_run_name() if arguments.run_name is None else arguments.run_name
        run_name, seed = strategy.broadcast((name, drawn))
        if not 0 <= seed <= largest:
            raise ValueError(f"`seed` must be from 0 to {largest}, so that every rank gets one, got {seed!r}.")
        reproducibility.seed_all(seed)
        model_on_device = strategy.place(model, device)
        for optimizer in optimizers:
            device.optimizer_to_device(optimizer)
        algorithms = arguments.algorithms or ()
        if isinstance(model, ModuleWithLoss):
            _check_keys(model, algorithms)
        self.state = State(
            model=model_on_device,
            rank_zero_seed=seed,
            run_name=run_name,
            device=device,
            precision=precision,
            precision_config=arguments.precision_config,
            optimizers=optimizers,
            algorithms=algorithms,
            save_metrics=arguments.save_metrics,
        )
        strategy.describe_sharding(self.state)
        self.accumulate_train_batch_on_tokens = arguments.accumulate_train_batch_on_tokens
        self._compile_step_config = compile_config if arguments.compile_step else None
        self.local_hparams: dict[str, Any] = {}
        if arguments.auto_log_hparams:
            self.local_hparams = extract_hparams(arguments.loggable()) | {
                "is_model_compiled": compile_config is not None,
                "auto_microbatching": arguments.device_train_microbatch_size == "auto",
                "num_optimizers": len(ensure_tuple(arguments.optimizers)),
                "rank_zero_seed": seed,
            }
        return compile_config

    def _build_engine(self, arguments: Arguments) -> None:
        """Make loggers, callbacks, the saver of checkpoints and the engine that runs them."""
        state, profiler = self.state, arguments.profiler
        destinations, callbacks = _build_loggers(arguments)
        saver = self._checkpoint_saver = _add_saver(arguments, callbacks, destinations)
        if profiler is not None:
            warnings.warn(
                "The profiler is enabled. Profiling adds overhead to training: do not compare its speed.", stacklevel=4
            )
            state.profiler = profiler
            profiler.bind_to_state(state)  # adds its callbacks to those of the state
        if arguments.autoresume:
            for destination in destinations:
                if isinstance(destination, FileLogger):
                    destination.append = True  # continue the log file of the previous launch
        if saver is not None:  # before INIT, where loggers start runs in their services
            saver.reserve(state, arguments.delivery_timeout)
        uris: list[str] = []  # where the profiler and callbacks upload files that no logger uploads for them
        names = [getattr(callback, "remote_file_name", None) for callback in callbacks]
        for name in (*getattr(profiler, "remote_filenames", ()), *names):
            # The method `serves` of a logger such as `RemoteUploaderDownloader` says which URIs the logger uploads.
            uploaders = (getattr(each, "serves", None) for each in destinations)
            is_remote = isinstance(name, str) and is_uri(name)
            if is_remote and not any(callable(serves) and serves(name) is True for serves in uploaders):
                uris.append(name)
        if uris or self._strategy.world_size > 1:
            check_uris(uris, state.run_name)
        if uris:
            destinations.append(RemoteFiles(uris))
        self.logger = Logger(state, destinations, delivery_timeout=arguments.delivery_timeout)
        state.callbacks = [*destinations, *callbacks, *state.callbacks]
        self.engine = Engine(state, self.logger, arguments.algorithm_passes)
        self._model.logger = self.logger

    def _run_init(self, arguments: Arguments) -> tuple[Any, Any]:
        """Run INIT, where algorithms change the model, and then make the metrics.

        Returns:
            The optimizers and the schedulers, as the user has given them or as the function `optimizers` has made them.
        """
        state, optimizers, schedulers = self.state, arguments.optimizers, arguments.schedulers
        if is_function(optimizers):
            factory = OptimizerFactory(optimizers)  # it acts when the model has its final layers
            state.algorithms = [*state.algorithms, factory]
            self.engine.run_event(Event.INIT)
            state.algorithms = [each for each in state.algorithms if each is not factory]
            optimizers = factory.optimizers
            if factory.schedulers and schedulers is not None:
                raise ValueError(
                    "`schedulers` must not be given if the function `optimizers` returns some, too. Leave one out."
                )
            schedulers = factory.schedulers or schedulers
        else:
            self.engine.run_event(Event.INIT)
        if state.model is not self._model:
            self._model = _checked_model(state.model)
            self._model.logger = self.logger
        if state.algorithms:
            check_optimizers(state.optimizers, self._model, changed_by="an algorithm")
        if self.logger.destinations:
            self._log_launch()
        state.train_metrics = dict(copy.deepcopy(self._model.get_metrics(is_train=True)))
        self._strategy.prepare_metrics(state.train_metrics.values())
        defer = self._strategy.world_size == 1
        self._metrics = TrainMetrics(state, self._model, defer, self._strategy.reshard)
        self._history = RunHistory()
        driver = Driver(self.engine)
        self._evaluation = Evaluation(state, driver, self.logger, self._model, self._strategy, self._history)
        self._evaluation.modes.eval()  # the mode outside `fit`
        return optimizers, schedulers

    def _log_launch(self) -> None:
        """Log the arguments if requested, and versions, nodes and devices.

        The commit is that of an installation from a repository; a release has none, and logs none.
        """
        import composer

        local_world_size = dist.get_local_world_size()
        commit = os.environ.get("COMPOSER_COMMIT_HASH") or get_composer_env().composer_commit_hash
        self.logger.log_hyperparameters(
            {
                **self.local_hparams,
                "composer_version": composer.__version__,
                **({} if commit is None else {"composer_commit_hash": commit}),
                "num_nodes": dist.get_world_size() // local_world_size,
                f"num_{self.state.device.name}s_per_node": local_world_size,
                "node_name": os.environ.get("NODENAME") or platform.node(),
            }
        )

    def _load(self, arguments: Arguments) -> None:
        """Shard the model among ranks and load the requested checkpoint."""
        state, strategy, saver = self.state, self._strategy, self._checkpoint_saver
        self._position = LoaderPosition(state, self._metrics, spin=arguments.spin_dataloaders)
        # Created before the checkpoint is loaded, because `RunProgress` records the arguments of this launch.
        progress = self._progress = state.resumption = RunProgress(
            state, self._settings, self._position, self._evaluation, self._announce, self._branch_duration
        )
        newest: tuple[str, str] | None = None  # what to load, perhaps a downloaded copy, and the checkpoint's own path
        run_name, path = state.run_name, ""
        with strategy.report_lost_ranks(), ExitStack() as downloads:
            if arguments.autoresume and saver is not None:
                newest = find_checkpoint(saver, state, self.logger.destinations, arguments.load_progress_bar, downloads)
                saver.continues = True  # files of other runs have been rejected
                if newest is None:
                    self._announce(
                        f"No checkpoint of the run {state.run_name!r} was found; it starts from the beginning."
                    )
            if newest is not None:
                copy_of_it, path = newest
                self._loads_weights_only = False
                checkpoint.load_checkpoint(
                    copy_of_it,
                    state,
                    self.logger,
                    strict_model_weights=arguments.load_strict_model_weights,
                    progress_bar=arguments.load_progress_bar,
                    algorithm_passes=arguments.algorithm_passes,
                    shard=self._shard,
                )
            elif arguments.load_path is not None:
                path = os.path.expanduser(arguments.load_path)
                self._load_checkpoint(path, arguments)
            else:
                self._shard()
        if path:
            state.run_name, state.load_path, now = run_name, path, state.timestamp
            run = f"The run, at epoch {now.epochs} and batch {now.batches},"
            self._announce(f"{'Weights' if self._loads_weights_only else run} loaded from {without_password(path)}.")
        if newest is None:
            progress.reset_fit_count()
        else:
            progress.check_branch()
            if saver is not None:
                saver.resumed_at = state.timestamp.batch
        if state.model is not self._model:  # an algorithm of the checkpoint has replaced it
            model = self._model = self._settings.model = self._evaluation.model = _checked_model(state.model)
            model.logger = self.logger
            # The state already has the metrics of the new model, perhaps with loaded values, so they are kept.
            for metrics in (state.train_metrics, *state.eval_metrics.values()):
                strategy.prepare_metrics(metrics.values())
            self._metrics.set_model(model)
        if self.logger.destinations:  # not before, because loading may change the seed
            self.logger.log_hyperparameters({"rank_zero_seed": state.rank_zero_seed})

    def _shard(self) -> None:
        """Shard the model among ranks; checkpoints gather what is sharded."""
        self._strategy.shard(self.state)
        self.state.fsdp_enabled = any(hasattr(each, "full_tensor") for each in self.state.model.parameters())

    def _wrap(self) -> None:
        """Let the strategy wrap the model, in a wrapper that checkpoints know.

        Raises:
            ValueError: It is another one.
        """
        model = self.state.model
        wrapped = self.state.model = self._strategy.wrap(model, self.state.algorithms)
        if wrapped is not model and not isinstance(wrapped, DistributedDataParallel):
            raise ValueError(
                f"`{type(self._strategy).__name__}.wrap` must return the model that it gets, changed in place, or a "
                f"`DistributedDataParallel` around it, got {described(wrapped)}: another wrapper would change the "
                f"names of the weights in checkpoints. Use hooks of the module instead."
            )

    def _load_checkpoint(self, path: str, arguments: Arguments) -> None:
        """Load `load_path`; the model is sharded among ranks as soon as its structure is final."""
        state, run_name = self.state, self.state.run_name
        checkpoint.load_checkpoint(
            path,
            state,
            self.logger,
            arguments.load_object_store,
            self._loads_weights_only,
            arguments.load_strict_model_weights,
            arguments.load_progress_bar,
            arguments.load_ignore_keys,
            arguments.load_exclude_algorithms,
            arguments.algorithm_passes,
            shard=self._shard,
        )
        if self._branch_duration is not None and state.run_name == run_name:
            raise ValueError(
                f"`run_name` must be a name of its own for a branch, got {run_name!r}, the name of the run that saved "
                f"`load_path`: its checkpoints could replace each other's. Use for example '{run_name}-branch'."
            )

    def _compile_model(self, config: dict[str, Any]) -> None:
        options = config.get("options") or {}
        if config.get("backend", "inductor") == "inductor" and options.get("layout_optimization", True):
            advice = 'pass `compile_config={"options": {"layout_optimization": False}}`'
            warn_about_narrow_convolutions(self._model, "`torch.compile` can choose", advice, stacklevel=5)
        self.state.model.compile(**config)

    def _announce(self, text: str) -> None:
        """Show a message to the user: in the log and, with a progress bar or console logger, on its stream."""
        log.info("%s", text)
        if self._stream is not None and dist.get_global_rank() == 0:
            tqdm.write(text, file=self._stream)  # above a progress bar, which would share its line
            self._stream.flush()


# ---- the parts, in the order in which they are built ----


def _checked_model(model: Any) -> ComposerModel:
    """Return the model after algorithms have changed it.

    Raises:
        ValueError: The model is not a `ComposerModel`.
    """
    if not isinstance(model, ComposerModel):
        raise ValueError(f"Algorithms must leave a `ComposerModel` in `state.model`, got {described(model)}.")
    return model


def resolve_precision(precision: Precision | None, device: Device) -> Precision:
    """Return the given precision, or the device's default.

    On a GPU that is bf16, whose range is that of fp32, so that losses need no scaling; on one without bf16 units, fp16;
    elsewhere, fp32.

    Raises:
        ValueError: The device does not support the precision.
    """
    if precision is None:
        precision = Precision.FP32
        if device.name == "gpu":
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            precision = Precision.AMP_BF16 if has_bf16 else Precision.AMP_FP16
    validate_precision(precision, device)
    return precision


def _strategy_of(arguments: Arguments) -> Strategy:
    """Return what runs the steps; nothing is connected yet.

    Raises:
        ValueError: `ddp_sync_strategy` is given with a strategy that has no such choice, or the strategy has a state
            or refuses algorithms; all are named.
    """
    config, sync = arguments.parallelism_config, arguments.ddp_sync_strategy
    if arguments.deepspeed_config is not None:
        if config is not None:
            raise ValueError("`parallelism_config` and `deepspeed_config` exclude each other. Give one.")
        config = arguments.deepspeed_config
    if isinstance(config, Strategy):
        name = type(config).__name__
        if sync is not None:
            raise ValueError(
                f"`ddp_sync_strategy` must not be given with `parallelism_config={name}(...)`, which decides itself "
                f"when gradients are averaged. Leave it out."
            )
        if hasattr(config, "state_dict"):
            raise ValueError(
                f"`parallelism_config` must not have a `state_dict`, as {name} has: a strategy is not saved. Give what "
                f"must be saved to a `Callback` with a `state_dict`."
            )
        refused = {type(each).__name__: config.refusal(each) for each in arguments.algorithms or ()}
        reasons = [f"`{algorithm}`: {reason}" for algorithm, reason in refused.items() if reason]
        if reasons:
            raise ValueError(f"`algorithms` cannot all run with {name}. {' '.join(reasons)}")
        return config
    if config is not None:
        from composer.trainer.sharded import ShardedParallel  # slow to import

        return ShardedParallel(config, sync)
    return Strategy() if dist.get_world_size() == 1 else DataParallel(sync)


def _connect(strategy: Strategy, device: Device, seconds: float) -> None:
    """Initialize the process group and connect the strategy to it; one process with the whole model needs neither.

    Raises:
        ValueError: The strategy is one for another number of ranks.
        RuntimeError: Environment variables to reach the other ranks are missing, the device has no backend, or the
            process group exists with another backend.
    """
    if type(strategy) is Strategy and dist.get_world_size() == 1:
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and dist.get_world_size() > 1 and not dist.is_initialized():
        raise RuntimeError(
            f"`WORLD_SIZE` is {dist.get_world_size()}, but {', '.join(missing)} is not set, so the processes cannot "
            f"find each other. Start them with `composer` or `torchrun`, or unset `WORLD_SIZE` to train in one process."
        )
    owns_group = not dist.is_initialized()
    # NCCL aborts the process after its timeout: exchanges on the host fail earlier and name the missing rank.
    dist.initialize_dist(device, seconds + _NCCL_EXTRA_SECONDS if device.dist_backend == "nccl" else seconds)
    atexit.unregister(_release_last_exchange)  # once, even with several Trainers
    atexit.register(_release_last_exchange)
    if owns_group:
        atexit.register(_destroy_group, torch.distributed.group.WORLD)
    strategy.connect(device, seconds)
    if strategy.world_size != dist.get_world_size():
        raise ValueError(
            f"`parallelism_config` must be a strategy for all {dist.get_world_size()} ranks, but "
            f"{type(strategy).__name__} has `world_size={strategy.world_size}`. Derive it from "
            f"`composer.trainer.RankStrategy`, and call `super().connect(...)`."
        )


def _release_last_exchange() -> None:
    """Let the threads of gloo drop the tensors of the last exchange, for which they need the interpreter.

    A thread that does so after the interpreter has ended aborts the process (torch 2.14).
    """
    time.sleep(_LAST_EXCHANGE_SECONDS)


def _destroy_group(group: Any) -> None:
    """Destroy the process group that a Trainer initialized when the process ends: other Trainers may use it before.

    Skipped if the program has replaced the group, or if it ends with an error: other ranks may never join a pending
    operation, and the process would hang.
    """
    failed = getattr(sys, "last_value", None) is not None
    if dist.is_initialized() and torch.distributed.group.WORLD is group and not failed:
        dist.destroy_process_group()


def generate_run_name() -> str:
    """Return the run name of the environment (COMPOSER_RUN_NAME, RUN_NAME), otherwise the time and two words."""
    name = os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")
    generator = random.Random()  # not the global one: the seed must not depend on whether a name is given
    return name or f"{int(time.time())}-{generator.choice(_ADJECTIVES)}-{generator.choice(_NOUNS)}"


def _check_keys(model: ModuleWithLoss, algorithms: Sequence[Algorithm]) -> None:
    """Check that algorithms find inputs and targets where the model does.

    Raises:
        ValueError: An algorithm has a different key than the `Trainer`.
    """
    for name in ("input_key", "target_key"):
        key = getattr(model, name)
        if key is None or callable(key):  # a function only reads: algorithms need a key of their own
            continue
        allowed = [key, *key] if isinstance(key, (tuple, list)) else [key]
        if isinstance(key, str):  # `State.batch_key` takes the defaults of algorithms for the name
            allowed += [None, 0 if name == "input_key" else 1]
        for algorithm in algorithms:
            own = getattr(algorithm, name, key)
            if not callable(own) and own not in allowed:
                kind = type(algorithm).__name__
                raise ValueError(
                    f"`{name}` of {kind} must be that of the `Trainer`, {key!r}, got {own!r}: it would change another "
                    f"part of the batch. Pass `{kind}(..., {name}={key!r})`."
                )


def _build_loggers(arguments: Arguments) -> tuple[list[LoggerDestination], list[Callback]]:
    """Return the loggers, with progress bar and console logger unless the user gives them, and the callbacks.

    Raises:
        ValueError: An object is given twice.
    """
    destinations: list[LoggerDestination] = list(arguments.loggers or ())
    callbacks: list[Callback] = []
    for each in arguments.callbacks or ():
        if any(each is other for other in destinations):
            raise ValueError(
                f"`callbacks` and `loggers` must contain every object once, got the same `{type(each).__name__}` "
                f"object in both. Leave it out of `callbacks`."
            )
        (destinations if isinstance(each, LoggerDestination) else callbacks).append(each)
    if arguments.progress_bar and arguments.log_to_console:
        warnings.warn(
            "`progress_bar` and `log_to_console` are both on and write over each other. Set one of them to False.",
            stacklevel=5,
        )
    requested: list[tuple[Any, dict[str, Any]]] = []
    if arguments.progress_bar:
        requested.append((ProgressBarLogger, {}))
    if arguments.log_to_console:
        requested.append((ConsoleLogger, {"log_interval": arguments.console_log_interval}))
    for cls, settings in requested:
        if any(type(destination) is cls for destination in destinations):
            warnings.warn(
                f"`loggers` already contains a `{cls.__name__}`, which is used; the Trainer's argument has no effect.",
                stacklevel=5,
            )
        else:
            destinations.append(cls(stream=arguments.console_stream, log_traces=arguments.log_traces, **settings))
    return destinations, callbacks


def _add_saver(
    arguments: Arguments, callbacks: list[Callback], destinations: Sequence[LoggerDestination]
) -> CheckpointSaver | None:
    """Return the saver of a run: the user's among the callbacks, or a new one, which is appended to them.

    Raises:
        ValueError: An option is invalid; or with `autoresume`, the run saves nothing, has no link to the latest
            checkpoint, saves weights only, or has no name by which a relaunch finds it; or a logger uploads the
            checkpoints in a way in which they are not found again.
    """
    saver = next((callback for callback in callbacks if isinstance(callback, CheckpointSaver)), None)
    arguments.warn_without_effect(saver is not None)
    if saver is None and arguments.save_folder is not None:
        folder, latest = arguments.save_folder, arguments.save_latest_filename
        remote = parse_uri(folder)[2].strip("/") if is_uri(folder) else "{run_name}/checkpoints"
        saver = CheckpointSaver(
            folder=folder,
            filename=arguments.save_filename,
            remote_file_name="/".join(filter(None, [remote, arguments.save_filename])),
            latest_filename=latest,
            latest_remote_file_name=None if latest is None else "/".join(filter(None, [remote, latest])),
            save_interval=arguments.save_interval,
            overwrite=arguments.save_overwrite,
            num_checkpoints_to_keep=arguments.save_num_checkpoints_to_keep,
            weights_only=arguments.save_weights_only,
            ignore_keys=arguments.save_ignore_keys,
            num_best_checkpoints_to_keep=arguments.save_num_best_checkpoints_to_keep,
            monitor=arguments.save_monitor,
            monitor_mode=arguments.save_monitor_mode,
            asynchronous=arguments.save_async,
        )
        callbacks.append(saver)  # last, so that it saves what other callbacks change
    if arguments.autoresume:
        if saver is None:
            raise ValueError("`autoresume=True` needs `save_folder`: the folder to save to and to resume from.")
        if saver.latest_filename is None:
            raise ValueError("`autoresume=True` needs `save_latest_filename`, the link to the latest checkpoint.")
        if saver.weights_only:
            raise ValueError(
                "`autoresume=True` cannot continue from weights alone, which `save_weights_only=True` saves. Turn one "
                "off."
            )
        if not (arguments.run_name or os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")):
            raise ValueError(
                "`autoresume=True` needs a `run_name` (or the variable COMPOSER_RUN_NAME): the same for every launch "
                "of one run, and another one for another run."
            )
    if saver is None or saver.remote_root is not None:
        return saver  # there are no checkpoints, or the saver uploads them itself
    links = saver.remote_file_name is not None and saver.latest_remote_file_name is not None
    for uploader in destinations:
        kind = type(uploader).__name__  # one such as `RemoteUploaderDownloader` has these two attributes
        pattern = getattr(uploader, "file_path_format_string", None)
        concurrent = getattr(uploader, "num_concurrent_uploads", None)
        if links and isinstance(pattern, str) and pattern != "{remote_file_name}":
            raise ValueError(
                f"Specifying a `file_path_format_string` to a `{kind}` is not currently supported with "
                "`save_latest_filename`: the link would name a file that is not there. Pass "
                "`save_latest_filename=None`."
            )
        if arguments.autoresume and isinstance(concurrent, int) and concurrent != 1:
            raise ValueError(
                "Multiple concurrent uploads is not currently supported when using autoresume: the link to the latest "
                f"checkpoint could arrive before it. Pass `num_concurrent_uploads=1` to the `{kind}`."
            )
    return saver


# ---- what `fit` can change later ----


class RunSettings:
    """Checks the data, evaluators, length and schedules of a run, and applies them to its state.

    Args:
        state: The run's state.
        model: The user's model, which provides the metrics.
        strategy: Runs the steps of all ranks.

    Attributes:
        train_spec: The training data; None: not given yet.
        step_every_batch: Step schedulers after every batch, otherwise after every epoch.
        given_schedulers: The user's schedulers.
        default_microbatch_size: The `batch_size` of the loader, if the user requests no size; see `BatchTrainer`.
    """

    def __init__(self, state: State, model: ComposerModel, strategy: Strategy) -> None:
        self.state, self.model, self.strategy = state, model, strategy
        self.train_spec: DataSpec | None = None
        self.train_label = "train"
        self.step_every_batch = True
        self.default_microbatch_size: float | None = None
        self._requested_size: Any = None  # the last `device_train_microbatch_size`
        # Schedulers that need the length of the run to be built, the optimizers that they are for, and their ratio.
        self._unbuilt: tuple[list[tuple[Any, Any]], float] | None = None
        self._unsized: Any = None  # the training loader that `_check_epochs` has already warned about
        self.given_schedulers: Sequence[Any] = ()

    @property
    def is_complete(self) -> bool:
        """True if the training data is given and all schedulers are built."""
        return self._unbuilt is None and self.train_spec is not None

    def set_train_data(self, arguments: Arguments) -> None:
        """Set the training data and the size of microbatches.

        None leaves a setting unchanged; with a new loader, it is the default of the label and the number of batches.

        Raises:
            ValueError: The model has nothing to train, or a setting does not suit the loader or the device.
        """
        state, spec, label = self.state, arguments.train_dataloader, arguments.train_dataloader_label
        length, subset = state._train_dataloader_len, arguments.train_subset_num_batches
        is_new = spec is not None
        if is_new:
            self.train_spec, self.train_label, length = spec, "train", None
        if is_new or arguments.device_train_microbatch_size is not None:
            self._set_microbatch_size(arguments.device_train_microbatch_size)
        if is_new:
            self.strategy.check_loader(spec.dataloader, "train_dataloader")
            pin_batches(spec.dataloader, state.device)
            trained = [parameter.requires_grad for parameter in self.model.parameters()]
            if trained and True not in trained:
                raise ValueError(
                    f"`model` must have parameters that require gradients, got {user_model_name(self.model)}, all of "
                    f"whose {len(trained)} parameters are frozen: there is nothing to train. Call "
                    f"`requires_grad_(True)` on the part to train, or leave `train_dataloader` out to evaluate only."
                )
            state.train_dataloader, state.train_data_spec = spec.dataloader, spec
        if label is not None:
            self.train_label = label
        if self.train_spec is None or not (is_new or label is not None or subset is not None):
            return
        if subset is None:
            subset = -1 if length is None else length
        state.set_dataloader(self.train_spec.dataloader, self.train_label, subset)
        local = None if state.dataloader_len is None else state.dataloader_len.value
        shortest = self.strategy.min_length(local)
        if shortest is not None and shortest != local:
            state.dataloader_len = shortest

    def _set_microbatch_size(self, requested: Any) -> None:
        state, spec = self.state, self.train_spec
        requested = self._requested_size = self._requested_size if requested is None else requested
        size = requested
        if requested is None or requested == "auto":
            size = None if spec is None else plain_number(getattr(spec.dataloader, "batch_size", None))
        if requested == "auto":
            if state.profiler is not None:
                raise ValueError(
                    "`profiler` cannot be used with `device_train_microbatch_size='auto'`: it would measure the "
                    "search. Give a number."
                )
            check_local_forward("device_train_microbatch_size", self.strategy)
            if state.device.name != "gpu":
                raise ValueError("`device_train_microbatch_size='auto'` needs a GPU: it searches what fits its memory.")
            if spec is not None and size is None:
                raise ValueError(
                    "`device_train_microbatch_size='auto'` starts from the loader's `batch_size`, but "
                    "`train_dataloader` has none. Give a number instead."
                )
            warnings.warn(
                "`device_train_microbatch_size='auto'` may potentially fail with unexpected CUDA errors. Give a "
                "number if it does.",
                stacklevel=5,
            )
        if spec is not None:
            check_microbatch_size("device_train_microbatch_size", size, spec)
        state.device_train_microbatch_size, state.auto_microbatching = size, requested == "auto"
        self.default_microbatch_size = size if requested is None else None

    def set_evaluators(self, arguments: Arguments) -> None:
        """Set the evaluators.

        Raises:
            ValueError: A loader can be iterated only once.
        """
        interval, subset = arguments.eval_interval, arguments.eval_subset_num_batches
        evaluators = self.evaluators_of(
            arguments.eval_dataloader, 1 if interval is None else interval, -1 if subset is None else subset
        )
        for evaluator in evaluators:
            loader = evaluator.dataloader.dataloader
            if _is_iterator(loader):
                raise ValueError(
                    f"`eval_dataloader` must be a loader that can be iterated in every evaluation, got a "
                    f"{type(loader).__name__} for {evaluator.label!r}, which can be iterated only once. Pass a "
                    f"`DataLoader`, a list, or another iterable that can be iterated repeatedly."
                )
        self.state.evaluators = evaluators

    def change_evaluation(self, arguments: Arguments) -> None:
        """Apply the arguments of `fit` about evaluation; None leaves a setting, or is the default for a new loader.

        Raises:
            ValueError: An interval or number of batches is given, but there are no evaluators.
        """
        if arguments.eval_dataloader is not None:
            self.set_evaluators(arguments)
            return
        interval, subset = arguments.eval_interval, arguments.eval_subset_num_batches
        given = {"eval_interval": interval, "eval_subset_num_batches": subset}
        names = [f"`{name}`" for name, value in given.items() if value is not None]
        if names and not self.state.evaluators:
            raise ValueError(
                f"{' and '.join(names)} must not be given without evaluators. Pass `eval_dataloader` to the "
                f"`Trainer` or to `fit`."
            )
        values = {"eval_interval": interval, "subset_num_batches": subset}
        for evaluator in self.state.evaluators:
            evaluator._inherit(**{name: value for name, value in values.items() if value is not None})

    def evaluators_of(self, given: Any, interval: Any, subset: int) -> list[Evaluator]:
        """Build evaluators, each with an interval, and add their metrics to the state.

        Several loaders are labeled "eval", "eval_1", "eval_2" and so on, with a warning.

        Args:
            given: The argument `eval_dataloader`.
            interval: The interval of evaluators that have none.
            subset: The number of batches per evaluation of evaluators that have none; -1: all.

        Raises:
            ValueError: Evaluators are mixed with loaders, two have the same label, or a loader never ends.
        """
        # A loader may itself be a list of batches: only lists of loaders and evaluators are sequences here.
        kinds = (Evaluator, DataSpec, torch.utils.data.DataLoader)
        is_sequence = isinstance(given, (list, tuple)) and given and all(isinstance(each, kinds) for each in given)
        given = list(given) if is_sequence else [given]
        wrapped = [isinstance(each, Evaluator) for each in given]
        if any(wrapped) and not all(wrapped):
            raise ValueError(
                "Mixing Evaluator with other classes is not allowed, please wrap every loader: "
                "`Evaluator(label=..., dataloader=...)`."
            )
        labels = ["eval", *(f"eval_{index}" for index in range(1, len(given)))]
        if len(given) > 1 and not any(wrapped):
            warnings.warn(
                f"The loaders of `eval_dataloader` are labeled {', '.join(map(repr, labels))}. Wrap each to choose "
                f"its label: `Evaluator(label=..., dataloader=...)`.",
                stacklevel=5,
            )
        evaluators: list[Evaluator] = []
        for label, each in zip(labels, given, strict=True):
            evaluator = each
            if not isinstance(each, Evaluator):
                evaluator = Evaluator(label=label, dataloader=ensure_data_spec(each, "eval_dataloader"))
            if any(other.label == evaluator.label for other in evaluators):
                raise ValueError(
                    f"The labels of evaluators must differ, got {evaluator.label!r} twice. Give each `Evaluator` "
                    f"another label."
                )
            evaluators.append(evaluator)
        for evaluator in evaluators:
            evaluator._inherit(eval_interval=interval, subset_num_batches=subset)
            loader = evaluator.dataloader.dataloader
            self.strategy.check_loader(loader, "eval_dataloader")
            pin_batches(loader, self.state.device)
            if evaluator.subset_num_batches == -1:
                advice = "Pass the number of batches per evaluation: `eval_subset_num_batches=...`."
                check_ends("eval_dataloader", loader, advice)
            metrics = copy.deepcopy(self.model.get_metrics(is_train=False))
            self.strategy.prepare_metrics(metrics.values())
            self.state.eval_metrics[evaluator.label] = evaluator.select_metrics(metrics)
        return evaluators

    def set_max_duration(self, duration: Time[Any], ratio: float) -> None:
        """Set the length of the run to `duration`, scaled by `ratio`."""
        self.state.max_duration = self._scaled(duration, ratio, "max_duration")
        self._check_epochs()

    def set_duration(self, duration: Time[Any] | None, ratio: float, begun: Timestamp | None) -> None:
        """Set the end of this call of `fit`: `duration` from its start, or `max_duration` if None.

        Args:
            duration: How much to train.
            ratio: Scales how much this call of `fit` trains.
            begun: The start of this call in the run that is resumed, which may have reached its end; None: it begins
                now.

        Raises:
            ValueError: No duration is given, it has been reached, or `ratio` makes it zero.
        """
        state = self.state
        start = state.timestamp if begun is None else begun
        if duration is not None:
            state.max_duration = start.get(duration.unit) + self._scaled(duration, ratio, "duration")
        limit = state.max_duration
        if limit is None:
            raise ValueError("No `max_duration` was given. Pass it to the `Trainer`, or `duration` to `fit`.")
        if state.timestamp >= limit and begun is None:
            raise ValueError(
                f"The run is already at its `max_duration` of {str(limit)!r}. Please provide the `duration` or specify "
                f"`reset_time=True` to `fit`, or raise `trainer.state.max_duration`."
            )
        begin = start.get(limit.unit)
        if duration is None and limit > begin:
            state.max_duration = begin + self._scaled(limit - begin, ratio, "max_duration")
        self._check_epochs()

    def _scaled(self, duration: Time[Any], ratio: float, argument: str) -> Time[Any]:
        """Scale a duration by `scale_schedule_ratio`.

        Raises:
            ValueError: The scaled duration is zero, or in iterations, which the run does not have.
        """
        if duration.unit is TimeUnit.ITERATION and self.state._iteration_length is None:
            raise ValueError(
                f"`{argument}` must not be in iterations, got {str(duration)!r}: it would "
                f"never end. Use for example '10ep' or '1000ba'."
            )
        scaled = duration if ratio == 1.0 else duration * ratio
        if scaled.value <= 0:
            raise ValueError(
                f"`scale_schedule_ratio` {ratio!r} makes `{argument}` {str(duration)!r} zero. Use a larger one."
            )
        return scaled

    def _check_epochs(self) -> None:
        """Check that `max_duration` in epochs ends: a loader may yield only one epoch, or one that never ends.

        Raises:
            ValueError: The loader is an iterator, for several epochs, or is known to be endless.
        """
        state, limit = self.state, self.state.max_duration
        if limit is None or limit.unit is not TimeUnit.EPOCH or self.train_spec is None:
            return
        loader, epochs = self.train_spec.dataloader, limit.value - state.timestamp.epochs
        if epochs > 1 and _is_iterator(loader) and not is_endless(loader):
            raise ValueError(
                f"`train_dataloader` must be a loader that can be iterated {epochs} times for `max_duration` "
                f"{str(limit)!r}, got a {type(loader).__name__}, which can be iterated only once. Pass a `DataLoader`, "
                f"a list, or another iterable that can be iterated repeatedly."
            )
        if epochs > 0 and state.dataloader_limit is None and loader is not self._unsized:
            check_ends(
                "train_dataloader",
                loader,
                f"Because `max_duration` is {str(limit)!r}, pass `train_subset_num_batches=...`, the number of batches "
                f"per epoch, or a `max_duration` such as '1000ba'.",
            )
            self._unsized = loader

    def check_schedulers(self, schedulers: Any, arguments: Arguments) -> None:
        """Check the arguments of `set_schedulers`.

        Raises:
            TypeError: An object is not a scheduler.
            ValueError: A scheduler belongs to another optimizer, or an argument has no effect without schedulers.
        """
        ratio = arguments.scale_schedule_ratio
        if isinstance(schedulers, Mapping) and not schedulers:
            raise TypeError("`schedulers` must be a scheduler, several, or schedulers by optimizer, got an empty dict.")
        if schedulers is not None and _with_optimizers(schedulers):
            check_schedulers(_with_optimizers(schedulers), self.state.optimizers)
        elif ratio != 1.0:
            raise ValueError(f"`scale_schedule_ratio` must be 1.0 without `schedulers`, got {ratio!r}.")
        elif arguments.step_schedulers_every_batch is not None:
            raise ValueError("`step_schedulers_every_batch` has no effect without `schedulers`. Leave it out.")

    def set_schedulers(self, schedulers: Any, arguments: Arguments) -> None:
        """Set the schedulers, scaled by the ratio; an empty sequence leaves them unchanged."""
        given, every_batch = _with_optimizers(schedulers), arguments.step_schedulers_every_batch
        if not given:
            return
        self.given_schedulers = [scheduler for scheduler, _ in given]
        if every_batch is None:
            every_batch = not any(isinstance(scheduler, LRScheduler) for scheduler in self.given_schedulers)
        self.step_every_batch = every_batch
        self._unbuilt = (given, arguments.scale_schedule_ratio)
        if self.state.max_duration is not None and self.train_spec is not None:
            self.compile_schedulers()

    def compile_schedulers(self) -> None:
        """Build schedulers that could not be built before the length of the run and its data were known.

        Raises:
            ValueError: There is no optimizer.
        """
        if self._unbuilt is None:
            return
        (given, ratio), self._unbuilt = self._unbuilt, None
        built: list[LRScheduler] = []
        for scheduler, owner in given:
            if isinstance(scheduler, LRScheduler):
                scale_pytorch_scheduler(scheduler, ratio)
                built.append(scheduler)
            elif not self.state.optimizers:
                raise ValueError("`schedulers` need an optimizer, but the run has none. Pass `optimizers`.")
            else:
                for optimizer in self.state.optimizers if owner is None else [owner]:
                    built.append(compile_composer_scheduler(scheduler, self.state, ratio, optimizer))
        self.state.schedulers = built
        self._check_lengths([scheduler for scheduler in self.given_schedulers if isinstance(scheduler, LRScheduler)])

    def _check_lengths(self, schedulers: Sequence[LRScheduler]) -> None:
        """Warn about a torch scheduler whose length is in batches but which is stepped per epoch, or the reverse."""
        limit, per_epoch = self.state.max_duration, self.state.dataloader_len
        if limit is None or per_epoch is None or limit.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH):
            return
        left = (limit - self.state.timestamp.get(limit.unit)).value
        epochs, batches = left, left * per_epoch.value
        if limit.unit is TimeUnit.BATCH:
            epochs, batches = left // per_epoch.value, left
        if self.step_every_batch:
            steps, unit, others, other = batches, "batch", epochs, "epochs"
            advice = "Leave out `step_schedulers_every_batch`."
        else:
            steps, unit, others, other = epochs, "epoch", batches, "batches"
            advice = "Pass `step_schedulers_every_batch=True`."
        for scheduler in schedulers:
            for name in ("total_steps", "T_max"):
                length = getattr(scheduler, name, None)
                given = f"`{type(scheduler).__name__}` has {name}={length}"
                stepped = f"but it is stepped once per {unit}, {steps} times"
                if length is not None and length != steps and length == others:
                    warnings.warn(f"{given}, the number of {other} of the run, {stepped}. {advice}", stacklevel=6)
                elif length is not None and name == "total_steps" and length < steps:
                    text = f"{given} and raises an error after that many steps, {stepped}."
                    warnings.warn(f"{text} Pass {name}={steps}.", stacklevel=6)

    def set_scaler(self) -> None:
        """Create a gradient scaler for fp16, unless the strategy has one; remove it for other precisions."""
        state = self.state
        state.scaler = None
        if state.precision is Precision.AMP_FP16 and not self.strategy.scales_losses:
            closure = any(needs_closure(optimizer) for optimizer in state.optimizers)
            kind = ClosureGradScaler if closure else torch.amp.GradScaler
            state.scaler = kind(state.device.torch_type)


def _with_optimizers(schedulers: Any) -> list[tuple[Any, torch.optim.Optimizer | None]]:
    """Return pairs of a scheduler and the optimizer that the user gives it to; None: all optimizers."""
    if isinstance(schedulers, Mapping):
        return [(each, optimizer) for optimizer, given in schedulers.items() for each in ensure_tuple(given)]
    return [(scheduler, None) for scheduler in ensure_tuple(schedulers)]


def pin_batches(dataloader: Any, device: Device) -> None:
    """Let a loader with workers pin its batches if they go to a GPU: copies from pinned memory block nobody.

    Without workers, the main thread would pin them, which takes as long as the copy.
    """
    if device.name == "gpu" and isinstance(dataloader, torch.utils.data.DataLoader) and dataloader.num_workers:
        dataloader.pin_memory = True


def _is_iterator(dataloader: Any) -> bool:
    """Return True for generators and other iterators of Python, which can be iterated only once.

    Iterators of libraries can often be iterated repeatedly.
    """
    return isinstance(dataloader, Iterator) and type(dataloader).__module__ in ("builtins", "itertools")
