"""Profiling a run, and uploading what is named by a URI: profiles, and what callbacks write."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from composer.checkpoint.storage import storage_of
from composer.checkpoint.upload import Uploader
from composer.core import Callback, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist, format_name_with_dist, is_uri, parse_uri
from composer.utils.retrying import DeliveryDeadline

__all__ = ["RemoteFiles", "RunsProfiler", "bind_profiler", "check_not_profiled", "remote_files"]


class RunsProfiler(Protocol):
    """What the Trainer asks of its `profiler`; `composer.profiler.Profiler` does it."""

    @property
    def remote_filenames(self) -> Sequence[str]:
        """URIs of files that it uploads."""

    def bind_to_state(self, state: State) -> None:
        """Profile the run: become a callback of it."""

    def marker(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A marker."""


def check_not_profiled(profiler: object, microbatch_size: Any) -> None:
    """Refuse to search the microbatch size while profiling.

    Raises:
        ValueError: Both are asked for.
    """
    if profiler is not None and microbatch_size == "auto":
        raise ValueError(
            "`profiler` does not go with `device_train_microbatch_size='auto'`: what is measured would be the search. "
            "Give a number."
        )


def bind_profiler(profiler: Any, state: State, microbatch_size: Any) -> None:
    """Profile a run; None: do not.

    Raises:
        ValueError: The microbatch size is to be searched.
        TypeError: It is no profiler.
    """
    if profiler is None:
        return
    check_not_profiled(profiler, microbatch_size)
    if isinstance(profiler, type) or not hasattr(profiler, "bind_to_state"):
        raise TypeError(f"`profiler` must be a `composer.profiler.Profiler`, got {profiler!r}. Pass `Profiler(...)`.")
    warnings.warn(
        "The profiler is enabled. Using the profiler adds additional overhead when training: do not compare its speed.",
        stacklevel=4,
    )
    state.profiler = profiler
    profiler.bind_to_state(state)


def remote_files(profiler: Any, callbacks: Iterable[Callback]) -> list[LoggerDestination]:
    """What uploads the files that a profiler and callbacks name by URIs; nothing if they name none."""
    names = [] if profiler is None else list(profiler.remote_filenames)
    # A logger does not know its name before the run begins.
    watchers = [callback for callback in callbacks if not isinstance(callback, LoggerDestination)]
    names += [getattr(watcher, "remote_file_name", None) for watcher in watchers]
    uris = [name for name in names if isinstance(name, str) and is_uri(name)]
    return [RemoteFiles(uris)] if uris else []


class RemoteFiles(LoggerDestination):
    """Uploads files whose names are URIs, in the background; leaves other names to other loggers.

    The end of `fit` waits for the uploads. One that fails is warned of, and training goes on.

    Args:
        uris: What will be uploaded, format strings; only names in their buckets are.
    """

    def __init__(self, uris: Sequence[str]) -> None:
        self._uris = tuple(uris)
        self._uploaders: dict[str, Uploader] = {}
        self._deadline = DeliveryDeadline(60.0)  # the run's, from `init` on
        self._roots = {_split(uri)[0] for uri in uris}

    def init(self, state: State, logger: Logger) -> None:
        self._deadline = logger.delivery_deadline
        if dist.get_global_rank() == 0:  # refused credentials must not be found out after hours of training
            folders = [format_name_with_dist(uri.rpartition("/")[0], state.run_name) for uri in self._uris]
            for folder in dict.fromkeys(folder.partition("{")[0] for folder in folders):
                storage_of(folder).check_writable()

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        if not is_uri(remote_file_name):
            return
        root, name = _split(remote_file_name)
        if root not in self._roots:
            return
        if root not in self._uploaders:
            self._uploaders[root] = Uploader(storage_of(root), timeout=self._deadline.for_service())
        self._uploaders[root].upload(file_path, name, overwrite=overwrite)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._settle()

    def post_close(self) -> None:
        self._settle()

    def _settle(self) -> None:
        """Wait for all uploads; the uploaders are made anew when there is more."""
        uploaders, self._uploaders = self._uploaders, {}
        for uploader in uploaders.values():
            try:
                uploader.close()
            except Exception as error:  # noqa: BLE001 - told, and nothing of the run depends on it
                warnings.warn(f"Not everything was uploaded: {error}", RuntimeWarning, stacklevel=2)


def _split(uri: str) -> tuple[str, str]:
    """The bucket of a URI, and the name in it."""
    path = parse_uri(uri)[2]
    return uri[: len(uri) - len(path)], path
