"""One value or many, and streams of bytes."""

from __future__ import annotations

import io
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from composer.utils import IteratorFileStream, ensure_tuple, iterate_with_callback, map_collection

Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ()),
        ("ab", ("ab",)),
        (b"ab", (b"ab",)),
        (bytearray(b"ab"), (bytearray(b"ab"),)),
        ([1, 2], (1, 2)),
        ((1, 2), (1, 2)),
        (range(2), (0, 1)),
        ({"a": 1, "b": 2}, (1, 2)),
        (5, (5,)),
        ({1}, ({1},)),
        ([], ()),
    ],
)
def test_ensure_tuple_takes_one_or_many(value: Any, expected: tuple[Any, ...]) -> None:
    assert expected == ensure_tuple(value)


def test_ensure_tuple_does_not_take_a_tensor_apart() -> None:
    tensor = torch.zeros(3)

    (element,) = ensure_tuple(tensor)

    assert element is tensor


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ((1, 2), (10, 20)),
        ([1, 2], [10, 20]),
        ({"a": 1}, {"a": 10}),
        (Pair(1, 2), Pair(10, 20)),
        (3, 30),
    ],
)
def test_map_collection_keeps_the_type(value: Any, expected: Any) -> None:
    result = map_collection(value, lambda x: 10 * x)

    assert expected == result
    assert type(expected) is type(result)


@given(st.lists(st.binary(max_size=20)), st.lists(st.integers(1, 30), max_size=20))
def test_a_stream_over_chunks_reads_like_a_file(chunks: list[bytes], sizes: list[int]) -> None:
    stream, file = IteratorFileStream(chunks), io.BytesIO(b"".join(chunks))

    for size in sizes:
        assert file.read(size) == stream.read(size)
    assert file.read() == stream.read()
    assert stream.readable()


def test_a_buffered_stream_reads_lines() -> None:
    stream = io.BufferedReader(IteratorFileStream(iter([b"a\nb", b"c\n", b"", b"d"])))

    assert [b"a\n", b"bc\n", b"d"] == list(stream)


def test_the_callback_hears_of_every_chunk() -> None:
    heard: list[tuple[int, int]] = []

    chunks = list(iterate_with_callback([b"ab", b"", b"cde"], 5, lambda done, total: heard.append((done, total))))

    assert [b"ab", b"", b"cde"] == chunks
    assert [(0, 5), (2, 5), (2, 5), (5, 5)] == heard


def test_chunks_pass_through_without_a_callback() -> None:
    assert [b"ab"] == list(iterate_with_callback([b"ab"], 2))
