"""The checkpoint that a run starts from: `load_path`, or with `autoresume` the newest one that it has saved."""

from __future__ import annotations

import logging
import os
import posixpath
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from composer.callbacks.checkpoint_saver import (
    NOT_RESUMABLE,
    CheckpointSaver,
    call_store_with_timeout,
    name_conflict_message,
)
from composer.checkpoint import UnsafeCheckpointError
from composer.checkpoint.checksum import CorruptCheckpointError
from composer.checkpoint.durable import follow_link, scratch_folder
from composer.checkpoint.file import STATES, check_file
from composer.checkpoint.names import check_pattern, counts_of_name, was_swapped
from composer.checkpoint.shards import (
    INDEX,
    check_run,
    download_run,
    fetch_run,
    identify_run,
    is_index_of_run,
    is_sharded_run,
    run_name_of,
)
from composer.checkpoint.storage import Storage, UnreachableError, storage_of, without_password
from composer.core import State, Timestamp
from composer.loggers import LoggerDestination
from composer.trainer.options import Arguments
from composer.utils import (
    dist,
    format_name_with_dist,
    is_uri,
    parse_uri,
    partial_format,
)
from composer.utils.compression import is_compressed_pt, is_tar

log = logging.getLogger(__name__)

_MAX_DOWNLOADS = 3  # of a file that arrives damaged
# Bytes fetched, one size after the other, to identify the run of a remote checkpoint.
_PREFIX_SIZES = (1 << 20, 1 << 26, 1 << 62)
_ZIP_MAGIC = b"PK\x03\x04"  # how a checkpoint begins
_DEFAULT_SHARD_FOLDER = "ep{epoch}-ba{batch}"  # folders of shards, if the current run has no FSDP configuration


def choose_checkpoint(
    arguments: Arguments,
    state: State,
    destinations: Iterable[LoggerDestination],
    saver: CheckpointSaver | None,
    downloads: ExitStack,
) -> tuple[Arguments, str | None]:
    """Return what to load: with `autoresume` the run's own newest checkpoint, otherwise, or without one, `load_path`.

    Args:
        arguments: The Trainer's arguments.
        state: The run.
        destinations: Loggers, which may store files remotely.
        saver: The run's saver.
        downloads: Removes downloaded files when it is closed.

    Returns:
        The arguments to load with, and the name of the run's own checkpoint, which is loaded whole; None without one.
    """
    if arguments.autoresume:
        assert saver is not None, "`check_autoresume` has checked it"
        newest = find_checkpoint(saver, state, destinations, arguments.load_progress_bar, downloads)
        saver.continues = True  # files of other runs have been rejected
        if newest is not None:
            path, name = newest
            return arguments.replaced(
                load_path=path,
                load_object_store=None,
                load_weights_only=False,
                load_ignore_keys=None,
                load_exclude_algorithms=None,
                branch_duration=None,
            ), name
    if arguments.load_path is not None:
        path = os.path.expanduser(os.fspath(arguments.load_path))
        arguments = arguments.replaced(load_path=path)
        if arguments.load_object_store is None:
            _check_load_path(path, state.run_name)
    return arguments, None


def _check_load_path(path: str, run_name: str) -> None:
    """Check that a local path is a checkpoint.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The path has unknown fields, or is a folder without a checkpoint.
    """
    if is_uri(path):
        return
    file = follow_link(Path(partial_format(path, run_name=run_name, rank=0, local_rank=0, node_rank=0)))
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


def find_checkpoint(
    saver: CheckpointSaver,
    state: State,
    destinations: Iterable[LoggerDestination],
    progress_bar: bool,
    downloads: ExitStack,
) -> tuple[str, str] | None:
    """Return the newest intact checkpoint of a run, or None if it has none. A collective operation; rank 0 searches.

    A checkpoint is the run's own if it records the run's name and is directly in its folder, in a subfolder that the
    patterns of its names lead to, or where its link to the latest checkpoint points. Other subfolders may belong to
    other runs of the same name, or hold copies.

    Damaged files are skipped, with a warning for each.

    Args:
        saver: The callback that saves the run, with its local and remote folders.
        state: The run.
        destinations: Loggers, which may store files remotely.
        progress_bar: Show the progress of downloads.
        downloads: Removes the downloaded files when it is closed.

    Returns:
        A path on rank 0's node, and the name of the checkpoint for messages: its path or URI.

    Raises:
        FileExistsError: The run would replace checkpoints of another run, or other files, without `save_overwrite`.
        RuntimeError: There are checkpoints, but none can be loaded; or rank 0 failed.
    """
    outcome: list[Any] = [None, None]  # the checkpoint, and why none could be looked for
    if dist.get_global_rank() == 0:
        try:
            outcome[0] = _Search(saver, state, destinations, progress_bar, downloads).run()
        except Exception as error:
            outcome[1] = f"{type(error).__name__}: {error}"
            if dist.get_world_size() == 1:
                raise
    dist.broadcast_object_list(outcome, src=0)
    newest: tuple[str, str] | None
    newest, problem = outcome
    if problem is not None:
        raise RuntimeError(f"Rank 0 could not look for a checkpoint to resume from: {problem}")
    path = None if newest is None else newest[0]
    exists = dist.all_gather_object(path is None or is_uri(path) or os.path.exists(path))
    if not all(exists):
        raise RuntimeError(
            f"The checkpoint {path!r} to resume from must exist on all ranks, but does not on rank "
            f"{exists.index(False)}. Save to a folder that all nodes share, or to a remote store."
        )
    return newest


