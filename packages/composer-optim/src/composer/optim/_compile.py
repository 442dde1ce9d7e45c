"""What a schedule is, and how torch runs one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from inspect import Parameter
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from composer.core import State

__all__ = ["ComposerScheduler", "Schedule", "compile_composer_scheduler"]


class ComposerScheduler(Protocol):
    """A function of the training state that gives the factor of the initial learning rate.

    Any function with this signature is one; so is `f(state)`, where no scale schedule ratio is used. It is called after
    every batch (or epoch), once per parameter group, and must not depend on how often it is called.

    Example:
        >>> from composer.core import State
        >>> def halve_every_epoch(state: State, ssr: float = 1.0) -> float:
        ...     return 0.5**state.timestamp.epoch.value
    """

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """The factor for the learning rate.

        Args:
            state: The training state, of which `timestamp`, `max_duration` and `dataloader_len` tell the time.
            ssr: Scale schedule ratio: all times of the schedule are multiplied by it. `state.max_duration` is already.

        Returns:
            The learning rate divided by the initial learning rate.
        """
        ...


class Schedule(ComposerScheduler):
    """A schedule whose attributes are its arguments; base of the ones in this package."""

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"


def compile_composer_scheduler(
    scheduler: ComposerScheduler | Callable[..., float], state: State, ssr: float = 1.0
) -> LambdaLR:
    """Make a torch scheduler that follows a schedule; step it as often as the learning rate should change.

    The schedule is asked at once, so a schedule that does not fit the run fails here.

    Args:
        scheduler: A schedule, or any function `f(state, ssr)` or `f(state)` that gives a factor.
        state: The state whose single optimizer is scheduled and whose timestamp is followed.
        ssr: Scale schedule ratio, handed to `scheduler`.

    Returns:
        A `LambdaLR` that sets every group's learning rate to its initial learning rate times the factor. Its method
        `scale_schedule(ssr)` multiplies the scale schedule ratio.

    Raises:
        NotImplementedError: The state has no optimizer, or several.
        ValueError: `ssr` is not 1 and `scheduler` does not take it, or the factor is NaN, infinite or negative; that
            is checked again whenever the schedule is stepped.
        TypeError: The factor is no number.

    Example:
        >>> import torch
        >>> from composer.core import State
        >>> from composer.optim import LinearScheduler
        >>> model = torch.nn.Linear(1, 1)
        >>> state = State(model=model, rank_zero_seed=0, max_duration="8ba")
        >>> state.optimizers = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> scheduler = compile_composer_scheduler(LinearScheduler(), state)
        >>> state.timestamp = state.timestamp.copy(batch=2)
        >>> scheduler.optimizer.step()
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [0.375]
    """
    if len(state.optimizers) != 1:
        raise NotImplementedError(
            f"A schedule must be compiled for exactly one optimizer, got {len(state.optimizers)}. "
            f"Make a torch scheduler for each optimizer yourself."
        )
    return _CompiledSchedule(scheduler, state, ssr)


class _CompiledSchedule(LambdaLR):
    """Follows a schedule. Checkpoints hold neither the schedule nor the state, and know it by the name of its base."""

    __qualname__ = "LambdaLR"

    def __init__(self, scheduler: Callable[..., float], state: State, ssr: float) -> None:
        self._schedule, self._state, self._ssr = scheduler, state, ssr
        self._ask = _checked(_bind(scheduler, state, ssr), scheduler, state)
        super().__init__(state.optimizers[0], lambda step: self._ask())

    def scale_schedule(self, ssr: float) -> None:
        """Multiply the scale schedule ratio, and set the learning rates to what they then are now.

        Args:
            ssr: The ratio, more than 0. `state.max_duration` must be scaled already.

        Raises:
            ValueError: `ssr` is not positive, or the schedule does not take it.
        """
        if ssr <= 0:
            raise ValueError(f"`ssr` must be positive, got {ssr!r}.")
        self._ask = _checked(_bind(self._schedule, self._state, self._ssr * ssr), self._schedule, self._state)
        self._ssr *= ssr
        factor = self._ask()
        for group, initial in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(initial * factor)
            else:
                group["lr"] = initial * factor
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """What torch saves of a `LambdaLR`."""
        return {key: value for key, value in super().state_dict().items() if key not in _UNSAVED}


_UNSAVED = {"_schedule", "_state", "_ssr", "_ask"}


def _bind(scheduler: Callable[..., float], state: State, ssr: float) -> Callable[[], float]:
    """`scheduler` with its arguments filled in; how depends on what it takes."""
    parameters = _parameters(scheduler)
    named = parameters.get("ssr")
    kinds = {p.kind for p in parameters.values()}
    if (named is not None and named.kind is not Parameter.POSITIONAL_ONLY) or Parameter.VAR_KEYWORD in kinds:
        return lambda: scheduler(state, ssr=ssr)
    # A second argument with a default is something else than the ratio, unless it is called `ssr`.
    required = [p for p in parameters.values() if p.default is Parameter.empty and p.kind in _POSITIONAL]
    if named is not None or len(required) > 1 or Parameter.VAR_POSITIONAL in kinds:
        return lambda: scheduler(state, ssr)
    if ssr != 1.0:
        raise ValueError(
            f"`scheduler` must take `ssr` to be used with a scale schedule ratio of {ssr!r}, got {scheduler!r}. "
            f"Write it as `f(state, ssr=1.0)` and multiply its times by `ssr`."
        )
    return lambda: scheduler(state)


def _checked(ask: Callable[[], Any], scheduler: Callable[..., Any], state: State) -> Callable[[], Any]:
    """`ask`, which raises if the factor would ruin the weights or climb the loss."""

    def ask_and_check() -> Any:
        factor = ask()
        if isinstance(factor, Tensor):  # not read if it is on a device: that would wait for it
            number: Any = factor.item() if factor.device.type == "cpu" and factor.numel() == 1 else 1.0
        else:
            number = factor
        kind: type[Exception] = ValueError
        if isinstance(number, bool) or not isinstance(number, Real):
            kind = TypeError
        elif math.isfinite(number) and float(number) >= _LEAST:
            return factor
        now = state.timestamp
        raise kind(
            f"The schedule {scheduler!r} must return a factor of the learning rate, a finite number that is not "
            f"negative, got {factor!r} at epoch {now.epoch.value} and batch {now.batch.value}. Look at how it computes "
            f"it there; `max(0.0, ...)` keeps it from falling below zero."
        )

    return ask_and_check


_LEAST = -1e-12  # what rounding may leave of zero

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(scheduler: Callable[..., Any]) -> dict[str, Parameter]:
    try:
        return dict(inspect.signature(scheduler).parameters)
    except ValueError:  # some builtins have no signature
        return {}
