"""`SAMOptimizer` against the algorithm of the paper, written out with plain autograd."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from composer.algorithms.sam import SAMOptimizer
from composer.testing import deep_compare

BASES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}
X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def make_net(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).to(dtype)


def loss_of(net: torch.nn.Module) -> torch.Tensor:
    weight = next(net.parameters())
    return torch.nn.functional.mse_loss(net(X.to(weight.dtype)), Y.to(weight.dtype))


def plain_closure(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net)
        loss.backward()
        return loss.detach()

    return closure


def weights_of(net: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def slow_sam_step(net: torch.nn.Module, base: torch.optim.Optimizer, rhos: list[float]) -> torch.Tensor:
    """Algorithm 1: gradient, step to the worst neighbour, gradient there, and a step from where it began."""
    loss = loss_of(net)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
    neighbour = copy.deepcopy(net)
    with torch.no_grad():
        for weight, gradient, rho in zip(neighbour.parameters(), gradients, rhos, strict=True):
            weight += rho * gradient / (norm + 1e-12)
    there = torch.autograd.grad(loss_of(neighbour), list(neighbour.parameters()))
    for weight, gradient in zip(net.parameters(), there, strict=True):
        weight.grad = gradient
    base.step()
    return loss.detach()


@pytest.mark.parametrize("base", BASES)
def test_steps_are_those_of_the_paper(base: str) -> None:
    net, expected = make_net(), make_net()
    optimizer, expected_base = SAMOptimizer(BASES[base](net.parameters()), rho=0.3), BASES[base](expected.parameters())
    for _ in range(5):
        expected_loss = slow_sam_step(expected, expected_base, [0.3] * 4)
        loss = optimizer.step(plain_closure(net, optimizer))

        torch.testing.assert_close(expected_loss, loss)
        deep_compare(weights_of(expected), weights_of(net), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("base", BASES)
def test_a_loop_without_a_closure_makes_the_same_steps(base: str) -> None:
    net, expected = make_net(), make_net()
    optimizer, by_closure = (SAMOptimizer(BASES[base](n.parameters()), rho=0.3) for n in (net, expected))
    for _ in range(3):
        by_closure.step(plain_closure(expected, by_closure))
        for move in (optimizer.first_step, optimizer.second_step):
            optimizer.zero_grad()
            loss_of(net).backward()
            move()

        deep_compare(weights_of(expected), weights_of(net))
    assert 3 == optimizer.global_step


def test_the_two_moves_take_turns() -> None:
    net = make_net()
    optimizer = SAMOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="`second_step` needs the weights where `first_step` moves them"):
        optimizer.second_step()
    loss_of(net).backward()
    optimizer.first_step()
    with pytest.raises(RuntimeError, match="`first_step` has moved the weights already"):
        optimizer.first_step()


@settings(deadline=None, max_examples=25)
@given(
    curvature=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    rho=st.floats(0, 2),
    lr=st.floats(0.001, 0.1),
    seed=st.integers(0, 100),
)
def test_on_a_quadratic_the_step_has_a_closed_form(curvature: list[float], rho: float, lr: float, seed: int) -> None:
    """With the loss w'Aw / 2, the gradient at w + e is A(w + e)."""
    a = torch.tensor(curvature, dtype=torch.float64)
    w = torch.randn(len(curvature), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    weight = torch.nn.Parameter(w.clone())
    optimizer = SAMOptimizer(torch.optim.SGD([weight], lr=lr), rho=rho)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (a * weight**2).sum() / 2
        loss.backward()
        return loss

    optimizer.step(closure)

    expected = w - lr * a * (w + rho * a * w / (a * w).norm())
    torch.testing.assert_close(expected, weight.detach())


def test_parameter_groups_have_their_own_radius() -> None:
    net, expected = make_net(), make_net()
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "rho": 0.0}]  # type: ignore[index,operator]
    optimizer = SAMOptimizer(torch.optim.SGD(groups, lr=0.1), rho=0.5)
    slow_sam_step(expected, torch.optim.SGD(expected.parameters(), lr=0.1), [0.5, 0.5, 0.0, 0.0])
    optimizer.step(plain_closure(net, optimizer))

    deep_compare(weights_of(expected), weights_of(net), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("base", BASES)
def test_optimizers_that_share_the_ascent_equal_one_of_all_weights(base: str) -> None:
    whole, divided = make_net(), make_net()
    expected = SAMOptimizer(BASES[base](whole.parameters()), rho=0.5, interval=2)
    second = BASES[base](divided[2].parameters())  # type: ignore[index]
    first = SAMOptimizer(BASES[base](divided[0].parameters()), rho=0.5, interval=2, others=[second])  # type: ignore[index]
    copy.deepcopy(first), pickle.dumps(first)

    def closure() -> torch.Tensor:
        second.zero_grad()
        return plain_closure(divided, first)()

    for _ in range(5):
        expected.step(plain_closure(whole, expected))
        first.step(closure)
        second.step()

    deep_compare(weights_of(whole), weights_of(divided))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_perturbed_too(dtype: torch.dtype) -> None:
    net, expected = make_net(dtype), make_net()
    optimizer = SAMOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), rho=1.0)
    before = weights_of(expected)
    slow_sam_step(expected, torch.optim.SGD(expected.parameters(), lr=1.0), [1.0] * 4)
    optimizer.step(plain_closure(net, optimizer))

    for start, right, weight in zip(before, expected.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(right - start, weight.double() - start, atol=0.05, rtol=0.05)


def test_a_gradient_of_zero_moves_nothing() -> None:
    for dtype in (torch.float16, torch.float32):
        weight = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = SAMOptimizer(torch.optim.SGD([weight], lr=0.1))

        def closure(optimizer: SAMOptimizer = optimizer, weight: torch.Tensor = weight) -> torch.Tensor:
            optimizer.zero_grad()
            loss = weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        assert torch.equal(torch.zeros(3, dtype=dtype), weight.detach())


def test_without_any_gradient_nothing_happens() -> None:
    optimizer = SAMOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1))

    assert optimizer.step(lambda: 5.0) == 5.0


