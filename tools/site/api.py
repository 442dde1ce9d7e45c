"""The reference of public names: one page for each module of the third level, rendered by mkdocstrings.

Public are the names in `tests/public_names.txt` and in `__all__` of packages. Each is documented once, where it is
defined, whatever the number of modules that it can be imported from.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import griffe

from tools.docstring_blocks import fenced
from tools.markdown import folded, table
from tools.workspace import ROOT, Workspace

__all__ = ["PublicName", "names", "page_of_module", "pages", "public", "undescribed"]


@dataclass(frozen=True)
class PublicName:
    """An object of the public interface.

    Attributes:
        name: Its name.
        modules: The modules that list it, the shortest first.
        definition: Where it is defined, or None if not in these packages.
    """

    name: str
    modules: tuple[str, ...]
    definition: str | None

    @property
    def page(self) -> str:
        """The module of whose page it is a part."""
        home = self.definition.rpartition(".")[0] if self.definition else self.modules[0]
        if any(part.startswith("_") for part in home.split(".")):
            home = self.modules[-1]
        return ".".join(home.split(".")[:3])


def public(workspace: Workspace) -> dict[str, list[str]]:
    """Return the public names by module.

    Args:
        workspace: The packages, which must be installed.
    """
    text = (ROOT / "tests" / "public_names.txt").read_text(encoding="utf-8").replace("\n ", " ")
    found = {module: listed.split() for module, _, listed in (line.partition(":") for line in text.splitlines())}
    for package in workspace.packages.values():
        for file in package.source.rglob("*.py"):
            if file.name in ("__init__.py", "spi.py"):
                parts = file.relative_to(package.source).with_suffix("").parts
                found.setdefault(".".join(parts).removesuffix(".__init__"), [])
    for module, members in found.items():
        if not any(part.startswith("_") for part in module.split(".")):
            more = getattr(importlib.import_module(module), "__all__", ())
            members += [name for name in more if name not in members and not name.startswith("_")]
    return {module: members for module, members in sorted(found.items()) if members}


def names(modules: Mapping[str, list[str]]) -> list[PublicName]:
    """Return the objects behind public names; modules among them are left out, since they have pages of their own.

    Args:
        modules: The names by module.
    """
    found: dict[tuple[str, Any], list[str]] = defaultdict(list)
    for module, members in modules.items():
        imported = importlib.import_module(module)
        for name in members:
            value = getattr(imported, name)
            if not isinstance(value, ModuleType):
                found[name, _definition(module, name, value) or f"other:{_home(value)}"].append(module)
    result = []
    for (name, definition), places in found.items():
        places.sort(key=lambda module: (module.count("."), module))
        result.append(PublicName(name, tuple(places), None if definition.startswith("other:") else definition))
    return sorted(result, key=lambda entry: (entry.page, entry.name.lower(), entry.name))


def _home(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def _definition(module: str, name: str, value: Any) -> str | None:
    """Return the path under which the source defines a name, or None."""
    if inspect.isclass(value) or inspect.isfunction(value):
        home = value.__module__
        if _is_ours(home) and value.__qualname__ in _assigned(home):
            return f"{home}.{value.__qualname__}"
    return _traced(module, name) or _found(module, name, value)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == "composer"


def _found(module: str, name: str, value: Any) -> str | None:
    """Return where a name is defined that a module imports on first access: below the module, or elsewhere."""
    loaded = filter(_is_ours, sys.modules)
    for each in sorted(loaded, key=lambda other: (not other.startswith(f"{module}."), other)):
        if name in _assigned(each) and getattr(sys.modules[each], name, None) is value:
            return f"{each}.{name}"
    return None


def _traced(module: str, name: str) -> str | None:
    """Follow the imports of a name from module to module."""
    seen = set()
    while _is_ours(module) and (module, name) not in seen:
        seen.add((module, name))
        if name in _assigned(module):
            return f"{module}.{name}"
        if name not in _imported(module):
            return None
        module, name = _imported(module)[name]
    return None


@cache
def _tree(module: str) -> ast.Module:
    try:
        return ast.parse(inspect.getsource(importlib.import_module(module)))
    except (OSError, TypeError, ModuleNotFoundError):  # a namespace, or an empty file
        return ast.Module([], [])


def _statements(module: str) -> list[ast.stmt]:
    """Return the statements of a module, also those in its conditions."""
    result, queue = [], list(_tree(module).body)
    while queue:
        statement = queue.pop()
        result.append(statement)
        if isinstance(statement, ast.If | ast.Try):
            queue += [*statement.body, *statement.orelse]
    return result


@cache
def _assigned(module: str) -> frozenset[str]:
    found = set()
    for statement in _statements(module):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign):
            found.update(target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            found.add(statement.target.id)
    return frozenset(found)


@cache
def _imported(module: str) -> dict[str, tuple[str, str]]:
    return {
        alias.asname or alias.name: (statement.module, alias.name)
        for statement in _statements(module)
        if isinstance(statement, ast.ImportFrom) and statement.module
        for alias in statement.names
    }


def page_of_module(module: str) -> str:
    """Return the path of the page that documents a module."""
    return f"reference/{'.'.join(module.split('.')[:3])}.md"


def pages(entries: list[PublicName]) -> dict[str, str]:
    """Return the reference: `{path: Markdown}`, with an index.

    Args:
        entries: The public names.
    """
    by_page: dict[str, list[PublicName]] = defaultdict(list)
    for entry in entries:
        by_page[entry.page].append(entry)
    result = {page_of_module(page): _page(page, group) for page, group in by_page.items()}
    parts = [
        "# API reference\n",
        f"The {len(entries)} public names. Each is documented once, on the page of the module that defines it, under "
        "the shortest path that it can be imported from.\n",
    ]
    for area, modules in groupby(by_page.items(), lambda item: ".".join(item[0].split(".")[:2])):
        rows = [(f"[{page}]({page}.md)", " ".join(f"`{entry.name}`" for entry in group)) for page, group in modules]
        parts.append(folded(area, table(("module", "names"), rows)))
    result["reference/index.md"] = "\n".join(parts)
    return result


def undescribed(entries: list[PublicName]) -> list[str]:
    """Return a sentence for each name that the reference has no description for.

    Args:
        entries: The public names.
    """
    return [
        f"`{entry.modules[0]}.{entry.name}` has no description in the reference. Write a docstring for "
        f"`{entry.definition or entry.name}`; that of a constant or an alias stands below the assignment."
        for entry in entries
        if not _description(entry)
    ]


def _description(entry: PublicName) -> str:
    if entry.definition is None:
        value = getattr(importlib.import_module(entry.modules[0]), entry.name)
        return (inspect.getdoc(value) or "") if inspect.isroutine(value) else ""
    module, _, name = entry.definition.rpartition(".")
    docstring = _members(module)[name].docstring
    return docstring.value.strip() if docstring else ""


@cache
def _members(module: str) -> Mapping[str, griffe.Object | griffe.Alias]:
    file = Path(inspect.getfile(importlib.import_module(module)))
    return griffe.visit(module, filepath=file, code=file.read_text(encoding="utf-8")).members


def _page(page: str, group: list[PublicName]) -> str:
    parts = [f"# {page}\n"]
    documentation = inspect.getdoc(_module(page)) or ""
    if page.endswith(".spi"):  # for authors of packages, who need the whole story
        example = re.search(r"^Example:\n((?: {4}.*\n?|\n)+)", documentation, re.MULTILINE)
        if example:
            documentation = documentation.replace(example[0], f"## Example\n\n{textwrap.dedent(example[1])}")
        documentation = fenced(documentation)
    else:
        documentation = documentation.split("\n\n")[0]
    if documentation:
        parts.append(f"{documentation}\n")
    for entry in group:
        heading = f"{entry.modules[0]}.{entry.name}"  # the shortest import
        if entry.definition is None:
            escaped = heading.replace("_", "\\_")
            parts.append(f"## {escaped}\n\n{_described(entry)}\n")
        else:
            options = f"      heading: {heading}\n      toc_label: {entry.name}\n"
            parts.append(f"::: {entry.definition}\n    options:\n{options}")
            parts.append(_signature(entry))
    return "\n".join(parts)


def _signature(entry: PublicName) -> str:
    """Return signature and documentation of a bound method that a module assigns to a name; "" for anything else."""
    value = getattr(importlib.import_module(entry.modules[0]), entry.name)
    if not inspect.ismethod(value):
        return ""
    arguments = ",\n".join(f"    {each}" for each in _parameters(inspect.signature(value)))
    returned = inspect.signature(value).return_annotation
    text = textwrap.indent(inspect.getdoc(value) or "", "    ")
    return f"```python\n{entry.name}(\n{arguments},\n) -> {returned}\n```\n\n```text\n{textwrap.dedent(text)}\n```\n"


def _parameters(signature: inspect.Signature) -> list[str]:
    """Return the parameters as a definition has them, with the mark of those that are only keywords."""
    given = list(signature.parameters.values())
    named = next((i for i, each in enumerate(given) if each.kind is each.KEYWORD_ONLY), None)
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    texts = [
        f"{stars.get(each.kind, '')}{each.name}: {each.annotation}"
        + ("" if each.default is each.empty else f" = {each.default!r}")
        for each in given
    ]
    return texts if named is None else [*texts[:named], "*", *texts[named:]]


def _described(entry: PublicName) -> str:
    """Return what a name without a definition in the source stands for, and where else it can be imported from."""
    value = getattr(importlib.import_module(entry.modules[0]), entry.name)
    if inspect.isroutine(value):
        summary = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
        text = f"`{_home(value)}`: {summary}"
    else:
        text = f"`{value!r}`, a `{type(value).__name__}`."
    also = ", ".join(f"`{module}`" for module in entry.modules[1:])
    return f"{text} Also in {also}." if also else text


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None
