"""Object stores on servers of SSH."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import unquote, urlsplit

from composer.checkpoint.storage import Storage, check_installed, sftp_connection, without_password
from composer.utils.object_store.storage_object_store import StorageObjectStore


class SFTPObjectStore(StorageObjectStore):
    """A folder of a server, through SFTP. Needs the extra `sftp` of composer-checkpoint.

    A lost connection is restored. A file gets its name when it is complete.

    Args:
        host: The host, or a URI with what else is needed: `sftp://user@host:22/folder/in/home` or, with two slashes,
            `sftp://user@host:22//absolute/folder`. Elsewhere, as in `save_folder`, the path of a URI is absolute.
        port: The port.
        username: The user; else the current one.
        password: The password; else keys are tried, including those of an agent.
        known_hosts_filename: A file with the keys of hosts; else the file that `known_hosts_filename_environ` names,
            else `~/.ssh/known_hosts`.
        known_hosts_filename_environ: The name of that variable.
        key_filename: A file with the user's private key; else the file that `key_filename_environ` names.
        key_filename_environ: The name of that variable.
        missing_host_key_policy: What to do if the key of the host is unknown, a class of paramiko: `RejectPolicy`,
            `WarningPolicy` or `AutoAddPolicy`.
        cwd: The folder that names are relative to; if it is relative, then to the user's home.
        connect_kwargs: More arguments of `paramiko.SSHClient.connect`. `timeout`, 30 seconds by default, also limits
            the wait for each reply of the server.

    Attributes:
        host: The host.
        port: The port.
        username: The user.
        cwd: The folder.

    Raises:
        FileNotFoundError: There is no such file of keys.
        ModuleNotFoundError: `paramiko` is not installed.
        ValueError: Something is given twice, or the URI has another scheme or a query; there is no such policy; or
            `timeout` is not positive.
    """

    def __init__(
        self,
        host: str,
        port: int = 22,
        username: str | None = None,
        password: str | None = None,
        known_hosts_filename: str | None = None,
        known_hosts_filename_environ: str = "COMPOSER_SFTP_KNOWN_HOSTS_FILE",
        key_filename: str | None = None,
        key_filename_environ: str = "COMPOSER_SFTP_KEY_FILE",
        missing_host_key_policy: str = "RejectPolicy",
        cwd: str = "",
        connect_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if not host:
            raise ValueError(f"`host` must be a host, or a URI that begins with 'sftp://', got {host!r}.")
        if "://" in host:
            parts, shown = urlsplit(host), without_password(host)
            if parts.scheme.lower() != "sftp":
                raise ValueError(f"`host` must be a host, or a URI that begins with 'sftp://', got {shown!r}.")
            if parts.query or parts.fragment or not parts.hostname:
                raise ValueError(
                    f"`host` must be a URI such as 'sftp://user@host:22/folder', without a query, got {shown!r}."
                )
            given = {
                "port": (parts.port, None if port == 22 else port),
                "username": (parts.username, username),
                "password": (parts.password, password),
                "cwd": (parts.path[1:] or None, cwd or None),
            }
            for name, (in_uri, argument) in given.items():
                if in_uri is not None and argument is not None:
                    raise ValueError(f"`{name}` must be given once, in `host` or as an argument. Leave one out.")
            host, port = parts.hostname, parts.port or port
            username = unquote(parts.username) if parts.username else username
            password = unquote(parts.password) if parts.password else password
            cwd = unquote(parts.path[1:]) or cwd
        self.host, self.port, self.username = host, port, username
        self.cwd = cwd.rstrip("/") or cwd[:1]
        user = f"{username}@" if username else ""
        address = f"sftp://{user}{host}{'' if port == 22 else f':{port}'}"
        check_installed("sftp", address)
        known_hosts = _file("known_hosts_filename", known_hosts_filename, known_hosts_filename_environ)
        arguments = {
            "port": port,
            "username": username,
            "password": password,
            "key_filename": _file("key_filename", key_filename, key_filename_environ),
            **(connect_kwargs or {}),
        }
        policy = _policy(missing_host_key_policy)
        connection = sftp_connection(host, self.cwd or ".", arguments, known_hosts, policy)
        super().__init__(Storage(f"{address}/{self.cwd}", {}, connection=connection))


def _file(argument: str, path: str | None, variable: str) -> str | None:
    """Return the path of a file of keys; None if none is given."""
    path = path or os.environ.get(variable)
    if not path:
        return None
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"`{argument}`, or the variable `{variable}`, must name a file, got {path!r}.")
    return path


def _policy(name: str) -> Any:
    """Return the policy of paramiko with a name; None for the one that refuses, which explains more than paramiko's."""
    import paramiko

    if name == "RejectPolicy":
        return None
    policy = getattr(paramiko, name, None)
    if not (isinstance(policy, type) and issubclass(policy, paramiko.MissingHostKeyPolicy)):
        raise ValueError(
            f"`missing_host_key_policy` must be 'RejectPolicy', 'WarningPolicy' or 'AutoAddPolicy', got {name!r}."
        )
    return policy()
