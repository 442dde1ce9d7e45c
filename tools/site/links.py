"""Check a rendered site: links lead to files and anchors, nothing is requested from elsewhere, titles differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {
    "audio": "src",
    "embed": "src",
    "iframe": "src",
    "img": "src",
    "script": "src",
    "source": "src",
    "video": "src",
}
_NOT_FOUND = "404.html"  # is shown below any address
_NOT_LOADED = {"canonical", "next", "prev", "alternate"}  # `rel` of <link> elements


@dataclass
class Checked:
    """Result of `check`.

    Attributes:
        pages: Number of pages.
        links: Number of links inside the site.
        outside: Number of links to elsewhere, which are not followed.
        problems: A sentence for each broken link and each request.
    """

    pages: int = 0
    links: int = 0
    outside: int = 0
    problems: list[str] = field(default_factory=list)


class _Page(HTMLParser):
    """The anchors, links and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.title = ""
        self._in_title = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._in_title |= tag == "title" and not self.title  # not that of a picture
        values = {name: value for name, value in attributes if value is not None}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "a" and "href" in values:
            self.links.add(values["href"])
        elif tag == "link" and "href" in values and not _NOT_LOADED & set(values.get("rel", "").split()):
            self.loaded.add(values["href"])
        elif tag in _LOADED and _LOADED[tag] in values:
            self.loaded.add(values[_LOADED[tag]])

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data

    def handle_endtag(self, tag: str) -> None:
        self._in_title &= tag != "title"


def check(folder: Path) -> Checked:
    """Check all pages of a site.

    Args:
        folder: The rendered site.
    """
    paths = [path.resolve() for path in sorted(folder.rglob("*.html"))]
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in paths}
    result = Checked(pages=len(pages))
    titles = Counter(page.title for page in pages.values())
    result.problems += [f"{number} pages have the title {title!r}." for title, number in titles.items() if number > 1]
    for path, page in pages.items():
        where = path.relative_to(folder.resolve())
        for address in sorted(page.loaded):
            if urlsplit(address).scheme in ("http", "https") or address.startswith("//"):
                result.problems.append(f"{where} loads {address} from elsewhere.")
        for address in sorted(page.links | page.loaded):
            if urlsplit(address).scheme or address.startswith("//"):
                result.outside += 1
                continue
            result.links += 1
            if str(where) == _NOT_FOUND:
                result.problems.append(f"{where} uses {address}, which leads elsewhere below another address.")
                continue
            result.problems += _broken(path, address, pages, where)
    return result


def _broken(path: Path, address: str, pages: dict[Path, _Page], where: Path) -> Iterator[str]:
    parts = urlsplit(address)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.exists():
        yield f"{where} links to {address}, which does not exist."
    elif target.is_dir():
        yield f"{where} links to {address}, which is a directory."
    elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        yield f"{where} links to {address}, but that page has no such anchor."
