"""Names whose package is not installed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import composer
from composer.core import _registry

CORE = Path(_registry.__file__).parents[1]  # the folder with core's part of `composer`
# A module, a name that it takes from another package, and that package.
NAMES = [
    ("composer.functional", "apply_blurpool", "composer-blurpool"),
    ("composer.algorithms", "MixUp", "composer-mixup"),
    ("composer.callbacks", "EarlyStopper", "composer-callbacks"),
    ("composer.utils", "ObjectStore", "composer-checkpoint"),
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
    monkeypatch.setattr(_registry, "import_module", refuse)
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


def test_core_in_a_zip_file_names_the_package_of_a_missing_name(tmp_path: Path) -> None:
    archive = tmp_path / "core.whl"
    with zipfile.ZipFile(archive, "w") as file:
        for path in CORE.rglob("*"):
            if path.suffix in {".py", ".json"}:
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

    assert run.stderr.splitlines()[-1] == (
        "AttributeError: `composer.functional.apply_blurpool` is part of `composer-blurpool`, which is not installed. "
        "Run `pip install composer-blurpool`."
    )
