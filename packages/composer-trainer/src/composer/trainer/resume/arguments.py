"""The arguments of a run, compared with those of its checkpoint: what the user changes wins."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from composer.core import State
from composer.utils import plain_number

__all__ = ["apply_changes", "describe_arguments", "describe_schedulers", "restart_schedulers", "with_members"]

_PROGRESS = {"last_epoch", "_last_lr", "_step_count", "base_lrs", "_is_initial", "_get_lr_called_within_step"}


def describe_arguments(state: State, schedulers: Iterable[Any]) -> dict[str, Any]:
    """Return the arguments of a run as plain values.

    Args:
        state: The run, before a checkpoint is loaded into it.
        schedulers: The user's schedulers.
    """
    return {
        "param_groups": [_options(group) for optimizer in state.optimizers for group in optimizer.param_groups],
        "schedulers": describe_schedulers(schedulers),
        "max_duration": None if state.max_duration is None else str(state.max_duration),
        "batch_size": getattr(state.train_dataloader, "batch_size", None),
    }


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: _plain(value) for key, value in group.items() if key not in ("params", "initial_lr")}
    options["lr"] = _plain(group.get("initial_lr", group.get("lr")))  # a schedule has changed "lr" already
    return options


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    value = plain_number(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)


def describe_schedulers(schedulers: Iterable[Any]) -> list[str]:
    """Return the types and arguments of schedulers, without their progress."""
    return [_describe(scheduler) for scheduler in schedulers]


def _describe(scheduler: Any) -> str:
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
    text = repr(_plain(value))
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
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    if len(groups) == len(current["param_groups"]) == len(saved["param_groups"]):
        for index, group in enumerate(groups):
            new, old = current["param_groups"][index], saved["param_groups"][index]
            for key in sorted(new.keys() & old.keys()):
                if new[key] != old[key]:
                    _override(state, group, index, key, new[key], old[key])
                    place = f" of parameter group {index}" if len(groups) > 1 else ""
                    changes.append(f"{key}{place}: {old[key]} -> {new[key]}")
    for key, name in (("max_duration", "max_duration"), ("batch_size", "batch size"), ("schedulers", "schedulers")):
        if current[key] != saved[key]:
            changes.append(f"{name}: {saved[key]} -> {current[key]}")
    return changes


def _override(state: State, group: dict[str, Any], index: int, key: str, new: Any, old: Any) -> None:
    if key != "lr":
        if isinstance(group[key], torch.Tensor):
            group[key].fill_(new)
        else:
            group[key] = tuple(new) if isinstance(group[key], tuple) else new
        return
    # The schedule keeps its progress: it scales the new learning rate as it scaled the old one.
    rate = _plain(group["lr"])
    _set_lr(group, new if rate == old or not old else rate * (new / old))
    if "initial_lr" in group:
        group["initial_lr"] = new
    for scheduler in with_members(state.schedulers):
        for attribute, value in (("base_lrs", new), ("_last_lr", _plain(group["lr"]))):
            if getattr(scheduler, attribute, None):
                getattr(scheduler, attribute)[index] = value


def with_members(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Iterate over schedulers and the schedulers that they consist of, as in `SequentialLR`."""
    for scheduler in schedulers:
        yield scheduler
        yield from with_members(getattr(scheduler, "_schedulers", ()))


def _set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def restart_schedulers(state: State, steps: int) -> None:
    """Advance new schedulers to the current time of the run, as if they had been used from its start.

    Args:
        state: The run, after loading.
        steps: How often the schedulers would have been stepped.
    """
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            if "initial_lr" in group:
                _set_lr(group, group["initial_lr"])
    for scheduler in state.schedulers:
        rescale = getattr(scheduler, "scale_schedule", None)
        if rescale is not None:  # a schedule of composer.optim reads the time from the state
            scheduler.last_epoch = steps
            rescale(1.0)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the optimizer was not stepped before, which it was
            for _ in range(steps):
                scheduler.step()
