"""Data parallel training with `DistributedDataParallel`: when gradients are synchronized between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel

from composer.core import State
from composer.utils import StringEnum, dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class DDPSyncStrategy(StringEnum):
    """When the gradients of a batch are synchronized between ranks.

    Attributes:
        SINGLE_AUTO_SYNC: During the backward pass of the last microbatch: once per batch.
        MULTI_AUTO_SYNC: During the backward pass of every microbatch.
        FORCED_SYNC: After the backward pass of the last microbatch. It does not overlap with the pass, but works for
            any use of parameters in microbatches.
    """

    SINGLE_AUTO_SYNC = "single_auto_sync"
    MULTI_AUTO_SYNC = "multi_auto_sync"
    FORCED_SYNC = "forced_sync"


def prepare_ddp_module(module: torch.nn.Module, find_unused_parameters: bool) -> torch.nn.Module:
    """Wrap a module so that its gradients are averaged over ranks; all ranks get the weights of rank 0.

    Args:
        module: The module, of the same structure on every rank.
        find_unused_parameters: Allow backward passes that leave parameters without a gradient. This traverses the
            graph in every pass.

    Returns:
        The wrapped module; `module` itself if nothing in it is trainable.

    Raises:
        RuntimeError: There is no process group, or the structure differs between ranks.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "`prepare_ddp_module` needs a process group, but the distributed package is not available or has not been "
            "initialized. Call `composer.utils.dist.initialize_dist(device)` first."
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    return DistributedDataParallel(module, find_unused_parameters=find_unused_parameters)


def ddp_sync_context(
    state: State, is_final_microbatch: bool, sync_strategy: str | DDPSyncStrategy
) -> AbstractContextManager[None]:
    """Return a context for the forward and backward pass of a microbatch that synchronizes gradients as configured.

    Args:
        state: A state whose model is wrapped by `prepare_ddp_module`.
        is_final_microbatch: The microbatch is the last one of its batch.
        sync_strategy: When to synchronize.

    Raises:
        RuntimeError: The model is not wrapped.
        ValueError: `sync_strategy` is unknown.
    """
    if not isinstance(state.model, DistributedDataParallel):
        raise RuntimeError(
            f"`state.model` must be wrapped in `DistributedDataParallel`, got {type(state.model).__name__}. Use "
            f"`state.model = prepare_ddp_module(state.model, find_unused_parameters=False)`."
        )
    return exchange_context(state.model, is_final_microbatch, DDPSyncStrategy(sync_strategy)) or nullcontext()


def exchange_context(
    model: DistributedDataParallel, last: bool, strategy: DDPSyncStrategy, host_group: ProcessGroup | None = None
) -> AbstractContextManager[None] | None:
    """Return the context of `ddp_sync_context`, or None if the wrapper's default is right.

    Args:
        model: The wrapped model.
        last: The microbatch is the last one of its batch.
        strategy: When to synchronize.
        host_group: A process group for host values; None: the default one.
    """
    if strategy is DDPSyncStrategy.FORCED_SYNC:
        return _forced(model, host_group) if last else model.no_sync()
    if last or strategy is DDPSyncStrategy.MULTI_AUTO_SYNC:
        return None
    return model.no_sync()


@contextmanager
def _forced(model: DistributedDataParallel, host_group: ProcessGroup | None) -> Iterator[None]:
    with model.no_sync():
        yield
    reduce_gradients(model.parameters(), host_group)


def exchange(tensors: Iterable[torch.Tensor], start: Callable[[torch.Tensor], Any]) -> None:
    """Run a collective operation on many tensors at once, in place.

    Args:
        tensors: The tensors; their memory format may differ between ranks.
        start: Starts an asynchronous operation on a contiguous tensor.
    """
    running = []
    for tensor in tensors:
        contiguous = tensor.contiguous()
        running.append((tensor, contiguous, start(contiguous)))
    for tensor, contiguous, work in running:
        work.wait()
        if contiguous is not tensor:
            tensor.copy_(contiguous)


@torch.no_grad()
def reduce_gradients(parameters: Iterable[torch.nn.Parameter], host_group: ProcessGroup | None = None) -> None:
    """Average gradients over ranks, in place. A gradient that is missing on a rank counts as zero there.

    Args:
        parameters: The parameters, in the same order on every rank.
        host_group: A process group for host values; None: the default one.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        return
    # All ranks must run the same operations, so they first determine which gradients exist.
    present = torch.tensor([parameter.grad is not None for parameter in trainable], dtype=torch.uint8)
    if host_group is None and torch.distributed.get_backend() == "nccl":
        present = present.to(trainable[0].device)
    dist.all_reduce(present, "MAX", host_group)
    gradients: list[torch.Tensor] = []
    for parameter, anywhere in zip(trainable, present.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    if not gradients:
        return
    exchange(gradients, lambda tensor: torch.distributed.all_reduce(tensor, async_op=True))
    torch._foreach_div_(gradients, dist.get_world_size())
