"""One folder of a remote store, through fsspec: whole files or none, with retries, and errors that say what to do."""

from __future__ import annotations

import copy
import errno
import inspect
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from composer.checkpoint.durable import NO_SPACE, replacing, sync_file
from composer.core import ComposerError
from composer.utils import check_finite, is_notebook, is_uri, parse_uri
from composer.utils.file_helpers import without_password as without_password

T = TypeVar("T")

_ALIASES = {"azure": "az", "azure_blobs": "az"}  # common spellings that fsspec does not know
# Stores with atomic writes; elsewhere a file is written under a temporary name and renamed.
_PUTS_WHOLE = frozenset("abfs abfss az gcs gs memory oci ocilake oss s3 s3a".split())
# For other schemes, composer-compat may have the class of a vendor, or a program may have registered one of its own.
_THROUGH_FSSPEC = frozenset({"", "az", "azure", "gs", "oci", "s3", "sftp", "ssh"})
_BUCKETS = frozenset("abfs abfss az azure gcs gs http https libcloud oci ocilake oss s3 s3a sftp ssh".split())
_EXTRAS = {
    "abfs": "azure", "abfss": "azure", "az": "azure", "gcs": "gcs", "gs": "gcs", "oci": "oci", "s3": "s3", "s3a": "s3",
    "sftp": "sftp", "ssh": "sftp",
}  # fmt: skip
_PROBE = ".credentials_validated_successfully"  # a fixed name: stores from which nothing can be removed keep one file
_BACKOFF_SECONDS = 1.0  # the pause after the first attempt; it doubles after each
_BLOCK = 8 << 20
_SILENT_SECONDS = 15.0  # how long a server may be silent, as in s3fs and ocifs
_SFTP_SECONDS = 30.0  # how long an SSH server may be silent
_GOOGLE_S3 = "https://storage.googleapis.com"  # Google's servers also speak the protocol of S3
SFTP_SCHEMES = frozenset({"sftp", "ssh"})
"""The schemes of servers of SSH. fsspec's own filesystem for them accepts any host."""


@dataclass(frozen=True)
class Connection:
    """The way to a store that fsspec's URIs do not describe.

    Attributes:
        connect: Returns a new filesystem of fsspec, and the path of the folder in it.
        puts_whole: True if writes are atomic; otherwise a file gets its name when it is complete.
        is_object_store: True for the filesystem of an `ObjectStore` of composer-compat, which checks transfers itself,
            removes nothing, and marks the errors after which to try again.
    """

    connect: Callable[[], tuple[Any, str]]
    puts_whole: bool = True
    is_object_store: bool = False


