"""Links in text files, collections, and streams of bytes."""

from __future__ import annotations

import io
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composer.utils.file_helpers import create_symlink_file
from composer.utils.iter_helpers import IteratorFileStream, iterate_with_callback, map_collection

Pair = namedtuple("Pair", ["x", "y"])


def test_a_symlink_file_holds_its_target(tmp_path: Path) -> None:
    create_symlink_file("ep1/rank0.pt", str(tmp_path / "latest.symlink"))

    assert "ep1/rank0.pt" == (tmp_path / "latest.symlink").read_text()


def test_a_symlink_file_must_be_named_as_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in '.symlink', got '.*latest.pt'"):
        create_symlink_file("ep1", tmp_path / "latest.pt")
    assert [] == list(tmp_path.iterdir())


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
