"""Properties of both optimizers."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from composer.optim import DecoupledAdamW, DecoupledSGDW

Make = Callable[..., torch.optim.Optimizer]
PATHS: list[dict[str, Any]] = [{}, {"foreach": True}, {"fused": True}]


def sgdw(params: Any, **options: Any) -> DecoupledSGDW:
    return DecoupledSGDW(params, **{"lr": 0.5, "weight_decay": 0.25, "momentum": 0.9, **options})


def sgdw_without_momentum(params: Any, **options: Any) -> DecoupledSGDW:
    return DecoupledSGDW(params, **{"lr": 0.5, "weight_decay": 0.25, **options})


def adamw(params: Any, **options: Any) -> DecoupledAdamW:
    return DecoupledAdamW(params, **{"lr": 0.5, "weight_decay": 0.25, **options})


def amsgrad(params: Any, **options: Any) -> DecoupledAdamW:
    return DecoupledAdamW(params, **{"lr": 0.5, "weight_decay": 0.25, "amsgrad": True, **options})


BOTH: list[Make] = [sgdw, adamw]
ALL: list[Make] = [sgdw, sgdw_without_momentum, adamw, amsgrad]


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def run(
    net: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, scheduler: LambdaLR | None = None
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        net(torch.randn(5, 3, generator=generator)).square().sum().backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def idle_step(optimizer: torch.optim.Optimizer) -> None:
    """A step with zero gradients, which only decays."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()


def one(value: float = 1.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.full((1,), value))


def test_they_are_the_optimizers_of_torch() -> None:
    assert isinstance(sgdw([one()]), torch.optim.SGD)
    assert isinstance(adamw([one()]), torch.optim.AdamW)


@pytest.mark.parametrize("cls", [DecoupledSGDW, DecoupledAdamW])
def test_they_declare_a_single_pass(cls: Any) -> None:
    assert cls.single_pass is True


@pytest.mark.parametrize("make", ALL)
def test_the_closure_is_called_once_before_the_update_with_gradients_enabled(make: Make) -> None:
    param, seen = one(), []
    optimizer = make([param])

    def closure() -> torch.Tensor:
        seen.append((torch.is_grad_enabled(), param.item()))
        optimizer.zero_grad()
        loss = param.square().sum()
        torch.autograd.backward(loss)
        return loss

    loss = optimizer.step(closure)  # type: ignore[arg-type]

    assert seen == [(True, 1.0)]
    assert loss == 1.0
    assert param.item() != 1.0
    assert optimizer.step() is None


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize("path", PATHS)
def test_hooks_run_once_per_step_next_to_torchs_own_optimizers(make: Make, path: dict[str, Any]) -> None:
    torch.optim.SGD([one()], lr=0.1).step()
    torch.optim.AdamW([one()]).step()
    calls = []
    optimizer = make([one()], **path)
    optimizer.register_step_pre_hook(lambda *args: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *args: calls.append("post"))
    idle_step(optimizer)

    assert calls == ["pre", "post"]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("path", PATHS)
def test_the_decay_follows_the_schedule_and_not_the_rate(make: Make, path: dict[str, Any]) -> None:
    for peak in (0.5, 0.001):
        param = one()
        optimizer = make([param], lr=peak, **path)
        values = []
        for factor in (1.0, 0.5, 0.0):
            optimizer.param_groups[0]["lr"] = peak * factor
            idle_step(optimizer)
            values.append(param.item())

        assert pytest.approx(values) == [0.75, 0.75 * 0.875, 0.75 * 0.875]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("path", PATHS)
def test_an_initial_rate_of_zero_decays_in_full(make: Make, path: dict[str, Any]) -> None:
    param = one()
    optimizer = make([param], lr=0.0, **path)
    idle_step(optimizer)
    optimizer.param_groups[0]["lr"] = 0.5
    idle_step(optimizer)

    assert pytest.approx(param.item()) == 0.75**2


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("path", PATHS)
def test_every_group_has_its_own_rate_and_decay(make: Make, path: dict[str, Any]) -> None:
    params = [one() for _ in range(3)]
    groups = [{"params": params[0]}, {"params": params[1], "lr": 0.1}, {"params": params[2], "weight_decay": 0.0}]
    optimizer = make(groups, **path)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    idle_step(optimizer)

    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.5, 0.1, 0.5]
    assert pytest.approx([p.item() for p in params]) == [0.875, 0.875, 1.0]


