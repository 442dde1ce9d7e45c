"""Finding the checkpoint from which a relaunched run goes on."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from composer.callbacks.checkpoint_saver import CheckpointSaver
from composer.checkpoint._container import check_file
from composer.checkpoint._names import counts_of_name, was_swapped
from composer.checkpoint._seal import CorruptCheckpointError
from composer.checkpoint._sharded_run import STATES, check_run, download_run, fetch_run, is_sharded_run, run_name_of
from composer.core import State
from composer.loggers import LoggerDestination
from composer.utils import dist, format_name_with_dist, is_uri, partial_format

__all__ = ["find_checkpoint"]

_FOLDERS = "ep{epoch}-ba{batch}"  # of shards, of a run that does not say what they are called now


def find_checkpoint(
    saver: CheckpointSaver, state: State, destinations: Iterable[LoggerDestination], progress_bar: bool
) -> str | None:
    """The newest intact checkpoint of a run, or None if it has none. A collective operation; rank 0 searches.

    Damaged files are named in a warning each, and passed over.

    Args:
        saver: Knows where the run saves, here and remotely.
        state: The run.
        destinations: Loggers, which may keep files remotely.
        progress_bar: Show the progress of downloads.

    Returns:
        A path on rank 0's node.
    """
    found: list[str | None] = [None]
    problem: list[str | None] = [None]
    if dist.get_global_rank() == 0:
        try:
            found = [_find(saver, state, destinations, progress_bar)]
        except Exception as error:
            problem = [f"{type(error).__name__}: {error}"]
            if dist.get_world_size() == 1:
                raise
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise RuntimeError(f"Rank 0 could not look for a checkpoint to resume from: {problem[0]}")
    dist.broadcast_object_list(found, src=0)
    path = found[0]
    there = dist.all_gather_object(path is None or is_uri(path) or os.path.exists(path))
    if not all(there):
        raise RuntimeError(
            f"The checkpoint {path!r} to resume from must exist on all ranks, but does not on rank "
            f"{there.index(False)}. Save to a folder that all nodes share, or to a remote store."
        )
    return path


def _find(
    saver: CheckpointSaver, state: State, destinations: Iterable[LoggerDestination], progress_bar: bool
) -> str | None:
    local = _newest(_local_candidates(saver, state))
    if local is not None:
        return local
    # What this node fetched to check it is not there on others: each fetches it for itself.
    several_nodes = dist.get_local_world_size() < dist.get_world_size()
    return _newest(_remote_candidates(saver, state, progress_bar), by_name=several_nodes) or _newest(
        _logger_candidates(saver, state, destinations, progress_bar)
    )


def _folder_of(state: State) -> Path:
    """A folder for what is downloaded, which goes with the run."""
    folder = tempfile.mkdtemp(prefix="composer-resuming-")
    weakref.finalize(state, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


Candidate = tuple[str, Callable[[], Path | None]]
"""The name of a checkpoint, and how to get it."""


def _newest(candidates: Iterable[Candidate], by_name: bool = False) -> str | None:
    for name, fetch in candidates:
        try:
            path = fetch()
            if path is None:
                continue
            saved_as = check_run(path) if is_sharded_run(path) else check_file(path)
        except CorruptCheckpointError as error:
            warnings.warn(f"{name!r} is damaged ({error.reason}); an older checkpoint is tried.", stacklevel=2)
            continue
        if saved_as is not None and was_swapped(saved_as, path.resolve().name):
            warnings.warn(
                f"{name!r} was saved as {saved_as!r}: it was copied over another one, so an older checkpoint is tried. "
                f"To go on from it, pass it as `load_path`.",
                stacklevel=2,
            )
            continue
        return name if by_name else str(path)
    return None


def _local_candidates(saver: CheckpointSaver, state: State) -> Iterable[Candidate]:
    folder = Path(format_name_with_dist(saver.folder, state.run_name))
    if not folder.is_dir():
        return
    names = [os.path.relpath(os.path.join(root, name), folder) for root, _, files in os.walk(folder) for name in files]
    pattern = partial_format(saver.filename.filename, run_name=state.run_name, rank=0)
    for name in _by_age(names, _patterns(pattern, state), lambda name: (folder / name).stat().st_mtime):
        yield str(folder / name), lambda name=name: folder / name  # type: ignore[misc]
    if saver.latest_filename is not None:  # on a disk without links it is a file of its own
        latest = Path(saver.latest_filename.format(state))
        if latest.is_file() and not latest.is_symlink():
            yield str(latest), lambda: latest
        elif is_sharded_run(latest):  # what it names may be called otherwise now
            yield str(latest), lambda: latest.resolve() if run_name_of(latest) == state.run_name else None


def _remote_candidates(saver: CheckpointSaver, state: State, progress_bar: bool) -> Iterable[Candidate]:
    root, pattern = saver.remote_root, saver.remote_file_name
    if root is None or pattern is None:
        return
    from composer.checkpoint._storage import storage_of

    filled = format_name_with_dist(pattern.filename, state.run_name, rank=0)
    folder, _, name_pattern = filled.rpartition("/")
    target = _folder_of(state)
    inside = storage_of(f"{root}{folder}")
    for name in _by_age(inside.find(), _patterns(name_pattern, state), lambda name: 0.0):

        def fetch(name: str = name) -> Path:
            if not download_run(inside.uri(name), target / name, progress_bar):
                inside.download(name, target / name, progress=progress_bar)
            return target / name

        yield inside.uri(name), fetch


def _logger_candidates(
    saver: CheckpointSaver, state: State, destinations: Iterable[LoggerDestination], progress_bar: bool
) -> Iterable[Candidate]:
    if saver.latest_remote_file_name is None:
        return
    latest = saver.latest_remote_file_name.format(state)
    target = _folder_of(state)
    for destination in destinations:

        def fetch(destination: LoggerDestination = destination) -> Path | None:
            try:
                link = target / "latest.symlink"
                destination.download_file(f"{latest}.symlink", str(link), overwrite=True, progress_bar=progress_bar)
                name = link.read_text(encoding="utf-8").strip()
                path = target / os.path.basename(name)

                def get(name: str, path: Path) -> None:
                    destination.download_file(name, str(path), overwrite=True, progress_bar=progress_bar)

                if not fetch_run(get, name, path):
                    get(name, path)
            except (NotImplementedError, FileNotFoundError):
                return None  # it keeps no files, or not this one
            return path

        yield f"{latest} of {type(destination).__name__}", fetch


def _patterns(files: str, state: State) -> list[str]:
    """What checkpoints may be called: files, and the files in folders that tell that shards are there."""
    prefix = _FOLDERS if state.fsdp_config is None else state.fsdp_config.sharded_ckpt_prefix_dir
    return [files, f"{os.path.join(os.path.dirname(files), prefix)}/{STATES}"]


def _by_age(names: Iterable[str], patterns: Sequence[str], modified: Callable[[str], float]) -> list[str]:
    """Checkpoints that a pattern names, the newest first: by the counts in their names, otherwise by modification."""
    found: list[tuple[tuple[int, ...], float, str]] = []
    for name in names:
        counts = [c for pattern in patterns if (c := counts_of_name(name.replace(os.sep, "/"), pattern)) is not None]
        if counts:
            found.append((counts[0], modified(name), name.replace(os.sep, "/").removesuffix(f"/{STATES}")))
    return [name for _, _, name in sorted(found, key=lambda entry: entry[:2], reverse=True)]