Candidate = tuple[str, Callable[[], Path | None]]
"""The name of a checkpoint, and a function that fetches it; it returns None if there is none of the run."""


class _UnreadableInStoreError(CorruptCheckpointError):
    """A store works, but does not deliver a checkpoint after several attempts."""


class _Search:
    """A search for the checkpoints of a run; the arguments are those of `find_checkpoint`."""

    def __init__(
        self,
        saver: CheckpointSaver,
        state: State,
        destinations: Iterable[LoggerDestination],
        progress_bar: bool,
        downloads: ExitStack,
    ) -> None:
        self._saver, self._state, self._run_name = saver, state, state.run_name
        self._destinations, self._progress_bar, self._downloads = destinations, progress_bar, downloads
        self._tried: list[str] = []  # the checkpoints that cannot be loaded, each with the reason

    def run(self) -> tuple[str, str] | None:
        """Return the path and the name of the newest intact checkpoint, or None if there is none."""
        saver = self._saver
        foreign: dict[str, str | None] = {}  # files that are not of this run, with the run that they are of, if any
        found = self._newest(self._local_candidates(), foreign, attempts=1)
        if found is None:
            found = self._newest(self._remote_candidates(), foreign, _MAX_DOWNLOADS)
            if found is not None and dist.get_local_world_size() < dist.get_world_size():
                # Files that this node fetched are missing on the others, so each node fetches them itself.
                found = found[1], found[1]
        in_loggers: dict[str, str | None] = {}
        if found is None:
            found = self._newest(self._logger_candidates(), in_loggers, _MAX_DOWNLOADS)
        if found is None and self._tried:
            raise RuntimeError(
                f"There are checkpoints of the run {self._run_name!r}, or files under their names, but none can be "
                f"loaded: {', '.join(self._tried)}. To start again on purpose, use another `run_name` or "
                f"`save_folder`, or `autoresume=False` with `save_overwrite=True`."
            )
        latest = "" if saver.latest_filename is None else saver.latest_filename.format(self._state)
        if foreign.get(latest) is not None:  # a link, or a copy on a disk without links: it may be replaced
            del foreign[latest]
        foreign.update({name: None for name, other in in_loggers.items() if other is None})
        for name, other in foreign.items():
            if not saver.overwrite and (other is not None or found is None):
                raise FileExistsError(name_conflict_message(self._run_name, without_password(name), other))
            if other is None:
                warnings.warn(f"{without_password(name)!r} {NOT_RESUMABLE}. It may be replaced.", stacklevel=2)
        return found

    def _newest(
        self, candidates: Iterable[Candidate], foreign: dict[str, str | None], attempts: int
    ) -> tuple[str, str] | None:
        """Return the path and the name of the first candidate that is intact; add those of other runs to `foreign`."""
        for name, fetch in candidates:
            shown = without_password(name)
            try:
                checked = self._checked(name, fetch, foreign, attempts)
            except (CorruptCheckpointError, FileNotFoundError) as error:
                reason = error.reason if isinstance(error, CorruptCheckpointError) else str(error)
            except OSError as error:
                if attempts > 1:  # a failing store is not a damaged file
                    raise
                reason = str(error)
            else:
                if checked is None:
                    continue
                path, saved_as = checked
                if saved_as is None or not was_swapped(saved_as, path.resolve().name):
                    return str(path), name
                self._tried.append(f"{shown!r} was saved as {saved_as!r}")
                warnings.warn(
                    f"{shown!r} was saved as {saved_as!r}: it was copied over another one, so an older checkpoint is "
                    f"tried. To resume from it, pass it as `load_path`.",
                    stacklevel=2,
                )
                continue
            self._tried.append(f"{shown!r} ({reason})")
            warnings.warn(f"{shown!r} is damaged ({reason}); an older checkpoint is tried.", stacklevel=2)
        return None

    def _checked(
        self, name: str, fetch: Callable[[], Path | None], foreign: dict[str, str | None], attempts: int
    ) -> tuple[Path, str | None] | None:
        """Fetch and check a checkpoint, again if it arrived damaged. Return None if it does not belong to the run.

        Files under the names of the run may belong to another run that used the folder before, or to the user.
        """
        while True:
            attempts -= 1
            try:
                path = fetch()
                if path is None:
                    return None
                in_shards = is_sharded_run(path)
                identity = identify_run(path)
                if identity is not None and identity[0] != self._run_name:
                    log.warning(
                        "%s was saved by the run %r, so %r does not resume from it. Give each run its own "
                        "`save_folder` or `save_filename`: files of one name replace each other.",
                        path, identity[0], self._run_name,
                    )  # fmt: skip
                    foreign[name] = identity[0]
                    return None
                if not in_shards and not path.is_file():  # nothing else is opened: reading a pipe would block
                    raise CorruptCheckpointError(path, "it is not a file")
                saved_as = check_run(path) if in_shards else check_file(path)
                if identity is None:
                    foreign[name] = None
                    return None
                return path, saved_as
            except CorruptCheckpointError as error:
                if attempts <= 0 or isinstance(error, _UnreadableInStoreError):
                    raise

    # ---- in the local folder ----

    def _local_candidates(self) -> Iterable[Candidate]:
        saver, run_name = self._saver, self._run_name
        folder = Path(format_name_with_dist(saver.folder, run_name))
        if not folder.is_dir():
            return
        names = [
            os.path.relpath(os.path.join(root, name), folder).replace(os.sep, "/")
            for root, _, files in os.walk(folder)
            for name in files
        ]
        names = _with_indexed(names, lambda name: is_sharded_run(folder / name))
        patterns = self._patterns(partial_format(saver.filename.filename, run_name=run_name, rank=0))
        names = _own(names, patterns, self._local_link(folder))
        named = _by_age(names, patterns, lambda name: _modified(folder / name))
        known = {os.path.realpath(folder / name) for name in named}
        others = [
            name
            for name in names
            if not (folder / name).is_symlink()
            and os.path.realpath(folder / name.removesuffix(f"/{STATES}")) not in known
        ]
        for name in _with_other_names(others, named, lambda name: identify_run(folder / name), run_name):
            yield str(folder / name), lambda name=name: folder / name  # type: ignore[misc]
        if saver.latest_filename is not None:  # on a disk without links it is a separate file
            latest = Path(saver.latest_filename.format(self._state))
            if latest.is_file() and not latest.is_symlink():
                yield str(latest), lambda: latest
            elif is_sharded_run(latest):  # its target may have another name now
                yield str(latest), lambda: latest.resolve() if run_name_of(latest) == run_name else None

    def _local_link(self, folder: Path) -> str | None:
        """Return the name of the checkpoint that the run's link to the latest one points to; None without a link."""
        if self._saver.latest_filename is None:
            return None
        latest = Path(self._saver.latest_filename.format(self._state))
        target = follow_link(latest)
        if target is latest and not latest.is_symlink():
            return None
        return os.path.relpath(os.path.realpath(target), os.path.realpath(folder)).replace(os.sep, "/")

    # ---- in the remote folder ----

    def _remote_candidates(self) -> Iterable[Candidate]:
        root, pattern = self._saver.remote_root, self._saver.remote_file_name
        if root is None or pattern is None:
            return
        folder = _remote_folder(self._saver, self._run_name)
        files = format_name_with_dist(pattern.filename, self._run_name, rank=0).removeprefix(f"{folder}/")
        target = self._downloads.enter_context(scratch_folder("resuming"))
        inside = storage_of(f"{root}{folder}")
        names = _with_indexed(
            call_store_with_timeout(f"{root}{folder}", inside.find), lambda name: _is_indexed_remote(inside, name)
        )
        patterns = self._patterns(files)
        names = _own(names, patterns, self._remote_link(folder, inside, names))
        named = _by_age(names, patterns, lambda name: 0.0)
        known = {*named, *(f"{name}/{STATES}" for name in named)}

        def identify(name: str) -> tuple[str, Timestamp] | None:
            return _identify_remote(inside, f"{name}/{STATES}" if f"{name}/{STATES}" in names else name, self._run_name)

        others = [name for name in names if name not in known]
        for name in _with_other_names(others, named, identify, self._run_name):
            yield inside.uri(name), partial(_fetch_remote, inside, name, target / name, self._progress_bar)

    def _remote_link(self, folder: str, inside: Storage, names: Sequence[str]) -> str | None:
        """Return the name of the checkpoint that the run's link in the store names; None without a readable link."""
        if self._saver.latest_remote_file_name is None:
            return None
        link = f"{self._saver.latest_remote_file_name.format(self._state)}.symlink".removeprefix(f"{folder}/")
        if link not in names:
            return None
        try:
            with _reporting_damage(inside, link):
                return inside.read_text(link).strip().removeprefix(f"{folder}/")
        except (CorruptCheckpointError, FileNotFoundError):  # it may have been removed meanwhile
            return None

    # ---- in the stores of loggers ----

    def _logger_candidates(self) -> Iterable[Candidate]:
        if self._saver.latest_remote_file_name is None:
            return
        latest = self._saver.latest_remote_file_name.format(self._state)
        target = self._downloads.enter_context(scratch_folder("resuming"))
        for destination in self._destinations:
            fetch = partial(self._fetch_from_logger, destination, f"{latest}.symlink", target)
            yield f"{latest} of {type(destination).__name__}", fetch

    def _fetch_from_logger(self, destination: LoggerDestination, link: str, target: Path) -> Path | None:
        """Download the checkpoint that a link names; return None if the logger does not store it."""

        def get(name: str, path: Path) -> None:
            destination.download_file(name, str(path), overwrite=True, progress_bar=self._progress_bar)

        try:
            local_link = target / "latest.symlink"
            get(link, local_link)
            name = local_link.read_text(encoding="utf-8").strip()
            path = target / os.path.basename(name)
            if not fetch_run(get, name, path):
                get(name, path)
        except (NotImplementedError, FileNotFoundError):
            return None  # it stores no files, or not this one
        except Exception:
            if destination.can_upload_files():
                raise
            return None  # it stores none, so failures do not matter
        return path

    def _patterns(self, files: str) -> list[str]:
        """Return the name patterns of checkpoints: files, and the files that complete folders of shards."""
        config = self._state.fsdp_config
        prefix = _DEFAULT_SHARD_FOLDER if config is None else config.sharded_ckpt_prefix_dir
        return [files, f"{os.path.join(os.path.dirname(files), prefix)}/{STATES}"]


def _modified(file: Path) -> float:
    is_indexed = file.name == STATES and not file.exists()
    return (file.with_name(INDEX) if is_indexed else file).lstat().st_mtime


def _own(names: Iterable[str], patterns: Sequence[str], linked: str | None) -> list[str]:
    """Return the files that may be the run's own, of all those in its folder.

    Args:
        names: The names, with "/" between folders.
        patterns: The name patterns of the run's checkpoints.
        linked: The name of the checkpoint that the run's link to the latest one points to.
    """
    folders = [posixpath.dirname(posixpath.normpath(pattern.removesuffix(f"/{STATES}"))) for pattern in patterns]

    def is_own(name: str) -> bool:
        path = posixpath.normpath(name.removesuffix(f"/{STATES}"))
        inside = posixpath.dirname(path)
        return path == linked or any(
            inside == folder or counts_of_name(inside, folder) is not None for folder in ("", *folders)
        )

    return [name for name in names if is_own(name)]


def _with_indexed(names: Iterable[str], is_run: Callable[[str], bool]) -> list[str]:
    """Add the file that completes a checkpoint in shards to those of MosaicML's Composer, which have only an index.

    Args:
        names: The names of files, with "/" between folders.
        is_run: Returns True for such a folder; others are incomplete.
    """
    names = list(names)
    folders = {name.removesuffix(f"/{INDEX}") for name in names if name.endswith(f"/{INDEX}")}
    folders -= {name.removesuffix(f"/{STATES}") for name in names}
    found = []
    for folder in sorted(folders):
        try:
            if is_run(folder):
                found.append(f"{folder}/{STATES}")
        except (CorruptCheckpointError, UnsafeCheckpointError) as error:
            warnings.warn(f"The shards in {folder!r} are ignored: {error}", stacklevel=2)
    return [*names, *found]


