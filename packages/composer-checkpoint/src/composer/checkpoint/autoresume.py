"""Find the checkpoint that a run starts from: `load_path`, or with `autoresume` the newest one that it has saved.

The checkpoints of a run are in its folder, in its remote store, or in the stores of its loggers. They are found by
their names, which contain the training time, and by the link to the latest one, which also leads to a checkpoint that
was saved under another `save_filename`. A checkpoint belongs to the run if it records the run's name.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from composer.callbacks.checkpoint_saver import NOT_RESUMABLE, CheckpointSaver, name_conflict_message
from composer.checkpoint.durable import follow_link, scratch_folder
from composer.checkpoint.file import STATES, check_file
from composer.checkpoint.names import counts_of_name
from composer.checkpoint.ranks import on_first_rank
from composer.checkpoint.safe_load import CorruptCheckpointError, UnsafeCheckpointError
from composer.checkpoint.shards import INDEX, check_run, download_run, fetch_run, identify_run, is_sharded_run
from composer.checkpoint.storage import Storage, without_password
from composer.core import State
from composer.loggers import LoggerDestination
from composer.utils import dist, format_name_with_dist, is_uri, partial_format

log = logging.getLogger(__name__)

_DEFAULT_SHARD_FOLDER = "ep{epoch}-ba{batch}"  # the name of checkpoints in shards, if this run does not save any


def find_checkpoint(
    saver: CheckpointSaver,
    state: State,
    destinations: Iterable[LoggerDestination],
    progress_bar: bool,
    downloads: ExitStack,
) -> tuple[str, str] | None:
    """Return the newest intact checkpoint of a run, or None if it has none. A collective operation; rank 0 searches.

    Damaged files are skipped, with a warning for each.

    Args:
        saver: The callback that saves the run, with its local and remote folders.
        state: The run.
        destinations: Loggers, which may store files remotely.
        progress_bar: Show the progress of downloads.
        downloads: Removes the downloaded files when it is closed.

    Returns:
        A path or URI to load, and the name of the checkpoint for messages: its path or URI.

    Raises:
        FileExistsError: The run would replace checkpoints of another run, or other files, without `save_overwrite`.
        RuntimeError: There are checkpoints, but none can be loaded; or rank 0 failed.
    """

    def search() -> tuple[str, str] | None:
        tried: list[str] = []
        found = _newest(_in_folder(saver, state), saver, state, tried)
        if found is None:
            target = downloads.enter_context(scratch_folder("resuming"))
            found = _newest(_in_store(saver, state, target, progress_bar), saver, state, tried)
            if found is not None and dist.get_local_world_size() < dist.get_world_size():
                found = found[1], found[1]  # this node's download is missing on the others: each fetches its own
            elif found is None:
                found = _newest(_in_loggers(saver, state, destinations, target, progress_bar), saver, state, tried)
        if found is None and tried:
            raise RuntimeError(
                f"There are checkpoints of the run {state.run_name!r}, or files under their names, but none can be "
                f"loaded: {', '.join(tried)}. To start again on purpose, use another `run_name` or "
                f"`save_folder`, or `autoresume=False` with `save_overwrite=True`."
            )
        return found

    newest = on_first_rank(search, problem="Rank 0 could not look for a checkpoint to resume from")
    exists = dist.all_gather_object(newest is None or is_uri(newest[0]) or os.path.exists(newest[0]))
    if newest is not None and not all(exists):
        raise RuntimeError(
            f"The checkpoint {newest[0]!r} to resume from must exist on all ranks, but does not on rank "
            f"{exists.index(False)}. Save to a folder that all nodes share, or to a remote store."
        )
    return newest


class _Candidate(NamedTuple):
    name: str
    """The path or URI of the checkpoint."""

    fetch: Callable[[], Path | None]
    """Returns the checkpoint as a local file or folder, downloaded if necessary; None: there is none."""

    is_named: bool = False
    """The file's name is one that `save_filename` gives, so the run would replace the file when it saves."""


def _newest(
    candidates: Iterable[_Candidate], saver: CheckpointSaver, state: State, tried: list[str]
) -> tuple[str, str] | None:
    """Return the path and the name of the first candidate that is intact and the run's own.

    Args:
        candidates: The candidates, the newest first.
        saver: The callback that saves the run.
        state: The run.
        tried: Receives those that cannot be loaded, each with the reason.

    Raises:
        FileExistsError: A newer one is another run's or another program's, and the run would replace it.
    """
    found: tuple[str, str] | None = None
    foreign: dict[str, str | None] = {}  # files under the run's names, with the run that saved them
    for name, fetch, is_named in candidates:
        shown = without_password(name)
        try:
            path = fetch()
            if path is None or (path.is_dir() and not is_sharded_run(path)):
                continue
            identity = identify_run(path)
            if identity is None or identity[0] == state.run_name:
                (check_run if path.is_dir() else check_file)(path)
        except (CorruptCheckpointError, UnsafeCheckpointError, FileNotFoundError) as error:
            reason = error.reason if isinstance(error, CorruptCheckpointError) else str(error)
            tried.append(f"{shown!r} ({reason})")
            warnings.warn(f"{shown!r} is damaged ({reason}); an older checkpoint is tried.", stacklevel=2)
            continue
        if identity is not None and identity[0] == state.run_name:
            found = str(path), name
            break
        if identity is not None:
            log.warning(
                "%s was saved by the run %r, so %r does not resume from it. Give each run its own "
                "`save_folder` or `save_filename`: files of one name replace each other.",
                shown, identity[0], state.run_name,
            )  # fmt: skip
        if is_named:
            foreign[shown] = None if identity is None else identity[0]
    for shown, other in foreign.items():
        if not saver.overwrite and (other is not None or found is None):
            raise FileExistsError(name_conflict_message(state.run_name, shown, other))
        if other is None:
            warnings.warn(f"{shown!r} {NOT_RESUMABLE}. It may be replaced.", stacklevel=2)
    return found


