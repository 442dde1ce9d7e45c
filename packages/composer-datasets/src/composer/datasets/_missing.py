"""Errors for datasets and packages that are not installed, with the command that gets them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any


def missing_files(name: str, looked_for: Sequence[Path | str], command: str) -> FileNotFoundError:
    """Return the error for a dataset whose files do not exist.

    Args:
        name: The dataset.
        looked_for: The expected paths.
        command: The shell command that gets the files.
    """
    places = ", ".join(repr(str(path)) for path in looked_for)
    return FileNotFoundError(f"{name} was not found: looked for {places}. To get it, run:\n  {command}")


def require(module: str, reason: str, extra: str) -> Any:
    """Import an optional package.

    Args:
        module: The module to import.
        reason: The feature that needs it; starts the sentence of the error.
        extra: The extra of `composer-datasets` that installs it.

    Raises:
        ModuleNotFoundError: The package is not installed; the message has the command that installs it.
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
