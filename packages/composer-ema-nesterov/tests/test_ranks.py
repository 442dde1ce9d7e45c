"""`EMANesterov` where the model is wrapped or sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composer.algorithms.ema_nesterov import EMANesterov
from composer.core import Engine, State
from composer.testing import deep_compare, run_on_ranks

STEPS = 5


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full_tensor = getattr(tensor, "full_tensor", None)
    return (tensor if full_tensor is None else full_tensor()).detach().clone()


def train(kind: str) -> dict[str, Any]:
    """Wrap the model after INIT, as a Trainer does; return the weights and averages after some steps."""
    torch.manual_seed(0)
    model = wrapped = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)).double()
    algorithm = EMANesterov(beta=0.6, decay=0.8, begin="1ba", end="4ba")
    state = State(model=model, max_duration=f"{STEPS}ba", dataloader=[0], algorithms=algorithm)
    engine = Engine(state)
    engine.run_event("init")
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "wrapped":
        wrapped = state.model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state.optimizers = optimizer
    engine.run_event("fit_start")
    for step in range(STEPS):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(step)).double()
        if kind != "alone":
            inputs = inputs.chunk(2)[torch.distributed.get_rank()]
        engine.run_event("batch_start")
        engine.run_event("before_train_batch")
        wrapped(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.timestamp = state.timestamp.to_next_batch()
        engine.run_event("batch_end")
        with torch.no_grad():  # `fully_shard` leaves the weights unsharded
            wrapped(inputs)
    return {
        "weights": [whole(parameter) for parameter in model.parameters()],
        "averages": {name: whole(average) for name, average in algorithm.state_dict()["averages"].items()},
        "kinds": {type(average).__name__ for average in algorithm.state_dict()["averages"].values()},
    }


def check(kind: str) -> set[str]:
    expected, ranks = train("alone"), run_on_ranks(train, 2, kind)
    for found in ranks:
        for key in ("weights", "averages"):
            deep_compare(expected[key], found[key], atol=1e-10, rtol=1e-10)
    kinds: set[str] = ranks[0]["kinds"]
    return kinds


def test_a_model_wrapped_for_data_parallelism_equals_one_process() -> None:
    assert {"Tensor"} == check("wrapped")


# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
def test_each_rank_moves_its_part_of_a_sharded_model() -> None:
    assert {"DTensor"} == check("sharded")
