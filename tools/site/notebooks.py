"""Run the tutorials and convert them to Markdown with what they print and draw."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LIMITS = ["--ExecutePreprocessor.timeout=600", "--ExecutePreprocessor.startup_timeout=300"]  # seconds of a cell

_PICTURE = re.compile(r"!\[\w+\]\((?P<file>[^)\s]+_(?P<cell>\d+)_\d+\.\w+)\)")  # as nbconvert names it


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
        RuntimeError: A cell failed; the message has its traceback.
        ValueError: A cell draws a picture and its metadata has no "alt".
    """
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(paths, pool.map(lambda path: _render(path, run=run), paths), strict=True))


def _render(path: Path, *, run: bool) -> Rendered:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as made:
        copy = shutil.copy(path, folder)  # a notebook runs in its folder
        command = [sys.executable, "-m", "nbconvert", "--to", "markdown", "--log-level", "ERROR", "--output-dir", made]
        result = subprocess.run(
            [*command, *(["--execute", *_LIMITS] if run else []), copy], capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise RuntimeError(f"{path.name} failed:\n{result.stderr}")
        output = Path(made)
        files = {str(file.relative_to(output)): file for file in sorted(output.rglob("*")) if file.is_file()}
        text = files.pop(f"{path.stem}.md").read_text(encoding="utf-8")
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = _PICTURE.sub(lambda match: _with_description(match, path.name, cells), text)
        return Rendered(text, {name: file.read_bytes() for name, file in files.items()})


def _with_description(picture: re.Match[str], notebook: str, cells: list[dict[str, Any]]) -> str:
    cell = int(picture["cell"])
    description = cells[cell]["metadata"].get("alt")
    if not description:
        raise ValueError(f'{notebook}: cell {cell} draws a picture; describe it in the cell\'s metadata, as "alt".')
    return f"![{description}]({picture['file']})"
