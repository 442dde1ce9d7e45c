"""The parts of a run that only the Trainer's constructor builds, in the order in which it builds them.

These are the ranks, the state with model and optimizer, the loggers and callbacks, and the saver of checkpoints.
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
import random
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, SupportsIndex

import torch
import torch.distributed

from composer.callbacks.checkpoint_saver import CheckpointSaver
from composer.core import Algorithm, Callback, Precision, State
from composer.devices import Device
from composer.distributed import DDPSyncStrategy
from composer.loggers import LoggerDestination
from composer.loggers.console_logger import ConsoleLogger
from composer.loggers.progress_bar_logger import ProgressBarLogger
from composer.loop.hosted_run import algorithms_in
from composer.models import ComposerModel
from composer.models.module_with_loss import ModuleWithLoss, as_composer_model
from composer.trainer.microbatch import check_not_profiled
from composer.trainer.optimizers import build_optimizers, is_function
from composer.trainer.options import Arguments, check_distinct, described
from composer.trainer.ranks import DataParallel, SingleProcess
from composer.trainer.remote_files import RemoteFiles, check_uris
from composer.utils import dist, ensure_tuple, is_uri, parse_uri, reproducibility
from composer.utils.import_helpers import import_from_distribution
from composer.utils.parallelism import ParallelismConfig
from composer.utils.terminal import open_stream

log = logging.getLogger(__name__)

_NCCL_EXTRA_SECONDS = 15.0
_LAST_EXCHANGE_SECONDS = 0.1

_ADJECTIVES = "amber bold brisk calm clever eager fair gentle keen lively lucid merry noble quiet swift vivid".split()
_NOUNS = "badger beaver cedar comet falcon fjord harbor heron lynx maple meadow otter raven sparrow willow wren".split()


def set_python_log_level(level: str | None) -> None:
    """Show the library's log records from `level` on, on stderr."""
    if level is None:
        return
    if not isinstance(logging.getLevelName(level.upper()), int):
        raise ValueError(
            f"`python_log_level` must be 'debug', 'info', 'warning', 'error' or 'critical', got {level!r}."
        )
    rank = os.environ.get("RANK", "0")
    logging.basicConfig(
        format=f"%(asctime)s: rank{rank}[%(process)d][%(threadName)s]: %(levelname)s: %(name)s: %(message)s",
        stream=open_stream("stderr"),
    )
    logging.getLogger("composer").setLevel(level.upper())


def build_model(arguments: Arguments) -> tuple[ComposerModel, bool]:
    """Return the model, with a loss if it has none, and True if it was compiled with `torch.compile`.

    Raises:
        TypeError: `model` is not a module.
        ValueError: It has no loss and none is given, or has one and others are given.
    """
    model = arguments.model
    original = getattr(model, "_orig_mod", None)
    compiled = original is not None
    if compiled:
        log.warning("`model` is already compiled with `torch.compile`: it is unwrapped, and compiled again at the end.")
        model = original
    names = ("loss", "metrics", "input_key", "target_key")
    return as_composer_model(model, **{name: getattr(arguments, name) for name in names}), compiled


def check_model(model: Any) -> ComposerModel:
    """Return the model after algorithms have changed it.

    Raises:
        ValueError: It is not a `ComposerModel`.
    """
    if not isinstance(model, ComposerModel):
        raise ValueError(f"Algorithms must leave a `ComposerModel` in `state.model`, got {described(model)}.")
    return model


def connect_ranks(device: Device, arguments: Arguments) -> SingleProcess:
    """Return the ranks of the run; initialize the process group if there is more than one process.

    Args:
        device: The device of this rank, which determines the backend.
        arguments: The Trainer's arguments.

    Raises:
        ValueError: An argument is invalid.
        RuntimeError: Environment variables to reach the other ranks are missing, the device has no backend, or the
            process group exists with another backend.
    """
    strategy, seconds = _check_strategy(arguments.ddp_sync_strategy), float(arguments.dist_timeout)
    config = ParallelismConfig.of(arguments.parallelism_config)
    if dist.get_world_size() == 1 and config is None:
        return SingleProcess()
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
    if config is None:
        return DataParallel(strategy, seconds)
    from composer.trainer.sharded import ShardedParallel  # its imports are slow

    return ShardedParallel(config, device, strategy, seconds)


