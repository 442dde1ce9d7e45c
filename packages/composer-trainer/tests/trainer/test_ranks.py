"""Tests of the interface that runs with one or several processes share."""

from __future__ import annotations

from composer.trainer.ranks import DataParallel, SingleProcess
from composer.trainer.sharded import ShardedParallel


def test_variants_of_the_ranks_only_override() -> None:
    """A renamed method that one variant still defines under its old name would silently do nothing there."""
    interface = {name for name in dir(SingleProcess) if not name.startswith("_")}

    for variant in (DataParallel, ShardedParallel):
        assert {name for name in vars(variant) if not name.startswith("_")} <= interface
