"""Logs norms of gradients, and what optimizers report of their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, SupportsIndex

import torch

from composer.callbacks._norms import joint_norm, local_norms, whole_norms
from composer.callbacks._units import Declared
from composer.core import Callback, State
from composer.loggers import DeferredValue, Logger
from composer.utils import plain_int, unwrapped_model

__all__ = ["OptimizerMonitor"]

_L2 = "l2_norm/"


class OptimizerMonitor(Callback):
    """Logs the L2 norm of every gradient and of all of them together, and what the optimizer reports of itself.

    An optimizer reports if it has a method `report_per_parameter_metrics(param, name, metrics)`, as `DecoupledAdamW`
    has; one inside another (`base_optimizer`, as in SAM) is found. Names are those of `state.model.named_parameters()`
    without the prefixes of `DistributedDataParallel` and `torch.compile`. Parameters without a gradient are left out.

    Norms of sharded parameters are those of the whole: the squares of the parts are added up over the ranks that share
    them. Metrics of an optimizer that are no L2 norms go through its own `pre_reduce_metrics` and
    `dist_reduce_metrics`.

    **Events** BATCH_END. The gradients must still be there: with the Trainer they are; a loop of your own clears them
    before the next backward pass, not after the step.
    **Cost** in every `batch_log_interval`-th batch one pass over the gradients, and over the parameters and optimizer
    state if that is reported; with sharded parameters one sum over ranks. Norms stay on the device until they are
    written down. Other batches cost nothing.

    Args:
        log_optimizer_metrics: Whether to log what optimizers report.
        batch_log_interval: Batches from one report to the next, at least 1.

    Raises:
        ValueError: `batch_log_interval` is below 1.

    Example:
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> state = State(model=model, max_duration="1ba", optimizers=optimizer, dataloader=[0])
        >>> model(torch.tensor([[3.0]])).sum().backward()
        >>> {name: float(norm) for name, norm in OptimizerMonitor().norms(state).items()}
        {'l2_norm/grad/weight': 3.0, 'l2_norm/grad/global': 3.0}

    Differs: with hybrid sharding, parameters that several ranks hold alike count once. Names have no prefixes of
        wrappers. Optimizers inside others report.
    """

    metrics: ClassVar[Declared] = {
        "l2_norm/grad/<parameter>": ("unit of the gradient", "L2 norm of a parameter's gradient, after clipping"),
        "l2_norm/grad/global": ("unit of the gradient", "L2 norm of all gradients together"),
        "l2_norm/moment/<parameter>": ("unit of the gradient", "L2 norm of the first moment; `DecoupledAdamW`"),
        "l2_norm/param/<parameter>": ("unit of the weights", "L2 norm of a parameter; `DecoupledAdamW`"),
        "l2_norm/update/<parameter>": ("unit of the weights", "L2 norm of the last update; `DecoupledAdamW`"),
    }

    def __init__(self, log_optimizer_metrics: bool = True, batch_log_interval: SupportsIndex = 10) -> None:
        number = plain_int(batch_log_interval)
        if number is None or number < 1:
            raise ValueError(f"`batch_log_interval` must be at least 1 batch, got {batch_log_interval!r}. Use 10.")
        self.log_optimizer_metrics = log_optimizer_metrics
        self.batch_log_interval = number

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp._batch % self.batch_log_interval:
            return
        # Other ranks may have loggers where this one has none, and norms of sharded parameters need all ranks.
        if logger.destinations or any(hasattr(p, "placements") for p in state.model.parameters()):
            norms = self.norms(state)
            logger.log_metrics({key: DeferredValue.of_tensor(norm) for key, norm in norms.items()})

    @torch.no_grad()
    def norms(self, state: State) -> dict[str, torch.Tensor]:
        """The norms as of now, on the device. To be called on every rank.

        Args:
            state: The state of the run.
        """
        named = [(n, p) for n, p in unwrapped_model(state.model).named_parameters() if p.grad is not None]
        keys = [f"{_L2}grad/{name}" for name, _ in named]
        owners = dict(zip(keys, (parameter for _, parameter in named), strict=True))
        norms = dict(zip(keys, local_norms([p.grad for _, p in named if p.grad is not None]), strict=True))
        others: dict[str, torch.Tensor] = {}
        if self.log_optimizer_metrics:
            for optimizer in _reporting(state.optimizers):
                own: dict[str, torch.Tensor] = {}
                for key, (value, parameter) in _reported(optimizer, named).items():
                    if key.startswith(_L2):
                        norms.setdefault(key, value)
                        owners.setdefault(key, parameter)
                    else:
                        own[key] = value
                others |= _reduced(optimizer, own, [p for _, p in named])
        whole = whole_norms(norms, owners)
        whole[f"{_L2}grad/global"] = joint_norm([whole[key] for key in keys], state.device._device)
        return whole | others


def _reporting(optimizers: Any) -> Iterator[Any]:
    """The optimizers that report, or those inside them that do."""
    for optimizer in optimizers:
        inner: Any = optimizer
        while inner is not None and not hasattr(inner, "report_per_parameter_metrics"):
            inner = getattr(inner, "base_optimizer", None)
        if inner is not None:
            yield inner


def _reported(
    optimizer: Any, named: list[tuple[str, torch.nn.Parameter]]
) -> dict[str, tuple[torch.Tensor, torch.nn.Parameter]]:
    """What an optimizer reports, with the parameter of which it does."""
    found: dict[str, tuple[torch.Tensor, torch.nn.Parameter]] = {}
    for name, parameter in named:
        for key, value in optimizer.report_per_parameter_metrics(parameter, name, {}).items():
            found[key] = (value, parameter)
    return found


def _reduced(
    optimizer: Any, metrics: dict[str, torch.Tensor], parameters: list[torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Metrics that are no norms, put together over ranks by who knows how."""
    if not metrics or not any(hasattr(p, "placements") for p in parameters):
        return metrics
    reduced: dict[str, torch.Tensor] = optimizer.dist_reduce_metrics(optimizer.pre_reduce_metrics(metrics))
    return reduced
