"""The Trainer's arguments about saving and loading."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from composer.callbacks.checkpoint_saver import CheckpointSaver
from composer.checkpoint.names import check_pattern
from composer.checkpoint.run import load_checkpoint as restore
from composer.checkpoint.shards import STATES, is_sharded_run
from composer.core import Callback, State
from composer.loggers import Logger, LoggerDestination
from composer.loggers.file_logger import FileLogger
from composer.trainer._autoresume import check_fixed_name, find_checkpoint
from composer.utils import is_uri, parse_uri, partial_format

__all__ = ["LoadOptions", "build_saver", "check_autoresume", "continue_logs", "load_run", "training", "with_prefix"]

_SAVER_DEFAULTS = {
    "save_filename": "ep{epoch}-ba{batch}-rank{rank}.pt",
    "save_latest_filename": "latest-rank{rank}.pt",
    "save_overwrite": False,
    "save_interval": "1ep",
    "save_weights_only": False,
    "save_ignore_keys": None,
    "save_num_checkpoints_to_keep": -1,
    "save_num_best_checkpoints_to_keep": 0,
    "save_monitor": None,
    "save_monitor_mode": "max",
    "save_async": False,
}


def with_prefix(arguments: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The arguments whose names begin so."""
    return {name: value for name, value in arguments.items() if name.startswith(prefix)}


def continue_logs(destinations: Iterable[LoggerDestination]) -> None:
    """Let a relaunched run go on in its log files."""
    for destination in destinations:
        if isinstance(destination, FileLogger):
            destination.append = True


def build_saver(
    callbacks: Sequence[Callback],
    *,
    save_folder: Any,
    save_metrics: bool,
    **options: Any,
) -> tuple[CheckpointSaver | None, list[Callback]]:
    """The saver of a run, which is among the callbacks or built of the Trainer's arguments, and all callbacks.

    Args:
        callbacks: The user's callbacks.
        save_folder: As in the Trainer.
        save_metrics: As in the Trainer; what is saved of the state, so it does not concern the saver.
        **options: The Trainer's other `save_...` arguments.

    Raises:
        ValueError: An argument cannot work.
    """
    # Compared by type first: a `Time` in batches cannot be compared with "1ep".
    given = [
        name
        for name, default in _SAVER_DEFAULTS.items()
        if type(options[name]) is not type(default) or options[name] != default
    ]
    own = next((callback for callback in callbacks if isinstance(callback, CheckpointSaver)), None)
    if own is not None:
        if given or save_folder is not None:
            names = ", ".join(f"`{name}`" for name in [*given, *(["save_folder"] if save_folder is not None else [])])
            warnings.warn(
                f"`callbacks` holds a `CheckpointSaver`, whose arguments are used; {names} has no effect.",
                stacklevel=4,
            )
        return own, list(callbacks)
    if save_folder is None:
        if given:
            warnings.warn(
                f"{', '.join(f'`{name}`' for name in given)} has no effect without `save_folder`: nothing is saved.",
                stacklevel=4,
            )
        return None, list(callbacks)
    saver = _saver(os.fspath(save_folder), options)
    return saver, [*callbacks, saver]  # the last, so that it saves what the others make of a batch


def _saver(folder: str, options: dict[str, Any]) -> CheckpointSaver:
    filename, latest = options["save_filename"], options["save_latest_filename"]
    remote = parse_uri(folder)[2].strip("/") if is_uri(folder) else "{run_name}/checkpoints"
    return CheckpointSaver(
        folder=folder,
        filename=filename,
        remote_file_name="/".join(filter(None, [remote, os.fspath(filename)])),
        latest_filename=latest,
        latest_remote_file_name=None if latest is None else "/".join(filter(None, [remote, os.fspath(latest)])),
        save_interval=options["save_interval"],
        overwrite=options["save_overwrite"],
        num_checkpoints_to_keep=options["save_num_checkpoints_to_keep"],
        weights_only=options["save_weights_only"],
        ignore_keys=options["save_ignore_keys"],
        num_best_checkpoints_to_keep=options["save_num_best_checkpoints_to_keep"],
        monitor=options["save_monitor"],
        monitor_mode=options["save_monitor_mode"],
        asynchronous=options["save_async"],
    )


@contextmanager
def training(state: State) -> Iterator[None]:
    """Hold the leases on the folders that a run saves to while it trains."""
    with ExitStack() as held:
        for callback in state.callbacks:
            if isinstance(callback, CheckpointSaver):
                held.enter_context(callback.training(state))
        yield


