"""The description of a run for its log: model, data, optimizers, duration, machine and versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from composer.core import State
from composer.core.display import call_of, name_of_model, name_of_optimizer
from composer.utils import dist

_SECONDS_FOR_GIT = 5


def describe_run(state: State) -> dict[str, Any]:
    """Return plain values that distinguish a run from others, as it begins to train.

    The seed is left out: each run already logs it as "rank_zero_seed", the name that MosaicML's Composer uses.

    Args:
        state: The state; its data and duration are known.
    """
    parameters = list(state.model.parameters())
    # The learning rates that the schedules start from.
    rates = [float(group.get("initial_lr", group["lr"])) for each in state.optimizers for group in each.param_groups]
    distinct = list(dict.fromkeys(rates))
    batch_size = getattr(state.dataloader, "batch_size", None)
    device = state.device.name
    if device == "gpu":
        device = torch.cuda.get_device_name()
    elif device == "cpu":
        device = f"cpu, {platform.processor() or platform.machine()}"
    described: dict[str, Any] = {
        "model": name_of_model(state.model),
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "optimizer": " + ".join(map(name_of_optimizer, state.optimizers)),
        "learning_rate": distinct[0] if len(distinct) == 1 else distinct or None,
        "schedule": ", ".join(dict.fromkeys(map(_name_of_schedule, state.schedulers))),
        "loss": _name_of_loss(state.model),
        "algorithms": ", ".join(map(call_of, state.algorithms)),
        "max_duration": str(state.max_duration),
        "batch_size": batch_size * dist.get_world_size() if isinstance(batch_size, int) else None,
        "device_train_microbatch_size": state.device_train_microbatch_size,
        "batches_per_epoch": None if state.dataloader_len is None else state.dataloader_len.value,
        "train_samples": None if state.train_data_spec is None else state.train_data_spec.num_samples,
        "eval_samples": {each.label: each.dataloader.num_samples for each in state.evaluators} or None,
        "precision": state.precision.value,
        "device": device,
        "world_size": dist.get_world_size(),
        "torch_version": torch.__version__,
        "python_version": platform.python_version(),
        "git_commit": _commit(),
    }
    return {name: value for name, value in described.items() if value not in (None, "")}


def _name_of_loss(model: torch.nn.Module) -> str | None:
    """Return the name of the loss function that was passed for a plain module; None for other models."""
    while not hasattr(model, "loss_fn") and isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module  # type: ignore[assignment]
    loss = getattr(model, "loss_fn", None)
    return None if loss is None else getattr(loss, "__name__", type(loss).__name__)


def _name_of_schedule(scheduler: Any) -> str:
    """Return a schedule of this project with its arguments, and the name of any other scheduler."""
    schedule = getattr(scheduler, "schedule", None)  # set by `compile_composer_scheduler`
    if schedule is None:
        return type(scheduler).__name__
    return schedule.__name__ if hasattr(schedule, "__name__") else call_of(schedule)


def _commit() -> str | None:
    """Return the commit of the program's repository, with "-dirty" if files have changed; None if there is none."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(script).resolve().parent if script else Path.cwd()
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=_SECONDS_FOR_GIT, env=environment
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
