"""The configurations of `Trainer(parallelism_config=...)`: how a model is sharded among ranks."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from composer.utils import dist
from composer.utils.misc import STR_TO_DTYPE, plain_int

_STRATEGIES = {
    "FULL_SHARD": (True, False),
    "SHARD_GRAD_OP": (False, False),
    "HYBRID_SHARD": (True, True),
    "_HYBRID_SHARD_ZERO2": (False, True),
}
_STATE_DICT_TYPES = ("full", "sharded")
_MIXED = ("FULL", "DEFAULT", "PURE")

# Arguments of the first version of FSDP, with their defaults, that `fully_shard` does not have.
_NO_LONGER = {
    "activation_checkpointing_reentrant": True,
    "backward_prefetch": "BACKWARD_POST",
    "keep_low_precision_grads": False,
    "limit_all_gathers": True,
    "use_orig_params": True,
    "te_checkpoint_wrapper": False,
    "te_shard_fp8_weight": False,
}
_REFUSED = {
    "ignored_modules": "give these modules an attribute `_fsdp_wrap = False`: they are sharded with their parent",
    "load_planner": "checkpoints in shards are read by `composer.checkpoint`",
    "save_planner": "checkpoints in shards are written by `composer.checkpoint`",
    "process_group": "give `data_parallel_shard_degree` and `data_parallel_replicate_degree`, or a `device_mesh` in "
    "`FSDP2Config`",
}


@dataclass
class FSDP2Config:
    """Configuration of `torch.distributed.fsdp.fully_shard`, which shards parameters, gradients and optimizer states.

    Args:
        device_mesh: A mesh whose last dimension shards and whose first, if there are two, replicates; None: created
            from the two degrees.
        reshard_after_forward: Free gathered parameters after the forward pass and gather them again for the backward
            pass: less memory, more communication.
        activation_checkpointing: Recompute activations in the backward pass, in the modules with an attribute
            `_activation_checkpointing = True` and those that the model's `activation_checkpointing_fn(module)` selects;
            without either, in the inner units.
        activation_cpu_offload: Store the activations of these modules in host memory: their inputs with
            `activation_checkpointing`, otherwise all activations.
        state_dict_type: `"full"`: a checkpoint is one file, as in a single process; `"sharded"`: a folder to which each
            rank writes its part. Either can be loaded on any number of ranks.
        load_monolith_rank0_only: Has no effect: every rank reads a full checkpoint itself.
        mixed_precision: `"DEFAULT"` computes in the run's precision and reduces gradients in float32, `"PURE"` does
            both in the run's precision, `"FULL"` neither. Or a dict of `param_dtype`, `reduce_dtype` and
            `output_dtype`: dtypes, or `"fp32"`, `"fp16"`, `"bf16"`.
        verbose: Log the plan as a warning instead of information.
        cpu_offload: Store parameters, gradients and optimizer states in host memory.
        data_parallel_shard_degree: The number of ranks that share one replica of the model; -1: all remaining ranks.
        data_parallel_replicate_degree: The number of replicas of the model; None: one; -1: as many as fit.
        sharded_ckpt_prefix_dir: The name of a checkpoint's folder; a format string like `save_filename`.
        auto_wrap: Use the classes in a model's `_no_split_modules`, which models of transformers have, as units unless
            the model selects units otherwise.
        forward_prefetch: Gather the weights of the next inner units while one computes its forward pass, even if the
            host is behind. This suits models whose units run in the order in which they are registered.
        forward_prefetch_limit: The number of units whose weights are gathered ahead; each takes its memory.
        backward_prefetch_limit: The same for the backward pass, which always gathers the weights of the next unit.
        sync_module_states: Start all ranks from the weights of rank 0. This is always done, and the models of other
            ranks may be on the meta device.

    Raises:
        ValueError: An argument has an invalid value.
        TypeError: `device_mesh` is not a mesh.
    """

    device_mesh: Any = None
    reshard_after_forward: bool | int = True
    activation_checkpointing: bool = False
    activation_cpu_offload: bool = False
    state_dict_type: str = "sharded"
    load_monolith_rank0_only: bool = False
    mixed_precision: str | Mapping[str, Any] = "DEFAULT"
    verbose: bool = False
    cpu_offload: bool = False
    data_parallel_shard_degree: int = -1
    data_parallel_replicate_degree: int | None = None
    sharded_ckpt_prefix_dir: str = "ep{epoch}-ba{batch}"
    auto_wrap: bool = True
    forward_prefetch: bool = False
    forward_prefetch_limit: int = 1
    backward_prefetch_limit: int = 1
    sync_module_states: bool = True

    def __post_init__(self) -> None:
        if self.state_dict_type not in _STATE_DICT_TYPES:
            raise ValueError(f"`state_dict_type` must be 'full' or 'sharded', got {self.state_dict_type!r}.")
        if not isinstance(self.mixed_precision, Mapping) and self.mixed_precision not in _MIXED:
            raise ValueError(
                f"`mixed_precision` must be 'FULL', 'DEFAULT', 'PURE' or a dict of dtypes, got "
                f"{self.mixed_precision!r}."
            )
        if isinstance(self.mixed_precision, Mapping):
            self.mixed_precision = _dtypes(self.mixed_precision)
        if self.load_monolith_rank0_only:
            warnings.warn(
                "`load_monolith_rank0_only=True` has no effect: every rank reads a full checkpoint itself. If host "
                "memory is short, save with `state_dict_type='sharded'`.",
                stacklevel=3,
            )
        self.reshard_after_forward = _reshard(self.reshard_after_forward)
        for name in ("forward_prefetch_limit", "backward_prefetch_limit"):
            limit = plain_int(getattr(self, name))
            if limit is None or limit < 1:
                raise ValueError(f"`{name}` must be a number of units, at least 1, got {getattr(self, name)!r}.")
            setattr(self, name, limit)
        names = ("data_parallel_shard_degree", "data_parallel_replicate_degree")
        for name in names:
            setattr(self, name, _degree(name, getattr(self, name)))
        if all(getattr(self, name) == -1 for name in names):
            raise ValueError(
                "At most one of `data_parallel_shard_degree` and `data_parallel_replicate_degree` may be -1, got both."
            )
        if self.device_mesh is not None:
            _check_mesh(self.device_mesh, most=2, degrees=any(getattr(self, name) not in (-1, None) for name in names))

    @classmethod
    def settable_attrs(cls) -> set[str]:
        """Return the names of all arguments."""
        return {field.name for field in dataclasses.fields(cls)}

    @classmethod
    def from_compatible_attrs(cls, attrs: Mapping[str, Any]) -> FSDP2Config:
        """Create the configuration from a dict, which may contain arguments of the first version of FSDP.

        Arguments that `fully_shard` does not have are dropped, with a warning if they request another behaviour.

        Raises:
            ValueError: An argument is unknown or no longer supported; the message says what to write instead.
        """
        known = cls.settable_attrs()
        given = {name: value for name, value in attrs.items() if name in known}
        for name, value in attrs.items():
            if name in known:
                continue
            if name == "sharding_strategy":
                given = {**_of_strategy(value, given), **given}
            elif name in _NO_LONGER:
                if value != _NO_LONGER[name]:
                    warnings.warn(f"`{name}={value!r}` has no effect: `fully_shard` has no such setting.", stacklevel=4)
            elif name in _REFUSED:
                if value is not None:
                    raise ValueError(f"`{name}` is not supported any more; {_REFUSED[name]}.")
            else:
                raise ValueError(f"Unknown argument {name!r} of 'fsdp'. Known ones are {', '.join(sorted(known))}.")
        return cls(**given)


class FSDPConfig(FSDP2Config):
    """`FSDP2Config` with the argument names and defaults of the first version of FSDP, which also apply to a dict.

    Args:
        **attrs: The entries of `FSDP2Config.from_compatible_attrs`; `sharding_strategy` is `"FULL_SHARD"`,
            `"SHARD_GRAD_OP"`, `"HYBRID_SHARD"` (a replica on each node) or `"_HYBRID_SHARD_ZERO2"`. `state_dict_type`
            is `"full"`.

    Raises:
        ValueError: An argument is unknown or no longer supported; the message says what to write instead.
    """

    def __init__(self, **attrs: Any) -> None:
        for name in ("device_mesh", "_device_mesh"):
            if attrs.get(name) is not None:
                raise ValueError(
                    "Directly specifying device mesh for FSDP was deprecated. Give `data_parallel_shard_degree` and "
                    "`data_parallel_replicate_degree`, or `FSDP2Config(device_mesh=...)`."
                )
        translated = FSDP2Config.from_compatible_attrs({"state_dict_type": "full", **attrs})
        super().__init__(**vars(translated))


@dataclass
class TPConfig:
    """Configuration of `torch.distributed.tensor.parallel`, which splits layers among ranks.

    Args:
        device_mesh: One dimension of a mesh whose other dimensions `FSDP2Config` gets; None: created from the degree,
            with neighboring ranks.
        tensor_parallel_degree: The number of ranks that share each layer. They train on the same batches, with the same
            random numbers.
        layer_plan: `{name of a module of the model: ParallelStyle}`, the argument of `parallelize_module`.

    Raises:
        ValueError: The degree is not positive or given together with a mesh, or there is no plan.
        TypeError: `device_mesh` is not a mesh.
    """

    device_mesh: Any = None
    tensor_parallel_degree: int = 1
    layer_plan: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        self.tensor_parallel_degree = _degree("tensor_parallel_degree", self.tensor_parallel_degree, least=1) or 1
        if self.device_mesh is not None:
            _check_mesh(self.device_mesh, most=1, degrees=self.tensor_parallel_degree != 1)
            self.tensor_parallel_degree = self.device_mesh.size()
        if self.tensor_parallel_degree > 1 and not self.layer_plan:
            raise ValueError(
                "`layer_plan` must say which layers are split and how, such as `{'module.fc': ColwiseParallel()}`, "
                "got nothing."
            )


@dataclass
class ParallelismConfig:
    """The value of `Trainer(parallelism_config=...)`, which may also be a dict.

    Args:
        fsdp: How the model is sharded: a dict of the arguments of `FSDPConfig`, or a configuration.
        tp: How layers are split in addition: a dict of the arguments of `TPConfig`, or a configuration.
        fsdp2: Another name for `fsdp`.

    Raises:
        ValueError: `tp` is given without `fsdp`, both `fsdp` and `fsdp2` are given, or an argument is invalid.
        TypeError: A value is neither a configuration nor a dict.
    """

    fsdp: FSDP2Config | Mapping[str, Any] | None = None
    tp: TPConfig | Mapping[str, Any] | None = None
    fsdp2: FSDP2Config | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.fsdp is not None and self.fsdp2 is not None:
            raise ValueError("`fsdp` and `fsdp2` are two names of the same argument, got both. Give one.")
        self.fsdp = _fsdp(self.fsdp if self.fsdp2 is None else self.fsdp2)
        self.fsdp2 = None
        self.tp = _tp(self.tp)
        if self.tp is not None and self.fsdp is None:
            raise ValueError("`tp` needs `fsdp`, which averages gradients over the other ranks. Add `'fsdp': {}`.")
        meshes = [config.device_mesh for config in (self.fsdp, self.tp) if config is not None]
        if len(meshes) == 2 and (meshes[0] is None) != (meshes[1] is None):
            raise ValueError(
                "`device_mesh` must be given for both 'fsdp' and 'tp', as parts of one mesh, or for neither of them."
            )

    @classmethod
    def of(cls, config: Any) -> ParallelismConfig | None:
        """Convert the argument `parallelism_config`; None: the model is not sharded.

        Raises:
            ValueError: The dict has entries other than 'fsdp' and 'tp', or one of them is invalid.
            TypeError: `config` is neither a dict nor a `ParallelismConfig`.
        """
        if config is None or isinstance(config, cls):
            return config if config is not None and config.fsdp is not None else None
        if not isinstance(config, Mapping):
            raise TypeError(
                f"`parallelism_config` must be a dict with 'fsdp' and 'tp', a `ParallelismConfig`, or an object of a "
                f"class derived from `composer.trainer.RankStrategy`, got {config!r}."
            )
        unknown = config.keys() - {"fsdp", "fsdp2", "tp"}
        if unknown:
            raise ValueError(
                f"`parallelism_config` has the entries 'fsdp' and 'tp', got {', '.join(sorted(map(repr, unknown)))}. "
                f"Arguments of sharding go inside: `{{'fsdp': {{'state_dict_type': 'sharded'}}}}`. A strategy of "
                f"another package must be the only entry: `{{'deepspeed': {{...}}}}`."
            )
        return cls.of(cls(**config))

    @classmethod
    def describe_in(cls, state: Any, config: Any) -> None:
        """Set the attributes of a `State` that say how its model is sharded, or will be.

        Args:
            state: The state.
            config: As for `of`.
        """
        found: Any = cls.of(config)
        if found is None:
            return
        state.fsdp_config, state.fsdp_config_version = found.fsdp, 2
        state.fsdp_state_dict_type = found.fsdp.state_dict_type
        state.fsdp_sharded_state_dict_enabled = found.fsdp.state_dict_type == "sharded"
        state.tp_config, state.device_mesh = found.tp, found.fsdp.device_mesh


def _fsdp(config: Any) -> FSDP2Config | None:
    if config is None or isinstance(config, FSDP2Config):
        return config
    if not isinstance(config, Mapping):
        raise TypeError(f"'fsdp' must be a dict or an `FSDP2Config`, got {config!r}.")
    return FSDPConfig(**config)


def _tp(config: Any) -> TPConfig | None:
    if isinstance(config, Mapping):
        names = {field.name for field in dataclasses.fields(TPConfig)}
        if config.keys() - names:
            unknown = ", ".join(sorted(map(repr, config.keys() - names)))
            raise ValueError(f"Unknown arguments of 'tp': {unknown}. Known ones are {', '.join(sorted(names))}.")
        config = TPConfig(**config)
    if config is not None and not isinstance(config, TPConfig):
        raise TypeError(f"'tp' must be a dict or a `TPConfig`, got {config!r}.")
    if config is not None and config.tensor_parallel_degree == 1:
        warnings.warn("'tp' with a `tensor_parallel_degree` of 1 splits nothing and is ignored.", stacklevel=4)
        return None
    return config


def _of_strategy(strategy: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    name = str(strategy).rpartition(".")[2].upper()
    if name == "NO_SHARD":
        raise ValueError("`sharding_strategy='NO_SHARD'` is data parallel training: leave `parallelism_config` out.")
    if name not in _STRATEGIES:
        raise ValueError(
            f"`sharding_strategy` must be {', '.join(map(repr, _STRATEGIES))}, got {strategy!r}. Write "
            f"`reshard_after_forward=True` or `False` instead."
        )
    reshard, hybrid = _STRATEGIES[name]
    if not hybrid or "data_parallel_replicate_degree" in given:
        return {"reshard_after_forward": reshard}
    unset = given.get("data_parallel_shard_degree", -1) == -1
    replicas = max(1, dist.get_world_size() // dist.get_local_world_size()) if unset else -1
    return {"reshard_after_forward": reshard, "data_parallel_replicate_degree": replicas}


def _dtypes(given: Mapping[str, Any]) -> dict[str, torch.dtype | None]:
    known = {"param_dtype", "reduce_dtype", "output_dtype"}
    if given.get("buffer_dtype") is not None:
        warnings.warn(
            "`buffer_dtype` has no effect: buffers keep their dtype. Convert them in the model.", stacklevel=5
        )
    given = {name: value for name, value in given.items() if name != "buffer_dtype"}
    if given.keys() - known:
        raise ValueError(
            f"`mixed_precision` takes {', '.join(sorted(known))}, got {', '.join(sorted(map(repr, given)))}."
        )
    dtypes = {name: STR_TO_DTYPE.get(value, value) for name, value in given.items()}
    for name, dtype in dtypes.items():
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise ValueError(f"`{name}` must be a dtype, 'fp32', 'fp16' or 'bf16', got {dtype!r}.")
    return dtypes


def _reshard(reshard: Any) -> bool | int:
    number = reshard if isinstance(reshard, bool) else plain_int(reshard)
    if number is None or not (isinstance(reshard, bool) or number >= 1):
        raise ValueError(
            f"`reshard_after_forward` must be True, False or the positive number of ranks among which parameters are "
            f"sharded after the forward pass, got {reshard!r}."
        )
    return number


def _check_mesh(mesh: Any, most: int, degrees: bool) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"`device_mesh` must be a `torch.distributed.device_mesh.DeviceMesh`, got {mesh!r}.")
    if mesh.ndim > most:
        alternative = "" if most == 1 else ", optionally after one that replicates"
        raise ValueError(
            f"`device_mesh` must have one dimension{alternative}, got {mesh.ndim}. Take a part of the mesh by the "
            f"name of its dimension."
        )
    if degrees:
        raise ValueError("`device_mesh` defines the degrees. Leave the arguments `..._degree` out.")


def _degree(name: str, degree: Any, least: int = -1) -> int | None:
    number = plain_int(degree)
    if degree is not None and (number is None or number < least or number == 0):
        alternative = "" if least == 1 else ", or -1 for all remaining ranks"
        raise ValueError(f"`{name}` must be a positive number of ranks{alternative}, got {degree!r}.")
    return number
