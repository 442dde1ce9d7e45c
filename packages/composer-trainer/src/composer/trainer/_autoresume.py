"""Finding the checkpoint from which a relaunched run goes on."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from composer.callbacks.checkpoint_saver import CheckpointSaver
from composer.checkpoint._container import check_file, read_file
from composer.checkpoint._names import counts_of_name, was_swapped
from composer.checkpoint._safe_load import _allowed
from composer.checkpoint._seal import CorruptCheckpointError
from composer.checkpoint._sharded_run import STATES, check_run, download_run, fetch_run, is_sharded_run, run_name_of
from composer.core import State
from composer.loggers import LoggerDestination
from composer.utils import dist, format_name_with_dist, is_compressed_pt, is_tar, is_uri, partial_format

__all__ = ["find_checkpoint"]

_DOWNLOADS = 3  # of a file that arrives damaged
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
    tried: list[str] = []
    # What this node fetched to check it is not there on others: each fetches it for itself.
    several_nodes = dist.get_local_world_size() < dist.get_world_size()
    found = (
        _newest(_local_candidates(saver, state), tried)
        or _newest(_remote_candidates(saver, state, progress_bar), tried, _DOWNLOADS, by_name=several_nodes)
        or _newest(_logger_candidates(saver, state, destinations, progress_bar), tried, _DOWNLOADS)
    )
    if found is None and tried:
        raise RuntimeError(
            f"There are checkpoints of the run {state.run_name!r}, but none can be loaded: {', '.join(tried)}. To "
            f"begin anew on purpose, use another `run_name` or `save_folder`, or `autoresume=False` with "
            f"`save_overwrite=True`."
        )
    return found


def _folder_of(state: State) -> Path:
    """A folder for what is downloaded, which goes with the run."""
    folder = tempfile.mkdtemp(prefix="composer-resuming-")
    weakref.finalize(state, shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


Candidate = tuple[str, Callable[[], Path | None]]
"""The name of a checkpoint, and how to get it."""


def _newest(candidates: Iterable[Candidate], tried: list[str], attempts: int = 1, by_name: bool = False) -> str | None:
    """Return the first candidate that is intact; the others are added to `tried`, each with the reason."""
    for name, fetch in candidates:
        try:
            checked = _checked(fetch, attempts)
        except (CorruptCheckpointError, FileNotFoundError) as error:
            reason = error.reason if isinstance(error, CorruptCheckpointError) else str(error)
        except OSError as error:
            if attempts > 1:  # a store that fails is no damaged file
                raise
            reason = str(error)
        else:
            if checked is None:
                continue
            path, saved_as = checked
            if saved_as is None or not was_swapped(saved_as, path.resolve().name):
                return name if by_name else str(path)
            tried.append(f"{name!r} was saved as {saved_as!r}")
            warnings.warn(
                f"{name!r} was saved as {saved_as!r}: it was copied over another one, so an older checkpoint is tried. "
                f"To go on from it, pass it as `load_path`.",
                stacklevel=2,
            )
            continue
        tried.append(f"{name!r} ({reason})")
        warnings.warn(f"{name!r} is damaged ({reason}); an older checkpoint is tried.", stacklevel=2)
    return None


def _checked(fetch: Callable[[], Path | None], attempts: int) -> tuple[Path, str | None] | None:
    """Fetch and check a checkpoint, again if it arrived damaged: a transfer may be at fault."""
    while True:
        attempts -= 1
        try:
            path = fetch()
            if path is None:
                return None
            return path, check_run(path) if is_sharded_run(path) else check_file(path)
        except CorruptCheckpointError:
            if attempts <= 0:
                raise


def _local_candidates(saver: CheckpointSaver, state: State) -> Iterable[Candidate]:
    folder = Path(format_name_with_dist(saver.folder, state.run_name))
    if not folder.is_dir():
        return
    names = [os.path.relpath(os.path.join(root, name), folder) for root, _, files in os.walk(folder) for name in files]
    pattern = partial_format(saver.filename.filename, run_name=state.run_name, rank=0)
    named = _by_age(names, _patterns(pattern, state), lambda name: (folder / name).lstat().st_mtime)
    for name in _with_other_names(folder, names, named, state.run_name):
        yield str(folder / name), lambda name=name: folder / name  # type: ignore[misc]
    if saver.latest_filename is not None:  # on a disk without links it is a file of its own
        latest = Path(saver.latest_filename.format(state))
        if latest.is_file() and not latest.is_symlink():
            yield str(latest), lambda: latest
        elif is_sharded_run(latest):  # what it names may be called otherwise now
            yield str(latest), lambda: latest.resolve() if run_name_of(latest) == state.run_name else None


def _with_other_names(folder: Path, names: Iterable[str], named: list[str], run_name: str) -> list[str]:
    """Add the run's checkpoints that have other names than the run gives now; the newest first.

    Args:
        folder: Where the run saves.
        names: All files in it.
        named: The checkpoints with names that the run gives now, newest first.
        run_name: The name of the run.
    """
    known = {os.path.realpath(folder / name) for name in named}
    others: dict[str, int] = {}
    for name in sorted(names):
        path = name.replace(os.sep, "/").removesuffix(f"/{STATES}")
        if os.path.realpath(folder / path) in known or (folder / name).is_symlink():
            continue
        said = _run_and_batch(folder / name)
        if said is not None and said[0] == run_name:
            others[path] = said[1]
    if not others:
        return named
    batches = dict(others)
    for name in named:  # what cannot be read is tried, and reported, first
        file = folder / name / STATES if is_sharded_run(folder / name) else folder / name
        said = _run_and_batch(file)
        batches[name] = sys.maxsize if said is None else said[1]
    return sorted([*named, *others], key=lambda name: -batches[name])


def _run_and_batch(file: Path) -> tuple[str, int] | None:
    """Return whose checkpoint a file is and at which batch it was saved; None if it does not tell."""
    try:
        if is_tar(file.name) or is_compressed_pt(file.name):
            content = read_file(file)[0]
        else:
            with open(file, "rb") as opened:
                if opened.read(4) != b"PK\x03\x04":
                    return None
            with torch.serialization.safe_globals(_allowed()):  # tensors are not read
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        content = content["content"] if file.name == STATES else content
        return content["state"]["run_name"], int(next(iter(content["state"]["timestamp"].values()))["batch"])
    except Exception:  # noqa: BLE001 - any other file, or a damaged one
        return None


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
