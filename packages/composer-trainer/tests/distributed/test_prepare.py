"""Models sharded in a loop of one's own, on two ranks, against the same loop with `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sharded_runs import Narrow, Regression, answer, batches, filled, needs_sharding, on_ranks, part, run_all
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel

import composer.distributed
from composer.core import State
from composer.core.state import fsdp_state_dict_type_context
from composer.distributed import dist_strategy, prepare_distributed, prepare_fsdp_module, prepare_tp_module
from composer.distributed.prepare_distributed import parallelize_composer_model
from composer.utils.parallelism import FSDP2Config, FSDPConfig, ParallelismConfig, TPConfig

EXACT = 1e-12


def model() -> Regression:
    made: Any = filled(Regression(Narrow))
    return made


def loop(prepare: Callable[[Any, Any], Any], rows: slice | None = None) -> tuple[dict[str, torch.Tensor], Any]:
    """Train a model that `prepare` changes; return its whole weights and the share of them that this rank holds."""
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    net = prepare(trained, optimizer) or trained
    for batch in batches(part() if rows is None else rows):
        loss = trained.loss(net(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with fsdp_state_dict_type_context(trained, "full"):
        state = trained.state_dict()
    held = sum(_local(p).numel() for p in trained.parameters()) / sum(p.numel() for p in trained.parameters())
    return {name: tensor.detach().clone() for name, tensor in state.items()}, held


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    assert not any(isinstance(tensor, DTensor) for tensor in one.values())
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def data_parallel(model: Any, optimizer: Any) -> Any:
    return composer.distributed.prepare_ddp_module(model, find_unused_parameters=False)


# `scale` is used in `loss`, outside the forward pass of `DistributedDataParallel`, so it is frozen in all runs.
def frozen(prepare: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def prepared(model: Any, optimizer: Any) -> Any:
        model.scale.requires_grad = False
        return prepare(model, optimizer)

    return prepared


def results_of(prepare: Callable[[Any, Any], Any]) -> tuple[float, float]:
    expected, _ = loop(frozen(data_parallel))
    found, held = loop(frozen(prepare))
    return gap(found, expected), held


def by_config() -> Any:
    returned = []

    def prepare(model: Any, optimizer: Any) -> None:
        returned.append(prepare_fsdp_module(model, [optimizer], FSDPConfig(sharding_strategy="FULL_SHARD")))

    return *results_of(prepare), returned


def by_dict() -> Any:
    return results_of(lambda model, optimizer: prepare_fsdp_module(model, optimizer, {}, "fp32", "cpu")[1])


def of_composer_model() -> Any:
    return results_of(lambda model, optimizer: parallelize_composer_model(model, optimizer, FSDP2Config()))


def on_the_meta_device() -> Any:
    with torch.device("meta"):
        fresh = Regression(Narrow, own=False).double()
    del fresh.shift
    fresh.shift = 0.0
    prepare_fsdp_module(fresh, None, {}, te_rng_seed=5)
    with fsdp_state_dict_type_context(fresh, "full"):
        return fresh.state_dict()


def plan() -> dict[str, Any]:
    return {"net.layers.0": ColwiseParallel(output_layouts=Replicate())}


def split_layers() -> Any:
    def prepare(model: Any, optimizer: Any) -> None:
        prepare_tp_module(model, optimizer, {"tensor_parallel_degree": 2, "layer_plan": plan()})

    everything = slice(None)
    found, held = loop(frozen(prepare), everything)
    expected, _ = loop(frozen(lambda model, optimizer: None), everything)
    return gap(found, expected), held


def split_and_sharded() -> Any:
    """One rank that shards and two that split layers, and an error without meshes."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shards", "parts"))
    messages = []

    def prepare(model: Any, optimizer: Any) -> None:
        prepare_tp_module(model, optimizer, TPConfig(device_mesh=mesh["parts"], layer_plan=plan()))
        messages.append(answer(lambda: prepare_fsdp_module(model, optimizer, FSDPConfig())))
        prepare_fsdp_module(model, optimizer, FSDP2Config(device_mesh=mesh["shards"]))

    everything = slice(None)
    found, _ = loop(frozen(prepare), everything)
    expected, _ = loop(frozen(lambda model, optimizer: None), everything)
    return gap(found, expected), messages


def state_dicts() -> Any:
    sharded = model()
    prepare_fsdp_module(sharded, None, {})
    with fsdp_state_dict_type_context(sharded, "sharded"):
        kinds = {type(tensor).__name__ for name, tensor in sharded.state_dict().items() if name != "shift"}
    with fsdp_state_dict_type_context(sharded):
        whole = sharded.state_dict()
    after = {type(tensor).__name__ for name, tensor in sharded.state_dict().items() if name != "shift"}
    return kinds, gap(whole, model().state_dict()), after


def errors() -> dict[str, str]:
    foreign = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    return {
        "auto": answer(lambda: prepare_fsdp_module(model(), None, {}, auto_microbatching=True)),
        "foreign": answer(lambda: parallelize_composer_model(model(), foreign, FSDP2Config())),
        "offload": answer(lambda: prepare_fsdp_module(model(), None, {"cpu_offload": True})),
        "no model": answer(lambda: parallelize_composer_model(torch.nn.Linear(1, 1), None, {})),  # type: ignore[arg-type]
        "plan": answer(lambda: prepare_tp_module(model(), None, TPConfig(None, 2, {"no": ColwiseParallel()}))),
        "type": answer(lambda: prepare_tp_module(model(), None, 3)),  # type: ignore[arg-type]
    }


