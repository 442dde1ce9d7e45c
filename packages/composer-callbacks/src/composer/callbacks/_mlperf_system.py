"""What MLPerf wants to know of the system that a run was trained on."""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import psutil
import torch

from composer.core import State
from composer.utils import dist

__all__ = ["STATUS_NAMES", "describe_system", "system_name_of"]

STATUS_NAMES = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "preview": "Preview",
    "research": "Research, Development, or Internal (RDI)",
}
"""The status of a submission, and of its system."""

_BY_HAND = (
    "host_processor_caches host_processor_interconnect host_storage_type host_storage_capacity host_networking "
    "host_networking_topology host_memory_configuration accelerator_host_interconnect accelerator_frequency "
    "accelerator_on-chip_memories accelerator_memory_configuration accelerator_interconnect "
    "accelerator_interconnect_topology cooling hw_notes sw_notes"
).split()


def system_name_of(state: State) -> str:
    """A name such as "8xNVIDIA_H100_composer".

    Args:
        state: The state of the run.
    """
    device = re.sub(r"[^\w.+-]+", "_", _accelerator(state) or "cpu")
    return f"{dist.get_world_size()}x{device}_composer"


def describe_system(state: State, name: str, processors: int | None) -> dict[str, str]:
    """The fields of a description; what the machine does not tell is empty.

    Args:
        state: The state of the run.
        name: The system's name.
        processors: Processors of each node; None: as many as the machine tells.
    """
    info = _cpu_info()
    accelerator = _accelerator(state)
    memory = torch.cuda.get_device_properties(0).total_memory if accelerator else 0
    frequency: Any = psutil.cpu_freq()  # None where the machine does not tell
    cuda = f", CUDA {torch.version.cuda}" if accelerator else ""
    known: dict[str, object] = {
        "system_name": name,
        "number_of_nodes": dist.get_world_size() // dist.get_local_world_size(),
        "host_processors_per_node": processors or len(set(info.get("physical id", []))) or "",
        "host_processor_model_name": next(iter(info.get("model name", [])), platform.processor()),
        "host_processor_core_count": psutil.cpu_count(logical=False) or "",
        "host_processor_vcpu_count": psutil.cpu_count() or "",
        "host_processor_frequency": f"{frequency.max or frequency.current:.0f} MHz" if frequency else "",
        "host_memory_capacity": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "accelerators_per_node": dist.get_local_world_size() if accelerator else 0,
        "accelerator_model_name": accelerator,
        "accelerator_memory_capacity": f"{memory / 2**30:.0f} GiB" if memory else "",
        "framework": f"PyTorch {torch.__version__}",
        "other_software_stack": f"Python {platform.python_version()}{cuda}",
        "operating_system": platform.platform(),
    }
    return {**{field: str(value) for field, value in known.items()}, **dict.fromkeys(_BY_HAND, "")}


def _accelerator(state: State) -> str:
    return torch.cuda.get_device_name() if state.device.name == "gpu" else ""


def _cpu_info() -> dict[str, list[str]]:
    """What Linux tells of its processors."""
    file, found = Path("/proc/cpuinfo"), dict[str, list[str]]()
    for line in file.read_text().splitlines() if file.exists() else ():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), []).append(value.strip())
    return found
