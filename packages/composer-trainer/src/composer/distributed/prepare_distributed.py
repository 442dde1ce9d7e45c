"""Shard a `ComposerModel` in a loop of your own. The Trainer does this itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from composer.core import Precision
from composer.distributed.dist_strategy import shard
from composer.models import ComposerModel
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from composer.utils.reproducibility import MAX_SEED


def parallelize_composer_model(
    composer_model: ComposerModel,
    optimizer: torch.optim.Optimizer | None,
    config: FSDP2Config | Mapping[str, Any],
    precision: Precision | str | None = None,
) -> None:
    """Shard a `ComposerModel` and its optimizer among ranks with `fully_shard`, in place. A collective operation.

    Args:
        composer_model: The model. Its children, and the modules that they select with `fsdp_wrap_fn`, `_fsdp_wrap` or
            `_no_split_modules`, are gathered and freed as units. On rank 0 it has weights, on other ranks it may be on
            the meta device; on the meta device everywhere, it is initialized, with torch's seed of rank 0.
        optimizer: Its optimizer, which gets the new parameters.
        config: The configuration, or a dict of the arguments of `FSDPConfig`.
        precision: The precision of the run, in which weights are gathered; None: their own.

    Raises:
        TypeError: `composer_model` is not a `ComposerModel`.
        RuntimeError: There is no process group, or this version of torch cannot shard on the device.
        ValueError: Units share parameters, the optimizer has parameters of another model, or a module has no way to be
            initialized.
    """
    if not isinstance(composer_model, ComposerModel):
        raise TypeError(
            f"`composer_model` must be a `ComposerModel`, got {type(composer_model).__name__}. Use "
            f"`composer.distributed.prepare_fsdp_module` for other modules."
        )
    seeds = [torch.initial_seed() % (MAX_SEED + 1)]
    if dist.is_initialized():
        dist.broadcast_object_list(seeds)
    shard(composer_model, optimizer, config, precision, None, seeds[0])
