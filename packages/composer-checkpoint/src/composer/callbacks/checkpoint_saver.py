"""Saves checkpoints while a run trains."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, SupportsIndex

from composer.checkpoint.durable import UNDELIVERED, make_scratch_folder, remove_leftovers, replace_link
from composer.checkpoint.file import STATES
from composer.checkpoint.lease import Lease
from composer.checkpoint.names import (
    MLFLOW_EXPERIMENT_ID_FORMAT_KEY,
    MLFLOW_RUN_ID_FORMAT_KEY,
    PartialFilePath,
    check_file_name,
    check_folder,
    check_link,
    check_pattern,
    check_relative,
    check_run_name,
    counts_of_name,
    has_mlflow_ids,
)
from composer.checkpoint.ranks import on_first_rank
from composer.checkpoint.run import collect
from composer.checkpoint.safe_load import check_loadable
from composer.checkpoint.saver import BestCheckpoints, CheckpointWriter
from composer.checkpoint.selection import IgnoreKeys
from composer.checkpoint.shards import (
    files_of_run,
    identify_run,
    outline_of_run,
    remove_run,
    write_run,
)
from composer.checkpoint.storage import Storage, bucket_of, storage_of, without_password
from composer.checkpoint.upload import Uploader
from composer.core import Callback, Event, State, Time, Timestamp, TimeUnit, ensure_time
from composer.loggers import Logger
from composer.utils import (
    check_finite,
    create_interval_scheduler,
    dist,
    ensure_folder_has_no_conflicting_files,
    format_name_with_dist,
    is_uri,
    local_part,
    parse_uri,
    partial_format,
    plain_int,
    plain_number,
)
from composer.utils.delivery import call_in_time
from composer.utils.import_helpers import import_from_distribution

log = logging.getLogger(__name__)

NOT_RESUMABLE = "is not a checkpoint that a run can resume from: it holds only weights, or another program's data"

Interval = SupportsIndex | str | Time[Any] | Callable[[State, Event], bool]


class CheckpointSaver(Callback):
    """Saves the run at an interval, and keeps the newest, the best, or all checkpoints.

    Each file is written with a checksum under a temporary name, flushed to the disk and renamed, so that there is never
    a partial checkpoint under its name. Then the link to the latest one is updated, on remote stores too. Rank 0
    writes; the states of all ranks are gathered first.

    Training continues while a remote store is down: an upload that failed in a way that may be temporary is repeated
    until it succeeds. The end of `fit` waits for uploads until `delivery_timeout`, and raises an error that names the
    local files that did not arrive. A permanent failure, such as a missing permission, is raised at the next batch.

    From the construction of the Trainer to the end of `fit`, the folder is locked; see `composer.checkpoint.lease`.
    Another launch that would write the same files raises a `FolderInUseError` that names this run. Runs of other names
    may use the folder if `filename` includes `{run_name}`. Within one process, a new Trainer takes the folder over from
    an older one.

    A run removes only its own checkpoints: those in its folder that have its name pattern and record its name. They are
    found there when the run starts, wherever the folder was moved or copied from.

    File names are format strings with the variables of `composer.utils.FORMAT_NAME_WITH_DIST_AND_TIME_TABLE`.

    Args:
        folder: The folder to save to, or a URI such as `s3://bucket/folder`, whose checkpoints are written to a
            temporary folder and uploaded from there in the background.
        filename: The name of a checkpoint. Its extension selects the format: `.pt`, compressed as in `.pt.gz`, or an
            archive such as `.tar`. A run that saves in shards (see `FSDP2Config`) creates a folder instead, named
            `sharded_ckpt_prefix_dir`.
        remote_file_name: The name of a checkpoint in the remote folder, or for loggers that store files.
        latest_filename: The name of a symbolic link to the latest checkpoint; None creates none.
        latest_remote_file_name: The name of a text file with the name of the latest checkpoint, for remote stores,
            which have no links; `.symlink` is appended.
        save_interval: How often to save: a time, or a function of state and event.
        overwrite: Replace newer files of another run instead of raising an error.
        num_checkpoints_to_keep: Newest checkpoints to keep in the local folder; -1 keeps all.
        weights_only: Save the model only.
        ignore_keys: The parts to leave out; see `composer.checkpoint.glob_filter`.
        num_concurrent_uploads: The number of simultaneous uploads.
        upload_timeout_in_seconds: Another name of `delivery_timeout`.
        delivery_timeout: How many seconds the end of the run waits in total for pending uploads to a store that fails
            or makes no progress, and its start for the first answer of the store. Files that were not uploaded are kept
            in the local folder that the last line of the log names. None: the Trainer's, which its services share; 60
            without one.
        num_best_checkpoints_to_keep: Best checkpoints by `monitor` to keep in addition to the newest. A link `best-...`
            to the best one is created next to the link to the latest. With `num_checkpoints_to_keep=-1` all are kept.
        monitor: The metric to keep the best by: `"eval/MulticlassAccuracy"` is that metric of the evaluator `eval`,
            `"train/..."` a training metric, and `"loss/train/total"` a loss.
        monitor_mode: `"max"` if higher is better, `"min"` if lower is.
        asynchronous: Write in the background from a copy in host memory, so that training continues.

    Attributes:
        saved_checkpoints: The paths of the checkpoints that exist, oldest first.
        all_saved_checkpoints_to_timestamp: The paths and timestamps of all checkpoints that this process saved, and of
            those that the run had saved in its folder before.

    Raises:
        ValueError: An argument is invalid.

    Differs: MosaicML's class has neither `num_best_checkpoints_to_keep`, `monitor`, `monitor_mode` nor
        `asynchronous`. There, a killed save can leave a partial file.
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
        num_checkpoints_to_keep: SupportsIndex = -1,
        weights_only: bool = False,
        ignore_keys: IgnoreKeys | None = None,
        num_concurrent_uploads: int = 1,
        upload_timeout_in_seconds: float | None = None,
        num_best_checkpoints_to_keep: SupportsIndex = 0,
        monitor: str | None = None,
        monitor_mode: str = "max",
        asynchronous: bool = False,
        delivery_timeout: float | None = None,
    ) -> None:
        keep = plain_int(num_checkpoints_to_keep)
        if keep is None or keep < -1:
            raise ValueError(
                f"`num_checkpoints_to_keep` must be a number of checkpoints, or -1 for all, got "
                f"{num_checkpoints_to_keep!r}."
            )
        self.num_checkpoints_to_keep = keep
        check_finite(least=1, num_concurrent_uploads=num_concurrent_uploads)
        limits = {"upload_timeout_in_seconds": upload_timeout_in_seconds, "delivery_timeout": delivery_timeout}
        check_finite(above=0, **{name: seconds for name, seconds in limits.items() if seconds is not None})
        self.delivery_timeout = upload_timeout_in_seconds if delivery_timeout is None else delivery_timeout
        given = {"folder": folder, "filename": filename, "latest_filename": latest_filename}
        given |= {"remote_file_name": remote_file_name, "latest_remote_file_name": latest_remote_file_name}
        _check_names({argument: os.fspath(name) for argument, name in given.items() if name is not None})
        if (
            not callable(save_interval)
            and ensure_time(save_interval, TimeUnit.EPOCH, argument="save_interval").value <= 0
        ):
            raise ValueError(
                f"`save_interval` must be positive, got {save_interval!r}. Use for example '1ep' or '100ba'."
            )
        folder = os.path.expanduser(os.fspath(folder))  # "~" is the user's home, as in a shell
        self._uri = folder if is_uri(folder) else None
        self._staging: str | None = None
        self._cleanup: Any = None
        self._marked_undelivered = False  # the folder for uploads remains if the process is killed
        self.folder = folder if self._uri is None else os.path.join(self._scratch_folder(), parse_uri(folder)[2])
        self.filename = PartialFilePath(os.fspath(filename), self.folder)
        self.latest_filename = _path(latest_filename, self.folder)
        self.remote_file_name = _path(remote_file_name, None)
        self.latest_remote_file_name = _path(latest_remote_file_name, None)
        # The run may end on one rank alone, so its end is saved when all ranks have stopped; see `finalize`.
        self._saves_end = not callable(save_interval)
        self._interval: Callable[[State, Event], bool] = (
            save_interval
            if callable(save_interval)
            else create_interval_scheduler(save_interval, include_end_of_training=False)
        )
        self._requested = False
        self._in_fit = False  # so `finalize` will be called
        self.overwrite, self.weights_only, self.ignore_keys = overwrite, weights_only, ignore_keys
        self.num_concurrent_uploads = plain_number(num_concurrent_uploads)
        self.upload_timeout_in_seconds = self.delivery_timeout
        self.best = BestCheckpoints(num_best_checkpoints_to_keep, monitor, monitor_mode)
        self.saved_checkpoints: list[str] = []
        self.all_saved_checkpoints_to_timestamp: dict[str, Timestamp] = {}
        self._saved_best: dict[str, Any] = {}  # the loaded state of `best`, until `_find_saved` restores it
        self.last_checkpoint_batch: Time[int] | None = None
        # Set by the Trainer:
        self.continues = False  # True with `autoresume`: existing files under the names of this run are its own
        self.resumed_at: Time[int] | None = None  # the batch of the checkpoint that it resumed from
        self._last_names: dict[str, str] = {}  # the names of the last checkpoint; see `_format_names`
        self._end_names: tuple[Any, dict[str, str]] = (None, {})  # the last batch, and the names when it had ended
        self._last_fingerprint: tuple[Any, ...] = ()
        self._writer = CheckpointWriter(asynchronous)
        self.remote_uploader: Any = None
        self._lease: Lease | None = None
        self._reserved = False  # True on every rank once rank 0 holds the lease
        self._checked_types = False

    def _check_places(self, state: State) -> None:
        """Check, on rank 0, the folder and the names of files and links, which depend on the name of the run."""
        check_run_name(state.run_name)
        files = checkpoint_pattern(state, self.filename)
        if state.fsdp_sharded_state_dict_enabled:
            check_pattern("sharded_ckpt_prefix_dir", files.filename)
            check_relative("sharded_ckpt_prefix_dir", files.filename)
        if self._uri is None:
            check_folder(format_name_with_dist(self.folder, state.run_name))
        if self.latest_filename is not None and self.num_checkpoints_to_keep != 0:
            link = self.latest_filename.format(state)
            checkpoints = partial_format(files.format(state, keep_placeholders=True), run_name=state.run_name, rank=0)
            check_link(link, checkpoints)

    # ---- when to save ----

    def save_interval(self, state: State, event: Event) -> bool:
        """Return True if a checkpoint is saved at this event. Algorithms call it, too, to prepare the model."""
        if event is Event.BATCH_CHECKPOINT and self._requested:
            self._interval(state, event)  # called in any case, because it remembers the batch of its last call
            return True
        return self._interval(state, event)

    def save_soon(self) -> None:
        """Save at the next BATCH_CHECKPOINT, independent of the interval. Call it on every rank."""
        self._requested = True

    def reserve(self, state: State, delivery_timeout: float = 60.0) -> None:
        """Take the lease on the save folder, so that no other run writes the same files. Call it on every rank.

        This waits while nobody can tell whether a run on another host is alive; see `composer.checkpoint.lease`.

        Args:
            state: The run.
            delivery_timeout: The Trainer's, which applies if this object has none: how many seconds to wait for the
                answer of a remote store.

        Raises:
            FolderInUseError: Another run saves to the folder; a RuntimeError on other ranks than the first.
            OSError: The folder or the remote store cannot be written, or the store does not answer in time.
            ValueError: The name of the run leads out of the folder, or the folder is a file.
        """
        if self._uri is not None and has_mlflow_ids(self._uri):
            return  # `init` takes the lease: only then has a logger started the run of MLflow

        def acquire() -> None:
            where = self._folder_of(state)
            if self._lease is None:
                self._check_places(state)
                if self._uri is not None:  # detect wrong credentials now, not after hours of training
                    uri = format_name_with_dist(self._uri, state.run_name)
                    limit = delivery_timeout if self.delivery_timeout is None else self.delivery_timeout
                    call_in_time(storage_of(uri).check_writable, limit, f"Writing to {without_password(uri)}")
                held = (saver._lease for saver in savers_of(state) if saver._lease and saver._folder_of(state) == where)
                files = checkpoint_pattern(state, self.filename).filename
                if self._uri is not None and self.remote_file_name is not None:
                    files = checkpoint_pattern(state, self.remote_file_name).filename.rpartition("/")[2]
                # Another saver of this run may save to the same folder.
                self._lease = next(held, None) or Lease(where, state.run_name, files)
            try:
                self._lease.acquire()
            except OSError as error:  # without permission to write, the save fails, too, with an explanation
                log.warning("No lease on %s could be taken, so another run may use it, too: %s", where, error)

        on_first_rank(acquire, problem="Rank 0 cannot save")
        self._reserved = True

    def _folder_of(self, state: State) -> str:
        """Return the folder of the checkpoints: the local one, or the URI of the one they are uploaded to."""
        if self._uri is None or self.remote_file_name is None:
            return format_name_with_dist(self._uri or self.folder, state.run_name)
        name = format_name_with_dist(self.remote_file_name.filename, state.run_name)
        return f"{self.remote_root}{name.partition('{')[0].rpartition('/')[0]}"

    @contextmanager
    def training(self, state: State) -> Iterator[None]:
        """Hold the lease while the run trains, and release it if training succeeds. Call it on every rank."""
        self.reserve(state)
        self._in_fit = True
        try:
            yield
        finally:
            self._in_fit = False
        if self._lease is not None:  # after an error, uploads go on until `post_close`
            self._lease.release()

    def init(self, state: State, logger: Logger) -> None:
        if state.fsdp_sharded_state_dict_enabled and self._writer.asynchronous:
            raise ValueError(
                "Checkpoints in shards are not written in the background: all ranks write them together. Leave "
                "`save_async` out, or use `state_dict_type='full'`."
            )
        several_nodes = dist.get_local_world_size() < dist.get_world_size()
        if state.fsdp_sharded_state_dict_enabled and self._uri is not None and several_nodes:
            raise ValueError(
                f"Checkpoints in shards of several nodes must be saved to a folder that all of them share, not to "
                f"{without_password(self._uri)!r}. Use such a `save_folder`, or `state_dict_type='full'`."
            )
        self._fill_mlflow_ids(logger)
        if not self._reserved:
            self.reserve(state, logger.delivery_deadline.timeout)
        if self._uri is None or dist.get_global_rank() != 0:
            return
        self.remote_uploader = Uploader(
            self.bucket(state),
            concurrent=self.num_concurrent_uploads,
            timeout=logger.delivery_deadline.for_service(self.delivery_timeout),
            rides_out=True,
        )

    def _fill_mlflow_ids(self, logger: Logger) -> None:
        """Replace the placeholders for experiment and run of MLflow in folder and names. A collective operation."""
        if self._uri is None or not has_mlflow_ids(self._uri):
            return
        uri = self._uri

        def find_ids() -> dict[str, str]:
            known = [getattr(destination, "mlflow_ids", None) for destination in logger.destinations]
            ids = next((each for each in known if each and isinstance(each, dict)), None)
            if ids is not None:
                return ids
            build = import_from_distribution(
                "composer.utils.object_store",
                "build_remote_backend",
                "composer-compat",
                "composer.utils.build_remote_backend",
            )
            store = build("dbfs", {"path": parse_uri(uri)[2]})  # it starts a run if there is none
            return {MLFLOW_EXPERIMENT_ID_FORMAT_KEY: store.experiment_id, MLFLOW_RUN_ID_FORMAT_KEY: store.run_id}

        values = on_first_rank(find_ids, problem=f"Rank 0 found no run of MLflow for {without_password(uri)!r}")
        self._uri, self.folder = (partial_format(text, **values) for text in (self._uri, self.folder))
        for path in (self.filename, self.latest_filename, self.remote_file_name, self.latest_remote_file_name):
            if path is not None:
                path.filename = partial_format(path.filename, **values)
                path.folder = None if path.folder is None else partial_format(path.folder, **values)

    def after_load(self, state: State, logger: Logger) -> None:
        if self._uri is None and dist.get_global_rank() == 0:
            self._find_saved(state)
        if self.best.evaluator in state.eval_metrics:  # other evaluators may be added by `fit`
            self.best.check(state)

    @property
    def remote_root(self) -> str | None:
        """The root of `remote_file_name`: the bucket, or the root of the file system; None if not remote."""
        if self._uri is None:
            return None
        path = parse_uri(self._uri)[2]
        return self._uri[: len(self._uri) - len(path)]

    def bucket(self, state: State) -> Storage:
        """Return the storage of the remote store; `remote_file_name` is a name in it."""
        assert self._uri is not None
        return bucket_of(format_name_with_dist(self._uri, state.run_name))

    def fit_start(self, state: State, logger: Logger) -> None:
        self.best.check(state)
        on_first_rank(lambda: self._prepare_folder(state), problem="Rank 0 cannot save")

    def _prepare_folder(self, state: State) -> None:
        """Check that the run replaces no files but its own, and remove what a killed process has left.

        Raises:
            FileExistsError: The run would replace files of another one.
        """
        folder = Path(format_name_with_dist(self.folder, state.run_name))
        folder.mkdir(parents=True, exist_ok=True)
        if not self.overwrite and not self.continues:
            self._check_fixed_name(state, folder)
            try:
                pattern = completion_pattern(state, self.filename).replace("{run_name}", state.run_name)
                ensure_folder_has_no_conflicting_files(folder, pattern, state.timestamp)
                if self._uri is not None and self.remote_file_name is not None:
                    self._check_store(state, self.remote_file_name)
            except FileExistsError as error:
                raise FileExistsError(
                    f"{error} It was left by another run, or by an earlier one or `fit` of this name. To continue that "
                    f"run, pass `autoresume=True`; to start again and replace its files, pass `save_overwrite=True`."
                ) from None
        files = checkpoint_pattern(state, self.filename).filename
        own, is_shared = files.replace("{run_name}", state.run_name), "{run_name}" in files
        # In a shared folder, runs of other names may be writing other files now.
        for name in remove_leftovers(folder, lambda name: not is_shared or counts_of_name(name, own) is not None):
            log.info("Removed %s, which a process that was killed while saving left in %s.", name, folder)

    def _check_fixed_name(self, state: State, folder: Path) -> None:
        """Check that the file belongs to this run if its name has no counts, so that every save replaces it."""
        path = folder / partial_format(self.filename.filename, run_name=state.run_name, rank=0)
        if "{" in path.name or not path.exists():
            return
        run_name, _ = identify_run(path) or (None, None)
        content = outline_of_run(path)
        # A file of weights that the Trainer has saved names no run, and may be replaced, and so may an empty file.
        is_weights = (isinstance(content, dict) and isinstance(content.get("state"), dict)) or path.stat().st_size == 0
        if run_name != state.run_name and (run_name is not None or not is_weights):
            raise FileExistsError(name_conflict_message(state.run_name, str(path), run_name))

    def _check_store(self, state: State, names: PartialFilePath) -> None:
        """Check that the store has no file that this run would replace.

        Raises:
            FileExistsError: The store has such a file.
        """
        pattern = format_name_with_dist(completion_pattern(state, names), state.run_name, rank=0)
        existing = self.bucket(state).find(pattern.partition("{")[0].rpartition("/")[0])
        root = self.remote_root or ""
        if pattern in existing and self.last_checkpoint_batch is None:  # a name without counts
            raise FileExistsError(f"`{root}{pattern}` exists already.")
        ensure_folder_has_no_conflicting_files(root, pattern, state.timestamp, existing)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._writer.check()
        if self._lease is not None:
            self._lease.check()
        if self.remote_uploader is not None:
            with self._keeping_files_on_upload_error():
                self.remote_uploader.check()
            if self._marked_undelivered and not (self.remote_uploader.pending or self._writer.busy):
                self._mark_undelivered(False)
        self._save_if_due(Event.BATCH_CHECKPOINT, state, logger)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_if_due(Event.EPOCH_CHECKPOINT, state, logger)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_if_due(Event.ITERATION_CHECKPOINT, state, logger)

    def _save_if_due(self, event: Event, state: State, logger: Logger) -> None:
        now = state.timestamp.batch
        if self.save_interval(state, event) and self.last_checkpoint_batch != now:
            self._save_checkpoint(state, logger)
        elif state.is_over() and self._end_names[0] != now:
            self._end_names = (now, self._format_names(state))
        self._requested = False

    def fit_end(self, state: State, logger: Logger) -> None:
        if self._saves_end and not self._in_fit and self.last_checkpoint_batch != state.timestamp.batch:
            self._save_checkpoint(state, logger)
        self.flush()

    def finalize(self, state: State, logger: Logger) -> None:
        """Save the end of the run, unless the last checkpoint holds it. Call it on every rank, after all events.

        If events after the last checkpoint have changed the run, that checkpoint is replaced. With `autoresume` it is
        replaced in any case, by one that says that the run is complete.
        """
        now = state.timestamp.batch
        if self.last_checkpoint_batch == now:
            names, saves = self._last_names, self.continues or self._last_fingerprint != _fingerprint(state)
        else:
            # A function as interval does not request a save at the end of the run. It is saved nevertheless if this
            # process was launched after that batch: then its last checkpoint may lack what the end has changed.
            names = self._end_names[1] if self._end_names[0] == now else self._format_names(state)
            saves = self._saves_end or self.resumed_at == now
        if any(dist.all_gather_object(saves)):
            self._save_checkpoint(state, logger, names)
        self.flush()

    def flush(self) -> None:
        """Wait until all checkpoints are on the disk, and uploaded if the folder is remote."""
        self._writer.wait()
        if self.remote_uploader is not None:
            with self._keeping_files_on_upload_error():
                self.remote_uploader.wait()
            self._mark_undelivered(False)

    @contextmanager
    def _keeping_files_on_upload_error(self) -> Iterator[None]:
        """Keep the local files, and log their folder, if the remote store fails."""
        try:
            yield
        except Exception:
            if self._cleanup is not None and self._cleanup.detach() is not None:
                uri = without_password(self._uri or "")
                log.error("Not all checkpoints reached %s. The local files are kept in %s.", uri, self.folder)
            raise

    @property
    def saved_to(self) -> str:
        """The path or URI of the latest checkpoint."""
        return self._uri or (self.saved_checkpoints[-1] if self.saved_checkpoints else self.folder)

    def close(self, state: State, logger: Logger) -> None:
        self._writer.close()

    def post_close(self) -> None:
        uploader, self.remote_uploader = self.remote_uploader, None
        lease, self._lease, self._reserved = self._lease, None, False
        try:
            if uploader is not None:
                with self._keeping_files_on_upload_error():
                    uploader.close()
        finally:
            if lease is not None:
                lease.release()

    # ---- saving ----

    def save_now(self, state: State, logger: Logger) -> None:
        """Save as at the interval, during `fit` or at another time. Call it on every rank.

        Raises:
            FolderInUseError: Another run saves to the folder.
        """
        self.reserve(state, logger.delivery_deadline.timeout)
        self._save_checkpoint(state, logger)
        if not self._in_fit:
            self.flush()
            if self._lease is not None:
                self._lease.release()

    def _save_checkpoint(self, state: State, logger: Logger, names: dict[str, str] | None = None) -> None:
        """Save now, under the names that `_format_names` gives now or has given. Call it on every rank."""
        self._writer.wait()  # the previous one is ranked and linked when it is complete
        if self._lease is not None:
            self._lease.check(saving=True)
        self.last_checkpoint_batch = state.timestamp.batch
        self._last_fingerprint = _fingerprint(state)
        names = self._format_names(state) if names is None else names
        replaces_last, self._last_names = names == self._last_names, names
        path = names["path"]
        self._mark_undelivered(True)
        # Registered first, so that the checkpoint lists itself, too.
        self.all_saved_checkpoints_to_timestamp[path] = state.timestamp
        self.best.consider(path, state)
        sharded = state.fsdp_sharded_state_dict_enabled
        content = collect(state, weights_only=self.weights_only, ignore_keys=self.ignore_keys, gather=not sharded)
        if not self._checked_types and dist.get_global_rank() == 0:
            self._checked_types = True
            check_loadable(content)
        if sharded:
            write_run(content, Path(path), overwrite=True)
        if dist.get_global_rank() != 0:
            return
        if sharded:
            self._after_write(names, logger, replaces_last)
        else:
            self._writer.write(content, path, lambda: self._after_write(names, logger, replaces_last))

    def _format_names(self, state: State) -> dict[str, str]:
        """Return the names that belong to a checkpoint at this time; it may be completed later."""
        parts = {
            "path": checkpoint_pattern(state, self.filename),
            "latest": self.latest_filename if self.num_checkpoints_to_keep != 0 else None,
            "remote": self.remote_file_name and checkpoint_pattern(state, self.remote_file_name),
            "latest_remote": self.latest_remote_file_name,
        }
        return {key: part.format(state) for key, part in parts.items() if part is not None}

    def _after_write(self, names: dict[str, str], logger: Logger, replaces_last: bool) -> None:
        """Update links, upload and rotate, when the file is complete."""
        path = names["path"]
        if "latest" in names:
            latest = Path(names["latest"])
            replace_link(latest, Path(path))
            best = self.best.path
            if best is not None:
                replace_link(latest.with_name(_best_name(latest.name)), Path(best))
        is_new = path not in self.saved_checkpoints
        overwrite = replaces_last or not is_new or self.overwrite or self.continues
        remote, link = names.get("remote"), names.get("latest_remote")
        if remote is not None and self.remote_uploader is not None:
            named = None if link is None else (f"{link}.symlink", remote)
            *others, last = files_of_run(Path(path), remote)
            self.remote_uploader.upload(*last, overwrite=overwrite, link=named, before=others)
        elif remote is not None and logger.has_file_upload_destination():
            for file, name in files_of_run(Path(path), remote):
                logger.upload_file(name, file, overwrite=overwrite)
            if link is not None:
                text = Path(self._scratch_folder()) / f"{Path(path).name}.symlink"
                text.write_text(remote, encoding="utf-8")
                logger.upload_file(f"{link}.symlink", text, overwrite=True)
        if is_new:
            self.saved_checkpoints.append(path)
        self._rotate()

    def _scratch_folder(self) -> str:
        """Return a folder for small files that loggers may upload later; it is removed with this object."""
        if self._staging is None:
            folder, remove = make_scratch_folder("saving")
            self._staging, self._cleanup = str(folder), weakref.finalize(self, remove)
        return self._staging

    def _mark_undelivered(self, keep: bool) -> None:
        """Mark the folder to remain if the process is killed before its files were uploaded."""
        if self._uri is None or dist.get_global_rank() != 0 or keep == self._marked_undelivered:
            return
        self._marked_undelivered, marker = keep, Path(self._scratch_folder()) / UNDELIVERED
        if keep:
            marker.touch()
        else:
            marker.unlink(missing_ok=True)

    def _rotate(self) -> None:
        if self.num_checkpoints_to_keep < 0:
            return
        newest = self.saved_checkpoints[max(0, len(self.saved_checkpoints) - self.num_checkpoints_to_keep) :]
        keep = {*newest, *self.best.paths}
        for path in [path for path in self.saved_checkpoints if path not in keep]:
            self.saved_checkpoints.remove(path)
            remove_run(Path(path))

    # ---- resumption ----

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints that have not been rotated out and, if a metric is monitored, its values."""
        keeps_all = self.num_checkpoints_to_keep < 0  # otherwise the list would grow with every save
        existing = {*self.saved_checkpoints, self._last_names.get("path")}
        saved: dict[str, Any] = {
            "all_saved_checkpoints_to_timestamp": [
                (path, timestamp.state_dict())
                for path, timestamp in self.all_saved_checkpoints_to_timestamp.items()
                if keeps_all or path in existing
            ]
        }
        if self.best.monitor is not None:
            saved["best"] = self.best.state_dict()
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values of the monitored metric. The checkpoints themselves are looked up in the folder.

        The state may be that of another run, or of a folder that was copied or moved since, so the paths in it are
        never written or removed.
        """
        self._saved_best = state.get("best", {})

    def _find_saved(self, state: State) -> None:
        """List the checkpoints that this run has saved before, by their names and the name of the run in them."""
        folder = format_name_with_dist(self.folder, state.run_name)
        pattern = partial_format(checkpoint_pattern(state, self.filename).filename, run_name=state.run_name, rank=0)
        found: dict[str, Timestamp] = {}
        for path in Path(folder).glob("/".join("*" * (pattern.count("/") + 1))):
            name = path.relative_to(folder).as_posix()
            inside = [path, *path.parents][: pattern.count("/") + 1]
            if counts_of_name(name, pattern) is None or any(part.is_symlink() for part in inside):
                continue  # what a link leads to is not in this folder
            identity = identify_run(path)
            if identity is not None and identity[0] == state.run_name and identity[1].batch <= state.timestamp.batch:
                found[name] = identity[1]
        names = sorted(found, key=lambda name: found[name].batches)
        paths = {name: os.path.join(folder, name) for name in names}
        self.all_saved_checkpoints_to_timestamp = {paths[name]: found[name] for name in names}
        self.saved_checkpoints = list(paths.values())
        self.best.restore(self._saved_best, paths)


