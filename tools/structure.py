"""Measure how much source there is, and how much of it a step and a construction of the Trainer enter.

`python -m tools.structure` prints, for `packages/*/src`, the number of files, lines and lines of code, and then the
files and functions that are entered by a plain construction, by the first step and by a later step: those in which a
Python frame of ours starts, as `sys.setprofile` sees it. Comprehensions, generated code and imports do not count.
`--list` also prints the functions of each file in the order of their first call.

`python -m tools.structure --packages` prints the lines of code of each package beside those of its last release, and
names the change fragments of packages that have grown: one of them says what the growth buys. `nox -s lint` runs it.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tempfile
import tokenize
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tarfile import TarFile
from types import FrameType
from typing import Any

from tools.workspace import Workspace

_ROOT = Path(__file__).parents[1]
_IGNORED = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    """Count the lines with code: no comments, no blank lines, no docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _IGNORED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


class Entered:
    """Records the functions below `packages` that are called, in the order of their first call."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], None] = {}

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call; see `sys.setprofile`."""
        if event == "call":
            code = frame.f_code
            if "/src/composer/" in code.co_filename and not code.co_name.startswith("<"):
                file = code.co_filename.partition("/packages/")[2]
                self.functions.setdefault((file, getattr(code, "co_qualname", code.co_name)))

    def during(self, call: Callable[[], Any]) -> Any:
        """Call a function and record."""
        sys.setprofile(self.profile)
        try:
            return call()
        finally:
            sys.setprofile(None)

    def report(self, title: str, listed: bool) -> None:
        """Print the numbers and, if `listed`, the functions."""
        files: dict[str, list[str]] = {}
        for file, function in self.functions:
            files.setdefault(file, []).append(function)
        own = [file for file in files if file.startswith("composer-trainer/")]
        print(f"{title}: {len(files)} files, {len(self.functions)} functions ({len(own)} files of composer-trainer)")
        for file, functions in files.items() if listed else ():
            print(f"  {file}: {', '.join(functions)}")


def trace(listed: bool) -> None:
    """Print what a construction of a Trainer and its steps enter."""
    import torch

    from composer import Callback, Trainer
    from composer.testing import RandomClassificationDataset, SimpleModel

    step, later = Entered(), Entered()

    class Steps(Callback):
        """Traces the second batch and the fifth."""

        def batch_end(self, state: Any, logger: Any) -> None:
            recorder = {1: step, 4: later}.get(state.timestamp.batch.value)
            sys.setprofile(None if recorder is None else recorder.profile)

    with tempfile.TemporaryDirectory() as folder:

        def make() -> Trainer:
            model = SimpleModel()
            return Trainer(
                model=model,
                optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
                train_dataloader=torch.utils.data.DataLoader(RandomClassificationDataset(size=64), batch_size=4),
                max_duration="8ba",
                save_folder=folder,
                callbacks=Steps(),
                device="cpu",
            )

        make().close()  # imports
        built = Entered()
        trainer = built.during(make)
        trainer.fit()
        trainer.close()
    built.report("A construction", listed)
    step.report("A step (the second)", listed)
    later.report("A step (the fifth)", listed)


def count(files: Iterable[Path]) -> str:
    """Return the number of files, lines and lines of code."""
    sources = [file.read_text(encoding="utf-8") for file in files]
    lines = sum(source.count("\n") for source in sources)
    return f"{len(sources)} files, {lines} lines, {sum(map(code_lines, sources))} lines of code"


def growth(workspace: Workspace) -> Iterator[str]:
    """Yield the lines of code of each package, now and in its last release, and the fragments of those that grew."""
    yield f"{'lines of code':<36} {'now':>7} {'released':>9}"
    grown = []
    for package in workspace.packages.values():
        now = sum(code_lines(file.read_text(encoding="utf-8")) for file in package.source.rglob("*.py"))
        releases, before = workspace.releases(package.name), None
        if releases:
            path = package.source.relative_to(workspace.root).as_posix()
            command = ["git", "archive", f"{package.name}-v{releases[-1]}", path]
            run = subprocess.run(command, cwd=workspace.root, check=False, capture_output=True)
            before = _code_lines_of_archive(run.stdout) if run.returncode == 0 else 0  # it had no source
            if now > before and package.fragments:
                names = ", ".join(file.relative_to(workspace.root).as_posix() for file in package.fragments)
                grew = f"{package.name} grew by {now - before} lines since {releases[-1]}"
                grown.append(f"{grew}. Say what they buy: {names}")
        yield f"{package.name:<36} {now:>7} {'-' if before is None else before:>9}"
    yield from grown


def _code_lines_of_archive(content: bytes) -> int:
    with TarFile(fileobj=io.BytesIO(content)) as archive:
        files = [archive.extractfile(member) for member in archive if member.name.endswith(".py")]
        return sum(code_lines(file.read().decode()) for file in files if file is not None)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description="Measure the source, and what a step and a construction enter.")
    parser.add_argument("--list", action="store_true", help="also list the functions of each file")
    parser.add_argument("--packages", action="store_true", help="only compare each package with its last release")
    options = parser.parse_args()
    if options.packages:
        print(*growth(Workspace(Path.cwd())), sep="\n")
        return
    print(f"packages/*/src: {count(sorted(_ROOT.glob('packages/*/src/**/*.py')))}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace(options.list)


if __name__ == "__main__":
    main()
