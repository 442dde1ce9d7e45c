"""The pictures of the READMEs. `python -m tools.pictures` draws them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.workspace import Package, Workspace

PACKAGES = list(Workspace().packages.values())
PICTURES = [picture for package in PACKAGES for picture in sorted(package.path.glob("images/*"))]
KILOBYTE = 1024


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_the_pictures_of_a_readme_exist(package: Package) -> None:
    text = (package.path / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"!\[[^\]]+\]\((images/[^)]+)\)", text)

    assert [] == [link for link in links if not (package.path / link).is_file()]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_pictures_are_small(picture: Path) -> None:
    assert picture.stat().st_size < 60 * KILOBYTE


@pytest.mark.parametrize("picture", [each for each in PICTURES if each.suffix == ".svg"], ids=lambda each: each.name)
def test_a_chart_follows_a_dark_page(picture: Path) -> None:
    assert "@media (prefers-color-scheme: dark)" in picture.read_text(encoding="utf-8")