class Storage:
    """A folder of a store. Names are relative to it and may include folders; the folder need not exist.

    Transient failures (a lost connection, a busy store, an interrupted transfer) are retried with growing pauses. A
    server that hangs is an error after some silence, 15 seconds for S3 and Google Cloud, in each attempt.

    Each thread and process that uses this object gets its own filesystem of fsspec: SFTP connections serve one thread,
    and asynchronous ones do not survive a fork. They are not shared with other users of fsspec, to avoid stale cached
    listings; our own are invalidated before each request.

    Args:
        folder: The URI of the folder.
        options: Options of fsspec's filesystem, such as `key`, `secret` or `endpoint_url` for S3.
        connection: How to reach the store; None: by `folder` and `options`.
        block_size: The size in bytes of the parts that large files are uploaded in; None: 8 MiB.

    Raises:
        ModuleNotFoundError: The package that serves this kind of store is not installed.
        ValueError: No kind of store has this scheme.
    """

    def __init__(
        self,
        folder: str,
        options: dict[str, Any],
        *,
        connection: Connection | None = None,
        block_size: int | None = None,
    ) -> None:
        self._scheme, path = folder.split("://", 1)
        self._scheme = _ALIASES.get(self._scheme.lower(), self._scheme.lower())
        shortest = path.rstrip("/") or path[:1]  # "file:///" is a folder, too
        if self._scheme in SFTP_SCHEMES and path.startswith(f"{shortest}//") and "/" not in shortest:
            shortest += "//"  # the root of the server; the host alone is the home of the user
        self._folder = f"{self._scheme}://{shortest}"
        self._options, self._attempts = options, 3
        self._connection, self._block_size = connection, block_size
        self._inside = ""  # the folder in that of `connection`
        self._puts_whole = self._scheme in _PUTS_WHOLE if connection is None else connection.puts_whole
        self._is_object_store = connection is not None and connection.is_object_store
        self._local = threading.local()
        if connection is None:
            check_installed(self._scheme, self._folder)

    def __repr__(self) -> str:
        return f"Storage({without_password(self._folder)!r})"

    @property
    def reports_progress(self) -> bool:
        """True if an upload reports its progress; object stores may report it only at the end."""
        return not self._is_object_store

    def with_attempts(self, attempts: int) -> Storage:
        """Return a storage of the same folder with another number of attempts."""
        return self._like(_attempts=attempts)

    def to_folder(self, path: str) -> Storage:
        """Return the storage of a folder in this one; this one if the path is empty."""
        path = path.strip("/")
        return self._like(_folder=self.uri(path), _inside=f"{self._inside}/{path}".strip("/")) if path else self

    def _like(self, **changes: Any) -> Storage:
        """Return a copy with other values and connections of its own."""
        other = copy.copy(self)
        vars(other).update(changes, _local=threading.local())
        return other

    def uri(self, name: str) -> str:
        """Return the URI of a name."""
        if not name or name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"`name` must be relative to the folder and stay in it, got {name!r}.")
        return f"{self._folder.removesuffix('/')}/{name}"

    def exists(self, name: str) -> bool:
        """Return True if there is a file of this name; False for a folder."""
        try:
            info = self._do("look up", name, lambda filesystem, path: filesystem.info(path))
            return bool(info["type"] != "directory")
        except (FileNotFoundError, NotADirectoryError):  # a store in a folder may have a file in place of a folder
            return False

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            FileNotFoundError: There is no such file.
            StorageError: The request failed.
        """
        return int(self._do("look up", name, lambda filesystem, path: filesystem.info(path))["size"])

    def find(self, prefix: str = "") -> list[str]:
        """List the sorted names that begin with `prefix`, also in subfolders; empty if there is no folder."""
        inside = prefix.rpartition("/")[0]

        def names(filesystem: Any, path: str) -> list[str]:
            start = path.rstrip("/")
            paths = filesystem.find(f"{start}/{inside}" if inside else path)
            if not start:
                return [str(result).removeprefix("/") for result in paths]
            # By depth, because ocifs adds the namespace to the bucket.
            return [str(result).split("/", start.count("/") + 1)[-1] for result in paths]

        # S3 has empty objects for folders, whose names end in "/".
        return sorted(name for name in self._do("list", None, names) if name.startswith(prefix) and name[-1:] != "/")

    def read_text(self, name: str) -> str:
        """Read a small text file.

        Raises:
            FileNotFoundError: There is no such file.
            StorageError: It cannot be read.
        """
        content: bytes = self._do("read", name, lambda filesystem, path: filesystem.cat_file(path))
        return bytes(content).decode("utf-8", errors="replace")

    def write_text(self, name: str, text: str) -> None:
        """Write or replace a small text file atomically.

        Raises:
            StorageError: It cannot be written.
        """
        data = text.encode("utf-8")
        self._put(name, lambda filesystem, path: filesystem.pipe_file(path, data), len(data))

    def write_new_text(self, name: str, text: str) -> bool | None:
        """Write a small text file in one step unless it exists.

        Returns:
            True if it was written; None if this store's client has no such operation, or refuses it.

        Raises:
            StorageError: It cannot be written.
        """

        def write(filesystem: Any, path: str) -> bool | None:
            writer = getattr(filesystem, "_pipe_file", filesystem.pipe_file)
            if "mode" not in inspect.signature(writer).parameters:
                return None
            if not self._puts_whole:
                filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            with suppress(FileExistsError):
                filesystem.pipe_file(path, text.encode("utf-8"), mode="create")
                return True
            return False

        with suppress(NotImplementedError, ValueError, StorageError):  # a plain write raises the error
            return self._do("write", name, write)
        return None

    def delete(self, name: str) -> None:
        """Remove a file. A missing one is not an error: the reply to an earlier attempt may have been lost.

        Raises:
            PermissionError: Object stores have no operation for it.
            StorageError: It cannot be removed.
        """
        if self._is_object_store:
            uri = without_password(self.uri(name))
            raise PermissionError(f"{uri} cannot be removed: object stores have no operation for it.")
        with suppress(FileNotFoundError):
            self._do("remove", name, lambda filesystem, path: filesystem.rm_file(path))

    def download(self, name: str, destination: str | os.PathLike[str], progress: Progress = False) -> None:
        """Download a file. A local file of this name is only replaced by a complete one.

        Args:
            name: The name in the store.
            destination: The path to write to. Its folder is created if necessary.
            progress: True shows a bar; a function is called with the bytes done and the total.

        Raises:
            FileNotFoundError: There is no such file.
            StorageError: It cannot be read, or written here.
        """
        self.uri(name)  # refuses names that leave the folder
        target = Path(destination)
        target.parent.mkdir(parents=True, exist_ok=True)

        def fetch(filesystem: Any, path: str) -> None:
            expected = int(filesystem.info(path)["size"])
            with showing_progress(progress, name) as callback:
                callback.set_size(expected)
                filesystem.get_file(path, str(temporary), callback=callback)
                check_size(expected, temporary.stat().st_size)
                callback.absolute_update(expected)  # some filesystems do not report progress
            sync_file(temporary)

        with replacing(target) as temporary:
            temporary.touch()  # an unwritable folder is not the store's fault
            self._do("download", name, fetch, str(target))

    def upload(self, source: str | os.PathLike[str], name: str, progress: Progress = False, **options: Any) -> None:
        """Upload a local file, replacing an existing one, and check that it arrived completely.

        On stores without atomic writes, the file has a temporary name until it is complete.

        Args:
            source: The path of the file.
            name: The name in the store.
            progress: As for `download`.
            **options: Options of `put_file` of fsspec's filesystem.

        Raises:
            FileNotFoundError: There is no such file here, or no such bucket there.
            StorageError: It cannot be written.
        """
        size = os.stat(source).st_size

        def put(filesystem: Any, path: str) -> None:
            blocks: dict[str, int] = {}
            method = getattr(filesystem, "_put_file", filesystem.put_file)
            if "chunksize" in inspect.signature(method).parameters:
                # Small blocks, so that progress is visible: 8 MiB, or 1/5000 of the file.
                least = self._block_size or _BLOCK
                blocks["chunksize"] = least * max(1, math.ceil(size / (5000 * least)))
            with showing_progress(progress, name) as callback:
                callback.set_size(size)
                filesystem.put_file(os.fspath(source), path, callback=callback, **blocks, **options)
                callback.absolute_update(size)

        self._put(name, put, size)

    def check_writable(self) -> None:
        """Write and remove a small file, so that missing permissions stop the run before it trains.

        Raises:
            FileNotFoundError: There is no such bucket.
            StorageError: It cannot be written, for example because the credentials are wrong.
        """
        self.write_text(_PROBE, "written to test that this folder is writable\n")
        try:
            self.delete(_PROBE)
        except OSError as error:
            if not isinstance(error.__cause__ or error, PermissionError):  # the permission to write is enough
                raise

    def _filesystem(self) -> tuple[Any, str]:
        """Return this thread's filesystem, and the path of the folder in it."""
        made = getattr(self._local, "made", None)
        if made is None or made[0] != os.getpid():  # connections and event loops do not work in a forked process
            filesystem, root = self._connect() if self._connection is None else self._connection.connect()
            if self._inside and self._connection is not None:
                root = f"{root.rstrip('/')}/{self._inside}" if root else self._inside
            made = self._local.made = (os.getpid(), filesystem, root.rstrip("/"))
        return made[1], made[2]

    def _connect(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs  # costs 0.2 s

        options = self._options
        if self._scheme in ("gcs", "gs"):
            from aiohttp import ClientTimeout

            # gcsfs limits the time of a whole file, however large, instead of the silence.
            silence = ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
            options = {"requests_timeout": silence, **options}
        filesystem, root = url_to_fs(self._folder, skip_instance_cache=True, **options)
        if self._scheme in ("s3", "s3a"):
            # botocore repeats a request, and so does this class: a third layer would wait 20 minutes for a server
            # that hangs.
            filesystem.retries = 1
        return filesystem, str(root)

    def _do(self, verb: str, name: str | None, operation: Callable[[Any, str], T], local: str | None = None) -> T:
        """Run `operation(filesystem, path)`, with retries."""
        uri = without_password(self._folder if name is None else self.uri(name))

        def attempt() -> T:
            filesystem, root = self._filesystem()
            filesystem.invalidate_cache()
            if name is None:
                return operation(filesystem, root if root or self._is_object_store else "/")
            return operation(filesystem, f"{root}/{name}" if root or not self._is_object_store else name)

        def reconnect() -> None:
            self._local.made = None  # the connection may be broken for good

        what = f"{verb} {uri}" if local is None else f"{verb} {uri} to {local!r}"
        return retrying(attempt, what, uri, local, self._attempts, reconnect, is_object_store=self._is_object_store)

    def _put(self, name: str, write: Callable[[Any, str], None], size: int) -> None:
        def put(filesystem: Any, path: str) -> None:
            if self._puts_whole:
                write(filesystem, path)
                return
            folder, _, last = path.rpartition("/")
            temporary = f"{folder}/.{last}.{secrets.token_hex(4)}.saving"
            filesystem.makedirs(folder, exist_ok=True)
            try:
                write(filesystem, temporary)
                check_size(size, int(filesystem.info(temporary)["size"]))
                if self._scheme in ("file", "local"):
                    sync_file(Path(temporary))
                filesystem.mv(temporary, path)
            except BaseException:
                with suppress(Exception):  # the store may be unreachable; the first error is raised
                    filesystem.rm_file(temporary)
                raise

        self._do("write", name, put)


def retrying(
    attempt: Callable[[], T],
    what: str,
    where: str,
    local: str | None = None,
    attempts: int = 3,
    reconnect: Callable[[], None] = lambda: None,
    is_object_store: bool = False,
) -> T:
    """Call a function until it succeeds, fails for good, or has failed `attempts` times.

    Args:
        attempt: The function.
        what: What it does, beginning with a verb, for messages.
        where: The remote place, for messages.
        local: The local file that it writes, which may be on a full disk.
        attempts: The maximum number of calls.
        reconnect: Called before the next attempt.
        is_object_store: True for a method of an `ObjectStore`, which marks the errors after which to try again, and
            whose other errors are raised as they are.

    Raises:
        FileNotFoundError: The file is missing.
        FileExistsError: The file exists already.
        UnreachableError: All attempts failed in a way that may be temporary.
        StorageError: The store failed in another way.
        Exception: What `attempt` raises, if that does not come from a store.
    """
    pause = _BACKOFF_SECONDS
    for left in reversed(range(attempts)):
        try:
            return attempt()
        except Exception as error:
            marked = isinstance(error, ObjectStoreTransientError) and not isinstance(error, StorageError)
            may_pass = marked if is_object_store else is_transient(error)
            if may_pass and left:
                reconnect()
            elif isinstance(error, ComposerError) or (is_object_store and not marked):
                raise  # it has been explained, or the object store has
            else:
                cause = str(error) or type(error).__name__
                if isinstance(error, FileNotFoundError):
                    text = f"Could not {what}: there is no such object, folder or bucket. ({cause})"
                    raise FileNotFoundError(text) from error
                if isinstance(error, FileExistsError):
                    raise FileExistsError(f"Could not {what}: it exists already. ({cause})") from error
                if not may_pass and not isinstance(error, OSError) and type(error).__module__ == "builtins":
                    raise  # a mistake of a program
                if _is_one_of(error, _REFUSALS):
                    advice = "The store refuses it. Check the credentials, and that they allow it."
                elif is_missing_space(error):
                    advice = f"Free some space in {where if local is None else repr(local)}, and run again."
                elif may_pass:
                    advice = f"It was tried {attempts} times. Check the network and that the store runs, and run again."
                else:
                    advice = "Check the URI and the options of the store."
                message = f"Could not {what}: {type(error).__name__}: {cause}. {advice}"
                kind = UnreachableError if may_pass else StorageError
                number = error.errno if isinstance(error, OSError) else None
                raise (kind(message) if number is None else kind(number, message)) from error
        time.sleep(pause)
        pause *= 2
    raise ValueError(f"`attempts` must be at least 1, got {attempts!r}.")


def storage_of(uri: str | os.PathLike[str], **options: Any) -> Storage:
    """Return the storage of a folder.

    Stores that fsspec does not reach, such as volumes of Databricks, need composer-compat.

    Args:
        uri: The folder, such as `s3://bucket/run`, `gs://...`, `az://...`, `sftp://user@host/run`, `memory://...`,
            `file:///run`, or a local path.
        **options: Options of fsspec's filesystem; for SFTP, arguments of `paramiko.SSHClient.connect`. The environment
            may set `S3_ENDPOINT_URL` and `S3_CANNED_ACL` for S3, `GCS_KEY` and `GCS_SECRET` for Google,
            `OCI_CONFIG_FILE` for Oracle, `AZURE_ACCOUNT_NAME` and `AZURE_ACCOUNT_ACCESS_KEY` for Azure, and
            `COMPOSER_SFTP_KEY_FILE` and `COMPOSER_SFTP_KNOWN_HOSTS_FILE` for SFTP.

    Raises:
        ModuleNotFoundError: The package that serves this kind of store is not installed.
        ValueError: No kind of store has this scheme, or a bucket is missing.
    """
    text = os.fspath(uri)
    if options:
        return direct_storage(text, **options)
    return _storage(text, text, parse_uri(text)[2])


def bucket_of(uri: str) -> Storage:
    """Return the storage of a URI's bucket, whose names are the paths of URIs; see `storage_of`.

    Args:
        uri: The URI of a folder or file in the bucket.
    """
    path = parse_uri(uri)[2]
    return _storage(uri, uri[: len(uri) - len(path)], "")


def _storage(uri: str, folder: str, inside: str) -> Storage:
    """Return the storage of the folder `folder`, which is `inside` the bucket of `uri`."""
    check_bucket(uri)
    scheme = parse_uri(uri)[0]
    if scheme not in _THROUGH_FSSPEC:
        for point in entry_points(group="composer.stores"):
            storage: Storage | None = point.load()(uri, folder, inside)
            if storage is not None:
                return storage
        if scheme == "dbfs":
            raise ModuleNotFoundError(
                f"{without_password(uri)} needs `composer-compat`, which is not installed. Run `pip install "
                f"composer-compat`.",
                name="composer-compat",
            )
    return direct_storage(folder)


def check_bucket(uri: str) -> None:
    """Check that a URI names a bucket or host, if its scheme needs one.

    Args:
        uri: A URI or a local path.

    Raises:
        ValueError: No bucket is named: the scheme is not followed by two slashes and a name.
    """
    scheme, bucket, _ = parse_uri(uri)
    if scheme in _BUCKETS and not bucket:
        raise ValueError(f"`uri` must name a bucket, container or host, as in '{scheme}://bucket/folder', got {uri!r}.")


def authority_of(uri: str) -> str:
    """Return what a URI has between "://" and the next slash: the bucket or host, with namespace or user and port."""
    return uri.partition("://")[2].partition("/")[0]


def split_uri(uri: str) -> tuple[str, str, str]:
    """Split a URI as `parse_uri` does, with all that identifies the bucket.

    Returns:
        The scheme; the bucket, for `oci` with its namespace, and for `sftp` and `ssh` the host with user and port; and
        the path.

    Example:
        >>> split_uri("oci://bucket@namespace/a"), split_uri("sftp://me@host:22/a")
        (('oci', 'bucket@namespace', 'a'), ('sftp', 'me@host:22', 'a'))
    """
    scheme, bucket, path = parse_uri(uri)
    if scheme == "oci":
        bucket = authority_of(uri).removesuffix("@")  # without a namespace
    elif scheme in SFTP_SCHEMES:
        bucket = authority_of(uri)
    return scheme, bucket, path


def direct_storage(uri: str | os.PathLike[str], block_size: int | None = None, **options: Any) -> Storage:
    """Return the storage of a folder, through fsspec's filesystem for its scheme; otherwise as `storage_of`."""
    text = os.fspath(uri)
    if not is_uri(text):
        text = f"file://{os.path.abspath(text)}"
    check_bucket(text)
    scheme, separator, path = text.partition("://")
    if not separator:  # "file:/data" is a URI, too
        scheme, _, path = text.partition(":")
    scheme = _ALIASES.get(scheme.lower(), scheme.lower())
    if scheme in SFTP_SCHEMES:
        return Storage(f"{scheme}://{path}", {}, connection=_connection_of_sftp_uri(text, options))
    connection = None
    if scheme in ("gcs", "gs") and not options and os.environ.get("GCS_KEY") and os.environ.get("GCS_SECRET"):
        google = Storage(f"s3://{path}", _google_options())
        connection = Connection(google._connect)
    options = {**_default_options(scheme), **options}
    return Storage(f"{scheme}://{path}", options, connection=connection, block_size=block_size)


def _connection_of_sftp_uri(uri: str, options: dict[str, Any]) -> Connection:
    """Return the connection to the folder of an SFTP server, whose path is absolute.

    Args:
        uri: The URI of the folder.
        options: Arguments of `paramiko.SSHClient.connect`.
    """
    parts = urlsplit(f"sftp://{authority_of(uri)}")
    if parts.hostname is None:
        raise ValueError(f"`uri` must name a host, as in 'sftp://user@host/folder', got {without_password(uri)!r}.")
    arguments = {
        "port": parts.port or 22,
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
        "key_filename": _file_of_environment("COMPOSER_SFTP_KEY_FILE"),
        **options,
    }
    known_hosts = _file_of_environment("COMPOSER_SFTP_KNOWN_HOSTS_FILE")
    return sftp_connection(parts.hostname, f"/{parse_uri(uri)[2].strip('/')}", arguments, known_hosts)


def _file_of_environment(variable: str) -> str | None:
    path = os.path.expanduser(os.environ.get(variable) or "")
    if path and not os.path.isfile(path):
        raise FileNotFoundError(f"The variable `{variable}` must name a file, got {path!r}.")
    return path or None


def sftp_connection(
    host: str, folder: str, arguments: dict[str, Any], known_hosts: str | None, policy: Any = None
) -> Connection:
    """Return the connection to a folder of an SFTP server whose key must be known.

    Args:
        host: The host.
        folder: The folder; a relative one is in the user's home.
        arguments: Arguments of `paramiko.SSHClient.connect`. `timeout`, 30 seconds by default, also limits the wait for
            each reply of the server.
        known_hosts: The file with known keys; None: the user's.
        policy: What paramiko does if the key of the host is unknown; None: refuse the host.

    Raises:
        ModuleNotFoundError: `paramiko` is not installed.
        ValueError: `timeout` is not positive.
    """
    check_installed("sftp", f"sftp://{host}")
    limits = dict.fromkeys(("timeout", "banner_timeout", "auth_timeout", "channel_timeout"), _SFTP_SECONDS)
    arguments = {**limits, **arguments}
    check_finite(timeout=arguments["timeout"], above=0)

    def connect() -> tuple[Any, str]:
        from composer.checkpoint.sftp import KnownHostFileSystem  # imports paramiko

        return KnownHostFileSystem(host, arguments, known_hosts, policy), folder

    return Connection(connect, puts_whole=False)


def _google_options() -> dict[str, Any]:
    """Return the options of S3 to reach Google Cloud Storage with the key in `GCS_KEY` and `GCS_SECRET`."""
    return {
        "key": os.environ["GCS_KEY"],
        "secret": os.environ["GCS_SECRET"],
        "endpoint_url": os.environ.get("S3_ENDPOINT_URL") or _GOOGLE_S3,
        "client_kwargs": {"region_name": "auto"},
        # Google's servers do not know the checksums that newer clients add.
        "config_kwargs": dict.fromkeys(
            ("request_checksum_calculation", "response_checksum_validation"), "when_required"
        ),
    }


def _default_options(scheme: str) -> dict[str, Any]:
    """Return what fsspec's filesystems do not read from the environment, and fewer retries."""
    result: dict[str, Any] = {}
    if scheme in ("s3", "s3a"):
        result["config_kwargs"] = {"retries": {"mode": "adaptive"}}  # three attempts, not five, slower after an error
        if endpoint := os.environ.get("S3_ENDPOINT_URL"):
            result["endpoint_url"] = endpoint
        if access := os.environ.get("S3_CANNED_ACL"):
            result["s3_additional_kwargs"] = {"ACL": access}
    elif scheme in ("gcs", "gs"):
        # Without a token, gcsfs would go on as an anonymous user where it finds no credentials.
        result["token"] = "anon" if os.environ.get("STORAGE_EMULATOR_HOST") else "google_default"
    elif scheme == "oci" and not os.environ.get("OCIFS_IAM_TYPE"):
        result["config"] = os.path.expanduser(os.environ.get("OCI_CONFIG_FILE") or "~/.oci/config")
    elif scheme == "az":
        for option, variable in (("account_name", "AZURE_ACCOUNT_NAME"), ("account_key", "AZURE_ACCOUNT_ACCESS_KEY")):
            if value := os.environ.get(variable):
                result[option] = value
    return result


def check_installed(scheme: str, uri: str) -> None:
    """Check that fsspec has a filesystem for a scheme, and the package that it needs.

    Args:
        scheme: The scheme, in lower case.
        uri: The URI, for messages.

    Raises:
        ModuleNotFoundError: The package is not installed.
        UnsupportedStoreError: There is no filesystem for this scheme.
    """
    import fsspec

    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        extra = f" Run `pip install 'composer-checkpoint[{_EXTRAS[scheme]}]'`." if scheme in _EXTRAS else ""
        raise ModuleNotFoundError(
            f"{without_password(uri)} needs a package that is not installed: {error}.{extra}"
        ) from error
    except ValueError as error:
        raise UnsupportedStoreError(
            f"`uri` must have a scheme that fsspec knows, such as {', '.join(sorted(_EXTRAS))}, file or memory, got "
            f"{without_password(uri)!r}. Install the package that adds {scheme!r} to fsspec."
        ) from error


def check_size(expected: int, actual: int) -> None:
    """Raise a ConnectionError if a file did not arrive completely, so that it is tried again."""
    if expected != actual:
        raise ConnectionError(f"the transfer was interrupted: {actual} of {expected} bytes arrived")


def report_to(callback: Any) -> Callable[[int, int], None]:
    """Return a function of the bytes done and the total that informs a callback of fsspec."""

    def report(done: int, total: int) -> None:
        callback.set_size(total)
        callback.absolute_update(done)

    return report


Progress = bool | Callable[[int, int], None]


@contextmanager
def showing_progress(progress: Progress, name: str) -> Iterator[Any]:
    """Yield a callback of fsspec that shows a bar (True), calls a function (a function), or does nothing (False).

    Args:
        progress: A function is called with the bytes done and the total.
        name: The name of the file.
    """
    from fsspec.callbacks import Callback, TqdmCallback

    if progress is False:
        yield Callback()
    elif progress is True:
        file = sys.stdout if is_notebook() else sys.stderr  # notebooks show stderr as an error
        options = {"desc": PurePosixPath(name).name, "unit": "B", "unit_scale": True, "file": file}
        with TqdmCallback(tqdm_kwargs=options) as bar:
            yield bar
    else:
        report, last = progress, (-1, -1)

        def hook(size: int | None, value: int, **_: Any) -> None:
            nonlocal last
            if size is not None and last != (value, size):
                last = value, size
                report(value, size)

        yield Callback(hooks={"bytes": hook})


_PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_PERMANENT_NUMBERS = NO_SPACE | {errno.EROFS, errno.EINVAL, errno.ENAMETOOLONG, errno.ENOSYS, errno.ELOOP, errno.EXDEV}
_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})  # HTTP
# By name, because the clients of stores are optional and are not imported here.
_REFUSALS = frozenset(
    "PermissionError AuthenticationException BadHostKeyException ClientAuthenticationError DefaultCredentialsError "
    "NoCredentialsError PartialCredentialsError RefreshError".split()
)
_PASSING = frozenset(
    "ClientConnectionError ClientPayloadError ConnectionError EOFError HTTPClientError HTTPException "
    "IncompleteReadError ResponseParserError ServiceRequestError ServiceResponseError SSHException TimeoutError "
    "TransportError".split()
)


