"""Change the source of packages in small ways, and list the changes that no test notices.

    python -m tools.mutants composer-core composer-trainer composer-checkpoint --count 60 --seed 0

A mutant negates a condition, drops a statement, or moves a bound by one. Mutants are drawn at random, spread evenly
over the packages, and never in docstrings, messages of errors or code for type checkers. The tests of a package run on
a copy of its source: first those of the changed module, then all others, until one fails, so they must pass without a
change. Run it in the environment of `nox -s dev`.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
        node: The number of the changed node, in the order of `ast.walk`.
        line: The line of the change.
        change: The change in words.
    """

    package: str
    file: Path
    node: int
    line: int
    change: str


def mutants(package: Package) -> Iterator[Mutant]:
    """Iterate over all mutants of a package."""
    for path in sorted(package.source.rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            for site in sites(path.read_text(encoding="utf-8")):
                yield Mutant(package.name, path.relative_to(package.source), *site)


def sites(source: str) -> Iterator[tuple[int, int, str]]:
    """Iterate over the possible changes of a module: the number of the node, its line, and the change in words.

    Example:
        >>> for site in sites("if a < b:\\n    f()"):
        ...     print(site)
        (1, 1, 'negate the condition')
        (2, 1, 'move the bound')
        (3, 2, 'drop the statement')
    """
    tree = ast.parse(source)
    untested = _untested(tree)
    for number, node in enumerate(ast.walk(tree)):
        if id(node) in untested:
            continue
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            yield number, node.lineno, "negate the condition"
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _BOUNDS:
            yield number, node.lineno, "move the bound"
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Expr, ast.AugAssign)) and not is_docstring:
            yield number, node.lineno, "drop the statement"


def _untested(tree: ast.Module) -> set[int]:
    """Return the identities of nodes that no test runs: blocks for type checkers, and arguments of exceptions."""
    untested: set[int] = set()
    for node in ast.walk(tree):
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if for_types or isinstance(node, (ast.Raise, ast.Assert)):
            untested.update(id(child) for child in ast.walk(node))
    return untested


def mutate(source: str, number: int, change: str) -> str:
    """Return a changed source.

    Args:
        source: The source of a module.
        number: The number of the node to change, of `sites`.
        change: The change in words, of `sites`.

    Example:
        >>> print(mutate("if a < b:\\n    f()", 1, "negate the condition"))
        if not a < b:
            f()
        >>> print(mutate("if a < b:\\n    f()", 3, "drop the statement"))
        if a < b:
            pass
    """
    tree = ast.parse(source)
    node = list(ast.walk(tree))[number]
    if change == "negate the condition":
        assert isinstance(node, (ast.If, ast.While, ast.IfExp))
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif change == "move the bound":
        assert isinstance(node, ast.Compare)
        node.ops[0] = _BOUNDS[type(node.ops[0])]()
    else:
        _replace(tree, node, ast.Pass())
    return ast.unparse(ast.fix_missing_locations(tree))


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
    named = sorted(tests.rglob(f"test_{mutant.file.stem.strip('_')}*.py"))
    with tempfile.TemporaryDirectory(prefix="composer-mutant-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(package.source, source, ignore=shutil.ignore_patterns("__pycache__"))
        file = source / mutant.file
        file.write_text(mutate(file.read_text(encoding="utf-8"), mutant.node, mutant.change), encoding="utf-8")
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
    parser.add_argument("--workers", type=int, default=1, help="how many are tested at once (default: 1)")
    arguments = parser.parse_args()
    workspace = Workspace()
    survivors = 0
    drawn = draw(workspace, arguments.packages, arguments.count, arguments.seed)
    pool = ThreadPoolExecutor(arguments.workers)
    for mutant, test in zip(drawn, pool.map(partial(killer, workspace), drawn), strict=True):
        survivors += test is None
        result = "SURVIVED" if test is None else f"killed by {test}"
        print(f"{mutant.package} {mutant.file}:{mutant.line}: {mutant.change}: {result}", flush=True)
    print(f"{survivors} of {arguments.count} mutants survived")


if __name__ == "__main__":
    main()
