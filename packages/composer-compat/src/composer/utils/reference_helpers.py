"""Helpers of `composer.utils.file_helpers` and `composer.utils.iter_helpers` that only programs of users need."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


def create_symlink_file(existing_path: str, destination_filename: str | Path) -> None:
    """Write a text file that acts as a symbolic link, for stores that have no symbolic links.

    Args:
        existing_path: The target of the link, which is the content of the file.
        destination_filename: The file to write.

    Raises:
        ValueError: `destination_filename` does not end in ".symlink".
    """
    destination = Path(destination_filename)
    if destination.suffix != ".symlink":
        raise ValueError(f"`destination_filename` must end in '.symlink', got {str(destination_filename)!r}.")
    destination.write_text(existing_path, encoding="utf-8")


def map_collection(collection: Any, map_fn: Callable[[Any], Any]) -> Any:
    """Apply a function to each element of a tuple or list, each value of a dict, or a single value.

    Args:
        collection: The collection; nested collections are not entered.
        map_fn: The function.

    Returns:
        The results in a collection of the same type; None for None.

    Example:
        >>> map_collection({"a": 1, "b": 2}, lambda x: 10 * x)
        {'a': 10, 'b': 20}
    """
    if collection is None:
        return None
    if isinstance(collection, (tuple, list)):
        mapped = [map_fn(element) for element in collection]
        make = getattr(type(collection), "_make", type(collection))  # a namedtuple takes its fields one by one
        return make(mapped)
    if isinstance(collection, dict):
        return {key: map_fn(value) for key, value in collection.items()}
    return map_fn(collection)


class IteratorFileStream(io.RawIOBase):
    """A readable raw stream over an iterable of byte chunks, such as the body of a download.

    Args:
        iterator: The chunks, of any length each.

    Example:
        >>> IteratorFileStream([b"ab", b"cde"]).read(4)
        b'abcd'
    """

    def __init__(self, iterator: Iterable[bytes]) -> None:
        self._chunks = iter(iterator)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        """Fill `buffer` with the next bytes; return the number of bytes written, 0 at the end."""
        target = memoryview(buffer).cast("B")
        filled = 0
        while filled < len(target):
            if not self._rest:
                chunk = next(self._chunks, None)
                if chunk is None:
                    break
                self._rest = memoryview(chunk)
                continue
            step = min(len(self._rest), len(target) - filled)
            target[filled : filled + step] = self._rest[:step]
            self._rest = self._rest[step:]
            filled += step
        return filled


def iterate_with_callback(
    iterator: Iterable[bytes], total_len: int, callback: Callable[[int, int], None] | None = None
) -> Iterator[bytes]:
    """Yield the chunks of an iterator, and report the number of bytes after each.

    Args:
        iterator: The chunks.
        total_len: The expected number of bytes, passed to `callback`.
        callback: Called with `(bytes_done, total_len)`: once with 0 bytes at the start, then after each chunk.

    Yields:
        The chunks, unchanged.
    """
    done = 0
    if callback is not None:
        callback(done, total_len)
    for chunk in iterator:
        done += len(chunk)
        yield chunk
        if callback is not None:
            callback(done, total_len)


def warning_on_one_line(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> str:
    r"""Format a warning without the source line; a replacement for `warnings.formatwarning`.

    Example:
        >>> warning_on_one_line("Slow.", UserWarning, "train.py", 3)
        'UserWarning: Slow. (source: train.py:3)\n'
    """
    return f"{category.__name__}: {message} (source: {filename}:{lineno})\n"
