"""Every example in the documentation runs and prints what it says."""

from __future__ import annotations

import ast
import doctest
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tools import docstring_blocks
from tools.readme_blocks import blocks, command_problems, install_problems, run, script
from tools.workspace import ROOT, Workspace

os.environ["MPLBACKEND"] = "agg"  # before a process imports matplotlib
WORKSPACE = Workspace()
_DOCUMENTS = ("README.md", "MIGRATING.md")
READMES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "tools" / "site" / "guides").glob("*.md")),
    *(
        package.path / name
        for package in WORKSPACE.packages.values()
        for name in _DOCUMENTS
        if (package.path / name).exists()
    ),
]
SOURCES = [
    file
    for package in WORKSPACE.packages.values()
    for file in sorted(package.source.rglob("*.py"))
    if docstring_blocks.programs(file.read_text(encoding="utf-8"))
]
_CONTRACT = """
import pytest
from {module} import {name}
from composer.testing import AlgorithmContract


class Test{name}(AlgorithmContract):
    def make(self):
        return {name}()

    @pytest.mark.xfail(reason="it is not in a package", strict=True)
    def test_the_entry_point_is_this_class(self):
        super().test_the_entry_point_is_this_class()
"""
# What every README of a method has, in this order; sections of its own come between them.
SECTIONS = [
    *("Measured", "Install", "In your own loop", "With the Trainer", "In other trainers"),
    *("Arguments", "When not to use it", "How it composes"),
]
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
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    named = {
        keyword.value.value
        for function in functions
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call)
        for keyword in decorator.keywords
        if keyword.arg == "name" and isinstance(keyword.value, ast.Constant)
    }
    return {function.name for function in functions} | named


def run_in_a_process_of_its_own(path: Path) -> str:
    """Run the code blocks of a README or a module; return the traceback of what went wrong, if anything did.

    The process is forked from one that has imported libraries, which takes longer than most examples.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo", "torchvision", "torchmetrics.classification"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(path, there))
    process.start()
    there.close()
    try:
        problem: str = here.recv()
    except EOFError:
        problem = "the process died"
    process.join()
    return problem


def _run(path: Path, pipe: Connection) -> None:
    os.chdir(ROOT)
    try:
        (docstring_blocks.run if path.suffix == ".py" else run)(path)
    except BaseException:  # `sys.exit` in an example is a failure, too
        pipe.send(traceback.format_exc())
        raise
    pipe.send("")


@pytest.mark.parametrize("name", modules())
def test_the_doctests_of_a_module_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)

    failed, _ = doctest.testmod(module, optionflags=OPTIONS)

    assert failed == 0


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_blocks_of_docstrings_run(path: Path) -> None:
    assert run_in_a_process_of_its_own(path) == ""


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_readme_installs_what_its_examples_import(path: Path) -> None:
    own = path.parent.name if path.parent.name in WORKSPACE.packages else None

    assert list(install_problems(path.read_text(encoding="utf-8"), WORKSPACE, own)) == []


def test_the_readmes_of_methods_have_their_sections_in_one_order() -> None:
    methods = [package for package in WORKSPACE.packages.values() if "composer.algorithms" in package.entry_points]
    readmes = [package.path / "README.md" for package in methods]
    for path in (*readmes, *ROOT.glob("tools/template/*/README.md")):
        headings = re.findall(r"^## (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)

        assert [heading for heading in headings if heading in SECTIONS] == SECTIONS, path


def test_the_algorithms_of_the_documents_pass_the_contract(tmp_path: Path) -> None:
    """A class of a document becomes a module with its imports, because processes of several ranks import it."""
    for number, path in enumerate(READMES):
        tree = ast.parse(script(path.read_text(encoding="utf-8")))
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names, classes = {"Algorithm"}, list[ast.ClassDef]()
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and names & {ast.unparse(base) for base in node.bases}:
                names.add(node.name)
                classes.append(node)
        if classes:
            module = f"document_{number}"
            (tmp_path / f"{module}.py").write_text("\n".join(map(ast.unparse, [*imports, *classes])))
            tests = [_CONTRACT.format(module=module, name=node.name) for node in classes]
            (tmp_path / f"test_{module}.py").write_text("".join(tests))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert 0 == result.returncode, result.stdout
    assert "document_" in "".join(file.name for file in tmp_path.iterdir())


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_examples_of_a_readme_run_from_top_to_bottom(path: Path, sessions: set[str]) -> None:
    text = path.read_text(encoding="utf-8")

    assert list(command_problems(text, WORKSPACE, sessions)) == []
    if any(block.language == "python" for block in blocks(text)):
        assert run_in_a_process_of_its_own(path) == ""
