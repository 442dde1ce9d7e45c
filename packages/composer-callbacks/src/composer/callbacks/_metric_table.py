"""The table of everything that callbacks log, made from what they declare.

python -m composer.callbacks._metric_table README.md            # write it between the markers
python -m composer.callbacks._metric_table README.md --check    # fail if what is written is wrong
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, distribution
from pathlib import Path

from composer.callbacks._units import Declared

__all__ = ["declared", "metric_table", "replaced"]

_BEGIN, _END = "<!-- metrics: written by composer.callbacks._metric_table -->", "<!-- end of metrics -->"


def declared(name: str = "composer-callbacks") -> Iterator[tuple[str, Declared]]:
    """The callbacks of a distribution that declare what they log, by name, with what they declare.

    Args:
        name: The distribution.
    """
    points: list[EntryPoint] = [p for p in distribution(name).entry_points if p.group == "composer.callbacks"]
    for point in sorted(points, key=lambda point: point.name):
        metrics: Declared | None = getattr(point.load(), "metrics", None)
        if metrics is not None:
            yield point.name, metrics


def metric_table() -> str:
    """The table, in Markdown."""
    lines = ["| key | unit | meaning | callback |", "|---|---|---|---|"]
    for name, metrics in declared():
        lines += [f"| `{key}` | {unit} | {meaning} | `{name}` |" for key, (unit, meaning) in metrics.items()]
    return "\n".join(lines)


def replaced(text: str) -> str:
    """A text with the table as it is now between its markers.

    Args:
        text: What has been written.

    Raises:
        ValueError: The markers are not there.
    """
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"`text` must have the lines {_BEGIN!r} and {_END!r}, between which the table goes. Add them.")
    return f"{before}{_BEGIN}\n\n{metric_table()}\n\n{_END}{after}"


def main() -> None:
    """Write or check a file."""
    parser = argparse.ArgumentParser(description="Write the table of everything that callbacks log.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the table is not up to date")
    given = parser.parse_args()
    old = given.file.read_text(encoding="utf-8")
    new = replaced(old)
    if new != old and given.check:
        sys.exit(f"The table in {given.file} is not what the callbacks declare. Run this without `--check`.")
    if new != old:
        given.file.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
