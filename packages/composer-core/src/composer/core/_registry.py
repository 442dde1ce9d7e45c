"""Names that other distributions add to `composer`, looked up through entry points and never switched on by them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["lazy_namespace", "load", "moved", "points", "required_on_load"]


@cache
def points(group: str) -> Mapping[str, Any]:
    """The entry points of a group by name, unimported. Read once per process.

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


def load(group: str, name: str) -> Any:
    """Import what `name` of an entry-point group stands for.

    Raises:
        ModuleNotFoundError: A distribution of this project registers the name, but is not installed. (Not an
            AttributeError: `from ... import name` would replace its message.)
        AttributeError: Nobody is known to register the name.
    """
    point = points(group).get(name)
    if point is not None:
        return point.load()
    distribution = _catalog().get(group, {}).get(name)
    if distribution is not None:
        raise ModuleNotFoundError(
            f"`{group}.{name}` is part of `{distribution}`, which is not installed. Run `pip install {distribution}`."
        )
    installed = ", ".join(sorted(points(group))) or "none"
    raise AttributeError(
        f"`{group}` has no `{name}`: no installed package provides it. Installed names: {installed}. "
        f"Check the spelling, or install the package that provides it."
    )


def lazy_namespace(group: str, namespace: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The module-level `__getattr__` and `__dir__` of a namespace whose names come from entry points.

    `__all__` lists the module's own public names and everything installed, so `from ... import *` works.

    Args:
        group: The entry-point group that fills the namespace.
        namespace: The module's `globals()`; looked-up objects are kept there.
    """
    own = list(namespace.get("_OWN", ()))

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return sorted({*own, *points(group)})
        if name.startswith("_"):
            raise AttributeError(f"module {namespace['__name__']!r} has no attribute {name!r}")
        value = load(group, name)
        namespace[name] = value
        return value

    def __dir__() -> list[str]:
        public = {name for name in namespace if name.startswith("__")}
        return sorted({*public, *own, *points(group)})

    return __getattr__, __dir__


def moved(module: str, attribute: str, distribution: str, public: str) -> Any:
    """Import an object of a known other distribution; if that is missing, say how to install it.

    Args:
        module: The module that defines the object.
        attribute: The object's name there, or "" for the module itself.
        distribution: The distribution that ships `module`.
        public: The public name the user asked for, for the message.

    Raises:
        ModuleNotFoundError: `distribution` is not installed.
    """
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        # A missing parent package (`composer.x` for `composer.x.y`) means the same as a missing module.
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise
        raise ModuleNotFoundError(
            f"`{public}` is part of `{distribution}`, which is not installed. Run `pip install {distribution}`.",
            name=error.name,
        ) from None
    return getattr(found, attribute) if attribute else found


def required_on_load() -> dict[str, str]:
    """Which distribution of this project provides which algorithm that a saved model cannot be loaded without."""
    return _catalog().get("required_on_load", {})


def _owner(point: Any) -> str:
    return str(point.dist.name) if point.dist is not None else str(point.value)


@cache
def _catalog() -> dict[str, dict[str, str]]:
    """Which distribution of this project registers which name, by group; `"required_on_load"` holds those algorithms.

    Generated from the packages, and used for messages only.
    """
    text = Path(__file__).with_name("_catalog.json").read_text(encoding="utf-8")
    catalog: dict[str, dict[str, str]] = json.loads(text)
    return catalog
