"""The names of checkpoint files."""

from __future__ import annotations

import os
import re
import string
from pathlib import Path
from typing import TYPE_CHECKING

from composer.utils import format_name_with_dist, format_name_with_dist_and_time, is_tar

if TYPE_CHECKING:
    from composer.core import State

__all__ = ["PartialFilePath", "check_file_name", "counts_of_name", "get_save_filename", "was_swapped"]

_COUNTS = ("batch", "sample", "token", "epoch", "batch_in_epoch", "sample_in_epoch", "token_in_epoch")
_TAR_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.lzma")


class PartialFilePath:
    """The path of a checkpoint, with variables such as `{epoch}` still to be filled in.

    Args:
        filename: The file name; a format string.
        folder: The folder; a format string. None: `filename` may hold one.
    """

    def __init__(self, filename: str, folder: str | None = None) -> None:
        self.folder = folder
        self.filename = filename

    def __repr__(self) -> str:
        return f"PartialFilePath({self.filename!r}, {self.folder!r})"

    def format(self, state: State, keep_placeholders: bool = False) -> str:
        """Fill the variables in.

        Args:
            state: Gives the name of the run and the time.
            keep_placeholders: Whether only the folder's variables are filled in.
        """
        folder = "" if self.folder is None else format_name_with_dist(self.folder, state.run_name)
        name = self.filename
        if not keep_placeholders:
            name = format_name_with_dist_and_time(name, state.run_name, state.timestamp)
        return os.path.join(folder, name)


def get_save_filename(state: State, filename: str = "ep{epoch}-ba{batch}-rank{rank}") -> str:
    """The path to which `save_checkpoint` writes now.

    Args:
        state: Gives the name of the run and the time.
        filename: A format string.
    """
    return PartialFilePath(filename).format(state)


def check_file_name(filename: str) -> None:
    """Refuse names whose format cannot be written.

    Raises:
        ValueError: It looks like a tar archive, but of an unknown kind.
        CompressorNotFound: The program that compresses it is unknown or not installed.
    """
    from composer.utils import get_compressor, is_compressed_pt

    name = Path(filename).name
    if is_tar(name):
        if not name.endswith(_TAR_SUFFIXES):
            raise ValueError(
                f"`{filename}` does not end with a valid tarfile extension. Use one of {', '.join(_TAR_SUFFIXES)}."
            )
    elif is_compressed_pt(name):
        get_compressor(name).check_exists()


def counts_of_name(name: str, pattern: str) -> tuple[int, ...] | None:
    """The training time in a file name, to be compared with that of others.

    Args:
        name: The file name.
        pattern: The format string that may have made it.

    Returns:
        Its counts (-1 for those it does not have), or None if another pattern made it.
    """
    expression, seen = "", set[str]()
    for literal, field, _, _ in string.Formatter().parse(pattern):
        expression += re.escape(literal)
        if field in _COUNTS and field not in seen:
            expression += rf"(?P<{field}>\d+)"
            seen.add(field)
        elif field is not None:
            expression += rf"(?P={field})" if field in seen else ".+?"
    match = re.fullmatch(expression, name)
    if match is None:
        return None
    found = match.groupdict()
    return tuple(int(found.get(count, -1)) for count in _COUNTS)


def was_swapped(saved_as: str, actual: str) -> bool:
    """Whether a checkpoint has the name of another one: it differs by its numbers only. A name of its own is fine."""
    return saved_as != actual and re.sub(r"\d+", "#", saved_as) == re.sub(r"\d+", "#", actual)
