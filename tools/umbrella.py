"""Write what follows from all packages: the dependencies of composer-all, and the type stubs of composer-core.

python -m tools.umbrella            # write
python -m tools.umbrella --check    # fail if what is written is wrong
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from packaging.version import Version

from tools.gen_stubs import stubs
from tools.workspace import Package, Workspace

NAME = "composer-all"
_LIST = re.compile(r"^dependencies = \[\n.*?^\]\n", re.MULTILINE | re.DOTALL)


def files(workspace: Workspace) -> dict[Path, str]:
    """Return what each generated file must say, by path."""
    umbrella = workspace[NAME]
    declaration = umbrella.path / "pyproject.toml"
    lines = "".join(f'    "{_bound(package)}",\n' for package in workspace.packages.values() if package.name != NAME)
    text = _LIST.sub(f"dependencies = [\n{lines}]\n", declaration.read_text(encoding="utf-8"))
    core = workspace["composer-core"].source
    return {declaration: text, **{core / inside: stub for inside, stub in stubs(workspace).items()}}


def _bound(package: Package) -> str:
    version = Version(package.version)
    return f"{package.name}>={version.major}.{version.minor},<{version.major + 1}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=f"Write the dependencies of {NAME} and the type stubs of composer-core."
    )
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a file is not up to date")
    check: bool = parser.parse_args().check
    workspace = Workspace()
    for path, text in files(workspace).items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            sys.exit(f"{path.relative_to(workspace.root)} is not what the packages declare. Run `nox -s fix`.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
