"""What goes wrong with remote stores: what may pass by itself, and what to tell whom it does not."""

from __future__ import annotations

import errno

from composer.core import ComposerError

__all__ = [
    "ObjectStoreTransientError",
    "StorageError",
    "UnreachableError",
    "explained",
    "is_missing_space",
    "is_transient",
    "points_elsewhere",
]

_PERMANENT = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PERMANENT_NUMBERS = _NO_SPACE | {
    getattr(errno, name)
    for name in "EROFS EINVAL ENAMETOOLONG ENOSYS EPERM EACCES ENOTEMPTY ELOOP EBADF EMSGSIZE EREMCHG EXDEV".split()
    if hasattr(errno, name)
}
_PASSING_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})  # of HTTP
_STATUS_NAMES = ("status", "status_code", "code")  # what clients call the status of an HTTP reply
# Of the network or of this machine's disk, never of one file in a store.
_ELSEWHERE = _NO_SPACE | {
    getattr(errno, name)
    for name in "ECONNREFUSED EHOSTDOWN EHOSTUNREACH ENETDOWN ENETUNREACH ETIMEDOUT EROFS EACCES EPERM EMFILE".split()
    if hasattr(errno, name)
}

# By name, so that nothing is imported to ask: clients of stores are optional.
_REFUSALS = frozenset(
    {
        "azure.core.exceptions.ClientAuthenticationError",
        "botocore.exceptions.NoCredentialsError",
        "botocore.exceptions.PartialCredentialsError",
        "google.auth.exceptions.DefaultCredentialsError",
        "google.auth.exceptions.RefreshError",
        "paramiko.ssh_exception.AuthenticationException",
        "paramiko.ssh_exception.BadHostKeyException",
    }
)
_PASSING = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "asyncio.exceptions.TimeoutError",  # the builtin one since Python 3.11
        "azure.core.exceptions.ServiceRequestError",
        "azure.core.exceptions.ServiceResponseError",
        "botocore.exceptions.ConnectionError",
        "botocore.exceptions.HTTPClientError",
        "botocore.exceptions.IncompleteReadError",
        "botocore.parsers.ResponseParserError",
        "concurrent.futures._base.TimeoutError",
        "google.auth.exceptions.TransportError",
        "http.client.HTTPException",
        "paramiko.ssh_exception.SSHException",
    }
)
_DOWN = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectorError",
        "asyncio.exceptions.TimeoutError",
        "azure.core.exceptions.ServiceRequestError",
        "botocore.exceptions.ConnectTimeoutError",
        "botocore.exceptions.EndpointConnectionError",
        "botocore.exceptions.ReadTimeoutError",
        "builtins.ConnectionRefusedError",
        "builtins.TimeoutError",
        "concurrent.futures._base.TimeoutError",
        "google.auth.exceptions.TransportError",
        "socket.gaierror",
    }
)


class StorageError(ComposerError, OSError):
    """A remote store could not be read or written."""


class ObjectStoreTransientError(RuntimeError):
    """Something about a store went wrong that may pass by itself."""


class UnreachableError(StorageError, ObjectStoreTransientError):
    """A remote store failed in a way that may pass, but did not while it was tried."""


def _is_one_of(error: BaseException, names: frozenset[str]) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" in names for kind in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """The status of a failed HTTP request, if the error tells."""
    found = [getattr(error, name, None) for name in _STATUS_NAMES]
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore's
        found.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    return next((status for status in found if isinstance(status, int) and status >= 400), None)


def _is_refusal(error: BaseException) -> bool:
    return isinstance(error, PermissionError) or _is_one_of(error, _REFUSALS)


def is_missing_space(error: BaseException) -> bool:
    """Whether a disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later: not if something is missing, refused or full."""
    if isinstance(error, _PERMANENT) or _is_refusal(error):
        return False
    status = _status(error)
    if status is not None:
        return status in _PASSING_STATUS
    if isinstance(error, OSError):
        return error.errno not in _PERMANENT_NUMBERS
    return isinstance(error, EOFError) or _is_one_of(error, _PASSING)


def points_elsewhere(error: BaseException) -> bool:
    """Whether a failed download tells of a store that is down, busy or refuses, or of this machine; not of the file."""
    seen: BaseException | None = error
    while seen is not None:
        if _is_refusal(seen) or _is_one_of(seen, _DOWN) or getattr(seen, "errno", None) in _ELSEWHERE:
            return True
        if _status(seen) in _PASSING_STATUS:
            return True
        seen = seen.__cause__
    return False


def explained(error: Exception, what: str, where: str, attempts: int) -> Exception:
    """The error to raise for one that a store's client raised.

    Args:
        error: What the client raised.
        what: What was being done, beginning with a verb.
        where: The place that may be full.
        attempts: How often it was tried.

    Returns:
        A `StorageError`, or an `UnreachableError` if it may pass; for a missing or an existing file the builtin error;
        `error` itself if no store can raise it.
    """
    cause = str(error) or type(error).__name__
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"Could not {what}: there is no such object, folder or bucket. ({cause})")
    if isinstance(error, FileExistsError):
        return FileExistsError(f"Could not {what}: something is there already. ({cause})")
    if not isinstance(error, (OSError, EOFError)) and type(error).__module__ == "builtins":
        return error
    if _is_refusal(error):
        advice = "The store refuses it. Check the credentials, and that they allow it."
    elif is_missing_space(error):
        advice = f"Free some space in {where}, and run again."
    elif is_transient(error):
        advice = f"It was tried {attempts} times. Check the network and that the store runs, and run again."
    else:
        advice = "Check the URI and the options of the store."
    message = f"Could not {what}: {type(error).__name__}: {cause}. {advice}"
    number = error.errno if isinstance(error, OSError) else None
    kind = UnreachableError if is_transient(error) else StorageError
    return kind(message) if number is None else kind(number, message)
