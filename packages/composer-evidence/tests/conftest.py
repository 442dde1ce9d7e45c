from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the tasks, which processes of runs import too

from composer.evidence import Plan, Runner, Study

TINY = "tiny_tasks:tiny"
PLAN = Plan(
    num_seeds=3, num_controls=4, num_tuning_seeds=1, num_stack_seeds=2, num_ladder_seeds=2, num_curves=0, repeats=1
)


@pytest.fixture(autouse=True)
def without_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def runner(tmp_path: Path) -> Callable[..., Runner]:
    """Makes runners of the tiny task, with a ledger in a folder of the test."""

    def make(folder: str = "ledger", reference: str = TINY, **options: Any) -> Runner:
        return Runner(reference, tmp_path / folder, workers=options.pop("workers", 2), say=lambda _: None, **options)

    return make


@pytest.fixture
def study(runner: Callable[..., Runner]) -> Study:
    return Study(runner(), PLAN, command="test")
