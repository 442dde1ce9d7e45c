"""Log learning rates."""

from __future__ import annotations

from typing import Any

import torch

from composer.core import Callback, State
from composer.loggers import DeferredValue, Logger


class LRMonitor(Callback):
    """Logs the learning rate of every parameter group after every batch.

    **Events** BATCH_END. Schedulers that step after every batch have stepped by then, so the value is that of the next
    batch.
    **Cost** none on the device; a learning rate in a tensor is copied there and read when a logger writes it.

    Example:
        >>> from composer.core import Engine
        >>> from composer.loggers import LoggerDestination
        >>> class Printer(LoggerDestination):
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        >>> model = torch.nn.Linear(1, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> state = State(model=model, max_duration="1ba", optimizers=optimizer, dataloader=[0])
        >>> state.callbacks = [LRMonitor(), Printer()]
        >>> _ = Engine(state).run_event("batch_end")
        0 {'lr-SGD/group0': 0.1}

    Differs: groups of a second optimizer of the same class continue the numbering instead of overwriting the first.
    """

    def batch_end(self, state: State, logger: Logger) -> None:
        if not logger.destinations:
            return
        rates: dict[str, Any] = {}
        numbers: dict[str, int] = {}
        for optimizer in state.optimizers:
            name = type(optimizer).__name__
            number = numbers.get(name, 0)
            for group in optimizer.param_groups:
                rate = group["lr"]
                if isinstance(rate, torch.Tensor):  # schedulers change it in place
                    rate = DeferredValue.of_tensor(rate.detach().clone())
                rates[f"lr-{name}/group{number}"] = rate
                number += 1
            numbers[name] = number
        logger.log_metrics(rates)
