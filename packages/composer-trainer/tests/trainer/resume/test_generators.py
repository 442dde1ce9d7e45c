"""Tests of restoring random generators, global ones and those of loaders."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from resumed_runs import (
    OwnGenerators,
    Run,
    Samples,
    batches_of,
    generator,
)
from torch.utils.data import (
    DataLoader,
)

from composer.trainer.resume.generators import generators_of, set_states, states_of


def test_generators_that_stay_as_they_are_are_not_touched() -> None:
    whole = Run(batches_of(4), "1ep").fit()
    resumed = Run(batches_of(4), seed=7, callbacks=[]).load(whole.snapshots.taken[0], "rng")
    resumed.trainer._progress.loader.begin()

    assert torch.equal(torch.Generator().manual_seed(7).get_state(), torch.get_rng_state())


def test_generators_are_found_by_path_each_once() -> None:
    found = generators_of(DataLoader(Samples(OwnGenerators()), 4, shuffle=True, generator=generator()))

    assert {
        "generator",
        "dataset.transform.draws.0.keywords.generator",
        "dataset.transform.draws.1.legacy",
        "dataset.transform.draws.3.self.generator",
        "dataset.transform.draws.4.self.generator",
        "dataset.transform.draws.5.self.generator",
        "dataset.transform.draws.6.self.generator",
    } <= found.keys()


def test_a_generator_that_does_not_fit_is_named() -> None:
    saved = states_of(generators_of(SimpleNamespace(a=np.random.default_rng(0), b=random.Random(0))))
    here = generators_of(SimpleNamespace(a=np.random.Generator(np.random.MT19937(0)), c=random.Random(0)))
    with pytest.warns(UserWarning, match=r"not restored.*: (?=.*\ba\b)(?=.*\bb\b)(?=.*\bc\b)"):
        set_states(here, saved)


def test_persistent_workers_are_warned_of() -> None:
    def make() -> Any:
        return DataLoader(Samples(), 4, num_workers=1, persistent_workers=True)

    whole = Run(make(), "1ep", max_duration="2ep").fit()
    resumed = Run(make(), max_duration="2ep").load(whole.snapshots.taken[0])
    with pytest.warns(UserWarning, match="`persistent_workers=True`"):
        resumed.fit()
