"""Change Markdown texts, but not the code in them; tables, and text that is folded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

_FENCED = re.compile(r"^(?P<indent> *)```.*?^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(
    r"`[^`\n]+`|(?P<label>!?\[(?:[^\]`]|`[^`]*`)*\])\((?P<target>[^)\s]+)\)"
)  # or code, which is left alone


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Return a text whose parts outside of fenced code are changed."""
    parts, end = [], 0
    for match in _FENCED.finditer(text):
        parts += [change(text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, change(text[end:])])


def with_links(text: str, change: Callable[[str, str, str], str]) -> str:
    """Return a text in which links to files are changed. Addresses and anchors of the same page stay.

    Args:
        text: The Markdown text.
        change: Gets the label with its brackets, the path, and the anchor with its `#`, or "" without one; returns
            what takes the place of the link.
    """

    def replace(match: re.Match[str]) -> str:
        path, hash_, anchor = (match["target"] or "").partition("#")
        return match[0] if not path or ":" in path else change(match["label"], path, hash_ + anchor)

    return outside_code(text, lambda part: _LINK.sub(replace, part))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, its rows as given."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def folded(summary: str, text: str) -> str:
    """Return a Markdown text of which a page shows one line until its reader opens it."""
    return f"<details markdown>\n<summary>{summary}</summary>\n\n{text}\n</details>\n"
