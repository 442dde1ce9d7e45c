"""Names that belong to `composer.utils` for its users, but to a higher package by what they need."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["find_elsewhere"]

_GROUP = "composer.utils"


def find_elsewhere(module: str, name: str) -> Any:
    """Look up a name that a module of `composer.utils` lacks among what installed packages register for it.

    To be called by the module's `__getattr__` directly.

    Object stores, checkpoints, inference export and the configurations of sharding are such names.

    Args:
        module: The module that was asked, for the message.
        name: The name.

    Raises:
        ImportError: `from ... import name` asks, and the distribution of this project that provides it is missing.
        AttributeError: No installed package provides it.
    """
    if name.startswith("_"):  # import machinery, pickle and inspect probe for these
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    from composer.core._registry import load, missing_error  # core imports utils

    return load(_GROUP, name, missing_error(sys._getframe(2)))
