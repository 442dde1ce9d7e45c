"""Object stores through Apache Libcloud."""

from __future__ import annotations

import http.client
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from composer.utils import MissingConditionalImportError
from composer.utils.object_store.object_store import (
    ObjectStore,
    ObjectStoreTransientError,
    check_destination,
    write_parts,
)
from composer.utils.reference_helpers import iterate_with_callback

_PASSING = ("408", "409", "425", "429", "500", "503", "504")  # HTTP


class LibcloudObjectStore(ObjectStore):
    """A container of any provider that Libcloud knows. Needs the extra `libcloud` of composer-compat.

    Args:
        provider: The name of the provider, such as `google_storage`, `AZURE_BLOBS` or `local`.
        container: The name of the container.
        chunk_size: The size in bytes of the parts in which a file is read and sent.
        key_environ: The variable with the key; None, or one that is not set: the provider gets no key.
        secret_environ: The variable with the secret, likewise.
        provider_kwargs: More arguments of the provider's driver.

    Attributes:
        provider: The name of the provider.
        container_name: The name of the container.
        chunk_size: The size of the parts.

    Raises:
        ImportError: `apache-libcloud` is not installed.
        ValueError: `container` is empty, or there is no such provider, or it rejects these arguments.
    """

    def __init__(
        self,
        provider: str,
        container: str,
        chunk_size: int = 1_048_576,
        key_environ: str | None = None,
        secret_environ: str | None = None,
        provider_kwargs: dict[str, Any] | None = None,
    ) -> None:
        try:
            from libcloud.storage.providers import DRIVERS, get_driver
        except ImportError as error:
            raise MissingConditionalImportError("libcloud", "apache-libcloud") from error
        self.provider, self.container_name, self.chunk_size = provider, container, chunk_size
        if not container:
            raise ValueError(f"`container` must be the name of a container, got {container!r}.")
        if provider.lower() not in DRIVERS:
            raise ValueError(f"`provider` must be one of {', '.join(sorted(DRIVERS))}, got {provider!r}.")
        arguments = dict(provider_kwargs or {})
        for name, variable in (("key", key_environ), ("secret", secret_environ)):
            if variable is not None and variable in os.environ:
                arguments[name] = os.environ[variable]
        driver = get_driver(provider.lower())
        try:
            self._driver = driver(**arguments)
        except TypeError as error:
            variables = " and ".join(f"`{name}`" for name in (key_environ, secret_environ) if name) or "`key_environ`"
            raise ValueError(
                f"The provider {provider!r} rejects these arguments: {error}. Set {variables}, or pass more "
                f"`provider_kwargs`."
            ) from error

    def get_uri(self, object_name: str) -> str:
        return f"{self.provider}://{self.container_name}/{object_name}"

    def upload_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        callback: Callable[[int, int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        """Upload a file with options of the driver's `upload_object_via_stream`; see `ObjectStore.upload_object`.

        Raises:
            FileNotFoundError: There is no such container.
            ObjectStoreTransientError: Another attempt may succeed.
        """
        size = os.stat(filename).st_size
        with open(filename, "rb") as file, _translated(self.get_uri(object_name)):
            parts = iterate_with_callback(iter(lambda: file.read(self.chunk_size), b""), size, callback)
            self._driver.upload_object_via_stream(parts, self._container, object_name, **kwargs)

    def get_object_size(self, object_name: str) -> int:
        with _translated(self.get_uri(object_name)):
            return int(self._driver.get_object(self.container_name, object_name).size)

    def download_object(
        self,
        object_name: str,
        filename: str | os.PathLike[str],
        overwrite: bool = False,
        callback: Callable[[int, int], None] | None = None,
    ) -> None:
        check_destination(filename, overwrite)
        uri = self.get_uri(object_name)
        with _translated(uri):
            found = self._driver.get_object(self.container_name, object_name)
            parts = self._driver.download_object_as_stream(found, chunk_size=self.chunk_size)
            write_parts(parts, found.size, filename, callback, uri)

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """List the sorted names of the objects that begin with `prefix`, including those in subfolders."""
        with _translated(self.get_uri(prefix or "")):
            names = (found.name for found in self._driver.iterate_container_objects(self._container))
            return sorted(name for name in names if name.startswith(prefix or ""))

    @cached_property
    def _container(self) -> Any:
        return self._driver.get_container(self.container_name)


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Convert the errors of Libcloud to those that an `ObjectStore` raises."""
    from libcloud.common.exceptions import BaseHTTPError
    from libcloud.common.types import LibcloudError
    from libcloud.storage.types import ContainerDoesNotExistError, ObjectDoesNotExistError
    from requests.exceptions import ChunkedEncodingError, Timeout
    from requests.exceptions import ConnectionError as RequestsConnectionError

    passing = (TimeoutError, ConnectionError, http.client.HTTPException)
    try:
        yield
    except (ObjectDoesNotExistError, ContainerDoesNotExistError) as error:
        raise FileNotFoundError(f"There is no object {uri}.") from error
    except (*passing, RequestsConnectionError, ChunkedEncodingError, Timeout) as error:
        raise ObjectStoreTransientError(f"The request for {uri} failed: {error!r}") from error
    except (LibcloudError, BaseHTTPError) as error:
        if set(re.findall(r"\d+", str(error))).isdisjoint(_PASSING):
            raise
        raise ObjectStoreTransientError(f"The request for {uri} failed: {error}") from error
