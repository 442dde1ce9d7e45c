"""Fetching a file to a local path, from a path, a store, an HTTP address or a logger."""

from __future__ import annotations

import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from composer.checkpoint.durable import LINK_SUFFIX, replacing, symlink_or_copy
from composer.checkpoint.names import MLFLOW_DBFS_PATH_PREFIX
from composer.checkpoint.ranks import on_first_rank
from composer.checkpoint.storage import (
    check_size,
    report_to,
    retrying,
    showing_progress,
    storage_of,
    without_password,
)
from composer.utils import is_uri, parse_uri, renamed_arguments

_TIMEOUT_SECONDS = 60.0


def get_file(
    path: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    object_store: Any = None,
    overwrite: bool = False,
    progress_bar: bool = True,
) -> None:
    """Fetch a file to a local path: link to a local one, download any other.

    A text file with a name that ends in `.symlink` is a link to the file it names. If there is no `path`, but there is
    `path + ".symlink"`, that is followed. The name is looked up beside the link, then in the bucket; locally beside the
    link, then in the working directory.

    Args:
        path: A local path, a URI of any store that fsspec knows, an HTTP address; or a name in `object_store`.
        destination: The local path to create, with its folder. A local file is linked to, and copied
            only where there are no symbolic links.
        object_store: An object store, or a logger that stores files.
        overwrite: Replace `destination`.
        progress_bar: Show the progress of a download.

    Raises:
        FileExistsError: `destination` exists, and `overwrite` is False.
        FileNotFoundError: There is no such file.
        StorageError: The store cannot be read, after several attempts.
        TypeError: `object_store` cannot download files.
    """
    target = Path(destination).expanduser()
    if not overwrite and os.path.lexists(target):
        raise FileExistsError(f"`destination` {str(target)!r} already exists. Pass `overwrite=True` to replace it.")
    target.parent.mkdir(parents=True, exist_ok=True)
    source = os.fspath(path) if object_store is not None else os.path.expanduser(path)
    _get(source, target, object_store, progress_bar)


@renamed_arguments(path="source_path")
def extract_path_from_symlink(source_path: str | os.PathLike[str], object_store: Any = None) -> str:
    """Read a `.symlink` file: the name of the file that it refers to.

    Args:
        source_path: The file, as for `get_file`.
        object_store: As for `get_file`.

    Raises:
        FileNotFoundError: There is no such file.
    """
    with tempfile.TemporaryDirectory(prefix="composer-link-") as folder:
        file = Path(folder) / "link"
        _fetch(os.fspath(source_path), file, object_store, False)
        return file.read_text(encoding="utf-8").strip()


def linked_uris(uri: str) -> list[str]:
    """List where the target of a link may be; empty if there is no such link."""
    link = uri if uri.endswith(LINK_SUFFIX) else uri + LINK_SUFFIX
    try:
        named = extract_path_from_symlink(link)
    except FileNotFoundError:
        return []
    return [*_candidates(link, named, None)]


def _fetch(path: str, target: Path, object_store: Any, progress: bool) -> None:
    """Fetch a file to `target`, which is only replaced by a complete file; links in stores are not followed."""
    if object_store is not None:
        with replacing(target) as temporary:
            _fetch_from(object_store, path, temporary, progress)
    elif not is_uri(path):
        if not os.path.exists(path):
            raise FileNotFoundError(f"Local path {path} does not exist.")
        if os.path.realpath(path) != os.path.realpath(target):
            with replacing(target) as temporary:
                symlink_or_copy(os.path.realpath(path), temporary)
    elif urlsplit(path).scheme.lower() in ("http", "https"):
        with replacing(target) as temporary:
            attempt = partial(_read_http, path, temporary, progress)
            uri = without_password(path)
            retrying(attempt, f"download {uri}", uri, str(target.parent))
    else:
        folder, _, name = path.rpartition("/")
        storage_of(f"{folder}/").download(name, target, progress)


def _get(path: str, target: Path, object_store: Any, progress: bool) -> None:
    """Fetch a file, or the one that a link beside it names."""
    if not path.endswith(LINK_SUFFIX):
        try:
            _fetch(path, target, object_store, progress)
            return
        except FileNotFoundError as error:
            path += LINK_SUFFIX
            try:
                named = extract_path_from_symlink(path, object_store)
            except FileNotFoundError:
                raise error from None
    else:
        named = extract_path_from_symlink(path, object_store)
    for candidate in _candidates(path, named, object_store):
        with suppress(FileNotFoundError):
            _get(candidate, target, object_store, progress)
            return
    shown = without_password(path)
    raise FileNotFoundError(f"{shown!r} links to {without_password(named)!r}, which does not exist.")


def _candidates(link: str, named: str, object_store: Any) -> Iterator[str]:
    """Yield the places where a name that was read from a link may be."""
    if is_uri(named) or os.path.isabs(named) or object_store is not None:
        yield named
        return
    if not is_uri(link):
        yield os.path.join(os.path.dirname(link), named)
        yield named
        return
    if parse_uri(link)[0] == "dbfs":  # names of checkpoints are full paths
        inside = named.startswith(("Volumes/", MLFLOW_DBFS_PATH_PREFIX))
        yield f"dbfs:/{named}" if inside else f"{link.rpartition('/')[0]}/{named}"
        return
    folder = link.rpartition("/")[0]
    yield f"{folder}/{named}"
    yield f"{folder[: len(folder) - len(parse_uri(folder)[2])].rstrip('/')}/{named}"


def _fetch_from(store: Any, name: str, target: Path, progress: bool) -> None:
    if hasattr(store, "download_object"):
        with showing_progress(progress, name) as callback:

            def attempt() -> None:
                report = report_to(callback)
                store.download_object(object_name=name, filename=str(target), overwrite=True, callback=report)

            retrying(attempt, f"download {name!r} from {store!r}", name, is_object_store=True)
    elif hasattr(store, "download_file"):
        store.download_file(remote_file_name=name, destination=str(target), overwrite=True, progress_bar=progress)
    else:
        raise TypeError(
            f"`object_store` must have a method `download_object` or `download_file`, got {store!r}. Pass an object "
            f"store, a logger that stores files, or a URI as `path`."
        )


def _read_http(address: str, target: Path, progress: bool) -> None:
    name = urlsplit(address).path
    try:
        opened = urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()  # it is an open reply
        if error.code in (404, 410):
            raise FileNotFoundError(f"{without_password(address)} does not exist: the server says {error}.") from error
        raise
    with opened as reply, target.open("wb") as file:
        length = reply.headers.get("Content-Length")
        with showing_progress(progress, name) as callback:
            if length is not None:
                callback.set_size(int(length))
            while block := reply.read(1 << 20):
                file.write(block)
                callback.relative_update(len(block))
    if length is not None:
        check_size(int(length), target.stat().st_size)


def download_monolithic_checkpoint(
    source_uri: str, destination_path: str | os.PathLike[str], global_rank_zero_only: bool = True
) -> None:
    """Download a checkpoint of one file. Call it on every rank; all return when it is there.

    Args:
        source_uri: A URI, such as `s3://bucket/run/model.pt`, or a local path, which is linked to.
        destination_path: The file to create.
        global_rank_zero_only: True if only rank 0 downloads it; otherwise the first rank of every node does.

    Raises:
        FileNotFoundError: There is no such checkpoint.
        FileExistsError: `destination_path` exists.
        RuntimeError: Another rank could not download it; on that one, its own error is raised.
    """
    on_first_rank(lambda: get_file(source_uri, destination_path), each_node=not global_rank_zero_only)
