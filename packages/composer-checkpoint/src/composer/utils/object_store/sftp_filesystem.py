"""The filesystem of an SFTP server whose key must be known."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

__all__ = ["KnownHostFileSystem"]


class KnownHostFileSystem(SFTPFileSystem):  # type: ignore[misc]  # fsspec has no types
    """fsspec's filesystem, which accepts any host, with a check of the host's key and with names as they are.

    Args:
        host: The host.
        policy: What to do if its key is unknown.
        known_hosts: The file with known keys; None: the user's.
        arguments: Arguments of `paramiko.SSHClient.connect`.
    """

    cachable = False

    def __init__(self, host: str, policy: Any, known_hosts: str | None, arguments: dict[str, Any]) -> None:
        self._policy, self._known_hosts, self._arguments = policy, known_hosts, arguments
        super().__init__(host, **arguments)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path  # a name may contain "#" or "?"

    def _connect(self) -> None:
        self.client = paramiko.SSHClient()
        self.client.load_system_host_keys(self._known_hosts and os.path.expanduser(self._known_hosts))
        self.client.set_missing_host_key_policy(self._policy)
        self.client.connect(self.host, **self._arguments)
        self.ftp = self.client.open_sftp()

    def mv(self, old: str, new: str, **kwargs: Any) -> None:
        """Rename a file, replacing another one."""
        try:
            self.ftp.posix_rename(old, new)
        except OSError as error:
            if "unsupported" not in str(error).lower():  # servers without OpenSSH's extension
                raise
            with suppress(FileNotFoundError):
                self.ftp.remove(new)
            self.ftp.rename(old, new)
