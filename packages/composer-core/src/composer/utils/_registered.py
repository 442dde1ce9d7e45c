"""Names in `composer.utils` that other distributions implement and register."""

from __future__ import annotations

import sys
from typing import Any

_GROUP = "composer.utils"


def find_registered(module: str, name: str) -> Any:
    """Find a name of `composer.utils` that an installed distribution registers, such as `load_checkpoint`.

    Must be called directly by the `__getattr__` of a module.

    Args:
        module: The name of the module, for the error message.
        name: The name to find.

    Raises:
        ImportError: In `from ... import name`, if the distribution that provides the name is not installed.
        AttributeError: No installed distribution provides the name.
    """
    if name.startswith("_"):  # looked up by the import system, pickle and inspect
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    from composer.core._registry import load, missing_error  # the package composer.core imports composer.utils

    return load(_GROUP, name, missing_error(sys._getframe(2)))