@pytest.mark.parametrize("make", BOTH)
def test_a_group_added_later_begins_at_its_own_rate(make: Make) -> None:
    optimizer = make([one()])
    idle_step(optimizer)
    late = one()
    optimizer.add_param_group({"params": [late], "lr": 0.01})
    optimizer.param_groups[1]["lr"] = 0.005
    idle_step(optimizer)

    assert optimizer.param_groups[1]["initial_lr"] == 0.01
    assert late.item() == pytest.approx(0.875)


@pytest.mark.parametrize("make", BOTH)
def test_a_given_initial_rate_is_kept(make: Make) -> None:
    param = one()
    optimizer = make([{"params": [param], "lr": 0.05, "initial_lr": 0.1}])
    idle_step(optimizer)

    assert param.item() == pytest.approx(0.875)


@pytest.mark.parametrize("make", BOTH)
def test_a_group_without_an_initial_rate_takes_the_rate_of_its_first_step(make: Make) -> None:
    param = one()
    optimizer = make([param])
    del optimizer.param_groups[0]["initial_lr"]
    optimizer.param_groups[0]["lr"] = 0.125
    idle_step(optimizer)

    assert optimizer.param_groups[0]["initial_lr"] == 0.125
    assert param.item() == pytest.approx(0.75)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("path", [{}, {"fused": True}])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_as_learning_rate_is_the_same_as_a_number(
    make: Make, path: dict[str, Any], shape: tuple[int, ...]
) -> None:
    nets = [model(), model()]
    for net, lr in zip(nets, (0.5, torch.full(shape, 0.5)), strict=True):
        optimizer = make(net.parameters(), lr=lr, **path)
        run(net, optimizer, range(4), LambdaLR(optimizer, lambda step: 0.5**step))

    torch.testing.assert_close(list(nets[0].parameters()), list(nets[1].parameters()))


@pytest.mark.parametrize("make", BOTH)
def test_a_scheduler_that_writes_into_the_rate_leaves_the_initial_rate_alone(make: Make) -> None:
    optimizer = make([one()], lr=torch.tensor(0.5))
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    idle_step(optimizer)
    scheduler.step()

    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.25)
    assert optimizer.param_groups[0]["initial_lr"] == 0.5


@pytest.mark.parametrize("make", BOTH)
def test_the_schedulers_of_torch_find_their_initial_rate(make: Make) -> None:
    optimizer = make([one()])
    scheduler = CosineAnnealingLR(optimizer, T_max=2)
    idle_step(optimizer)
    scheduler.step()

    assert scheduler.base_lrs == [0.5]
    assert pytest.approx(scheduler.get_last_lr()) == [0.25]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("through_pickle", [False, True])
