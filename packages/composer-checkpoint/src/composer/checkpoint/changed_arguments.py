"""The arguments of a resumed run, compared with those of its checkpoint: changed ones take precedence."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from composer.core import State
from composer.utils import plain_number

_PROGRESS = {"last_epoch", "_last_lr", "_step_count", "base_lrs", "_is_initial", "_get_lr_called_within_step"}


def param_groups_of(state: State) -> list[dict[str, Any]]:
    """Return the parameter groups of all optimizers."""
    return [group for optimizer in state.optimizers for group in optimizer.param_groups]


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter group without its parameters."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set a value of a parameter group; one in a tensor, such as the rate of a compiled step, stays in it."""
    if isinstance(group.get(key), torch.Tensor):
        group[key].copy_(torch.as_tensor(value))
    else:
        group[key] = value


def describe_arguments(state: State, schedulers: list[str]) -> dict[str, Any]:
    """Return the arguments of a run as plain values.

    Args:
        state: The run, before a checkpoint is loaded into it.
        schedulers: The descriptions of the user's schedulers.
    """
    param_groups = []
    for group in param_groups_of(state):
        options = {key: plain(value) for key, value in group.items() if key not in ("params", "initial_lr")}
        options["lr"] = plain(group.get("initial_lr", group.get("lr")))  # a schedule has changed "lr" already
        param_groups.append(options)
    return {
        "param_groups": param_groups,
        "schedulers": schedulers,
        "max_duration": None if state.max_duration is None else str(state.max_duration),
        "batch_size": getattr(state.train_dataloader, "batch_size", None),
    }


def plain(value: Any) -> Any:
    """Return a value of a parameter group as numbers, strings and lists; of an object, its representation."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    value = plain_number(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def describe_scheduler(scheduler: Any) -> str:
    """Return the type and the arguments of a scheduler, without its progress."""
    if inspect.isroutine(scheduler):
        return f"{scheduler.__module__}.{scheduler.__qualname__}"
    is_torch = isinstance(scheduler, LRScheduler)
    values = scheduler.state_dict() if is_torch else getattr(scheduler, "__dict__", {})
    return f"{type(scheduler).__qualname__}({_text(values)})"


def _text(value: Any) -> str:
    """Return the representation of a plain value; of an object, its type."""
    if isinstance(value, Mapping):
        parts = (f"{key}={_text(item)}" for key, item in sorted(value.items(), key=str) if key not in _PROGRESS)
        return ", ".join(parts)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    text = repr(plain(value))
    return type(value).__qualname__ if " at 0x" in text else text


def apply_changes(state: State, current: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Override restored values with the user's arguments, where these differ from those of the saved run.

    Args:
        state: The run, after loading.
        current: `describe_arguments` of this run.
        saved: `describe_arguments` of the saved run.

    Returns:
        A description of each change.
    """
    changes: list[str] = []
    groups = param_groups_of(state)
    if len(groups) == len(current["param_groups"]) == len(saved["param_groups"]):
        for index, group in enumerate(groups):
            new, old = current["param_groups"][index], saved["param_groups"][index]
            for key in sorted(new.keys() & old.keys()):
                if new[key] != old[key]:
                    _override(state, group, key, new[key], old[key])
                    place = f" of parameter group {index}" if len(groups) > 1 else ""
                    changes.append(f"{key}{place}: {old[key]} -> {new[key]}")
    for key, name in (("max_duration", "max_duration"), ("batch_size", "batch size"), ("schedulers", "schedulers")):
        if current[key] != saved[key] and not (key == "max_duration" and "branch_duration" in current):
            changes.append(f"{name}: {saved[key]} -> {current[key]}")
    return changes


def _override(state: State, group: dict[str, Any], key: str, new: Any, old: Any) -> None:
    if key != "lr":
        set_option(group, key, tuple(new) if isinstance(group[key], tuple) else new)
        return
    # The schedule keeps its progress: it scales the new learning rate as it scaled the old one.
    rate = plain(group["lr"])
    set_option(group, "lr", new if rate == old or not old else rate * (new / old))
    if "initial_lr" in group:
        group["initial_lr"] = new
    # A scheduler has the rates of the groups of its own optimizer alone. One such as `SequentialLR` consists of others.
    schedulers = list(state.schedulers)
    for scheduler in schedulers:
        schedulers += getattr(scheduler, "_schedulers", ())
        for index, scheduled in enumerate(getattr(getattr(scheduler, "optimizer", None), "param_groups", ())):
            if scheduled is not group:
                continue
            for attribute, value in (("base_lrs", new), ("_last_lr", plain(group["lr"]))):
                if getattr(scheduler, attribute, None):
                    getattr(scheduler, attribute)[index] = value


def rates_by_scheduler(state: State) -> list[tuple[Any, list[Any]]]:
    """Return the run's schedulers with the learning rates that they have set last."""
    return [(scheduler, [plain(rate) for rate in scheduler.get_last_lr()]) for scheduler in state.schedulers]


def restart_schedulers(state: State, steps: int, first_rates: list[tuple[Any, list[Any]]]) -> None:
    """Advance new schedulers to the current time of the run, as if they had been used from its start.

    Args:
        state: The run, after loading.
        steps: How many times the schedulers would have been stepped.
        first_rates: `rates_by_scheduler` from before the checkpoint was loaded: many schedulers of torch compute a rate
            from the previous one.
    """
    for group in param_groups_of(state):
        if "initial_lr" in group:
            set_option(group, "lr", plain(group["initial_lr"]))
    for scheduler, rates in first_rates:
        if any(scheduler is other for other in state.schedulers):
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=False):
                set_option(group, "lr", rate)
    for scheduler in state.schedulers:
        if hasattr(scheduler, "scale_schedule"):  # a schedule of composer.optim reads the time from the state
            scheduler.last_epoch = steps
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the optimizer was not stepped before, but it was
            for _ in range(steps):
                scheduler.step()
    update_schedules(state)


def update_schedules(state: State) -> None:
    """Evaluate the schedules of composer.optim for the time and the length of the run."""
    now, before = state.timestamp, state.previous_timestamp
    if before is not None and before.batches == now.batches - 1:
        state.timestamp = before  # the loop steps schedulers before it counts the batch
    for scheduler in state.schedulers:
        if hasattr(scheduler, "scale_schedule"):
            scheduler.scale_schedule(1.0)
    state.timestamp = now
