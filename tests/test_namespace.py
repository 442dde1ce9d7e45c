"""One `composer` from many distributions, installed as wheels, as editables and mixed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tools import wheelhouse
from tools.tiny_tree import Tree
from tools.workspace import ROOT, Workspace, find_uv


def run_python(python: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in another interpreter, warnings being errors."""
    command = [str(python), "-W", "error", "-c", dedent(program)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def make_packages(root: Path) -> Tree:
    """`composer-alpha` and `composer-beta`, each with an algorithm and a function; `composer-rival` says it has Alpha."""
    tree = Tree(root)
    for name in ("alpha", "beta"):
        code = f"class {name.title()}: ...\ndef {name}_batch(batch): return batch\n"
        tree.add(
            f"composer-{name}",
            {f"algorithms/{name}/__init__.py": code, f"algorithms/{name}/py.typed": ""},
            points={
                "composer.algorithms": {name.title(): f"composer.algorithms.{name}:{name.title()}"},
                "composer.functional": {f"{name}_batch": f"composer.algorithms.{name}:{name}_batch"},
            },
        )
    tree.add(
        "composer-rival",
        {"algorithms/rival/__init__.py": "class Alpha: ...\n", "algorithms/rival/py.typed": ""},
        points={"composer.algorithms": {"Alpha": "composer.algorithms.rival:Alpha"}},
    )
    return tree


# How composer-core, composer-alpha and composer-beta are installed.
KINDS = {
    "wheels": ("wheel", "wheel", "wheel"),
    "editables": ("editable", "editable", "editable"),
    "core-as-wheel": ("wheel", "editable", "wheel"),
    "core-as-editable": ("editable", "wheel", "editable"),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with torch, composer-core, composer-alpha and composer-beta."""
    folder = tmp_path_factory.mktemp("namespace")
    tree = make_packages(folder / "tree")
    places = [ROOT / "packages" / "composer-core", *(tree.root / f"packages/composer-{n}" for n in ("alpha", "beta"))]
    (core,) = wheelhouse.wheels(Workspace(), ["composer-core"])
    built = [core, *wheelhouse.wheels(tree.workspace, ["composer-alpha", "composer-beta"])]
    python = folder / "env" / "bin" / "python"
    install = [find_uv(), "pip", "install", "--quiet", "--python", str(python)]
    subprocess.run([find_uv(), "venv", "--quiet", "--python", sys.executable, str(folder / "env")], check=True)
    constraint = ("--constraint", str(ROOT / "tools/constraints/pinned.txt"))
    subprocess.run([*install, *constraint, "torch", "numpy"], check=True)
    for kind, place, wheel in zip(request.param, places, built, strict=True):
        what = [str(wheel)] if kind == "wheel" else ["--editable", str(place)]
        subprocess.run([*install, "--no-deps", *what], check=True)
    return python


def test_lazy_names_and_direct_paths_lead_to_the_same_objects(installed: Path) -> None:
    run = run_python(
        installed,
        """
        import composer
        from composer import functional as cf
        from composer.algorithms import Alpha, Beta
        from composer.algorithms.alpha import Alpha as Direct, alpha_batch
        from composer.core import Event

        assert Alpha is Direct and Beta.__module__ == "composer.algorithms.beta"
        assert cf.alpha_batch is alpha_batch and cf.beta_batch(1) == 1
        assert composer.Event is Event
        assert {"Alpha", "Beta"} <= set(dir(composer.algorithms))
        """,
    )

    assert run.returncode == 0, run.stderr


def test_a_star_import_brings_what_is_installed(installed: Path) -> None:
    run = run_python(installed, "from composer.functional import *\nalpha_batch, beta_batch")

    assert run.returncode == 0, run.stderr


def test_a_missing_name_says_which_package_has_it(installed: Path) -> None:
    run = run_python(installed, "from composer.algorithms import MixUp")

    assert "ModuleNotFoundError: `composer.algorithms.MixUp` is part of `composer-mixup`" in run.stderr
    assert "Run `pip install composer-mixup`." in run.stderr


def test_a_missing_room_says_which_package_has_it(installed: Path) -> None:
    run = run_python(installed, "from composer import Trainer")

    assert "ModuleNotFoundError: `composer.Trainer` is part of `composer-trainer`" in run.stderr


def test_a_name_that_nobody_has_says_what_is_installed(installed: Path) -> None:
    run = run_python(installed, "import composer.algorithms\ncomposer.algorithms.Gamma")

    assert "AttributeError: `composer.algorithms` has no `Gamma`" in run.stderr
    assert "Installed names: Alpha, Beta." in run.stderr


def test_modules_can_be_probed_for_names(installed: Path) -> None:
    run = run_python(
        installed,
        """
        import composer, composer.algorithms, composer.functional
        for module in (composer, composer.algorithms, composer.functional):
            assert not hasattr(module, "__wrapped__") and not hasattr(module, "_anything")
        """,
    )

    assert run.returncode == 0, run.stderr


def test_two_owners_of_one_name_are_an_error_that_names_both(installed: Path, tmp_path: Path) -> None:
    rival = make_packages(tmp_path / "tree").workspace
    (wheel,) = wheelhouse.wheels(rival, ["composer-rival"])
    uv = [find_uv(), "pip"]
    subprocess.run([*uv, "install", "--quiet", "--python", str(installed), "--no-deps", str(wheel)], check=True)
    try:
        run = run_python(installed, "from composer.algorithms import Alpha")
    finally:
        subprocess.run([*uv, "uninstall", "--quiet", "--python", str(installed), "composer-rival"], check=True)

    assert "ImportError: `composer.algorithms.Alpha` is registered by both `composer-alpha` and `composer-rival`" in (
        run.stderr
    )


def test_importing_composer_imports_none_of_the_heavy_libraries() -> None:
    run = run_python(
        Path(sys.executable),
        """
        import sys
        import composer
        print(*sorted({"torchvision", "torchmetrics", "transformers", "sklearn", "yaml"} & set(sys.modules)))
        """,
    )

    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr


def test_importing_composer_reads_no_entry_points() -> None:
    run = run_python(
        Path(sys.executable),
        """
        import importlib.metadata
        import torch

        def refuse(*args, **kwargs):
            raise AssertionError("entry points were read")

        importlib.metadata.distributions = importlib.metadata.entry_points = refuse
        importlib.metadata.Distribution.discover = refuse
        import composer, composer.core, composer.algorithms, composer.functional
        """,
    )

    assert run.returncode == 0, run.stderr
