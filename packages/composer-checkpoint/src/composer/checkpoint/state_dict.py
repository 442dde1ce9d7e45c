"""The parts of a checkpoint: the states of a model, an optimizer and a run, and their description."""

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

_NOT_FOR_RESUMPTION = ("model", "optimizers", "integrations", "metadata")


def get_model_state_dict(
    model: torch.nn.Module,
    sharded_state_dict: bool = False,
    precision: Precision | None = "fp32",
    include_keys: Keys | None = None,
    ignore_keys: Keys | None = None,
    cpu_offload: bool | None = None,
) -> dict[str, Any]:
    """Return a model's parameters and buffers by name, without the prefixes of DDP and `torch.compile`.

    Tensors that need no conversion are the model's own, not copies. A collective operation if the model is sharded.

    Args:
        model: The model, wrapped or not.
        sharded_state_dict: Return this rank's shards of a model that is sharded by FSDP. Otherwise rank 0 gets whole
            tensors, and the other ranks of a sharded model an empty dict.
        precision: The precision to convert floating tensors to; None leaves them unchanged.
        include_keys: Patterns of the names to include; None: all.
        ignore_keys: Patterns of names to leave out.
        cpu_offload: Copy tensors to the CPU. None: only those of sharded models.

    Returns:
        The tensors by name.

    Raises:
        ValueError: Both kinds of keys are given, `precision` is not a floating type, or shards of a whole model are
            requested.
    """
    dtype = check_precision(precision)
    module = unwrapped_model(model)
    sharded = is_model_fsdp(module)
    if sharded:
        from torch.distributed.checkpoint import state_dict as torch_state_dict

        on_cpu = cpu_offload is not False
        options = torch_state_dict.StateDictOptions(full_state_dict=not sharded_state_dict, cpu_offload=on_cpu)
        state_dict = torch_state_dict.get_model_state_dict(module, options=options)
    else:
        _check_no_shards(sharded_state_dict)
        state_dict = module.state_dict()
    names = selected(state_dict, include_keys, ignore_keys) if state_dict else []
    return {name: _placed(converted(state_dict[name], dtype), bool(cpu_offload)) for name in names}


