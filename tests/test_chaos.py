"""A sample of `nox -s chaos`: runs with any algorithms that are killed and resumed equal those that are not."""

from __future__ import annotations

import random

import pytest
from chaos import Run, pairs, processes, triples

DRAW = random.Random(18)
SAMPLE = [*DRAW.sample(pairs(DRAW), 6), *triples(DRAW, 4)]


@pytest.mark.parametrize("run", SAMPLE, ids=lambda run: "+".join(run.names))
def test_a_killed_run_with_these_algorithms_equals_the_uninterrupted_one(run: Run) -> None:
    assert "" == run.check()


def test_a_process_killed_at_random_moments_equals_the_uninterrupted_one() -> None:
    (run,) = processes(random.Random(18), 2)

    assert "" == run.check()


def test_every_pair_and_triple_is_drawn_once() -> None:
    drawn = [run.names for run in (*pairs(random.Random(0)), *triples(random.Random(0), 50))]

    assert len(drawn) > 400
    assert len(set(drawn)) == len(drawn)
