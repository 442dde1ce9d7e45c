"""`ScheduleFree` where the model is wrapped or sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.algorithms.schedule_free import ScheduleFree
from composer.core import Engine, State
from composer.testing import deep_compare, run_on_ranks

BATCHES = 3


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)).double()


def batches_of(rank: int) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 4, generator=generator).double(), 0) for _ in range(BATCHES)]


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: getattr(t, "full_tensor", lambda t=t: t)().detach().clone() for name, t in tensors.items()}


def shard(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    before = list(model.parameters())
    fully_shard(model[0], mesh=mesh)  # type: ignore[operator,index]
    fully_shard(model, mesh=mesh)
    after = dict(zip(before, model.parameters(), strict=True))
    for group in optimizer.param_groups:
        group["params"] = [after[parameter] for parameter in group["params"]]


OPTIMIZERS: dict[str, Any] = {"AdamW": torch.optim.AdamW, "RMSprop": torch.optim.RMSprop}


def train(kind: str, optimizer_name: str) -> dict[str, Any]:
    """Wrap the model after INIT, as a Trainer does; return weights after batches and in evaluations."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else None
    loader = batches_of(rank) if rank is not None else [*zip(*map(batches_of, (0, 1)), strict=True)]
    if rank is None:
        loader = [(torch.cat([one[0], other[0]]), 0) for one, other in loader]
    model = make_model()
    if kind != "plain":  # batch norm of one process and of several differ in training
        model[1].eval()  # type: ignore[operator,index]
    state = State(
        model=model,
        max_duration=f"{BATCHES}ba",
        run_name="run",
        optimizers=OPTIMIZERS[optimizer_name](model.parameters(), lr=0.01, weight_decay=0.1),
        algorithms=ScheduleFree(warmup="2ba"),
    )
    state.set_dataloader(loader, "train")
    state.train_dataloader = loader
    engine = Engine(state)
    engine.run_event("init")
    (optimizer,) = state.optimizers
    wrapped: Any = model
    if kind == "sharded":
        shard(model, optimizer)
        state.fsdp_enabled = True
    elif kind == "parallel":
        wrapped = state.model = torch.nn.parallel.DistributedDataParallel(model)
    found: dict[str, Any] = {"trained": [], "evaluated": []}
    engine.run_event("fit_start")
    for batch, _ in loader:
        engine.run_event("batch_start")
        wrapped(batch).square().mean().backward()
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
        deep_compare(found["trained"][-1], whole(model))
    found["modes"] = type(next(iter(optimizer.state.values()))["z"]).__name__
    engine.run_event("fit_end")
    return found


def check(ranks: list[dict[str, Any]], optimizer_name: str) -> None:
    expected = train("one", optimizer_name)
    for found in ranks:
        for key in ("trained", "evaluated"):
            deep_compare(expected[key], found[key], atol=1e-13)
        for trained, evaluated in zip(found["trained"][1:], found["evaluated"][1:], strict=True):
            assert not torch.equal(trained["0.weight"], evaluated["0.weight"])


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_two_ranks_equal_one(optimizer_name: str) -> None:
    check(run_on_ranks(train, 2, "parallel", optimizer_name), optimizer_name)


# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_two_ranks_with_a_sharded_model_equal_one(optimizer_name: str) -> None:
    ranks = run_on_ranks(train, 2, "sharded", optimizer_name)

    check(ranks, optimizer_name)
    assert ranks[0]["modes"] == "DTensor"
