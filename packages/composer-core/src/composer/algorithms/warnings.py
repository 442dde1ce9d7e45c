"""Warnings about the use of algorithms."""

from __future__ import annotations

import warnings


class NoEffectWarning(Warning):
    """An algorithm changed nothing, because nothing in the model or data matches."""


class NotIntendedUseWarning(Warning):
    """An algorithm is used in an unsupported setting."""


def warn_no_effect(message: str, stacklevel: int = 2) -> None:
    """Issue a `NoEffectWarning`.

    Args:
        message: The reason why the algorithm changed nothing.
        stacklevel: As for `warnings.warn`: 2 is the caller of the function that calls this.

    Example:
        >>> import pytest
        >>> with pytest.warns(NoEffectWarning, match="changed nothing"):
        ...     warn_no_effect("`apply_blurpool` changed nothing: the model has no layer to replace.")
    """
    warnings.warn(message, NoEffectWarning, stacklevel=stacklevel + 1)
