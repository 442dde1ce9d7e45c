"""What is worth knowing of a run besides its numbers: machine and versions, plan, algorithms, modules."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections import Counter
from importlib.metadata import distributions
from typing import Any

import numpy as np
import torch

from composer.core import Plan, State
from composer.utils import dist

__all__ = [
    "describe_algorithms",
    "describe_model",
    "machine",
    "module_changes",
    "module_classes",
    "packages",
    "plan_rows",
]

_MOST_MODULES = 200  # replaced ones that are listed by name
_ADDRESS = re.compile(r" object at 0x[0-9a-f]+| at 0x[0-9a-f]+")


def machine(state: State) -> dict[str, Any]:
    """The machine and what runs on it: no environment variables, no names of hosts, users or folders."""
    kind = state.device.name
    device: dict[str, Any] = {"kind": kind, "precision": str(state.precision.value)}
    if kind == "gpu":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        device |= {"name": properties.name, "memory_bytes": properties.total_memory}
    else:
        device["name"] = _processor()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "device": device,
        "world_size": dist.get_world_size(),
        "nodes": dist.get_world_size() // dist.get_local_world_size(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def _processor() -> str:
    if sys.platform == "linux":
        try:
            with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
                for line in file:
                    if line.startswith("model name"):
                        return line.partition(":")[2].strip()
        except OSError:  # a sandbox may hide it
            return platform.machine()
    return platform.processor() or platform.machine()


def packages() -> dict[str, str]:
    """The installed packages of this library, with their versions. Reads a file for each installed package."""
    found = {each.metadata["Name"]: each.version for each in distributions()}
    return dict(sorted((name, version) for name, version in found.items() if name and name.startswith("composer")))


def describe_model(model: torch.nn.Module) -> dict[str, Any]:
    """The size of the model."""
    parameters = list(model.parameters())
    return {
        "class": type(model).__name__,
        "inner": [type(child).__name__ for child in model.children()][:8],
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "modules": sum(1 for _ in model.modules()),
    }


def describe_algorithms(state: State) -> list[dict[str, Any]]:
    """The algorithms, in the user's order."""
    return [
        {
            "name": type(algorithm).__name__,
            "config": _ADDRESS.sub("", repr(algorithm)),
            "events": None if algorithm.events is None else sorted(event.value for event in algorithm.events),
        }
        for algorithm in state.algorithms
    ]


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """`engine.explain()` as data."""
    return [
        {"event": row.event.value, "order": row.order, "kind": row.kind, "name": row.name, "reason": row.reason}
        for row in plan
    ]


def module_classes(model: torch.nn.Module) -> dict[str, type]:
    """The class of each module."""
    return {name: type(module) for name, module in model.named_modules()}


def module_changes(before: dict[str, type], after: dict[str, type]) -> dict[str, Any] | None:
    """Which modules were replaced, added and removed; None if none were."""
    replaced = [
        {"module": name, "before": before[name].__name__, "after": kind.__name__}
        for name, kind in after.items()
        if name in before and before[name] is not kind
    ]
    added = Counter(kind.__name__ for name, kind in after.items() if name not in before)
    removed = Counter(kind.__name__ for name, kind in before.items() if name not in after)
    if not (replaced or added or removed):
        return None
    kinds = Counter((each["before"], each["after"]) for each in replaced)
    return {
        "replaced": replaced[:_MOST_MODULES],
        "kinds": [{"before": old, "after": new, "count": count} for (old, new), count in kinds.most_common()],
        "added": dict(added),
        "removed": dict(removed),
    }