def _is_indexed_remote(inside: Storage, folder: str) -> bool:
    """Return True for a checkpoint of MosaicML's Composer in a store. Its shards are not fetched."""
    name = f"{folder}/{INDEX}"
    with scratch_folder("resuming") as local:
        try:
            with _reporting_damage(inside, name):
                inside.download(name, local / INDEX)
            return is_index_of_run(local / INDEX)
        except FileNotFoundError:  # it was removed meanwhile
            return False


def _with_other_names(
    names: Iterable[str], named: list[str], identify: Callable[[str], tuple[str, Timestamp] | None], run_name: str
) -> list[str]:
    """Add the run's checkpoints with names that differ from the current pattern; the newest first.

    Args:
        names: The files with other names, with "/" between folders.
        named: The checkpoints with names of the current pattern, newest first.
        identify: Returns the run and the training time of a checkpoint, or None if they are not recorded.
        run_name: The name of the run.
    """
    others: dict[str, int] = {}
    names = sorted(names)
    folders = {name.removesuffix(f"/{STATES}") for name in names if name.endswith(f"/{STATES}")} | set(named)
    for name in names:
        path = name.removesuffix(f"/{STATES}")
        if name.endswith((".saving", ".symlink")) or (path == name and name.rpartition("/")[0] in folders):
            continue  # a leftover of a killed process, a link in a store, or a shard
        identity = identify(path)
        if identity is not None and identity[0] == run_name:
            others[path] = identity[1].batches
    if not others:
        return named
    batches = dict(others)
    for name in named:  # unreadable files are tried, and reported, first
        identity = identify(name)
        batches[name] = sys.maxsize if identity is None else identity[1].batches
    return sorted([*named, *others], key=lambda name: -batches[name])


