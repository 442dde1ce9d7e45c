"""Log norms of gradients, and metrics that optimizers report about their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import torch

from composer.core import Callback, State
from composer.loggers import DeferredValue, Logger
from composer.utils import dist, int_at_least, local_part, unwrapped_model

_L2 = "l2_norm/"


class OptimizerMonitor(Callback):
    """Logs the L2 norm of every gradient and of all gradients together, and metrics that the optimizer reports.

    An optimizer reports metrics if it has a method `report_per_parameter_metrics(param, name, metrics)`, such as
    `DecoupledAdamW`, even if another optimizer wraps it (`base_optimizer`, as in SAM). Names are those of
    `state.model.named_parameters()` without the prefixes of `DistributedDataParallel` and `torch.compile`. Parameters
    without a gradient are left out.

    Norms of sharded parameters are those of the whole parameter: the squares are summed over the ranks that share it.
    Metrics of an optimizer that are not L2 norms are reduced by its own `pre_reduce_metrics` and
    `dist_reduce_metrics`.

    **Events** BATCH_END. The gradients must still exist, as with the Trainer; a loop of your own should clear them
    before the next backward pass, not after the step.
    **Cost** in every `batch_log_interval`-th batch one pass over the gradients, and over the parameters and optimizer
    state if these are reported; with sharded parameters one all-reduce. Norms stay on the device until a logger writes
    them. Other batches cost nothing.

    Args:
        log_optimizer_metrics: Log the metrics that optimizers report.
        batch_log_interval: Interval between logged batches, at least 1.

    Raises:
        ValueError: `batch_log_interval` is below 1.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> state = State(model=model, max_duration="1ba", optimizers=optimizer, dataloader=[0])
        >>> model(torch.tensor([[3.0]])).sum().backward()
        >>> {name: float(norm) for name, norm in OptimizerMonitor().norms(state).items()}
        {'l2_norm/grad/weight': 3.0, 'l2_norm/grad/global': 3.0}

    Differs: with hybrid sharding, replicas of a parameter count once. Names have no prefixes of wrappers. Metrics of
        wrapped optimizers are logged.
    """

    def __init__(self, log_optimizer_metrics: bool = True, batch_log_interval: SupportsIndex = 10) -> None:
        number = int_at_least("batch_log_interval", batch_log_interval, 1, "batch", "Use 10.")
        self.log_optimizer_metrics = log_optimizer_metrics
        self.batch_log_interval = number

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batches % self.batch_log_interval:
            return
        # Norms of sharded parameters need all ranks, and other ranks may have loggers when this rank has none.
        if logger.destinations or any(hasattr(p, "placements") for p in state.model.parameters()):
            norms = self.norms(state)
            logger.log_metrics({key: DeferredValue.of_tensor(norm) for key, norm in norms.items()})

    @torch.no_grad()
    def norms(self, state: State) -> dict[str, torch.Tensor]:
        """Return the current norms, on the device. Call it on every rank.

        Args:
            state: The state of the run.
        """
        named = [(n, p) for n, p in unwrapped_model(state.model).named_parameters() if p.grad is not None]
        keys = [f"{_L2}grad/{name}" for name, _ in named]
        owners = dict(zip(keys, (parameter for _, parameter in named), strict=True))
        norms = dict(zip(keys, _local_norms([p.grad for _, p in named if p.grad is not None]), strict=True))
        others: dict[str, torch.Tensor] = {}
        if self.log_optimizer_metrics:
            for optimizer in _reporting(state.optimizers):
                metrics: dict[str, torch.Tensor] = {}
                for key, (value, parameter) in _report(optimizer, named).items():
                    if key.startswith(_L2):
                        norms.setdefault(key, value)
                        owners.setdefault(key, parameter)
                    else:
                        metrics[key] = value
                if metrics and any(hasattr(parameter, "placements") for _, parameter in named):
                    metrics = optimizer.dist_reduce_metrics(optimizer.pre_reduce_metrics(metrics))
                others |= metrics
        whole = _whole_norms(norms, owners)
        whole[f"{_L2}grad/global"] = _joint_norm([whole[key] for key in keys], state.device._device)
        return whole | others


def _reporting(optimizers: Any) -> Iterator[Any]:
    """Yield the optimizers that report metrics, unwrapped if necessary."""
    for optimizer in optimizers:
        inner: Any = optimizer
        while inner is not None and not hasattr(inner, "report_per_parameter_metrics"):
            inner = getattr(inner, "base_optimizer", None)
        if inner is not None:
            yield inner


def _report(
    optimizer: Any, named: list[tuple[str, torch.nn.Parameter]]
) -> dict[str, tuple[torch.Tensor, torch.nn.Parameter]]:
    """Return the metrics that an optimizer reports, with their parameters."""
    metrics: dict[str, tuple[torch.Tensor, torch.nn.Parameter]] = {}
    for name, parameter in named:
        for key, value in optimizer.report_per_parameter_metrics(parameter, name, {}).items():
            metrics[key] = (value, parameter)
    return metrics


def _local_norms(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the L2 norm of each tensor, or of its local shard, in at least 32 bits.

    Args:
        tensors: Tensors on any devices, of any floating dtypes; may be sharded or sparse.
    """
    buckets: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    parts = [local_part(tensor.detach()) for tensor in tensors]
    parts = [part.coalesce().values() if part.is_sparse else part for part in parts]
    for i, part in enumerate(parts):
        buckets.setdefault((part.device, part.dtype), []).append(i)
    norms: dict[int, torch.Tensor] = {}
    for (_, dtype), indices in buckets.items():
        wide = None if dtype in (torch.float32, torch.float64) else torch.float32
        norms.update(zip(indices, torch._foreach_norm([parts[i] for i in indices], 2, dtype=wide), strict=True))
    return [norms[i] for i in range(len(parts))]


def _whole_norms(norms: Mapping[str, torch.Tensor], owners: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute the norms of whole tensors from the norms of shards.

    Args:
        norms: Norms by key, of the local shard if the owner is sharded.
        owners: The parameter of each key. Sharded parameters must be in the same order on all ranks.
    """
    sharded: dict[tuple[Any, tuple[int, ...]], list[str]] = {}
    for key in norms:
        owner: Any = owners[key]
        placements = getattr(owner, "placements", ())
        dims = tuple(i for i, placement in enumerate(placements) if not placement.is_replicate())
        if dims:
            sharded.setdefault((owner.device_mesh, dims), []).append(key)
    whole = dict(norms)
    for (mesh, dims), keys in sharded.items():
        total = torch.stack([norms[key].float() for key in keys]).square()
        for dim in dims:
            dist.all_reduce(total, group=mesh.get_group(dim))
        whole.update(zip(keys, total.sqrt().unbind(), strict=True))
    return whole


def _joint_norm(norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Compute the L2 norm of several tensors together from their norms, which may be on several devices.

    Args:
        norms: The norms; the result is 0 if there are none.
        device: The device of the result.
    """
    if not norms:
        return torch.zeros((), device=device)
    if len({(norm.device, norm.dtype) for norm in norms}) > 1:
        norms = [norm.to(device, torch.float32, non_blocking=True) for norm in norms]
    joint: torch.Tensor = torch.linalg.vector_norm(torch.stack([*norms]))
    return joint.to(device)
