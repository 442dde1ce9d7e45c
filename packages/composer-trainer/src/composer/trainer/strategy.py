"""Strategies: what runs a step on the processes that train one model together.

`Strategy` is a run in one process and the interface of all others. `RankStrategy` is the ranks of the default process
group: it exchanges values between them, and averages gradients after the passes of a batch. `DataParallel` (DDP) and
`composer.trainer.sharded.ShardedParallel` (FSDP2 and tensor parallelism) override what they do otherwise, and so does a
strategy of your own: `Trainer(parallelism_config=MyStrategy())`. The Trainer never asks which one it has.

Host values that every rank needs in a step (the samples of all ranks, whether any loader is exhausted) are exchanged
through a gloo group as numbers that are already on the host, so the device never blocks. Losses are reduced on the
device.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed

from composer.core import Algorithm, Precision, State
from composer.devices import Device
from composer.distributed._lost_ranks import LostRankDetector
from composer.distributed.ddp import exchange, reduce_gradients
from composer.loop.loss_terms import Count
from composer.utils import dist

T = TypeVar("T")


class Strategy:
    """A run in one process: nothing to wrap, synchronize or reduce. The interface of all strategies.

    The Trainer calls the methods in the order in which they are listed here. A strategy for several ranks derives from
    `RankStrategy`, which implements those that exchange values. In one process, nothing is averaged or exchanged.

    A strategy is not saved: rank 0's model, optimizers and callbacks are, so all ranks must have the same ones whenever
    a checkpoint or an evaluation is due. What a strategy must remember belongs in a `Callback` with a `state_dict`.

    Attributes:
        world_size: The number of ranks.
        collective_forward: All ranks must run a forward pass together, because it exchanges weights. They must have
            the same number of microbatches. In an evaluation, a rank whose loader has fewer batches repeats one. The
            microbatch size `"auto"` is refused.
        averages_in_backward: Gradients are averaged during the backward pass. `average_gradients` is then only called
            in the search for a microbatch size, whose passes have `sync=False`.
        scales_losses: With the precision `amp_fp16`, `backward` scales losses and the optimizer unscales gradients;
            otherwise the Trainer has a gradient scaler for that.
    """

    world_size: int = 1
    collective_forward: bool = False
    averages_in_backward: bool = False
    scales_losses: bool = False

    @property
    def is_distributed(self) -> bool:
        """True if a step exchanges values, and so calls the methods below; a group of one rank may do that, too."""
        return self.world_size > 1

    # ---- at construction ----

    def connect(self, device: Device, timeout: float) -> None:
        """Prepare the exchange with other ranks: the default process group exists, and nothing else.

        Args:
            device: The device of this rank.
            timeout: Seconds until an exchange of host values fails because another rank does not answer.
        """

    def refusal(self, algorithm: Algorithm) -> str | None:
        """Return why this strategy cannot run an algorithm, in one sentence that says what to do; None: it can."""
        return None

    def broadcast(self, value: T) -> T:
        """Return rank 0's value; it is pickled."""
        return value

    def min_length(self, length: int | None) -> int | None:
        """Return the length of the shortest loader of all ranks; None: no rank knows its length."""
        return length

    def place(self, model: torch.nn.Module, device: Device) -> torch.nn.Module:
        """Move the model to the device that it is trained on, with the parameters and buffers of rank 0.

        Raises:
            ValueError: A parameter is on the meta device.
        """
        for name, parameter in model.named_parameters():
            if parameter.is_meta and device._device.type != "meta":  # a trial without numbers may run there
                raise ValueError(
                    f"`model` must have values to be trained, but its parameter {name!r} is on the meta device. Call "
                    f"`model.to_empty(device='cpu')` and load its weights, or shard it with `parallelism_config`."
                )
        return device.module_to_device(model)

    def describe_sharding(self, state: State) -> None:
        """Set the attributes of `state` that say how the model will be sharded, such as `data_rank`."""

    def shard(self, state: State) -> None:
        """Shard the model and its optimizers in place: after module surgery, before a checkpoint is loaded."""

    def check_loader(self, dataloader: Any, argument: str) -> None:
        """Check that a loader's sampler splits the data as the ranks need it."""

    def check_precision(self, precision: Precision) -> None:
        """Check that the run can begin, or continue, in a precision."""

    def prepare_metrics(self, metrics: Iterable[Any]) -> None:
        """Prepare metrics to be computed over all ranks."""

    def wrap(self, model: torch.nn.Module, algorithms: Iterable[Algorithm]) -> torch.nn.Module:
        """Return the module that the loop calls, once all module surgery is done and a checkpoint is loaded.

        Args:
            model: The model, on its device, or as `shard` has left it.
            algorithms: The algorithms of the run.

        Returns:
            The same model, perhaps changed in place, or a `DistributedDataParallel` around it: other wrappers would
            change the names of its weights in checkpoints.
        """
        return model

    # ---- in a step ----

    def begin_batch(self) -> None:
        """Prepare for a batch, before it is loaded. The state of the run is that of a checkpoint.

        It is called once more at the end of an epoch, where the loader has no batch, and by a rank that ends the run.
        """

    def backward_context(self, last_microbatch: bool, sync: bool) -> AbstractContextManager[None] | None:
        """Return a context for the forward and backward pass of one microbatch that controls gradient synchronization.

        Args:
            last_microbatch: The microbatch is the last one of its batch.
            sync: Gradients are averaged over ranks for this pass; False, for example, in the first pass of SAM. A
                strategy whose gradients exist in shards only averages them anyway.

        Returns:
            The context; None if none is needed.
        """
        return None

    def forward(self, model: torch.nn.Module, batch: Any) -> Any:
        """Compute the outputs of a microbatch for training.

        Args:
            model: What `wrap` has returned.
            batch: The microbatch, on the device.
        """
        return model(batch)

    def backward(self, loss: torch.Tensor, create_graph: bool) -> None:
        """Compute the gradients of a microbatch.

        Args:
            loss: The loss, multiplied by the share of the microbatch in the mean over all ranks.
            create_graph: An algorithm differentiates the gradients.
        """
        loss.backward(create_graph=create_graph)  # type: ignore[no-untyped-call]

    def average_gradients(self) -> None:
        """Average the gradients of this rank's passes over all ranks, in place.

        With the precision `amp_fp16` they are still multiplied by the scale of the gradient scaler.
        """

    def sum_counts(
        self, samples: float, tokens: int, interrupted: bool = False, lap: float = 0.0
    ) -> tuple[float, int, bool, float]:
        """Sum the samples and tokens of one step over ranks.

        Args:
            samples: Samples of this rank.
            tokens: Tokens of this rank.
            interrupted: This rank has to stop.
            lap: Wall-clock time of the step, in seconds.

        Returns:
            The sums; True if any rank has to stop; the wall-clock time of rank 0.
        """
        return samples, tokens, interrupted, lap

    def mean_count(self, count: Count, microbatches: int) -> Count:
        """Average the terms of the loss over ranks; the result weighs each rank's microbatches.

        Ranks that do not average their gradients return `count`.

        Args:
            count: The number of terms on this rank.
            microbatches: The number of microbatches of this rank.
        """
        return count

    def any_finished(self, finished: bool, stopped: bool = False) -> tuple[bool, bool]:
        """Combine two flags over ranks before each batch.

        A rank that has to stop calls this instead of training its next batch.

        Args:
            finished: This rank's loader is exhausted.
            stopped: This rank has to stop training.

        Returns:
            True if any rank's loader is exhausted, and True if any rank has to stop.
        """
        return finished, stopped

    def mean_losses(self, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Average the logged losses over ranks, on their device."""
        return losses

    def reshard(self) -> None:
        """Free the weights gathered for a forward pass that has no backward pass."""

    # ---- in a step that searches for the microbatch size ----

    def prepare_local_passes(self) -> None:
        """Exchange now what a forward pass would: until the next step, passes without `sync` do not communicate."""

    def all_gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of each rank, ordered by rank; every rank passes the same number of them."""
        return [list(numbers)]

    # ---- around many steps ----

    def report_lost_ranks(self) -> AbstractContextManager[None]:
        """Return a context for code that communicates: if that fails, the error names the missing rank."""
        return nullcontext()

    # ---- between steps ----

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        """Broadcast buffers from rank 0: only its copy is evaluated and saved."""

    def close(self) -> None:
        """Wait for the other ranks and leave the group. Safe to call twice."""


class RankStrategy(Strategy):
    """The ranks of the default process group, each of which trains on its own part of every batch.

    Gradients are averaged after the backward pass of the last microbatch, parameter by parameter.

    Attributes:
        rank: The number of this process, from 0.
        host_group: The process group for values on the host: gloo; None: the default group is one.
        model: The model, once it is wrapped.
        equal_microbatches: All ranks have the same number of microbatches in the current step.
    """

    rank: int
    host_group: Any
    model: torch.nn.Module
    equal_microbatches: bool

    def connect(self, device: Device, timeout: float) -> None:
        """Prepare the exchange with other ranks.

        Raises:
            ValueError: The object belongs to another Trainer, which is not closed.
        """
        if not getattr(self, "_closed", True):
            raise ValueError(
                f"`parallelism_config` must be a strategy of its own for each `Trainer`, but this "
                f"{type(self).__name__} belongs to another one, which is not closed. Make a new object."
            )
        self.world_size, self.rank = dist.get_world_size(), dist.get_global_rank()
        self.equal_microbatches = True
        self._closed = False
        self._lost_ranks = LostRankDetector(self.rank, self.world_size, timeout)
        # NCCL transfers device tensors only, and reading those would stall the step.
        self.host_group = None
        if torch.distributed.get_backend() != "gloo":
            self.host_group = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
        self._lost_ranks.name = self.broadcast(secrets.token_hex(4))

    def report_lost_ranks(self) -> AbstractContextManager[None]:
        """Return a context that raises `LostRankError` if communication in it fails."""
        return self._lost_ranks.report()

    def broadcast(self, value: T) -> T:
        values = [value]
        with self.report_lost_ranks():
            dist.broadcast_object_list(values, 0, self.host_group)
        return values[0]

    def min_length(self, length: int | None) -> int | None:
        with self.report_lost_ranks():
            lengths = dist.all_gather_object(length, self.host_group)
        return min((other for other in lengths if other is not None), default=None)

    def place(self, model: torch.nn.Module, device: Device) -> torch.nn.Module:
        """Move the model to the device, with the parameters and buffers of rank 0.

        Raises:
            RuntimeError: The model has another structure on another rank.
        """
        model = super().place(model, device)
        with self.report_lost_ranks():
            check_same_structure(model, self.rank, self.host_group)
            tensors = (t.detach() for t in (*model.parameters(), *model.buffers()) if not t.is_meta)
            exchange(tensors, lambda tensor: torch.distributed.broadcast(tensor, 0, async_op=True))
        return model

    def broadcast_buffers(self, model: torch.nn.Module) -> None:
        groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for buffer in model.buffers():
            if not buffer.is_meta:
                groups.setdefault((buffer.dtype, buffer.device), []).append(buffer.detach())
        for buffers in groups.values():  # many small tensors, so one broadcast for all of a kind
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            torch.distributed.broadcast(flat, 0)
            if self.rank:
                parts = torch.split(flat, [buffer.numel() for buffer in buffers])
                torch._foreach_copy_(buffers, [part.view_as(b) for part, b in zip(parts, buffers, strict=True)])

    def prepare_metrics(self, metrics: Iterable[Any]) -> None:
        """Let metrics gather their states without waiting for the device, unless they define a gather of their own."""
        parts = flatten_metrics(metrics)
        if not parts:
            return
        from torchmetrics import Metric  # slow to import, and already loaded if there are metrics
        from torchmetrics.utilities.data import dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

        # With these reductions, the shapes of a metric's states do not depend on the data.
        fixed = (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min)
        for part in parts:
            reductions = [*part._reductions.values()] if isinstance(part, Metric) else []
            has_fixed_shapes = reductions and all(reduction in fixed for reduction in reductions)
            if has_fixed_shapes and part.dist_sync_fn is None:
                part.dist_sync_fn = _gather

    def wrap(self, model: torch.nn.Module, algorithms: Iterable[Algorithm]) -> torch.nn.Module:
        self.model = model
        return model

    def average_gradients(self) -> None:
        reduce_gradients(self.model.parameters(), self.host_group)

    def sum_counts(
        self, samples: float, tokens: int, interrupted: bool = False, lap: float = 0.0
    ) -> tuple[float, int, bool, float]:
        sums = self._all_reduce((samples, tokens, interrupted, lap if self.rank == 0 else 0.0))
        total = int(sums[0]) if sums[0].is_integer() else sums[0]
        return total, int(sums[1]), sums[2] > 0, sums[3]

    def mean_count(self, count: Count, microbatches: int) -> Count:
        """Average the terms of the loss over ranks; see `Strategy`.

        Raises:
            RuntimeError: Ranks that must run forward passes together have different numbers of microbatches.
        """
        # The sum of squares tells every rank whether all have the same number of microbatches.
        on_host = 0.0 if isinstance(count, torch.Tensor) else count
        total: Count
        total, number, squares = self._all_reduce((on_host, microbatches, microbatches**2))
        self.equal_microbatches = squares * self.world_size == number**2
        if self.collective_forward and not self.equal_microbatches:
            raise RuntimeError(
                f"All ranks of a sharded model must have the same number of microbatches, but not all have "
                f"{microbatches}, like rank {self.rank}. Use batches of one size, for example with `drop_last=True`."
            )
        if isinstance(count, torch.Tensor):
            total = count.clone()
            torch.distributed.all_reduce(total)
        return total / self.world_size

    def any_finished(self, finished: bool, stopped: bool = False) -> tuple[bool, bool]:
        sums = self._all_reduce((finished, stopped))
        return sums[0] > 0, sums[1] > 0

    def all_gather(self, numbers: Sequence[float]) -> list[list[float]]:
        local = torch.tensor(numbers, dtype=torch.float64)
        return [tensor.tolist() for tensor in dist.all_gather(local, self.host_group)]

    def mean_losses(self, losses: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Average the logged losses over ranks, on their device.

        Not deferred until they are read: a callback may read them on one rank only.
        """
        if not losses:  # an optimizer may never call its closure
            return losses
        stacked = torch.stack([*losses.values()])
        stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        torch.distributed.all_reduce(stacked)
        return dict(zip(losses, (stacked / self.world_size).unbind(), strict=True))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._lost_ranks.lost:  # the others cannot answer
            return
        with self.report_lost_ranks():
            dist.barrier(self.host_group)
        if self.host_group is not None:
            dist.destroy_process_group(self.host_group)

    def _all_reduce(self, numbers: Sequence[float]) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        torch.distributed.all_reduce(tensor, group=self.host_group)
        sums: list[float] = tensor.tolist()
        return sums


def check_same_structure(model: torch.nn.Module, rank: int, host_group: Any = None) -> None:
    """Compare names, shapes and dtypes over ranks. A collective operation.

    Raises:
        RuntimeError: The structure of the model differs between ranks.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    local = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    for other_rank, other in enumerate(dist.all_gather_object(local, host_group)):
        differing = sorted(name for name in {*local, *other} if local.get(name) != other.get(name))
        if differing:
            raise RuntimeError(
                f"`model` must have the same structure on every rank, but it differs between rank {rank} and rank "
                f"{other_rank} in {', '.join(differing[:5])}. Build it from the same arguments everywhere."
            )


def flatten_metrics(metrics: Iterable[Any]) -> list[Any]:
    """Return metrics and the metrics inside them."""
    return [part for metric in metrics if isinstance(metric, torch.nn.Module) for part in metric.modules()]


def _gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    # Torchmetrics' own function also exchanges shapes and reads them, which waits for the device.
    return dist.all_gather(tensor, group)
