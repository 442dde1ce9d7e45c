"""What the user asked for, so that a resumed run can tell it from what its checkpoint was started with."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from composer.core import State
from composer.utils import plain_number

__all__ = ["apply_changes", "describe_schedulers", "requested_of", "restart_schedulers", "with_members"]

_PROGRESS = {"last_epoch", "_last_lr", "_step_count", "base_lrs", "_is_initial", "_get_lr_called_within_step"}


def requested_of(state: State, schedulers: Iterable[Any]) -> dict[str, Any]:
    """The arguments a run was built with, as plain values.

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
    """What tells schedulers apart: their kinds and arguments, but not how far they are."""
    return [_describe(scheduler) for scheduler in schedulers]


def _describe(scheduler: Any) -> str:
    if inspect.isroutine(scheduler):
        return f"{scheduler.__module__}.{scheduler.__qualname__}"
    is_torch = isinstance(scheduler, LRScheduler)
    values = scheduler.state_dict() if is_torch else getattr(scheduler, "__dict__", {})
    return f"{type(scheduler).__qualname__}({_text(values)})"


def _text(value: Any) -> str:
    """A text of plain values; of objects, their kind."""
    if isinstance(value, Mapping):
        parts = (f"{key}={_text(item)}" for key, item in sorted(value.items(), key=str) if key not in _PROGRESS)
        return ", ".join(parts)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    text = repr(_plain(value))
    return type(value).__qualname__ if " at 0x" in text else text


def apply_changes(state: State, asked: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    """Let what the user asks for now win over the checkpoint, where it differs from what was asked for then.

    Args:
        state: The run, after loading.
        asked: `requested_of` this run.
        saved: `requested_of` the saved run.

    Returns:
        What was overridden, one text each.
    """
    changes: list[str] = []
    groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
    if len(groups) == len(asked["param_groups"]) == len(saved["param_groups"]):
        for index, group in enumerate(groups):
            now, then = asked["param_groups"][index], saved["param_groups"][index]
            for key in sorted(now.keys() & then.keys()):
                if now[key] != then[key]:
                    _override(state, group, index, key, now[key], then[key])
                    place = f" of parameter group {index}" if len(groups) > 1 else ""
                    changes.append(f"{key}{place}: {then[key]} -> {now[key]}")
    for key, name in (("max_duration", "max_duration"), ("batch_size", "batch size"), ("schedulers", "schedulers")):
        if asked[key] != saved[key]:
            changes.append(f"{name}: {saved[key]} -> {asked[key]}")
    return changes


def _override(state: State, group: dict[str, Any], index: int, key: str, now: Any, then: Any) -> None:
    if key != "lr":
        if isinstance(group[key], torch.Tensor):
            group[key].fill_(now)
        else:
            group[key] = tuple(now) if isinstance(group[key], tuple) else now
        return
    # The schedule stays where it is: what it made of the former learning rate it makes of the new one.
    current = _plain(group["lr"])
    _set_lr(group, now if current == then or not then else current * (now / then))
    if "initial_lr" in group:
        group["initial_lr"] = now
    for scheduler in with_members(state.schedulers):
        for attribute, rate in (("base_lrs", now), ("_last_lr", _plain(group["lr"]))):
            if getattr(scheduler, attribute, None):
                getattr(scheduler, attribute)[index] = rate


def with_members(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Schedulers, and those that they are made of, as `SequentialLR` is."""
    for scheduler in schedulers:
        yield scheduler
        yield from with_members(getattr(scheduler, "_schedulers", ()))


def _set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def restart_schedulers(state: State, steps: int) -> None:
    """Bring new schedulers to where the run is, as if they had been there from its beginning.

    Args:
        state: The run, after loading.
        steps: How often they would have been stepped.
    """
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            if "initial_lr" in group:
                _set_lr(group, group["initial_lr"])
    for scheduler in state.schedulers:
        follow = getattr(scheduler, "scale_schedule", None)
        if follow is not None:  # a schedule of this library asks the state how far the run is
            scheduler.last_epoch = steps
            follow(1.0)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of stepping before the optimizer, which it is not
            for _ in range(steps):
                scheduler.step()