@contextmanager
def hold_leases(state: State) -> Iterator[None]:
    """Hold the leases on the folders that a run saves to while it trains."""
    with ExitStack() as leases:
        for saver in savers_of(state):
            leases.enter_context(saver.training(state))
        yield


def savers_of(state: State) -> list[CheckpointSaver]:
    """Return the savers among the callbacks of a run."""
    return [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]


def checkpoint_pattern(state: State, files: PartialFilePath) -> PartialFilePath:
    """Return the name pattern of a run's checkpoints: `files`, or that of the folders beside them that hold shards."""
    if not state.fsdp_sharded_state_dict_enabled:
        return files
    inside, _, _ = files.filename.rpartition("/")
    prefix = state.fsdp_config.sharded_ckpt_prefix_dir
    return PartialFilePath(f"{inside}/{prefix}" if inside else prefix, files.folder)


def completion_pattern(state: State, files: PartialFilePath) -> str:
    """Return the name pattern of the file that is written last, with which a checkpoint is complete."""
    pattern = checkpoint_pattern(state, files)
    return pattern.filename if pattern is files else f"{pattern.filename}/{STATES}"


def name_conflict_message(run_name: str, path: str, other: str | None) -> str:
    """Return the message for a file of the run `other` (None: of no run) that a run would replace."""
    if other is None:
        return (
            f"`save_folder` must not hold other files under a name that the run {run_name!r} uses, got "
            f"{path!r}, which {NOT_RESUMABLE}. The run would replace it. Use another `save_filename` or `save_folder`, "
            f"or pass `save_overwrite=True` if it may be replaced."
        )
    return (
        f"`save_folder` must not hold a newer checkpoint of another run under a name that the run {run_name!r} uses, "
        f"got {path!r}, saved by the run {other!r}. Give each run its own `save_folder`, put `{{run_name}}` into "
        f"`save_filename`, or pass `save_overwrite=True` to replace such files."
    )


def _check_names(names: dict[str, str]) -> None:
    for argument, name in names.items():
        check_pattern(argument, name, times=argument != "folder")
    for argument in ("filename", "latest_filename"):
        if argument in names:
            check_relative(argument, names[argument])
    check_file_name(names["filename"])


def _path(name: str | os.PathLike[str] | None, folder: str | None) -> PartialFilePath | None:
    return None if name is None else PartialFilePath(os.fspath(name), folder)


def _fingerprint(state: State) -> tuple[Any, ...]:
    """Return a value that changes with time or weights, reading no tensor: torch counts the writes to each."""
    now = state.timestamp
    tensors = [local_part(tensor) for tensor in (*state.model.parameters(), *state.model.buffers())]
    versions = tuple((id(tensor), tensor._version) for tensor in tensors if not tensor.is_inference())
    return (now.iterations, now.epochs, now.batches, versions)


def _best_name(latest: str) -> str:
    return latest.replace("latest", "best") if "latest" in latest else f"best-{latest}"
