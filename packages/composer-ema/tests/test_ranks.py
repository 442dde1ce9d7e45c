"""`EMA` where the model is wrapped or sharded."""

from __future__ import annotations

import pytest
import torch

from composer.algorithms.ema import EMA, EMAParameters
from composer.core import Engine, State
from composer.testing import run_on_ranks


def model_on(rank: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full_tensor = getattr(tensor, "full_tensor", None)
    return (tensor if full_tensor is None else full_tensor()).detach().clone()


def train(sharded: bool, blend: float = 1.0) -> dict[str, list[torch.Tensor]]:
    """Wrap the model after INIT, as a Trainer does; return the weights seen after three batches and in evaluations."""
    rank = torch.distributed.get_rank()
    model = wrapped = model_on(rank)
    state = State(model=model, max_duration="3ba", dataloader=[0], algorithms=EMA("1ba", blend=blend))
    engine = Engine(state)
    engine.run_event("init")
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0], mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    else:
        wrapped = state.model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    seen: dict[str, list[torch.Tensor]] = {"trained": [], "evaluated": []}
    engine.run_event("fit_start")
    for _ in range(3):
        engine.run_event("batch_start")
        wrapped(torch.randn(2, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen["trained"].append(whole(model[1].weight))
        state.timestamp = state.timestamp.to_next_batch()
        engine.run_event("batch_end")
        engine.run_event("eval_start")
        seen["evaluated"].append(whole(model[1].weight))
        with torch.no_grad():
            wrapped(torch.randn(2, 4, generator=generator))
        engine.run_event("eval_end")
    engine.run_event("fit_end")
    seen["trained"].append(whole(model[1].weight))
    return seen


def check(ranks: list[dict[str, list[torch.Tensor]]], blend: float = 1.0) -> None:
    for seen in ranks:
        first, second, third, after = seen["trained"]
        averages = [first, (first + 9 * second) / 10, (first + 9 * second + 45 * third) / 55]

        for trained, average, evaluated in zip(seen["trained"], averages, seen["evaluated"], strict=False):
            torch.testing.assert_close((1 - blend) * trained + blend * average, evaluated)
        assert torch.equal(seen["evaluated"][2], after)
        assert torch.equal(ranks[0]["evaluated"][2], seen["evaluated"][2])


def test_a_model_wrapped_for_data_parallelism_is_averaged() -> None:
    check(run_on_ranks(train, 2, False))


# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
@pytest.mark.parametrize("blend", [1.0, 0.6])
def test_each_rank_averages_its_part_of_a_sharded_model(blend: float) -> None:
    check(run_on_ranks(train, 2, True, blend), blend)


def change_one_row() -> list[list[torch.Tensor]]:
    """Change one row, which one of the ranks holds, while the averages are in the model."""
    from torch.distributed.fsdp import fully_shard

    model = model_on(0)
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    averages = EMAParameters(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    averages.swap_params(model)
    averages.record_checksums(model)
    before = [whole(parameter) for parameter in model.parameters()]
    with torch.no_grad():
        local = model[0].weight.to_local()  # type: ignore[operator,union-attr]
        if torch.distributed.get_rank() == 1:
            local[-1] = 7
    assert ["0.weight"] == averages.adopt_changes(model)
    averages.swap_params(model)
    return [before, [whole(parameter) for parameter in model.parameters()]]


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
def test_ranks_adopt_whole_parameters() -> None:
    for averages, after in run_on_ranks(change_one_row, 2):
        changed = averages[0].clone()
        changed[-1] = 7

        assert torch.equal(changed, after[0])  # not the training weights of the other rank's rows
        assert all(torch.equal(2 * a, b) for a, b in zip(averages[1:], after[1:], strict=True))
