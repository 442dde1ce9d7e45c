"""`Hyperball` at its events, against a slow reference, and on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import TorchDispatchMode

from composer.algorithms.hyperball import Hyperball
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Engine, State
from composer.testing import deep_compare, run_on_ranks

HIDDEN = ("2.weight", "4.weight")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)]
    return nn.Sequential(*layers).double()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 4, generator=generator).double(), torch.randint(3, (16,), generator=generator)


def compute_gradients(model: nn.Module, step: int) -> Tensor:
    x, y = batch_of(step)
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


class SignSGD(torch.optim.Optimizer):
    """Calls its closure twice, the second time at other weights, and steps by the sign of the second gradient."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        closure()
        old = [p.clone() for p in params]
        for p in params:
            p.add_(0.1 * p.grad)
        closure()
        for p, kept in zip(params, old, strict=True):
            p.copy_(kept)
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * (p.grad.sign() + group["weight_decay"] * p))


def start(optimizer: Any, model: nn.Module, algorithm: Any = None) -> tuple[State, Engine]:
    algorithm = Hyperball() if algorithm is None else algorithm
    state = State(model=model, max_duration="9ba", dataloader=[0], optimizers=optimizer, algorithms=algorithm)
    engine = Engine(state)
    engine.run_event("init")
    return state, engine


def train(state: State, engine: Engine, steps: range) -> None:
    """Train as every loop does; the schedulers step before BATCH_END."""
    engine.run_event("fit_start")
    for number in steps:
        engine.run_event("batch_start")

        def passes(number: int = number) -> None:
            engine.run_event("before_train_batch")
            with torch.enable_grad():
                compute_gradients(state.model, number)
            engine.run_event("after_train_batch")

        if isinstance(state.optimizers[0], SignSGD):
            state.optimizers[0].step(passes)
        else:
            passes()
            state.optimizers[0].step()
        for scheduler in state.schedulers:
            scheduler.step()
        state.timestamp = state.timestamp.to_next_batch()
        engine.run_event("batch_end")


# ---- against a slow reference: the update of each optimizer is written out, without weight decay


def momentum(memory: dict[str, Any], gradient: Tensor) -> Tensor:
    memory["m"] = gradient.clone() if "m" not in memory else 0.9 * memory["m"] + gradient
    return memory["m"]


def adam(memory: dict[str, Any], gradient: Tensor) -> Tensor:
    t = memory["t"] = memory.get("t", 0) + 1
    memory["m"] = 0.9 * memory.get("m", 0) + 0.1 * gradient
    memory["v"] = 0.999 * memory.get("v", 0) + 0.001 * gradient**2
    return memory["m"] / (1 - 0.9**t) / ((memory["v"] / (1 - 0.999**t)).sqrt() + 1e-8)


def sign(memory: dict[str, Any], gradient: Tensor) -> Tensor:
    return gradient.sign()


@pytest.mark.parametrize("kind", ["momentum", "adam", "sign"])
def test_a_run_equals_a_slow_reference(kind: str) -> None:
    make, update = {
        "momentum": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1), momentum),
        "adam": (lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1), adam),
        "sign": (lambda p: SignSGD(p, lr=0.05, weight_decay=0.1), sign),
    }[kind]
    model = make_model()
    optimizer = make(model.parameters())
    state, engine = start(optimizer, model)
    state.schedulers = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    train(state, engine, range(6))

    expected = make_model()
    named = dict(expected.named_parameters())
    other = make([p for name, p in named.items() if name not in HIDDEN])
    radii = {name: named[name].detach().norm() for name in HIDDEN}
    memories: dict[str, dict[str, Any]] = {name: {} for name in HIDDEN}
    for number in range(6):
        before, eta = copy.deepcopy(expected.state_dict()), 0.05 / (1 + number)
        other.param_groups[0]["lr"] = eta
        compute_gradients(expected, number)
        if kind == "sign":
            with torch.no_grad():
                for p in expected.parameters():
                    p.add_(0.1 * p.grad)
            compute_gradients(expected, number)
            expected.load_state_dict(before)
            with torch.no_grad():
                for group in other.param_groups:
                    for p in group["params"]:
                        p.sub_(eta * (p.grad.sign() + 0.1 * p))
        else:
            other.step()
        for name in HIDDEN:
            u = update(memories[name], named[name].grad)
            moved = before[name] - eta * radii[name] * u / u.norm()
            named[name].data = radii[name] * moved / moved.norm()

    deep_compare(dict(expected.state_dict()), dict(model.state_dict()), atol=1e-10, rtol=1e-10)


