"""Several processes that train one model, each with its own part of every batch.

What the host must know in a step (how many samples all ranks had, whether any loader is exhausted) travels through a
gloo group, as numbers that are on the host already; the device is never waited for. Losses travel on the device.
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from numbers import Real
from typing import Any, TypeVar

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from composer.core import Algorithm
from composer.devices import Device
from composer.distributed._lost_ranks import Attendance
from composer.distributed._structure import check_same_structure
from composer.distributed.ddp import (
    DDPSyncStrategy,
    exchange,
    exchange_context,
    prepare_ddp_module,
    reduce_gradients,
)
from composer.trainer._parallel import SingleProcess
from composer.utils import dist
from composer.utils.parallelism import ParallelismConfig

__all__ = ["DataParallel", "check_strategy", "check_timeout", "parallel_of_this_process"]

T = TypeVar("T")

_HEAD_START_SECONDS = 15.0


def check_strategy(strategy: Any) -> DDPSyncStrategy | None:
    """The argument `ddp_sync_strategy`.

    Raises:
        ValueError: It is unknown.
    """
    if strategy is None or isinstance(strategy, DDPSyncStrategy):
        return strategy
    known = [member.value for member in DDPSyncStrategy]
    if not isinstance(strategy, str) or strategy.lower() not in known:
        names = ", ".join(f"'{name}'" for name in known)
        raise ValueError(f"`ddp_sync_strategy` must be {names} or None, got {strategy!r}.")
    return DDPSyncStrategy(strategy)


def check_timeout(seconds: Any) -> float:
    """The argument `dist_timeout`.

    Raises:
        ValueError: It is no positive number.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < float(seconds) < float("inf"):
        raise ValueError(f"`dist_timeout` must be a positive number of seconds, got {seconds!r}. Use for example 300.")
    return float(seconds)


def parallel_of_this_process(
    device: Device, strategy: str | DDPSyncStrategy | None = None, timeout: float = 300.0, parallelism: Any = None
) -> SingleProcess:
    """What this process is part of; initialises the process group if there is more than one process.

    Args:
        device: What it trains on, which names the backend.
        strategy: When gradients are exchanged; None: as the algorithms need it.
        timeout: Seconds until an exchange whose partners do not arrive fails.
        parallelism: The argument `parallelism_config`.

    Raises:
        ValueError: An argument is bad.
        RuntimeError: The environment does not say how to reach the others, the device has no backend, or the process
            group exists with another one.
    """
    chosen, seconds = check_strategy(strategy), check_timeout(timeout)
    config = ParallelismConfig.of(parallelism)
    if dist.get_world_size() == 1 and config is None:
        return SingleProcess()
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing and dist.get_world_size() > 1 and not dist.is_initialized():
        raise RuntimeError(
            f"`WORLD_SIZE` is {dist.get_world_size()}, but {', '.join(missing)} is not set, so the processes cannot "
            f"find each other. Start them with `composer` or `torchrun`, or unset `WORLD_SIZE` to train in one process."
        )
    ours = not dist.is_initialized()
    # NCCL ends the process when it loses patience: what waits on the host fails before, and says which rank is missing.
    dist.initialize_dist(device, seconds + _HEAD_START_SECONDS if device.dist_backend == "nccl" else seconds)
    if ours:
        atexit.register(_leave_group, torch.distributed.group.WORLD)
    if config is None:
        return DataParallel(chosen, seconds)
    from composer.trainer._sharded import ShardedParallel  # what it imports of torch takes a while

    return ShardedParallel(config, device, chosen, seconds)


def _leave_group(group: Any) -> None:
    """Destroy the process group that a Trainer initialised, when the process ends; no earlier, others may follow.

    Not if the program has put another one in its place. And not if it ends by an error: the partners of what this rank
    had begun may never come, and it would not end at all.
    """
    failed = getattr(sys, "last_value", None) is not None
    if dist.is_initialized() and torch.distributed.group.WORLD is group and not failed:
        dist.destroy_process_group()


