"""`apply_factorization` and `Factorize` on models, with the engine."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from composer import functional as cf
from composer.algorithms.factorize import Factorize, FactorizedConv2d, FactorizedLinear, apply_factorization
from composer.algorithms.factorize.factorize import LOG_NUM_CONV2D_REPLACEMENTS_KEY, LOG_NUM_LINEAR_REPLACEMENTS_KEY
from composer.algorithms.warnings import NoEffectWarning
from composer.core import REPLACES_CONVS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger, LoggerDestination
from composer.testing import ConvModel

SMALL: dict[str, Any] = {"min_channels": 8, "latent_channels": 0.25, "min_features": 10, "latent_features": 4}


class Records(LoggerDestination):
    """Records the logged hyperparameters, call by call."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.calls.append(hyperparameters)


def start(algorithm: Algorithm, model: nn.Module) -> State:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = State(model=model, max_duration="1ep", optimizers=optimizer, algorithms=algorithm, callbacks=Records())
    Engine(state).run_event("init")
    return state


def test_the_function_is_registered() -> None:
    assert apply_factorization is cf.apply_factorization


@pytest.mark.parametrize(("convs", "linears"), [(True, True), (True, False), (False, True)])
def test_large_layers_are_replaced_at_init(convs: bool, linears: bool) -> None:
    model, x = ConvModel(), torch.randn(2, 32, 16, 16)
    expected = model((x, None)).shape
    state = start(Factorize(convs, linears, **SMALL), model)

    assert [convs] * 3 == [isinstance(conv, FactorizedConv2d) for conv in (model.conv1, model.conv2, model.conv3)]
    assert [linears] * 2 == [isinstance(linear, FactorizedLinear) for linear in (model.linear1, model.linear2)]
    assert model.conv1 is model.module[0]
    calls = [{LOG_NUM_CONV2D_REPLACEMENTS_KEY: 3}] * convs + [{LOG_NUM_LINEAR_REPLACEMENTS_KEY: 2}] * linears
    assert calls == state.callbacks[0].calls  # type: ignore[attr-defined]
    assert expected == model((x, None)).shape
    assert (6 if convs else 3) == sum(isinstance(module, nn.Conv2d) for module in model.modules())
    assert (4 if linears else 2) == sum(isinstance(module, nn.Linear) for module in model.modules())


def test_the_optimizer_trains_the_factors() -> None:
    model = ConvModel()
    state = start(Factorize(**SMALL), model)
    trained = {id(parameter) for parameter in state.optimizers[0].param_groups[0]["params"]}
    model((torch.randn(2, 32, 16, 16), None)).sum().backward()

    assert {id(parameter) for parameter in model.parameters()} == trained
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_only_layers_that_are_large_enough_and_would_be_faster_are_replaced() -> None:
    model = nn.Sequential(
        nn.Conv2d(7, 16, 3),
        nn.Conv2d(16, 7, 3),
        nn.Conv2d(16, 16, 3, groups=2),
        nn.Linear(9, 64),
        nn.Linear(16, 16),
        nn.Linear(10, 10),
    )
    apply_factorization(model, min_channels=8, min_features=10, latent_features=5)

    assert [nn.Conv2d] * 3 + [nn.Linear, FactorizedLinear, nn.Linear] == [type(layer) for layer in model]


def test_dtype_mode_and_frozen_others_are_kept() -> None:
    model = ConvModel().to(torch.bfloat16).eval()
    apply_factorization(model, **SMALL)

    assert {torch.bfloat16} == {parameter.dtype for parameter in model.parameters()}
    assert not any(module.training for module in model.modules())


