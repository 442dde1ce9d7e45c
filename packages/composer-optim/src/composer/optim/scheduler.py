"""Schedules: functions of the training state that scale the learning rate.

Times are given in epochs ("10ep"), batches ("500ba"), samples, tokens, or as a fraction of the run ("0.5dur"), and in
seconds only if `max_duration` is. A scale schedule ratio (`ssr`) below 1 shortens all of them together with the run.

The Trainer steps schedulers after a batch is trained but before it is counted. So batch n, counted from 0, is trained
with the factor at the time of n - 1 batches, and the first two batches have the same factor: `LinearScheduler` over 8
batches gives 1, 1, 0.875, 0.75 and so on, and never reaches 0 in training. MosaicML's Composer does the same, so equal
programs train equally. Torch's schedulers count their own steps: batch n has the rate of n steps.
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    StepLR,
)

from composer.core import Time, TimeUnit, ensure_time
from composer.utils import check_finite, check_flags
from composer.utils.interval_scheduler import check_has_tokens

if TYPE_CHECKING:
    from composer.core import State

_log = logging.getLogger(__name__)


@runtime_checkable  # programs ask `issubclass(MySchedule, ComposerScheduler)`
class ComposerScheduler(Protocol):
    """A function of the training state that returns the factor of the initial learning rate.

    Any function with this signature is accepted, or `f(state)` without a scale schedule ratio. It is called after every
    batch (or epoch), once per parameter group. The result must not depend on the number of calls.

    Example:
        >>> from composer.core import State
        >>> def halve_every_epoch(state: State, ssr: float = 1.0) -> float:
        ...     return 0.5**state.timestamp.epoch.value
    """

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor of the learning rate.

        Args:
            state: The training state; `timestamp`, `max_duration` and `dataloader_len` are read.
            ssr: Scale schedule ratio, which multiplies all times of the schedule. `state.max_duration` is scaled
                already.

        Returns:
            The learning rate divided by the initial learning rate.
        """
        ...


class Schedule(ComposerScheduler, ABC):
    """Base class of the schedules in this module. Their attributes are the arguments."""

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return self.bind(state, ssr)()

    @abstractmethod
    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        """Return a function that computes the factor at the current time of `state`, for use at every step.

        All times of the schedule are converted and checked here, once. The function is valid as long as
        `state.max_duration` and `state.dataloader_len` stay the same.

        Args:
            state: The training state.
            ssr: Scale schedule ratio, as in a call of the schedule.
        """

    def __repr__(self) -> str:
        values = vars(self)
        names = [name for name in inspect.signature(type(self)).parameters if name in values]
        arguments = ", ".join(f"{name}={values[name]!r}" for name in names)
        return f"{type(self).__name__}({arguments})"


