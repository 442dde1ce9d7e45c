"""Atomic writes, and temporary folders that are removed even after a crash."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

LINK_SUFFIX = ".symlink"
"""The suffix of a text file that acts as a symbolic link."""
UNDELIVERED = "UNDELIVERED"
"""The name of a file that marks a scratch folder with data that exists nowhere else: it stays if its process dies."""
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The numbers of the errors of a disk or a quota that is full."""

_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{8}\.saving")
_SCRATCH = "composer-scratch-"
# What systems answer to a link on FAT, SMB, FUSE and the like; Windows answers EINVAL without the privilege.
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
_WRITE_ERRORS = NO_SPACE | {errno.EIO, errno.EROFS}


def temporary_path(path: Path) -> Path:
    """Return a unique name next to `path`, recognizable as a temporary file if a killed process leaves it."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.saving")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, and rename it when the body succeeds; if it fails, nothing remains of it.

    Unlike with `atomic_write`, neither the file nor its folder is flushed to the disk.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with suppress(OSError):  # the disk may have become read-only; the first error is raised
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name in the same folder, and rename it when the body succeeds.

    The body has to flush the file to the disk. If it fails, the temporary file is removed, and an earlier file of this
    name is unchanged.

    Args:
        path: The file to create or replace. Its folder is created if necessary.

    Raises:
        OSError: The file cannot be written, for example because the disk is full; the message names it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(
            errno.EISDIR,
            f"Could not save {str(path)!r}: there is a folder of that name. Remove it, or save elsewhere.",
        )
    temporary = None
    try:
        with replacing(path) as temporary:
            yield temporary
        sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        # torch raises a RuntimeError in place of the system's error.
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError) or cause.errno is None:
            raise
        if cause.errno not in _WRITE_ERRORS and cause.filename != str(temporary):
            raise
        advice = "Free some space" if cause.errno in _WRITE_ERRORS else "Check its folder"
        raise OSError(
            cause.errno,
            f"Could not save {str(path)!r}: {os.strerror(cause.errno)}. Files saved earlier are unchanged. {advice}, "
            f"or save elsewhere.",
        ) from error


def sync_file(path: Path) -> None:
    """Flush a file to the disk."""
    try:
        descriptor = os.open(path, os.O_RDWR)  # Windows flushes only files that are open for writing
    except PermissionError:  # the umask may deny writing to the owner of the file
        descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, where the system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # some systems cannot open folders
    try:
        with suppress(OSError):  # some file systems cannot synchronize them
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_link(link: Path, target: Path) -> None:
    """Make or replace a relative symbolic link in one step, so that it always points to a complete file.

    On a file system without symbolic links, a text file `<link>.symlink` with the relative path of the target takes its
    place, as on remote stores; see `follow_link`. A warning says so.

    Args:
        link: The link.
        target: The target of the link, in any folder.
    """
    link.parent.mkdir(parents=True, exist_ok=True)
    relative, text = os.path.relpath(target, link.parent), link.with_name(f"{link.name}{LINK_SUFFIX}")
    try:
        with replacing(link) as temporary:
            os.symlink(relative, temporary)
        text.unlink(missing_ok=True)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with replacing(text) as temporary:
            temporary.write_text(relative, encoding="utf-8")
        warnings.warn(
            f"{str(link.parent)!r} is on a file system without symbolic links, so the text file {text.name!r} names "
            f"the checkpoint. `load_path={str(link)!r}` and `autoresume` follow it; other programs do not.",
            stacklevel=2,
        )
    sync_folder(link.parent)


def follow_link(path: Path) -> Path:
    """Return the path that the text file `<path>.symlink` names, if there is only that; otherwise `path`."""
    text = path.with_name(f"{path.name}{LINK_SUFFIX}")
    if os.path.lexists(path) or not text.is_file():
        return path
    return path.parent / text.read_text(encoding="utf-8").strip()


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link to a file, or a copy on a file system without hard links.

    Raises:
        FileNotFoundError: There is no such file.
        FileExistsError: There is a `target` already.
    """
    try:
        os.link(source, target)
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError:
        shutil.copyfile(source, target)


def symlink_or_copy(file: str | os.PathLike[str], target: Path) -> None:
    """Make a symbolic link to a file, or a copy of it where there are no symbolic links."""
    try:
        os.symlink(os.path.realpath(file), target)
    except OSError:  # the file system has no links, or on Windows the user lacks the right
        shutil.copyfile(file, target)


def remove_leftovers(folder: Path, is_left_over: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Remove the temporary files that a killed process left in a folder.

    Args:
        folder: The folder.
        is_left_over: Returns True for the final name of a file that no process is writing now.

    Returns:
        The names of the removed files.
    """
    if not folder.is_dir():
        return []
    matches = ((entry.name, _TEMPORARY.fullmatch(entry.name)) for entry in folder.iterdir())
    names = sorted(name for name, match in matches if match is not None and is_left_over(match[1]))
    for name in names:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            shutil.rmtree(folder / name, ignore_errors=True)
            continue
        with suppress(FileNotFoundError):
            (folder / name).unlink()
    return names


@contextmanager
def scratch_folder(purpose: str) -> Iterator[Path]:
    """Make a temporary folder, and remove it when the body ends; see `make_scratch_folder`."""
    folder, remove = make_scratch_folder(purpose)
    try:
        yield folder
    finally:
        remove()


def make_scratch_folder(purpose: str) -> tuple[Path, Callable[[], None]]:
    """Make a temporary folder that does not remain forever if this process is killed.

    A lock file beside the folder is locked, and the system releases the locks of a process that ends. The next process
    that makes such a folder on this machine, such as a relaunch of the run, removes those that are not locked, unless
    they hold `UNDELIVERED`.

    Args:
        purpose: A part of its name.

    Returns:
        The folder, and a function that removes it.
    """
    where = Path(tempfile.gettempdir())
    for path in where.glob(f".{_SCRATCH}*.lock"):
        abandoned = path.with_name(path.stem[1:])
        with suppress(Timeout, OSError), FileLock(path, timeout=0):  # it is in use, or another user's
            if not os.path.lexists(abandoned / UNDELIVERED):
                shutil.rmtree(abandoned, ignore_errors=True)
                path.unlink(missing_ok=True)
    folder = where / f"{_SCRATCH}{purpose}-{secrets.token_hex(8)}"
    lock = FileLock(where / f".{folder.name}.lock")
    lock.acquire()
    folder.mkdir(mode=0o700)

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            os.unlink(lock.lock_file)
        lock.release()

    return folder, remove