def test_applying_it_twice_is_applying_it_once() -> None:
    """Also if a factor is itself large enough."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Conv2d(64, 64, 3))
    for _ in range(2):
        apply_factorization(model, min_channels=2, min_features=2)

    assert ["0.module0.weight", "0.module1.weight", "0.module1.bias"] == list(
        dict(model[0].named_parameters(prefix="0"))
    )
    assert nn.Linear is type(model[0].module0)
    assert nn.Conv2d is type(model[1].module0)


@pytest.mark.parametrize("training", [False, True])
def test_transformers_of_torch_still_work(training: bool) -> None:
    """They read the weights of some of their layers instead of calling them."""
    model = nn.Sequential(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)).train(training)
    apply_factorization(model, min_features=16)
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        fast = model(x)  # torch's fused layer, in evaluation

    assert isinstance(model[0].linear1, FactorizedLinear)
    assert not isinstance(model[0].self_attn.out_proj, FactorizedLinear)
    torch.testing.assert_close(model.train()(x), fast)


@pytest.mark.parametrize("model", [nn.Linear(512, 512), nn.Sequential(nn.Linear(8, 8), nn.ReLU()), ConvModel()])
def test_a_model_with_nothing_to_replace_gets_a_warning(model: nn.Module) -> None:
    with pytest.warns(NoEffectWarning, match=r"`apply_factorization` changed nothing.*at least 512 channels"):
        apply_factorization(model)


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Standardized(nn.Conv2d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(input, self.weight - self.weight.mean(), self.bias)


class Adapter(nn.Module):
    """A layer wrapped as by peft."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora_A = nn.Linear(16, 16), nn.Linear(16, 16)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)
        self.head.weight = self.embedding.weight


def frozen() -> nn.Module:
    return nn.Linear(16, 16).requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "names", "reason"),
    [
        (lambda: Doubled(16, 16), "`0` (Doubled)", "its `forward` is not that of `Linear`"),
        (lambda: Standardized(16, 16, 1), "`0` (Standardized)", "its `forward` is not that of `Conv2d`"),
        (lambda: weight_norm(nn.Linear(16, 16)), "`0` (ParametrizedLinear)", "its weight is computed from other"),
        (frozen, "`0` (Linear)", "it is frozen"),
        (Tied, "`0.head` (Linear)", "another layer has the same parameter"),
        (Adapter, "`0.base_layer` and 1 more (Linear)", "an adapter reads its weight"),
    ],
)
def test_layers_whose_weights_must_not_be_lost_stay_with_one_warning(make: Any, names: str, reason: str) -> None:
    model = nn.Sequential(make(), nn.Linear(16, 16))
    before = list(model[0].modules())
    with pytest.warns(UserWarning, match=re.escape(f"{names}: {reason}")) as caught:
        apply_factorization(model, min_channels=8, min_features=8)

    assert 1 == len(caught)
    assert before == list(model[0].modules())
    assert isinstance(model[1], FactorizedLinear)


def test_layers_adapted_by_peft_stay() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["0"]))
    model[1].requires_grad_()  # peft freezes what it does not adapt
    x = torch.randn(2, 16)
    with pytest.warns(UserWarning, match="an adapter reads its weight"):
        apply_factorization(adapted, min_features=8, latent_features=2)

    assert ["base_layer"] == [n for n, m in adapted.base_model.model[0].named_children() if type(m) is nn.Linear]
    expected = adapted(x)
    torch.testing.assert_close(expected, adapted.merge_and_unload()(x))


def test_factors_join_the_groups_of_the_weights_and_biases_they_replace() -> None:
    model = ConvModel()
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() <= 1]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    optimizer.param_groups[1]["weight_decay"] = 0.0
    apply_factorization(model, optimizers=optimizer, **SMALL)

    for kind, group in zip((True, False), optimizer.param_groups, strict=True):
        expected = {id(p) for p in model.parameters() if (p.dim() > 1) is kind}
        assert expected == {id(p) for p in group["params"]}


@pytest.mark.parametrize("name", ["latent_channels", "latent_features"])
def test_latent_sizes_must_be_positive(name: str) -> None:
    for function in (Factorize, lambda **options: apply_factorization(nn.Linear(1, 1), **options)):
        with pytest.raises(ValueError, match=rf"`{name}` must be positive, got 0"):
            function(**{name: 0})


def test_it_is_required_on_load() -> None:
    assert Factorize.required_on_load()
    expected = (
        "Factorize(factorize_convs=True,factorize_linears=True,min_channels=256,latent_channels=0.25,min_features=256,"
        "latent_features=128)"
    )
    assert expected == repr(Factorize())


class ReplacesConvs(Algorithm):
    """A method that looks for convolutions."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_CONVS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self.seen = type(state.model.conv1)


@pytest.mark.parametrize("reverse", [False, True])
def test_methods_that_replace_convolutions_get_whole_ones_in_any_order_of_the_list(reverse: bool) -> None:
    other = ReplacesConvs()
    algorithms = [Factorize(**SMALL), other]
    state = State(model=ConvModel(), max_duration="1ep")
    Engine(state, algorithms=algorithms[::-1] if reverse else algorithms).run_event("init")

    assert nn.Conv2d is other.seen
    assert isinstance(state.model.conv1, FactorizedConv2d)
