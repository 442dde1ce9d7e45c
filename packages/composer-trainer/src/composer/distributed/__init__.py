"""Training one model in several processes."""

from composer.distributed._lost_ranks import LostRankError as LostRankError
from composer.distributed.ddp import DDPSyncStrategy as DDPSyncStrategy
from composer.distributed.ddp import ddp_sync_context as ddp_sync_context
from composer.distributed.ddp import prepare_ddp_module as prepare_ddp_module

__all__ = ["DDPSyncStrategy", "LostRankError", "ddp_sync_context", "prepare_ddp_module"]