def test_nothing_is_read_from_a_device_in_a_step() -> None:
    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "_local_scalar_dense" not in str(function), "a value was read from the device"
            return function(*args, **(kwargs or {}))

    model = make_model()
    for lr in (0.1, torch.tensor(0.1)):
        state, engine = start(torch.optim.SGD(model.parameters(), lr=lr, foreach=False), model)
        engine.run_event("fit_start")
        compute_gradients(model, 0)
        with NoReads():
            engine.run_event("after_train_batch")
        state.optimizers[0].step()
        with NoReads():
            engine.run_event("batch_end")


# ---- parameter groups


def settings_of(model: nn.Module, optimizer: Any) -> dict[str, tuple[float, float]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}


def test_hidden_matrices_get_a_group_without_decay_and_the_others_keep_theirs() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1, weight_decay=0.3)
    algorithm = Hyperball(lr=0.02)
    _, engine = start(optimizer, model, algorithm)

    settings = settings_of(model, optimizer)
    assert {name: (0.02, 0.0) if name in HIDDEN else (0.1, 0.3) for name, _ in model.named_parameters()} == settings
    assert list(HIDDEN) == optimizer.param_groups[1]["param_names"]
    text = str(engine.explain())
    assert "2.weight  hidden  12 x 8\n" in text
    assert "0.weight  other   first layer\n" in text
    assert "weight decay of the hidden matrices, 0.3, is replaced by fixed norms" in text


def test_groups_that_need_no_change_stay_and_may_have_schedulers() -> None:
    model = make_model()
    hidden = [p for name, p in model.named_parameters() if name in HIDDEN]
    rest = [p for name, p in model.named_parameters() if name not in HIDDEN]
    groups = [{"params": hidden, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.3}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    state, engine = start(optimizer, model)
    state.schedulers = scheduler
    engine.run_event("fit_start")

    assert [0.0, 0.3] == [group["weight_decay"] for group in optimizer.param_groups]


def test_a_scheduler_that_lacks_a_group_is_refused() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    state, engine = start(optimizer, model)
    state.schedulers = scheduler

    with pytest.raises(ValueError, match="but LambdaLR has 1 and AdamW 2, since `Hyperball` has given parameters"):
        engine.run_event("fit_start")


def test_a_learning_rate_in_a_tensor_stays_one_in_each_group() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), weight_decay=0.1, foreach=False)
    _, engine = start(optimizer, model, Hyperball(lr=0.5))
    rates = [group["lr"] for group in optimizer.param_groups]
    assert [0.1, 0.5] == [pytest.approx(rate.item()) for rate in rates]

    engine.run_event("fit_start")
    compute_gradients(model, 0)
    before = model[2].weight.detach().clone()
    engine.run_event("after_train_batch")
    optimizer.step()
    rates[1].fill_(0.0)  # as a scheduler does, before BATCH_END
    engine.run_event("batch_end")
    cosine = (before * model[2].weight).sum() / before.norm() ** 2
    assert cosine.item() < 0.95


def test_an_optimizer_that_steps_other_weights_is_refused() -> None:
    class Averaging(torch.optim.SGD):
        def train(self) -> None: ...

        def eval(self) -> None: ...

    model = make_model()
    with pytest.raises(ValueError, match="`Hyperball` needs an optimizer that steps the weights of the model"):
        start(Averaging(model.parameters(), lr=0.1), model)


def test_a_matrix_that_is_zero_is_refused_before_training() -> None:
    model = make_model()
    nn.init.zeros_(model[4].weight)
    _, engine = start(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match=r"but '4\.weight' are zero and would stay zero.*add their names to `exclude`"):
        engine.run_event("fit_start")

    state, engine = start(torch.optim.SGD(model.parameters(), lr=0.1), model, Hyperball(exclude=[r"4\.weight"]))
    train(state, engine, range(2))
    assert model[4].weight.norm().item() > 0


