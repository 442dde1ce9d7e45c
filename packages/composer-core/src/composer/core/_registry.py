"""Names that other distributions add to `composer`, looked up through entry points and never switched on by them."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from opcode import opmap
from types import FrameType, ModuleType
from typing import Any

_IMPORT_FROM = opmap["IMPORT_FROM"]
_namespace_of: Any = vars(ModuleType)["__dict__"].__get__


@cache
def points(group: str) -> Mapping[str, Any]:
    """Return the entry points of a group by name, without importing them. They are read once per process.

    Args:
        group: The entry-point group, for example `"composer.algorithms"`.

    Returns:
        A mapping from a name to its `importlib.metadata.EntryPoint`.

    Raises:
        ImportError: Two installed distributions register the same name for different objects.
    """
    from importlib.metadata import distributions  # costs 20 ms: never at `import composer`

    found: dict[str, Any] = {}
    for distribution in distributions():
        for point in distribution.entry_points:
            if point.group != group:
                continue
            other = found.setdefault(point.name, point)
            if other.value != point.value:
                owners = sorted(_owner(entry) for entry in (other, point))
                raise ImportError(
                    f"`{group}.{point.name}` is registered by both `{owners[0]}` and `{owners[1]}`. "
                    f"Uninstall one of them."
                )
    return found


def missing_error(caller: FrameType) -> type[ImportError | AttributeError]:
    """Return the error with which a module's `__getattr__` says that a name needs another distribution.

    `hasattr`, pickle and inspect expect an `AttributeError`, but `from ... import name` would replace its message.

    Args:
        caller: The frame that asked for the name.
    """
    imports = caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM
    return ModuleNotFoundError if imports else AttributeError


def load(group: str, name: str, missing: type[ImportError | AttributeError] = ModuleNotFoundError) -> Any:
    """Import the object that an entry-point group registers under a name.

    Args:
        group: The entry-point group.
        name: The name.
        missing: The error to raise if a distribution of this project registers the name, but is not installed.

    Raises:
        ImportError: `missing`, unless that is an AttributeError.
        AttributeError: No known distribution registers the name.
    """
    point = points(group).get(name)
    if point is not None:
        return point.load()
    distribution = _catalog().get(group, {}).get(name)
    if distribution is not None:
        raise missing(
            f"`{group}.{name}` is part of `{distribution}`, which is not installed. Run `pip install {distribution}`."
        )
    names = {each.lower(): each for each in (*points(group), *_catalog().get(group, {}))}
    near = get_close_matches(name.lower(), names, 1, 0.8)
    if near and not name.startswith("_"):
        raise missing(f"`{group}` has no `{name}`. Did you mean `{names[near[0]]}`?")
    installed = ", ".join(sorted(points(group))) or "none"
    raise AttributeError(
        f"`{group}` has no `{name}`: no installed package provides it. Installed names: {installed}. "
        f"Check the spelling, or install the package that provides it."
    )


class _ListedModule(ModuleType):
    """A module whose `vars` hold every installed name: programs iterate over them to find all classes."""

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        namespace: dict[str, Any] = _namespace_of(self)
        for name in set(self.__all__) - namespace.keys():
            try:
                getattr(self, name)
            except ImportError as error:  # of an optional dependency
                warnings.warn(f"`{self.__name__}.{name}` cannot be imported, so it is left out: {error}", stacklevel=2)
        return namespace

    def __dir__(self) -> list[str]:  # that of modules would read `__dict__`, and so import everything
        names: list[str] = _namespace_of(self)["__dir__"]()
        return names


def lazy_namespace(
    group: str, namespace: dict[str, Any], own: Mapping[str, str] | None = None, *, listed: bool = False
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the module-level `__getattr__` and `__dir__` of a package whose names are imported on first use.

    `__all__` lists the package's own names and everything installed, so `from ... import *` works.

    Args:
        group: The entry-point group that adds names of other distributions.
        namespace: The package's `globals()`; looked-up objects are kept there.
        own: The public names of each of the package's modules, separated by spaces.
        listed: Let `vars(package)` import and list everything installed.
    """
    package = namespace["__name__"]
    if listed:
        sys.modules[package].__class__ = _ListedModule
    module_of = {name: module for module, names in (own or {}).items() for name in names.split()}

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted({*module_of, *points(group)})
        if name in module_of:
            value = getattr(import_module(f"{package}.{module_of[name]}"), name)
        elif own and name in own:
            return import_module(f"{package}.{name}")
        elif name.startswith("_"):  # looked up by the import system, pickle and inspect
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        else:
            value = load(group, name, missing_error(sys._getframe(1)))
        namespace[name] = value
        return value

    def __dir__() -> list[str]:
        public = {name for name in namespace if name.startswith("__")}
        return sorted({*public, *module_of, *points(group)})

    return __getattr__, __dir__


def registered_names(module: str, group: str | None = None) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose former names are now in other distributions, which register them.

    Args:
        module: The name of the module.
        group: The entry-point group that adds the names; None: the name of the module.
    """

    def __getattr__(name: str) -> Any:
        if name.startswith("_"):  # looked up by the import system, pickle and inspect
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return load(group or module, name, missing_error(sys._getframe(1)))

    return __getattr__


def html_of(name: str, value: object) -> str | None:
    """Return the table of a value for notebooks; None if composer-loop, which draws it, is not installed."""
    try:
        html: str = load("composer.core.display", name)(value)
    except ImportError:
        return None
    return html


def required_on_load() -> dict[str, str]:
    """Return the distribution of each algorithm without which its saved models cannot be loaded."""
    return _catalog().get("required_on_load", {})


def _owner(point: Any) -> str:
    return str(point.dist.name) if point.dist is not None else str(point.value)


@cache
def _catalog() -> dict[str, dict[str, str]]:
    """Return `{group: {name: distribution}}` for the packages of this project.

    The group `"required_on_load"` holds the algorithms whose `Algorithm.required_on_load` is True.

    The file is generated when composer-core is built, and is used only for messages, to name the distribution.
    """
    from importlib.resources import files  # as slow as `importlib.metadata`; core may be imported from a zip file

    try:
        text = files("composer.core").joinpath("_catalog.json").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    catalog: dict[str, dict[str, str]] = json.loads(text)
    return catalog
