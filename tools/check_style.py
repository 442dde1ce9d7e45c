"""Check the rules of style that ruff does not know: text is ASCII, and docstrings begin with a verb or a noun."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from tools.workspace import ROOT

_CHECKED = {".cfg", ".in", ".json", ".md", ".py", ".pyi", ".sh", ".toml", ".txt", ".yaml", ".yml"}
_FRAGMENTS = ("What ", "Whether ", "Where ", "Which ", "How ", "As in the constructor")


def problems(root: Path, paths: list[str]) -> Iterator[str]:
    """Yield a sentence for each line that is not ASCII."""
    for path in paths:
        file = root / path
        if file.suffix not in _CHECKED or not file.is_file():
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            if not line.isascii():
                character = next(letter for letter in line if not letter.isascii())
                yield f"{path}:{number}: text must be ASCII, got {character!a}. Replace it by ASCII characters."


def docstring_problems(root: Path, paths: list[str]) -> Iterator[str]:
    """Yield a sentence for each docstring that begins as a fragment."""
    for path in paths:
        file = root / path
        if PurePosixPath(path).suffix != ".py" or not file.is_file():
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = ast.get_docstring(node) or ""
            fragment = next((words for words in _FRAGMENTS if docstring.startswith(words)), None)
            if fragment is not None:
                yield (
                    f"{path}:{node.body[0].lineno}: a docstring must not begin with {fragment.strip()!r}. "
                    "Begin with a verb such as `Return`; for a class, module or property, with a noun."
                )


def main() -> None:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    run = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True)
    paths = sorted(filter(None, run.stdout.split("\0")))
    all_problems = [*problems(ROOT, paths), *docstring_problems(ROOT, paths)]
    print(*all_problems, sep="\n", end="\n" if all_problems else "")
    sys.exit(bool(all_problems))


if __name__ == "__main__":
    main()
