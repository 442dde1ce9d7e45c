"""Tests of the configurations for `Trainer(parallelism_config=...)`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from sharded_runs import CAN_SHARD_ON_CPU, FSDP, answer, make

from composer.distributed.mesh import mesh_shape
from composer.testing import run_on_ranks
from composer.utils.parallelism import FSDP2Config, FSDPConfig, ParallelismConfig, TPConfig


def of(config: Any) -> ParallelismConfig:
    parsed = ParallelismConfig.of(config)
    assert parsed is not None
    return parsed


def fsdp(**attrs: Any) -> FSDP2Config:
    config = of({"fsdp": attrs}).fsdp
    assert isinstance(config, FSDP2Config)
    return config


def test_nothing_to_divide_is_no_configuration() -> None:
    assert [None] * 4 == [ParallelismConfig.of(config) for config in (None, {}, {"fsdp": None}, ParallelismConfig())]


def test_a_dict_has_the_defaults_of_the_first_version_and_an_object_its_own() -> None:
    assert "full" == fsdp().state_dict_type == FSDPConfig().state_dict_type
    assert "sharded" == FSDP2Config().state_dict_type == of({"fsdp": FSDP2Config()}).fsdp.state_dict_type  # type: ignore[union-attr]
    assert "full" == of({"fsdp2": {}}).fsdp.state_dict_type  # type: ignore[union-attr]


def test_what_is_always_so_is_taken_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert FSDPConfig(use_orig_params=True, limit_all_gathers=True, load_planner=None, backward_prefetch_limit=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("use_orig_params", False), ("backward_prefetch", "BACKWARD_PRE"), ("load_monolith_rank0_only", True)],
)
def test_what_has_no_effect_any_more_is_said(name: str, value: Any) -> None:
    with pytest.warns(UserWarning, match=f"`{name}={value!r}` has no effect"):
        fsdp(**{name: value})


@pytest.mark.parametrize("limit", [0, -1, 1.5, "two"])
@pytest.mark.parametrize("name", ["forward_prefetch_limit", "backward_prefetch_limit"])
def test_a_limit_of_prefetching_is_a_number_of_units(name: str, limit: Any) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be a number of units"):
        fsdp(**{name: limit})


@pytest.mark.parametrize(
    ("strategy", "reshard", "copies"),
    [("FULL_SHARD", True, None), ("SHARD_GRAD_OP", False, None), ("HYBRID_SHARD", True, 2)],
)
def test_a_strategy_is_what_it_is_called_now(
    strategy: str, reshard: bool, copies: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = fsdp(sharding_strategy=strategy)

    assert (reshard, copies) == (config.reshard_after_forward, config.data_parallel_replicate_degree)


def test_a_hybrid_strategy_takes_degrees() -> None:
    shards = fsdp(sharding_strategy="HYBRID_SHARD", data_parallel_shard_degree=2)
    copies = fsdp(sharding_strategy="_HYBRID_SHARD_ZERO2", data_parallel_replicate_degree=4)

    assert (2, -1) == (shards.data_parallel_shard_degree, shards.data_parallel_replicate_degree)
    assert (-1, 4, False) == (
        copies.data_parallel_shard_degree,
        copies.data_parallel_replicate_degree,
        copies.reshard_after_forward,
    )


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"sharding_strategy": "NO_SHARD"}, "is data parallel training: leave `parallelism_config` out"),
        ({"sharding_strategy": "SOME"}, "`sharding_strategy` must be 'FULL_SHARD', .* got 'SOME'"),
        ({"mixed_precison": "PURE"}, "Unknown argument 'mixed_precison' of 'fsdp'. Known ones are activation"),
        ({"ignored_modules": []}, "`ignored_modules` is not supported any more; give these modules"),
        ({"process_group": "node"}, "`process_group` is not supported any more; give `data_parallel_shard_degree`"),
        ({"device_mesh": object()}, "Directly specifying device mesh for FSDP was deprecated"),
        ({"_device_mesh": object()}, "Directly specifying device mesh for FSDP was deprecated"),
        ({"state_dict_type": "local"}, "`state_dict_type` must be 'full' or 'sharded', got 'local'"),
        ({"mixed_precision": "HALF"}, "`mixed_precision` must be 'FULL', 'DEFAULT', 'PURE' or a dict"),
        ({"mixed_precision": {"param_dtype": "int4"}}, "`param_dtype` must be a dtype, 'fp32', 'fp16' or 'bf16'"),
        ({"mixed_precision": {"dtype": "bf16"}}, "`mixed_precision` takes output_dtype, param_dtype, reduce_dtype"),
        ({"data_parallel_shard_degree": 0}, "`data_parallel_shard_degree` must be a positive number of ranks, or -1"),
        ({"data_parallel_replicate_degree": 1.5}, "`data_parallel_replicate_degree` must be a positive number"),
        (
            {"data_parallel_shard_degree": -1, "data_parallel_replicate_degree": -1},
            "At most one of `data_parallel_shard_degree` and",
        ),
        ({"reshard_after_forward": 0.5}, "`reshard_after_forward` must be True, False or the positive number"),
    ],
)
def test_bad_arguments_of_sharding_are_answered(attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fsdp(**attrs)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (7, TypeError, "`parallelism_config` must be a dict with 'fsdp' and 'tp'"),
        ({"fsdp": 7}, TypeError, "'fsdp' must be a dict or an `FSDP2Config`, got 7"),
        ({"fsdp": {}, "tp": 7}, TypeError, "'tp' must be a dict or a `TPConfig`, got 7"),
        ({"state_dict_type": "full"}, ValueError, "has the entries 'fsdp' and 'tp', got 'state_dict_type'"),
        ({"fsdp": {}, "deepspeed": {}}, ValueError, "got 'deepspeed'.* of another package must be the only entry"),
        ({"fsdp": {}, "fsdp2": {}}, ValueError, "`fsdp` and `fsdp2` are two names of the same argument"),
        ({"fsdp": {}, "tp": {"degree": 2}}, ValueError, "Unknown arguments of 'tp': 'degree'"),
        ({"tp": {"tensor_parallel_degree": 2, "layer_plan": {"a": 1}}}, ValueError, "`tp` needs `fsdp`"),
        ({"fsdp": {}, "tp": {"tensor_parallel_degree": 2}}, ValueError, "`layer_plan` must say which layers"),
        ({"fsdp": {}, "tp": {"tensor_parallel_degree": -1}}, ValueError, "`tensor_parallel_degree` must be a positive"),
        ({"fsdp": {}, "tp": {"device_mesh": 7}}, TypeError, "`device_mesh` must be a `torch.distributed"),
        ({"fsdp2": FSDP2Config(), "tp": 7}, TypeError, "'tp' must be"),
    ],
)
def test_bad_configurations_are_answered(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ParallelismConfig.of(config)


def test_a_mesh_of_no_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`device_mesh` must be a `torch\.distributed"):
        FSDP2Config(device_mesh="cuda")


def test_one_part_of_a_layer_is_no_division() -> None:
    with pytest.warns(UserWarning, match="`tensor_parallel_degree` of 1 splits nothing"):
        assert of({"fsdp": {}, "tp": TPConfig()}).tp is None


def test_dtypes_are_taken_by_name() -> None:
    assert {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} == fsdp(
        mixed_precision={"param_dtype": "bf16", "reduce_dtype": torch.float32}
    ).mixed_precision


@pytest.mark.parametrize(
    ("attrs", "tensor", "world", "expected"),
    [
        ({}, 1, 4, {"data_parallel_shard": 4}),
        ({"data_parallel_replicate_degree": 2}, 1, 8, {"data_parallel_replicate": 2, "data_parallel_shard": 4}),
        (
            {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": -1},
            2,
            8,
            {"data_parallel_replicate": 2, "data_parallel_shard": 2, "tensor_parallel": 2},
        ),
        ({}, 1, 1, {"data_parallel_shard": 1}),
    ],
)
def test_degrees_make_a_mesh(attrs: dict[str, Any], tensor: int, world: int, expected: dict[str, int]) -> None:
    assert expected == mesh_shape(FSDP2Config(**attrs), tensor, world)


def test_degrees_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="multiply to the number of ranks, 6, but 1 copies x 1 shards x 4 parts"):
        mesh_shape(FSDP2Config(), 4, 6)


def unable() -> str:
    return answer(lambda: make(FSDP))


@pytest.mark.skipif(CAN_SHARD_ON_CPU, reason="`fully_shard` of this torch works on the CPU")
def test_a_torch_that_cannot_shard_on_the_cpu_is_told_apart() -> None:
    assert "needs a later version of torch" in run_on_ranks(unable, 1)[0]


def test_buffers_keep_their_dtype() -> None:
    with pytest.warns(UserWarning, match="`buffer_dtype` has no effect"):
        config = FSDP2Config(mixed_precision={"param_dtype": "bf16", "buffer_dtype": "bf16"})

    assert config.mixed_precision == {"param_dtype": torch.bfloat16}