def test_a_resumed_run_ends_like_an_uninterrupted_one(make: Make, path: dict[str, Any], through_pickle: bool) -> None:
    def halve(step: int) -> float:
        return 0.5**step

    whole = model()
    optimizer = make(whole.parameters(), **path)
    run(whole, optimizer, range(6), LambdaLR(optimizer, halve))

    half = model()
    optimizer = make(half.parameters(), **path)
    scheduler = LambdaLR(optimizer, halve)
    run(half, optimizer, range(3), scheduler)
    saved = copy.deepcopy([half.state_dict(), optimizer.state_dict(), scheduler.state_dict()])

    resumed = model()
    optimizer = make(resumed.parameters(), **path, lr=7.0)
    scheduler = LambdaLR(optimizer, halve)
    for target, state in zip((resumed, optimizer, scheduler), saved, strict=True):
        target.load_state_dict(state)  # type: ignore[attr-defined]
    if through_pickle:
        resumed, optimizer = pickle.loads(pickle.dumps((resumed, optimizer)))
        scheduler.optimizer = optimizer
    run(resumed, optimizer, range(3, 6), scheduler)

    assert optimizer.param_groups[0]["initial_lr"] == 0.5
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize("make", ALL)
def test_a_resume_through_distributed_checkpointing_is_exact(make: Make) -> None:
    """It makes the state of a fresh optimizer by a step with a learning rate of zero."""
    whole = model()
    optimizer = make(whole.parameters())
    run(whole, optimizer, range(6))

    half = model()
    optimizer = make(half.parameters())
    run(half, optimizer, range(3))
    weights, saved = copy.deepcopy([half.state_dict(), get_optimizer_state_dict(half, optimizer)])

    resumed = model()
    optimizer = make(resumed.parameters())
    resumed.load_state_dict(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        set_optimizer_state_dict(resumed, optimizer, saved)
    run(resumed, optimizer, range(3, 6))

    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.parametrize(
    ("make", "torchs"),
    [(sgdw, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)), (adamw, lambda p: torch.optim.AdamW(p, lr=0.05))],
)
def test_the_checkpoint_of_torchs_optimizer_loads_and_leaves_the_initial_rate(make: Make, torchs: Make) -> None:
    net = model()
    theirs = torchs(net.parameters())
    run(net, theirs, range(2))
    ours = make(net.parameters())
    ours.load_state_dict(theirs.state_dict())

    assert ours.param_groups[0]["lr"] == 0.05
    assert ours.param_groups[0]["initial_lr"] == 0.5
    run(net, ours, range(2, 4))


@pytest.mark.parametrize("make", BOTH)
def test_sparse_gradients_are_refused(make: Make) -> None:
    param = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = make([param])
    param.grad = torch.eye(2).to_sparse()

    with pytest.raises(RuntimeError, match=r"Gradients must be dense for Decoupled(SGD|Adam)W, got a sparse one"):
        optimizer.step()
    assert torch.equal(param, torch.ones(2, 2))


@pytest.mark.parametrize("make", BOTH)
def test_a_step_without_gradients_changes_nothing(make: Make) -> None:
    for path in PATHS:
        param = one()
        make([param], **path).step()

        assert param.item() == 1.0


@pytest.mark.parametrize("make", BOTH)
def test_fused_and_foreach_exclude_each_other(make: Make) -> None:
    with pytest.raises(RuntimeError, match="cannot be `True` together"):
        make([one()], fused=True, foreach=True)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.parametrize(("weight_decay", "warns"), [(1e-3, True), (9.9e-4, False)])
def test_a_large_decay_is_logged(
    make: Make, weight_decay: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        make([one()], weight_decay=weight_decay)

    assert warns == ("so 0.001 is large" in caplog.text)


@pytest.mark.parametrize("make", BOTH)
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("path", [{"foreach": False}, {}, {"fused": True}])
def test_on_a_gpu_the_host_never_synchronizes(make: Make, path: dict[str, Any]) -> None:
    here, there = model(), model().cuda()
    reference = make(here.parameters(), foreach=False)
    optimizer = make(there.parameters(), **path)
    for _ in range(3):
        idle_step(reference)
        torch.cuda.set_sync_debug_mode("error")
        try:
            idle_step(optimizer)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    torch.testing.assert_close(list(here.parameters()), [p.cpu() for p in there.parameters()])


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("lr", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
def test_a_compiled_step_is_one_graph_at_any_learning_rate(make: Make, lr: Any) -> None:
    torch.compiler.reset()
    graphs: list[Any] = []
    compiled, eager = model(), model()
    optimizer = make(compiled.parameters(), lr=lr.clone() if isinstance(lr, torch.Tensor) else lr)
    scheduler = CosineAnnealingLR(optimizer, 10)
    expected = make(eager.parameters(), lr=0.01, foreach=False, fused=False)

    def count(module: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    step = torch.compile(optimizer.step, backend=count)
    for index in range(6):
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(index))
        optimizer.zero_grad()
        compiled(inputs).square().sum().backward()
        step()
        scheduler.step()
    run(eager, expected, range(6), CosineAnnealingLR(expected, 10))

    assert len(graphs) <= 3, "without state, with it, and for any learning rate"
    for actual, wanted in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(actual, wanted)
