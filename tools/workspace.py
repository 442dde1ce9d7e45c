"""The packages of this repository, read from their pyproject.toml files.

python tools/workspace.py                          # a table
python tools/workspace.py --changed origin/main    # the packages a change can affect, one per line
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import shutil
import subprocess
import tarfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from io import BytesIO
from pathlib import Path
from tarfile import TarFile
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parent.parent
PREFIX = "composer-"  # of every distribution of this repository


@dataclass(frozen=True)
class Package:
    """Description of one distribution.

    Attributes:
        name: Its canonical name, for example `composer-mixup`.
        path: Its directory.
        version: The version in its pyproject.toml.
        description: Its description there, one line.
        requires_python: The specifier of the Pythons it supports.
        dependencies: The declared requirements; those of composer-all, which are dynamic, are all other packages.
        test_dependencies: The requirements of its tests besides pytest and hypothesis: its dependency group `test`.
        entry_points: `{group: {name: value}}`, without console scripts.
        scripts: Its console scripts, `{name: value}`.
        exceptions: Reasons by the names of dependencies that are declared, but not imported, or the other way round.
    """

    name: str
    path: Path
    version: str
    description: str
    requires_python: str
    dependencies: tuple[Requirement, ...]
    test_dependencies: tuple[Requirement, ...]
    extras: tuple[Requirement, ...]
    entry_points: Mapping[str, Mapping[str, str]]
    scripts: Mapping[str, str]
    exceptions: Mapping[str, str]

    @property
    def workspace_root(self) -> Path:
        """The root of its repository, which may be one that is checked out from a tag."""
        return self.path.parent.parent

    @property
    def source(self) -> Path:
        return self.path / "src"

    @property
    def tests(self) -> Path:
        return self.path / "tests"

    @property
    def changelog(self) -> Path:
        return self.path / "CHANGELOG.md"

    @property
    def news(self) -> str:
        """The text of its changelog, or "" without one."""
        return self.changelog.read_text(encoding="utf-8") if self.changelog.is_file() else ""

    @property
    def fragments(self) -> list[Path]:
        """The change fragments for the next release."""
        return sorted(self.path.glob("changes/*.md"))

    @classmethod
    def read(cls, path: Path) -> Package:
        """Read `path/pyproject.toml`.

        Raises:
            ValueError: A required key is missing.
        """
        data = tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))
        project: dict[str, Any] = data.get("project", {})
        if "dependencies" in project.get("dynamic", ()):
            project["dependencies"] = _bounds_of_others(path)
        for key in ("name", "version", "requires-python", "dependencies"):
            if key not in project:
                raise ValueError(f"{path / 'pyproject.toml'}: `project.{key}` is required, but missing. Add it.")
        return cls(
            name=canonicalize_name(project["name"]),
            path=path,
            version=project["version"],
            description=project.get("description", ""),
            requires_python=project["requires-python"],
            dependencies=tuple(map(Requirement, project["dependencies"])),
            extras=tuple(map(Requirement, itertools.chain(*project.get("optional-dependencies", {}).values()))),
            test_dependencies=tuple(map(Requirement, data.get("dependency-groups", {}).get("test", []))),
            entry_points=project.get("entry-points", {}),
            scripts=project.get("scripts", {}),
            exceptions=data.get("tool", {}).get("composer", {}).get("exceptions", {}),
        )


def _bounds_of_others(path: Path) -> list[str]:
    """Return a requirement for each package beside `path`: at least its present version, below the next major one."""
    others = [Package.read(file.parent) for file in sorted(path.parent.glob("*/pyproject.toml")) if file.parent != path]
    versions = [(package.name, Version(package.version)) for package in others]
    return [f"{name}>={version.major}.{version.minor},<{version.major + 1}" for name, version in versions]


@dataclass(frozen=True)
class Workspace:
    """Collection of all packages below a root directory.

    Attributes:
        root: The directory.
        index: The address below which the package index lists the files of each project; by default that of uv.
    """

    root: Path = ROOT
    index: str = field(default_factory=lambda: os.environ.get("UV_DEFAULT_INDEX", "https://pypi.org/simple"))

    @cached_property
    def packages(self) -> dict[str, Package]:
        """The packages by name, in alphabetical order."""
        paths = sorted(self.root.glob("packages/*/pyproject.toml"))
        return {package.name: package for package in (Package.read(path.parent) for path in paths)}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The table `[tool.composer]` of the top-level pyproject.toml.

        Raises:
            ValueError: A required key is missing.
        """
        path = self.root / "pyproject.toml"
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("composer", {})
        for key in ("authors", "pythons"):
            if key not in table:
                raise ValueError(f"{path}: `tool.composer.{key}` is required, but missing. Add it.")
        if not table.get("repository", "https://").startswith("https://") or table.get("repository", "").endswith("/"):
            raise ValueError(
                f"{path}: `tool.composer.repository` must be an address such as https://example.org/us/composer,"
                f" got {table['repository']!r}."
            )
        return table

    def __getitem__(self, name: str) -> Package:
        if name not in self.packages:
            alike = difflib.get_close_matches(name, self.names, 3, cutoff=0.75)
            hint = f"Did you mean {' or '.join(alike)}?" if alike else f"They are {', '.join(self.names)}."
            raise ValueError(f"`name` must be a package of this repository, got {name!r}. {hint}")
        return self.packages[name]

    @property
    def names(self) -> list[str]:
        return list(self.packages)

    def siblings(self, name: str, *, with_tests: bool = False, with_extras: bool = False) -> list[str]:
        """Return the packages of this repository that `name` depends on, directly or indirectly.

        Args:
            name: A package.
            with_tests: Include the dependencies of its own tests.
            with_extras: Include those of extras.

        Raises:
            ValueError: A dependency with the prefix of this repository is not in it.
        """
        result: set[str] = set()
        queue = [name]
        while queue:
            package = self[queue.pop()]
            requirements = package.dependencies + (package.extras if with_extras else ())
            requirements += package.test_dependencies if with_tests and package.name == name else ()
            new = {sibling for requirement in requirements if (sibling := self._own(requirement, package))} - result
            result |= new
            queue += new
        return sorted(result - {name})

    def _own(self, requirement: Requirement, package: Package) -> str | None:
        name = canonicalize_name(requirement.name)
        if name in self.packages:
            return name
        if name.startswith(PREFIX):  # never fetched from a registry, where anyone could publish it
            raise ValueError(
                f"{package.name}: a dependency named {PREFIX}* must be a package of this repository, got {name!r}."
                f" Choose from {self.names}."
            )
        return None

    def closure(self, names: Iterable[str]) -> list[str]:
        """Return `names` and all their siblings, sorted and without duplicates."""
        return sorted({member for name in names for member in (name, *self.siblings(name))})

    def alike(self) -> dict[str, list[str]]:
        """Return the packages in groups whose tests need the same other packages, those with most tests first.

        A group has the short name of its first package, and the number of the others: `mixup+2`.
        """
        groups: dict[frozenset[str], list[str]] = {}
        for name, package in self.packages.items():
            siblings = self.siblings(name, with_tests=True)
            needs = [
                *package.test_dependencies,
                *(one for each in (name, *siblings) for one in self[each].dependencies),
            ]
            groups.setdefault(frozenset([*siblings, *self.outside(needs)]), []).append(name)
        sizes = {name: sum(file.stat().st_size for file in self[name].tests.rglob("*.py")) for name in self.names}
        found = sorted(groups.values(), key=lambda names: -sum(map(sizes.__getitem__, names)))
        return {
            first.removeprefix(PREFIX) + (f"+{len(others)}" if others else ""): [first, *others]
            for first, *others in found
        }

    def in_order(self) -> list[str]:
        """Return the names so that each follows its dependencies, also those of its extras."""
        return sorted(self.packages, key=lambda name: (len(self.siblings(name, with_extras=True)), name))

    def inside(self, requirements: Iterable[Requirement]) -> list[str]:
        """Return the names of the `requirements` that are packages of this repository."""
        return sorted({canonicalize_name(one.name) for one in requirements} & self.packages.keys())

    def outside(self, requirements: Iterable[Requirement]) -> list[str]:
        """Return the `requirements` that are not packages of this repository."""
        return sorted({str(one) for one in requirements if not canonicalize_name(one.name).startswith(PREFIX)})

    def releases(self, name: str) -> list[Version]:
        """Return the released versions of a package from the git tags, lowest first.

        A tag of another package may begin in the same way: `composer-foo-viz-v0.1.0` is none of `composer-foo`. Tags
        that `nox -s release` would not have made are none.
        """
        prefix = f"{name}-v"
        run = subprocess.run(
            ["git", "tag", "--list", f"{prefix}[0-9]*"], cwd=self.root, check=True, capture_output=True, text=True
        )
        found = []
        for tag in run.stdout.split():
            with suppress(InvalidVersion):
                version = Version(tag.removeprefix(prefix))
                if f"{prefix}{version}" == tag and len(version.release) == 3 and not version.local:
                    found.append(version)
        return sorted(found)

    def published(self, name: str) -> list[Version]:
        """Return the releases of a package whose wheel and sdist the index has, lowest first.

        Raises:
            RuntimeError: The index does not answer.
        """
        address = f"{self.index.rstrip('/')}/{name}/"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                page = answer.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return []
            raise RuntimeError(f"{address} must list what is published, got {error}.") from error
        except OSError as error:
            raise RuntimeError(f"{address} must list what is published, but cannot be reached: {error}.") from error
        stems = {version: f"{name.replace('-', '_')}-{version}" for version in self.releases(name)}
        return [one for one, stem in stems.items() if f"{stem}-py3-none-any.whl" in page and f"{stem}.tar.gz" in page]

    def commit_time(self) -> int:
        """Return the time of the last commit, in seconds since 1970."""
        run = subprocess.run(
            ["git", "log", "-1", "--format=%ct"], cwd=self.root, check=True, capture_output=True, text=True
        )
        return int(run.stdout)

    def check_out(self, name: str, version: Version, directory: Path) -> Package:
        """Write the repository at a released version of a package into `directory`; return that package.

        Some packages are built from the declarations of all others, so the whole repository is needed.
        """
        run = subprocess.run(["git", "archive", f"{name}-v{version}"], cwd=self.root, check=True, capture_output=True)
        with TarFile(fileobj=BytesIO(run.stdout)) as archive:
            if hasattr(tarfile, "data_filter"):  # not in the first releases of 3.11
                archive.extractall(directory, filter="data")
            else:
                archive.extractall(directory)
        return Package.read(directory / "packages" / name)

    def changed(self, base: str) -> list[str]:
        """Return the packages that a change since `base` can affect: the changed ones and those that depend on them."""
        return self.affected(self.touched(base))

    def affected(self, touched: Iterable[str]) -> list[str]:
        """Return the packages among `touched` and those that depend on them, also only in their tests."""
        changed = set(touched)
        return [name for name in self.names if changed & {name, *self.siblings(name, with_tests=True)}]

    def paths_changed(self, base: str) -> list[str]:
        """Return the paths that differ from the commit where this branch left `base`, the working tree's included.

        Raises:
            ValueError: `base` is not a commit that this repository knows.
        """
        found: set[str] = set()
        fork = self._fork(base)
        for command in (["diff", "--name-only", "--no-renames", fork], ["ls-files", "--others", "--exclude-standard"]):
            run = subprocess.run(["git", *command, "-z"], cwd=self.root, check=True, capture_output=True, text=True)
            found.update(filter(None, run.stdout.split("\0")))
        return sorted(found)

    def text_at_fork(self, base: str, path: str) -> str:
        """Return a file's text in the commit where this branch left `base`; "" if it was not there."""
        command = ["git", "show", f"{self._fork(base)}:{path}"]
        return subprocess.run(command, cwd=self.root, check=False, capture_output=True, text=True).stdout

    def _fork(self, base: str) -> str:
        command = ["git", "merge-base", base, "HEAD"]
        run = subprocess.run(command, cwd=self.root, check=False, capture_output=True, text=True)
        if run.returncode != 0:
            raise ValueError(f"`base` must be a commit of this repository, got {base!r}: {run.stderr.strip()}")
        return run.stdout.strip()

    def touched(self, base: str) -> list[str]:
        """Return the packages whose files differ from those of the commit `base`.

        A change of shared files (the settings in the root, the tools) counts as one of all; one of documents or of the
        site counts as none.

        Raises:
            ValueError: `base` is not a commit that this repository knows.
        """
        touched: set[str] = set()
        for path in self.paths_changed(base):
            parts = Path(path).parts
            if path.endswith(".md") or path.startswith("tools/site/"):  # `docs` and `site` always run
                continue
            if parts[0] in ("pyproject.toml", "noxfile.py", "tools", ".ci", ".github"):
                return self.names
            if parts[0] == "packages" and parts[1] in self.packages:
                touched.add(parts[1])
        return sorted(touched)


@cache
def find_uv() -> str:
    """Return the path of uv: the one installed beside nox if it exists, else the one on the path.

    Call it once before starting threads: it uses `sysconfig`, whose initialization is not thread-safe.

    Raises:
        RuntimeError: uv is not installed.
    """
    try:
        from uv import find_uv_bin

        path: str | None = os.fspath(find_uv_bin())
    except (ModuleNotFoundError, FileNotFoundError):
        path = shutil.which("uv")
    if path is None:
        raise RuntimeError("`uv` is not installed. Run `python3 -m pip install uv`.")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="The packages of this repository.")
    parser.add_argument(
        "--changed", metavar="BASE", help="only the names of the packages that a change since BASE can affect"
    )
    base: str | None = parser.parse_args().changed
    workspace = Workspace()
    if base is not None:
        print(*workspace.changed(base), sep="\n")
        return
    width = max(map(len, workspace.names))
    for name, package in workspace.packages.items():
        names = sum(map(len, package.entry_points.values()))
        needs = " ".join(workspace.siblings(name)) or "-"
        print(f"{name:<{width}}  {package.version:<8}  {names:>3} names  {needs}")


if __name__ == "__main__":
    main()
