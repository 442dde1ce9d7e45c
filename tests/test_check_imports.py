"""The check of imports between and within packages."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tools.check_imports import Module, circles, imports, private_imports

CORE = Module("composer-core", "")


def modules(**sources: str) -> dict[str, Module]:
    """Make modules of composer-core, and of composer-one from `sources`: `one__x` is `composer.one.x`."""
    base = {
        "composer.core": CORE._replace(is_package=True),
        "composer.core.time": CORE,
        "composer.core._table": CORE,
        "composer.core._inner.part": CORE,
    }
    made: Mapping[str, Module] = {
        f"composer.{name.replace('__', '.')}": Module("composer-one", source) for name, source in sources.items()
    }
    return base | dict(made)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import composer.core._table", "composer.core._table"),
        ("import composer.core._table as table", "composer.core._table"),
        ("from composer.core import _table", "composer.core._table"),
        ("from composer.core import Time, _registry", "composer.core._registry"),
        ("from composer.core._table import Table", "composer.core._table"),
        ("from composer.core._table import Table, Row", "composer.core._table"),
        ("from composer.core._inner.part import Part", "composer.core._inner"),
        ("from composer.core.time import _parse", "composer.core.time._parse"),
        ("def f():\n    from composer.core._table import Table", "composer.core._table"),
        ("from ..core import _table", "composer.core._table"),
        ("if TYPE_CHECKING:\n    from composer.core._table import Table", "composer.core._table"),
        ("table = load('composer.core._table')", "composer.core._table"),
    ],
)
def test_private_names_of_siblings_are_refused(source: str, name: str) -> None:
    (problem,) = private_imports(modules(one__x=source))

    assert problem.startswith(f"composer-one: `composer.one.x`, line {source.count(chr(10)) + 1}, imports `{name}`, ")
    assert "which is private to `composer-core`" in problem


@pytest.mark.parametrize(
    "source",
    [
        "from composer.core.time import Time",
        "from composer.core import __version__",
        "from composer.one import _own\nimport composer.one._own",
        "from composer.one.y import _helper",
        "from torch._C import _thing\nimport _thread",
        "text = 'see composer.core._table for more'",
    ],
)
def test_public_names_and_own_private_names_are_allowed(source: str) -> None:
    assert private_imports(modules(one__x=source, one__y="", one___own="")) == []


def test_a_private_name_in_a_folder_of_several_distributions_belongs_to_its_own() -> None:
    found = modules(core___own="", one__x="from composer.core import _own\nfrom composer.core._own import name")

    assert private_imports(found) == []


@pytest.mark.parametrize(
    "back", ["import composer.one.x", "def f():\n    from composer.one import x", "from . import x"]
)
def test_circles_are_refused(back: str) -> None:
    found = modules(one__x="from composer.one.y import name", one__y=back, one__z="import composer.one.x")
    (problem,) = circles(found)

    assert problem == (
        "composer-one: these modules import each other in a circle: `composer.one.x` imports `composer.one.y`; "
        "`composer.one.y` imports `composer.one.x`. Move what they share into a module that imports none of them."
    )


def test_a_long_circle_is_one_circle() -> None:
    sources = {f"one__m{i}": f"import composer.one.m{(i + 1) % 9}" for i in range(9)}

    assert len(circles(modules(**sources))) == 1


@pytest.mark.parametrize(
    "back",
    [
        "if TYPE_CHECKING:\n    from composer.one.x import name",
        "import typing\nif typing.TYPE_CHECKING:\n    import composer.one.x",
        "name = load('composer.one.x')",
        "from composer.core import time",
        "import composer.one.y",
    ],
)
def test_imports_for_type_checkers_and_names_in_strings_close_no_circle(back: str) -> None:
    assert circles(modules(one__x="from composer.one.y import name", one__y=back)) == []


def test_a_circle_through_another_distribution_is_not_one_of_this_check() -> None:
    found = modules(one__x="import composer.core.time")
    found["composer.core.time"] = Module("composer-core", "def f():\n    import composer.one.x")

    assert circles(found) == []


def test_a_package_resolves_relative_imports_from_itself() -> None:
    package = Module("composer-one", "from . import x\nfrom .y import name\nfrom ..two import z", is_package=True)

    assert [found.target for found in imports("composer.one", package)] == [
        "composer.one.x",
        "composer.one.y.name",
        "composer.two.z",
    ]


def test_the_else_of_type_checking_runs() -> None:
    module = Module("composer-one", "if TYPE_CHECKING:\n    import a\nelse:\n    import b")

    assert [(found.target, found.runs) for found in imports("composer.x", module)] == [("a", False), ("b", True)]
