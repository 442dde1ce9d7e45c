"""Names of checkpoint files: formatting, parsing, and checks of the arguments that give them."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer.checkpoint.durable import NO_SPACE
from composer.utils import format_name_with_dist, format_name_with_dist_and_time
from composer.utils.compression import get_compressor, is_compressed_pt, is_tar
from composer.utils.file_helpers import DIST_VARIABLES, TIME_VARIABLES, file_name_pattern

if TYPE_CHECKING:
    from composer.core import State

MLFLOW_DBFS_PATH_PREFIX = "databricks/mlflow-tracking/"
"""How the paths of artifacts of MLflow on Databricks begin."""
MLFLOW_EXPERIMENT_ID_FORMAT_KEY = "mlflow_experiment_id"
"""The placeholder in such a path for the identifier of the experiment."""
MLFLOW_RUN_ID_FORMAT_KEY = "mlflow_run_id"
"""The placeholder in such a path for the identifier of the run."""

_MLFLOW = (MLFLOW_EXPERIMENT_ID_FORMAT_KEY, MLFLOW_RUN_ID_FORMAT_KEY)
_SEPARATORS = re.compile(r"[/\\]")
_COUNTS = ("batch", "sample", "token", "epoch", "batch_in_epoch", "sample_in_epoch", "token_in_epoch")
_TAR_SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.lzma")


def has_mlflow_ids(text: str) -> bool:
    """Return True if a text contains `{mlflow_experiment_id}` or `{mlflow_run_id}`."""
    return any(f"{{{name}}}" in text for name in _MLFLOW)


class PartialFilePath:
    """The path of a checkpoint, with variables such as `{epoch}` to be filled in later.

    Args:
        filename: The file name; a format string.
        folder: The folder; a format string. None: `filename` may include one.
    """

    def __init__(self, filename: str, folder: str | None = None) -> None:
        self.folder = folder
        self.filename = filename

    def __repr__(self) -> str:
        return f"PartialFilePath({self.filename!r}, {self.folder!r})"

    def format(self, state: State, keep_placeholders: bool = False) -> str:
        """Fill in the variables.

        Args:
            state: The run, with its name and time.
            keep_placeholders: Fill in only the folder's variables.
        """
        folder = "" if self.folder is None else format_name_with_dist(self.folder, state.run_name)
        name = self.filename
        if not keep_placeholders:
            name = format_name_with_dist_and_time(name, state.run_name, state.timestamp)
        return os.path.join(folder, name)


def get_save_filename(state: State, filename: str = "ep{epoch}-ba{batch}-rank{rank}") -> str:
    """Return the path to which `save_checkpoint` writes now.

    Args:
        state: The run, with its name and time.
        filename: A format string.
    """
    return PartialFilePath(filename).format(state)


def check_file_name(filename: str) -> None:
    """Check that the format of a checkpoint, as its name has it, can be written.

    Raises:
        ValueError: The name looks like a tar archive, but of an unknown kind.
        CompressorNotFound: The program that compresses it is unknown or not installed.
    """
    name = Path(filename).name
    if is_tar(name):
        if not name.endswith(_TAR_SUFFIXES):
            raise ValueError(
                f"`{filename}` does not end with a valid tarfile extension. Use one of {', '.join(_TAR_SUFFIXES)}."
            )
    elif is_compressed_pt(name):
        get_compressor(name).check_exists()


def check_run_name(run_name: str) -> None:
    """Check that a run name does not lead out of the folders that are named after it.

    Raises:
        ValueError: The name is absolute or leads upwards.
    """
    if os.path.isabs(run_name) or ".." in _SEPARATORS.split(run_name):
        raise ValueError(
            f"`run_name` must not lead out of `save_folder`, where files are named after it, got {run_name!r}. Leave "
            f"out a leading '/' and '..'."
        )


def check_pattern(argument: str, pattern: str, times: bool = True) -> None:
    """Check that a format string can be filled in.

    Args:
        argument: The name of the argument, for the message.
        pattern: The format string.
        times: True if it may include the training time.

    Raises:
        ValueError: The pattern has an unknown or unnamed field, or a format that does not fit.
    """
    known: dict[str, Any] = {"run_name": "run", **dict.fromkeys(DIST_VARIABLES, 1)}
    if times:
        known |= {name: 1.5 if name.endswith("_wct") else 1 for name in TIME_VARIABLES}
    if MLFLOW_DBFS_PATH_PREFIX in pattern:
        known |= dict.fromkeys(_MLFLOW, "1")
    try:
        pattern.format(**known)
        return
    except KeyError as error:
        reason = f"{{{error.args[0]}}} is not known"
    except IndexError:
        reason = "a field needs a name"
    except (AttributeError, TypeError, ValueError) as error:
        reason = str(error)
    fields = ", ".join(f"{{{name}}}" for name in known)
    raise ValueError(f"`{argument}` must be a format string of known fields, got {pattern!r}: {reason}. Use {fields}.")


def check_nonempty_path(argument: str, path: str | os.PathLike[str]) -> None:
    """Check that a value is a path, and not empty.

    Args:
        argument: The name of the argument, for the message.
        path: Its value.

    Raises:
        TypeError: The value is not a path.
        ValueError: The path is empty.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"`{argument}` must be a path or a string, got {path!r}.")
    if not os.fspath(path):
        raise ValueError(f"`{argument}` must not be empty, got {path!r}.")


