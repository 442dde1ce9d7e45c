"""`Muon` at its events, with other optimizers, and on several ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from composer import functional as cf
from composer.algorithms.muon import Muon, MuonOptimizer, build_muon
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Engine, Event, State
from composer.testing import run_on_ranks


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def make_state(optimizers: Any, model: nn.Module, algorithm: Muon) -> State:
    return State(model=model, max_duration="1ep", dataloader=[0], optimizers=optimizers, algorithms=algorithm)


def started(optimizers: Any, model: nn.Module, algorithm: Muon) -> State:
    state = make_state(optimizers, model, algorithm)
    Engine(state).run_event(Event.INIT)
    return state


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}


def test_hidden_matrices_leave_the_optimizer_with_its_settings() -> None:
    model = make_model()
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.2)
    algorithm = Muon(cautious=True)
    muon, other = started(adamw, model, algorithm).optimizers

    assert isinstance(muon, MuonOptimizer)
    assert other is adamw
    assert {"2.weight"} == names_of(model, muon)
    assert {"0.weight", "0.bias", "2.bias", "4.weight", "4.bias"} == names_of(model, adamw)
    assert (3e-3, 0.2, True) == tuple(muon.param_groups[0][key] for key in ("lr", "weight_decay", "cautious"))
    assert algorithm.split is not None
    assert "2.weight  hidden  16 x 16" in str(algorithm.split)


def test_explain_says_which_parameter_went_where() -> None:
    model = make_model()
    state = make_state(torch.optim.AdamW(model.parameters()), model, Muon())
    engine = Engine(state)
    assert "Muon:" not in str(engine.explain())
    engine.run_event(Event.INIT)

    text = str(engine.explain())
    assert "Muon:\n2.weight  hidden  16 x 16\n0.weight  other   first layer\n" in text
    assert all(name in text for name, _ in model.named_parameters())


def test_groups_keep_their_rates_and_arguments_win() -> None:
    model = make_model()
    groups = [
        {"params": model[2].parameters(), "lr": 0.5},
        {"params": [*model[0].parameters(), *model[4].parameters()]},
    ]
    (muon, _) = started(torch.optim.AdamW(groups, lr=0.1), model, Muon()).optimizers
    assert 0.5 == muon.param_groups[0]["lr"]

    model = make_model()
    muon = started(torch.optim.AdamW(model.parameters()), model, Muon(lr=0.02, weight_decay=0.0)).optimizers[0]
    assert (0.02, 0.0) == (muon.param_groups[0]["lr"], muon.param_groups[0]["weight_decay"])


def test_groups_keep_the_names_by_which_schedules_find_them() -> None:
    model = make_model()
    adamw = torch.optim.AdamW([{"params": model.parameters(), "name": "all"}])
    state = make_state(adamw, model, Muon())
    Engine(state).run_event(Event.INIT)

    assert ["all"] == [group.get("name") for group in state.optimizers[0].param_groups]


def test_a_weight_decay_of_another_meaning_is_refused() -> None:
    model = make_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.5)

    with pytest.raises(ValueError, match=r"`weight_decay` must be given to take parameters from Adam.*with 0.5"):
        started(adam, model, Muon())
    assert started(adam, model, Muon(weight_decay=0.2)).optimizers[0].param_groups[0]["weight_decay"] == 0.2


def test_an_optimizer_that_evaluates_other_weights_is_refused() -> None:
    class Averaging(torch.optim.SGD):
        def train(self) -> None: ...

        def eval(self) -> None: ...

    model = make_model()
    with pytest.raises(ValueError, match="but Averaging has `train` and `eval`"):
        started(Averaging(model.parameters(), lr=0.1), model, Muon())


def test_an_optimizer_that_loses_all_parameters_is_dropped() -> None:
    model = make_model()
    rest = [*model[0].parameters(), model[2].bias, *model[4].parameters()]
    optimizers = [torch.optim.SGD([model[2].weight], lr=0.1), torch.optim.Adam(rest)]
    state = started(optimizers, model, Muon(lr=0.1))

    assert [MuonOptimizer, torch.optim.Adam] == [type(optimizer) for optimizer in state.optimizers]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon needs torch 2.9")
def test_a_muon_of_torch_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    state = State(model=model, optimizers=torch.optim.Muon([model[1].weight]), max_duration="1ep", algorithms=Muon())
    with pytest.raises(ValueError, match=r"Muon trains matrices of the model already\. Leave out one"):
        Engine(state).run_event(Event.INIT)


def test_the_pair_has_the_settings_of_its_authors() -> None:
    muon, adamw = build_muon(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)))
    settings = {name: adamw.param_groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")}
    assert settings == {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.1}
    assert (muon.param_groups[0]["momentum"], muon.param_groups[0]["steps"]) == (0.95, 5)


def test_optimizers_of_build_muon_are_left() -> None:
    model = make_model()
    pair = list(build_muon(model, lr=1e-3))

    assert pair == started(pair, model, Muon()).optimizers


def test_matrices_in_no_optimizer_are_not_listed_as_those_of_muon() -> None:
    model = make_model()
    algorithm = Muon()
    adamw = torch.optim.AdamW([*model[0].parameters(), *model[4].parameters()])

    with pytest.warns(NoEffectWarning, match=r"(?s)no hidden matrix of the model.*2\.weight  other   in no optimizer"):
        started(adamw, model, algorithm)
    assert "  hidden  " not in algorithm.explain()


def test_a_model_without_hidden_matrices_gets_a_warning() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
    adamw = torch.optim.AdamW(model.parameters())

    with pytest.warns(NoEffectWarning, match=r"the optimizers have no hidden matrix of the model(.|\n)*first layer"):
        state = started(adamw, model, Muon())
    assert [adamw] == state.optimizers
    state.schedulers = LambdaLR(adamw, lambda step: 1.0)
    Engine(state).run_event(Event.FIT_START)


def test_several_momenta_begin_at_their_time() -> None:
    model = make_model()
    algorithm = Muon(momentum=(0.85, 0.98), momentum_start="0.25dur", momentum_before=0.9)
    adamw = torch.optim.AdamW(model.parameters())
    state = State(model=model, max_duration="8ba", dataloader=[0], optimizers=adamw, algorithms=algorithm)
    engine = Engine(state)
    engine.run_event(Event.INIT)
    momenta = [state.optimizers[0].param_groups[0]["momentum"]]
    for _ in range(4):
        engine.run_event(Event.BATCH_START)
        momenta.append(state.optimizers[0].param_groups[0]["momentum"])
        state.timestamp = state.timestamp.to_next_batch()

    assert [(0.9, 0.9)] * 3 + [(0.85, 0.98)] * 2 == momenta
    assert "momentum" not in adamw.param_groups[0]


@pytest.mark.parametrize(
    ("times", "moved"),
    [
        ({"momentum_start": "0.25dur"}, [None, None, 0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6]),
        ({"momentum_end": "4ba"}, [0, 1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 1]),
        ({"momentum_start": "2ba", "momentum_end": "6ba"}, [None, None, 0, 1 / 4, 2 / 4, 3 / 4, 1, 1]),
    ],
)
@pytest.mark.parametrize(("one", "other"), [((0.8, 0.98), (0.5, 0.95)), (0.9, 0.8)])
def test_the_mean_ages_of_momenta_are_annealed(times: dict[str, str], moved: list[Any], one: Any, other: Any) -> None:
    model = make_model()
    algorithm = Muon(momentum=one, momentum_after=other, momentum_before=0.75, **times)
    adamw = torch.optim.AdamW(model.parameters())
    state = State(model=model, max_duration="8ba", dataloader=[0], optimizers=adamw, algorithms=algorithm)
    engine = Engine(state)
    engine.run_event(Event.INIT)

    for share in moved:
        engine.run_event(Event.BATCH_START)
        found = state.optimizers[0].param_groups[0]["momentum"]
        assert isinstance(one, tuple) == isinstance(found, tuple)
        for begin, end, momentum in zip(
            *(x if isinstance(one, tuple) else (x,) for x in (one, other, found)), strict=True
        ):
            wanted = 3.0 if share is None else (1 - share) * begin / (1 - begin) + share * end / (1 - end)
            assert momentum / (1 - momentum) == pytest.approx(wanted)
        state.timestamp = state.timestamp.to_next_batch()


def test_explain_says_which_matrices_are_too_long_to_precondition() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 16), nn.Linear(16, 3))
    algorithm = Muon(soap_beta=0.9, soap_max_size=16)
    assert "" == algorithm.explain()
    muon, _ = started(torch.optim.AdamW(model.parameters()), model, algorithm).optimizers
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    muon.step()

    lines = [line for line in algorithm.explain().splitlines() if "not preconditioned" in line]
    assert [f"{i}.weight is not preconditioned: a side above 16" for i in (1, 2)] == lines
    assert [False, False, True] == ["soap_squares" in muon.state[model[i].weight] for i in (1, 2, 3)]
    assert "not preconditioned" not in Muon().explain()


def test_the_momenta_of_given_optimizers_are_left() -> None:
    model = make_model()
    pair = list(build_muon(model, momentum=0.9))
    state = make_state(pair, model, Muon(momentum=(0.85, 0.98), momentum_start="0ba"))
    engine = Engine(state)
    engine.run_event(Event.INIT)
    engine.run_event(Event.BATCH_START)

    assert 0.9 == pair[0].param_groups[0]["momentum"]


def test_a_scheduler_of_the_other_parameters_alone_is_refused() -> None:
    model = make_model()
    adamw = torch.optim.AdamW(model.parameters())
    state = make_state(adamw, model, Muon())
    engine = Engine(state)
    engine.run_event(Event.INIT)
    state.schedulers = LambdaLR(adamw, lambda step: 1.0)

    with pytest.raises(ValueError, match="must change the learning rate of `Muon` too, but they belong to AdamW"):
        engine.run_event(Event.FIT_START)
    state.schedulers = [LambdaLR(optimizer, lambda step: 1.0) for optimizer in state.optimizers]
    engine.run_event(Event.FIT_START)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "`lr` must not be negative"),
        ({"scale": "original"}, "`lr` must be given with `scale='original'`"),
        ({"steps": 0}, "`steps` must be at least 1"),
        ({"weight_decay": float("inf")}, "`weight_decay` must be finite"),
        ({"momentum_after": 1.0}, "`momentum_after` must be"),
        ({"momentum_after": (0.8, 0.9)}, "`momentum_after` must have as many numbers as `momentum`"),
        ({"momentum_after": 0.8, "momentum_start": "1ba"}, "must be after `momentum_start` and in its unit"),
        ({"momentum_after": 0.8, "momentum_start": "2ba", "momentum_end": "2ba"}, "must be after `momentum_start`"),
        ({"soap_beta": 1.0}, "`soap_beta` must be"),
        ({"momentum": (0.8, 0.9), "momentum_start": "-1ba"}, "`momentum_start` must be at least 0"),
        ({"momentum_before": 1.0}, "`momentum_before` must be"),
        ({"row_floor": float("nan")}, "`row_floor` must be finite"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(**arguments)


@pytest.mark.parametrize("name", ["include", "exclude"])
@pytest.mark.parametrize("value", [5, None, "head", [5]])
def test_patterns_must_be_a_sequence_of_strings(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"`{name}` must be a sequence of regular expressions, got .*{name}="):
        Muon(**{name: value})


# ---- the builder


def test_the_builder_decays_matrices_only() -> None:
    model = make_model()
    muon, adamw = cf.build_muon(model, lr=0.1, weight_decay=0.3)

    assert [0.3] == [group["weight_decay"] for group in muon.param_groups]
    assert [(0.3, {2}), (0.0, {1})] == [
        (group["weight_decay"], {parameter.dim() for parameter in group["params"]}) for group in adamw.param_groups
    ]


def test_the_builder_needs_both_kinds_of_parameters() -> None:
    with pytest.raises(ValueError, match=r"must have hidden matrices and other parameters, got\n(.|\n)*first layer"):
        build_muon(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)))


# ---- training


def train(model: nn.Module, optimizers: Any, steps: int, rows: slice = slice(None)) -> float:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4, generator=generator, dtype=torch.float64)
    y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    loss = torch.zeros(())
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    return loss.item()


def test_it_learns() -> None:
    model = make_model().double()
    optimizers = build_muon(model, lr=0.02, weight_decay=0.01)

    assert train(model, optimizers, 60) < train(make_model().double(), [], 1) / 4


OPTIONS: dict[str, Any] = {"normalize": True, "cautious": True, "momentum": (0.85, 0.98), "row_floor": 2.0}
OPTIONS |= {"soap_beta": 0.9}


def train_on_rank(kind: str) -> list[torch.Tensor]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model: Any = make_model().double()
    rows = slice(dist.get_rank(), None, dist.get_world_size())
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model)
    optimizers = build_muon(model, lr=0.01, **OPTIONS)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    train(model, optimizers, 5, rows)
    return [p.full_tensor() if kind == "fsdp" else p.detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_equal_one_process(kind: str) -> None:
    if kind == "fsdp" and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("`fully_shard` of this torch needs a GPU")
    model = make_model().double()
    train(model, build_muon(model, lr=0.01, **OPTIONS), 5)

    for result in run_on_ranks(train_on_rank, 2, kind):
        for expected, actual in zip(model.parameters(), result, strict=True):
            torch.testing.assert_close(actual, expected.detach(), rtol=1e-9, atol=1e-9)


def collectives_of_rank() -> dict[str, int]:
    """The collective operations of a step of a sharded model with one matrix for Muon."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    model: Any = fully_shard(make_model().double())
    muon, _ = build_muon(model, lr=0.01, normalize=True, cautious=True, momentum=(0.85, 0.98))
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    with CommDebugMode() as mode:
        muon.step()
    return {str(name).rpartition(".")[2]: count for name, count in mode.get_comm_counts().items() if count}


@pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="`fully_shard` of this torch needs a GPU")
def test_a_sharded_matrix_is_gathered_once_per_step() -> None:
    for counts in run_on_ranks(collectives_of_rank, 2):
        assert {"all_gather_into_tensor": 1} == counts


def test_a_copy_of_the_run_is_independent() -> None:
    model = make_model()
    state = started(torch.optim.AdamW(model.parameters()), model, Muon())
    copied = copy.deepcopy(state.optimizers[0])

    assert copied.param_groups[0]["lr"] == state.optimizers[0].param_groups[0]["lr"]