class DataParallel(SingleProcess):
    """This process and the others of the default process group.

    Args:
        strategy: When gradients are exchanged; None: with every microbatch if an algorithm leaves parameters unused,
            else once per batch.
        timeout: Seconds until an exchange of host values whose partners do not arrive fails.
    """

    def __init__(self, strategy: DDPSyncStrategy | None, timeout: float) -> None:
        self.world_size = dist.get_world_size()
        self._rank = dist.get_global_rank()
        self._strategy = strategy
        self._model: DistributedDataParallel | None = None
        self._in_step = True  # whether all ranks have equally many microbatches
        self._closed = False
        self._attendance = Attendance(self._rank, self.world_size, timeout)
        # NCCL moves device tensors only, and reading those would stall the step.
        self._own_group = torch.distributed.get_backend() != "gloo"
        self._host: Any = None
        if self._own_group:
            self._host = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._attendance.name = self.agreed(secrets.token_hex(4))

    def watched(self) -> AbstractContextManager[None]:
        """See `SingleProcess`; the error is a `LostRankError`."""
        return self._attendance.watched()

    def agreed(self, value: T) -> T:
        """A value of rank 0; it is pickled."""
        values = [value]
        with self.watched():
            dist.broadcast_object_list(values, 0, self._host)
        return values[0]

    def shortest(self, length: int | None) -> int | None:
        """The length of the shortest loader of all ranks; None: no rank knows its length."""
        with self.watched():
            lengths = dist.all_gather_object(length, self._host)
        return min((other for other in lengths if other is not None), default=None)

    def equalize(self, model: torch.nn.Module) -> None:
        """Give the model the weights and buffers that it has on rank 0.

        Raises:
            RuntimeError: The model has another structure there.
        """
        with self.watched():
            check_same_structure(model, self._rank, self._host)
            self._broadcast((*model.parameters(), *model.buffers()))

    def equalize_buffers(self, model: torch.nn.Module) -> None:
        """Give the model the buffers that it has on rank 0, whose are saved."""
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in model.buffers():
            if not buffer.is_meta:
                alike.setdefault((buffer.dtype, buffer.device), []).append(buffer.detach())
        for buffers in alike.values():  # many small ones, so all at once
            whole = torch.cat([buffer.reshape(-1) for buffer in buffers])
            torch.distributed.broadcast(whole, 0)
            if self._rank:
                parts = torch.split(whole, [buffer.numel() for buffer in buffers])
                torch._foreach_copy_(buffers, [part.view_as(b) for part, b in zip(parts, buffers, strict=True)])

    def _broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        real = (tensor.detach() for tensor in tensors if not tensor.is_meta)
        exchange(real, lambda tensor: torch.distributed.broadcast(tensor, 0, async_op=True))

    def adopt_metrics(self, metrics: Iterable[Any]) -> None:
        """Let metrics gather their states without waiting for the device, where they leave that open."""
        for metric in metrics:
            parts: Iterable[Any] = metric.modules() if isinstance(metric, torch.nn.Module) else ()
            for part in parts:
                if _has_fixed_shapes(part) and part.dist_sync_fn is None:
                    part.dist_sync_fn = _gather

    def wrap(self, model: torch.nn.Module, algorithms: Iterable[Algorithm]) -> torch.nn.Module:
        """The model in `DistributedDataParallel`, if anything in it is trainable."""
        unused = any(algorithm.find_unused_parameters for algorithm in algorithms)
        if self._strategy is None:
            self._strategy = DDPSyncStrategy.MULTI_AUTO_SYNC if unused else DDPSyncStrategy.SINGLE_AUTO_SYNC
        wrapped = prepare_ddp_module(model, unused)
        self._model = wrapped if isinstance(wrapped, DistributedDataParallel) else None
        return wrapped

    def backward_context(self, last_microbatch: bool, sync: bool) -> AbstractContextManager[None] | None:
        """Around forward and backward of one microbatch, to keep gradients from being exchanged; None: nothing."""
        if self._model is None:
            return None
        if not sync:
            return self._model.no_sync()
        strategy = self._strategy
        assert strategy is not None, "`wrap` has decided"
        if strategy is DDPSyncStrategy.MULTI_AUTO_SYNC and not self._in_step:
            strategy = DDPSyncStrategy.SINGLE_AUTO_SYNC  # the rank with more microbatches would wait for ever
        return exchange_context(self._model, last_microbatch, strategy, self._host)

    def total(
        self, samples: float, tokens: int, interrupted: bool = False, lap: timedelta = timedelta()
    ) -> tuple[float, int, bool, timedelta]:
        """Samples and tokens of one step, summed over ranks; see `SingleProcess`."""
        seconds = lap.total_seconds() if self._rank == 0 else 0.0
        sums = self._sum((samples, tokens, interrupted, seconds))
        everything = int(sums[0]) if sums[0].is_integer() else sums[0]
        return everything, int(sums[1]), sums[2] > 0, timedelta(seconds=sums[3])

    def mean_count(self, count: float, microbatches: int) -> float:
        """A rank's batch size, averaged over ranks, which weighs its microbatches."""
        # The squares tell whether all have equally many, on every rank alike.
        total, number, squares = self._sum((count, microbatches, microbatches**2))
        self._in_step = squares * self.world_size == number**2
        return total / self.world_size

    def any_finished(self, finished: bool, stopped: bool = False) -> tuple[bool, bool]:
        """Whether the loader of any rank is exhausted, and whether any rank was told to stop; see `SingleProcess`."""
        sums = self._sum((finished, stopped))
        return sums[0] > 0, sums[1] > 0

    def prepare_lone_passes(self) -> None:
        """Take the buffers of rank 0 now, which the wrapper would do in its next forward pass."""
        if self._model is not None:
            self._model.require_forward_param_sync = False
            self.equalize_buffers(self._model.module)

    def of_all_ranks(self, numbers: Sequence[float]) -> list[list[float]]:
        """Numbers of each rank, by rank."""
        own = torch.tensor(numbers, dtype=torch.float64)
        return [tensor.tolist() for tensor in dist.all_gather(own, self._host)]

    def average_gradients(self) -> None:
        """Average the gradients of the wrapped model, in place."""
        if self._model is not None:
            reduce_gradients(self._model.parameters(), self._host)

    def mean_losses(self, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The logged losses, averaged over ranks, on their device.

        At once and not when they are read: a callback may read them on one rank only.
        """
        stacked = torch.stack([*losses.values()])
        stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        torch.distributed.all_reduce(stacked)
        return dict(zip(losses, (stacked / self.world_size).unbind(), strict=True))

    def close(self) -> None:
        """Wait for the other ranks, and leave them. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._attendance.lost:  # nobody to wait for
            return
        with self.watched():
            dist.barrier(self._host)
        if self._own_group:
            dist.destroy_process_group(self._host)

    def _sum(self, numbers: Sequence[float]) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        torch.distributed.all_reduce(tensor, group=self._host)
        sums: list[float] = tensor.tolist()
        return sums


def _has_fixed_shapes(metric: Any) -> bool:
    """Whether it is a metric whose states are tensors of shapes that do not depend on the data.

    Those are the ones that are summed up or the like, not put one after the other.
    """
    from torchmetrics import Metric  # takes long, and is loaded already if there are metrics
    from torchmetrics.utilities.data import dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

    fixed = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min)
    reductions = metric._reductions.values() if isinstance(metric, Metric) else ()
    return bool(reductions) and all(reduction in fixed for reduction in reductions)


def _gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    # Torchmetrics' own also exchanges shapes and reads them, which waits for the device.
    return dist.all_gather(tensor, group)
