"""Split layers among ranks with `torch.distributed.tensor.parallel`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from composer.distributed._optimizers import OptimizerParameters


def divide_layers(
    model: torch.nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    layer_plan: Mapping[str, Any],
    mesh: DeviceMesh,
) -> None:
    """Split layers among the ranks of a mesh, in place. A collective operation; call it before `shard_model`.

    Args:
        model: The model, on the device and equal on the ranks of the mesh.
        optimizers: Its optimizers, which get the new parameters.
        layer_plan: `{name of a module: ParallelStyle}`; `*` matches one part of a name.
        mesh: A one-dimensional mesh of the tensor-parallel ranks.

    Raises:
        ValueError: A name of the plan matches no module, or an optimizer has parameters of another model.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    names = [name.split(".") for name, _ in model.named_modules()]
    for pattern in layer_plan:
        parts = pattern.split(".")
        if not any(len(name) == len(parts) and all(map(fnmatchcase, name, parts)) for name in names):
            known = ", ".join(".".join(name) for name in names if name != [""])
            raise ValueError(
                f"`layer_plan` must name modules of the model, got {pattern!r}. They are {known[:400]}. `*` matches "
                f"one part of a name."
            )
    optimized = OptimizerParameters(model, optimizers)
    parallelize_module(model, mesh, dict(layer_plan))
    optimized.replace(model)
