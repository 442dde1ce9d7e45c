"""What can go wrong."""

from __future__ import annotations

__all__ = ["RunNotFoundError"]


class RunNotFoundError(FileNotFoundError):
    """A folder holds no recorded run."""
