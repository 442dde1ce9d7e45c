"""Run the tutorials and convert them to Markdown with what they print and draw."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

__all__ = ["Rendered", "render"]

_LIMIT = 600  # seconds of one cell


@dataclass(frozen=True)
class Rendered:
    """A notebook as Markdown.

    Attributes:
        text: The page.
        pictures: Files that it shows, beside the page.
    """

    text: str
    pictures: dict[str, bytes]


def render(paths: list[Path], *, run: bool = True) -> dict[Path, Rendered]:
    """Run notebooks, each in an empty folder and two at a time, and convert them.

    Args:
        paths: The notebooks.
        run: False: convert them without outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(paths, pool.map(lambda path: _render(path, run=run), paths), strict=True))


def _render(path: Path, *, run: bool) -> Rendered:
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    if run:
        with tempfile.TemporaryDirectory() as folder:
            places = {"metadata": {"path": folder}}
            NotebookClient(notebook, timeout=_LIMIT, kernel_name="python3", resources=places).execute()
    resources: dict[str, Any] = {"unique_key": path.stem, "output_files_dir": f"{path.stem}_files"}
    exporter: Any = MarkdownExporter
    text, resources = exporter().from_notebook_node(notebook, resources)
    return Rendered(text, dict(resources.get("outputs", {})))
