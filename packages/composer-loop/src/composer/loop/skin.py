"""Shared parts of the adapters in `composer.hosts`: hooks, wrapped methods, counts, steps that a host makes itself."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from composer.core.event import Event
from composer.core.time import Timestamp
from composer.loop.hosted_run import HostedRun
from composer.models.base import total_loss
from composer.utils import get_device
from composer.utils.misc import needs_closure


def hooks_by_event(**first: str) -> dict[Event, str]:
    """Return the hook of a host that announces each event.

    Args:
        **first: The hooks, each by the name of the first event that it announces, in the order of `Event`. An empty
            string: the events from there on are not announced. No host announces those of predictions.

    Example:
        >>> hooks_by_event(INIT="setup", EPOCH_START="on_epoch_start")[Event.BATCH_START]
        'on_epoch_start'
    """
    table, hook, first = dict[Event, str](), "", {"PREDICT_START": "", **first}
    for event in Event:
        hook = first.get(event.name, hook)
        if hook:
            table[event] = hook
    return table


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Let `wrapper(original, *args, **kwargs)` run in place of a method of an object, with the method's signature.

    Args:
        owner: The object.
        name: The name of the method.
        wrapper: The function.

    Returns:
        A function that puts the method back.
    """
    original, attributes = getattr(owner, name), vars(owner)
    before = {name: attributes[name]} if name in attributes else {}
    setattr(owner, name, functools.wraps(original)(functools.partial(wrapper, original)))

    def undo() -> None:
        attributes.pop(name, None)
        attributes.update(before)

    return undo


def use_device(run: HostedRun, device: torch.device) -> None:
    """Let a run compute on the device to which its host has moved the model, such as that of a shard."""
    run.state.device = get_device("gpu" if device.type == "cuda" else device.type)
    run.reconfigure(accumulate=run.accumulate, precision=run.state.precision)


def is_epoch_whole(run: HostedRun) -> bool | None:
    """Return True if the run is trained on all batches of the epoch; None if the loader has no length."""
    length = run.state.dataloader_len
    return None if length is None else run.state.timestamp.batch_in_epoch >= length


def duration(steps: int, epochs: float, before: tuple[int, int] = (0, 0)) -> str:
    """Return the length of a run as a time string.

    Args:
        steps: The steps that the host will count; if there are none, `epochs` is used.
        epochs: The epochs that the host will count, rounded up.
        before: The epochs and batches of the run that the host does not count; see `uncounted`.
    """
    return f"{before[1] + steps}ba" if steps > 0 else f"{before[0] + math.ceil(epochs)}ep"


def uncounted(now: Timestamp, epochs: int, batches: int) -> tuple[int, int]:
    """Return the epochs and batches of a run that its host does not count in this call of its `fit`.

    The host begins with a whole epoch, so an epoch that was interrupted is over.

    Args:
        now: The progress of the run.
        epochs: The epochs that the host has counted.
        batches: The batches that the host has counted.
    """
    return max(now.epoch.value + (now.batch_in_epoch.value > 0) - epochs, 0), now.batch.value - batches


class HookedSteps:
    """Announces AFTER_BACKWARD and AFTER_TRAIN_BATCH from the steps of optimizers, where a host has no hook for them.

    An optimizer that needs the gradients of a step several times (`SAM`) gets a closure, which repeats the passes.

    Args:
        run: The run.
        backward: `backward(loss, is_last)` computes the gradients of a repeated pass, as the host does. `is_last` is
            True in the last pass of the step.

    Attributes:
        passes: The number of losses that were computed for the current step.
        has_stepped: The first optimizer has stepped.
        is_complete: The last optimizer has stepped, too.
    """

    def __init__(self, run: HostedRun, backward: Callable[[torch.Tensor, bool], object]) -> None:
        self._run, self._backward, self._own = run, backward, list[Any]()
        self.clear()

    def clear(self) -> None:
        """Begin another step."""
        self.passes, self._is_pending, self.has_stepped, self.is_complete = 0, False, False, False

    def attach(self, optimizers: Sequence[torch.optim.Optimizer], own: Sequence[Any]) -> None:
        """Register the hooks.

        Args:
            optimizers: The optimizers that the host steps.
            own: Those that algorithms have added. They are stepped after the last one of the host.
        """
        self._own = list(own)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_step)
        optimizers[-1].register_step_post_hook(self._after_last_step)

    def loss(self, batch: Any) -> torch.Tensor:
        """Compute the loss of a batch, with all algorithms, as a scalar."""
        loss = total_loss(self._run.loss(batch))
        self.passes, self._is_pending = self.passes + 1, True
        return loss

    def after_backward(self) -> None:
        """Announce AFTER_BACKWARD, unless it is done."""
        if self._is_pending:
            self._is_pending = False
            self._run.after_backward()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        run = self._run
        if not self.passes:
            if any(group["lr"] != 0 for group in optimizer.param_groups):
                raise RuntimeError(
                    "`optimizer.step` must follow a backward pass of `run.loss`, whose events algorithms need."
                )
            return without_gradients(optimizer)
        self.after_backward()
        if kwargs.get("closure") is not None or args[1:] not in ((), (None,)):
            raise ValueError("`closure` must not be given: the run repeats passes itself. Write `optimizer.step()`.")
        repeats = run.replays and needs_closure(optimizer)
        if repeats and self.has_stepped:
            raise RuntimeError(
                f"{type(optimizer).__name__} must be the first optimizer that steps, since it repeats the passes of "
                f"the step. Call its `step` before those of the others."
            )
        if not self.has_stepped:
            run.after_gradients()
        self.has_stepped = True
        return ((optimizer, run.closure(self._repeat)), {}) if repeats else None

    def _after_last_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.has_stepped:
            for each in self._own:
                each.step()
                each.zero_grad()
            self.is_complete = True

    def _repeat(self, batch: Any) -> None:
        self._backward(total_loss(self._run.loss(batch)), self._run.replay_index == self.passes - 1)
        self._run.after_backward()


def without_gradients(optimizer: torch.optim.Optimizer) -> Any:
    """Return what a hook of a step returns for a step without gradients.

    torch.distributed.checkpoint creates the states of optimizers by such a step, at a learning rate of 0.
    """
    return ((optimizer, lambda *args, **kwargs: torch.zeros(())), {}) if needs_closure(optimizer) else None
