"""Training one model in several processes."""

from composer.distributed._lost_ranks import LostRankError as LostRankError
from composer.distributed.ddp import DDPSyncStrategy as DDPSyncStrategy
from composer.distributed.ddp import ddp_sync_context as ddp_sync_context
from composer.distributed.ddp import prepare_ddp_module as prepare_ddp_module
from composer.distributed.dist_strategy import prepare_fsdp_module as prepare_fsdp_module
from composer.distributed.dist_strategy import prepare_tp_module as prepare_tp_module
from composer.distributed.prepare_distributed import parallelize_composer_model as parallelize_composer_model

__all__ = [
    "DDPSyncStrategy",
    "LostRankError",
    "ddp_sync_context",
    "parallelize_composer_model",
    "prepare_ddp_module",
    "prepare_fsdp_module",
    "prepare_tp_module",
]