# ---- when the gradients are not usable, and when passes are saved ----


class Passes:
    """A closure that counts, notes its keywords, and fails or overflows in certain passes."""

    def __init__(self, net: torch.nn.Module, optimizer: torch.optim.Optimizer, overflows: tuple[int, ...] = ()) -> None:
        self.net, self.optimizer, self.overflows = net, optimizer, overflows
        self.keywords: list[dict[str, Any]] = []

    def __call__(self, **keywords: Any) -> torch.Tensor | None:
        self.keywords.append(keywords)
        self.optimizer.zero_grad()
        loss = loss_of(self.net)
        loss.backward()
        return None if len(self.keywords) in self.overflows else loss.detach()


def test_weights_stay_if_a_plain_pass_overflows() -> None:
    net = make_net()
    optimizer = SAMOptimizer(BASES["sgd"](net.parameters()), interval=2)
    before = weights_of(net)

    assert optimizer.step(Passes(net, optimizer, (1,))) is None
    deep_compare(before, weights_of(net))


@pytest.mark.parametrize("overflows", [(1,), (2,)])
def test_weights_stay_bit_for_bit_if_a_pass_overflows(overflows: tuple[int, ...]) -> None:
    net = make_net(torch.float32)
    optimizer = SAMOptimizer(BASES["momentum"](net.parameters()), rho=1e4)
    before, passes = weights_of(net), Passes(net, optimizer, overflows)
    loss = optimizer.step(passes)

    assert (loss is None) == (overflows == (1,))
    assert len(passes.keywords) == overflows[0]
    deep_compare(before, weights_of(net))
    assert {} == dict(optimizer.state)  # the base optimizer did not step
    assert 1 == optimizer.global_step


def test_the_step_starts_from_the_exact_weights() -> None:
    """Adding e and subtracting it again would lose most digits of a small weight."""
    net = make_net(torch.float32)
    optimizer = SAMOptimizer(torch.optim.SGD(net.parameters(), lr=0.0), rho=1e6)
    before = weights_of(net)
    optimizer.step(plain_closure(net, optimizer))

    deep_compare(before, weights_of(net))


def test_weights_come_back_if_the_second_pass_fails() -> None:
    net = make_net()
    optimizer = SAMOptimizer(BASES["sgd"](net.parameters()))
    before, passes = weights_of(net), Passes(net, optimizer)

    def closure() -> Any:
        if passes.keywords:
            raise torch.OutOfMemoryError("too large")
        return passes()

    with pytest.raises(torch.OutOfMemoryError, match="too large"):
        optimizer.step(closure)
    deep_compare(before, weights_of(net))
    assert 0 == optimizer.global_step


