"""Four ranks that hold copies, shards and parts of layers, against runs with `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_runs import (
    Regression,
    answer,
    batches,
    data,
    filled,
    gap,
    make,
    needs_sharding,
    part,
    run_all,
    samples,
    shared_data,
    trained,
    weights,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from composer.core import Callback, Evaluator
from composer.testing import run_on_ranks
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config, ParallelismConfig, TPConfig

pytestmark = needs_sharding
EXACT = 1e-12


class Perceptron(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(3, 8), torch.nn.Linear(8, 2)
        self.dropout = torch.nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(torch.tanh(self.up(x))))


class Noisy(Perceptron):
    """Draws random numbers in training."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = torch.nn.Dropout(0.5)


def model(net: Callable[[], torch.nn.Module] = Perceptron) -> Any:
    return filled(Regression(net))


def plan() -> dict[str, Any]:
    return {"net.up": ColwiseParallel(), "net.down": RowwiseParallel()}


def tensor_parallel(**fsdp: Any) -> dict[str, Any]:
    return {"fsdp": fsdp, "tp": {"tensor_parallel_degree": 2, "layer_plan": plan()}}


def rows_of_pairs() -> slice:
    """Ranks that share layers train on the same rows."""
    return part(2, dist.get_global_rank() // 2)


def evaluators(ranks: int, rank: int) -> list[Evaluator]:
    return [
        Evaluator(label="padded", dataloader=shared_data(7, ranks, rank)),
        Evaluator(label="all", dataloader=data(5) if rank == 0 else data(3)),
    ]


def copies_and_shards() -> float:
    hybrid = {"fsdp": {"data_parallel_replicate_degree": 2}}
    microbatches = {"device_train_microbatch_size": 1, "ddp_sync_strategy": "single_auto_sync"}
    return max(
        gap(trained(hybrid, model=model(), **more), trained(model=model(), optimizer="sgd"))
        for more in ({}, microbatches)
    )


def own_meshes() -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    loader = batches(rows_of_pairs())
    config = ParallelismConfig(
        fsdp=FSDP2Config(device_mesh=mesh["copies"]), tp=TPConfig(device_mesh=mesh["parts"], layer_plan=plan())
    )
    run = trained(config, model=model(), train_dataloader=loader)
    return gap(run, trained(tensor_parallel(), model=model(), train_dataloader=loader))


class Seeds(Callback):
    """Notes what each rank would draw."""

    def fit_start(self, state: Any, logger: Any) -> None:
        self.seed, self.data_rank = state.seed, state.data_rank
        self.drawn = float(torch.rand(()))


def parts_of_layers() -> dict[str, Any]:
    seeds = Seeds()
    rank = dist.get_global_rank() // 2
    run = trained(
        tensor_parallel(),
        model=model(),
        train_dataloader=batches(rows_of_pairs()),
        eval_dataloader=evaluators(2, rank),
        callbacks=[seeds],
    )
    noisy = trained(tensor_parallel(), model=model(Noisy), train_dataloader=batches(rows_of_pairs()))
    run["noisy"] = noisy["losses"]
    run["seeds"] = seeds.seed, seeds.data_rank, seeds.drawn
    return run


def fresh_parts() -> Any:
    with torch.device("meta"):
        fresh = Regression(Perceptron, own=False).double()
    del fresh.shift
    fresh.shift = 0.0
    trainer = make(tensor_parallel(), model=fresh, train_dataloader=batches(rows_of_pairs()))
    started = weights(trainer)
    trainer.fit(duration="1ba")
    return started


def predict_wrongly() -> None:
    trainer = make(tensor_parallel(), model=model(), train_dataloader=batches(rows_of_pairs()))
    trainer.predict(shared_data(16, 4, dist.get_global_rank()))


def errors() -> dict[str, str]:
    def of(config: Any, **kwargs: Any) -> str:
        return answer(lambda: make(config, model=model(), **{"train_dataloader": batches(rows_of_pairs()), **kwargs}))

    rank = dist.get_global_rank()
    wrong = {"fsdp": {}, "tp": {"tensor_parallel_degree": 2, "layer_plan": {"net.sideways": ColwiseParallel()}}}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    half = FSDP2Config(device_mesh=mesh["copies"])
    return {
        "plan": of(wrong),
        "train sampler": of(tensor_parallel(), train_dataloader=shared_data(16, 4, rank)),
        "eval sampler": of(tensor_parallel(), eval_dataloader=shared_data(16, 4, rank)),
        "predict sampler": answer(predict_wrongly),
        "half": of({"fsdp": half}),
        "one mesh": answer(lambda: ParallelismConfig(fsdp=half, tp=TPConfig(None, 2, plan()))),
        "degree too": answer(lambda: FSDP2Config(device_mesh=mesh["copies"], data_parallel_shard_degree=2)),
        "grid": answer(lambda: TPConfig(device_mesh=mesh, layer_plan=plan())),
    }


def train_on_four() -> dict[str, Any]:
    return run_all({f.__name__: f for f in (copies_and_shards, own_meshes, parts_of_layers, fresh_parts, errors)})


def train_on_two() -> dict[str, Any]:
    return trained(model=model(), eval_dataloader=evaluators(2, dist.get_global_rank()))


@pytest.fixture(scope="module")
def four() -> Callable[[str], list[Any]]:
    """Return the results of a scenario on four ranks."""
    results = run_on_ranks(train_on_four, 4, timeout=300)

    def of(name: str) -> list[Any]:
        for result in results:
            if isinstance(result[name], AssertionError):
                raise result[name]
        return [result[name] for result in results]

    return of


def test_copies_of_shards_train_as_in_data_parallel(four: Any) -> None:
    assert max(four("copies_and_shards")) < EXACT


def test_parts_of_layers_train_as_half_as_many_ranks(four: Any) -> None:
    expected = run_on_ranks(train_on_two, 2, timeout=120)

    for rank, run in enumerate(four("parts_of_layers")):
        assert gap(run, expected[rank // 2]) < EXACT
        assert run["sample"] == expected[0]["sample"]
        assert run["held"] < 0.5 * run["all"]
        assert pytest.approx(float(samples(7)[1][:, 0].sum())) == run["metrics"]["padded/count"]


def test_ranks_that_share_layers_draw_the_same_numbers(four: Any) -> None:
    runs = four("parts_of_layers")

    assert [(3, 0), (3, 0), (4, 1), (4, 1)] == [run["seeds"][:2] for run in runs]
    assert runs[0]["seeds"] == runs[1]["seeds"]
    assert runs[0]["seeds"][2] != runs[2]["seeds"][2]
    assert runs[0]["noisy"] == runs[1]["noisy"]


def test_parts_of_a_model_on_the_meta_device_are_initialised_alike(four: Any) -> None:
    first, *others = four("fresh_parts")

    assert first["net.up.weight"].abs().sum() > 0
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_meshes_may_be_given(four: Any) -> None:
    assert max(four("own_meshes")) < EXACT


def test_what_cannot_be_divided_is_answered(four: Any) -> None:
    for rank, found in enumerate(four("errors")):
        assert "`layer_plan` must name modules of the model, got 'net.sideways'. They are net" in found["plan"]
        assert f"`num_replicas=2` and, on rank {rank}, `rank={rank // 2}`, got 4 and {rank}" in found["train sampler"]
        assert "The sampler of `eval_dataloader` must have `num_replicas=2`" in found["eval sampler"]
        assert "The sampler of `dataloader` must have `num_replicas=2`" in found["predict sampler"]
        assert "`device_mesh` must hold all 4 ranks, but 2 ranks" in found["half"]
        assert "`device_mesh` must be given for both 'fsdp' and 'tp'" in found["one mesh"]
        assert "`device_mesh` defines the degrees" in found["degree too"]
        assert "`device_mesh` must have one dimension, got 2" in found["grid"]