def _by_age(names: Iterable[str], pattern: str, state: State) -> list[str]:
    """Return the checkpoints among some files, the newest first; a checkpoint in shards is a folder.

    Args:
        names: The names of files, with "/" between folders.
        pattern: The pattern of the run's file names.
        state: The run.
    """
    inside = f"{pattern.rpartition('/')[0]}/" if "/" in pattern else ""
    config = state.fsdp_config
    shards = inside + (_DEFAULT_SHARD_FOLDER if config is None else config.sharded_ckpt_prefix_dir)
    ages: dict[str, tuple[int, ...]] = {}
    for name in names:
        is_index = name.rpartition("/")[2] in (STATES, INDEX)
        path = name.rpartition("/")[0] if is_index else name
        counts = counts_of_name(path, shards if is_index else pattern)
        if counts is not None:
            ages[path] = counts
    return sorted(ages, key=lambda path: ages[path], reverse=True)


def _in_folder(saver: CheckpointSaver, state: State) -> Iterator[_Candidate]:
    """Iterate over the checkpoints in the local folder."""
    folder = Path(format_name_with_dist(saver.folder, state.run_name))
    pattern = partial_format(saver.filename.filename, run_name=state.run_name, rank=0)
    depth = "*/" * pattern.count("/")
    names = [path.relative_to(folder).as_posix() for end in ("*", "*/*") for path in folder.glob(f"{depth}{end}")]
    named = [folder / name for name in _by_age(names, pattern, state)]
    latest = None if saver.latest_filename is None else Path(saver.latest_filename.format(state))
    target = None if latest is None else follow_link(latest)
    is_link = latest is not None and (latest.is_symlink() or target != latest)
    known = {os.path.realpath(path) for path in named}
    if target is not None and is_link and target.exists() and os.path.realpath(target) not in known:
        yield _Candidate(str(target.resolve()), target.resolve)  # saved under another name than the present one
    for path in named:
        yield _Candidate(str(path), partial(Path, path), is_named=True)
    if latest is not None and not is_link and latest.exists():  # a folder that was copied without links
        yield _Candidate(str(latest), lambda: latest)


def _in_store(saver: CheckpointSaver, state: State, target: Path, progress_bar: bool) -> Iterator[_Candidate]:
    """Iterate over the checkpoints in the remote store; they are downloaded to the folder `target`."""
    if saver.remote_root is None or saver.remote_file_name is None:
        return
    store = saver.bucket(state)
    pattern = format_name_with_dist(saver.remote_file_name.filename, state.run_name, rank=0)
    names = _by_age(store.find(pattern.partition("{")[0].rpartition("/")[0]), pattern, state)
    linked = None
    if saver.latest_remote_file_name is not None:
        link = f"{saver.latest_remote_file_name.format(state)}.symlink"
        with suppress(FileNotFoundError):
            linked = store.read_text(link).strip()
    if linked and linked not in names:  # saved under another name than the present one
        yield _Candidate(store.uri(linked), partial(_download, store, linked, target, progress_bar))
    for name in names:
        yield _Candidate(store.uri(name), partial(_download, store, name, target, progress_bar), is_named=True)


def _download(store: Storage, name: str, target: Path, progress_bar: bool) -> Path | None:
    """Download a checkpoint; return None for an incomplete folder of shards."""
    path = target / name
    if not download_run(store.uri(name), path, progress_bar):
        if not store.exists(name):
            return None
        store.download(name, path, progress=progress_bar)
    return path


def _in_loggers(
    saver: CheckpointSaver,
    state: State,
    destinations: Iterable[LoggerDestination],
    target: Path,
    progress_bar: bool,
) -> Iterator[_Candidate]:
    """Iterate over the latest checkpoints in the stores of loggers; they are downloaded to the folder `target`."""
    if saver.latest_remote_file_name is None:
        return
    latest = saver.latest_remote_file_name.format(state)

    def fetch(destination: LoggerDestination) -> Path | None:
        def get(name: str, path: Path) -> None:
            destination.download_file(name, str(path), overwrite=True, progress_bar=progress_bar)

        try:
            link = target / "latest.symlink"
            get(f"{latest}.symlink", link)
            name = link.read_text(encoding="utf-8").strip()
            path = target / os.path.basename(name)
            if not fetch_run(get, name, path):
                get(name, path)
        except (NotImplementedError, FileNotFoundError):
            return None  # it has no such file
        return path

    for destination in (each for each in destinations if each.can_upload_files()):
        yield _Candidate(f"{latest} of {type(destination).__name__}", partial(fetch, destination))
