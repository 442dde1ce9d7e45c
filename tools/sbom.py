"""Write the bill of materials of a package: what installing it brings along, at pinned versions, as CycloneDX JSON.

python -m tools.sbom composer-mixup    # writes .nox/dist/composer-mixup/composer_mixup-0.1.0.cdx.json
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import wheelhouse
from tools.workspace import Workspace, find_uv


def write(workspace: Workspace, name: str, folder: Path, *, constraint: Path | None = None) -> Path:
    """Install a package of the working tree into an environment of its own, and list it with all that it needs.

    Args:
        workspace: The packages.
        name: The package.
        folder: Where to write `<name>-<version>.cdx.json`.
        constraint: A file with the versions of other distributions; None: the newest.

    Returns:
        The path of the file. The same commit and versions give the same bytes.
    """
    package = workspace[name]
    wheels = wheelhouse.wheels(workspace, [name])
    others = wheelhouse.declared(wheels)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name.replace('-', '_')}-{package.version}.cdx.json"
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([find_uv(), "venv", "--quiet", "--python", sys.executable, scratch], check=True)
        install = [find_uv(), "pip", "install", "--quiet", "--python", scratch]
        if others:
            subprocess.run([*install, *(["--constraint", str(constraint)] if constraint else []), *others], check=True)
        # By name, because the path of a wheel would be noted in its metadata and end up in the list.
        links = [part for wheel in wheels for part in ("--find-links", str(wheel.parent))]
        own = [f"{each}=={workspace[each].version}" for each in workspace.closure([name])]
        subprocess.run([*install, "--no-deps", "--no-index", *links, *own], check=True)
        command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--mc-type", "library"]
        command += ["--pyproject", str(package.path / "pyproject.toml"), "--output-file", str(file), scratch]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(workspace.commit_time())}
        subprocess.run(command, check=True, env=environment)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the bill of materials of a package as CycloneDX JSON.")
    parser.add_argument("package", help="for example composer-mixup")
    package: str = parser.parse_args().package
    try:
        print(write(Workspace(Path.cwd()), package, Path(".nox/dist", package), constraint=wheelhouse.PINNED))
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
