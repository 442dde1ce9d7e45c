"""The names of checkpoint files."""

from __future__ import annotations

import errno
import os
import re
import string
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from composer.checkpoint.durable import temporary_path
from composer.utils import format_name_with_dist, format_name_with_dist_and_time, is_tar

if TYPE_CHECKING:
    from composer.core import State

__all__ = [
    "PartialFilePath",
    "check_characters",
    "check_file_name",
    "check_folder",
    "check_length",
    "check_link",
    "check_path",
    "check_pattern",
    "check_relative",
    "check_run_name",
    "counts_of_name",
    "get_save_filename",
    "was_swapped",
]

_PROCESS = ("run_name", "rank", "local_rank", "world_size", "local_world_size", "node_rank")
_TIMES = (
    *("epoch", "batch", "sample", "token", "batch_in_epoch", "sample_in_epoch", "token_in_epoch"),
    *("total_wct", "epoch_wct", "batch_wct"),
)
_EXAMPLES: dict[str, object] = {
    **{name: 1.5 if name.endswith("_wct") else 1 for name in (*_PROCESS, *_TIMES)},
    "run_name": "run",
}
_SEPARATORS = re.compile(r"[/\\]")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
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


def check_characters(argument: str, text: str) -> None:
    """Refuse control characters, which a path cannot hold or nobody can type.

    Args:
        argument: The name of the argument, for the message.
        text: Its value.

    Raises:
        ValueError: There is one.
    """
    found = next((character for character in text if ord(character) < 32 or ord(character) == 127), None)
    if found is not None:
        raise ValueError(
            f"`{argument}` must not hold control characters such as NUL or newline, got {text!r}. Remove {found!r}."
        )


def check_run_name(run_name: str) -> None:
    """Refuse a name that leads out of the folders that are called after it.

    Raises:
        ValueError: It is absolute, leads upwards, or holds control characters.
    """
    check_characters("run_name", run_name)
    if os.path.isabs(run_name) or ".." in _SEPARATORS.split(run_name):
        raise ValueError(
            f"`run_name` must not lead out of `save_folder`, where files are called after it, got {run_name!r}. Leave "
            f"out a leading '/' and '..'."
        )


def check_pattern(argument: str, pattern: str, times: bool = True) -> None:
    """Refuse a format string that cannot be filled in.

    Args:
        argument: The name of the argument, for the message.
        pattern: The format string.
        times: Whether it may hold the training time.

    Raises:
        ValueError: It holds a control character, an unknown or a positional field, or a format that does not suit one.
    """
    check_characters(argument, pattern)
    known = (*_PROCESS, *_TIMES) if times else _PROCESS
    try:
        pattern.format(**{name: _EXAMPLES[name] for name in known})
        return
    except KeyError as error:
        reason = f"{{{error.args[0]}}} is not known"
    except IndexError:
        reason = "a field needs a name"
    except (AttributeError, TypeError, ValueError) as error:
        reason = str(error)
    fields = ", ".join(f"{{{name}}}" for name in known)
    raise ValueError(f"`{argument}` must be a format string of known fields, got {pattern!r}: {reason}. Use {fields}.")


def check_path(argument: str, path: str | os.PathLike[str]) -> None:
    """Refuse what is no path of a file to save, before its fields are filled in.

    Args:
        argument: The name of the argument, for the message.
        path: Its value.

    Raises:
        TypeError: It is no path.
        ValueError: It has an unknown field, or is a folder.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"`{argument}` must be a path or a string, got {path!r}.")
    name = os.fspath(path)
    check_pattern(argument, name)
    if os.path.basename(name) in ("", ".", "..") or os.path.isdir(os.path.expanduser(name)):
        raise ValueError(
            f"`{argument}` must be the path of a file, got {name!r}. Add its name, such as 'ep{{epoch}}.pt'."
        )


def check_relative(argument: str, name: str) -> None:
    """Refuse the name of a file that is not in the folder it is to be in.

    Args:
        argument: The name of the argument, for the message.
        name: The name, which may lead to a subfolder; a format string.

    Raises:
        ValueError: It is absolute, leads upwards, or names no file.
    """
    if os.path.isabs(name) or ".." in _SEPARATORS.split(name):
        raise ValueError(
            f"`{argument}` must stay inside of `save_folder`, got {name!r}. Leave out a leading '/' and '..', and pass "
            f"the folder as `save_folder`."
        )
    if os.path.basename(name) in ("", "."):
        raise ValueError(f"`{argument}` must end in a file name, got {name!r}. Use for example 'ep{{epoch}}.pt'.")


def check_folder(folder: str) -> None:
    """Make a folder to save to, and check that files can be made in it. A full disk is no error: space may be freed.

    Raises:
        ValueError: It is a file, or inside of one.
        OSError: It cannot be made or written.
    """
    path = Path(folder)
    for place in (path, *path.parents):
        if place.is_symlink() and not place.exists():
            raise ValueError(
                f"`save_folder` must be a folder, got {folder!r}: {str(place)!r} is a link to "
                f"{os.readlink(place)!r}, which is missing. Make that folder, or remove the link."
            )
        if place.exists() and not place.is_dir():
            raise ValueError(
                f"`save_folder` must be a folder, got {folder!r}: {str(place)!r} is a file. Move that file, or save to "
                f"another folder."
            )
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        if error.errno in _NO_SPACE:
            return
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(
            error.errno or errno.EIO,
            f"`save_folder` must be a folder that this process can write to, got {folder!r}: {reason}. Save to another "
            f"folder, or change its permissions",
        ) from error


def check_link(link: str, checkpoints: str) -> None:
    """Refuse a name for a link to a checkpoint that a checkpoint may get, or where a folder is.

    Args:
        link: The path of the link.
        checkpoints: The path of checkpoints; a format string.

    Raises:
        ValueError: It is one of those.
    """
    if counts_of_name(os.path.normpath(link), os.path.normpath(checkpoints)) is not None:
        raise ValueError(
            f"The link {os.path.basename(link)!r} must not have the name of a checkpoint, which it would replace; "
            f"checkpoints are called {os.path.basename(checkpoints)!r}. Choose another `save_latest_filename` or "
            f"`save_filename`."
        )
    if os.path.isdir(link) and not os.path.islink(link):
        raise ValueError(
            f"`save_latest_filename` must not be the name of a folder, got {link!r}. Remove that folder, or choose "
            f"another name for the link."
        )


def check_length(argument: str, path: str) -> None:
    """Refuse a file name that the file system has no room for, with the suffix that it has while it is written.

    Args:
        argument: The name of the argument, for the message.
        path: The file.

    Raises:
        ValueError: It is too long.
    """
    name, most = os.path.basename(path), 255 - len(temporary_path(Path("_")).name)
    if len(os.fsencode(name)) > most:
        raise ValueError(
            f"`{argument}` must give names of at most {most} bytes, got {len(os.fsencode(name))}: {name!r}."
        )


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
        elif field in seen:
            expression += rf"(?P={field})"
        elif field is not None:
            expression += r"[\d.e+-]+" if field.endswith("_wct") else ".+?"
    match = re.fullmatch(expression, name)
    if match is None:
        return None
    found = match.groupdict()
    return tuple(int(found.get(count, -1)) for count in _COUNTS)


def was_swapped(saved_as: str, actual: str) -> bool:
    """Whether a checkpoint has the name of another one: it differs by its numbers only. A name of its own is fine."""
    return saved_as != actual and re.sub(r"\d+", "#", saved_as) == re.sub(r"\d+", "#", actual)
