"""The units of a sharded model, their initialization and their precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_runs import (
    BATCHES,
    FSDP,
    Block,
    Narrow,
    Net,
    Regression,
    answer,
    batches,
    filled,
    gap,
    make,
    needs_sharding,
    on_ranks,
    part,
    run_all,
    trained,
    weights,
)
from torch.distributed.tensor import DTensor

from composer.distributed._units import plan_units
from composer.testing import RandomClassificationDataset, SimpleModel, run_on_ranks
from composer.trainer import Trainer
from composer.utils import dist

pytestmark = needs_sharding
EXACT = 1e-12
Scenarios = dict[str, Callable[..., Any]]


# ---- weights that are not there yet, activations, precision ----


class Fresh(torch.nn.Module):
    """Layers that are built on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
        self.own = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.norm(self.one(x))) + self.own


def _init(module: torch.nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        torch.nn.init.normal_(parameter)
    for buffer in module.buffers(recurse=False):
        buffer.fill_(1.0)


class Initialized(Fresh):
    def param_init_fn(self, module: torch.nn.Module) -> None:
        _init(module)


class ResetItself(Fresh):
    def reset_parameters(self) -> None:
        self.own.data.fill_(3.0)


class InitializedModel(Regression):
    def param_init_fn(self, module: torch.nn.Module) -> None:
        _init(module)


def on_meta(cls: type[Regression], net: Any, own: bool, where: tuple[bool, bool] = (True, True)) -> Regression:
    if not where[dist.get_global_rank()]:
        return cls(net, own=own).double()
    with torch.device("meta"):
        return cls(net, own=own).double()


def meta() -> Any:
    built = {
        "child": lambda: on_meta(Regression, Initialized, own=False),
        "model": lambda: on_meta(InitializedModel, Fresh, own=True),
        "reset": lambda: on_meta(Regression, ResetItself, own=False),
        "rank 0 has it": lambda: on_meta(Regression, Fresh, own=True, where=(False, True)),
    }
    built["reset"] = lambda: _without_buffers(on_meta(Regression, ResetItself, own=False))
    built["child"] = lambda: _without_buffers(on_meta(Regression, Initialized, own=False))
    started: dict[str, Any] = {}
    for name, build in built.items():
        trainer = make(FSDP, model=build(), optimizer="adamw")
        started[name] = weights(trainer)
        trainer.fit(duration="1ba")
        started[f"{name} trained"] = weights(trainer)
        trainer.close()
    return started


def _without_buffers(model: Regression) -> Regression:
    del model.shift
    model.shift = 0.0
    return model


class Trained(Regression):
    """Returns the parameters that are trained, and has others."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rank = float(dist.get_global_rank())
        self.frozen = torch.nn.Parameter(torch.full((4,), rank, dtype=torch.float64), requires_grad=False)

    def parameters(self, recurse: bool = True) -> Any:
        return (parameter for parameter in super().parameters(recurse) if parameter.requires_grad)


def hidden() -> torch.Tensor:
    trainer = make(FSDP, model=Trained(Net))
    weight = dict(trainer.state.model.named_parameters())["frozen"]
    assert isinstance(weight, DTensor)
    whole = weight.full_tensor()
    trainer.close()
    return whole


def meta_errors() -> list[str]:
    return [
        answer(lambda: make(FSDP, model=on_meta(Regression, Fresh, own=True))),
        answer(lambda: make(FSDP, model=on_meta(Regression, Fresh, own=True, where=(True, False)))),
    ]


class Chosen(Narrow):
    def activation_checkpointing_fn(self, module: torch.nn.Module) -> bool:
        return isinstance(module, Block)


class Marked(Narrow):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1]._activation_checkpointing = True


class Listed(Narrow):
    _no_split_modules = ("Block",)


def recomputed() -> dict[str, Any]:
    plain = trained(FSDP, model=filled(Regression(Narrow)))
    found = {}
    for net in (Chosen, Marked, Listed):
        for options in (
            {"activation_checkpointing": True},
            {"activation_cpu_offload": True},
            {"activation_checkpointing": True, "activation_cpu_offload": True},
        ):
            model = filled(Regression(net))
            run = trained({"fsdp": options}, model=model)
            found[f"{net.__name__} {'+'.join(options)}"] = gap(run, plain), model.net.layers[1].forwards
    return found


def nothing_to_recompute() -> str:
    return answer(lambda: make({"fsdp": {"activation_checkpointing": True}}, model=filled(Regression(Narrow))))


class Seen(torch.nn.Module):
    """Notes the dtypes that its weights have in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.layer.weight.dtype
        return self.layer(x)


def dtypes() -> dict[str, Any]:
    found = {}
    for precision in ("fp32", "amp_bf16"):
        for policy in ("DEFAULT", "PURE", "FULL", {"param_dtype": "bf16", "reduce_dtype": torch.float32}):
            model = Regression(Seen, own=False)
            loader = [(x.float(), y.float()) for x, y in batches(part())]
            trainer = make(
                {"fsdp": {"mixed_precision": policy}}, model=model, train_dataloader=loader, precision=precision
            )
            trainer.fit(duration="1ba")
            groups = [unit._get_fsdp_state()._fsdp_param_group for unit in trainer._strategy._units]
            reduced = {g._reduce_dtype or model.net.seen for g in groups}
            kept = {p.dtype for p in model.parameters()}
            found[f"{precision} {policy if isinstance(policy, str) else 'dict'}"] = model.net.seen, reduced, kept
            trainer.close()
    return found


def offloaded() -> str:
    return answer(lambda: make({"fsdp": {"cpu_offload": True}}))


# ---- what is a unit ----


class Asks(Net):
    """Answers per module."""

    answers: Any = None

    def fsdp_wrap_fn(self, module: torch.nn.Module) -> Any:
        return (self.answers or {}).get(type(module).__name__, False)


def units() -> dict[str, Any]:
    def of(answers: Any, change: Any = lambda net: None, config: Any = FSDP) -> list[str]:
        net = type("Asking", (Asks,), {"answers": answers}) if answers is not None else Net
        model = filled(Regression(net, own=False))
        change(model.net)
        trainer = make(config, model=model)
        found = [name for name, module in model.named_modules() if module in trainer._strategy._units]
        trainer.close()
        return found

    def mark(value: bool) -> Any:
        return lambda net: setattr(net.blocks[1], "_fsdp_wrap", value)

    return {
        "classes": of(None),
        "no classes": of(None, config={"fsdp": {"auto_wrap": False}}),
        "asked": of({"Block": True}),
        "options": of({"Block": {"reshard_after_forward": False}}),
        "marked": of({}, mark(True)),
        "unmarked": of({"Block": True}, mark(False)),
        "outside": of({}, lambda net: setattr(net, "_fsdp_wrap", False)),
        "bad key": answer(lambda: of({"Block": {"sharding": 1}})),
    }


def tied_across() -> list[str]:
    def tied(change: Callable[[Any], None]) -> str:
        model = filled(Regression())
        change(model)
        return answer(lambda: make(FSDP, model=model))

    def siblings(model: Any) -> None:
        model.net.blocks[1].one.weight = model.net.blocks[0].one.weight

    def own(model: Any) -> None:
        model.scale = model.net.first.bias

    return [tied(siblings), tied(own)]


def trains_the_same_by_any_units() -> list[float]:
    plain = trained()
    net = type("Asking", (Asks,), {"answers": {"Block": {"reshard_after_forward": False}, "Linear": True}})
    return [
        gap(trained(FSDP, model=filled(Regression(type("Whole", (Net,), {"_fsdp_wrap": False})))), plain),
        gap(
            trained(FSDP, model=filled(Regression(lambda: _untied(net())))),
            trained(model=filled(Regression(lambda: _untied(net())))),
        ),
        gap(trained({"fsdp": {"reshard_after_forward": False}}), plain),
    ]


def _untied(net: Any) -> Any:
    net.blocks[0].two.weight = torch.nn.Parameter(torch.zeros(5, 5))
    return net


TWO: Scenarios = {
    f.__name__: f
    for f in (
        meta,
        hidden,
        meta_errors,
        recomputed,
        nothing_to_recompute,
        dtypes,
        offloaded,
        units,
        tied_across,
        trains_the_same_by_any_units,
    )
}


def train_on_two() -> dict[str, Any]:
    return run_all(TWO)


@pytest.fixture(scope="module")
def two() -> Callable[[str], list[Any]]:
    """Return the results of a scenario on two ranks."""
    return on_ranks(train_on_two, 2)


def test_the_meta_device_is_initialised_alike_on_all_ranks(two: Any) -> None:
    first, second = two("meta")

    for name in first:
        for key in first[name]:
            assert torch.equal(first[name][key], second[name][key]) or "running" in key, (name, key)
    assert not any(torch.isnan(weight).any() for weight in first["model trained"].values())
    assert torch.equal(torch.full((2,), 3.0, dtype=torch.float64), first["reset"]["net.own"])
    assert torch.equal(torch.ones(4, dtype=torch.float64), first["child"]["net.norm.running_mean"])
    assert torch.equal(torch.zeros(4, dtype=torch.float64), first["reset"]["net.norm.running_mean"])
    assert torch.equal(torch.ones(2, dtype=torch.float64), first["model"]["shift"])
    assert torch.equal(torch.zeros(2, dtype=torch.float64), first["rank 0 has it"]["net.own"])
    assert not torch.equal(first["reset"]["net.one.weight"], first["reset trained"]["net.one.weight"])


def test_parameters_that_a_model_does_not_return_are_those_of_rank_0(two: Any) -> None:
    for frozen in two("hidden"):
        assert torch.equal(torch.zeros(4, dtype=torch.float64), frozen)


def test_a_model_that_cannot_be_initialised_is_refused(two: Any) -> None:
    for no_way, only_first in two("meta_errors"):
        assert "is on the meta device and cannot be initialized" in no_way
        assert "Detected mixed initialization" in only_first


def test_activations_are_computed_again_or_wait_in_host_memory(two: Any) -> None:
    for found in two("recomputed"):
        for name, (difference, forwards) in found.items():
            assert difference < EXACT, name
            # Each batch also has a forward pass for the metrics.
            assert forwards == BATCHES * (3 if "checkpointing" in name else 2), name


def test_activations_of_nothing_are_refused(two: Any) -> None:
    for message in two("nothing_to_recompute"):
        assert (
            "ValueError: `activation_checkpointing` or `activation_cpu_offload` is on, but no module is selected"
            in message
        )


def test_a_policy_names_the_dtypes_of_weights_and_sums(two: Any) -> None:
    half, single = torch.bfloat16, torch.float32
    expected = {
        "fp32 DEFAULT": (single, {single}),
        "fp32 PURE": (single, {single}),
        "fp32 FULL": (single, {single}),
        "fp32 dict": (half, {single}),
        "amp_bf16 DEFAULT": (half, {single}),
        "amp_bf16 PURE": (half, {half}),
        "amp_bf16 FULL": (single, {single}),
        "amp_bf16 dict": (half, {single}),
    }
    for found in two("dtypes"):
        assert {name: (*dtypes, {single}) for name, dtypes in expected.items()} == found


def test_shards_on_the_cpu_are_in_host_memory_already(two: Any) -> None:
    for message in two("offloaded"):
        assert "ValueError: `cpu_offload` must be False on the CPU" in message


def test_the_model_says_what_is_a_unit(two: Any) -> None:
    for found in two("units"):
        blocks = ["net", "net.blocks.0", "net.blocks.1"]
        assert blocks == found["classes"]
        assert ["net"] == found["no classes"]
        assert blocks == found["asked"] == found["options"]
        assert ["net", "net.blocks.1"] == found["marked"]
        assert ["net", "net.blocks.0"] == found["unmarked"]
        assert [""] == found["outside"]
        assert "KeyError: \"`fsdp_wrap_fn` returned 'sharding' for 'net.blocks." in found["bad key"]


def test_parameters_tied_across_units_are_refused(two: Any) -> None:
    for siblings, own in two("tied_across"):
        assert "Detected tied parameters between modules designated for FSDP wrapping" in siblings
        assert "Parameter sharing detected between modules to be sharded and module" in own


def test_units_change_nothing_but_memory(two: Any) -> None:
    for gaps in two("trains_the_same_by_any_units"):
        assert max(gaps) < EXACT, gaps


def train_simple_model(config: Any) -> float:
    model = SimpleModel()  # whose `fc1` and `fc2` are also in `module`
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(RandomClassificationDataset(size=16), batch_size=4),
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
        seed=0,
        progress_bar=False,
        parallelism_config=config,
    )
    trainer.fit()
    weights: dict[str, Any] = trainer.state.model.state_dict()
    return sum(getattr(w, "full_tensor", lambda w=w: w)().sum().item() for w in weights.values())


def two_names() -> tuple[list[str], float, float]:
    return [unit.name for unit in plan_units(SimpleModel())], *map(train_simple_model, (None, {"fsdp": {}}))


@needs_sharding
def test_a_child_with_two_names_is_in_one_unit() -> None:
    ((names, whole, sharded),) = run_on_ranks(two_names, 1)

    assert names == ["module"]
    assert whole == sharded


def test_members_of_a_container_are_the_units() -> None:
    blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
    kept = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2)})
    kept._fsdp_wrap = False  # type: ignore[assignment]
    model = torch.nn.Module()
    model.parts = torch.nn.ModuleDict({"blocks": blocks, "head": torch.nn.Sequential(torch.nn.Linear(2, 2))})
    model.kept = kept

    assert [unit.name for unit in plan_units(model)] == ["parts.blocks.0", "parts.blocks.1", "parts.head", ""]