def _check_strategy(strategy: Any) -> DDPSyncStrategy | None:
    """Convert the argument `ddp_sync_strategy`.

    Raises:
        ValueError: The strategy is unknown.
    """
    if strategy is None or isinstance(strategy, DDPSyncStrategy):
        return strategy
    known = [member.value for member in DDPSyncStrategy]
    if not isinstance(strategy, str) or strategy.lower() not in known:
        names = ", ".join(f"'{name}'" for name in known)
        raise ValueError(f"`ddp_sync_strategy` must be {names} or None, got {strategy!r}.")
    return DDPSyncStrategy(strategy)


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


def build_state(
    model: ComposerModel,
    arguments: Arguments,
    device: Device,
    precision: Precision,
    parallel: SingleProcess,
) -> State:
    """Place the model and its optimizers on the device, the same on all ranks, and return the run's state.

    Args:
        model: The model.
        arguments: The Trainer's arguments.
        device: The device of this rank.
        precision: The numerical precision.
        parallel: The ranks of the run.

    Raises:
        TypeError: An algorithm is not an `Algorithm`, or `optimizers` is not an optimizer.
        ValueError: An algorithm is given twice, or the seed or the optimizers cannot be used.
    """
    optimizers = [] if is_function(arguments.optimizers) else build_optimizers(model, arguments.optimizers)
    run_name = parallel.broadcast(generate_run_name() if arguments.run_name is None else arguments.run_name)
    seed = _seed_run(arguments.seed, arguments.deterministic_mode, parallel)
    placed = parallel.to_device(model, device)
    parallel.sync_module_states(placed)
    for optimizer in optimizers:
        device.optimizer_to_device(optimizer)
    algorithms = algorithms_in(arguments.algorithms)
    check_distinct("algorithms", algorithms)
    _check_keys(model, algorithms)
    state = State(
        model=placed,
        rank_zero_seed=seed,
        run_name=run_name,
        device=device,
        precision=precision,
        precision_config=arguments.precision_config,
        optimizers=optimizers,
        algorithms=algorithms,
        save_metrics=arguments.save_metrics,
    )
    parallel.describe_sharding(state)
    return state


def _check_keys(model: ComposerModel, algorithms: Sequence[Algorithm]) -> None:
    """Check that algorithms find inputs and targets where the model does.

    Raises:
        ValueError: An algorithm has a different key than the `Trainer`.
    """
    if not isinstance(model, ModuleWithLoss):
        return
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


def generate_run_name() -> str:
    """Return the run name of the environment (COMPOSER_RUN_NAME, RUN_NAME), otherwise the time and two words."""
    for variable in ("COMPOSER_RUN_NAME", "RUN_NAME"):
        if os.environ.get(variable):
            return os.environ[variable]
    generator = random.Random()  # not the global one: the seed must not depend on whether a name is given
    return f"{int(time.time())}-{generator.choice(_ADJECTIVES)}-{generator.choice(_NOUNS)}"


def _seed_run(seed: SupportsIndex | None, deterministic_mode: bool, parallel: SingleProcess) -> int:
    """Seed all ranks with the same number, so that module surgery makes the same choices everywhere.

    Args:
        seed: The seed; None draws one.
        deterministic_mode: Use deterministic operations only.
        parallel: The ranks of the run.

    Returns:
        The seed of rank 0. Rank r trains with `seed + r`.

    Raises:
        ValueError: The seed of a rank is out of range.
    """
    if deterministic_mode:
        reproducibility.configure_deterministic_mode()
    largest = reproducibility.MAX_SEED - (parallel.world_size - 1)
    drawn = reproducibility.get_random_seed() % (largest + 1) if seed is None else seed
    chosen = parallel.broadcast(operator.index(drawn))
    if not 0 <= chosen <= largest:
        raise ValueError(f"`seed` must be from 0 to {largest}, so that every rank gets one, got {chosen!r}.")
    reproducibility.seed_all(chosen)
    return chosen


