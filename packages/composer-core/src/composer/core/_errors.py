"""The errors of this library that have a class of their own; each is also the builtin a caller would catch."""

from __future__ import annotations

__all__ = ["ComposerError", "ConflictError", "OrderingError"]


class ComposerError(Exception):
    """Base class of the library's own errors."""


class ConflictError(ComposerError, ValueError):
    """Two algorithms that exclude each other are used together."""


class OrderingError(ComposerError, ValueError):
    """The declared orders of some algorithms contradict each other."""
