"""Uploads files that callbacks and profilers name by URIs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from composer.checkpoint.ranks import on_first_rank
from composer.checkpoint.storage import bucket_of, storage_of
from composer.checkpoint.upload import Uploader
from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.utils import format_name_with_dist, is_uri, parse_uri
from composer.utils.delivery import DeliveryDeadline


class RemoteFiles(LoggerDestination):
    """Uploads files whose names are URIs in the background; ignores other names.

    The end of `fit` waits for the uploads. A failed upload is a warning, and training continues.

    Args:
        uris: The names of the files, format strings; only names in these buckets are uploaded.
    """

    def __init__(self, uris: Sequence[str]) -> None:
        self._uploaders: dict[str, Uploader] = {}
        self._deadline = DeliveryDeadline(60.0)  # replaced by that of the run in `init`
        self._roots = {_split(uri)[0] for uri in uris}

    def init(self, state: State, logger: Logger) -> None:
        self._deadline = logger.delivery_deadline

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        if not is_uri(remote_file_name):
            return
        root, name = _split(remote_file_name)
        if root not in self._roots:
            return
        if root not in self._uploaders:
            self._uploaders[root] = Uploader(bucket_of(remote_file_name), timeout=self._deadline.for_service())
        self._uploaders[root].upload(file_path, name, overwrite=overwrite)

    def fit_end(self, state: State, logger: Logger) -> None:
        self._wait()

    def post_close(self) -> None:
        self._wait()

    def _wait(self) -> None:
        """Wait for all uploads; later ones get new uploaders."""
        uploaders, self._uploaders = self._uploaders, {}
        for uploader in uploaders.values():
            try:
                uploader.close()
            except Exception as error:  # noqa: BLE001 - a warning is enough: the run does not depend on it
                warnings.warn(f"Not everything was uploaded: {error}", RuntimeWarning, stacklevel=2)


def check_uris(uris: Sequence[str], run_name: str) -> None:
    """Check that the files of rank 0 can be uploaded, to find rejected credentials now and not after hours of training.

    A collective: every rank calls it, also one that has no such files.

    Args:
        uris: The names of this rank's files, format strings.
        run_name: The name of the run.

    Raises:
        RuntimeError: Rank 0 cannot upload; there, its own error is raised.
    """
    folders = [format_name_with_dist(uri.rpartition("/")[0], run_name).partition("{")[0] for uri in uris]

    def check() -> None:
        for folder in dict.fromkeys(folders):
            storage_of(folder).check_writable()

    on_first_rank(check, problem="Files cannot be uploaded")


def _split(uri: str) -> tuple[str, str]:
    """Split a URI into its bucket and the name in it; a volume of Databricks is a bucket."""
    scheme, _, path = parse_uri(uri)
    return uri[: len(uri) - len(path)] + ("/".join(path.split("/")[:4]) if scheme == "dbfs" else ""), path