def prepare_on_two() -> dict[str, Any]:
    scenarios = (
        by_config,
        by_dict,
        of_composer_model,
        on_the_meta_device,
        split_layers,
        split_and_sharded,
        state_dicts,
        errors,
    )
    return run_all({function.__name__: function for function in scenarios})


@pytest.fixture(scope="module")
def two() -> Callable[[str], list[Any]]:
    """Return the results of a scenario on two ranks."""
    return on_ranks(prepare_on_two, 2)


@needs_sharding
def test_the_first_version_of_fsdp_is_translated(two: Any) -> None:
    for difference, held, returned in two("by_config"):
        assert difference < EXACT
        assert held < 0.7
        assert returned == [([], {})]


@needs_sharding
@pytest.mark.parametrize("scenario", ["by_dict", "of_composer_model"])
def test_a_sharded_model_trains_as_in_data_parallel(two: Any, scenario: str) -> None:
    for difference, held in two(scenario):
        assert difference < EXACT
        assert held < 0.7


@needs_sharding
def test_a_model_on_the_meta_device_is_initialized_alike(two: Any) -> None:
    first, second = two("on_the_meta_device")

    assert first["net.layers.0.weight"].abs().sum() > 0
    assert gap(first, second) == 0


@needs_sharding
def test_split_layers_train_as_one_process(two: Any) -> None:
    for difference, held in two("split_layers"):
        assert difference < EXACT
        assert held < 1


@needs_sharding
def test_a_model_can_be_split_and_sharded_on_one_mesh(two: Any) -> None:
    for difference, [message] in two("split_and_sharded"):
        assert difference < EXACT
        assert "`fsdp_config` must have a `device_mesh` if layers are split by `prepare_tp_module`" in message


@needs_sharding
def test_state_dicts_are_whole_inside_the_context_only(two: Any) -> None:
    for inside, difference, after in two("state_dicts"):
        assert inside == after == {"DTensor"}
        assert difference == 0


@needs_sharding
def test_what_cannot_be_prepared_is_answered(two: Any) -> None:
    for found in two("errors"):
        assert "`auto_microbatching` must be False, got True" in found["auto"]
        assert "`optimizers` must have parameters of `model`" in found["foreign"]
        assert "`cpu_offload` must be False on the CPU" in found["offload"]
        assert "TypeError: `composer_model` must be a `ComposerModel`, got Linear" in found["no model"]
        assert "`layer_plan` must name modules of the model, got 'no'" in found["plan"]
        assert "TypeError: `tp_config` must be a `TPConfig`" in found["type"]


def test_a_process_group_is_needed() -> None:
    with pytest.raises(RuntimeError, match="Sharding a model needs a process group"):
        prepare_fsdp_module(model(), None, {})
    with pytest.raises(RuntimeError, match="Sharding a model needs a process group"):
        parallelize_composer_model(model(), None, {})
    with pytest.raises(RuntimeError, match="Splitting layers needs a process group"):
        prepare_tp_module(model(), None, TPConfig(None, 2, {"net": ColwiseParallel()}))


def test_the_names_are_where_programs_look() -> None:
    for name in ("DDPSyncStrategy", "ddp_sync_context", "prepare_ddp_module"):
        assert getattr(composer.distributed, name) is getattr(dist_strategy, name)
    assert composer.distributed.prepare_fsdp_module is dist_strategy.prepare_fsdp_module
    assert composer.distributed.prepare_tp_module is dist_strategy.prepare_tp_module
    assert composer.distributed.parallelize_composer_model is prepare_distributed.parallelize_composer_model


@pytest.mark.parametrize("kind", ["local", "other"])
def test_other_kinds_of_state_dicts_are_not_there(kind: str) -> None:
    with (
        pytest.raises(NotImplementedError, match=f"`state_dict_type` must be 'full' or 'sharded', got '{kind}'"),
        fsdp_state_dict_type_context(torch.nn.Linear(1, 1), kind),
    ):
        pass


def test_a_state_describes_how_its_model_is_sharded() -> None:
    given = {"fsdp": {"state_dict_type": "sharded"}}
    for config in (given, ParallelismConfig(**given)):
        state = State(model=model(), max_duration="1ep", parallelism_config=config)

        assert isinstance(state.fsdp_config, FSDP2Config)
        assert ("sharded", True, 2) == (
            state.fsdp_state_dict_type,
            state.fsdp_sharded_state_dict_enabled,
            state.fsdp_config_version,
        )
        assert not state.fsdp_enabled
        assert not state.load_monolith_rank0_only
    assert State(model=model(), max_duration="1ep", parallelism_config={}).fsdp_config is None
    rank0_only = {"fsdp": {"load_monolith_rank0_only": True}}
    with pytest.warns(UserWarning, match="`load_monolith_rank0_only=True` has no effect"):
        state = State(model=model(), max_duration="1ep", parallelism_config=rank0_only)
    assert state.load_monolith_rank0_only