def test_matrices_in_no_optimizer_are_left_alone() -> None:
    model = make_model()
    algorithm = Hyperball()
    state, engine = start(torch.optim.SGD([model[2].weight], lr=0.1), model, algorithm)
    assert "4.weight  other   in no optimizer" in algorithm.explain()
    model[4].weight.data.zero_()
    train(state, engine, range(1))

    with pytest.warns(NoEffectWarning, match="the optimizers have no hidden matrix of the model"):
        start(torch.optim.SGD([model[2].bias], lr=0.1), model)


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan")])
def test_the_learning_rate_must_be_positive(lr: float) -> None:
    with pytest.raises(ValueError, match="`lr` must be"):
        Hyperball(lr=lr)


def test_patterns_must_be_sequences() -> None:
    with pytest.raises(TypeError, match="`exclude` must be a sequence of regular expressions"):
        Hyperball(exclude="head")


# ---- runs


def test_a_step_that_a_scaler_skips_moves_nothing() -> None:
    def trained(steps: list[int], skipped: set[int]) -> Any:
        model = make_model()
        state, engine = start(torch.optim.AdamW(model.parameters(), lr=0.05), model)
        engine.run_event("fit_start")
        for number in steps:
            before = copy.deepcopy(model.state_dict())
            compute_gradients(model, number)
            engine.run_event("after_train_batch")
            if number not in skipped:
                state.optimizers[0].step()
            engine.run_event("batch_end")
            if number in skipped:
                deep_compare(before, model.state_dict())
        return model.state_dict()

    deep_compare(trained([0, 1, 3], set()), trained([0, 1, 2, 3], {2}))


def test_weights_that_are_frozen_during_the_run_stay() -> None:
    model = make_model()
    state, engine = start(torch.optim.SGD(model.parameters(), lr=0.1), model)
    train(state, engine, range(2))
    model[2].weight.requires_grad_(False)
    state.optimizers[0].param_groups[0]["params"] = [p for p in model.parameters() if p.requires_grad]
    before = model[2].weight.clone()
    train(state, engine, range(2, 4))

    assert torch.equal(before, model[2].weight)


def test_norms_of_a_checkpoint_are_not_measured_again() -> None:
    model = make_model()
    state, engine = start(torch.optim.SGD(model.parameters(), lr=0.1), model)
    radius = model[2].weight.norm().item()
    train(state, engine, range(2))
    saved = copy.deepcopy(state.algorithms[0].state_dict())

    resumed = make_model()
    state, engine = start(torch.optim.SGD(resumed.parameters(), lr=0.1), resumed)
    nn.init.ones_(resumed[2].weight)
    state.algorithms[0].load_state_dict(saved)
    train(state, engine, range(2, 3))
    assert pytest.approx(radius, rel=1e-12) == resumed[2].weight.norm().item()


def test_another_run_measures_the_norms_of_its_own_weights() -> None:
    algorithm, model = Hyperball(), make_model()
    train(*start(torch.optim.SGD(model.parameters(), lr=0.1), model, algorithm), range(1))
    other = make_model()
    nn.init.ones_(other[2].weight)
    train(*start(torch.optim.SGD(other.parameters(), lr=0.1), other, algorithm), range(1))

    assert pytest.approx(96**0.5, rel=1e-12) == other[2].weight.norm().item()


def train_on_rank(kind: str) -> tuple[list[Tensor], int]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model: Any = make_model()
    if kind == "hybrid":
        mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    else:
        fully_shard(model)
    state, engine = start(torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1), model)
    reduced, all_reduce = [], dist.all_reduce

    def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        reduced.append(tuple(tensor.shape))
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = recorded
    train(state, engine, range(4))
    dist.all_reduce = all_reduce
    return [p.full_tensor().detach() for p in model.parameters()], reduced.count((len(HIDDEN),))


# The first versions of `fully_shard` ask the CPU's streams for events, which they did not have.
@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
@pytest.mark.parametrize("kind", ["sharded", "hybrid"])
def test_two_ranks_of_a_sharded_model_equal_one_process(kind: str) -> None:
    model = make_model()
    state, engine = start(torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1), model)
    train(state, engine, range(4))

    for weights, count in run_on_ranks(train_on_rank, 2, kind):
        assert 9 == count, "the norms of all matrices are reduced together: at the start, and twice in each step"
        for expected, found in zip(model.parameters(), weights, strict=True):
            torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9)
