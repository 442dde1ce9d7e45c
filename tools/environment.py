"""Devices and Pythons of the machine, and files that virtual environments share."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import urllib.request
from contextlib import suppress
from pathlib import Path

from tools.workspace import find_uv


def keep_links_possible(folder: Path) -> None:
    """Set uv's cache to a directory inside `folder` if the default cache is on another file system.

    uv links files from its cache into environments. Across file systems it would copy them: several gigabytes of torch
    for each environment.
    """
    if "UV_CACHE_DIR" in os.environ or "UV_LINK_MODE" in os.environ:
        return
    run = subprocess.run([find_uv(), "cache", "dir"], check=True, capture_output=True, text=True)
    if _device(Path(run.stdout.strip())) != _device(folder):
        os.environ["UV_CACHE_DIR"] = str(folder.resolve() / "uv-cache")


def show_pyenv_versions() -> None:
    """Add the Pythons of pyenv to the path, because its shims only run the active version."""
    root = os.environ.get("PYENV_ROOT")
    if root:
        folders = sorted(str(path) for path in Path(root).glob("versions/3.*/bin"))
        os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *folders])


def runs(python: str) -> bool:
    """Return True if a Python of that name is on the path and starts."""
    try:
        return subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def reaches(url: str) -> bool:
    """Return True if a web address answers within ten seconds."""
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except OSError:
        return False
    return True


def freeze(environment: Path) -> dict[str, str]:
    """Return the distributions in a virtual environment as `{name: version}`."""
    command = [find_uv(), "pip", "list", "--quiet", "--format", "json", "--python", str(environment)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return {entry["name"]: entry["version"] for entry in json.loads(run.stdout)}


def share_bytecode(environment: Path, folder: Path) -> None:
    """Link the bytecode of earlier environments into a new one, for source files that both link to in uv's cache.

    uv installs no bytecode, and compiling torch takes as long as the tests of most packages.

    Args:
        environment: A virtual environment, after packages were installed.
        folder: Where the others are.
    """
    for packages in environment.glob("lib/python*/site-packages"):  # none on Windows
        others = set(folder.glob(f"*/lib/{packages.parent.name}/site-packages")) - {packages}
        for donor in sorted(others, key=lambda path: path.stat().st_mtime)[-3:]:
            # A session beside this one may remove the donor meanwhile, which `os.walk` passes over.
            found = (Path(place, name) for place, _, names in os.walk(donor) for name in names if name.endswith(".pyc"))
            for compiled in found:
                folder = packages / compiled.relative_to(donor).parent
                name = f"{compiled.name.partition('.')[0]}.py"
                source, donated, target = folder.parent / name, compiled.parent.parent / name, folder / compiled.name
                # Where the donor is gone, or nothing can be linked, Python compiles.
                with suppress(OSError):
                    if not target.exists() and source.samefile(donated):
                        folder.mkdir(exist_ok=True)
                        os.link(compiled, target)


def count_cuda_devices() -> int:
    """Return the number of CUDA devices that are visible to this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def _device(path: Path) -> int:
    while not path.exists():
        path = path.parent
    return path.resolve().stat().st_dev
