"""Putting what a file has into a model and an optimizer."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch

from composer.checkpoint._selection import Keys, selected
from composer.core import State
from composer.utils import is_model_fsdp

__all__ = ["check_names", "merged", "set_model", "set_optimizer"]


def check_names(
    module: torch.nn.Module, path: str | os.PathLike[str], missing: set[str], unexpected: set[str], strict: bool
) -> None:
    """Refuse names that do not match, or warn of them.

    Raises:
        RuntimeError: There are some, and `strict`.
    """
    if not missing and not unexpected:
        return
    text = f"missing in {os.fspath(path)!r}: {sorted(missing)}; unknown to the model: {sorted(unexpected)}"
    if strict:
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}: {text}. Pass `strict=False` to load what "
            f"matches, or select names with `include_keys` or `ignore_keys`."
        )
    warnings.warn(f"The saved model does not match this one: {text}.", stacklevel=4)


def set_model(module: torch.nn.Module, found: dict[str, Any]) -> None:
    """Copy tensors into a model, whole or in shards; their names have been checked."""
    if not is_model_fsdp(module):
        module.load_state_dict(found, strict=False)
        return
    from torch.distributed.checkpoint import state_dict as torch_state_dict

    full = not any(hasattr(value, "to_local") for value in found.values())
    options = torch_state_dict.StateDictOptions(full_state_dict=full, strict=False)
    torch_state_dict.set_model_state_dict(module, found, options=options)


def set_optimizer(
    module: torch.nn.Module, optim: torch.optim.Optimizer, saved: dict[str, Any], shards: bool, strict: bool
) -> None:
    """Load an optimizer's state, keyed by names.

    Args:
        module: The model whose parameters the optimizer has.
        optim: The optimizer.
        saved: The state.
        shards: Whether it was read from shards.
        strict: Whether it must hold the same parameters.
    """
    if not shards and not is_model_fsdp(module):
        state = State(model=module, optimizers=optim)
        (name,) = state.get_optim_state_dict()
        state.load_optim_state({"optimizers": {name: saved}}, strict)
        return
    from torch.distributed.checkpoint import state_dict as torch_state_dict

    options = torch_state_dict.StateDictOptions(full_state_dict=not shards, strict=strict)
    torch_state_dict.set_optimizer_state_dict(module, optim, saved, options=options)


def merged(
    saved: dict[str, Any], own: dict[str, Any], include_keys: Keys | None, ignore_keys: Keys | None, strict: bool
) -> dict[str, Any]:
    """The saved state of the wanted parameters, and that of the others as it is here.

    Args:
        saved: The file's state.
        own: The optimizer's state.
        include_keys: Patterns of the only parameters wanted.
        ignore_keys: Patterns of parameters not wanted.
        strict: Whether both must hold the same parameters of those that are wanted.

    Raises:
        KeyError: `strict`, and they do not.
    """
    if not all({"state", "param_groups"} <= state.keys() for state in (own, saved)):  # only the optimizer can read it
        return saved
    here, there = _parameters(own), _parameters(saved)
    if not all(isinstance(name, str) for name in there):  # numbered, as torch has it
        return saved
    wanted = {*selected(dict.fromkeys([*here, *there]), include_keys, ignore_keys)}
    differing = {*here} ^ {*there} if strict else set()
    if differing & wanted:
        raise KeyError(
            f"The saved optimizer and this one hold different parameters: {sorted(differing & wanted)}. Build it from "
            f"the same parameters, or pass `strict=False` to load those that both have."
        )
    taken = wanted & {*there}
    states = {name: value for name, value in own["state"].items() if name not in taken}
    states |= {name: value for name, value in saved["state"].items() if name in taken}
    groups = saved["param_groups"]
    if (include_keys is not None or ignore_keys is not None) and len(groups) == len(own["param_groups"]):
        groups = [{**group, "params": mine["params"]} for group, mine in zip(groups, own["param_groups"], strict=True)]
    return {**saved, "state": states, "param_groups": groups}


def _parameters(state: dict[str, Any]) -> list[Any]:
    return [name for group in state["param_groups"] for name in group["params"]]
