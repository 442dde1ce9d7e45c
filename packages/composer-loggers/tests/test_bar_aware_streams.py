"""Other output on the terminal of a progress bar gets lines of its own."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from composer.core import State
from composer.loggers import Logger, LoggerDestination
from composer.loggers.progress_bar_logger import ProgressBarLogger


class Speaks(LoggerDestination):
    """Prints in parts, warns and logs after each batch, and asks something."""

    def __init__(self, log: logging.Logger) -> None:
        self.log = log

    def batch_end(self, state: State, logger: Logger) -> None:
        batch = state.timestamp.batch.value
        print("a print of batch", batch)
        print("and to stderr", batch, file=sys.stderr)
        self.log.warning("a record of batch %d", batch)
        warnings.warn(f"a warning of batch {batch}", stacklevel=1)
        sys.stdout.write("a question? ")
        sys.stdout.flush()
        sys.stdout.write("answered\n")


def screen(text: str) -> list[str]:
    """Return the lines that a terminal shows."""
    lines, column = [""], 0
    for character in text:
        if character == "\n":
            lines.append("")
            column = 0
        elif character == "\r":
            column = 0
        else:
            line = lines[-1].ljust(column)
            lines[-1] = line[:column] + character + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def attach(terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a terminal that of both standard streams, in the test itself: pytest sets them anew after fixtures."""
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: print("warning:", message, file=sys.stderr))


def test_prints_warnings_and_records_have_lines_of_their_own(
    start: Any, terminal: io.StringIO, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(terminal, monkeypatch)
    log = logging.getLogger("someone.else")
    handler = logging.StreamHandler(terminal)
    log.addHandler(handler)
    log.propagate = False
    try:
        run = start([ProgressBarLogger(), Speaks(log)], "2ep", 3, eval_every=2)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            run.fit()
            run.evaluate()
    finally:
        log.removeHandler(handler)

    lines = screen(terminal.getvalue())
    for batch in range(1, 7):
        for text in (f"a print of batch {batch}", f"and to stderr {batch}", f"a record of batch {batch}"):
            assert lines.count(text) == 1, text
        assert lines.count(f"warning: a warning of batch {batch}") == 1
    assert lines.count("a question? answered") == 6
    assert sum("train epoch" in line for line in lines) == 2
    assert sys.stdout is terminal
    assert sys.stderr is terminal
    assert handler.stream is terminal


def test_nothing_is_replaced_without_a_terminal(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stream, seen = io.StringIO(), []
    monkeypatch.setattr(sys, "stderr", stream)

    class Looks(LoggerDestination):
        def batch_end(self, state: State, logger: Logger) -> None:
            seen.append(sys.stderr is stream)

    start([ProgressBarLogger(), Looks()], "2ba", 2).fit()
    assert seen == [True, True]


def test_what_somebody_keeps_of_a_replaced_stream_goes_on_working(
    start: Any, terminal: io.StringIO, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(terminal, monkeypatch)
    kept: list[Any] = []

    class Keeps(LoggerDestination):
        def batch_end(self, state: State, logger: Logger) -> None:
            kept.append(sys.stdout)

    run = start([ProgressBarLogger(), Keeps()], "1ba", 1)
    run.fit()
    before = terminal.getvalue()
    print("later", file=kept[0])
    print("in parts", end="", file=kept[0])

    assert terminal.getvalue() == f"{before}later\nin parts"
    assert kept[0].isatty()
