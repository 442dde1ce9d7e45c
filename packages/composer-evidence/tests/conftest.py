from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the tasks, which processes of runs import too

from composer.evidence import Plan, Runner, Study

TINY = "tiny_tasks:tiny"
PLAN = Plan(
    num_seeds=3, num_controls=4, num_tuning_seeds=1, num_stack_seeds=2, num_ladder_seeds=2, num_curves=0, repeats=1
)


@pytest.fixture(autouse=True, scope="session")
def without_the_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # Step times would wait for a measurement of the user, who may run the tests meanwhile.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def runner(tmp_path: Path) -> Callable[..., Runner]:
    """Makes runners of the tiny task, with a ledger in a folder of the test."""

    def make(folder: str = "ledger", reference: str = TINY, **options: Any) -> Runner:
        return Runner(reference, tmp_path / folder, workers=options.pop("workers", 2), say=lambda _: None, **options)

    return make


@pytest.fixture
def study(runner: Callable[..., Runner]) -> Study:
    return Study(runner(), PLAN, command="test")
