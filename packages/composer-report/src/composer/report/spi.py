"""Elements and the frame of a page, for packages that write pages in the same style."""

from collections.abc import Sequence
from pathlib import Path

from composer.report._charts import Charts
from composer.report._html import Html as Html
from composer.report._html import count as count
from composer.report._html import duration as duration
from composer.report._html import el as el
from composer.report._html import number as number
from composer.report._html import text as text
from composer.report._page import document

__all__ = ["Html", "count", "duration", "el", "number", "static_page", "text"]


def static_page(title: str, body: Sequence[Html], output: str | Path) -> Path:
    """Write a page without scripts, which needs no network.

    Args:
        title: Its title.
        body: Its elements.
        output: The file; missing folders are made.

    Returns:
        The path of the file.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> page = static_page("Results", [el("h1", "Results")], f"{folder}/results.html")
        >>> "<h1>Results</h1>" in page.read_text()
        True
    """
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(title, body, Charts(num_lines=0, seconds=0.0)), encoding="utf-8")
    return path
