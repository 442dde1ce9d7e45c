"""Files that are there whole or not at all, and temporary folders that go, whatever happens meanwhile."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = [
    "UNDELIVERED",
    "make_scratch_folder",
    "point_link",
    "remove_leftovers",
    "replacing",
    "scratch_folder",
    "sync_folder",
    "temporary_path",
]

UNDELIVERED = "UNDELIVERED"
"""The name of an entry of a scratch folder that holds what is nowhere else: the folder stays if its process dies."""

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.saving")
_SCRATCH = "composer-scratch-"
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def temporary_path(path: Path) -> Path:
    """A name next to `path` that nobody else uses, and that tells what it is if a killed process leaves it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.saving")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name in the same folder; it takes its place when the body ends well.

    The body brings what it wrote to the disk. If it fails, the temporary file is removed, and an earlier file of this
    name stays as it is.

    Args:
        path: The file to make or replace. Its folder is made if need be.

    Raises:
        OSError: The file cannot be written, for example because the disk is full; the message names it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(
            errno.EISDIR,
            f"Could not save {str(path)!r}: a folder of that name is in the way. Remove it, or save elsewhere",
        )
    temporary = temporary_path(path)
    try:
        yield temporary
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):  # a disk that is read-only now lets nothing be removed; the first error is to be told
            temporary.unlink()
        if isinstance(error, (OSError, RuntimeError)) and (reason := _why_unwritten(error, path.parent)) is not None:
            number, text = reason
            raise OSError(
                number,
                f"Could not save {str(path)!r}: {text}. Files saved earlier are untouched. Free some space, or save "
                f"elsewhere",
            ) from error
        raise


def _why_unwritten(error: OSError | RuntimeError, folder: Path) -> tuple[int, str] | None:
    """The system's reason for a failed write; torch's writer hides it behind a RuntimeError."""
    if isinstance(error, OSError):
        return (error.errno, os.strerror(error.errno)) if error.errno in _WRITE_ERRORS else None
    text = str(error)
    if "PytorchStreamWriter" not in text and "unexpected pos" not in text and "inline_container" not in text:
        return None
    full = shutil.disk_usage(folder).free < 1 << 20
    return (errno.ENOSPC, os.strerror(errno.ENOSPC)) if full else (errno.EIO, text.splitlines()[0])


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # some systems cannot open folders; there is nothing to be done
    try:
        with suppress(OSError):  # and some file systems cannot synchronise them
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def point_link(link: Path, target: Path) -> None:
    """Make or replace a relative symbolic link in one step, so that it always points to a whole file.

    Args:
        link: The link.
        target: What it points to, which need not be in the same folder.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(link)
    os.symlink(os.path.relpath(target, link.parent), temporary)
    os.replace(temporary, link)
    sync_folder(link.parent)


def remove_leftovers(folder: Path, is_left_over: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Remove the temporary files that a killed process left in a folder.

    Args:
        folder: The folder.
        is_left_over: Tells, of the name that a file was to get, whether nobody is writing it now.

    Returns:
        The names of the removed files.
    """
    if not folder.is_dir():
        return []
    found = ((entry.name, _TEMPORARY.fullmatch(entry.name)) for entry in folder.iterdir())
    names = sorted(name for name, match in found if match is not None and is_left_over(match[1]))
    for name in names:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            shutil.rmtree(folder / name, ignore_errors=True)
            continue
        with suppress(FileNotFoundError):
            (folder / name).unlink()
    return names


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """A temporary folder that is gone afterwards; see `make_scratch_folder`."""
    folder, remove = make_scratch_folder(purpose)
    try:
        yield folder
    finally:
        remove()


def make_scratch_folder(purpose: str) -> tuple[Path, Callable[[], None]]:
    """Make a temporary folder that does not stay for good if this process is killed.

    The folder is locked, and the system ends the locks of a process with it. So whoever makes the next one on this
    machine, such as a relaunch of the run, removes those whose processes have ended, unless they hold `UNDELIVERED`.

    Args:
        purpose: A part of its name.

    Returns:
        The folder, and what removes it.
    """
    _remove_abandoned(Path(tempfile.gettempdir()))
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{purpose}-"))
        descriptor = _lock(folder, wait=True)
        if folder.is_dir():
            break
        if descriptor is not None:  # another process took the folder for abandoned before it was locked
            os.close(descriptor)

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)

    return folder, remove


def _remove_abandoned(where: Path) -> None:
    names: list[str] = []
    with suppress(OSError):  # it cannot be listed
        names = [name for name in os.listdir(where) if name.startswith(_SCRATCH)]
    for folder in (where / name for name in names):
        descriptor = None if folder.is_symlink() else _lock(folder, wait=False)
        if descriptor is not None:
            if not os.path.lexists(folder / UNDELIVERED):
                shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def _lock(folder: Path, wait: bool) -> int | None:
    """Lock a folder until the descriptor is closed; None: another process has, or this system has no such locks."""
    try:
        import fcntl
    except ImportError:  # on Windows
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # it is gone, or another user's
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
