"""What the machine has: devices, and a cache that environments can link to."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from pathlib import Path

from tools.workspace import find_uv


def keep_links_possible(folder: Path) -> None:
    """Have uv keep its cache inside `folder` if the default cache is on another file system.

    uv links files from its cache into environments. Across file systems it would copy them: several gigabytes of torch
    for each environment.
    """
    if "UV_CACHE_DIR" in os.environ or "UV_LINK_MODE" in os.environ:
        return
    run = subprocess.run([find_uv(), "cache", "dir"], check=True, capture_output=True, text=True)
    if _device(Path(run.stdout.strip())) != _device(folder):
        os.environ["UV_CACHE_DIR"] = str(folder.resolve() / "uv-cache")


def show_pyenv_versions() -> None:
    """Have the Pythons that pyenv keeps found, although its shims on the path refuse to run all but the chosen one."""
    root = os.environ.get("PYENV_ROOT")
    if root:
        kept = sorted(str(path) for path in Path(root).glob("versions/3.*/bin"))
        os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *kept])


def runs(python: str) -> bool:
    """Whether a Python of that name is on the path and starts."""
    try:
        return subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def freeze(environment: Path) -> dict[str, str]:
    """The distributions in a virtual environment, `{name: version}`."""
    command = [find_uv(), "pip", "list", "--quiet", "--format", "json", "--python", str(environment)]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    return {entry["name"]: entry["version"] for entry in json.loads(run.stdout)}


def share_bytecode(environment: Path, donors: dict[str, Path]) -> None:
    """Link the bytecode that an earlier environment compiled into a new one, where both have the same source files.

    uv installs none, and compiling torch takes as long as most packages' tests. Only files that are linked to the same
    file of uv's cache are the same.

    Args:
        environment: A virtual environment, after packages were installed.
        donors: By the name of the Python: the folder of packages of the last environment; updated to this one.
    """
    for packages in environment.glob("lib/python*/site-packages"):  # none on Windows
        donor = donors.get(packages.parent.name)
        donors[packages.parent.name] = packages
        if donor is None or donor == packages:
            continue
        for compiled in donor.glob("**/__pycache__/*.pyc"):
            folder = packages / compiled.relative_to(donor).parent
            name = f"{compiled.name.partition('.')[0]}.py"
            mine, theirs, target = folder.parent / name, compiled.parent.parent / name, folder / compiled.name
            if mine.exists() and theirs.exists() and mine.samefile(theirs) and not target.exists():
                folder.mkdir(exist_ok=True)
                os.link(compiled, target)


def count_cuda_devices() -> int:
    """The number of CUDA devices the driver shows to this process; 0 without a driver."""
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
