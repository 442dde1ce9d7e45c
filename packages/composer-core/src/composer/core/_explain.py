"""The compiled plan in words: who acts at which event, in which order, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from composer.core.event import Event

__all__ = ["Plan", "PlanRow"]


@dataclass(frozen=True)
class PlanRow:
    """One act of a plan.

    Attributes:
        event: The event.
        order: The position at the event, from 1.
        kind: `"algorithm"`, `"callback"` or `"logger"`.
        name: The class.
        reason: Why it stands there.
    """

    event: Event
    order: int
    kind: str
    name: str
    reason: str


class Plan(Sequence[PlanRow]):
    """What `engine.explain()` returns: the rows of the plan; prints as a table.

    Args:
        rows: In the order of events, then of acting.
    """

    def __init__(self, rows: Sequence[PlanRow]) -> None:
        self.rows = tuple(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self.rows[index]

    def __iter__(self) -> Iterator[PlanRow]:
        return iter(self.rows)

    def at(self, event: Event | str) -> list[PlanRow]:
        """The rows of one event, in order."""
        event = Event(event)
        return [row for row in self.rows if row.event is event]

    def __str__(self) -> str:
        if not self.rows:
            return "No algorithm or callback acts at any event."
        header = ("event", "order", "kind", "name", "why here")
        table = [header]
        previous = None
        for row in self.rows:
            event = "" if row.event is previous else row.event.value
            table.append((event, str(row.order), row.kind, row.name, row.reason))
            previous = row.event
        widths = [max(len(line[column]) for line in table) for column in range(len(header))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__