@pytest.mark.parametrize("interval", [1, 2])
def test_a_loss_of_zero_is_a_loss(interval: int) -> None:
    net = make_net()
    optimizer = SAMOptimizer(BASES["sgd"](net.parameters()), interval=interval)
    before = weights_of(net)

    def closure() -> float:
        plain_closure(net, optimizer)()
        return 0.0

    assert optimizer.step(closure) == 0.0
    assert not torch.equal(before[0], weights_of(net)[0])


def test_steps_between_the_interval_cost_one_pass() -> None:
    net, plain = make_net(), make_net()
    optimizer, plain_optimizer = (
        SAMOptimizer(BASES["momentum"](net.parameters()), interval=3),
        BASES["momentum"](plain.parameters()),
    )
    passes = Passes(net, optimizer)
    counts = []
    for _ in range(6):
        before = len(passes.keywords)
        optimizer.step(passes)
        counts.append(len(passes.keywords) - before)
        if len(counts) <= 2:
            plain_optimizer.step(plain_closure(plain, plain_optimizer))
            deep_compare(weights_of(plain), weights_of(net))

    assert [1, 1, 2, 1, 1, 2] == counts
    assert 6 == optimizer.global_step


def test_the_keywords_of_the_closure_identify_the_pass() -> None:
    net = make_net()
    optimizer = SAMOptimizer(BASES["sgd"](net.parameters()), interval=2)
    passes = Passes(net, optimizer)
    for _ in range(2):
        optimizer.step(passes)

    assert [{}, {"ddp_sync": False}, {"loss_dict": {}}] == passes.keywords


def test_the_first_pass_synchronizes_gradients_with_sync_ascent() -> None:
    net = make_net()
    optimizer = SAMOptimizer(BASES["sgd"](net.parameters()), sync_ascent=True)
    passes = Passes(net, optimizer)
    optimizer.step(passes)

    assert [{"ddp_sync": True}, {"loss_dict": {}}] == passes.keywords


def test_a_closure_gets_only_the_keywords_it_takes() -> None:
    net = make_net()
    optimizer = SAMOptimizer(BASES["sgd"](net.parameters()))
    passes = Passes(net, optimizer)
    seen = []

    def closure(ddp_sync: bool = True) -> Any:
        seen.append(ddp_sync)
        return passes()

    optimizer.step(closure)

    assert [False, True] == seen