def get_optim_state_dict(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    sharded_state_dict: bool = False,
    precision: Precision | None = "fp32",
    include_keys: Keys | None = None,
    ignore_keys: Keys | None = None,
    cpu_offload: bool | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state, keyed by the names of the model's parameters.

    Args:
        model: The model whose parameters the optimizer has.
        optimizer: The optimizer.
        sharded_state_dict: As in `get_model_state_dict`.
        precision: The precision to convert floating tensors to; None leaves them unchanged. Step counts, which have no
            dimension, are never converted.
        include_keys: Patterns of the parameters to include; None: all.
        ignore_keys: Patterns of parameters to leave out.
        cpu_offload: As in `get_model_state_dict`.

    Returns:
        `{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}`; the
        unchanged `state_dict` of an optimizer with another format.

    Raises:
        ValueError: As in `get_model_state_dict`; or `include_keys` or `ignore_keys` for such an optimizer.
    """
    dtype = check_precision(precision)
    module = unwrapped_model(model)
    if is_model_fsdp(module):
        from torch.distributed.checkpoint import state_dict as torch_state_dict

        on_cpu = cpu_offload is not False
        options = torch_state_dict.StateDictOptions(full_state_dict=not sharded_state_dict, cpu_offload=on_cpu)
        state_dict: dict[str, Any] = dict(torch_state_dict.get_optimizer_state_dict(module, optimizer, options=options))
    else:
        _check_no_shards(sharded_state_dict)
        (state_dict,) = State(model=module, optimizers=optimizer).get_optim_state_dict().values()
    if not state_dict:  # the other ranks of a sharded model
        return state_dict
    if not {"state", "param_groups"} <= state_dict.keys():
        if include_keys is not None or ignore_keys is not None:
            raise ValueError(
                f"`include_keys` and `ignore_keys` need the states of single parameters, but the state_dict of "
                f"{type(optimizer).__name__} has another format. Leave them out."
            )
        return state_dict
    names = {*selected([p for group in state_dict["param_groups"] for p in group["params"]], include_keys, ignore_keys)}
    groups = [{**group, "params": [p for p in group["params"] if p in names]} for group in state_dict["param_groups"]]
    states = {
        name: {key: _placed(_moment(value, dtype), bool(cpu_offload)) for key, value in state.items()}
        for name, state in state_dict["state"].items()
        if name in names
    }
    return {**state_dict, "state": states, "param_groups": groups}


def get_metadata_state_dict(
    model: torch.nn.Module | None = None,
    sharded_state_dict: bool | None = None,
    precision: Precision | None = None,
    device: Device | torch.device | str | None = None,
    device_train_microbatch_size: float | None = None,
    run_name: str | None = None,
) -> dict[str, Any]:
    """Return the description of a checkpoint: versions, machine and sizes. All of it can be written as JSON.

    Args:
        model: The model to save.
        sharded_state_dict: True if it is saved in shards.
        precision: The precision it is saved in.
        device: The device it was trained on. None: that of `model`.
        device_train_microbatch_size: Samples per forward pass.
        run_name: The name of the run.

    Returns:
        `composer_env_info`, `torch_version`, `python_version`, `world_size`, and those of `model_name`,
        `sharded_state_dict`, `precision`, `device`, `device_train_microbatch_size` and `run_name` that are known.
    """
    dtype = check_precision(precision)
    place = None if device is None else getattr(device, "name", None) or str(device)
    if device is None and model is not None:
        place = next((parameter.device.type for parameter in model.parameters()), None)
    state_dict: dict[str, Any] = {
        "composer_env_info": get_composer_env_dict(),
        "torch_version": str(torch.__version__),
        "python_version": platform.python_version(),
        "world_size": dist.get_world_size(),
        "model_name": None if model is None else type(unwrapped_model(model)).__qualname__,
        "sharded_state_dict": sharded_state_dict,
        "precision": None if dtype is None else str(dtype).removeprefix("torch."),
        "device": place,
        "device_train_microbatch_size": device_train_microbatch_size,
        "run_name": run_name,
    }
    return {key: value for key, value in state_dict.items() if value is not None}


def get_resumption_state_dict(state: State) -> dict[str, Any]:
    """Return the state that a run needs besides model and optimizers to resume. A collective operation.

    Args:
        state: The run.

    Returns:
        The states of schedulers, scaler and metrics and so on, as in `State.state_dict`; `timestamp`, the arguments of
        `Timestamp`; `algorithms` and `callbacks`, lists of `(class name, state_dict())`; `dataset_state`, None if the
        dataset has none; the random generators of all ranks (`rng`); and the state of `state.resumption`, such as
        the position in the training data.
    """
    state_dict = {key: value for key, value in state.state_dict().items() if key not in _NOT_FOR_RESUMPTION}
    state_dict["timestamp"] = state.timestamp.state_dict()
    state_dict["callbacks"] = [(key.partition("#")[0], value) for key, value in state_dict["callbacks"].items()]
    state_dict.setdefault("dataset_state", None)
    state_dict["rng"] = reproducibility.get_rng_state()
    part = state.resumption
    if part is not None:
        state_dict["resumption"] = part.state_dict()
    return state_dict


def _check_no_shards(requested: bool) -> None:
    """Raise ValueError if shards are requested for a model that is not sharded."""
    if requested:
        raise ValueError(
            "`sharded_state_dict=True` needs a model that is sharded by FSDP, but this one is whole on every rank. "
            "Shard it with `torch.distributed.fsdp.fully_shard` first, or leave it at False."
        )


def _moment(value: Any, dtype: torch.dtype | None) -> Any:
    """Convert a tensor of an optimizer's state, except a step count, which has no dimension and must stay exact."""
    return converted(value, dtype) if isinstance(value, torch.Tensor) and value.dim() else value


def _placed(value: Any, on_cpu: bool) -> Any:
    return value.cpu() if on_cpu and isinstance(value, torch.Tensor) else value