def _remote_folder(saver: CheckpointSaver, run_name: str) -> str:
    """Return the folder of a run in its bucket: `save_folder`, or the one in it that has the run's name.

    Checkpoints with other name patterns may be in other subfolders of it.
    """
    assert saver._uri is not None
    assert saver.remote_file_name is not None
    inside = saver.remote_file_name.filename.split("/")[:-1]
    given = [part for part in parse_uri(saver._uri)[2].split("/") if part]
    named = max((i for i, part in enumerate(inside, 1) if "{run_name}" in part), default=0)
    least = len(given) if inside[: len(given)] == given else 0
    depth = max(named, least) or len(inside)
    filled = [format_name_with_dist(part, run_name, rank=0) for part in inside[:depth]]
    return "/".join(takewhile(lambda part: "{" not in part, filled))


def _identify_remote(inside: Storage, name: str, run_name: str) -> tuple[str, Timestamp] | None:
    """Return the run and the training time of a checkpoint in a store, fetching no more of it than needed.

    A file that the store does not deliver may belong to the run `run_name`: it is tried last.
    """
    with scratch_folder("resuming") as folder:
        file = folder / name.rpartition("/")[2]
        for count in _PREFIX_SIZES:
            try:
                with _reporting_damage(inside, name):
                    data = inside.read_start(name, count)
            except FileNotFoundError:  # it was removed meanwhile
                return None
            except CorruptCheckpointError:
                return run_name, Timestamp()
            file.write_bytes(data)
            identity = identify_run(file)
            packed = is_tar(name) or is_compressed_pt(name)
            if identity is not None or len(data) < count or not (packed or data.startswith(_ZIP_MAGIC)):
                return identity
    return None


def _fetch_remote(inside: Storage, name: str, path: Path, progress_bar: bool) -> Path:
    """Download a checkpoint.

    Raises:
        CorruptCheckpointError: The store works, but does not deliver it.
        StorageError: The store cannot be read.
    """
    with _reporting_damage(inside, name):
        if not download_run(inside.uri(name), path, progress_bar):
            inside.download(name, path, progress=progress_bar)
    return path


@contextmanager
def _reporting_damage(inside: Storage, name: str) -> Iterator[None]:
    """Convert the error of a store that works, but does not deliver a file, to a CorruptCheckpointError."""
    try:
        yield
    except (CorruptCheckpointError, FileNotFoundError):
        raise
    except Exception as error:
        if not inside.is_damaged(name, error):
            raise
        kind = _UnreadableInStoreError if isinstance(error, UnreachableError) else CorruptCheckpointError
        raise kind(inside.uri(name), f"the store works, but does not deliver it: {error}") from error


def _by_age(names: Iterable[str], patterns: Sequence[str], modified: Callable[[str], float]) -> list[str]:
    """List the checkpoints that match a pattern, the newest first: by the counts in their names, or by modification."""
    matches: list[tuple[tuple[int, ...], float, str]] = []
    for name in names:
        counts = [c for pattern in patterns if (c := counts_of_name(name, pattern)) is not None]
        if counts:
            matches.append((counts[0], modified(name), name.removesuffix(f"/{STATES}")))
    return [name for _, _, name in sorted(matches, key=lambda entry: entry[:2], reverse=True)]