def test_gradient_scaling_on_the_cpu() -> None:
    """Overflow in the first pass, then in the second, then a good step."""
    net, expected = make_net(torch.float32), make_net(torch.float32)
    optimizer = SAMOptimizer(BASES["sgd"](net.parameters()), rho=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    factors = iter([math.inf, 1.0, math.inf, 1.0, 1.0])

    def closure() -> torch.Tensor | None:
        optimizer.zero_grad()
        loss = loss_of(net) * next(factors)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        finite = all(parameter.grad.isfinite().all() for parameter in net.parameters())  # type: ignore[union-attr]
        scaler.update()
        return loss.detach() if finite else None

    before = weights_of(net)
    for _ in range(2):
        optimizer.step(closure)
        deep_compare(before, weights_of(net))
    optimizer.step(closure)
    slow_sam_step(expected, BASES["sgd"](expected.parameters()), [0.3] * 4)

    assert 256.0 == scaler.get_scale()
    deep_compare(weights_of(expected), weights_of(net), atol=1e-6, rtol=1e-5)


def test_a_closure_is_required() -> None:
    optimizer = SAMOptimizer(BASES["sgd"](make_net().parameters()))
    with pytest.raises(TypeError, match="`closure` must be given: `SAMOptimizer` computes two gradients in one step"):
        optimizer.step()


# ---- what both passes see ----


def test_both_passes_draw_the_same_random_numbers() -> None:
    weight = torch.nn.Parameter(torch.ones(100))
    optimizer = SAMOptimizer(torch.optim.SGD([weight], lr=0.1))
    drawn = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        drawn.append(torch.rand(3))
        loss = torch.nn.functional.dropout(weight, 0.5).square().sum()
        loss.backward()
        drawn.append((weight.grad == 0).detach())
        return loss

    torch.manual_seed(0)
    for _ in range(2):
        optimizer.step(closure)
    first, second = drawn[:4], drawn[4:]

    for draws in (first, second):
        assert torch.equal(draws[0], draws[2])
        assert torch.equal(draws[1], draws[3])
    assert not torch.equal(first[0], second[0])


def test_autocast_around_the_step_does_not_keep_the_first_weights() -> None:
    """Inside one autocast context, the low-precision copies of weights are cached."""
    seen = []
    for outside in (False, True):
        net = make_net(torch.float32)
        optimizer = SAMOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), rho=2.0)

        def closure(net: torch.nn.Module = net, optimizer: SAMOptimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(net)
            loss.backward()
            return loss

        with torch.autocast("cpu", torch.bfloat16) if outside else contextlib.nullcontext():
            for _ in range(2):
                optimizer.step(closure)
        seen.append(weights_of(net))

    deep_compare(*seen)


class NoReads(TorchDispatchMode):
    """Fails when a tensor is read on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a tensor was read"
        return func(*args, **(kwargs or {}))


def test_no_tensor_is_read_on_the_host() -> None:
    net = make_net()
    optimizer = SAMOptimizer(BASES["momentum"](net.parameters()))
    with pytest.raises(AssertionError, match="a tensor was read"), NoReads():
        torch.ones(()).item()
    with NoReads():
        optimizer.step(plain_closure(net, optimizer))


# ---- one optimizer with its base ----


def test_groups_and_state_are_those_of_the_base_optimizer() -> None:
    net = make_net()
    base = BASES["momentum"](net.parameters())
    groups, state = base.param_groups, base.state
    group = groups[0]
    optimizer = SAMOptimizer(base, rho=0.2, epsilon=1e-6, interval=2, extra="x")

    assert optimizer.param_groups is base.param_groups is groups
    assert optimizer.state is base.state is state
    assert optimizer.param_groups[0] is group
    assert (0.2, 1e-6, "x") == (group["rho"], group["epsilon"], group["extra"])
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.base_optimizer is base
    assert 2 == optimizer.interval


@pytest.mark.parametrize("by", ["sam", "base"])
def test_groups_and_state_stay_shared_after_loading_either(by: str) -> None:
    net = make_net()
    base = BASES["momentum"](net.parameters())
    plain_state = copy.deepcopy(base.state_dict())
    optimizer = SAMOptimizer(base, rho=0.2)
    optimizer.step(plain_closure(net, optimizer))
    (optimizer if by == "sam" else base).load_state_dict(plain_state)

    assert optimizer.param_groups[0] is base.param_groups[0]
    assert optimizer.state is base.state
    assert 0 == optimizer.global_step
    assert ({"rho": 0.2, "global_step": 0}.items() <= optimizer.param_groups[0].items()) == (by == "sam")
    optimizer.step(plain_closure(net, optimizer))
    assert 1 == optimizer.global_step


@pytest.mark.parametrize("base", ["momentum", "adamw"])
def test_a_resumed_optimizer_continues_identically(base: str) -> None:
    nets = [make_net(), make_net()]
    optimizers = [SAMOptimizer(BASES[base](net.parameters()), rho=0.2, interval=2) for net in nets]
    for _ in range(3):
        optimizers[0].step(plain_closure(nets[0], optimizers[0]))
    nets[1].load_state_dict(copy.deepcopy(nets[0].state_dict()))
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for net, optimizer in zip(nets, optimizers, strict=True):
        for _ in range(3):
            optimizer.step(plain_closure(net, optimizer))

    assert 6 == optimizers[1].global_step
    deep_compare(nets[0].state_dict(), nets[1].state_dict())
    deep_compare(optimizers[0].state_dict(), optimizers[1].state_dict())


def test_a_perturbation_stored_by_another_implementation_is_dropped_on_loading() -> None:
    net = make_net()
    optimizer = SAMOptimizer(BASES["adamw"](net.parameters()))
    saved = optimizer.state_dict()
    saved["state"] = {i: {"e_w": torch.zeros_like(p)} for i, p in enumerate(net.parameters())}
    optimizer.load_state_dict(saved)
    optimizer.step(plain_closure(net, optimizer))

    assert {"step", "exp_avg", "exp_avg_sq"} == set(optimizer.state[next(net.parameters())])


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_steps_the_copied_weights(copied_by: Any) -> None:
    net = make_net()
    optimizer = SAMOptimizer(BASES["momentum"](net.parameters()), rho=0.2, interval=1)
    optimizer.step(plain_closure(net, optimizer))
    other_net, other = copied_by((net, optimizer))
    for n, o in ((net, optimizer), (other_net, other)):
        o.step(plain_closure(n, o))

    assert other.param_groups is other.base_optimizer.param_groups
    assert other.param_groups[0]["params"][0] is next(other_net.parameters())
    deep_compare(weights_of(net), weights_of(other_net))
    deep_compare(optimizer.state_dict(), other.state_dict())
    other.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    assert 0.2 == other.param_groups[1]["rho"]


@pytest.mark.parametrize("by", ["sam", "base"])
def test_added_parameters_are_stepped_with_all_settings(by: str) -> None:
    net, expected = make_net(), make_net()
    optimizer = SAMOptimizer(torch.optim.SGD(net[0].parameters(), lr=0.1), rho=0.3)  # type: ignore[index,operator]
    group = {"params": list(net[2].parameters()), "lr": 0.2}  # type: ignore[index,operator]
    (optimizer if by == "sam" else optimizer.base_optimizer).add_param_group(group)
    rates = [{"params": expected[0].parameters()}, {"params": expected[2].parameters(), "lr": 0.2}]  # type: ignore[index,operator]
    slow_sam_step(expected, torch.optim.SGD(rates, lr=0.1), [0.3] * 4)
    optimizer.step(plain_closure(net, optimizer))

    assert 2 == len(optimizer.base_optimizer.param_groups)
    deep_compare(weights_of(expected), weights_of(net), atol=1e-12, rtol=1e-12)


def test_gradients_are_cleared() -> None:
    net = make_net()
    optimizer = SAMOptimizer(BASES["sgd"](net.parameters()))
    loss_of(net).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(torch.equal(torch.zeros_like(p), p.grad) for p in net.parameters())  # type: ignore[arg-type]
    optimizer.zero_grad()
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize("wrapped_first", [False, True])
def test_schedulers_work_from_before_and_after_wrapping(wrapped_first: bool) -> None:
    """Torch warns, here an error, if it thinks that a scheduler steps before its optimizer."""
    net = make_net()
    base = BASES["momentum"](net.parameters())
    optimizer = SAMOptimizer(base) if wrapped_first else None
    scheduler = LambdaLR(optimizer or base, lambda step: 0.5**step)
    optimizer = optimizer or SAMOptimizer(base)
    for _ in range(3):
        optimizer.step(plain_closure(net, optimizer))
        scheduler.step()

    assert pytest.approx(0.1 * 0.5**3) == optimizer.param_groups[0]["lr"]
    assert optimizer.param_groups[0]["lr"] == base.param_groups[0]["lr"]


def test_hooks_of_both_are_called() -> None:
    net = make_net()
    optimizer = SAMOptimizer(BASES["sgd"](net.parameters()))
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("sam"))
    optimizer.base_optimizer.register_step_post_hook(lambda *_: called.append("base"))
    optimizer.step(plain_closure(net, optimizer))

    assert ["base", "sam"] == called


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rho": -0.1}, "`rho` must not be negative, got -0.1"),
        ({"epsilon": 0.0}, "`epsilon` must be positive, got 0.0"),
        ({"interval": 0}, "`interval` must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused_and_the_base_is_left_alone(arguments: dict[str, Any], message: str) -> None:
    base = BASES["sgd"](make_net().parameters())
    with pytest.raises(ValueError, match=message):
        SAMOptimizer(base, **arguments)
    assert "rho" not in base.param_groups[0]


def test_a_base_that_needs_a_closure_itself_is_refused() -> None:
    net = make_net()
    with pytest.raises(ValueError, match="`base_optimizer` must step without a closure, got LBFGS"):
        SAMOptimizer(torch.optim.LBFGS(net.parameters()))
    with pytest.raises(ValueError, match="`base_optimizer` must step without a closure, got SAMOptimizer"):
        SAMOptimizer(SAMOptimizer(BASES["sgd"](net.parameters())))


def test_a_base_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`base_optimizer` must be a `torch\.optim\.Optimizer`, got list"):
        SAMOptimizer([])  # type: ignore[arg-type]
