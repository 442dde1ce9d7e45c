"""Stop a run whose loss is NaN."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from composer.core import Callback, State
from composer.loggers import DeferredValue, Logger


class _Flags(NamedTuple):
    batch: int
    by_name: dict[str | None, DeferredValue]  # 1 if the loss is NaN; the key of a single loss is None


class NaNMonitor(Callback):
    """Raises an error when a training loss is NaN.

    On the CPU the error is raised before the backward pass. On an accelerator the losses are checked on the device and
    the result is copied to the host asynchronously, so that no step waits for it; the error is usually raised a step or
    two later. Pending results are awaited at the end of an epoch and of the run, before an evaluation and before a
    checkpoint is saved, so no checkpoint contains weights from after a NaN.

    **Events** AFTER_LOSS; EVAL_START, EPOCH_END, FIT_END, and `state_dict`.
    **Reads** `state.loss`: a tensor, a sequence or a mapping of tensors.
    **Cost** two small kernels per loss and microbatch.

    Raises:
        RuntimeError: A loss is NaN.
        TypeError: The loss is not a tensor, sequence or mapping.

    Example:
        >>> from composer.core import Engine
        >>> state = State(
        ...     model=torch.nn.Linear(1, 1), max_duration="1ba", dataloader=[0], callbacks=NaNMonitor()
        ... )
        >>> state.loss = torch.tensor(float("nan"))
        >>> Engine(state).run_event("after_loss")
        Traceback (most recent call last):
        RuntimeError: Train loss contains a NaN. It appeared in batch 0...

    Differs: MosaicML's class reads every loss from the device in the step, which synchronizes every step.
    """

    def __init__(self) -> None:
        self._pending: deque[_Flags] = deque()

    def init(self, state: State, logger: Logger) -> None:
        self._pending.clear()

    def after_loss(self, state: State, logger: Logger) -> None:
        loss = state.loss
        if isinstance(loss, torch.Tensor) and loss.is_cpu and loss.dim() == 0:  # reading it waits for nothing
            if math.isnan(loss.item()):
                _raise(state.timestamp.batches, None)
            return
        flags = {name: _flag(loss) for name, loss in _losses(state.loss).items()}
        DeferredValue.fetch(flags.values())
        self._pending.append(_Flags(state.timestamp.batches, flags))
        self._check(wait=False)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._check(wait=True)

    epoch_end = fit_end = eval_start

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dict, after checking pending losses so that no checkpoint is written after a NaN.

        Raises:
            RuntimeError: A loss is NaN.
        """
        self._check(wait=True)
        return {}

    def close(self, state: State, logger: Logger) -> None:
        self._pending.clear()

    def _check(self, wait: bool) -> None:
        pending = self._pending
        while pending and (wait or all(flag.ready for flag in pending[0].by_name.values())):
            batch, flags = pending.popleft()
            for name, flag in flags.items():
                if flag.value:
                    _raise(batch, name)


def _raise(batch: int, name: str | None) -> NoReturn:
    which = "" if name is None else f" It is the loss {name!r}."
    raise RuntimeError(
        f"Train loss contains a NaN.{which} It appeared in batch {batch}, counted from 0. Lower the learning rate, "
        f"clip gradients, or check the data of that batch."
    )


def _losses(loss: Any) -> dict[str | None, torch.Tensor]:
    """Return the tensors of a loss by name; the name of a single loss is None."""
    if isinstance(loss, torch.Tensor):
        return {None: loss}
    if isinstance(loss, Mapping) and all(isinstance(part, torch.Tensor) for part in loss.values()):
        return dict(loss)
    if isinstance(loss, Sequence) and all(isinstance(part, torch.Tensor) for part in loss):
        return {f"loss{i}" if len(loss) > 1 else None: part for i, part in enumerate(loss)}
    raise TypeError(
        f"`state.loss` must be a tensor, or a sequence or mapping of tensors, got {type(loss).__name__}. Check what "
        f"the model's `loss` method returns."
    )


def _flag(loss: torch.Tensor) -> DeferredValue:
    flag = loss.detach().isnan()
    return DeferredValue.of_tensor(flag if flag.dim() == 0 else flag.any())
