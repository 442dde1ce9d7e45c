"""HTML elements with escaped text, and numbers, times and sizes as text."""

from __future__ import annotations

import datetime
import html
import json
import math
from typing import Any

_VOID = {"input", "meta", "br", "col", "img"}


class Html(str):
    """Markup. Other strings are text and are escaped."""

    __slots__ = ()


def el(tag: str, *children: Any, **attributes: Any) -> Html:
    """Return an element.

    Args:
        tag: Its name.
        *children: Its content: `Html`, text that is escaped, None, or lists of these.
        **attributes: `class_` is `class`, `data_x` is `data-x`; None is omitted, True is an attribute without value.
    """
    written = []
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-")
        if value is True:
            written.append(f" {name}")
        elif value is not None and value is not False:
            written.append(f' {name}="{html.escape(str(value))}"')
    start = f"<{tag}{''.join(written)}>"
    return Html(start if tag in _VOID else f"{start}{text(*children)}</{tag}>")


def text(*children: Any) -> Html:
    """Return children without an element around them."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, list | tuple):
            parts.append(text(*child))
        elif child is not None:
            parts.append(html.escape(_visible(str(child))))
    return Html("".join(parts))


def broken(name: str) -> Html:
    """Return a name with possible line breaks after slashes."""
    return Html(text(name).replace("/", "/<wbr>"))


def _visible(value: str) -> str:
    """Replace characters that HTML does not allow."""
    return "".join(c if c in "\n\t" or (ord(c) >= 32 and not 0xD800 <= ord(c) <= 0xDFFF) else "?" for c in value)


def json_script(value: Any, name: str) -> Html:
    """Return a script element with this id that holds JSON."""
    content = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for letter in "<>&":
        content = content.replace(letter, f"\\u{ord(letter):04x}")
    return Html(f'<script type="application/json" id="{name}">{content}</script>')


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with some significant digits."""
    if value is None:
        return ""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    rounded = f"{value:.{digits}g}"
    if "e" in rounded and 1 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return rounded


def count(amount: int, noun: str) -> str:
    """Return a number of things in words, such as "2 batches"."""
    if amount == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{amount:,} {noun[:-1]}ies"
    return f"{amount:,} {noun}{'es' if noun.endswith(('s', 'tch', 'x')) else 's'}"


def duration(seconds: float) -> str:
    """Return a duration as text."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def size(num_bytes: int) -> str:
    """Return a number of bytes as text."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def utc(time: datetime.datetime | None) -> str:
    """Return date and time in UTC as text."""
    return "unknown" if time is None else time.strftime("%Y-%m-%d %H:%M UTC")
