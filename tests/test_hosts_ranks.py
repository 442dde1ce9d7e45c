"""Two ranks in the loops of other libraries: the weights of our `Trainer` on two ranks."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from rank_runs import (
    BATCHES,
    EPOCHS,
    HALVES,
    LANGUAGE,
    SEED,
    SIZE,
    Case,
    algorithms_of,
    in_float64,
    loader_of,
    model_for,
    noise,
    optimizer_of,
    train,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from composer.hosts.accelerate import AcceleratedRun
from composer.hosts.ignite import IgniteRun
from composer.testing import deep_compare, run_on_ranks
from composer.utils import dist

# Hosts exchange the gradients of the first pass, too: SAM's default is not to.
CASES = {
    "nothing": Case("MixUp", is_plain=True),
    "EMA": Case("EMA", {"half_life": "2ba"}, is_batch_normalized=True),
    "GradientClipping": Case("GradientClipping", {"clipping_type": "norm", "clipping_threshold": 0.1}),
    "LabelSmoothing": Case("LabelSmoothing"),
    "LayerFreezing": Case("LayerFreezing", {"freeze_start": 0.0, "freeze_level": 1.0}),
    "MixUp": Case("MixUp"),
    "SAM": Case("SAM", {"rho": 0.5, "sync_ascent": True}, is_batch_normalized=True),
    "SelectiveBackprop": Case("SelectiveBackprop", {"start": 0.0, "end": 1.0}),
}
Weights = dict[str, torch.Tensor]


def with_accelerate(case: Case) -> Weights:
    """Accelerate gives each rank its part of the batches."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True)
    model, collate = model_for(case), partial(in_float64, case.name in LANGUAGE)
    loader: Any = DataLoader(
        noise(BATCHES * SIZE), batch_size=SIZE // 2, collate_fn=collate, generator=torch.Generator()
    )
    run = AcceleratedRun(accelerator, model, algorithms_of(case), max_duration=f"{EPOCHS}ep", seed=SEED)
    net, optimizer, _ = run.prepare(model, optimizer_of(model), loader)
    assert isinstance(net, DistributedDataParallel)
    for batches in run.epochs():
        for batch in batches:
            accelerator.backward(run.loss(batch))
            optimizer.step()
            optimizer.zero_grad()
    return weights_of(model)


def with_ignite(case: Case) -> Weights:
    model = model_for(case)
    optimizer = optimizer_of(model)
    run = IgniteRun(model, algorithms_of(case), optimizer=optimizer, max_duration=f"{EPOCHS}ep", seed=SEED)
    wrapped = DistributedDataParallel(model, find_unused_parameters=run.find_unused_parameters)
    trainer = run.create_supervised_trainer(wrapped)
    trainer.run(own_loader_of(case, HALVES[dist.get_global_rank()]), max_epochs=EPOCHS)
    return weights_of(model)


def own_loader_of(case: Case, rows: tuple[int, int]) -> Any:
    """A loader that draws nothing from the global generator, which hosts iterate at different moments."""
    loader = loader_of(case, rows)
    loader.generator = torch.Generator()
    return loader


def weights_of(model: torch.nn.Module) -> Weights:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def run_all() -> dict[str, dict[str, Any]]:
    """Of each algorithm, the weights of all hosts on this rank."""
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, Any]] = {}
    for label, case in CASES.items():
        with mock.patch("rank_runs.loader_of", own_loader_of):
            weights = train(case, HALVES[dist.get_global_rank()])["weights"]
        found[label] = {"trainer": weights, "accelerate": with_accelerate(case), "ignite": with_ignite(case)}
    return found


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, dict[str, Any]]]:
    """One pair of processes for all cases."""
    return run_on_ranks(run_all, timeout=300.0)


@pytest.mark.parametrize("host", ["accelerate", "ignite"])
@pytest.mark.parametrize("label", CASES)
def test_two_ranks_give_the_weights_of_our_trainer(label: str, host: str, on_ranks: Any) -> None:
    for found in on_ranks:
        deep_compare(found[label]["trainer"], found[label][host])
    deep_compare(on_ranks[0][label][host], on_ranks[1][label][host])