def check_autoresume(saver: CheckpointSaver | None, run_name: str | None) -> None:
    """Check what resuming by itself needs.

    Raises:
        ValueError: The run saves nothing, keeps no link to the latest checkpoint, cannot go on from what it saves, or
            has no name by which a relaunch finds it.
    """
    if saver is None:
        raise ValueError("`autoresume=True` needs `save_folder`: the folder to save to and to resume from.")
    if saver.latest_filename is None:
        raise ValueError("`autoresume=True` needs `save_latest_filename`, the link to the latest checkpoint.")
    if saver.weights_only:
        raise ValueError(
            "`autoresume=True` cannot go on from weights alone, which `save_weights_only=True` saves. Turn one off."
        )
    if run_name is None and not (os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")):
        raise ValueError(
            "`autoresume=True` needs a `run_name` (or the variable COMPOSER_RUN_NAME): the same for every launch of "
            "one run, and another for another run."
        )


def _check_load_path(path: str, run_name: str) -> None:
    """Check that there is a checkpoint, if it is to be on this node.

    Raises:
        FileNotFoundError: There is none.
        ValueError: The path has unknown fields, or is a folder without a checkpoint.
    """
    if is_uri(path):
        return
    file = Path(partial_format(path, run_name=run_name, rank=0, local_rank=0, node_rank=0))
    if is_sharded_run(file) or file.is_file():
        return
    if not file.exists():
        check_pattern("load_path", path, times=False)
        broken = " It is a link to a file that is gone." if file.is_symlink() else ""
        raise FileNotFoundError(
            f"`load_path` must be an existing checkpoint, got {path!r}. There is no checkpoint {str(file)!r}.{broken} "
            f"Give the path of one, or leave it out to start anew."
        )
    if not file.is_dir():  # reading a pipe would wait for ever
        raise ValueError(
            f"`load_path` must be a checkpoint, got {path!r}, which is neither a regular file nor a folder."
        )
    if any(file.glob("*.distcp")):
        return  # an incomplete one, which is told when it is read
    entries = [entry for entry in file.iterdir() if not entry.name.startswith(".")]
    inside = sorted(entry.name for entry in entries if entry.is_file() or is_sharded_run(entry))
    some = f"Give a checkpoint in it: {', '.join(map(repr, inside[:5]))}" if inside else "It holds no checkpoint"
    raise ValueError(
        f"`load_path` must be a checkpoint, a file or a folder of shards with {STATES!r}, got the folder {path!r}. "
        f"{some}."
    )


class LoadOptions:
    """What to load, and how.

    Args:
        autoresume: Whether to go on from the run's own newest checkpoint if it has one.
        **options: The Trainer's `load_...` arguments.
    """

    def __init__(self, autoresume: bool, **options: Any) -> None:
        self.autoresume = autoresume
        self.path: str | None = (
            None if options["load_path"] is None else os.path.expanduser(os.fspath(options["load_path"]))
        )
        self.object_store = options["load_object_store"]
        self.weights_only: bool = options["load_weights_only"]
        self.strict: bool = options["load_strict_model_weights"]
        self.progress_bar: bool = options["load_progress_bar"]
        self.ignore_keys = options["load_ignore_keys"]
        self.exclude_algorithms = options["load_exclude_algorithms"]
        if self.path is None and not autoresume:
            unused = {
                "load_object_store": None,
                "load_weights_only": False,
                "load_strict_model_weights": True,
                "load_ignore_keys": None,
                "load_exclude_algorithms": None,
            }
            for name, default in unused.items():
                if options[name] != default:
                    raise ValueError(f"`{name}` has no effect without `load_path`. Give the checkpoint to load.")

    def take(self, path: str) -> None:
        """Load this run's own checkpoint instead of the user's: all of it."""
        self.path, self.object_store = path, None
        self.weights_only, self.ignore_keys, self.exclude_algorithms = False, None, None


def load_run(
    options: LoadOptions,
    state: State,
    logger: Logger,
    saver: CheckpointSaver | None,
    passes: Any,
    announce: Callable[[str], None],
    divide: Callable[[], None],
    downloads: ExitStack,
) -> bool:
    """Load what the user asks for, or the run's own newest checkpoint.

    Args:
        options: What to load.
        state: Takes it.
        logger: Reaches loggers that keep files.
        saver: The run's saver.
        passes: Order algorithms.
        announce: Tells the user.
        divide: Divides the model among ranks, once algorithms that the checkpoint needs have changed it.
        downloads: Removes what was downloaded when it is closed.

    Returns:
        Whether the run goes on from a checkpoint of its own.
    """
    resumes = False
    if options.autoresume:
        assert saver is not None, "checked with the arguments"
        saver.is_relaunched = True
        found = find_checkpoint(saver, state, logger.destinations, options.progress_bar, downloads)
        saver.continues = True  # files of other runs were refused
        if found is not None:
            options.take(found)
            resumes = True
        else:
            announce(f"No checkpoint of the run {state.run_name!r} was found; it starts from its beginning.")
    elif saver is not None:
        check_fixed_name(saver, state)
    if options.path is None:
        divide()
        return False
    if not resumes and options.object_store is None:
        _check_load_path(options.path, state.run_name)
    name = state.run_name
    restore(
        options.path,
        state,
        logger,
        object_store=options.object_store,
        load_weights_only=options.weights_only,
        strict_model_weights=options.strict,
        progress_bar=options.progress_bar,
        ignore_keys=options.ignore_keys,
        exclude_algorithms=options.exclude_algorithms,
        algorithm_passes=passes,
        divide=divide,
    )
    state.run_name, state.load_path = name, options.path
    if resumes and saver is not None:
        saver.resumed_at = state.timestamp.batch
    now = state.timestamp
    what = "Weights" if options.weights_only else f"The run, at epoch {now._epoch} and batch {now._batch},"
    announce(f"{what} loaded from {options.path}.")
    return resumes
