"""The tests here need several packages, or the tools of the repository."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for what several tests use
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for `tools`

from composer.testing.servers import s3 as s3
from composer.testing.servers import s3_server as s3_server
from tools.tiny_tree import Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """An empty repository."""
    return Tree(tmp_path / "tree")
