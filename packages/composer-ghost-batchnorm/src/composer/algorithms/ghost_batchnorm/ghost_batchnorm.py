"""`apply_ghost_batchnorm` and the algorithm `GhostBatchNorm`. The layers are in `ghost_batchnorm_layers`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from composer.algorithms.ghost_batchnorm.ghost_batchnorm_layers import GhostBatchNorm1d as GhostBatchNorm1d
from composer.algorithms.ghost_batchnorm.ghost_batchnorm_layers import GhostBatchNorm2d as GhostBatchNorm2d
from composer.algorithms.ghost_batchnorm.ghost_batchnorm_layers import GhostBatchNorm3d as GhostBatchNorm3d
from composer.algorithms.ghost_batchnorm.ghost_batchnorm_layers import _GhostBatchNorm as _GhostBatchNorm
from composer.algorithms.ghost_batchnorm.ghost_batchnorm_layers import check_ghost_batch_size
from composer.algorithms.warnings import warn_no_effect
from composer.core import ADDS_NORMS, REPLACES_BLOCKS, REPLACES_NORMS, Algorithm, Event, Placement
from composer.utils import module_surgery, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger

__all__ = ["GhostBatchNorm", "GhostBatchNorm1d", "GhostBatchNorm2d", "GhostBatchNorm3d", "apply_ghost_batchnorm"]


def apply_ghost_batchnorm(
    model: nn.Module,
    ghost_batch_size: int = 32,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
) -> None:
    """Make every batch normalization of a model work on parts of the batch, in place.

    Each `torch.nn.BatchNorm1d`, `BatchNorm2d` and `BatchNorm3d` is wrapped in a layer that applies it to the parts of
    the batch one by one, unless it is wrapped already. Parameters and running statistics stay the same tensors.

    Args:
        model: The model. A normalization that is the model itself is not wrapped.
        ghost_batch_size: The maximum number of examples that are normalized together, at least 1.
        optimizers: The optimizer of the model, if there is one. It keeps all parameters and their state.

    Raises:
        ValueError: `ghost_batch_size` is less than 1.

    Warns:
        NoEffectWarning: The model has no wrapped layer afterwards.
        UserWarning: A layer of a subclass is not wrapped, because its `forward` takes more than the input.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, kernel_size=3), nn.BatchNorm2d(8))
        >>> apply_ghost_batchnorm(model, ghost_batch_size=16)
        >>> type(model[1]).__name__, type(model[1].batchnorm).__name__
        ('GhostBatchNorm2d', 'BatchNorm2d')

    Source: Hoffer et al., "Train longer, generalize better: closing the generalization gap in large batch training of
        neural networks", arXiv:1705.08741, algorithm 1.
    Differs: the momentum is divided by the number of parts, so that the weight of a whole batch is about the same.
        Parts have nearly equal sizes; a batch smaller than `ghost_batch_size` is one part.
    """
    check_ghost_batch_size(ghost_batch_size)
    skipped: dict[nn.Module, str] = {}

    def ghost(module: nn.Module, index: int) -> nn.Module | None:
        if getattr(module, "_already_ghost_batchnormed", False):
            return None
        if not module_surgery.takes_one_input(module):
            skipped[module] = "its `forward` takes more than the input, which a layer around it would not pass on"
            return None
        return _GhostBatchNorm.from_batchnorm(module, index, ghost_batch_size)

    kinds: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    module_surgery.replace_module_classes(model, dict.fromkeys(kinds, ghost), optimizers=optimizers)
    module_surgery.warn_about_kept_modules("apply_ghost_batchnorm", model, skipped)
    if not module_surgery.count_module_instances(model, _GhostBatchNorm):
        warn_no_effect(
            "`apply_ghost_batchnorm` changed nothing: the model has no `BatchNorm1d`, `BatchNorm2d` or `BatchNorm3d` "
            "that can be wrapped."
        )


class GhostBatchNorm(Algorithm):
    """Applies batch normalization to parts of the batch.

    At INIT every batch normalization of the model is wrapped; see `apply_ghost_batchnorm`.

    Microbatches: each microbatch is split into ghost batches and updates the running statistics, so several
    microbatches do not equal one batch.

    **Events** INIT. **Reads** nothing. **Writes** modules of `state.model`. **Cost** in training one more copy of the
    layer's output, and a normalization per part; in evaluation nothing. **Compilation** static as long as the batch
    size does not change: a smaller last batch has fewer parts, and recompiles.

    **Logs** the hyperparameter `GhostBatchNorm/num_new_modules`, once.

    Args:
        ghost_batch_size: The maximum number of examples that are normalized together, at least 1.

    Raises:
        ValueError: `ghost_batch_size` is less than 1.

    Example:
        >>> GhostBatchNorm(ghost_batch_size=16)
        GhostBatchNorm(ghost_batch_size=16)

    Source: Hoffer et al., "Train longer, generalize better: closing the generalization gap in large batch training of
        neural networks", arXiv:1705.08741, algorithm 1.
    Differs: see `apply_ghost_batchnorm`.
    """

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_NORMS}, after={REPLACES_BLOCKS, ADDS_NORMS})

    def __init__(self, ghost_batch_size: int = 32) -> None:
        check_ghost_batch_size(ghost_batch_size)
        self.ghost_batch_size = plain_number(ghost_batch_size)

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the parameters of wrapped layers have other names in a checkpoint."""
        return True

    def apply(self, event: Event, state: State, logger: Logger | None = None) -> None:
        """Wrap the layers and log their number."""
        apply_ghost_batchnorm(state.model, self.ghost_batch_size, state.optimizers)
        if logger is not None:
            count = module_surgery.count_module_instances(state.model, _GhostBatchNorm)
            logger.log_hyperparameters({"GhostBatchNorm/num_new_modules": count})
