"""Warnings that algorithms raise about their own use."""

from __future__ import annotations

__all__ = ["NoEffectWarning", "NotIntendedUseWarning"]


class NoEffectWarning(Warning):
    """An algorithm changed nothing: the model or the data has nothing it applies to."""


class NotIntendedUseWarning(Warning):
    """An algorithm is used in a setting it was not made for."""
