"""Examples that run as they are shown: the imports that a docstring, tested inside its module, leaves out.

`Examples` is an extension of griffe, which mkdocstrings reads docstrings with.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import griffe

from tools.docstring_blocks import fenced

_IMPORTS = (ast.Import, ast.ImportFrom)


class Examples(griffe.Extension):
    """Adds missing imports, writes literal blocks as Markdown, and renames the section "Example:" to "Examples:".

    griffe takes a section of any other name for a note.

    Args:
        names: A JSON file, `{definition of a public name: module that it is imported from}`.
    """

    def __init__(self, names: str) -> None:
        super().__init__()
        self._modules: dict[str, str] = json.loads(Path(names).read_text(encoding="utf-8"))

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        obj.docstring.value = with_imports(fenced(text), lambda name: self._path(obj, name))

    def _path(self, obj: griffe.Object, name: str) -> str | None:
        member = obj.module.members.get(name)
        if member is None:
            return "torch" if name == "torch" else None
        path = member.target_path if isinstance(member, griffe.Alias) else member.path
        return f"{self._modules[path]}.{name}" if path in self._modules else path


def imports(program: str, path_of: Callable[[str], str | None]) -> list[str]:
    """Return the imports that a program lacks.

    Args:
        program: Statements.
        path_of: Returns what a name stands for, `torch` or `composer.core.Time`; None if that is unknown.
    """
    used: dict[str, None] = {}
    bound = set(dir(builtins))
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                used[node.id] = None
            else:
                bound.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    paths = {name: path_of(name) for name in used if name not in bound}
    return sorted((_import(name, path) for name, path in paths.items() if path), key=lambda line: line[0] == "f")


def with_imports(docstring: str, path_of: Callable[[str], str | None]) -> str:
    """Return a docstring with the imports that its examples lack, after those that they begin with.

    Args:
        docstring: The text.
        path_of: As of `imports`.
    """
    examples = doctest.DocTestParser().get_examples(docstring)
    missing = imports("".join(example.source for example in examples), path_of)
    if not missing:
        return docstring
    first = next(example for example in examples if not isinstance(ast.parse(example.source).body[0], _IMPORTS))
    lines = docstring.split("\n")
    lines[first.lineno : first.lineno] = [f"{' ' * first.indent}>>> {line}" for line in missing]
    return "\n".join(lines)


def _import(name: str, path: str) -> str:
    module, _, last = path.rpartition(".")
    renamed = "" if name == last else f" as {name}"
    return f"from {module} import {last}{renamed}" if module else f"import {last}{renamed}"
