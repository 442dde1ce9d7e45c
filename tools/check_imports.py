"""Check the imports of the installed packages of this repository.

- Each package declares every sibling that it imports, and what importing its modules needs besides; what is imported
  inside functions may be optional. It declares nothing else. Exceptions have a reason in `[tool.composer.exceptions]`
  of its pyproject.toml.
- No package imports a private module or name (with a leading underscore) of a sibling, not even for type checkers.
- The modules of a package do not import each other in a circle, not even inside functions.

Runs where all packages are installed from wheels. Imports for type checkers and names of modules in strings do not
count as circles, nor as something to declare.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from packaging.utils import canonicalize_name

from tools import derived
from tools.workspace import Workspace

_MODULE_NAME = re.compile(r"[a-zA-Z]\w*(\.\w+)*(:\w+)?")


class Module(NamedTuple):
    """A module of an installed distribution."""

    distribution: str
    source: str
    is_package: bool = False


class Import(NamedTuple):
    """An imported module, or a name of a module.

    Attributes:
        target: The dotted name: `composer.core.time` or `composer.core.time.Time`.
        line: The line of the import.
        runs: Whether it is executed: False for imports for type checkers and for names of modules in strings.
        needed: Whether importing the module executes it, outside of `try`.
    """

    target: str
    line: int
    runs: bool
    needed: bool


def installed_modules(workspace: Workspace) -> dict[str, Module]:
    """Read the modules that the distributions of the workspace have installed, by dotted name."""
    modules = {}
    for name in workspace.names:
        for file in distribution(name).files or ():
            path = PurePosixPath(file)
            if path.suffix == ".py" and path.parts[0] == "composer":
                parts = path.with_suffix("").parts
                is_package = parts[-1] == "__init__"
                source = Path(str(file.locate())).read_text(encoding="utf-8")
                modules[".".join(parts[:-1] if is_package else parts)] = Module(name, source, is_package)
    return modules


def undeclared(workspace: Workspace, modules: Mapping[str, Module], providers: Mapping[str, list[str]]) -> list[str]:
    """Return a sentence for each import of another distribution that the importing package must declare.

    Args:
        workspace: The packages with their declared dependencies.
        modules: The modules by dotted name.
        providers: The distributions of each top-level module, by `importlib.metadata.packages_distributions`.
    """
    catalog = derived.catalog(workspace)
    problems: list[str] = []
    for importer, module in sorted(modules.items()):
        package = workspace[module.distribution]
        requirements = package.dependencies + package.extras  # with an extra come the modules that need it
        declared = {package.name, *package.exceptions, *(canonicalize_name(each.name) for each in requirements)}
        for found in imports(importer, module):
            owners = _owners(found.target, modules, catalog, providers)
            must_be = found.runs if found.target.startswith("composer.") else found.needed
            if must_be and owners and not owners & declared:
                problems.append(
                    f"{package.name}: `{importer}` imports `{found.target}` of {_listed(owners)}, which is not"
                    " declared. Declare it, or remove the import."
                )
    return problems


def unused(workspace: Workspace, modules: Mapping[str, Module], providers: Mapping[str, list[str]]) -> list[str]:
    """Return a sentence for each dependency that a package declares, but neither imports nor gives a reason for.

    Args:
        workspace: The packages with their declared dependencies.
        modules: The modules by dotted name.
        providers: See `undeclared`.
    """
    catalog = derived.catalog(workspace)
    used: dict[str, set[str]] = {}
    for importer, module in modules.items():
        own = used.setdefault(module.distribution, set())
        for found in imports(importer, module):
            own |= _owners(found.target, modules, catalog, providers)
    problems = []
    for name, imported in sorted(used.items()):
        package = workspace[name]
        for requirement in package.dependencies:
            declared = canonicalize_name(requirement.name)
            if declared not in {derived.CORE, *imported, *package.exceptions}:  # core has the namespace
                problems.append(
                    f"{name}: `{requirement}` is declared, but not imported. Remove it, move it to the dependency group"
                    " `test`, or say in `[tool.composer.exceptions]` what needs it."
                )
    return problems


def _owners(
    target: str,
    modules: Mapping[str, Module],
    catalog: Mapping[str, Mapping[str, str]],
    providers: Mapping[str, list[str]],
) -> set[str]:
    """Return the distributions that provide a module or a name of it; none for the standard library."""
    target = target.replace(":", ".")
    group, _, name = target.rpartition(".")
    if name in catalog.get(group, {}):
        return {catalog[group][name]}
    module = _module_of(target, modules)
    found = [modules[module].distribution] if module else providers.get(target.partition(".")[0], [])
    return set(map(canonicalize_name, found))


def private_imports(modules: Mapping[str, Module]) -> list[str]:
    """Return a sentence for each import of a private module or name of another distribution.

    Args:
        modules: The modules by dotted name.
    """
    problems: list[str] = []
    for importer, module in sorted(modules.items()):
        for found in imports(importer, module):
            name = _private_part(found.target)
            if name is None:
                continue
            provider = modules.get(_module_of(name, modules) or "")
            if provider is None or provider.distribution == module.distribution:
                continue
            problem = (
                f"{module.distribution}: `{importer}`, line {found.line}, imports `{name}`, which is private to"
                f" `{provider.distribution}`. Use its public interface, or extend that."
            )
            if problem not in problems:  # once for `from composer.x._y import a, b`
                problems.append(problem)
    return problems


def circles(modules: Mapping[str, Module]) -> list[str]:
    """Return a sentence for each circle of imports between modules of one distribution.

    Imports inside functions count; imports for type checkers do not.

    Args:
        modules: The modules by dotted name.
    """
    graph: dict[str, set[str]] = {}
    for importer, module in modules.items():
        targets = {_module_of(i.target, modules) for i in imports(importer, module) if i.runs}
        graph[importer] = {t for t in targets if t and t != importer and modules[t].distribution == module.distribution}
    components = [component for component in _strong_components(graph) if len(component) > 1]
    return sorted(
        f"{modules[min(component)].distribution}: these modules import each other in a circle: "
        + "; ".join(f"`{name}` imports {_listed(graph[name] & component)}" for name in sorted(component))
        + ". Move what they share into a module that imports none of them."
        for component in components
    )


@cache
def imports(name: str, module: Module) -> tuple[Import, ...]:
    """Return the imports of a module, also those inside functions, and names of modules in strings.

    Args:
        name: The dotted name of the module.
        module: The module.
    """
    package = name if module.is_package else name.rpartition(".")[0]
    return tuple(_imports(ast.parse(module.source), package, runs=True, needed=True))


def _imports(node: ast.AST, package: str, *, runs: bool, needed: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, runs, needed)
    elif isinstance(node, ast.ImportFrom):
        parent = package.split(".")
        base = ".".join(parent[: len(parent) - node.level + 1]) if node.level else ""
        source = ".".join(part for part in (base, node.module) if part)
        for alias in node.names:
            yield Import(f"{source}.{alias.name}", node.lineno, runs, needed)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str) and _MODULE_NAME.fullmatch(node.value):  # as in `import_module("composer.x")`
            yield Import(node.value, node.lineno, runs=False, needed=False)
    elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
        for statement in node.body:
            yield from _imports(statement, package, runs=False, needed=False)
        for statement in node.orelse:
            yield from _imports(statement, package, runs=runs, needed=needed)
    else:
        needed = needed and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try))
        for child in ast.iter_child_nodes(node):
            yield from _imports(child, package, runs=runs, needed=needed)


def _private_part(target: str) -> str | None:
    """Return a dotted name up to its first private part; None if all parts are public."""
    parts = target.replace(":", ".").split(".")
    for i, part in enumerate(parts):
        if part.startswith("_") and not part.endswith("__"):
            return ".".join(parts[: i + 1])
    return None


def _module_of(target: str, modules: Mapping[str, Module]) -> str | None:
    """Return the module that a dotted name is or belongs to; None if it is in no distribution of ours."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target or None


def _strong_components(graph: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """Return the strongly connected components of a graph (Tarjan, "Depth-first search ...", 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[frozenset[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            components.append(frozenset(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def main() -> None:
    workspace = Workspace()
    modules, providers = installed_modules(workspace), packages_distributions()
    problems = undeclared(workspace, modules, providers) + unused(workspace, modules, providers)
    problems += private_imports(modules) + circles(modules)
    sys.exit("\n".join(problems) or None)


if __name__ == "__main__":
    main()
