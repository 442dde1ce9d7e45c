"""Warnings about the library itself."""

from __future__ import annotations


class VersionedDeprecationWarning(UserWarning):
    """A feature will be removed in a later version. A UserWarning, so that it is shown by default.

    Args:
        message: The deprecated feature and its replacement.
        remove_version: The first version without the feature.

    Example:
        >>> str(VersionedDeprecationWarning("`a` is now called `b`.", "1.0"))
        '`a` is now called `b`. It will be removed in version 1.0.'
    """

    def __init__(self, message: str, remove_version: str) -> None:
        super().__init__(f"{message} It will be removed in version {remove_version}.")
