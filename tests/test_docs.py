"""Every example in the documentation runs and prints what it says."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.readme_blocks import blocks, command_problems
from tools.workspace import ROOT, Workspace

WORKSPACE = Workspace()
READMES = [ROOT / "README.md", *(package.path / "README.md" for package in WORKSPACE.packages.values())]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def modules() -> list[str]:
    """The modules of all packages, found without importing them."""
    found = []
    for package in WORKSPACE.packages.values():
        for file in package.source.rglob("*.py"):
            if file.stem == "__main__":  # importing it would run the command
                continue
            parts = file.relative_to(package.source).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return sorted(found)


@pytest.fixture(scope="module")
def sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list}


@pytest.mark.parametrize("name", modules())
def test_the_doctests_of_a_module_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)

    failed, _ = doctest.testmod(module, optionflags=OPTIONS)

    assert failed == 0


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_readme_run_from_top_to_bottom(path: Path, sessions: set[str]) -> None:
    text = path.read_text(encoding="utf-8")

    assert list(command_problems(text, WORKSPACE, sessions)) == []
    if any(block.language == "python" for block in blocks(text)):
        command = [sys.executable, "-m", "tools.readme_blocks", str(path)]
        run = subprocess.run(
            command, cwd=ROOT, env={**os.environ, "MPLBACKEND": "agg"}, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr
