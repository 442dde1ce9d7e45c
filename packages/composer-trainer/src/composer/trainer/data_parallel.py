"""Ranks that each hold the whole model, wrapped in torch's `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch.nn.parallel import DistributedDataParallel

from composer.core import Algorithm
from composer.distributed.ddp import DDPSyncStrategy, exchange_context, prepare_ddp_module
from composer.trainer.strategy import RankStrategy


class DataParallel(RankStrategy):
    """Averages gradients while the backward pass still runs.

    Args:
        sync: When gradients are synchronized; None: with every microbatch if an algorithm leaves parameters unused,
            after the last one if optimizers take turns, otherwise once per batch.
    """

    averages_in_backward = True

    def __init__(self, sync: DDPSyncStrategy | None = None) -> None:
        self._sync = sync
        self._wrapped: DistributedDataParallel | None = None  # None: nothing in the model is trained

    def wrap(self, model: torch.nn.Module, algorithms: Iterable[Algorithm]) -> torch.nn.Module:
        """Wrap the model in `DistributedDataParallel` if it has trainable parameters."""
        unused = any(algorithm.find_unused_parameters for algorithm in algorithms)
        self._when = DDPSyncStrategy.MULTI_AUTO_SYNC if unused else DDPSyncStrategy.SINGLE_AUTO_SYNC
        if self._sync is not None:
            self._when = self._sync
        elif hasattr(model, "begin_turn"):  # a turn may use parameters in the loss alone, or not at all
            self._when = DDPSyncStrategy.FORCED_SYNC
        wrapped = prepare_ddp_module(super().wrap(model, algorithms), unused)
        self._wrapped = wrapped if isinstance(wrapped, DistributedDataParallel) else None
        return wrapped

    def backward_context(self, last_microbatch: bool, sync: bool) -> AbstractContextManager[None] | None:
        """Return a context that synchronizes when `sync` says; see `Strategy`."""
        if self._wrapped is None:
            return None
        if not sync:
            return self._wrapped.no_sync()
        when = self._when
        if when is DDPSyncStrategy.MULTI_AUTO_SYNC and not self.equal_microbatches:
            when = DDPSyncStrategy.SINGLE_AUTO_SYNC  # the rank with more microbatches would wait forever
        return exchange_context(self._wrapped, last_microbatch, when, self.host_group)

    def prepare_local_passes(self) -> None:
        """Broadcast buffers now, which the wrapper would do in its next forward pass."""
        if self._wrapped is not None:
            self._wrapped.require_forward_param_sync = False
            self.broadcast_buffers(self._wrapped.module)
