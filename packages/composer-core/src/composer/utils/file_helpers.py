"""Format the names of files that a run writes, and check the folders for them."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.core._registry import registered_names
from composer.utils import dist
from composer.utils.misc import partial_format

if TYPE_CHECKING:
    from composer.core.time import Timestamp

_URI = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+._-]+):(?://(?P<authority>[^/]*))?(?:/+(?P<path>.*))?", re.DOTALL)
_SECRET_IN_QUERY = re.compile(
    r"([?&][^=&#\s]*(?:credential|key|pass|secret|sig|token)[^=&#\s]*=)[^&#\s]+", re.IGNORECASE
)
_TOTALS = ("epoch", "batch", "sample", "token")
_IN_EPOCH = ("batch_in_epoch", "sample_in_epoch", "token_in_epoch")
_CLOCKS = ("total_wct", "epoch_wct", "batch_wct")
TIME_VARIABLES = (*_TOTALS, *_IN_EPOCH, *_CLOCKS)
"""The variables of the training time in the names of files."""
DIST_VARIABLES = {
    "rank": "get_global_rank",
    "local_rank": "get_local_rank",
    "world_size": "get_world_size",
    "local_world_size": "get_local_world_size",
    "node_rank": "get_node_rank",
}
"""The variables of the process, and the functions of `composer.utils.dist` that return their values."""


def format_name_with_dist(format_str: str, run_name: str, **extra_format_kwargs: object) -> str:
    """Format a file name with the name of the run and the ranks of the process.

    Args:
        format_str: A format string; with `{run_name}`, `{rank}`, `{local_rank}`, `{world_size}`, `{local_world_size}`
            and `{node_rank}`. Other variables, and ranks that are unknown, are left in the string.
        run_name: The name of the run.
        **extra_format_kwargs: More variables.

    Example:
        >>> format_name_with_dist("{run_name}/ep{epoch}-rank{rank}.pt", "mnist", rank=3)
        'mnist/ep{epoch}-rank3.pt'
    """
    variables: dict[str, Any] = {"run_name": run_name}
    for name, getter in DIST_VARIABLES.items():
        with suppress(dist.MissingEnvironmentError):  # left in the string
            variables[name] = getattr(dist, getter)()
    return partial_format(format_str, **variables | extra_format_kwargs)


def format_name_with_dist_and_time(
    format_str: str, run_name: str, timestamp: Timestamp, **extra_format_kwargs: object
) -> str:
    """Format a file name with the name of the run, the ranks of the process and the training time.

    Args:
        format_str: A format string; with the variables of `format_name_with_dist` and `{epoch}`, `{batch}`, `{sample}`,
            `{token}`, `{batch_in_epoch}`, `{sample_in_epoch}`, `{token_in_epoch}`, `{total_wct}`, `{epoch_wct}` and
            `{batch_wct}`. Others are left in the string. Counts are ints, times are float seconds.
        run_name: The name of the run.
        timestamp: The training time.
        **extra_format_kwargs: More variables.
    """
    counts = {name: getattr(timestamp, name).value for name in (*_TOTALS, *_IN_EPOCH)}
    clocks = {name: getattr(timestamp, name).total_seconds() for name in _CLOCKS}
    return format_name_with_dist(format_str, run_name, **{**counts, **clocks, **extra_format_kwargs})


def parse_uri(uri: str) -> tuple[str, str, str]:
    """Split a URI into backend, bucket and path.

    Args:
        uri: Such as "s3://bucket/folder/file" or "oci://bucket@namespace/file"; anything without a scheme, and a
            Windows drive, is a local path.

    Returns:
        The scheme in lower case ("" for a local path; "azure" for AZURE_BLOBS), the bucket without its namespace, and
        the path without leading slashes (a local path is unchanged).

    Raises:
        TypeError: `uri` is not a string.

    Example:
        >>> parse_uri("S3://bucket/a/b"), parse_uri("/data/a")
        (('s3', 'bucket', 'a/b'), ('', '', '/data/a'))
    """
    if not isinstance(uri, str):
        raise TypeError(f"`uri` must be a string, a URI or a local path, got {uri!r}.")
    match = _URI.fullmatch(uri)
    if match is None or (match["authority"] is None and match["path"] is None):
        return "", "", uri
    scheme = match["scheme"].lower()
    bucket = (match["authority"] or "").partition("@")[0]
    return "azure" if scheme == "azure_blobs" else scheme, bucket, match["path"] or ""


def is_uri(path: str) -> bool:
    """Return True if a path is a URI instead of a local path."""
    return parse_uri(path)[0] != ""


def without_password(uri: str) -> str:
    """Return a URI, for messages and loggers, with "..." in place of its password and of tokens in its query.

    Example:
        >>> without_password("sftp://me:secret@host/a"), without_password("https://host/a?part=1&sig=5%2F")
        ('sftp://me:...@host/a', 'https://host/a?part=1&sig=...')
    """
    if "://" not in uri:
        return uri
    uri = re.sub(r"(://[^/@:]*):[^/]*@", r"\1:...@", uri)  # up to the last "@" of the host, as clients read it
    return _SECRET_IN_QUERY.sub(r"\1...", uri)


def ensure_folder_has_no_conflicting_files(
    folder_name: str | Path, filename: str, timestamp: Timestamp, names: Iterable[str] | None = None
) -> None:
    """Check that no file in a folder is from a later training time than the given one.

    Args:
        folder_name: The folder; it need not exist.
        filename: The format string of the file names, such as "ep{epoch}-ba{batch}.pt". Other files are ignored.
        timestamp: The training time at which the run starts to write.
        names: The names of the files, relative to the folder, with "/" between folders; None: those of a local folder.

    Raises:
        FileExistsError: A file's epoch, batch, sample or token is greater than that of `timestamp`; or its batch,
            sample or token in the epoch is greater and the epoch is the same.
        ValueError: A file matches, but `filename` has a count in the epoch without the epoch.
    """
    pattern = file_name_pattern(filename)
    if names is None:
        paths = (os.path.join(folder, name) for folder, _, files in os.walk(folder_name) for name in sorted(files))
        names = (os.path.relpath(path, folder_name).replace(os.sep, "/") for path in paths)
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        counts = {variable: int(count) for variable, count in match.groupdict().items()}
        later = _later_variable(counts, timestamp)
        if later is not None:
            raise FileExistsError(
                f"`{os.path.join(folder_name, name)}` must not be newer than the run, but its {later}, "
                f"{counts[later]}, is greater than the current one, {getattr(timestamp, later).value}. Use another "
                f"folder, or allow overwriting."
            )


def file_name_pattern(filename: str) -> re.Pattern[str]:
    """Return a pattern that matches the names of a format string; its groups are the counts."""
    pattern, seen = "", set[str]()
    for literal, field, _, _ in string.Formatter().parse(filename):
        pattern += re.escape(literal)
        if field in seen:
            pattern += rf"(?P={field})"
        elif field in _TOTALS or field in _IN_EPOCH:
            pattern += rf"(?P<{field}>\d+)"
            seen.add(field)
        elif field in _CLOCKS:
            pattern += r"[\d.e+-]+"
        elif field is not None:
            pattern += ".+" if field == "run_name" else "[^/]+"  # the name of a run may lead to a folder
    return re.compile(pattern, re.DOTALL)


def _later_variable(counts: dict[str, int], timestamp: Timestamp) -> str | None:
    """Return the first variable whose count is later than a training time; None if there is none."""
    for name in _TOTALS:
        if name in counts and counts[name] > getattr(timestamp, name).value:
            return name
    for name in _IN_EPOCH:
        if name not in counts:
            continue
        if "epoch" not in counts:
            raise ValueError(
                f"`filename` must also contain '{{epoch}}', because '{{{name}}}' alone does not tell whether a file is "
                f"older than the run."
            )
        if counts["epoch"] == timestamp.epoch.value and counts[name] > getattr(timestamp, name).value:
            return name
    return None


__getattr__ = registered_names(__name__, "composer.utils")