class GroupScheduler(ComposerScheduler):
    """Schedules of parameter groups by their names, and one schedule for all other groups.

    The name of a group is given with it: `SGD([{"params": [...], "name": "bias"}, ...])`.

    Args:
        scheduler: The schedule of all groups that are not in `named`.
        **named: The schedule of the group of that name.

    Attributes:
        scheduler: As given.
        named: As given.

    Raises:
        TypeError: A schedule is none, or a `GroupScheduler` itself.
        ValueError: When it is compiled, if no optimizer of the run has a group of a name.

    Example:
        >>> import torch
        >>> from composer.core import State
        >>> model = torch.nn.Linear(1, 1)
        >>> groups = [{"params": [model.weight]}, {"params": [model.bias], "name": "bias"}]
        >>> state = State(model=model, rank_zero_seed=0, max_duration="8ba")
        >>> state.optimizers = torch.optim.SGD(groups, lr=1.0)
        >>> state.timestamp = state.timestamp.copy(batch=2)
        >>> schedule = GroupScheduler(LinearScheduler(), bias=LinearScheduler(t_max="4ba"))
        >>> compile_composer_scheduler(schedule, state).get_last_lr()
        [0.75, 0.5]
    """

    def __init__(self, scheduler: Callable[..., float], **named: Callable[..., float]) -> None:
        given: dict[str, Any] = {"scheduler": scheduler, **named}  # whatever the caller passes
        for name, each in given.items():
            if not callable(each) or isinstance(each, GroupScheduler):
                raise TypeError(f"`{name}` must be a schedule of one group, such as `LinearScheduler()`, got {each!r}.")
        self.scheduler, self.named = scheduler, named

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the factor of the groups that have no schedule of their own."""
        return _bind(self.scheduler, state, ssr)()

    def __repr__(self) -> str:
        named = "".join(f", {name}={each!r}" for name, each in self.named.items())
        return f"GroupScheduler({self.scheduler!r}{named})"


# ---- schedules without warmup ----
#
# In the formulas, t is the trained time in the unit of the argument it is compared with, and x = min(1, t / t_max) is
# the completed fraction of the schedule. All times are multiplied by the scale schedule ratio.


class StepScheduler(Schedule):
    """A factor that is multiplied by gamma after every `step_size`: `gamma ** floor(t / step_size)`.

    Args:
        step_size: Time between two changes.
        gamma: The factor of one change.

    Raises:
        ValueError: When called, if `step_size` is rounded to zero.
    """

    def __init__(self, step_size: str | Time[Any], gamma: float = 0.1) -> None:
        self.step_size = _parse(step_size, "step_size")
        self.gamma = _factor(gamma, "gamma")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        step_size = _convert_time(self.step_size, state, ssr)
        length, gamma = _positive(step_size, "step_size", self.step_size), self.gamma
        now = _clock(state, step_size.unit)
        return lambda: float(gamma ** (now() // length))


class MultiStepScheduler(Schedule):
    """A factor that is multiplied by gamma at every milestone: `gamma ** (number of milestones <= t)`.

    Args:
        milestones: Times of the changes, in increasing order; they may have different units.
        gamma: The factor of one change.

    Raises:
        ValueError: Two milestones of one unit decrease.
    """

    def __init__(self, milestones: Sequence[str | Time[Any]], gamma: float = 0.1) -> None:
        self.milestones = _parse_milestones(milestones)
        self.gamma = _factor(gamma, "gamma")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        return _steps_down(self.milestones, self.gamma, state, ssr)


class ConstantScheduler(Schedule):
    """A factor of `alpha` before `t_max`, and 1 from then on.

    Args:
        alpha: The factor before `t_max`.
        t_max: When the factor becomes 1; may be before the end of the run.
    """

    def __init__(self, alpha: float = 1.0, t_max: str | Time[Any] = "1dur") -> None:
        self.alpha = _factor(alpha, "alpha")
        self.t_max = _parse(t_max, "t_max")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        t_max = _convert_time(self.t_max, state, ssr)
        end, now, alpha = t_max.value, _clock(state, t_max.unit), float(self.alpha)
        return lambda: alpha if now() < end else 1.0


class LinearScheduler(Schedule):
    """A linear change from `alpha_i` to `alpha_f`: `alpha_i + x * (alpha_f - alpha_i)`.

    Args:
        alpha_i: The initial factor.
        alpha_f: The final factor.
        t_max: When the final factor is reached; it holds for the rest of a longer run.
    """

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: str | Time[Any] = "1dur") -> None:
        self.alpha_i = _factor(alpha_i, "alpha_i")
        self.alpha_f = _factor(alpha_f, "alpha_f")
        self.t_max = _parse(t_max, "t_max")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        done, alpha_i, change = _done(self.t_max, state, ssr), self.alpha_i, self.alpha_f - self.alpha_i
        return lambda: alpha_i + done() * change


class ExponentialScheduler(Schedule):
    """An exponential decay by gamma per `decay_period`: `gamma ** (t / decay_period)`.

    Args:
        gamma: The factor of one period; not negative.
        decay_period: Time after which the factor is gamma.

    Raises:
        ValueError: `gamma` is negative; when called, if `decay_period` is rounded to zero.
    """

    def __init__(self, gamma: float, decay_period: str | Time[Any] = "1ep") -> None:
        self.gamma = _factor(gamma, "gamma")
        self.decay_period = _parse(decay_period, "decay_period")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        period = _convert_time(self.decay_period, state, ssr)
        length, gamma = _positive(period, "decay_period", self.decay_period), self.gamma
        now = _clock(state, period.unit)
        return lambda: math.pow(gamma, now() / length)


class CosineAnnealingScheduler(Schedule):
    """Half a cosine from 1 to `alpha_f`: `alpha_f + (1 - alpha_f) * (1 + cos(pi * x)) / 2`.

    Args:
        t_max: When `alpha_f` is reached; it holds for the rest of a longer run.
        alpha_f: The final factor.

    Source: Loshchilov, Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983, equation 5.
    Differs: no restarts.
    """

    def __init__(self, t_max: str | Time[Any] = "1dur", alpha_f: float = 0.0) -> None:
        self.t_max = _parse(t_max, "t_max")
        self.alpha_f = _factor(alpha_f, "alpha_f")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        done, alpha_f = _done(self.t_max, state, ssr), self.alpha_f
        return lambda: _cosine(done(), alpha_f)


class CosineAnnealingWarmRestartsScheduler(Schedule):
    """Half a cosine from 1 to `alpha_f`, repeated in cycles.

    The first cycle has the length t_0; each later cycle has the length `int(t_mult * length)` of the previous one.
    Within a cycle the factor is that of `CosineAnnealingScheduler`.

    Args:
        t_0: Length of the first cycle.
        t_mult: Growth of the cycles.
        alpha_f: The factor at the end of a cycle.

    Raises:
        ValueError: When called, if the length of a cycle is rounded to zero.

    Source: Loshchilov, Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983, equation 5.
    Differs: lengths are integers, rounded down, unless the run is measured in seconds.
    """

    def __init__(self, t_0: str | Time[Any], t_mult: float = 1.0, alpha_f: float = 0.0) -> None:
        self.t_0 = _parse(t_0, "t_0")
        check_finite("Use 1.0 for cycles of one length.", t_mult=t_mult, above=0)
        self.t_mult = t_mult
        self.alpha_f = _factor(alpha_f, "alpha_f")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        t_0 = _convert_time(self.t_0, state, ssr)
        first, now = _positive(t_0, "t_0", self.t_0), _clock(state, t_0.unit)

        def factor() -> float:
            length, into_cycle = first, now()
            while into_cycle >= length:
                next_length = self.t_mult * length
                if t_0.unit is not TimeUnit.DURATION:
                    next_length = int(next_length)
                if next_length == length:  # all further cycles have this length, and there may be very many of them
                    into_cycle %= length
                    break
                into_cycle -= length
                length = _positive(Time(next_length, t_0.unit), "t_mult * length", self.t_0)
            return _cosine(into_cycle / length, self.alpha_f)

        return factor


class PolynomialScheduler(Schedule):
    """A polynomial change from 1 to `alpha_f`: `alpha_f + (1 - alpha_f) * (1 - x) ** power`.

    Args:
        power: The exponent.
        t_max: When `alpha_f` is reached; it holds for the rest of a longer run.
        alpha_f: The final factor.
    """

    def __init__(self, power: float, t_max: str | Time[Any] = "1dur", alpha_f: float = 0.0) -> None:
        self.power = _exponent(power)
        self.t_max = _parse(t_max, "t_max")
        self.alpha_f = _factor(alpha_f, "alpha_f")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        done, power, alpha_f = _done(self.t_max, state, ssr), self.power, self.alpha_f
        return lambda: _polynomial(done(), power, alpha_f)


# ---- schedules with a linear warmup ----
#
# In the formulas, x = (t - t_warmup) / (t_max - t_warmup) within [0, 1] is the completed fraction of the schedule after
# the warmup. The scale schedule ratio multiplies all times except `t_warmup`. With `scale_warmup` the ramp is scaled
# too: with a ratio of 0.5 it reaches its top at half of `t_warmup` and stays there until `t_warmup`.


def _ramp(
    t_warmup: Time[Any], scale_warmup: bool, state: State, ssr: float, stacklevel: int
) -> Callable[[], float | None]:
    """Return a function that returns the height of the warmup ramp, in [0, 1]; None after the warmup."""
    end = _convert_time(t_warmup, state)
    if end.value == 0 and t_warmup.value != 0:
        warnings.warn(
            f"`t_warmup` is rounded to {str(end)!r}, so there is no warmup. Use a longer time than {str(t_warmup)!r}, "
            f"or a schedule without warmup.",
            stacklevel=stacklevel,
        )
    top, last = _convert_time(t_warmup, state, ssr).value if scale_warmup else end.value, end.value
    now = _clock(state, end.unit)

    def height() -> float | None:
        elapsed = now()
        return None if elapsed >= last else _fraction(elapsed, top)

    return height


class _WithWarmup(Schedule):
    """Base class of schedules with a warmup that end at `t_max`."""

    def __init__(self, t_warmup: str | Time[Any], t_max: str | Time[Any], scale_warmup: bool) -> None:
        self.t_warmup = _parse(t_warmup, "t_warmup", zero=True)
        self.t_max = _parse(t_max, "t_max")
        check_flags(scale_warmup=scale_warmup)
        self.scale_warmup = scale_warmup

    @property
    def _is_fixed(self) -> bool:
        """True if the schedule ends at a fixed time, not at a fraction of the run."""
        return self.t_max.unit is not TimeUnit.DURATION

    def _with_ramp(self, state: State, ssr: float, curve: Callable[[float], float]) -> Callable[[], float]:
        """Return a function that returns `curve(x)` times the height of the ramp; x is 0 during the warmup."""
        begin, end = _convert_time(self.t_warmup, state), _convert_time(self.t_max, state, ssr)
        _check_units(begin, end)
        _check_covers_run(end, state)
        top = _convert_time(self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        _check_warmup("`t_warmup`", top, end, self._is_fixed, stacklevel=5)
        ramp = _ramp(self.t_warmup, self.scale_warmup, state, ssr, stacklevel=5)
        start, length, now = begin.value, end.value - begin.value, _clock(state, end.unit)

        def factor() -> float:
            height, x = ramp(), 0.0
            if height is None:
                height, x = 1.0, _fraction(now() - start, length) if length > 0 else 0.0
            return height * curve(x)

        return factor


class MultiStepWithWarmupScheduler(Schedule):
    """A linear warmup from 0 to 1, then `gamma ** (number of milestones <= t)`.

    Args:
        t_warmup: Length of the warmup.
        milestones: Times of the changes, counted from the start of the run, in increasing order.
        gamma: The factor of one change.
        scale_warmup: Apply the scale schedule ratio to the ramp.

    Raises:
        ValueError: Two milestones of one unit decrease.

    Warns:
        UserWarning: When called, if a positive `t_warmup` is rounded to zero, or is longer than the run.
    """

    def __init__(
        self,
        t_warmup: str | Time[Any],
        milestones: Sequence[str | Time[Any]],
        gamma: float = 0.1,
        scale_warmup: bool = False,
    ) -> None:
        self.t_warmup = _parse(t_warmup, "t_warmup", zero=True)
        self.milestones = _parse_milestones(milestones)
        self.gamma = _factor(gamma, "gamma")
        check_flags(scale_warmup=scale_warmup)
        self.scale_warmup = scale_warmup

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        top = _convert_time(self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        _check_warmup("`t_warmup`", top, _end_of_run(state, top.unit), is_fixed=False, stacklevel=4)
        ramp = _ramp(self.t_warmup, self.scale_warmup, state, ssr, stacklevel=4)
        steps = _steps_down(self.milestones, self.gamma, state, ssr)

        def factor() -> float:
            height = ramp()
            return steps() if height is None else height

        return factor


class LinearWithWarmupScheduler(_WithWarmup):
    """A linear warmup from 0 to `alpha_i`, then a linear change to `alpha_f`: `alpha_i + x * (alpha_f - alpha_i)`.

    Args:
        t_warmup: Length of the warmup.
        alpha_i: The factor at the end of the warmup.
        alpha_f: The final factor.
        t_max: When the final factor is reached, counted from the start of the run.
        scale_warmup: Apply the scale schedule ratio to the ramp.

    Raises:
        ValueError: When called, if `t_max` is shorter than the run or than `t_warmup`, or converts to another unit.

    Warns:
        UserWarning: When called, if a positive `t_warmup` is rounded to zero, or longer than a `t_max` in "dur".
    """

    def __init__(
        self,
        t_warmup: str | Time[Any],
        alpha_i: float = 1.0,
        alpha_f: float = 0.0,
        t_max: str | Time[Any] = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha_i = _factor(alpha_i, "alpha_i")
        self.alpha_f = _factor(alpha_f, "alpha_f")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        alpha_i, change = self.alpha_i, self.alpha_f - self.alpha_i
        return self._with_ramp(state, ssr, lambda x: alpha_i + x * change)


class ConstantWithWarmupScheduler(_WithWarmup):
    """A linear warmup from 0 to `alpha`, which then stays constant.

    Args:
        t_warmup: Length of the warmup.
        alpha: The factor after the warmup, for the rest of the run.
        t_max: When the schedule ends; not before the end of the run.
        scale_warmup: Apply the scale schedule ratio to the ramp.

    Raises:
        ValueError: When called, if `t_max` is shorter than the run or than `t_warmup`, or converts to another unit.

    Warns:
        UserWarning: When called, if a positive `t_warmup` is rounded to zero, or longer than a `t_max` in "dur".
    """

    def __init__(
        self,
        t_warmup: str | Time[Any],
        alpha: float = 1.0,
        t_max: str | Time[Any] = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha = _factor(alpha, "alpha")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        alpha = self.alpha
        return self._with_ramp(state, ssr, lambda x: alpha)


class CosineAnnealingWithWarmupScheduler(_WithWarmup):
    """A linear warmup from 0 to 1, then half a cosine: `alpha_f + (1 - alpha_f) * (1 + cos(pi * x)) / 2`.

    Args:
        t_warmup: Length of the warmup.
        t_max: When `alpha_f` is reached, counted from the start of the run.
        alpha_f: The final factor.
        scale_warmup: Apply the scale schedule ratio to the ramp.

    Raises:
        ValueError: When called, if `t_max` is shorter than the run or than `t_warmup`, or converts to another unit.

    Warns:
        UserWarning: When called, if a positive `t_warmup` is rounded to zero, or longer than a `t_max` in "dur".
    """

    def __init__(
        self,
        t_warmup: str | Time[Any],
        t_max: str | Time[Any] = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup)
        self.alpha_f = _factor(alpha_f, "alpha_f")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        alpha_f = self.alpha_f
        return self._with_ramp(state, ssr, lambda x: _cosine(x, alpha_f))


class PolynomialWithWarmupScheduler(_WithWarmup):
    """A linear warmup from 0 to 1, then a polynomial change: `alpha_f + (1 - alpha_f) * (1 - x) ** power`.

    Args:
        t_warmup: Length of the warmup.
        power: The exponent.
        t_max: When `alpha_f` is reached, counted from the start of the run.
        alpha_f: The final factor.
        scale_warmup: Apply the scale schedule ratio to the ramp.

    Raises:
        ValueError: When called, if `t_max` is shorter than the run or than `t_warmup`, or converts to another unit.

    Warns:
        UserWarning: When called, if a positive `t_warmup` is rounded to zero, or longer than a `t_max` in "dur".
    """

    def __init__(
        self,
        t_warmup: str | Time[Any],
        power: float = 2.0,
        t_max: str | Time[Any] = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup)
        self.power = _exponent(power)
        self.alpha_f = _factor(alpha_f, "alpha_f")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        power, alpha_f = self.power, self.alpha_f
        return self._with_ramp(state, ssr, lambda x: _polynomial(x, power, alpha_f))


_COOLDOWNS: dict[str, Callable[[float], float]] = {
    "1-sqrt": lambda x: 1 - math.sqrt(x),
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}


class WarmupStableDecayScheduler(_WithWarmup):
    """A linear warmup from 0 to 1, a constant phase and a final decay (WSD): `alpha_f + (1 - alpha_f) * c(x)`.

    x is the completed fraction of the decay, and c(x) is `1 - sqrt(x)`, `1 - x`, half a cosine or `1 - x ** decay`.
    With `t_linear`, the decay ends that much earlier, and a line from `alpha_f` to 0 ends the schedule: with `decay`
    below 1, a "fast-slow" schedule.

    Until the decay, the schedule does not depend on the length of the run. So a run can be continued from any
    checkpoint before the decay, and a decay can start from any such checkpoint: `Trainer(load_path=...,
    branch_duration="500ba")`. For that, `t_decay` must be an absolute time, such as "500ba".

    Args:
        t_warmup: Length of the warmup.
        t_decay: Length of the decay; 10 to 20 % of the run is usual.
        decay: "1-sqrt", "linear", "cosine", or the exponent of `1 - x ** decay`, a positive number.
        t_max: When the schedule ends, counted from the start of the run.
        alpha_f: The factor at the end of the decay.
        scale_warmup: Apply the scale schedule ratio to the ramp.
        t_linear: Length of a linear change from `alpha_f` to 0 after the decay. None: the schedule ends with the decay.

    Raises:
        ValueError: `decay` is unknown; when called, if `t_max` is shorter than the run, or than warmup, decay and
            linear change together, or if the times convert to different units.

    Warns:
        UserWarning: When called, if a positive `t_warmup` is rounded to zero, or if warmup, decay and linear change
            together are longer than a `t_max` in "dur".

    Example:
        >>> import torch
        >>> from composer.core import State
        >>> state = State(model=torch.nn.Linear(1, 1), rank_zero_seed=0, max_duration="100ba")
        >>> schedule = WarmupStableDecayScheduler("10ba", t_decay="20ba", decay="linear")
        >>> for batch in (5, 10, 80, 90, 100):
        ...     state.timestamp = state.timestamp.copy(batch=batch)
        ...     print(batch, schedule(state))
        5 0.5
        10 1.0
        80 1.0
        90 0.5
        100 0.0

    Source: Hu et al., "MiniCPM", arXiv:2404.06395, section 4; "1-sqrt": Haegele et al., "Scaling Laws and
        Compute-Optimal Training Beyond Fixed Training Durations", arXiv:2405.18392, section 3. Exponents and
        `t_linear`: the optimization track of modded-nanogpt, https://github.com/KellerJordan/modded-nanogpt.
    """

    def __init__(
        self,
        t_warmup: str | Time[Any],
        t_decay: str | Time[Any] = "0.1dur",
        decay: str | float = "1-sqrt",
        t_max: str | Time[Any] = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
        *,
        t_linear: str | Time[Any] | None = None,
    ) -> None:
        super().__init__(t_warmup, t_max, scale_warmup)
        self.t_decay = _parse(t_decay, "t_decay")
        if not isinstance(decay, str):
            check_finite("It is the exponent of the decay.", decay=decay, above=0)
        elif decay not in _COOLDOWNS:
            raise ValueError(f"`decay` must be one of {', '.join(map(repr, _COOLDOWNS))} or a number, got {decay!r}.")
        self.decay = decay
        self.alpha_f = _factor(alpha_f, "alpha_f")
        self.t_linear = None if t_linear is None else _parse(t_linear, "t_linear")

    def bind(self, state: State, ssr: float = 1.0) -> Callable[[], float]:
        ramp = self._with_ramp(state, ssr, lambda x: 1.0)
        end = _convert_time(self.t_max, state, ssr)
        begin = _convert_time(self.t_warmup, state, ssr if self.scale_warmup else 1.0)
        phases = {"t_decay": self.t_decay, "t_linear": self.t_linear}
        lengths: dict[str, float] = {}
        for name, time in phases.items():
            if time is None:
                continue
            length = _convert_time(time, state, ssr)
            if length.unit is not end.unit:
                raise ValueError(
                    f"`{name}` and `t_max` must convert to the same unit, got {str(time)!r}, which converts to "
                    f"{str(length)!r}, and {str(self.t_max)!r}, which converts to {str(end)!r}. Write both in one unit."
                )
            lengths[name] = length.value
        if begin.value <= end.value:
            total = Time(begin.value + sum(lengths.values()), end.unit)
            names = " and ".join(f"`{name}`" for name in ("t_warmup", *lengths))
            _check_warmup(f"{names} together", total, end, self._is_fixed, stacklevel=4)
        decay_for, linear_for = lengths["t_decay"], lengths.get("t_linear", 0)
        linear_from, now = end.value - linear_for, _clock(state, end.unit)
        alpha_f, decay = self.alpha_f, self.decay
        cooldown = _COOLDOWNS[decay] if isinstance(decay, str) else lambda x: 1 - math.pow(x, decay)

        def factor() -> float:
            elapsed = now() - linear_from
            if elapsed > 0 and linear_for > 0:
                height = alpha_f * (1 - _fraction(elapsed, linear_for))
            else:
                x = _fraction(elapsed + decay_for, decay_for) if elapsed + decay_for > 0 else 0.0
                height = alpha_f + (1 - alpha_f) * cooldown(x)
            return ramp() * height

        return factor


# ---- formulas and arguments that schedules share ----


def _cosine(x: float, alpha_f: float) -> float:
    return alpha_f + (1 - alpha_f) * (1 + math.cos(math.pi * x)) / 2


def _polynomial(x: float, power: float, alpha_f: float) -> float:
    return alpha_f + (1 - alpha_f) * math.pow(1 - x, power)


def _exponent(power: float) -> float:
    """Return `power` if it is a positive number."""
    check_finite("Otherwise the learning rate would not decrease.", power=power, above=0)
    return power


def _parse_milestones(milestones: Sequence[str | Time[Any]]) -> list[Time[Any]]:
    if isinstance(milestones, (str, Time)) or not isinstance(milestones, Sequence):
        raise TypeError(f"`milestones` must be a sequence of times, got {milestones!r}. Put it in a list.")
    times = [_parse(milestone, "milestones", zero=True) for milestone in milestones]
    for time, following in pairwise(times):
        if time.unit is following.unit and time.value > following.value:
            raise ValueError(
                f"`milestones` must be in increasing order, got {str(time)!r} before {str(following)!r}. Every time "
                f"counts from the start of the run, not from the milestone before it."
            )
    return times


def _steps_down(milestones: Sequence[Time[Any]], gamma: float, state: State, ssr: float) -> Callable[[], float]:
    """Return a function that returns `gamma` to the power of the number of reached milestones."""
    converted = [_convert_time(time, state, ssr) for time in milestones]
    times = [(time.value, _clock(state, time.unit)) for time in converted]
    return lambda: float(gamma ** sum(value <= now() for value, now in times))


def _done(t_max: Time[Any], state: State, ssr: float) -> Callable[[], float]:
    """Return a function that returns the completed fraction of a schedule of length `t_max`; 1 after its end."""
    converted = _convert_time(t_max, state, ssr)
    end, now = converted.value, _clock(state, converted.unit)
    return lambda: _fraction(now(), end)


def _factor(number: float, name: str) -> float:
    """Return `number` if it can multiply a learning rate."""
    check_finite("It multiplies a learning rate.", **{name: number}, least=0)
    return number


# ---- training time ----


def _parse(time: str | Time[Any], name: str, zero: bool = False) -> Time[Any]:
    """Convert the argument `name` to a positive `Time`; with `zero`, also accept 0."""
    if not isinstance(time, (str, Time)):
        raise TypeError(f"`{name}` must be a `Time` or a time string, got {time!r}. Add the unit, for example '10ep'.")
    parsed = ensure_time(time, TimeUnit.EPOCH, argument=name)
    if parsed.value < 0 or (parsed.value == 0 and not zero):
        raise ValueError(
            f"`{name}` must {'not be negative' if zero else 'be positive'}, got {str(parsed)!r}. Use for example '1ep'."
        )
    return parsed


def _convert_time(time: str | Time[Any], state: State, ssr: float = 1.0) -> Time[Any]:
    """Scale a time by `ssr` and convert it to a unit that changes with every batch, so never to epochs or seconds.

    A duration is a fraction of `state.max_duration`, which the Trainer has scaled already, so `ssr` is not applied to
    it. Epochs become batches, or samples while the batch size changes (`state.samples_per_epoch`). In a run measured in
    seconds, durations do not change and seconds become durations.

    Args:
        time: A `Time` or a time string.
        state: The training state; `max_duration` and `dataloader_len` are read.
        ssr: Scale schedule ratio.

    Returns:
        A time in batches, samples, tokens or iterations, rounded down; or a duration, if `max_duration` is in seconds.

    Raises:
        ValueError: `time` is in seconds, but `max_duration` is not.
        RuntimeError: `time` is a duration and `max_duration` is not set, or the length of an epoch is needed and not
            known.
    """
    time = Time.from_input(time)
    end, unit, value = state.max_duration, time.unit, time.value
    if unit is TimeUnit.SECOND:
        if end is None or end.unit is not TimeUnit.SECOND:
            raise ValueError(
                f"The time of a schedule must not be in seconds unless `max_duration` is, got {time!r} in a run of "
                f"{None if end is None else str(end)!r}. Use 'ep', 'ba', 'sp' or 'tok'."
            )
        return Time(int(value * ssr) / (end.value or 1), TimeUnit.DURATION)
    if unit is TimeUnit.DURATION:
        if end is None:
            raise RuntimeError(f"`state.max_duration` must be set to use {time!r}, a fraction of the run.")
        if end.unit is TimeUnit.SECOND:
            return time
        if end.unit is TimeUnit.EPOCH:
            length, unit = _length_of_epoch(time, state)
            return Time(int(value * length * end.value), unit)
        return Time(int(value * end.value), end.unit)
    if unit is TimeUnit.ITERATION and state._iteration_length is None:
        raise ValueError(
            f"The time of a schedule must not be in iterations, got {str(time)!r}: the run has none. Use 'ep', "
            f"'ba', 'sp', 'tok' or 'dur'."
        )
    if unit is TimeUnit.EPOCH:
        length, unit = _length_of_epoch(time, state)
        value *= length
    return Time(int(value * ssr), unit)


def _length_of_epoch(time: Time[Any], state: State) -> tuple[int, TimeUnit]:
    """Return the length of an epoch in batches, or in samples while the batch size changes."""
    if state.samples_per_epoch is not None:
        return state.samples_per_epoch, TimeUnit.SAMPLE
    length = state._dataloader_len
    if length is None:
        raise RuntimeError(
            f"The number of batches in an epoch must be known to convert {time!r} to batches. "
            f"Use a train dataloader with a length, or write the time in batches, samples or tokens."
        )
    return length, TimeUnit.BATCH


def _clock(state: State, unit: TimeUnit) -> Callable[[], float]:
    """Return a function that returns the trained time in a unit, as `_elapsed` does."""
    if unit is TimeUnit.BATCH:  # the usual unit, without any call
        return lambda: state.timestamp.batches
    return partial(_elapsed, state, unit)


def _elapsed(state: State, unit: TimeUnit) -> float:
    """Return the trained time in a unit: an integer, except for durations."""
    if unit is TimeUnit.TOKEN:
        check_has_tokens(state, "the time of a schedule")
    if unit is TimeUnit.DURATION:
        duration = state.get_elapsed_duration()
        assert duration is not None, "times are converted to durations only in a run of seconds"
        return duration.value
    return state.timestamp.count(unit)


def _fraction(part: float, total: float) -> float:
    """Return `part / total` clamped to [0, 1]; 1 if `total` is 0."""
    return min(1.0, max(0.0, part / total)) if total > 0 else 1.0


def _positive(time: Time[Any], name: str, given: Time[Any]) -> float:
    """Return the value of `time`, which was converted from the argument `name`, if it is positive."""
    if time.value <= 0:
        raise ValueError(
            f"`{name}` must be at least one {time.unit.name.lower()}, got {given!r}, which is rounded to {time.value}."
        )
    value: float = time.value
    return value


def _end_of_run(state: State, unit: TimeUnit) -> Time[Any] | None:
    """Return the length of the run, in `unit` if it can be converted; None if it is unknown."""
    end = state.max_duration
    if end is not None and end.unit is TimeUnit.EPOCH:
        if unit is TimeUnit.SAMPLE and state.samples_per_epoch is not None:
            return Time(end.value * state.samples_per_epoch, TimeUnit.SAMPLE)
        if unit is TimeUnit.BATCH and state.dataloader_len is not None:
            return Time(end.value * int(state.dataloader_len), TimeUnit.BATCH)
    if end is not None and end.unit is TimeUnit.SECOND and unit is TimeUnit.DURATION:
        return Time(1.0, TimeUnit.DURATION)
    return end


def _check_units(t_warmup: Time[Any], t_max: Time[Any]) -> None:
    """Raise ValueError if two converted times have different units."""
    if t_warmup.unit is not t_max.unit:
        raise ValueError(
            f"Cannot use warmup scheduler: `t_warmup` and `t_max` must convert to the same unit, got {str(t_warmup)!r} "
            f"and {str(t_max)!r} after conversion. Write both in one unit."
        )


def _check_warmup(names: str, length: Time[Any], end: Time[Any] | None, is_fixed: bool, stacklevel: int) -> None:
    """Check that a warmup is not longer than the schedule; only warn if the schedule's end is that of the run.

    Such an end moves when the run is shortened, for example to a trial of one batch.

    Args:
        names: The arguments that `length` is the sum of, for the message.
        length: The converted length.
        end: The converted end of the schedule, if it is known.
        is_fixed: The end is an absolute time that was given as `t_max`.
        stacklevel: The level of the warning.

    Raises:
        ValueError: The warmup is longer than a fixed `t_max`.
    """
    if end is None or end.unit is not length.unit or length.value <= end.value:
        return
    lost = "the full learning rate is never reached"
    if is_fixed:
        raise ValueError(
            f"{names} must not be longer than `t_max`, got {str(length)!r} and an end at {str(end)!r}: {lost}. Use a "
            f"shorter warmup, such as '0.1dur'."
        )
    warnings.warn(
        f"{names} should not be longer than the run, got {str(length)!r} in a run of {str(end)!r}: {lost}. Use a "
        f"shorter warmup, such as '0.1dur', unless this is only a trial.",
        stacklevel=stacklevel,
    )


def _check_covers_run(t_max: Time[Any], state: State) -> None:
    """Raise ValueError if `t_max` is shorter than the run; log a warning if their units cannot be compared."""
    end = _end_of_run(state, t_max.unit)
    if end is None:
        return
    if end.unit is not t_max.unit:
        if state.timestamp.batches == 0:  # once per run, not once per batch
            _log.warning(
                "Cannot compare `t_max` (%s) with the length of the run (%s): the schedule may end before the run.",
                t_max,
                end,
            )
    elif t_max.value < end.value:
        raise ValueError(
            f"`t_max` of a schedule with warmup must be greater than or equal to max_duration, got {str(t_max)!r} in "
            f"a run of {str(end)!r}. Use `t_max='1dur'`. For a constant rate at the end, pass a function of your own, "
            f"such as `lambda state, ssr=1.0: max(0.1, 1 - float(state.get_elapsed_duration()) / 0.8)`."
        )


# Schedules of other projects, written for MosaicML's Composer, import these names.
_raise_if_warmup_and_max_incompatible = _check_units


def _raise_if_max_duration_exceeds_t_max(t_max: str | Time[Any], state: State) -> None:
    _check_covers_run(_convert_time(t_max, state), state)


# ---- schedulers of torch ----


def compile_composer_scheduler(
    scheduler: ComposerScheduler | Callable[..., float],
    state: State,
    ssr: float = 1.0,
    optimizer: Optimizer | None = None,
) -> LambdaLR:
    """Create a torch scheduler that follows a schedule; call its `step` whenever the learning rate should change.

    The schedule is evaluated immediately, so a schedule that does not fit the run raises its error here. The arguments
    of a schedule of `composer.optim` are read now, and again only when the length of the run or of its epochs changes.

    Args:
        scheduler: A schedule, or any function `f(state, ssr)` or `f(state)` that returns a factor.
        state: The training state.
        ssr: Scale schedule ratio, passed to `scheduler`.
        optimizer: The optimizer whose learning rates change. None: the only one of the state.

    Returns:
        A `LambdaLR` that sets the learning rate of every group to its initial learning rate times the factor. Its
        method `scale_schedule(ssr)` multiplies the scale schedule ratio.

    Raises:
        ValueError: `optimizer` is None and the state does not have exactly one; `ssr` is not 1 and `scheduler` does not
            take it; the factor is no number, NaN, infinite or negative, which is also checked in every step; or a name
            of a `GroupScheduler` is that of no group.

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
    if optimizer is None:
        if len(state.optimizers) != 1:
            raise ValueError(
                f"A schedule must be compiled for one optimizer, but the state has {len(state.optimizers)}. "
                f"Pass one as `optimizer`."
            )
        optimizer = state.optimizers[0]
    if isinstance(scheduler, GroupScheduler):
        names = {group.get("name") for each in (optimizer, *state.optimizers) for group in each.param_groups}
        unknown = [name for name in scheduler.named if name not in names]
        if unknown:
            raise ValueError(
                f"`scheduler` must have names of parameter groups of the optimizers, which are "
                f"{sorted(filter(None, names))}, got {unknown}. Name a group with `{{'params': [...], 'name': ...}}`."
            )
    return _CompiledSchedule(scheduler, state, ssr, optimizer)


