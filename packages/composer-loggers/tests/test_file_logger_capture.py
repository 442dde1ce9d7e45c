from __future__ import annotations

import io
import os

import pytest

from composer.loggers.file_logger import Capture, LineAssembler


def test_a_forked_process_is_not_captured() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    taken: list[str] = []
    stream = io.StringIO()
    capture = Capture(stream, taken.append)
    capture._pid = -1  # as if this were the child

    stream.write("text")

    assert taken == []
    assert stream.getvalue() == "text"


def test_a_write_replaced_by_others_is_left_alone() -> None:
    taken: list[str] = []
    stream = io.StringIO()
    capture = Capture(stream, taken.append)
    captured = stream.write
    stream.write = lambda text: captured(text.upper())  # type: ignore[method-assign]
    stream.write("a")
    capture.close()
    stream.write("b")

    assert taken == ["A"]
    assert stream.getvalue() == "AB"


def test_a_write_that_was_replaced_before_is_put_back() -> None:
    stream = io.StringIO()
    before = stream.write = lambda text: 0  # type: ignore[method-assign]
    capture = Capture(stream, print)
    capture.close()
    capture.close()

    assert before is stream.write


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["a\nb", "c\n", "d"], ["a", "bc", "d"]),
        (["old\rnew\n"], ["new"]),
        (["old", "\r", "new", "\n"], ["new"]),
        (["a\r", "\nb\r\n"], ["a", "b"]),
        (["bar 1\r", "bar 2\r"], ["bar 2"]),
        (["\n\n"], ["", ""]),
        ([""], []),
    ],
)
def test_lines_are_made_from_pieces(pieces: list[str], expected: list[str]) -> None:
    taken: list[str] = []
    assembler = LineAssembler(taken.append)
    for piece in pieces:
        assembler.feed(piece)
    assembler.finish()

    assert expected == taken


def test_an_endless_progress_bar_takes_no_memory() -> None:
    assembler = LineAssembler(print)
    for i in range(1000):
        assembler.feed(f"\rstep {i}")

    assert len("step 999") == len(assembler._rest)
