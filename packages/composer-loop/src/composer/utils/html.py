"""Small tables for notebooks: plain HTML without scripts, in the colors of the page, light or dark."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

_CELL = "padding:2px 12px 2px 0;text-align:left;vertical-align:top;border:0;white-space:pre-wrap"


def table(title: str, rows: Iterable[Sequence[Any]], header: Sequence[str] = ()) -> str:
    """Return a table as HTML; all text is escaped.

    Args:
        title: Shown above it.
        rows: The cells of each row; without a `header`, the first one is a heading.
        header: The headings of the columns.
    """
    lines = [_row(header, len(header))] if header else []
    lines += [_row(row, 0 if header else 1) for row in rows]
    caption = f"<caption style='text-align:left;font-weight:bold;color:inherit'>{html.escape(title)}</caption>"
    return f"<table style='border-collapse:collapse;color:inherit;font-size:90%'>{caption}{''.join(lines)}</table>"


def heat_map(title: str, values: Sequence[Sequence[float]]) -> str:
    """Return a table of numbers as HTML; the larger a number, the stronger the color behind it.

    Args:
        title: Shown above it.
        values: The numbers of each row.
    """
    finite = [value for row in values for value in row if math.isfinite(value)]
    low, high = min(finite, default=0), max(finite, default=0)
    lines = []
    for row in values:
        shares = [(value - low) / (high - low) if low < high and math.isfinite(value) else 0.0 for value in row]
        cells = [
            f"<td style='padding:2px 6px;text-align:right;border:0;background:rgba(43,102,196,{0.7 * share:.2f})'>"
            f"{value:.4g}</td>"
            for value, share in zip(row, shares, strict=True)
        ]
        lines.append(f"<tr style='background:none'>{''.join(cells)}</tr>")
    caption = f"<caption style='text-align:left;font-weight:bold;color:inherit'>{html.escape(title)}</caption>"
    return f"<table style='border-collapse:collapse;color:inherit;font-size:90%'>{caption}{''.join(lines)}</table>"


def details(summary: str, content: str) -> str:
    """Return HTML that is shown when its summary is clicked.

    Args:
        summary: The text of the summary.
        content: The HTML.
    """
    return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


def _row(cells: Sequence[Any], headings: int) -> str:
    tags = ["th" if index < headings else "td" for index in range(len(cells))]
    texts = [html.escape(str(cell)) for cell in cells]
    made = "".join(f"<{tag} style='{_CELL}'>{text}</{tag}>" for tag, text in zip(tags, texts, strict=True))
    return f"<tr style='background:none'>{made}</tr>"
