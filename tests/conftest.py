"""The tests here need several packages, or the tools of the repository."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for `tools`


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT
