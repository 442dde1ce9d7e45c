"""What a checkpoint is made of: the states of a model, an optimizer and a run, and what describes them."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch

from composer.checkpoint.selection import Keys, Precision, check_precision, converted, selected
from composer.core import State
from composer.utils import dist, is_model_fsdp, reproducibility, unwrapped_model
from composer.utils.collect_env import get_composer_env_dict

if TYPE_CHECKING:
    from composer.devices import Device

__all__ = [
    "get_metadata_state_dict",
    "get_model_state_dict",
    "get_optim_state_dict",
    "get_resumption_state_dict",
]

_NOT_FOR_RESUMPTION = ("model", "optimizers", "integrations", "metadata")


def get_model_state_dict(
    model: torch.nn.Module,
    sharded_state_dict: bool = False,
    precision: Precision | None = "fp32",
    include_keys: Keys | None = None,
    ignore_keys: Keys | None = None,
    cpu_offload: bool | None = None,
) -> dict[str, Any]:
    """A model's parameters and buffers by name, without the prefixes of DDP and `torch.compile`.

    Tensors that need no conversion are the model's own, not copies. Of a sharded model, a collective operation.

    Args:
        model: The model, wrapped or not.
        sharded_state_dict: Whether each rank gets its own shards; of a model that is sharded by FSDP only. Otherwise
            rank 0 gets whole tensors, and the other ranks of a sharded model nothing.
        precision: What floating tensors are converted to; None leaves them as they are.
        include_keys: Patterns of the only names wanted.
        ignore_keys: Patterns of names not wanted.
        cpu_offload: Whether tensors are brought to the CPU. None: those of sharded models are.

    Returns:
        The tensors by name.

    Raises:
        ValueError: Both kinds of keys are given, `precision` is no floating type, or shards of a whole model are asked
            for.
    """
    dtype = check_precision(precision)
    module = unwrapped_model(model)
    sharded = is_model_fsdp(module)
    if sharded:
        from torch.distributed.checkpoint import state_dict as torch_state_dict

        options = torch_state_dict.StateDictOptions(
            full_state_dict=not sharded_state_dict, cpu_offload=cpu_offload is not False
        )
        found = torch_state_dict.get_model_state_dict(module, options=options)
    else:
        check_shards(sharded_state_dict, "sharded_state_dict")
        found = module.state_dict()
    names = selected(found, include_keys, ignore_keys) if found else []
    return {name: _placed(converted(found[name], dtype), bool(cpu_offload)) for name in names}


def get_optim_state_dict(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sharded_state_dict: bool = False,
    precision: Precision | None = "fp32",
    include_keys: Keys | None = None,
    ignore_keys: Keys | None = None,
    cpu_offload: bool | None = None,
) -> dict[str, Any]:
    """An optimizer's state, keyed by the names of the model's parameters.

    Args:
        model: The model whose parameters the optimizer has.
        optimizer: The optimizer.
        sharded_state_dict: As in `get_model_state_dict`.
        precision: What floating tensors are converted to; None leaves them as they are. Counts of steps, which have no
            dimension, are left in any case.
        include_keys: Patterns of the only parameters wanted.
        ignore_keys: Patterns of parameters not wanted.
        cpu_offload: As in `get_model_state_dict`.

    Returns:
        `{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}`; of an optimizer whose `state_dict`
        is of another form, that as it is.

    Raises:
        ValueError: As in `get_model_state_dict`; or `include_keys` or `ignore_keys` for such an optimizer.
    """
    dtype = check_precision(precision)
    module = unwrapped_model(model)
    if is_model_fsdp(module):
        from torch.distributed.checkpoint import state_dict as torch_state_dict

        options = torch_state_dict.StateDictOptions(
            full_state_dict=not sharded_state_dict, cpu_offload=cpu_offload is not False
        )
        found: dict[str, Any] = dict(torch_state_dict.get_optimizer_state_dict(module, optimizer, options=options))
    else:
        check_shards(sharded_state_dict, "sharded_state_dict")
        (found,) = State(model=module, optimizers=optimizer).get_optim_state_dict().values()
    if not found:  # the other ranks of a sharded model
        return found
    if not {"state", "param_groups"} <= found.keys():
        if include_keys is not None or ignore_keys is not None:
            raise ValueError(
                f"`include_keys` and `ignore_keys` need the states of single parameters, but the state_dict of "
                f"{type(optimizer).__name__} is of a form of its own. Leave them out."
            )
        return found
    wanted = {*selected([p for group in found["param_groups"] for p in group["params"]], include_keys, ignore_keys)}
    groups = [{**group, "params": [p for p in group["params"] if p in wanted]} for group in found["param_groups"]]
    states = {
        name: {key: _placed(_moment(value, dtype), bool(cpu_offload)) for key, value in state.items()}
        for name, state in found["state"].items()
        if name in wanted
    }
    return {**found, "state": states, "param_groups": groups}


def get_metadata_state_dict(
    model: torch.nn.Module | None = None,
    sharded_state_dict: bool | None = None,
    precision: Precision | None = None,
    device: Device | torch.device | str | None = None,
    device_train_microbatch_size: float | None = None,
) -> dict[str, Any]:
    """What describes a checkpoint: versions, machine and sizes. All of it can be written as JSON.

    Args:
        model: The model that is saved.
        sharded_state_dict: Whether it is saved in shards.
        precision: The precision it is saved in.
        device: The device it was trained on. None: that of `model`.
        device_train_microbatch_size: Samples per forward pass.

    Returns:
        `composer_env_info`, `torch_version`, `python_version`, `world_size`, and what is known of `model_name`,
        `sharded_state_dict`, `precision`, `device` and `device_train_microbatch_size`.
    """
    dtype = check_precision(precision)
    place = _first_device(model) if device is None else getattr(device, "name", None) or str(device)
    found: dict[str, Any] = {
        "composer_env_info": get_composer_env_dict(),
        "torch_version": str(torch.__version__),
        "python_version": platform.python_version(),
        "world_size": dist.get_world_size(),
        "model_name": None if model is None else type(unwrapped_model(model)).__qualname__,
        "sharded_state_dict": sharded_state_dict,
        "precision": None if dtype is None else str(dtype).removeprefix("torch."),
        "device": place,
        "device_train_microbatch_size": device_train_microbatch_size,
    }
    return {key: value for key, value in found.items() if value is not None}


def get_resumption_state_dict(state: State) -> dict[str, Any]:
    """What a run needs besides its model and optimizers to go on. A collective operation.

    Args:
        state: The run.

    Returns:
        The timestamp, the states of schedulers, algorithms, callbacks, scaler and metrics and so on, as in
        `State.state_dict`; the random generators of all ranks (`rng`); and the position in the training data
        (`resumption`) if whoever runs the loop keeps it.
    """
    found = {key: value for key, value in state.state_dict().items() if key not in _NOT_FOR_RESUMPTION}
    found["rng"] = reproducibility.get_rng_state()
    part = state.resumption
    if part is not None:
        found["resumption"] = part.state_dict()
    return found


def check_shards(asked: bool, argument: str) -> None:
    """Refuse shards of a model that has none.

    Raises:
        ValueError: They are asked for.
    """
    if asked:
        raise ValueError(
            f"`{argument}=True` needs a model that is sharded by FSDP, but this one is whole on every rank. Shard it "
            f"with `torch.distributed.fsdp.fully_shard` first, or leave it at False."
        )


def _moment(value: Any, dtype: torch.dtype | None) -> Any:
    return converted(value, dtype) if isinstance(value, torch.Tensor) and value.dim() else value


def _placed(value: Any, on_cpu: bool) -> Any:
    return value.cpu() if on_cpu and isinstance(value, torch.Tensor) else value


def _first_device(model: torch.nn.Module | None) -> str | None:
    parameter = None if model is None else next(model.parameters(), None)
    return None if parameter is None else parameter.device.type
