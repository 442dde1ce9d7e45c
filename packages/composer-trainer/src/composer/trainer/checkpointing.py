"""The checkpoints of a run: building its saver, and loading the one that it starts from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from composer.callbacks.checkpoint_saver import CheckpointSaver
from composer.checkpoint.names import check_pattern
from composer.checkpoint.run import load_checkpoint
from composer.checkpoint.shards import STATES, is_sharded_run
from composer.core import Callback, State
from composer.loggers import Logger
from composer.trainer.options import LoadOptions, SaveOptions
from composer.trainer.resume.autoresume import check_fixed_name, find_checkpoint
from composer.utils import is_uri, parse_uri, partial_format

__all__ = ["build_saver", "check_autoresume", "hold_leases", "load_run"]


def build_saver(
    options: SaveOptions, defaults: Mapping[str, Any], callbacks: Sequence[Callback]
) -> tuple[CheckpointSaver | None, list[Callback]]:
    """Return the saver of a run, and all callbacks with it.

    Args:
        options: The Trainer's arguments.
        defaults: Their defaults.
        callbacks: The user's callbacks, which may include a `CheckpointSaver`.

    Raises:
        ValueError: An option is invalid.
    """
    changed = [f"`{name}`" for name in options.changed(defaults)]
    saver = next((callback for callback in callbacks if isinstance(callback, CheckpointSaver)), None)
    if saver is not None:
        if changed or options.save_folder is not None:
            names = ", ".join([*changed, *(["`save_folder`"] if options.save_folder is not None else [])])
            warnings.warn(
                f"`callbacks` contains a `CheckpointSaver`, whose arguments are used; {names} has no effect.",
                stacklevel=3,
            )
        return saver, list(callbacks)
    if options.save_folder is None:
        if changed:
            warnings.warn(f"{', '.join(changed)} has no effect without `save_folder`: nothing is saved.", stacklevel=3)
        return None, list(callbacks)
    folder, latest = os.fspath(options.save_folder), options.save_latest_filename
    remote = parse_uri(folder)[2].strip("/") if is_uri(folder) else "{run_name}/checkpoints"
    saver = CheckpointSaver(
        folder=folder,
        filename=options.save_filename,
        remote_file_name="/".join(filter(None, [remote, os.fspath(options.save_filename)])),
        latest_filename=latest,
        latest_remote_file_name=None if latest is None else "/".join(filter(None, [remote, os.fspath(latest)])),
        save_interval=options.save_interval,
        overwrite=options.save_overwrite,
        num_checkpoints_to_keep=options.save_num_checkpoints_to_keep,
        weights_only=options.save_weights_only,
        ignore_keys=options.save_ignore_keys,
        num_best_checkpoints_to_keep=options.save_num_best_checkpoints_to_keep,
        monitor=options.save_monitor,
        monitor_mode=options.save_monitor_mode,
        asynchronous=options.save_async,
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


@contextmanager
def hold_leases(state: State) -> Iterator[None]:
    """Hold the leases on the folders that a run saves to while it trains."""
    with ExitStack() as leases:
        for callback in state.callbacks:
            if isinstance(callback, CheckpointSaver):
                leases.enter_context(callback.training(state))
        yield


def load_run(
    options: LoadOptions,
    state: State,
    logger: Logger,
    saver: CheckpointSaver | None,
    passes: Any,
    announce: Callable[[str], None],
    shard: Callable[[], None],
    downloads: ExitStack,
) -> bool:
    """Load the run's own newest checkpoint with `autoresume`, otherwise `load_path`.

    Args:
        options: The Trainer's arguments.
        state: The run.
        logger: The run's logger; its destinations may store files.
        saver: The run's saver.
        passes: The user's algorithm passes.
        announce: Shows a message to the user.
        shard: Shards the model, once algorithms that the checkpoint needs have changed it.
        downloads: Removes downloaded files when it is closed.

    Returns:
        True if the run continues from a checkpoint of its own.
    """
    path = None if options.load_path is None else os.path.expanduser(os.fspath(options.load_path))
    resumes, weights_only = False, options.load_weights_only
    if options.autoresume:
        assert saver is not None, "`check_autoresume` has checked it"
        newest = find_checkpoint(saver, state, logger.destinations, options.load_progress_bar, downloads)
        saver.continues = True  # files of other runs have been rejected
        if newest is None:
            announce(f"No checkpoint of the run {state.run_name!r} was found; it starts from the beginning.")
        else:
            path, resumes, weights_only = newest, True, False
    elif saver is not None:
        check_fixed_name(saver, state)
    if path is None:
        shard()
        return False
    if not resumes and options.load_object_store is None:
        _check_load_path(path, state.run_name)
    run_name = state.run_name
    load_checkpoint(
        path,
        state,
        logger,
        object_store=None if resumes else options.load_object_store,
        load_weights_only=weights_only,
        strict_model_weights=options.load_strict_model_weights,
        progress_bar=options.load_progress_bar,
        ignore_keys=None if resumes else options.load_ignore_keys,
        exclude_algorithms=None if resumes else options.load_exclude_algorithms,
        algorithm_passes=passes,
        divide=shard,
    )
    state.run_name, state.load_path = run_name, path
    if resumes and saver is not None:
        saver.resumed_at = state.timestamp.batch
    now = state.timestamp
    loaded = "Weights" if weights_only else f"The run, at epoch {now._epoch} and batch {now._batch},"
    announce(f"{loaded} loaded from {path}.")
    return resumes


def _check_load_path(path: str, run_name: str) -> None:
    """Check that a local path is a checkpoint.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The path has unknown fields, or is a folder without a checkpoint.
    """
    if is_uri(path):
        return
    file = Path(partial_format(path, run_name=run_name, rank=0, local_rank=0, node_rank=0))
    if is_sharded_run(file) or file.is_file():
        return
    if not file.exists():
        check_pattern("load_path", path, times=False)
        broken = " It is a link to a missing file." if file.is_symlink() else ""
        raise FileNotFoundError(
            f"`load_path` must be an existing checkpoint, got {path!r}. There is no checkpoint {str(file)!r}.{broken} "
            f"Give the path of one, or leave it out to start a new run."
        )
    if not file.is_dir():  # reading a pipe would wait forever
        raise ValueError(
            f"`load_path` must be a checkpoint, got {path!r}, which is neither a regular file nor a folder."
        )
    if any(file.glob("*.distcp")):
        return  # an incomplete checkpoint; reading it explains what is missing
    entries = [entry for entry in file.iterdir() if not entry.name.startswith(".")]
    checkpoints = sorted(entry.name for entry in entries if entry.is_file() or is_sharded_run(entry))
    hint = (
        f"Give a checkpoint in it: {', '.join(map(repr, checkpoints[:5]))}"
        if checkpoints
        else "It contains no checkpoint"
    )
    raise ValueError(
        f"`load_path` must be a checkpoint, a file or a folder of shards with {STATES!r}, got the folder {path!r}. "
        f"{hint}."
    )
