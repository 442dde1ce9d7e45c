"""Warnings about the use of algorithms."""

from __future__ import annotations

__all__ = ["NoEffectWarning", "NotIntendedUseWarning"]


class NoEffectWarning(Warning):
    """An algorithm changed nothing, because nothing in the model or data matches."""


class NotIntendedUseWarning(Warning):
    """An algorithm is used in an unsupported setting."""