def check_path(argument: str, path: str | os.PathLike[str]) -> None:
    """Check that a path names a file to save, before its fields are filled in.

    Args:
        argument: The name of the argument, for the message.
        path: Its value.

    Raises:
        TypeError: The value is not a path.
        ValueError: The path is empty, has an unknown field, or is a folder.
    """
    check_nonempty_path(argument, path)
    name = os.fspath(path)
    check_pattern(argument, name)
    if os.path.basename(name) in ("", ".", "..") or os.path.isdir(os.path.expanduser(name)):
        raise ValueError(
            f"`{argument}` must be the path of a file, got {name!r}. Add its name, such as 'ep{{epoch}}.pt'."
        )


def check_relative(argument: str, name: str) -> None:
    """Check that a file name stays inside its folder.

    Args:
        argument: The name of the argument, for the message.
        name: The name, which may lead to a subfolder; a format string.

    Raises:
        ValueError: The name is absolute, leads upwards, or has no file name.
    """
    if os.path.isabs(name) or ".." in _SEPARATORS.split(name):
        raise ValueError(
            f"`{argument}` must stay inside of `save_folder`, got {name!r}. Leave out a leading '/' and '..', and pass "
            f"the folder as `save_folder`."
        )
    if os.path.basename(name) in ("", "."):
        raise ValueError(f"`{argument}` must end in a file name, got {name!r}. Use for example 'ep{{epoch}}.pt'.")


def check_folder(folder: str) -> None:
    """Create a folder to save to, and check that it is writable. A full disk is not an error: space may be freed.

    Raises:
        ValueError: The path is a file, or inside of one.
        OSError: The folder cannot be created or written.
    """
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except (FileExistsError, NotADirectoryError) as error:
        raise ValueError(
            f"`save_folder` must be a folder, got {folder!r}: it, or a part of its path, is a file or a link to "
            f"something that is missing. Remove that, or save to another folder."
        ) from error
    except OSError as error:
        if error.errno in NO_SPACE:
            return
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(
            error.errno or errno.EIO,
            f"`save_folder` must be a folder that this process can write to, got {folder!r}: {reason}. Save to another "
            f"folder, or change its permissions",
        ) from error


def check_link(link: str, checkpoints: str) -> None:
    """Check that a link to a checkpoint has a name that no checkpoint gets.

    Args:
        link: The path of the link.
        checkpoints: The path of checkpoints; a format string.

    Raises:
        ValueError: A checkpoint may get the name of the link.
    """
    if counts_of_name(os.path.normpath(link), os.path.normpath(checkpoints)) is not None:
        raise ValueError(
            f"The link {os.path.basename(link)!r} must not have the name of a checkpoint, which it would replace; "
            f"checkpoints are named {os.path.basename(checkpoints)!r}. Choose another `save_latest_filename` or "
            f"`save_filename`."
        )


def counts_of_name(name: str, pattern: str) -> tuple[int, ...] | None:
    """Parse the training time in a file name, to compare it with that of others.

    Args:
        name: The file name.
        pattern: The format string that may have made it.

    Returns:
        Its counts (-1 for those it does not have), or None if another pattern made it.
    """
    match = file_name_pattern(pattern).fullmatch(name)
    if match is None:
        return None
    counts = match.groupdict()
    return tuple(int(counts.get(count, -1)) for count in _COUNTS)
