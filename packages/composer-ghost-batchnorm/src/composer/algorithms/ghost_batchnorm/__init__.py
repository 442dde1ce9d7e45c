"""GhostBatchNorm: batch normalization over parts of the batch."""

from composer.algorithms.ghost_batchnorm.ghost_batchnorm import GhostBatchNorm as GhostBatchNorm
from composer.algorithms.ghost_batchnorm.ghost_batchnorm import apply_ghost_batchnorm as apply_ghost_batchnorm
from composer.algorithms.ghost_batchnorm.ghost_batchnorm_layers import GhostBatchNorm1d as GhostBatchNorm1d
from composer.algorithms.ghost_batchnorm.ghost_batchnorm_layers import GhostBatchNorm2d as GhostBatchNorm2d
from composer.algorithms.ghost_batchnorm.ghost_batchnorm_layers import GhostBatchNorm3d as GhostBatchNorm3d

__all__ = ["GhostBatchNorm", "GhostBatchNorm1d", "GhostBatchNorm2d", "GhostBatchNorm3d", "apply_ghost_batchnorm"]
