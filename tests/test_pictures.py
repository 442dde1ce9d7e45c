"""The pictures of the READMEs. `python -m tools.pictures` draws them."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from composer.evidence import charts as evidence
from tools import charts
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


WHITE, SLATE = "#ffffff", "#1e2129"  # the backgrounds of the site
INVERTED = re.findall(r"invert\((.+?)\) hue-rotate\(180deg\)", evidence._DARK)
LEAST = 3  # WCAG 2.1, 1.4.11: parts of graphics


def rgb(color: str) -> np.ndarray:
    return np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255


def darkened(color: np.ndarray) -> np.ndarray:
    """Return a color as the filter of a chart shows it on a dark page, by the matrices of CSS filters."""
    amount = float(INVERTED[0])
    inverted = amount + (1 - 2 * amount) * color
    luminance = np.array([0.213, 0.715, 0.072])
    return np.clip(2 * luminance @ inverted - inverted, 0, 1)  # a hue turned by 180 degrees keeps the luminance


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    def luminance(color: np.ndarray) -> float:
        linear = np.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)
        return float(linear @ np.array([0.2126, 0.7152, 0.0722]))

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("color", [evidence.BLUE, evidence.ORANGE, evidence.GRAY, charts.DARK])
def test_the_colors_of_charts_stand_out_on_light_and_on_dark_pages(color: str) -> None:
    assert contrast(rgb(color), rgb(WHITE)) >= LEAST
    assert contrast(darkened(rgb(color)), rgb(SLATE)) >= LEAST


def test_the_colors_of_reports_stand_out_in_light_and_in_dark_mode() -> None:
    style = (files("composer.report") / "assets" / "page.css").read_text(encoding="utf-8")
    modes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    ]

    assert len(modes) == 3  # and of print
    drawn = ("ink", "soft", "good", "bad", *(f"c{slot}" for slot in range(8)))
    faint = [
        (name, mode["bg"]) for mode in modes for name in drawn if contrast(rgb(mode[name]), rgb(mode["bg"])) < LEAST
    ]
    assert faint == []
