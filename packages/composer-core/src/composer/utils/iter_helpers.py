"""Utilities for single values and collections, and for streams of bytes."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

__all__ = ["IteratorFileStream", "ensure_tuple", "iterate_with_callback", "map_collection", "map_items"]


def ensure_tuple(x: Any) -> tuple[Any, ...]:
    """Return a single value or a collection as a tuple.

    Args:
        x: None, a sequence, a dict (its values are used) or a single value. Strings and bytes are single values.

    Returns:
        `()` for None, the elements of a sequence, the values of a dict, or `(x,)`.

    Example:
        >>> ensure_tuple(None), ensure_tuple("ab"), ensure_tuple([1, 2]), ensure_tuple({"a": 1})
        ((), ('ab',), (1, 2), (1,))
    """
    if x is None:
        return ()
    if isinstance(x, (str, bytes, bytearray)):
        return (x,)
    if isinstance(x, Sequence):
        return tuple(x)
    if isinstance(x, dict):
        return tuple(x.values())
    return (x,)


def map_items(mapping: dict[Any, Any], map_fn: Callable[[Any, Any], Any]) -> dict[Any, Any]:
    """Apply a function to each value of a dict; return a dict of the same class, such as `Counter`.

    Args:
        mapping: The dict; not modified.
        map_fn: A function of key and value that returns the new value.

    Example:
        >>> from collections import Counter
        >>> map_items(Counter("aab"), lambda key, count: 10 * count)
        Counter({'a': 20, 'b': 10})
    """
    if type(mapping) is dict:
        return {key: map_fn(key, value) for key, value in mapping.items()}
    copied = copy.copy(mapping)  # the constructor may take other arguments than pairs
    for key, value in mapping.items():
        copied[key] = map_fn(key, value)
    return copied


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
