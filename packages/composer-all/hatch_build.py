"""Make the metadata of composer-all from the other packages, when it is built in the repository.

An sdist holds the metadata already; hatchling takes it from there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Metadata(MetadataHookInterface):
    """Depends on every package; the readme ends with the table of pairs, if `nox -s pairs` wrote it."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the dynamic fields."""
        package = Path(self.root)
        sys.path.insert(0, str(package.parent.parent))
        from tools.workspace import Package

        parts = [package / "README.md", package / "COMPOSITION.md"]
        text = "\n".join(part.read_text(encoding="utf-8") for part in parts if part.is_file())
        metadata["dependencies"] = [str(requirement) for requirement in Package.read(package).dependencies]
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
