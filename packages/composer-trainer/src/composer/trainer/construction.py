"""The parts of a run that only the Trainer's constructor builds."""

from __future__ import annotations

import atexit
import logging
import operator
import os
import platform
import random
import sys
import time
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any, Protocol, SupportsIndex

import torch
import torch.distributed

from composer.core import Callback, State
from composer.devices import Device
from composer.distributed import DDPSyncStrategy
from composer.loggers import Logger, LoggerDestination
from composer.loggers.console_logger import ConsoleLogger
from composer.loggers.progress_bar_logger import ProgressBarLogger
from composer.models import ComposerModel
from composer.trainer.microbatch import check_not_profiled
from composer.trainer.options import LogOptions, RunOptions, described
from composer.trainer.ranks import DataParallel, SingleProcess
from composer.utils import dist, ensure_tuple, reproducibility
from composer.utils.parallelism import ParallelismConfig
from composer.utils.terminal import open_stream

__all__ = [
    "RunsProfiler",
    "bind_profiler",
    "build_loggers",
    "check_distinct",
    "check_model",
    "connect_ranks",
    "generate_run_name",
    "log_standard_hparams",
    "seed_run",
    "set_python_log_level",
]

log = logging.getLogger(__name__)

_NCCL_EXTRA_SECONDS = 15.0

_ADJECTIVES = "amber bold brisk calm clever eager fair gentle keen lively lucid merry noble quiet swift vivid".split()
_NOUNS = "badger beaver cedar comet falcon fjord harbor heron lynx maple meadow otter raven sparrow willow wren".split()


def check_model(model: Any) -> tuple[ComposerModel, bool]:
    """Return the model, and True if it was compiled with `torch.compile`.

    Raises:
        ValueError: `model` is not a `ComposerModel`.
    """
    original = getattr(model, "_orig_mod", None)
    compiled = original is not None
    if compiled:
        log.warning("`model` is already compiled with `torch.compile`: it is unwrapped, and compiled again at the end.")
        model = original
    if not isinstance(model, ComposerModel):
        raise ValueError(
            f"`model` must be a `ComposerModel`, got {described(model)}. Subclass `composer.ComposerModel`, or "
            f"wrap a classifier: `composer.models.ComposerClassifier(model, num_classes=...)`."
        )
    return model, compiled


def generate_run_name() -> str:
    """Return the run name of the environment (COMPOSER_RUN_NAME, RUN_NAME), otherwise the time and two words."""
    for variable in ("COMPOSER_RUN_NAME", "RUN_NAME"):
        if os.environ.get(variable):
            return os.environ[variable]
    generator = random.Random()  # not the global one: the seed must not depend on whether a name is given
    return f"{int(time.time())}-{generator.choice(_ADJECTIVES)}-{generator.choice(_NOUNS)}"


def build_loggers(
    options: LogOptions,
) -> tuple[list[LoggerDestination], list[Callback]]:
    """Return the loggers, with progress bar and console logger unless the user gives them, and the callbacks.

    Raises:
        TypeError: An object is not a logger or a callback.
        ValueError: An object is given twice.
    """
    destinations, others = list(ensure_tuple(options.loggers)), list(ensure_tuple(options.callbacks))
    for argument, items, kind in (("loggers", destinations, LoggerDestination), ("callbacks", others, Callback)):
        for item in items:
            if not isinstance(item, kind):
                raise TypeError(f"`{argument}` must hold `{kind.__name__}` objects, got {described(item)}.")
    check_distinct("loggers", destinations)
    check_distinct("callbacks", others)
    check_distinct("callbacks` and `loggers", [*destinations, *others])
    present = {type(destination) for destination in destinations}
    if options.progress_bar and options.log_to_console:
        warnings.warn(
            "`progress_bar` and `log_to_console` are both on and write over each other. Set one of them to False.",
            stacklevel=3,
        )
    for enabled, cls in ((options.progress_bar, ProgressBarLogger), (options.log_to_console, ConsoleLogger)):
        if enabled and cls in present:
            warnings.warn(
                f"`loggers` already contains a `{cls.__name__}`, which is used; the Trainer's argument has no effect.",
                stacklevel=3,
            )
    if options.progress_bar and ProgressBarLogger not in present:
        destinations.append(ProgressBarLogger(stream=options.console_stream, log_traces=options.log_traces))
    if options.log_to_console and ConsoleLogger not in present:
        destinations.append(
            ConsoleLogger(
                stream=options.console_stream,
                log_interval=options.console_log_interval,
                log_traces=options.log_traces,
            )
        )
    return destinations, others