class ObjectStoreTransientError(RuntimeError):
    """A request to a store failed in a way that may be temporary: it is retried, with three attempts in all."""


class StorageError(ComposerError, OSError):
    """A remote store could not be read or written."""


class UnsupportedStoreError(ComposerError, NotImplementedError, ValueError):
    """There is no store for the scheme of a URI."""


class UnreachableError(StorageError, ObjectStoreTransientError):
    """A remote store failed in a way that may be temporary, in all attempts."""


def _is_one_of(error: BaseException, names: frozenset[str]) -> bool:
    return any(kind.__name__ in names for kind in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """Return the status of a failed HTTP request, if the error has one; clients give it different names."""
    result = [getattr(error, name, None) for name in ("status", "status_code", "code")]
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        result.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return next((status for status in result if isinstance(status, int) and status >= 400), None)


def is_missing_space(error: BaseException) -> bool:
    """Return True if a disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in NO_SPACE


def is_transient(error: BaseException) -> bool:
    """Return True if the same request may succeed later: not if something is missing, refused or full."""
    if isinstance(error, _PERMANENT) or _is_one_of(error, _REFUSALS):
        return False
    status = _status(error)
    if status is not None:
        return status in _PASSING_STATUS
    if isinstance(error, OSError):
        return error.errno not in _PERMANENT_NUMBERS
    return _is_one_of(error, _PASSING)
