"""The filesystem of an SFTP server whose key must be known."""

from __future__ import annotations

import base64
import hashlib
from contextlib import suppress
from typing import Any

import paramiko
from fsspec.implementations.sftp import SFTPFileSystem

from composer.core import ComposerError
from composer.utils.delivery import call_in_time


class UnknownHostError(ComposerError, PermissionError):
    """The key of a host is not known."""


class KnownHostPolicy(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]  # paramiko has no types
    """Refuses a host whose key is unknown, as paramiko's `RejectPolicy`, and says how to make it known.

    Args:
        known_hosts: The file with known keys.
    """

    def __init__(self, known_hosts: str) -> None:
        self._known_hosts = known_hosts

    def missing_host_key(self, client: Any, hostname: str, key: Any) -> None:
        """Raise an UnknownHostError."""
        fingerprint = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
        raise UnknownHostError(
            f"The host {hostname} is not in {self._known_hosts}. Its key is {key.get_name()} SHA256:{fingerprint}: if "
            f"that is right, add the output of `ssh-keyscan` for this host to the file, or name another file in "
            f"`COMPOSER_SFTP_KNOWN_HOSTS_FILE`."
        )


class KnownHostFileSystem(SFTPFileSystem):  # type: ignore[misc]  # fsspec has no types
    """fsspec's filesystem, which accepts any host, with a check of the host's key and with names as they are.

    Args:
        host: The host.
        arguments: Arguments of `paramiko.SSHClient.connect`. `timeout` also limits the wait for each reply.
        known_hosts: The file with known keys; None: the user's.
        policy: What paramiko does if the host's key is unknown; None: refuse the host.
    """

    cachable = False

    def __init__(self, host: str, arguments: dict[str, Any], known_hosts: str | None, policy: Any = None) -> None:
        self._arguments, self._known_hosts = arguments, known_hosts
        self._policy = KnownHostPolicy(known_hosts or "~/.ssh/known_hosts") if policy is None else policy
        super().__init__(host, **arguments)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path  # a name may contain "#" or "?"

    def _connect(self) -> None:
        self.client = paramiko.SSHClient()
        try:
            self.client.load_system_host_keys(self._known_hosts)
            self.client.set_missing_host_key_policy(self._policy)
            self.client.connect(self.host, **self._arguments)
            timeout = self._arguments["timeout"]
            # paramiko waits for the start of the subsystem without limit.
            self.ftp = call_in_time(self.client.open_sftp, timeout, f"Starting SFTP on {self.host}")
            self.ftp.get_channel().settimeout(timeout)
        except BaseException:
            self.client.close()
            raise

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
