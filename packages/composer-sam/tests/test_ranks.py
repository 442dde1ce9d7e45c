"""`SAMOptimizer` where the model is wrapped or sharded."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

from composer.algorithms.sam import SAMOptimizer
from composer.testing import run_on_ranks

RHO, LR = 0.5, 0.1
X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def make_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))


def gradients(net: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(net(x).square().mean(), list(net.parameters())))


def neighbour(net: torch.nn.Module, slope: list[torch.Tensor]) -> torch.nn.Module:
    """The net at w + e."""
    norm = torch.cat([g.flatten() for g in slope]).norm()
    there = copy.deepcopy(net)
    with torch.no_grad():
        for weight, g in zip(there.parameters(), slope, strict=True):
            weight += RHO * g / norm
    return there


def stepped(net: torch.nn.Module, slope: list[torch.Tensor]) -> list[torch.Tensor]:
    return [weight.detach() - LR * g for weight, g in zip(net.parameters(), slope, strict=True)]


def train(sharded: bool, sync_ascent: bool = False) -> list[torch.Tensor]:
    """One step on this rank's half of the batch; return the weights."""
    net, x = make_net(), X.chunk(2)[torch.distributed.get_rank()]
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        model = net
    else:
        model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = SAMOptimizer(torch.optim.SGD(net.parameters(), lr=LR), rho=RHO, sync_ascent=sync_ascent)

    def closure(ddp_sync: bool = True) -> torch.Tensor:
        optimizer.zero_grad()
        alone = isinstance(model, torch.nn.parallel.DistributedDataParallel) and not ddp_sync
        with model.no_sync() if alone else contextlib.nullcontext():  # type: ignore[operator]
            loss = model(x).square().mean()
            loss.backward()
        return loss.detach()

    optimizer.step(closure)
    return [weight.full_tensor() if sharded else weight.detach() for weight in net.parameters()]  # type: ignore[attr-defined]


def test_each_rank_ascends_along_its_own_gradient() -> None:
    """The paper's m-sharpness: ranks are in different points, and the mean of the gradients there makes the step."""
    net = make_net()
    there = [gradients(neighbour(net, gradients(net, x)), x) for x in X.chunk(2)]
    expected = stepped(net, [(a + b) / 2 for a, b in zip(*there, strict=True)])

    for weights in run_on_ranks(train, 2, False):
        torch.testing.assert_close(expected, weights)


def test_ranks_ascend_together_with_sync_ascent() -> None:
    """As one process with the whole batch does."""
    net = make_net()
    expected = stepped(net, gradients(neighbour(net, gradients(net, X)), X))

    for weights in run_on_ranks(train, 2, False, True):
        torch.testing.assert_close(expected, weights)


# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
def test_ranks_of_a_sharded_model_ascend_together() -> None:
    """Its gradients are always exchanged, so the norm is that of the whole batch's gradient."""
    net = make_net()
    expected = stepped(net, gradients(neighbour(net, gradients(net, X)), X))

    for weights in run_on_ranks(train, 2, True):
        torch.testing.assert_close(expected, weights)
