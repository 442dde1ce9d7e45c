"""The function, then the algorithm. The scale schedule ratio (`ssr`) is the new length divided by the old length."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    MultiStepLR,
    StepLR,
)

from composer.core import SCALES_SCHEDULE, Algorithm, Event, Placement
from composer.utils import check_finite, plain_number

if TYPE_CHECKING:
    from composer.core import State
    from composer.loggers import Logger


def scale_scheduler(scheduler: Any, ssr: float, orig_max_epochs: int | None = None) -> None:
    """Multiply the time constants of a learning rate scheduler, in place.

    | scheduler | change |
    |---|---|
    | any with a method `scale_schedule(ssr)` | that of the method |
    | `StepLR` | `step_size` |
    | `MultiStepLR` | `milestones` |
    | `CosineAnnealingLR` | `T_max` |
    | `CosineAnnealingWarmRestarts` | `T_0` and `T_i`, the current cycle |
    | `ExponentialLR` | `gamma`, which becomes `gamma ** (1 / ssr)` |
    | `ConstantLR` | nothing |

    Lengths are rounded down.

    Args:
        scheduler: A scheduler of torch, or one with that method.
        ssr: The ratio, more than 0.
        orig_max_epochs: The length of the run before scaling, in steps of the scheduler. If it exceeds the `T_max` of a
            `CosineAnnealingLR`, the difference is treated as a warmup, whose length does not change. None: no warmup.

    Raises:
        ValueError: `ssr` is not positive or scales a length to 0, or the type of the scheduler is not supported.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> scheduler = StepLR(optimizer, step_size=30)
        >>> scale_scheduler(scheduler, ssr=0.5)
        >>> scheduler.step_size
        15
    """
    _check_ratio("ssr", ssr)
    method = getattr(scheduler, "scale_schedule", None)
    if callable(method):
        method(ssr)
    elif isinstance(scheduler, StepLR):
        scheduler.step_size = _scaled("step_size", scheduler.step_size, ssr)
    elif isinstance(scheduler, MultiStepLR):
        milestones: Counter[int] = Counter()
        for milestone, count in scheduler.milestones.items():
            milestones[int(milestone * ssr)] += count
        scheduler.milestones = milestones
    elif isinstance(scheduler, CosineAnnealingWarmRestarts):
        scheduler.T_i = _scaled("T_i", scheduler.T_i, ssr)
        scheduler.T_0 = _scaled("T_0", scheduler.T_0, ssr)
    elif isinstance(scheduler, CosineAnnealingLR):
        warmup = 0 if orig_max_epochs is None else max(orig_max_epochs - scheduler.T_max, 0)
        scheduler.T_max = _scaled("T_max", scheduler.T_max + warmup, ssr, warmup)
    elif isinstance(scheduler, ExponentialLR):
        scheduler.gamma = scheduler.gamma ** (1 / ssr)
    elif not isinstance(scheduler, ConstantLR):
        raise ValueError(
            f"`scheduler` must have a method `scale_schedule(ssr)` or be a torch scheduler with fixed lengths, got "
            f"{type(scheduler).__name__}. Add that method, or use a schedule of `composer.optim`."
        )


class ScaleSchedule(Algorithm):
    """Shortens or stretches a run together with its learning rate schedules.

    Multiplies `state.max_duration` by `ratio` and scales every scheduler of the run with `scale_scheduler`, each once
    per run: at INIT, or at the first later event before training at which they exist. A checkpoint that is loaded after
    that holds scaled values already. Batches do not change, so microbatches equal one batch.

    **Events** INIT, BEFORE_LOAD, FIT_START. **Reads** nothing. **Writes** `state.max_duration`, lengths of schedulers.
    **Cost** none. **Compilation** static.

    Args:
        ratio: The new length divided by the old length, more than 0.
        method: "epoch": all times are scaled.

    Raises:
        ValueError: `ratio` is not positive or `method` is unknown; at INIT, if the scaled run has no length or a
            scheduler cannot be scaled.
        NotImplementedError: `method` is "samples".

    Example:
        >>> ScaleSchedule(ratio=0.5)
        ScaleSchedule(ratio=0.5,method='epoch')

    Source: none; it is what `scale_schedule_ratio` of the Trainer does.
    Differs: none.
    """

    events = frozenset({Event.INIT, Event.BEFORE_LOAD, Event.FIT_START})
    placement = Placement(provides={SCALES_SCHEDULE})

    def __init__(self, ratio: float = 1.0, method: str = "epoch") -> None:
        _check_ratio("ratio", ratio)
        if method == "samples":
            raise NotImplementedError("`method` 'samples' is not implemented. Use 'epoch', which scales all times.")
        if method != "epoch":
            raise ValueError(f"`method` must be 'epoch', got {method!r}.")
        self.ratio, self.method = plain_number(ratio), method
        self._run: weakref.ref[State] | None = None
        self._unscaled: set[str] = set()

    def match(self, event: Event, state: State) -> bool:
        """Return True at events before training while something is not scaled yet."""
        if event not in (Event.INIT, Event.BEFORE_LOAD, Event.FIT_START):
            return False
        return self.ratio != 1 and (self._is_new(state) or bool(self._unscaled))

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Scale the length of the run and its schedulers, if they exist and are not scaled yet."""
        if self._is_new(state):
            self._run, self._unscaled = weakref.ref(state), {"max_duration", "schedulers"}
        if "max_duration" in self._unscaled and state.max_duration is not None:
            scaled = state.max_duration * self.ratio
            if scaled.value <= 0:
                raise ValueError(
                    f"`ratio` must not scale the run to nothing, got {self.ratio!r} for a `max_duration` of "
                    f"{str(state.max_duration)!r}. Use a larger ratio."
                )
            state.max_duration = scaled
            self._unscaled.discard("max_duration")
        # Scaling a schedule evaluates it, which reads the scaled length of the run.
        if "schedulers" in self._unscaled and state.schedulers and "max_duration" not in self._unscaled:
            for scheduler in state.schedulers:
                scale_scheduler(scheduler, self.ratio)
            self._unscaled.discard("schedulers")
        if event is Event.FIT_START:  # schedulers added later are made for the scaled run
            self._unscaled.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_run": None, "_unscaled": set()}  # a copy belongs to no run

    def _is_new(self, state: State) -> bool:
        return self._run is None or self._run() is not state


def _check_ratio(name: str, ratio: float) -> None:
    check_finite("Use 0.5 for half the time.", **{name: ratio}, above=0)


def _scaled(name: str, length: int, ssr: float, warmup: int = 0) -> int:
    scaled = int(length * ssr) - warmup
    if scaled <= 0:
        raise ValueError(
            f"`ssr` must not scale `{name}` to nothing, got {ssr!r} for {name}={length - warmup!r}. Use a larger ratio."
        )
    return scaled
