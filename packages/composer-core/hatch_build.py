"""Write the files that follow from all packages before composer-core is built in the repository.

An sdist holds them already, and is built elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DerivedFiles(BuildHookInterface[Any]):
    """Writes the catalog of names and the type stubs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write them."""
        package = Path(self.root)
        repository = package.parent.parent
        if not (repository / "tools" / "derived.py").is_file():
            return
        sys.path.insert(0, str(repository))
        from tools import derived
        from tools.workspace import Package

        derived.write(Package.read(package))
