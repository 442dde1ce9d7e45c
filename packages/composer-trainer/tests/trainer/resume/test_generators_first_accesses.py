"""Tests of the first access to evaluation data when a run resumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from resumed_runs import (
    LOADERS,
    Run,
    Samples,
    assert_same_end,
)
from torch.utils.data import (
    DataLoader,
)
from torchmetrics import MeanMetric

EVALUATED: dict[str, Callable[[], Any]] = {
    name: LOADERS[name] for name in ("drawn at first", "own generator", "own transform", "loader drawn at first")
}


@pytest.mark.parametrize("name", EVALUATED)
def test_what_a_run_is_evaluated_on_is_the_same_when_it_is_resumed(name: str) -> None:
    def run(*when: str) -> Run:
        loader = DataLoader(Samples(), 4, shuffle=True)
        options: dict[str, Any] = {"eval_dataloader": EVALUATED[name](), "eval_interval": "3ba"}
        made = Run(loader, *when, seed=0 if when else 99, **options)
        made.state.train_metrics, made.state.eval_metrics["eval"] = {}, {"Mean": MeanMetric()}
        made.trainer._model.update_metric = lambda batch, outputs, metric: metric.update(batch[0])  # type: ignore[method-assign]
        return made

    whole = run("2ba", "4ba", "1ep", "7ba").fit()
    for snapshot in whole.snapshots.taken:
        assert_same_end(whole, run().load(snapshot).fit())
    logged = [value for _, key, value in whole.journal.metrics if key == "metrics/eval/Mean"]
    assert 4 == len(logged)
