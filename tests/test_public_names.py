"""Every public name and import path that a program may use goes on to resolve, wherever its code has moved.

`public_names.txt` lists the modules and the names in their `__all__`. From the first release on, names
are only added to it.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("public_names.txt")


def public_names() -> dict[str, list[str]]:
    """Return the listed names by module; a line that begins with a space continues the one before."""
    text = LIST.read_text(encoding="utf-8").replace("\n ", " ")
    return {module: names.split() for module, _, names in (line.partition(":") for line in text.splitlines())}


NAMES = public_names()


def test_the_list_is_read() -> None:
    assert len(NAMES) == 254
    assert NAMES["composer.trainer"] == ["Trainer"]
    assert "MixUp" in NAMES["composer.algorithms"]


@pytest.mark.parametrize("module", NAMES)
def test_every_public_name_resolves(module: str) -> None:
    imported = importlib.import_module(module)

    missing = [name for name in NAMES[module] if not hasattr(imported, name)]

    assert not missing, f"{module} had {', '.join(missing)}; keep the old name, for example by a re-export"
