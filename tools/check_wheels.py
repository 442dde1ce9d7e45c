"""Build every package and check the files and metadata of its wheel. `check_installed` checks installed packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

from tools import wheelhouse
from tools.environment import freeze, share_bytecode
from tools.wheelhouse import Wheel
from tools.workspace import PREFIX, Package, Workspace, find_uv

CORE = "composer-core"
# Directories that several distributions fill; core alone owns their `__init__.py`.
SHARED = {
    PurePosixPath("composer", *parts)
    for parts in (
        *((), ("algorithms",), ("callbacks",), ("core",), ("datasets",), ("devices",)),
        *(("hosts",), ("loggers",), ("loss",), ("models",), ("utils",)),
    )
}


def build(workspace: Workspace, out: Path, names: Iterable[str] | None = None, epoch: int | None = None) -> list[Path]:
    """Build the sdist of packages, and from it the wheel, into the emptied directory `out`. Return the wheels.

    Args:
        workspace: The packages.
        out: The directory.
        names: Those to build; None: all.
        epoch: See `wheelhouse.build`.
    """
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)

    def build_one(package: Package) -> Path:
        return wheelhouse.build(package.path, out / package.name, epoch=epoch)

    find_uv()
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(build_one, map(workspace.__getitem__, workspace.names if names is None else names)))


def check(workspace: Workspace, paths: Iterable[Path]) -> None:
    """Check the wheels of all packages.

    Raises:
        RuntimeError: The message lists all problems.
    """
    wheels = [Wheel.read(path) for path in paths]
    problems = [*owner_problems(wheels), *entry_point_problems(workspace)]
    for wheel in wheels:
        problems += [f"{wheel.name}: {problem}" for problem in wheel_problems(workspace[wheel.name], wheel)]
    if problems:
        raise RuntimeError("the wheels cannot be released:\n  " + "\n  ".join(problems))


def owner_problems(wheels: Sequence[Wheel]) -> Iterator[str]:
    """Yield the paths that two wheels hold: installers overwrite one silently, and uninstalling either deletes it."""
    owners: dict[PurePosixPath, str] = {}
    for wheel in wheels:
        for file in wheel.code:
            other = owners.setdefault(file, wheel.name)
            if other != wheel.name:
                yield f"`{file}` must have one owner, got `{other}` and `{wheel.name}`. Remove it from one of the two."


def entry_point_problems(workspace: Workspace) -> Iterator[str]:
    """Yield the names that two packages register in one group."""
    owners: dict[tuple[str, str], str] = {}
    for package in workspace.packages.values():
        for group, points in (*package.entry_points.items(), ("console_scripts", package.scripts)):
            for name in points:
                other = owners.setdefault((group, name), package.name)
                if other != package.name:
                    yield f"`{name}` of `{group}` must have one owner, got `{other}` and `{package.name}`."


def wheel_problems(package: Package, wheel: Wheel) -> Iterator[str]:
    """Yield a sentence for each problem of one wheel."""
    yield from _file_problems(wheel)
    yield from _metadata_problems(package, wheel)
    for one in wheel.requirements:
        yield from _requirement_problems(one)
    if f"## {package.version} (" not in package.news:
        yield f"CHANGELOG.md must have a section `## {package.version} (...)`, got none. Add it."


def _file_problems(wheel: Wheel) -> Iterator[str]:
    directories = set()
    for file in wheel.code:
        directories.add(file.parent)
        if file.parts[0] != "composer":
            yield f"a wheel must hold nothing beside `composer/`, got `{file}`."
        if "tests" in file.parts:
            yield f"a wheel must hold no tests, got `{file}`."
        if wheel.name != CORE and file.name == "__init__.py" and file.parent in SHARED:
            yield f"`{file}` belongs to `{CORE}` alone. Remove it."
    for directory in sorted(directories - SHARED):
        own = directory / "__init__.py"
        if own not in wheel.files and any(file.suffix == ".py" and file.parent == directory for file in wheel.code):
            yield f"`{directory}/` must have an `__init__.py`, got none. Add it."
    # The marker holds for everything below it; editables of other packages are not below core's.
    for directory in [PurePosixPath("composer")] if wheel.name == CORE else sorted(_tops(directories)):
        if directory / "py.typed" not in wheel.files:
            yield f"`{directory}/` must have a `py.typed`, got none. Add it."


def _tops(directories: Iterable[PurePosixPath]) -> set[PurePosixPath]:
    """Return the topmost directories that belong to this wheel alone."""
    own = set(directories) - SHARED
    return {one for one in own if not own.intersection(one.parents)}


def _metadata_problems(package: Package, wheel: Wheel) -> Iterator[str]:
    metadata = wheel.metadata
    expected = {
        "Name": package.name,
        "Version": package.version,
        "License-Expression": "Apache-2.0",
        "Requires-Python": f">={Workspace(package.workspace_root).settings['pythons'][0]}",
        "Description-Content-Type": "text/markdown",
    }
    for key, value in expected.items():
        if metadata[key] != value:
            yield f"its metadata must say `{key}: {value}`, got {metadata[key]!r}."
    if not metadata["Summary"]:
        yield "`project.description` must say in one line what it is, got nothing."
    if len(str(metadata.get_payload()).strip()) < 200:
        yield "README.md must say what it is, when to use it and how, got less than 200 characters."
    if "LICENSE" not in metadata.get_all("License-File", []):
        yield "the wheel must hold the LICENSE, got none. Copy it into the package's directory."
    if not wheel.path.name.endswith("-py3-none-any.whl"):
        yield f"the wheel must be for every platform (py3-none-any), got `{wheel.path.name}`."


def _requirement_problems(requirement: Requirement) -> Iterator[str]:
    operators = {one.operator for one in requirement.specifier}
    if operators & {"==", "===", "~="}:
        yield f"`{requirement}` must not be pinned: independent packages could not be installed together."
    if ">=" not in operators:
        yield f"`{requirement}` must have a lower bound, got none. Write the lowest version that the tests pass with."
    capped = bool(operators & {"<", "<="})
    if requirement.name.startswith(PREFIX) and not capped:
        yield f"`{requirement}` must be bounded below 1, got no upper bound. Write `<1`."
    if requirement.name in ("torch", "numpy") and capped:
        yield f"`{requirement}` must have no upper bound. Ask for the capability at run time instead."


def check_footprint(paths: Iterable[Path], scratch: Path, *, constraint: str) -> None:
    """Check that composer-core and composer-mixup, installed beside torch and numpy, add no other distribution.

    Raises:
        RuntimeError: They add another distribution, or do not run there.
    """
    names = (CORE, "composer-mixup")
    wheels = [str(path) for path in paths if path.parent.name in names]
    environment = scratch / "footprint"
    shutil.rmtree(environment, ignore_errors=True)
    install = [find_uv(), "pip", "install", "--quiet", "--python", str(environment), "--constraint", constraint]
    subprocess.run([find_uv(), "venv", "--quiet", str(environment)], check=True)
    subprocess.run([*install, "torch", "numpy"], check=True)
    share_bytecode(environment, Path(".nox"))
    before = freeze(environment).keys()
    subprocess.run([*install, *wheels], check=True)
    added = freeze(environment).keys() - before
    if added != set(names):
        raise RuntimeError(f"installing {names} beside torch and numpy must only add these two, got {sorted(added)}.")
    program = "import torch\nfrom composer import functional as cf\nx, y = torch.rand(4, 3), torch.arange(4)\n"
    program += "print('mixed:', tuple(cf.mixup_batch(x, y, alpha=0.2)[0].shape), 'beside torch and numpy only')\n"
    subprocess.run([str(environment / "bin" / "python"), "-W", "error", "-c", program], check=True)
