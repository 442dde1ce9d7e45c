"""One `composer` from many distributions, installed as wheels, as editables and mixed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

from composer import algorithms
from tools import wheelhouse
from tools.environment import share_bytecode
from tools.tiny_tree import Tree
from tools.workspace import ROOT, Workspace, find_uv

# How composer-core, composer-alpha and composer-beta are installed.
KINDS = {
    "wheels": ("wheel", "wheel", "wheel"),
    "editables": ("editable", "editable", "editable"),
    "core-as-wheel": ("wheel", "editable", "wheel"),
    "core-as-editable": ("editable", "wheel", "editable"),
}

# All run in one process for each kind: starting one and importing torch takes seconds.
PROBES = {
    "lazy names": """
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
    "star import": "from composer.functional import *\nalpha_batch, beta_batch",
    "missing name": "from composer.algorithms import MixUp",
    "missing room": "from composer import Trainer",
    "unknown name": "import composer.algorithms\ncomposer.algorithms.Gamma",
    "probing": """
        import composer, composer.algorithms, composer.functional
        for module in (composer, composer.algorithms, composer.functional):
            assert not hasattr(module, "__wrapped__") and not hasattr(module, "_anything")
        assert not hasattr(composer, "Trainer") and not hasattr(composer.functional, "apply_blurpool")
        """,
}

RUN_PROBES = """
import json, sys
results = {}
for name, program in json.load(sys.stdin).items():
    try:
        exec(program, {})
        results[name] = ""
    except BaseException as error:
        results[name] = f"{type(error).__name__}: {error}"
print(json.dumps(results))
"""


def run_python(
    python: Path | str, program: str, *, stdin: str = "", path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program in another interpreter, warnings being errors."""
    environ = os.environ if path is None else {**os.environ, "PYTHONPATH": str(path)}
    command = [str(python), "-W", "error", "-c", dedent(program)]
    return subprocess.run(command, env=environ, input=stdin, check=False, capture_output=True, text=True)


@dataclass(frozen=True)
class Site:
    """An environment with torch, and packages to install there.

    `composer-alpha` and `composer-beta` each have an algorithm and a function; `composer-rival` claims the name Alpha.
    """

    python: Path
    tree: Tree

    def install(self, *arguments: str) -> None:
        command = [find_uv(), "pip", "install", "--quiet", "--python", str(self.python), *arguments]
        subprocess.run(command, check=True)

    def install_composer(self, kinds: tuple[str, str, str]) -> None:
        tiny = self.tree.root / "packages"
        places = [ROOT / "packages" / "composer-core", tiny / "composer-alpha", tiny / "composer-beta"]
        built = wheelhouse.wheels(Workspace(), ["composer-core"])
        built += wheelhouse.wheels(self.tree.workspace, ["composer-alpha", "composer-beta"])
        for kind, place, wheel in zip(kinds, places, built, strict=True):
            self.install("--no-deps", "--reinstall", *([str(wheel)] if kind == "wheel" else ["--editable", str(place)]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    folder = tmp_path_factory.mktemp("namespace")
    tree = Tree(folder / "tree")
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
    subprocess.run([find_uv(), "venv", "--quiet", "--python", sys.executable, str(folder / "env")], check=True)
    made = Site(folder / "env" / "bin" / "python", tree)
    made.install("--constraint", str(ROOT / "tools/constraints/pinned.txt"), "torch", "numpy")
    share_bytecode(folder / "env", Path(sys.prefix).parent)
    return made


@pytest.fixture(scope="module", params=KINDS.values(), ids=list(KINDS))
def results(request: pytest.FixtureRequest, site: Site) -> dict[str, str]:
    """For each probe the error it ends with, or ""."""
    site.install_composer(request.param)
    run = run_python(site.python, RUN_PROBES, stdin=json.dumps({name: dedent(code) for name, code in PROBES.items()}))
    assert run.returncode == 0, run.stderr
    found: dict[str, str] = json.loads(run.stdout)
    return found


def test_lazy_names_and_direct_paths_lead_to_the_same_objects(results: dict[str, str]) -> None:
    assert results["lazy names"] == ""


def test_a_star_import_brings_what_is_installed(results: dict[str, str]) -> None:
    assert results["star import"] == ""


def test_a_missing_name_says_which_package_has_it(results: dict[str, str]) -> None:
    assert results["missing name"] == (
        "ModuleNotFoundError: `composer.algorithms.MixUp` is part of `composer-mixup`, which is not installed. "
        "Run `pip install composer-mixup`."
    )


def test_a_missing_room_says_which_package_has_it(results: dict[str, str]) -> None:
    assert results["missing room"] == (
        "ModuleNotFoundError: `composer.Trainer` is part of `composer-trainer`, which is not installed. "
        "Run `pip install composer-trainer`."
    )


def test_a_name_that_nobody_has_says_what_is_installed(results: dict[str, str]) -> None:
    assert results["unknown name"].startswith("AttributeError: `composer.algorithms` has no `Gamma`")
    assert "Installed names: Alpha, Beta." in results["unknown name"]


def test_modules_can_be_probed_for_names(results: dict[str, str]) -> None:
    assert results["probing"] == ""


def test_two_owners_of_one_name_are_an_error_that_names_both(site: Site, tmp_path: Path) -> None:
    site.install_composer(KINDS["wheels"])
    (wheel,) = wheelhouse.wheels(site.tree.workspace, ["composer-rival"])
    site.install("--no-deps", "--target", str(tmp_path), str(wheel))

    run = run_python(site.python, "from composer.algorithms import Alpha", path=tmp_path)

    assert "ImportError: `composer.algorithms.Alpha` is registered by both `composer-alpha` and `composer-rival`" in (
        run.stderr
    )


def test_importing_composer_reads_no_entry_points_and_imports_none_of_the_heavy_libraries() -> None:
    run = run_python(
        sys.executable,
        """
        import importlib.metadata
        import sys
        import torch

        def refuse(*args, **kwargs):
            raise AssertionError("entry points were read")

        importlib.metadata.distributions = importlib.metadata.entry_points = refuse
        importlib.metadata.Distribution.discover = refuse
        import composer, composer.core, composer.algorithms, composer.functional
        print(*sorted({"torchvision", "torchmetrics", "transformers", "sklearn", "yaml"} & set(sys.modules)))
        """,
    )

    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr


def test_a_name_that_is_nearly_right_is_answered_by_the_right_one() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"has no `Mixup`\. Did you mean `MixUp`\?"):
        from composer.algorithms import Mixup  # type: ignore[attr-defined]  # noqa: F401
    assert not hasattr(algorithms, "Mixup")
