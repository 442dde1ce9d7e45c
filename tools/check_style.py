"""Check what ruff does not: text is ASCII."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.workspace import ROOT

_CHECKED = {".cfg", ".in", ".json", ".md", ".py", ".pyi", ".sh", ".toml", ".txt", ".yaml", ".yml"}


def problems(root: Path, paths: list[str]) -> Iterator[str]:
    """What is wrong with the files, one sentence each."""
    for path in paths:
        file = root / path
        if file.suffix not in _CHECKED or not file.is_file():
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            if not line.isascii():
                strange = next(letter for letter in line if not letter.isascii())
                yield f"{path}:{number}: text must be ASCII, got {strange!a}. Write it in other letters."


def main() -> None:
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    run = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True)
    found = list(problems(ROOT, sorted(filter(None, run.stdout.split("\0")))))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