class TrainerProfiler(Protocol):
    """The interface of the Trainer's `profiler`; `composer.profiler.Profiler` implements it."""

    @property
    def remote_filenames(self) -> Sequence[str]:
        """The URIs of files that it uploads."""

    def bind_to_state(self, state: State) -> None:
        """Add the profiler to the callbacks of the run."""


def bind_profiler(arguments: Arguments, state: State) -> None:
    """Profile a run, unless `profiler` is None.

    Raises:
        ValueError: The microbatch size is searched for.
        TypeError: `profiler` is not a profiler.
    """
    profiler = arguments.profiler
    if profiler is None:
        return
    check_not_profiled(profiler, arguments.device_train_microbatch_size)
    if isinstance(profiler, type) or not hasattr(profiler, "bind_to_state"):
        raise TypeError(f"`profiler` must be a `composer.profiler.Profiler`, got {profiler!r}. Pass `Profiler(...)`.")
    warnings.warn(
        "The profiler is enabled. Profiling adds overhead to training: do not compare its speed.",
        stacklevel=4,
    )
    state.profiler = profiler
    profiler.bind_to_state(state)


def build_loggers(
    arguments: Arguments,
) -> tuple[list[LoggerDestination], list[Callback]]:
    """Return the loggers, with progress bar and console logger unless the user gives them, and the callbacks.

    On the MosaicML platform, its logger is added as well.

    Raises:
        TypeError: An object is not a logger or a callback.
        ValueError: An object is given twice.
    """
    destinations, others = list(ensure_tuple(arguments.loggers)), list(ensure_tuple(arguments.callbacks))
    for argument, items, kind in (("loggers", destinations, LoggerDestination), ("callbacks", others, Callback)):
        for item in items:
            if not isinstance(item, kind) and not (kind is LoggerDestination and _acts_as_logger(item)):
                kinds = {"algorithms": Algorithm, "callbacks": Callback}
                hint = "".join(f" Pass it in `{name}`." for name, other in kinds.items() if isinstance(item, other))
                raise TypeError(f"`{argument}` must hold `{kind.__name__}` objects, got {described(item)}.{hint}")
    check_distinct("loggers", destinations)
    check_distinct("callbacks", others)
    check_distinct("callbacks` and `loggers", [*destinations, *others])
    destinations += [each for each in others if isinstance(each, LoggerDestination)]
    others = [each for each in others if not isinstance(each, LoggerDestination)]
    if arguments.progress_bar and arguments.log_to_console:
        warnings.warn(
            "`progress_bar` and `log_to_console` are both on and write over each other. Set one of them to False.",
            stacklevel=4,
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
                stacklevel=4,
            )
        else:
            destinations.append(cls(stream=arguments.console_stream, log_traces=arguments.log_traces, **settings))
    if os.environ.get("MOSAICML_PLATFORM", "").lower() == "true" and os.environ.get("MOSAICML_ACCESS_TOKEN_FILE"):
        _add_platform_logger(destinations)
    return destinations, others


def _add_platform_logger(destinations: list[LoggerDestination]) -> None:
    """Add the logger of the MosaicML platform, unless there is one; warn if its package is not installed."""
    name = "composer.loggers.MosaicMLLogger"
    try:
        cls = import_from_distribution("composer.loggers.mosaicml_logger", "MosaicMLLogger", "composer-compat", name)
    except ModuleNotFoundError as error:
        warnings.warn(f"Nothing is sent to the MosaicML platform: {error}", stacklevel=4)
        return
    if not any(isinstance(destination, cls) for destination in destinations):
        destinations.append(cls())


def _acts_as_logger(item: Any) -> bool:
    """Return True if an object has everything that a logger has, as mocks do."""
    names = (name for name in dir(LoggerDestination) if not name.startswith("_"))
    return not isinstance(item, type) and all(hasattr(item, name) for name in names)


