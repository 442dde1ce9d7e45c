"""`LAWA` and `PostHocEMA` where the model is wrapped or sharded."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from composer.algorithms.lawa import LAWA, PostHocEMA, average_weights, reconstruct_ema
from composer.core import Engine, State
from composer.testing import deep_compare, run_on_ranks


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).double()


def shard(model: torch.nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)  # type: ignore[operator,index]
    fully_shard(model, mesh=mesh)


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: getattr(t, "full_tensor", lambda t=t: t)().detach().clone() for name, t in tensors.items()}


def batches_of(rank: int) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 4, generator=generator).double(), 0) for _ in range(3)]


def train(sharded: bool, folder: Path) -> dict[str, Any]:
    """Wrap the model after INIT, as a Trainer does; return weights after batches and in evaluations."""
    rank, model = torch.distributed.get_rank(), make_model()
    loader, state = batches_of(rank), State(model=model, max_duration="3ba", run_name="run")
    state.set_dataloader(loader, "train")
    state.train_dataloader = loader
    lawa, ema = LAWA(2, "1ba"), PostHocEMA(snapshot_interval="1ba", folder=folder)
    state.algorithms = [lawa, ema]
    engine = Engine(state)
    engine.run_event("init")
    if sharded:
        shard(model)
        state.fsdp_enabled = True
        wrapped = model
    else:
        wrapped = state.model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Any] = {"trained": [], "evaluated": []}
    engine.run_event("fit_start")
    for batch, _ in loader:
        engine.run_event("batch_start")
        wrapped(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found["trained"].append(whole(model))
        state.previous_timestamp, state.timestamp = state.timestamp, state.timestamp.to_next_batch()
        engine.run_event("batch_end")
        engine.run_event("eval_start")
        found["evaluated"].append(whole(model))
        with torch.no_grad():
            wrapped(batch)
        engine.run_event("eval_end")
    found["averages"] = [
        {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in average.named_parameters()}
        for average in ema.averages
    ]
    found["snapshot"] = {
        name: type(value).__name__ for name, value in lawa.state_dict()["snapshots"][0]["named_parameters_dict"].items()
    }
    engine.run_event("fit_end")
    found["reconstructed"] = [ema.reconstruct(sigma_rel) for sigma_rel in ema.sigma_rels]
    found["loaded"] = whole(ema.load(model, 0.1))
    return found


def check(ranks: list[dict[str, Any]], folder: Path) -> None:
    first = ranks[0]
    for found in ranks:
        trained = [{name: t for name, t in w.items() if "running" not in name} for w in found["trained"]]
        evaluated = [{name: t for name, t in w.items() if "running" not in name} for w in found["evaluated"]]
        deep_compare(trained[0], evaluated[0], atol=1e-15)
        deep_compare(trained[1], evaluated[1], atol=1e-15)
        deep_compare(average_weights(trained[1:]), evaluated[2], atol=1e-15)
        deep_compare(first["evaluated"], found["evaluated"])
        for average, reconstructed in zip(found["averages"], found["reconstructed"], strict=True):
            parameters = {name: reconstructed[name] for name in average}
            deep_compare(average, parameters, atol=1e-10)
        deep_compare(first["reconstructed"], found["reconstructed"])
        deep_compare(found["reconstructed"][1], found["loaded"])
    deep_compare(first["reconstructed"][0], reconstruct_ema(folder, 0.05))
    # The statistics are those of the mean over the batches of both ranks.
    model = make_model()
    model.load_state_dict(first["evaluated"][2])
    inputs = torch.stack([model[0](x) for rank in (0, 1) for x, _ in batches_of(rank)])  # type: ignore[operator,index]
    torch.testing.assert_close(inputs.mean((0, 1)), first["evaluated"][2]["1.running_mean"])


def test_a_model_wrapped_for_data_parallelism_is_averaged(tmp_path: Path) -> None:
    check(run_on_ranks(train, 2, False, tmp_path), tmp_path)


# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
def test_each_rank_averages_its_part_of_a_sharded_model(tmp_path: Path) -> None:
    ranks = run_on_ranks(train, 2, True, tmp_path)

    check(ranks, tmp_path)
    assert ranks[0]["snapshot"]["0.weight"] == "DTensor"


def average_shards() -> list[Any]:
    models = [make_model() for _ in range(2)]
    with torch.no_grad():
        models[1][0].weight.add_(1)  # type: ignore[operator,union-attr,index]
    expected = average_weights(copy.deepcopy(models))
    for model in models:
        shard(model)
    found = average_weights(models)
    return [expected, {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in found.items()}]


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
def test_the_average_of_sharded_models_is_sharded() -> None:
    for expected, found in run_on_ranks(average_shards, 2):
        deep_compare(expected, found)
