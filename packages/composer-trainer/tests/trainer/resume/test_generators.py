"""Tests of restoring random generators, global ones and those of loaders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from resumed_runs import (
    OwnGenerator,
    Run,
    Samples,
    assert_same_end,
    batches_of,
    generator,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
)
from torchmetrics import MeanMetric

from composer.loop.generators import generators_of


def test_generators_that_stay_as_they_are_are_not_touched() -> None:
    whole = Run(batches_of(4), "1ep").fit()
    resumed = Run(batches_of(4), seed=7, callbacks=[]).load(whole.snapshots.taken[0], "rng")
    resumed.trainer._progress.loader.begin()

    assert torch.equal(torch.Generator().manual_seed(7).get_state(), torch.get_rng_state())


def test_generators_are_found_where_they_are_documented() -> None:
    one, other = generator(), generator()
    batch_sampler = BatchSampler(RandomSampler(Samples(), generator=other), 4, False)
    batch_sampler.generator = one  # type: ignore[attr-defined]

    assert ["generator"] == [*generators_of(DataLoader(Samples(OwnGenerator()), 4, shuffle=True, generator=one))]
    assert ["sampler.generator"] == [*generators_of(DataLoader(Samples(), sampler=batch_sampler.sampler))]
    found = generators_of(DataLoader(Samples(), batch_sampler=batch_sampler))
    assert {"batch_sampler.generator": one, "batch_sampler.sampler.generator": other} == found


def test_a_generator_that_the_checkpoint_does_not_know_is_named() -> None:
    whole = Run(batches_of(4), "1ep").fit()
    resumed = Run(DataLoader(Samples(), 4, generator=generator())).load(whole.snapshots.taken[0])
    with pytest.warns(UserWarning, match=r"start anew.*: generator\. Build the loader in the same way"):
        resumed.fit()


@pytest.mark.parametrize("shared", [False, True])
def test_an_evaluation_loader_with_a_generator_resumes(shared: bool) -> None:
    def run(*when: str) -> Run:
        one = generator()
        evaluated = DataLoader(Samples(), 4, shuffle=True, generator=one if shared else generator())
        options = {"eval_dataloader": evaluated, "eval_interval": "3ba", "eval_subset_num_batches": 2}
        made = Run(DataLoader(Samples(), 4, shuffle=True, generator=one), *when, seed=0 if when else 99, **options)
        made.state.train_metrics, made.state.eval_metrics["eval"] = {}, {"Mean": MeanMetric()}
        made.trainer._model.update_metric = lambda batch, outputs, metric: metric.update(batch[0])  # type: ignore[method-assign]
        return made

    whole = run("2ba", "4ba", "1ep", "7ba").fit()
    for snapshot in whole.snapshots.taken:
        assert_same_end(whole, run().load(snapshot).fit())
    assert 4 == len([value for _, key, value in whole.journal.metrics if key == "metrics/eval/Mean"])


def test_persistent_workers_are_warned_of() -> None:
    def make() -> Any:
        return DataLoader(Samples(), 4, num_workers=1, persistent_workers=True)

    whole = Run(make(), "1ep", max_duration="2ep").fit()
    resumed = Run(make(), max_duration="2ep").load(whole.snapshots.taken[0])
    with pytest.warns(UserWarning, match="`persistent_workers=True`"):
        resumed.fit()
