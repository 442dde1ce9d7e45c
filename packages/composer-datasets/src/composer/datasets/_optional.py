"""Packages that only some data sets need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["needed"]


def needed(module: str, reason: str, extra: str) -> Any:
    """Import a package, or say which command installs it.

    Args:
        module: Its name.
        reason: Who needs it, the start of a sentence.
        extra: The extra of this distribution that brings it.

    Raises:
        ModuleNotFoundError: It is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ModuleNotFoundError(
            f"{reason} needs `{module}`, which is not installed. Run `pip install composer-datasets[{extra}]`.",
            name=module,
        ) from None