class _CompiledSchedule(LambdaLR):
    """A `LambdaLR` that evaluates its `schedule`. Its state dict holds neither the schedule nor the training state."""

    __qualname__ = "LambdaLR"  # its name in checkpoints

    def __init__(self, scheduler: Callable[..., float], state: State, ssr: float, optimizer: Optimizer) -> None:
        self.schedule, self._state, self._ssr = scheduler, state, ssr
        self._names = [group.get("name") for group in optimizer.param_groups]
        self._bind()
        own_step = vars(optimizer).get("step")

        def factor_of(index: int) -> Callable[[int], float]:
            return lambda step: self._factors()[index]

        super().__init__(optimizer, [factor_of(index) for index in range(len(self._names))])
        if own_step is None:
            # Torch wraps `step` to count its calls, to warn if a scheduler steps first and so skips its first value.
            # This one takes the time from the training state and skips none.
            vars(optimizer).pop("step", None)

    def step(self, epoch: int | None = None) -> None:
        """Set the learning rates for the current time, as `LambdaLR.step` does, at a fraction of its cost."""
        if epoch is not None or self._step_count == 0:  # deprecated by torch; the call from its constructor
            super().step(epoch)
            return
        self._step_count += 1
        self.last_epoch += 1
        self._set_rates(self._factors())

    def _bind(self) -> None:
        """Convert the times of the schedule, for the current length of the run and of its epochs."""
        state = self._state
        self._end, self._length, self._samples = state.max_duration, state._dataloader_len, state.samples_per_epoch
        schedules: dict[Any, Callable[..., float]] = {None: self.schedule}
        if isinstance(self.schedule, GroupScheduler):
            schedules = {None: self.schedule.scheduler, **self.schedule.named}
        self._evaluate = {name: _bind(each, state, self._ssr) for name, each in schedules.items()}

    def _factors(self) -> list[Any]:
        """Evaluate the schedule, for each parameter group.

        Raises:
            ValueError: The factor is no number, NaN, infinite or negative.
        """
        state = self._state
        length = state._dataloader_len
        is_same_length = length is self._length or length == self._length  # comparing times takes longer
        if not is_same_length or state.samples_per_epoch != self._samples or state.max_duration is not self._end:
            self._bind()
        factors = {name: evaluate() for name, evaluate in self._evaluate.items()}
        for factor in factors.values():
            if type(factor) is not float or not 0.0 <= factor < math.inf:  # the check itself takes longer
                _check_factor(factor, self.schedule, state)
        return [factors.get(name, factors[None]) for name in self._names]

    def _set_rates(self, factors: list[Any]) -> None:
        rates: list[Any] = []
        for group, initial, factor in zip(self.optimizer.param_groups, self.base_lrs, factors, strict=True):
            rate = group["lr"]
            if isinstance(rate, Tensor):  # in place: compiled and captured steps read this tensor
                rates.append(rate.fill_(initial * factor).clone())
            else:
                group["lr"] = rate = initial * factor
                rates.append(rate)
        self._last_lr = rates

    def scale_schedule(self, ssr: float) -> None:
        """Multiply the scale schedule ratio and update the learning rates.

        Args:
            ssr: The ratio, more than 0. `state.max_duration` must be scaled already.

        Raises:
            ValueError: `ssr` is not positive, or the schedule does not take it.
        """
        if ssr <= 0:
            raise ValueError(f"`ssr` must be positive, got {ssr!r}.")
        before, self._ssr = self._ssr, self._ssr * ssr
        try:
            self._bind()
        except Exception:
            self._ssr = before
            raise
        self._set_rates(self._factors())

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of a `LambdaLR`."""
        return {key: value for key, value in super().state_dict().items() if key not in _UNSAVED}


_UNSAVED = {"schedule", "_state", "_ssr", "_end", "_length", "_samples", "_evaluate", "_names"}


def _bind(scheduler: Callable[..., float], state: State, ssr: float) -> Callable[[], float]:
    """Bind the arguments of a schedule. A function that takes no `ssr` gets only the state."""
    if isinstance(scheduler, Schedule) and type(scheduler).__call__ is Schedule.__call__:
        return scheduler.bind(state, ssr)
    parameters = inspect.signature(scheduler).parameters
    if "ssr" in parameters or any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        return lambda: scheduler(state, ssr=ssr)
    if ssr != 1.0:
        raise ValueError(
            f"`scheduler` must take `ssr` to be used with a scale schedule ratio of {ssr!r}, got {scheduler!r}. "
            f"Write it as `f(state, ssr=1.0)` and multiply its times by `ssr`."
        )
    return lambda: scheduler(state)


def _check_factor(factor: Any, scheduler: Callable[..., Any], state: State) -> None:
    """Raise ValueError unless a factor is finite and, but for rounding errors, not negative."""
    if isinstance(factor, Tensor) and factor.device.type != "cpu":  # reading it would synchronize
        return
    if not (isinstance(factor, (Real, Tensor)) and -1e-12 <= float(factor) < math.inf):
        now = state.timestamp
        raise ValueError(
            f"The schedule {scheduler!r} must return a factor of the learning rate, a finite number that is not "
            f"negative, got {factor!r} at epoch {now.epoch.value} and batch {now.batch.value}. Check its formula for "
            f"that time; `max(0.0, ...)` prevents negative factors."
        )


def scale_pytorch_scheduler(scheduler: LRScheduler, ssr: float) -> None:
    """Multiply the time constants of a torch scheduler by a scale schedule ratio, in place.

    Lengths are rounded down. The gamma of an `ExponentialLR` becomes `gamma ** (1 / ssr)`.

    Args:
        scheduler: A `StepLR`, `MultiStepLR`, `CosineAnnealingLR`, `CosineAnnealingWarmRestarts` or `ExponentialLR`.
        ssr: The ratio, more than 0; 1 changes nothing, whatever the scheduler.

    Raises:
        ValueError: `ssr` is not positive or scales a length to 0, or the type of `scheduler` is not supported.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> scheduler = StepLR(optimizer, step_size=30)
        >>> scale_pytorch_scheduler(scheduler, ssr=0.5)
        >>> scheduler.step_size
        15

    Differs: the current cycle of `CosineAnnealingWarmRestarts` (`T_i`) is scaled too, because torch steps by it.
    """
    if ssr <= 0:
        raise ValueError(f"`ssr` must be positive, got {ssr!r}.")
    if ssr == 1.0:
        return
    if isinstance(scheduler, StepLR):
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
        scheduler.T_max = _scaled("T_max", scheduler.T_max, ssr)
    elif isinstance(scheduler, ExponentialLR):
        scheduler.gamma = scheduler.gamma ** (1 / ssr)
    else:
        raise ValueError(
            f"`scheduler` must be a StepLR, MultiStepLR, CosineAnnealingLR, CosineAnnealingWarmRestarts or "
            f"ExponentialLR, got {type(scheduler).__name__}. Scale it yourself, or use a schedule of `composer.optim`."
        )


def _scaled(name: str, length: int, ssr: float) -> int:
    scaled = int(length * ssr)
    if scaled == 0:
        raise ValueError(
            f"`ssr` must not scale `{name}` to nothing, got {ssr!r} for {name}={length!r}. Use a larger ratio."
        )
    return scaled