def build_uploaders(
    state: State, callbacks: Sequence[Callback], destinations: Sequence[LoggerDestination]
) -> list[LoggerDestination]:
    """Return a logger that uploads the files that profiler and callbacks name by URIs; an empty list if none do.

    Args:
        state: The run, which may have a profiler.
        callbacks: The user's callbacks.
        destinations: The loggers; those that upload serve URIs in their buckets.

    Raises:
        RuntimeError: Rank 0 cannot upload; there, its own error is raised.
    """
    # A logger such as `RemoteUploaderDownloader` tells by its method `serves` which URIs it uploads.
    uploaders = [serves for each in destinations if callable(serves := getattr(each, "serves", None))]
    names = list(getattr(state.profiler, "remote_filenames", ()))
    names += [getattr(callback, "remote_file_name", None) for callback in callbacks]
    uris = [name for name in names if isinstance(name, str) and is_uri(name)]
    uris = [uri for uri in uris if not any(serves(uri) is True for serves in uploaders)]
    check_uris(uris, state.run_name)
    return [RemoteFiles(uris)] if uris else []


def check_uploaders(destinations: Sequence[LoggerDestination], saver: CheckpointSaver | None, autoresume: bool) -> None:
    """Check that the checkpoints that loggers upload can be found again.

    Args:
        destinations: The loggers.
        saver: The run's saver.
        autoresume: The Trainer's `autoresume`.

    Raises:
        ValueError: A logger renames the link to the latest checkpoint, or uploads it before its checkpoint.
    """
    if saver is None or saver.remote_root is not None:
        return  # there are no checkpoints, or the saver uploads them itself
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
        if autoresume and isinstance(concurrent, int) and concurrent != 1:
            raise ValueError(
                "Multiple concurrent uploads is not currently supported when using autoresume: the link to the latest "
                f"checkpoint could arrive before it. Pass `num_concurrent_uploads=1` to the `{kind}`."
            )


def build_saver(arguments: Arguments, callbacks: Sequence[Callback]) -> tuple[CheckpointSaver | None, list[Callback]]:
    """Return the saver of a run, and all callbacks with it.

    Args:
        arguments: The Trainer's arguments.
        callbacks: The user's callbacks, which may include a `CheckpointSaver`.

    Raises:
        ValueError: An option is invalid.
    """
    saver = next((callback for callback in callbacks if isinstance(callback, CheckpointSaver)), None)
    if saver is not None or arguments.save_folder is None:
        return saver, list(callbacks)
    folder, latest = os.fspath(arguments.save_folder), arguments.save_latest_filename
    remote = parse_uri(folder)[2].strip("/") if is_uri(folder) else "{run_name}/checkpoints"
    saver = CheckpointSaver(
        folder=folder,
        filename=arguments.save_filename,
        remote_file_name="/".join(filter(None, [remote, os.fspath(arguments.save_filename)])),
        latest_filename=latest,
        latest_remote_file_name=None if latest is None else "/".join(filter(None, [remote, os.fspath(latest)])),
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
    return saver, [*callbacks, saver]  # last, so that it saves what other callbacks change


def check_autoresume(saver: CheckpointSaver | None, run_name: str | None) -> None:
    """Check the requirements of `autoresume=True`.

    Raises:
        ValueError: The run saves nothing, has no link to the latest checkpoint, saves weights only, or has no name by
            which a relaunch finds it.
    """
    if saver is None:
        raise ValueError("`autoresume=True` needs `save_folder`: the folder to save to and to resume from.")
    if saver.latest_filename is None:
        raise ValueError("`autoresume=True` needs `save_latest_filename`, the link to the latest checkpoint.")
    if saver.weights_only:
        raise ValueError(
            "`autoresume=True` cannot continue from weights alone, which `save_weights_only=True` saves. Turn one off."
        )
    if run_name is None and not (os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")):
        raise ValueError(
            "`autoresume=True` needs a `run_name` (or the variable COMPOSER_RUN_NAME): the same for every launch of "
            "one run, and another one for another run."
        )
