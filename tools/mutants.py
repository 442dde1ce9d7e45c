"""Change the source of packages in small ways, and list the changes that no test notices.

    python -m tools.mutants composer-core composer-trainer composer-checkpoint --count 60 --seed 0

A mutant negates a condition, drops a statement, or moves a bound by one. Mutants are drawn at random, spread evenly
over the packages, and never in docstrings, messages of errors or code for type checkers. The tests of a package run on
a copy of its source: first those of the changed module, then all others, until one fails. Run it in the environment of
`nox -s dev`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.workspace import Package, Workspace

_TIMEOUT_SECONDS = 1800
_BOUNDS: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


class Mutant(NamedTuple):
    """A change of one file.

    Attributes:
        package: The name of the package.
        file: The file, relative to the package's source folder.
        line: The line of the change.
        change: The change in words.
        source: The source of the changed file.
    """

    package: str
    file: Path
    line: int
    change: str
    source: str


def mutants(package: Package) -> Iterator[Mutant]:
    """Iterate over all mutants of a package."""
    for path in sorted(package.source.rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            source = path.read_text(encoding="utf-8")
            for line, change, text in changes(source):
                yield Mutant(package.name, path.relative_to(package.source), line, change, text)


def changes(source: str) -> Iterator[tuple[int, str, str]]:
    """Iterate over the changes of a module: the line, the change in words, and the changed source.

    Example:
        >>> for line, change, text in changes("if a < b:\\n    f()"):
        ...     print(line, change, "->", text.replace("\\n", "; "))
        1 negate the condition -> if not a < b:;     f()
        1 move the bound -> if a <= b:;     f()
        2 drop the statement -> if a < b:;     pass
    """
    tree = ast.parse(source)
    for number, node in enumerate(ast.walk(tree)):
        if _is_left_alone(node, tree):
            continue
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield _changed(tree, number, "negate the condition")
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _BOUNDS:
            yield _changed(tree, number, "move the bound")
        if isinstance(node, (ast.Expr, ast.AugAssign)) and not isinstance(getattr(node, "value", None), ast.Constant):
            yield _changed(tree, number, "drop the statement")


def _is_left_alone(node: ast.AST, tree: ast.Module) -> bool:
    """Return True for code that does not run in a test: blocks for type checkers, and arguments of exceptions."""
    if not hasattr(tree, "_left_alone"):
        skipped: set[int] = set()
        for parent in ast.walk(tree):
            for_types = isinstance(parent, ast.If) and "TYPE_CHECKING" in ast.unparse(parent.test)
            if for_types or isinstance(parent, (ast.Raise, ast.Assert)):
                skipped.update(id(child) for child in ast.walk(parent))
        tree._left_alone = skipped  # type: ignore[attr-defined]
    return id(node) in tree._left_alone  # type: ignore[attr-defined]


def _changed(tree: ast.Module, number: int, change: str) -> tuple[int, str, str]:
    mutated = copy.deepcopy(tree)
    node = list(ast.walk(mutated))[number]
    line: int = node.lineno  # type: ignore[attr-defined]
    if change == "negate the condition":
        assert isinstance(node, (ast.If, ast.While, ast.IfExp))
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif change == "move the bound":
        assert isinstance(node, ast.Compare)
        node.ops[0] = _BOUNDS[type(node.ops[0])]()
    else:
        _replace(mutated, node, ast.Pass())
    return line, change, ast.unparse(ast.fix_missing_locations(mutated))


def _replace(tree: ast.Module, old: ast.AST, new: ast.stmt) -> None:
    for parent in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(parent, field, None)
            if isinstance(statements, list) and old in statements:
                statements[statements.index(old)] = new


def draw(workspace: Workspace, packages: list[str], count: int, seed: int) -> list[Mutant]:
    """Draw mutants at random, equally many of each package."""
    generator = random.Random(seed)
    drawn: list[Mutant] = []
    for index, name in enumerate(packages):
        number = count // len(packages) + (index < count % len(packages))
        drawn += generator.sample(list(mutants(workspace[name])), number)
    return drawn


def killer(workspace: Workspace, mutant: Mutant) -> str | None:
    """Return the first failing test of a mutant, or None if all tests pass."""
    package = workspace[mutant.package]
    tests = package.path / "tests"
    named = sorted(tests.rglob(f"test_*{mutant.file.stem.strip('_')}*.py"))
    with tempfile.TemporaryDirectory(prefix="composer-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(package.source, source, ignore=shutil.ignore_patterns("__pycache__"))
        (source / mutant.file).write_text(mutant.source, encoding="utf-8")
        for paths in ([named] if named else []) + [[tests]]:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *map(str, paths)]
            environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
            try:
                run = subprocess.run(
                    command,
                    cwd=workspace.root,
                    env=environment,
                    capture_output=True,
                    text=True,
                    timeout=_TIMEOUT_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return "the tests hang"
            if run.returncode:
                failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0].split(" - ")[0] if failed else "the tests do not start"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="List changes of the source that no test notices.")
    parser.add_argument("packages", nargs="+", help="names of packages")
    parser.add_argument("--count", type=int, default=60, help="how many mutants (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="the seed that draws them (default: 0)")
    arguments = parser.parse_args()
    workspace = Workspace()
    survivors = 0
    for mutant in draw(workspace, arguments.packages, arguments.count, arguments.seed):
        test = killer(workspace, mutant)
        survivors += test is None
        result = "SURVIVED" if test is None else f"killed by {test}"
        print(f"{mutant.package} {mutant.file}:{mutant.line}: {mutant.change}: {result}", flush=True)
    print(f"{survivors} of {arguments.count} mutants survived")


if __name__ == "__main__":
    main()
