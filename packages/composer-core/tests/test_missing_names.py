"""Names whose package is not installed."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import composer
from composer.core import _registry
from composer.utils import import_helpers

CORE = Path(_registry.__file__).parents[1]  # the folder with core's part of `composer`
# A module, a name that it takes from another package, and that package.
NAMES = [
    ("composer.functional", "apply_blurpool", "composer-blurpool"),
    ("composer.algorithms", "MixUp", "composer-mixup"),
    ("composer.callbacks", "EarlyStopper", "composer-callbacks"),
    ("composer.utils", "ObjectStore", "composer-compat"),
    ("composer", "Trainer", "composer-trainer"),
    ("composer", "metrics", "composer-metrics"),
]


class WithoutMetrics:
    """Makes `import composer.metrics` fail."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "composer.metrics":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture(autouse=True)
def _nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(_registry, "points", lambda group: {})
    monkeypatch.setattr(import_helpers, "import_module", refuse)
    for module, name, _ in NAMES:
        monkeypatch.delitem(vars(importlib.import_module(module)), name, raising=False)
    monkeypatch.delitem(sys.modules, "composer.metrics", raising=False)
    monkeypatch.setattr(sys, "meta_path", [WithoutMetrics, *sys.meta_path])


@pytest.mark.parametrize(("module", "name", "package"), NAMES)
def test_a_missing_name_is_an_attribute_error_that_names_its_package(module: str, name: str, package: str) -> None:
    with pytest.raises(AttributeError, match=f"`{module}.{name}` is part of .* Run `pip install {package}`"):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("module", "name", "package"), NAMES)
def test_hasattr_is_false_for_a_missing_name(module: str, name: str, package: str) -> None:
    assert not hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("module", "name", "package"), NAMES)
def test_an_import_of_a_missing_name_names_its_package(module: str, name: str, package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"`{module}.{name}` is part of .* Run `pip install {package}`"):
        exec(f"from {module} import {name} as found", {})  # noqa: S102  # the statement is what is tested


def test_an_import_of_a_missing_name_inside_a_function_names_its_package() -> None:
    with pytest.raises(ModuleNotFoundError, match="Run `pip install composer-mixup`"):
        from composer.algorithms import MixUp  # noqa: F401


def test_a_name_that_nobody_has_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = composer.Nothing  # type: ignore[attr-defined]


def error_in_a_zip_file(tmp_path: Path, *suffixes: str) -> str:
    """Return the last line that looking up a missing name prints, from a zip file with core's files of these kinds."""
    archive = tmp_path / "core.whl"
    with zipfile.ZipFile(archive, "w") as file:
        for path in CORE.rglob("*"):
            if path.suffix in suffixes:
                file.write(path, path.relative_to(CORE.parent))
    program = f"""
import importlib.metadata
importlib.metadata.distributions = list
import composer.functional
assert composer.functional.__file__.startswith({str(archive)!r})
composer.functional.apply_blurpool
"""
    environ = {**os.environ, "PYTHONPATH": str(archive)}
    run = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)

    return run.stderr.splitlines()[-1]


def test_core_in_a_zip_file_names_the_package_of_a_missing_name(tmp_path: Path) -> None:
    assert error_in_a_zip_file(tmp_path, ".py", ".json") == (
        "AttributeError: `composer.functional.apply_blurpool` is part of `composer-blurpool`, which is not installed. "
        "Run `pip install composer-blurpool`."
    )


def test_core_without_its_generated_catalog_works_and_names_no_package(tmp_path: Path) -> None:
    assert error_in_a_zip_file(tmp_path, ".py").startswith(
        "AttributeError: `composer.functional` has no `apply_blurpool`: no installed package provides it."
    )


@pytest.mark.parametrize("other", ["mosaicml", "composer"])
def test_a_distribution_with_files_of_the_same_names_is_told_at_import(other: str, tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    for name in (
        "composer",
        f"{other}-0.32.1.dist-info",
        "composer_core-0.1.0.dist-info",
        "composer_ema-0.2.0.dist-info",
    ):
        (packages / name).mkdir(parents=True)
    shutil.copy(CORE / "__init__.py", packages / "composer")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", "import composer; composer.Time"]

    warned = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    (packages / f"{other}-0.32.1.dist-info").rmdir()
    repaired = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr

    assert f"<string>:1: RuntimeWarning: `{other}` must not be installed beside `composer-core`" in warned
    assert f"Run `pip uninstall -y {other}`, and then" in warned
    repair = warned.partition("`pip install --force-reinstall --no-deps ")[2].partition("`")[0].split()
    assert {"composer-core==0.1.0", "composer-ema==0.2.0"} <= set(repair)  # and those that are installed for the tests
    assert "" == repaired
