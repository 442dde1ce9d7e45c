"""Small repositories for the tests of the tools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

from tools.workspace import ROOT, Workspace

_PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
description = "A package of a test."
readme = "README.md"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = {dependencies}
{tables}
[tool.hatch.build.targets.wheel]
packages = ["src/composer"]
"""


class Tree:
    """Small repository in its own directory, with packages that a test adds.

    Attributes:
        root: The directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        for shared in (".gitignore", "LICENSE", "pyproject.toml"):
            (root / shared).write_text((ROOT / shared).read_text(encoding="utf-8"), encoding="utf-8")

    @property
    def workspace(self) -> Workspace:
        """A new view of the packages."""
        return Workspace(self.root)

    def add(
        self,
        name: str,
        files: Mapping[str, str],
        *,
        dependencies: tuple[str, ...] = (),
        version: str = "0.1.0",
        points: Mapping[str, Mapping[str, str]] | None = None,
        scripts: Mapping[str, str] | None = None,
    ) -> Path:
        """Make a package whose sources are `files`, paths below `src/composer`; return its directory."""
        path = self.root / "packages" / name
        tables = [f'[project.entry-points."{group}"]\n{_lines(entries)}' for group, entries in (points or {}).items()]
        tables += [f"[project.scripts]\n{_lines(scripts)}"] if scripts else []
        self.write(
            {
                "pyproject.toml": _PYPROJECT.format(
                    name=name, version=version, dependencies=list(dependencies), tables="\n".join(tables)
                ),
                "README.md": f"# {name}\n\n{'What it is, when to use it and how. ' * 8}\n",
                "CHANGELOG.md": f"# Changelog\n\n## {version} (unreleased)\n\nFirst release.\n",
                "LICENSE": (ROOT / "LICENSE").read_text(encoding="utf-8"),
                "changes/.gitignore": "!.gitignore\n",
                **{f"src/composer/{file}": text for file, text in files.items()},
            },
            path,
        )
        return path

    def add_core(self) -> Path:
        """Make a minimal `composer-core`."""
        return self.add("composer-core", {"__init__.py": "", "py.typed": "", "core/__init__.py": "ONE = 1\n"})

    def add_built_from_all(self) -> tuple[Path, Path]:
        """Make a `composer-core` and a `composer-all` that are built as the real ones are, from what all declare."""
        copied = ["tools/__init__.py", "tools/derived.py", "tools/workspace.py"]
        for name in ("composer-core", "composer-all"):
            copied += [f"packages/{name}/{file}" for file in ("pyproject.toml", "hatch_build.py", "LICENSE")]
        self.write({file: (ROOT / file).read_text(encoding="utf-8") for file in copied})
        core, umbrella = self.root / "packages" / "composer-core", self.root / "packages" / "composer-all"
        for path in (core, umbrella):
            news = "# Changelog\n\n## 0.1.0 (unreleased)\n\nFirst release.\n"
            readme = f"# {path.name}\n\n{'What it is, when to use it and how. ' * 8}\n"
            self.write({"CHANGELOG.md": news, "README.md": readme, "changes/.gitignore": "!.gitignore\n"}, path)
        sources = ("py.typed", "__init__.py", "functional.py", "core/__init__.py", "algorithms/__init__.py")
        self.write({f"src/composer/{file}": "" for file in sources}, core)
        return core, umbrella

    def add_algorithm(self, name: str, **options: Any) -> Path:
        """Make the package `composer-<name>` with an algorithm and a function."""
        files = {f"algorithms/{name}/__init__.py": f"class {name.title()}: ...\n", f"algorithms/{name}/py.typed": ""}
        points = {"composer.algorithms": {name.title(): f"composer.algorithms.{name}:{name.title()}"}}
        options = {"files": files, "points": points, "dependencies": ("composer-core>=0.1,<1",), **options}
        return self.add(f"composer-{name}", **options)

    def write(self, files: Mapping[str, str], directory: Path | None = None) -> None:
        """Write text files below a directory."""
        for file, text in files.items():
            path = (directory or self.root) / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text), encoding="utf-8")

    def git(self, *arguments: str) -> str:
        """Run git in the repository; return its output."""
        return subprocess.run(["git", *arguments], cwd=self.root, check=True, capture_output=True, text=True).stdout

    def commit(self) -> None:
        """Commit everything; initialize the git repository first if needed."""
        if not (self.root / ".git").is_dir():
            self.git("init", "--quiet", "--initial-branch", "main")
            self.git("config", "user.name", "Test")
            self.git("config", "user.email", "test@example.org")
            self.git("config", "commit.gpgsign", "false")
            self.git("config", "tag.gpgsign", "false")
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "state")


def _lines(entries: Mapping[str, str]) -> str:
    return "".join(f'{name} = "{value}"\n' for name, value in entries.items())


def run_tool(name: str, *arguments: str, cwd: Path = ROOT, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run `python -m tools.<name>` in a directory."""
    return subprocess.run(
        [sys.executable, "-m", f"tools.{name}", *arguments],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT)}, input=stdin, check=False, capture_output=True, text=True,
    )  # fmt: skip