def check_distinct(argument: str, items: Sequence[Any]) -> None:
    """Check that no object is given twice: it would act twice. Two objects of one class are fine.

    Raises:
        ValueError: An object is given twice.
    """
    for index, item in enumerate(items):
        if any(item is other for other in items[:index]):
            raise ValueError(
                f"`{argument}` must contain every object once, got the same `{type(item).__name__}` object twice: it "
                f"would act twice at every event. Remove one, or create a second object."
            )


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


def log_standard_hparams(state: State, logger: Logger, local_hparams: dict[str, Any]) -> None:
    """Log versions, nodes and devices, and the Trainer's arguments if requested.

    Args:
        state: The run's state.
        logger: The run's logger.
        local_hparams: The Trainer's arguments; empty to not log them.
    """
    import composer

    if local_hparams:
        logger.log_hyperparameters(local_hparams)
    local_world_size = dist.get_local_world_size()
    logger.log_hyperparameters(
        {
            "composer_version": composer.__version__,
            "composer_commit_hash": os.environ.get("COMPOSER_COMMIT_HASH", "None"),
            "num_nodes": dist.get_world_size() // local_world_size,
            f"num_{state.device.name}s_per_node": local_world_size,
            "node_name": os.environ.get("NODENAME") or platform.node(),
        }
    )


def seed_run(seed: SupportsIndex | None, deterministic_mode: bool, parallel: SingleProcess) -> int:
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


class RunsProfiler(Protocol):
    """The interface of the Trainer's `profiler`; `composer.profiler.Profiler` implements it."""

    @property
    def remote_filenames(self) -> Sequence[str]:
        """The URIs of files that it uploads."""

    def bind_to_state(self, state: State) -> None:
        """Add the profiler to the callbacks of the run."""

    def marker(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return a marker that records the time of a section."""


def bind_profiler(profiler: Any, state: State, microbatch_size: Any) -> None:
    """Profile a run, unless `profiler` is None.

    Raises:
        ValueError: The microbatch size is searched.
        TypeError: `profiler` is not a profiler.
    """
    if profiler is None:
        return
    check_not_profiled(profiler, microbatch_size)
    if isinstance(profiler, type) or not hasattr(profiler, "bind_to_state"):
        raise TypeError(f"`profiler` must be a `composer.profiler.Profiler`, got {profiler!r}. Pass `Profiler(...)`.")
    warnings.warn(
        "The profiler is enabled. Profiling adds overhead to training: do not compare its speed.",
        stacklevel=3,
    )
    state.profiler = profiler
    profiler.bind_to_state(state)


def connect_ranks(device: Device, options: RunOptions) -> SingleProcess:
    """Return the ranks of the run; initialize the process group if there is more than one process.

    Args:
        device: The device of this rank, which determines the backend.
        options: The arguments `ddp_sync_strategy`, `dist_timeout` and `parallelism_config`.

    Raises:
        ValueError: An argument is invalid.
        RuntimeError: Environment variables to reach the other ranks are missing, the device has no backend, or the
            process group exists with another backend.
    """
    strategy, seconds = _check_strategy(options.ddp_sync_strategy), _check_timeout(options.dist_timeout)
    config = ParallelismConfig.of(options.parallelism_config)
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
    if owns_group:
        atexit.register(_destroy_group, torch.distributed.group.WORLD)
    if config is None:
        return DataParallel(strategy, seconds)
    from composer.trainer.sharded import ShardedParallel  # its imports are slow

    return ShardedParallel(config, device, strategy, seconds)


def _destroy_group(group: Any) -> None:
    """Destroy the process group that a Trainer initialized when the process ends: other Trainers may use it before.

    Skipped if the program has replaced the group, or if it ends with an error: other ranks may never join a pending
    operation, and the process would hang.
    """
    failed = getattr(sys, "last_value", None) is not None
    if dist.is_initialized() and torch.distributed.group.WORLD is group and not failed:
        dist.destroy_process_group()


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


def _check_timeout(seconds: Any) -> float:
    """Convert the argument `dist_timeout`.

    Raises:
        ValueError: It is not a positive number.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < float(seconds) < float("inf"):
        raise ValueError(f"`dist_timeout` must be a positive number of seconds, got {seconds!r}. Use for example 300.")
    return float(seconds)
