"""Namespaces whose `vars` hold what the installed packages register."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import composer.algorithms
import composer.callbacks
import composer.loggers
from composer.core import _registry


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that were imported; the module `composer.gifts` has two, a third needs what is not installed."""
    names: list[str] = []

    def load(name: str) -> Any:
        names.append(name)
        if name == "Broken":
            raise ModuleNotFoundError("No module named 'vendor'")
        return type(name, (), {})

    points = {name: SimpleNamespace(load=lambda name=name: load(name)) for name in ("Ball", "Book", "Broken")}
    monkeypatch.setattr(_registry, "points", lambda group: points if group == "composer.gifts" else {})
    module = ModuleType("composer.gifts")
    monkeypatch.setitem(sys.modules, "composer.gifts", module)
    namespace = vars(module)
    namespace["own"] = 1
    namespace["__getattr__"], namespace["__dir__"] = _registry.lazy_namespace("composer.gifts", namespace, listed=True)
    return names


def test_the_names_are_listed_without_importing_anything(imported: list[str]) -> None:
    assert {"Ball", "Book", "Broken"} <= set(dir(sys.modules["composer.gifts"]))
    assert imported == []


def test_the_variables_are_the_installed_objects(imported: list[str]) -> None:
    module = sys.modules["composer.gifts"]
    with pytest.warns(UserWarning, match=r"`composer.gifts.Broken` cannot be imported, so it is left out: No module"):
        found = {name: value for name, value in vars(module).items() if isinstance(value, type)}

    assert {"Ball", "Book"} == set(found)
    assert found["Ball"] is module.Ball
    assert 1 == module.own
    assert 1 == imported.count("Ball")


def test_a_change_of_the_variables_is_one_of_the_module(imported: list[str]) -> None:
    module: Any = sys.modules["composer.gifts"]
    module.Broken = None
    vars(module)["new"] = 2

    assert 2 == module.new


@pytest.mark.parametrize("module", [composer.algorithms, composer.callbacks, composer.loggers])
def test_the_namespaces_of_classes_are_such(module: ModuleType) -> None:
    assert isinstance(module, _registry._ListedModule)
    assert set(_registry.points(module.__name__)) <= vars(module).keys()
    assert module is importlib.reload(module)
