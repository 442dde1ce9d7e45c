"""Check that a folder is empty before traces are written to it."""

from __future__ import annotations

import os
from pathlib import Path


def ensure_folder_is_empty(folder_name: str | Path) -> None:
    """Check that a folder contains no files, except hidden ones. The folder need not exist.

    Raises:
        FileExistsError: The folder contains a file.
    """
    for folder, _, files in os.walk(folder_name):
        visible = sorted(name for name in files if not name.startswith("."))
        if visible:
            raise FileExistsError(
                f"`{folder_name}` must be empty, but it contains {os.path.join(folder, visible[0])!r}. Use another "
                f"folder, or allow overwriting."
            )
