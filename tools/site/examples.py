"""An extension of griffe, which mkdocstrings reads docstrings with: "Example:" begins a section of examples."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["Examples"]


class Examples(griffe.Extension):
    """Renames the section to "Examples:", the only name that griffe knows; it takes others for a note."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
