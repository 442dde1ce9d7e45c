"""Saves checkpoints while a run trains."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from composer.checkpoint._best import BestCheckpoints, is_count
from composer.checkpoint._durable import point_link, remove_leftovers
from composer.checkpoint._filter import IgnoreKeys
from composer.checkpoint._names import PartialFilePath, check_file_name
from composer.checkpoint._saving import collect, unloadable
from composer.checkpoint._sharded_run import (
    amend_run,
    check_saves_shards,
    files_of_run,
    pattern_of_run,
    proof_of_run,
    remove_run,
    write_run,
)
from composer.checkpoint._writer import CheckpointWriter
from composer.core import Callback, Event, State, Time, Timestamp
from composer.loggers import Logger
from composer.utils import (
    create_interval_scheduler,
    create_symlink_file,
    dist,
    ensure_folder_has_no_conflicting_files,
    format_name_with_dist,
    is_uri,
    parse_uri,
)

__all__ = ["CheckpointSaver"]

log = logging.getLogger(__name__)

Interval = str | int | Time[Any] | Callable[[State, Event], bool]


class CheckpointSaver(Callback):
    """Saves the run at an interval, and keeps the newest, the best, or all checkpoints.

    Each file is written under a temporary name, brought to the disk, sealed with a checksum and renamed, so that there
    is never a part of a checkpoint under its name. Then the link to the latest one moves; remotely, too, the link comes
    after the file it names. Rank 0 writes; ranks meet to gather what each of them has to save.

    File names are format strings with the variables of `composer.utils.FORMAT_NAME_WITH_DIST_AND_TIME_TABLE`.

    Args:
        folder: Where to save: a folder, or a URI such as `s3://bucket/folder`, whose checkpoints are written to a
            temporary folder and uploaded from there in the background.
        filename: The name of a checkpoint. Its extension tells the format: `.pt`, `.pt.gz` and the like, `.tar`, ....
            A run that saves in shards (see `FSDP2Config`) makes a folder instead, called `sharded_ckpt_prefix_dir`.
        remote_file_name: The name of a checkpoint in the remote folder, or for loggers that store files.
        latest_filename: The name of a symbolic link to the latest checkpoint; None makes none.
        latest_remote_file_name: The name of a text file with the name of the latest checkpoint, for remote stores,
            which have no links; `.symlink` is appended.
        save_interval: How often to save: a time, or a function of state and event.
        overwrite: Whether files that are newer than the run, left by another run, are no error.
        num_checkpoints_to_keep: Newest checkpoints to keep in the local folder; -1 keeps all.
        weights_only: Whether to save the model only.
        ignore_keys: What to leave out; see `composer.checkpoint.glob_filter`.
        num_concurrent_uploads: Uploads at a time.
        upload_timeout_in_seconds: How long the end of training waits for uploads.
        num_best_checkpoints_to_keep: Best checkpoints by `monitor` to keep besides the newest. A link `best-...` to
            the best one stands next to that to the latest. With `num_checkpoints_to_keep=-1` all are kept anyway.
        monitor: The metric to keep the best by: `"eval/MulticlassAccuracy"` is that metric of the evaluator `eval`;
            `"train/..."` is one of training, and `"loss/train/total"` a loss.
        monitor_mode: `"max"` if more is better, `"min"` if less is.
        asynchronous: Whether to write in the background from a copy in host memory, so that training goes on.

    Attributes:
        saved_checkpoints: The paths of the checkpoints that exist, oldest first.
        all_saved_checkpoints_to_timestamp: The paths of all checkpoints that this process saved, and of those that it
            knows of from the checkpoint it was resumed from, with their times.

    Raises:
        ValueError: An argument cannot work.

    Differs: the established class has neither `num_best_checkpoints_to_keep`, `monitor`, `monitor_mode` nor
        `asynchronous`. There, a killed save can leave a part of a file.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = "{run_name}/checkpoints",
        filename: str | os.PathLike[str] = "ep{epoch}-ba{batch}-rank{rank}.pt",
        remote_file_name: str | os.PathLike[str] | None = "{run_name}/checkpoints/ep{epoch}-ba{batch}-rank{rank}.pt",
        latest_filename: str | os.PathLike[str] | None = "latest-rank{rank}.pt",
        latest_remote_file_name: str | os.PathLike[str] | None = "{run_name}/checkpoints/latest-rank{rank}.pt",
        save_interval: Interval = "1ep",
        *,
        overwrite: bool = False,
        num_checkpoints_to_keep: int = -1,
        weights_only: bool = False,
        ignore_keys: IgnoreKeys | None = None,
        num_concurrent_uploads: int = 1,
        upload_timeout_in_seconds: float = 3600,
        num_best_checkpoints_to_keep: int = 0,
        monitor: str | None = None,
        monitor_mode: str = "max",
        asynchronous: bool = False,
    ) -> None:
        self._check(num_checkpoints_to_keep, num_concurrent_uploads, upload_timeout_in_seconds)
        check_file_name(os.fspath(filename))
        self._uri = os.fspath(folder) if is_uri(os.fspath(folder)) else None
        self._staging: str | None = None
        self._cleanup: Any = None
        self.folder = self._local_folder(os.fspath(folder))
        self.filename = PartialFilePath(os.fspath(filename), self.folder)
        self.latest_filename = _path(latest_filename, self.folder)
        self.remote_file_name = _path(remote_file_name, None)
        self.latest_remote_file_name = _path(latest_remote_file_name, None)
        self._interval = save_interval if callable(save_interval) else create_interval_scheduler(save_interval)
        self._requested = False
        self.overwrite, self.weights_only, self.ignore_keys = overwrite, weights_only, ignore_keys
        self.num_checkpoints_to_keep = num_checkpoints_to_keep
        self.num_concurrent_uploads = num_concurrent_uploads
        self.upload_timeout_in_seconds = upload_timeout_in_seconds
        self.best = BestCheckpoints(num_best_checkpoints_to_keep, monitor, monitor_mode)
        self.saved_checkpoints: list[str] = []
        self.all_saved_checkpoints_to_timestamp: dict[str, Timestamp] = {}
        self.last_checkpoint_batch: Time[int] | None = None
        self.continues = False  # set by the Trainer: files left in the folder are this run's own
        self._last_path: str | None = None
        self._last_names: dict[str, str] = {}
        self._writer = CheckpointWriter(asynchronous)
        self.remote_uploader: Any = None
        self._checked_types = False

    @staticmethod
    def _check(keep: int, uploads: int, timeout: float) -> None:
        if not is_count(keep, least=-1):
            raise ValueError(f"`num_checkpoints_to_keep` must be a number of checkpoints, or -1 for all, got {keep!r}.")
        if uploads < 1:
            raise ValueError(f"`num_concurrent_uploads` must be at least 1, got {uploads!r}.")
        if timeout <= 0:
            raise ValueError(f"`upload_timeout_in_seconds` must be positive, got {timeout!r}.")

    def _local_folder(self, folder: str) -> str:
        if self._uri is None:
            return folder
        return os.path.join(self._scratch_folder(), parse_uri(folder)[2])

    # ---- when to save ----

    def save_interval(self, state: State, event: Event) -> bool:
        """Whether a checkpoint is saved at this event. Algorithms that prepare the model for saving ask, too."""
        if event is Event.BATCH_CHECKPOINT and self._requested:
            self._interval(state, event)  # it remembers at which batch it was asked
            return True
        return self._interval(state, event)

    def save_soon(self) -> None:
        """Save at the next BATCH_CHECKPOINT, whatever the interval says. To be called on every rank."""
        self._requested = True

    def init(self, state: State, logger: Logger) -> None:
        if state.fsdp_sharded_state_dict_enabled:
            check_saves_shards(self._writer.asynchronous, self._uri)
        root = self.remote_root
        if self._uri is None or root is None or dist.get_global_rank() != 0:
            return
        from composer.checkpoint._storage import storage_of
        from composer.checkpoint._uploads import Uploader

        # Refused credentials must not be found out after hours of training.
        storage_of(format_name_with_dist(self._uri, state.run_name)).check_writable()
        self.remote_uploader = Uploader(
            storage_of(root), concurrent=self.num_concurrent_uploads, timeout=self.upload_timeout_in_seconds
        )

    @property
    def remote_root(self) -> str | None:
        """What `remote_file_name` is relative to: the bucket, or the root of the file system; None: not remote."""
        if self._uri is None:
            return None
        path = parse_uri(self._uri)[2]
        return self._uri[: len(self._uri) - len(path)]

    def fit_start(self, state: State, logger: Logger) -> None:
        self.best.check(state)
        problem = None
        folder = format_name_with_dist(self.folder, state.run_name)
        if dist.get_global_rank() == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            for name in remove_leftovers(Path(folder)):
                log.info("Removed %s, which a process that was killed while saving left in %s.", name, folder)
        if not self.overwrite and not self.continues:
            try:
                ensure_folder_has_no_conflicting_files(folder, proof_of_run(state, self.filename), state.timestamp)
            except FileExistsError as error:
                problem = error
        # Nobody goes on alone: the others would wait for ever where ranks meet next.
        problems = dist.all_gather_object(None if problem is None else str(problem))
        for text in problems:
            if text is not None:
                raise FileExistsError(
                    f"{text} It was left by another run, or by an earlier one of this name. To continue that run, pass "
                    f"`autoresume=True`; to start anew and replace its files, pass `save_overwrite=True`."
                )

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._writer.check()
        if self.remote_uploader is not None:
            with self._kept_if_not_uploaded():
                self.remote_uploader.check()
        self._save_if_due(Event.BATCH_CHECKPOINT, state, logger)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_if_due(Event.EPOCH_CHECKPOINT, state, logger)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_if_due(Event.ITERATION_CHECKPOINT, state, logger)

    def _save_if_due(self, event: Event, state: State, logger: Logger) -> None:
        if self.save_interval(state, event) and self.last_checkpoint_batch != state.timestamp.batch:
            self._save_checkpoint(state, logger)
        self._requested = False

    def fit_end(self, state: State, logger: Logger) -> None:
        self.flush()

    def flush(self) -> None:
        """Wait until everything saved so far is on the disk, and remotely where it belongs there."""
        self._writer.wait()
        if self.remote_uploader is not None:
            with self._kept_if_not_uploaded():
                self.remote_uploader.wait()

    @contextmanager
    def _kept_if_not_uploaded(self) -> Iterator[None]:
        """Keep the local files, and say where they are, if the remote store fails."""
        try:
            yield
        except Exception:
            if self._cleanup is not None and self._cleanup.detach() is not None:
                log.error("Not all checkpoints reached %s. The local files are kept in %s.", self._uri, self.folder)
            raise

    @property
    def saved_to(self) -> str:
        """Where the latest checkpoint is."""
        return self._uri or (self.saved_checkpoints[-1] if self.saved_checkpoints else self.folder)

    def close(self, state: State, logger: Logger) -> None:
        self._writer.close()

    def post_close(self) -> None:
        uploader, self.remote_uploader = self.remote_uploader, None
        if uploader is not None:
            with self._kept_if_not_uploaded():
                uploader.close()

    # ---- saving ----

    def amend(self, state: State, logger: Logger, change: Callable[[dict[str, Any]], None]) -> None:
        """Change what the checkpoint of this very batch says of how to go on; nothing if it is not there (any more).

        Args:
            state: The run.
            logger: Reaches loggers that store files.
            change: Changes the checkpoint's entry `resumption` in place.
        """
        self.flush()
        path = self._last_path
        if dist.get_global_rank() != 0 or path is None or self.last_checkpoint_batch != state.timestamp.batch:
            return
        if not os.path.exists(path):  # rotated out already
            return
        if amend_run(Path(path), change):
            self._upload(path, self._last_names, logger, overwrite=True)
            self.flush()

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        """Save now. To be called on every rank."""
        self._writer.wait()  # the one before is ranked and linked when it is there
        self.last_checkpoint_batch = state.timestamp.batch
        path = self._last_path = pattern_of_run(state, self.filename).format(state)
        # Registered first, so that the checkpoint lists itself, too.
        self.all_saved_checkpoints_to_timestamp[path] = state.timestamp
        self.best.consider(path, state)
        sharded = state.fsdp_sharded_state_dict_enabled
        content = collect(state, weights_only=self.weights_only, ignore_keys=self.ignore_keys, gather=not sharded)
        if sharded:
            write_run(content, Path(path), overwrite=True)
        if dist.get_global_rank() != 0:
            return
        self._warn_of_types(content)
        names = self._last_names = self._names(state)
        if sharded:
            self._saved(path, names, logger)
        else:
            self._writer.write(content, path, lambda: self._saved(path, names, logger))

    def _names(self, state: State) -> dict[str, str]:
        """The names that belong to a checkpoint, as of now; it may be finished later."""
        parts = {
            "latest": self.latest_filename if self.num_checkpoints_to_keep != 0 else None,
            "remote": self.remote_file_name and pattern_of_run(state, self.remote_file_name),
            "latest_remote": self.latest_remote_file_name,
        }
        return {key: part.format(state) for key, part in parts.items() if part is not None}

    def _saved(self, path: str, names: dict[str, str], logger: Logger) -> None:
        """Links, uploads and rotation, once the file is there."""
        if "latest" in names:
            point_link(Path(names["latest"]), Path(path))
            best = self.best.path
            if best is not None:
                point_link(Path(names["latest"]).with_name(_best_name(Path(names["latest"]).name)), Path(best))
        self._upload(path, names, logger, overwrite=self.overwrite or self.continues)
        if path not in self.saved_checkpoints:
            self.saved_checkpoints.append(path)
        self._rotate()

    def _upload(self, path: str, names: dict[str, str], logger: Logger, overwrite: bool) -> None:
        if "remote" not in names:
            return
        if self.remote_uploader is not None:
            link = None
            if "latest_remote" in names:
                link = (names["latest_remote"] + ".symlink", names["remote"])
            *others, last = files_of_run(Path(path), names["remote"])
            self.remote_uploader.upload(*last, overwrite=overwrite, link=link, before=others)
        elif logger.has_file_upload_destination():
            for file, name in files_of_run(Path(path), names["remote"]):
                logger.upload_file(name, file, overwrite=overwrite)
            if "latest_remote" in names:
                text = Path(self._scratch_folder()) / f"{Path(path).name}.symlink"
                create_symlink_file(names["remote"], text)
                logger.upload_file(f"{names['latest_remote']}.symlink", text, overwrite=True)

    def _scratch_folder(self) -> str:
        """A folder for small files that loggers may upload later; it goes with this object."""
        if self._staging is None:
            self._staging = tempfile.mkdtemp(prefix="composer-saving-")
            self._cleanup = weakref.finalize(self, shutil.rmtree, self._staging, ignore_errors=True)
        return self._staging

    def _rotate(self) -> None:
        if self.num_checkpoints_to_keep < 0:
            return
        newest = self.saved_checkpoints[max(0, len(self.saved_checkpoints) - self.num_checkpoints_to_keep) :]
        keep = {*newest, *self.best.paths}
        for path in [path for path in self.saved_checkpoints if path not in keep]:
            self.saved_checkpoints.remove(path)
            remove_run(Path(path))

    def _warn_of_types(self, content: dict[str, Any]) -> None:
        if self._checked_types:
            return
        self._checked_types = True
        for where, kind in unloadable(content):
            warnings.warn(
                f"The checkpoint holds a `{kind}` at {where!r}. Loading it would run code, so it will be refused "
                f"unless `torch.serialization.add_safe_globals([...])` allows this type first. Have `state_dict` "
                f"return plain values, or leave it out with `save_ignore_keys`.",
                stacklevel=4,
            )

    # ---- resumption ----

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints that have not been rotated out and, if a metric is monitored, its values."""
        listed = self.all_saved_checkpoints_to_timestamp.items()
        if self.num_checkpoints_to_keep >= 0:  # without those removed, or every save would make the next file longer
            there = {*self.saved_checkpoints, self._last_path}
            listed = [(path, timestamp) for path, timestamp in listed if path in there]
        saved: dict[str, Any] = {
            "all_saved_checkpoints_to_timestamp": [(path, timestamp.state_dict()) for path, timestamp in listed]
        }
        if self.best.monitor is not None:
            saved["best"] = self.best.state_dict()
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the list of checkpoints; those that still exist are rotated on."""
        rotates = self.num_checkpoints_to_keep >= 0
        for path, saved in state.get("all_saved_checkpoints_to_timestamp", []):
            if rotates and not os.path.exists(path):
                continue  # it was removed after this state was saved
            timestamp = Timestamp()
            timestamp.load_state_dict(saved)
            self.all_saved_checkpoints_to_timestamp[path] = timestamp
        self.saved_checkpoints = [path for path in self.all_saved_checkpoints_to_timestamp if os.path.exists(path)]
        self.best.load_state_dict(state.get("best", {}))


def _path(name: str | os.PathLike[str] | None, folder: str | None) -> PartialFilePath | None:
    return None if name is None else PartialFilePath(os.fspath(name), folder)


def _best_name(latest: str) -> str:
    return latest.replace("latest", "best") if "latest" in latest else f"best-{latest}"
