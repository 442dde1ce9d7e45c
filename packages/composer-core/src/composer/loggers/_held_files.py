"""Keeps a file for a thread that sends it later."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

__all__ = ["hold_file", "kept_files", "release_file"]


def hold_file(path: Path, name: str) -> Path:
    """Give a file another name in a hidden folder beside it, so that its own may go away; a copy where links cannot be.

    Args:
        path: The file.
        name: The name of the file that is held, without folders.
    """
    held = Path(tempfile.mkdtemp(prefix=".held-", dir=path.parent)) / name
    path = path.resolve()  # a link to a link would lead nowhere from another folder
    try:
        os.link(path, held)
    except OSError:
        shutil.copyfile(path, held)
    return held


def release_file(held: Path) -> None:
    """Remove what `hold_file` returned; fine if it is gone."""
    held.unlink(missing_ok=True)
    if held.parent.exists():
        held.parent.rmdir()


def kept_files(held: Iterable[Path], rest: str) -> str:
    """Return where the files are that were not sent and so are still held, in a sentence.

    Args:
        held: What `hold_file` returned, sent or not.
        rest: What becomes of everything else, a sentence.
    """
    there = [str(path) for path in held if path.exists()]
    return f"{rest} The files to be sent are kept: {', '.join(there)}." if there else rest
