"""Wheels of the packages in the repository, each built once for each state of its files.

Tests run on wheels rather than on editable installs, so that a file that is missing in a wheel is missing in the tests.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import derived, metadata
from tools.workspace import PREFIX, Package, Workspace, find_uv

PINNED = Path(__file__).parent / "constraints" / "pinned.txt"  # also of the build tools: a tag builds the same later
_LEFT_OUT = {"changes", "dist", "tests"}


@dataclass(frozen=True)
class Wheel:
    """Metadata and file names of a built wheel."""

    path: Path
    metadata: Message
    files: frozenset[PurePosixPath]

    @classmethod
    def read(cls, path: Path) -> Wheel:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/")]
            (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            metadata = Parser().parsestr(archive.read(about).decode("utf-8"))
        return cls(path, metadata, frozenset(map(PurePosixPath, names)))

    @property
    def name(self) -> str:
        return canonicalize_name(str(self.metadata["Name"]))

    @property
    def code(self) -> list[PurePosixPath]:
        """All files except the metadata."""
        return sorted(file for file in self.files if not file.parts[0].endswith(".dist-info"))

    @property
    def requirements(self) -> list[Requirement]:
        """The declared requirements, including those of extras."""
        return [Requirement(line) for line in self.metadata.get_all("Requires-Dist", [])]


def wheels(workspace: Workspace, names: Iterable[str]) -> list[Path]:
    """Return the wheels of `names` and of all their siblings; build those that are not in the wheelhouse."""
    packages = [workspace[name] for name in workspace.closure(names)]
    find_uv()
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(lambda package: wheel_of(workspace, package), packages))


def oldest_wheels(workspace: Workspace, package: Package) -> list[Path]:
    """Return the wheel of `package`, and of each sibling the lowest release that the bounds allow, built from its tag.

    A sibling without such a release is built from the working tree.
    """
    bounds: dict[str, list[Requirement]] = {}
    for member in (package.name, *workspace.siblings(package.name)):
        for requirement in workspace[member].dependencies:
            bounds.setdefault(canonicalize_name(requirement.name), []).append(requirement)
    result = [wheel_of(workspace, package)]
    for name in workspace.siblings(package.name):
        fitting = [v for v in workspace.releases(name) if all(bound.specifier.contains(v) for bound in bounds[name])]
        with tempfile.TemporaryDirectory() as scratch:
            sibling = workspace.check_out(name, fitting[0], Path(scratch)) if fitting else workspace[name]
            result.append(wheel_of(workspace, sibling))
    return result


def released_wheels(workspace: Workspace, name: str, directory: Path) -> tuple[Package, list[Path]]:
    """Check out the latest release of a package, to test it with the siblings of the working tree.

    Args:
        workspace: The packages.
        name: A package that has a release.
        directory: Where the repository at that release is written.

    Returns:
        The released package, and its wheel with those of all siblings that it and its tests need.
    """
    released = workspace.check_out(name, workspace.releases(name)[-1], directory)
    needs = workspace.inside(released.dependencies + released.test_dependencies)
    siblings = [workspace[each] for each in workspace.closure(needs) if each != name]
    return released, [wheel_of(workspace, package) for package in (released, *siblings)]


def kept_out(workspace: Workspace, released: Package) -> list[str]:
    """Return the siblings in the working tree that the bounds of a release exclude, each with its bound.

    Args:
        workspace: The packages.
        released: A package that is checked out from a tag.
    """
    found = set()
    for requirement in released.dependencies + released.test_dependencies:
        for name in workspace.inside([requirement]):
            version = workspace[name].version
            if not requirement.specifier.contains(version, prereleases=True):
                found.add(f"{name} {version} (it needs {requirement.specifier})")
    return sorted(found)


def wheel_of(workspace: Workspace, package: Package) -> Path:
    """Return the wheel of one package, which may be checked out from a tag."""
    derived.write(package)  # as the build would do, so that the fingerprint covers them
    shelf = workspace.root / ".nox" / "wheelhouse" / package.name
    slot = shelf / fingerprint(package)
    if not slot.is_dir():
        shelf.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=shelf) as scratch:
            made = Path(scratch) / "wheel"
            build(package.path, made, "--wheel")
            (made / ".gitignore").unlink(missing_ok=True)
            try:
                made.rename(slot)
            except OSError:  # another process has built the same wheel
                if not slot.is_dir():
                    raise
    (wheel,) = slot.glob("*.whl")
    return wheel


def declared(paths: Iterable[Path]) -> list[str]:
    """Return the third-party requirements of wheels, without extras. A name can occur with several bounds."""
    requirements = (requirement for path in paths for requirement in Wheel.read(path).requirements)
    outside = (one for one in requirements if not one.name.startswith(PREFIX) and "extra" not in str(one.marker))
    return sorted(set(map(str, outside)))


def build(path: Path, out: Path, *arguments: str, epoch: int | None = None) -> Path:
    """Build the package at `path` into `out`, by default its sdist and from that its wheel; return the wheel.

    What registries show is added: see `tools.metadata`.

    The same files give the same bytes, in any folder and at any time.

    Args:
        path: The directory of the package.
        out: The directory to write to.
        arguments: Further arguments of `uv build`.
        epoch: The time of all files in the archives, in seconds since 1970; None: `SOURCE_DATE_EPOCH`, or hatchling's.

    Raises:
        RuntimeError: It cannot be built; the message holds the output of the build.
        ValueError: A link of its README leads to no file.
    """
    command = [find_uv(), "build", *arguments, "--build-constraints", str(PINNED), "--out-dir", str(out.absolute())]
    environment = os.environ if epoch is None else {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    with tempfile.TemporaryDirectory() as scratch:
        staged = metadata.stage(Package.read(path.absolute()), Path(scratch))
        command.append(str(staged))
        run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if run.returncode != 0:
        raise RuntimeError(f"building {path.name} failed:\n{run.stdout}{run.stderr}")
    (wheel,) = out.glob("*.whl")
    return wheel


def fingerprint(package: Package) -> str:
    """Return a digest of the metadata and of all files that can end up in the wheel of a package."""
    digest = hashlib.sha256("\n".join([metadata.described(package), *map(str, package.dependencies)]).encode())
    for file in sorted(package.path.rglob("*")):
        inside = file.relative_to(package.path)
        if file.is_file() and inside.parts[0] not in _LEFT_OUT and "__pycache__" not in inside.parts:
            digest.update(f"{inside.as_posix()}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
