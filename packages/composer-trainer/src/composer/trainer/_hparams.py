"""The hyperparameters that every run logs."""

from __future__ import annotations

import os
import platform
from typing import Any

from composer.core import State
from composer.loggers import Logger
from composer.utils import dist

__all__ = ["log_standard_hparams"]


def log_standard_hparams(state: State, logger: Logger, local_hparams: dict[str, Any]) -> None:
    """Log versions, nodes and devices, and the Trainer's own arguments if asked for.

    Args:
        state: The run's state.
        logger: Where to.
        local_hparams: The Trainer's arguments; empty if they are not to be logged.
    """
    import composer

    if local_hparams:
        logger.log_hyperparameters(local_hparams)
    local_world_size = dist.get_local_world_size()
    logger.log_hyperparameters(
        {
            "composer_version": composer.__version__,
            "composer_commit_hash": os.environ.get("COMPOSER_COMMIT_HASH", "None"),
            "num_nodes": dist.get_world_size() // local_world_size,
            f"num_{state.device.name}s_per_node": local_world_size,
            "node_name": os.environ.get("NODENAME") or platform.node(),
        }
    )
