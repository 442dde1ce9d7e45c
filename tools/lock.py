"""Write the versions that are used for development: one for each third-party distribution, Python and platform."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path

from tools.workspace import Workspace, find_uv

HEADER = "# The versions that development and CI use. Written by `nox -s lock`.\n"


def write(workspace: Workspace, tools: Iterable[str], pinned: Path, arguments: Iterable[str] = ()) -> None:
    """Resolve the dependencies of the packages, their tests and the tools, keeping the versions in `pinned`.

    Args:
        workspace: The packages.
        tools: Requirements of the development tools.
        pinned: The constraints file to write; its versions stay unless `arguments` change them.
        arguments: Additional arguments of `uv pip compile`, for example `--upgrade-package torch`.
    """
    requirements = {"hatchling", *tools}
    for package in workspace.packages.values():
        requirements.update(workspace.outside(package.dependencies + package.test_dependencies))
    command = [find_uv(), "pip", "compile", "--quiet", "--universal", "--python-version", "3.10", "--no-annotate"]
    command += ["--no-header", "--output-file", str(pinned), *arguments, "-"]
    subprocess.run(command, input="\n".join(sorted(requirements)), text=True, check=True)
    pinned.write_text(HEADER + pinned.read_text(encoding="utf-8"), encoding="utf-8")
