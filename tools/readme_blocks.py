"""Run the code blocks of a README as a reader would: from top to bottom, in one namespace.

    python -m tools.readme_blocks packages/composer-core/README.md

`python` blocks are executed in an empty directory. `bash` blocks are not: their commands, and the sessions, packages
and scripts that they name, must exist. Other blocks are ignored.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from tools.workspace import PREFIX, ROOT, Workspace

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
_PLAIN = {"cd", "export", "git", "source"}  # commands of the shell that need no check
_SEPARATORS = {"&&", "||", ";", "|"}


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: The language that its fence names.
        line: The line of its first line of code, counted from 1.
        code: Its text.
    """

    language: str
    line: int
    code: str


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a Markdown text."""
    result = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        result.append(Block(match["language"], line, re.sub(rf"(?m)^{match['indent']}", "", match["code"])))
    return result


def script(text: str) -> str:
    """Return the `python` blocks as one program that keeps the line numbers of the text."""
    lines: list[str] = []
    for block in blocks(text):
        if block.language == "python":
            lines += [""] * (block.line - 1 - len(lines)) + block.code.splitlines()
    return "\n".join(lines) + "\n"


def command_problems(text: str, workspace: Workspace, sessions: set[str]) -> Iterator[str]:
    """Yield a sentence for each command, session or package of the `bash` blocks that does not exist.

    Args:
        text: The Markdown text.
        workspace: The packages, which know their console scripts.
        sessions: The names of the nox sessions.
    """
    scripts = {name for package in workspace.packages.values() for name in package.scripts}
    for block in blocks(text):
        if block.language not in ("bash", "console", "sh"):
            continue
        for number, line in enumerate(block.code.splitlines(), start=block.line):
            for words in _commands(line):
                problem = _problem(words, workspace, scripts, sessions)
                if problem:
                    yield f"line {number}: {problem}"


def _commands(line: str) -> Iterator[list[str]]:
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), ";"]:
        if word in _SEPARATORS:
            if words:
                yield words
            words = []
        elif words or not re.fullmatch(r"\w+=.*", word):
            words.append(word)


def _names_of_packages(words: list[str]) -> list[str]:
    return [re.split(r"[\[<>=!~;]", word)[0] for word in words if word.startswith(PREFIX)]


def _problem(words: list[str], workspace: Workspace, scripts: set[str], sessions: set[str]) -> str | None:
    command, *rest = words
    if re.fullmatch(r"python[\d.]*", command) and rest[:1] == ["-m"] and rest[1:]:
        command, *rest = rest[1:]
        if command.startswith("composer."):
            return None if _has_module(workspace, command) else f"no module named {command!r}"
    if command == "pip" or (command == "uv" and rest[:1] == ["pip"]):
        names = _names_of_packages(rest)
        unknown = [name for name in names if name not in workspace.packages]
        return f"no package named {unknown}" if unknown else None
    if command == "nox":
        names = [word for flag, word in pairwise(rest) if flag in ("-s", "--session")]
        unknown = [name for name in names if name.split("(")[0] not in sessions]
        return f"no nox session named {unknown}" if unknown else None
    if command in _PLAIN or command in scripts or (ROOT / command).is_file():
        return None
    return f"no command named {command!r}"


def install_problems(text: str, workspace: Workspace, own: str | None) -> Iterator[str]:
    """Yield a sentence for each import of a `python` block whose package no earlier `pip install` of the text names.

    Args:
        text: The Markdown text.
        workspace: The packages.
        own: The package that the text describes; None: the whole repository.
    """
    installed = {own, *workspace.siblings(own)} if own else set()
    for block in blocks(text):
        if block.language == "bash":
            for words in (words for line in block.code.splitlines() for words in _commands(line)):
                if words[:2] == ["pip", "install"]:
                    names = [name for name in _names_of_packages(words) if name in workspace.packages]
                    installed.update(names, *map(workspace.siblings, names))
        elif block.language == "python":
            for line, module, name in _imports(block):
                owners = _owners(workspace, module, name)
                if owners and not owners & installed:
                    yield f"line {line}: `{module}.{name}` needs {sorted(owners)}, which no `pip install` above names"


def _imports(block: Block) -> Iterator[tuple[int, str, str]]:
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "composer":
            for alias in node.names:
                yield block.line + node.lineno - 1, node.module, alias.name


def _owners(workspace: Workspace, module: str, name: str) -> set[str]:
    """Return the packages that register a name for a module, otherwise those that ship the module."""
    registering = {
        package.name for package in workspace.packages.values() if name in package.entry_points.get(module, {})
    }
    if registering:
        return registering
    folder = Path(*module.split("."))
    for path in (folder / name, folder / name.lower(), folder):  # `composer.Trainer` is of `composer.trainer`
        files = (path.with_suffix(".py"), path / "__init__.py")
        shipping = {p.name for p in workspace.packages.values() if any((p.source / file).is_file() for file in files)}
        if shipping:
            return shipping
    return set()


def run(path: Path) -> None:
    """Execute the `python` blocks of a README in an empty directory. Tracebacks show the lines of the README."""
    program = compile(script(path.read_text(encoding="utf-8")), str(path.resolve()), "exec")
    main_module = sys.modules["__main__"] = ModuleType(
        "__main__"
    )  # where pickle looks up the definitions of the blocks
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        try:
            exec(program, vars(main_module))  # noqa: S102 -- the examples are the repository's own
        finally:
            os.chdir(ROOT)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tools.readme_blocks README.md")
    run(Path(sys.argv[1]))


if __name__ == "__main__":
    main()


def _has_module(workspace: Workspace, name: str) -> bool:
    path = Path(*name.split("."))
    places = (path.with_suffix(".py"), path / "__main__.py")
    return any((package.source / place).is_file() for package in workspace.packages.values() for place in places)
