"""The schedules without warm-up.

In the formulas, t is the trained time in the unit of the argument it is compared with, x = min(1, t / t_max) is the
part of the schedule that is done, and all times are multiplied by the scale schedule ratio.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer.core import Time, TimeUnit
from composer.optim._compile import Schedule
from composer.optim._time import _convert_time, elapsed, factor, fraction, parse, positive
from composer.utils import check_finite

if TYPE_CHECKING:
    from composer.core import State

__all__ = [
    "ConstantScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "ExponentialScheduler",
    "LinearScheduler",
    "MultiStepScheduler",
    "PolynomialScheduler",
    "StepScheduler",
    "cosine",
    "exponent",
    "parse_milestones",
    "polynomial",
    "steps_down",
]


def cosine(x: float, alpha_f: float) -> float:
    """From 1 to `alpha_f` along half a cosine, for x from 0 to 1."""
    return alpha_f + (1 - alpha_f) * (1 + math.cos(math.pi * x)) / 2


def polynomial(x: float, power: float, alpha_f: float) -> float:
    """From 1 to `alpha_f` along a power, for x from 0 to 1."""
    return alpha_f + (1 - alpha_f) * math.pow(1 - x, power)


def exponent(power: float) -> float:
    """Return the exponent of a polynomial schedule.

    Raises:
        TypeError: It is no number.
        ValueError: It is not positive, or infinite.
    """
    check_finite(power=power)
    if power <= 0:
        raise ValueError(f"`power` must be positive, got {power!r}: the learning rate would not fall.")
    return power


def parse_milestones(milestones: Sequence[str | Time[Any]]) -> list[Time[Any]]:
    """The milestones as `Time` objects.

    Raises:
        TypeError: `milestones` is no sequence, but for example a single time.
    """
    if isinstance(milestones, (str, Time)) or not isinstance(milestones, Sequence):
        raise TypeError(f"`milestones` must be a sequence of times, got {milestones!r}. Put it in a list.")
    return [parse(milestone, "milestones", zero=True) for milestone in milestones]


def steps_down(milestones: Sequence[Time[Any]], gamma: float, state: State, ssr: float) -> float:
    """`gamma` to the power of the number of milestones that are reached."""
    times = [_convert_time(milestone, state, ssr) for milestone in milestones]
    return float(gamma ** sum(time.value <= elapsed(state, time.unit) for time in times))


def done(t_max: Time[Any], state: State, ssr: float) -> float:
    """Return the part of a schedule of length `t_max` that is done, in [0, 1]; 1 after its end."""
    end = _convert_time(t_max, state, ssr)
    return fraction(elapsed(state, end.unit), end.value)


class StepScheduler(Schedule):
    """Multiply by gamma after every `step_size`: `gamma ** floor(t / step_size)`.

    Args:
        step_size: Time between two changes.
        gamma: The factor of one change.

    Raises:
        ValueError: When called, `step_size` comes to nothing.
    """

    def __init__(self, step_size: str | Time[Any], gamma: float = 0.1) -> None:
        self.step_size = parse(step_size, "step_size")
        self.gamma = factor(gamma, "gamma")

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        step_size = _convert_time(self.step_size, state, ssr)
        steps = elapsed(state, step_size.unit) // positive(step_size, "step_size", self.step_size)
        return float(self.gamma**steps)


class MultiStepScheduler(Schedule):
    """Multiply by gamma at every milestone: `gamma ** (number of milestones <= t)`.

    Args:
        milestones: Times of the changes, in any order and in any units.
        gamma: The factor of one change.
    """

    def __init__(self, milestones: Sequence[str | Time[Any]], gamma: float = 0.1) -> None:
        self.milestones = parse_milestones(milestones)
        self.gamma = factor(gamma, "gamma")

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return steps_down(self.milestones, self.gamma, state, ssr)


class ConstantScheduler(Schedule):
    """`alpha` before `t_max`, 1 from then on.

    Args:
        alpha: The factor.
        t_max: How long it holds; may be shorter than the run.
    """

    def __init__(self, alpha: float = 1.0, t_max: str | Time[Any] = "1dur") -> None:
        self.alpha = factor(alpha, "alpha")
        self.t_max = parse(t_max, "t_max")

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        t_max = _convert_time(self.t_max, state, ssr)
        return self.alpha if elapsed(state, t_max.unit) < t_max.value else 1.0


class LinearScheduler(Schedule):
    """On a line from `alpha_i` to `alpha_f`: `alpha_i + x * (alpha_f - alpha_i)`.

    Args:
        alpha_i: The first factor.
        alpha_f: The last factor.
        t_max: When the last factor is reached; it is kept for the rest of a longer run.
    """

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: str | Time[Any] = "1dur") -> None:
        self.alpha_i = factor(alpha_i, "alpha_i")
        self.alpha_f = factor(alpha_f, "alpha_f")
        self.t_max = parse(t_max, "t_max")

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return self.alpha_i + done(self.t_max, state, ssr) * (self.alpha_f - self.alpha_i)


class ExponentialScheduler(Schedule):
    """Multiply by gamma per `decay_period`, smoothly: `gamma ** (t / decay_period)`.

    Args:
        gamma: The factor of one period; not negative.
        decay_period: Time after which the factor is gamma.

    Raises:
        ValueError: `gamma` is negative, or, when called, `decay_period` comes to nothing.
    """

    def __init__(self, gamma: float, decay_period: str | Time[Any] = "1ep") -> None:
        self.gamma = factor(gamma, "gamma")
        self.decay_period = parse(decay_period, "decay_period")

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        period = _convert_time(self.decay_period, state, ssr)
        return math.pow(self.gamma, elapsed(state, period.unit) / positive(period, "decay_period", self.decay_period))


class CosineAnnealingScheduler(Schedule):
    """Along half a cosine from 1 to `alpha_f`: `alpha_f + (1 - alpha_f) * (1 + cos(pi * x)) / 2`.

    Args:
        t_max: When `alpha_f` is reached; it is kept for the rest of a longer run.
        alpha_f: The last factor.

    Source: Loshchilov, Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983, equation 5.
    Differs: no restarts.
    """

    def __init__(self, t_max: str | Time[Any] = "1dur", alpha_f: float = 0.0) -> None:
        self.t_max = parse(t_max, "t_max")
        self.alpha_f = factor(alpha_f, "alpha_f")

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return cosine(done(self.t_max, state, ssr), self.alpha_f)


class CosineAnnealingWarmRestartsScheduler(Schedule):
    """Along half a cosine from 1 to `alpha_f`, again and again.

    The first cycle has the length t_0, each later one the length `int(t_mult * length)` of the one before. Within a
    cycle the factor is that of `CosineAnnealingScheduler`.

    Args:
        t_0: Length of the first cycle.
        t_mult: Growth of the cycles.
        alpha_f: The factor at the end of a cycle.

    Raises:
        ValueError: When called, the length of a cycle comes to nothing.

    Source: Loshchilov, Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", arXiv:1608.03983, equation 5.
    Differs: lengths are whole numbers, rounded down, unless the run is one of seconds.
    """

    def __init__(self, t_0: str | Time[Any], t_mult: float = 1.0, alpha_f: float = 0.0) -> None:
        self.t_0 = parse(t_0, "t_0")
        check_finite(t_mult=t_mult)
        if t_mult <= 0:
            raise ValueError(f"`t_mult` must be positive, got {t_mult!r}. Use 1.0 for cycles of one length.")
        self.t_mult = t_mult
        self.alpha_f = factor(alpha_f, "alpha_f")

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        t_0 = _convert_time(self.t_0, state, ssr)
        length = positive(t_0, "t_0", self.t_0)
        into_cycle = elapsed(state, t_0.unit)
        while into_cycle >= length:
            following = self.t_mult * length
            if t_0.unit is not TimeUnit.DURATION:
                following = int(following)
            if following == length:  # all further cycles are equal, and there may be very many of them
                into_cycle %= length
                break
            into_cycle -= length
            length = positive(Time(following, t_0.unit), "t_mult * length", self.t_0)
        return cosine(into_cycle / length, self.alpha_f)


class PolynomialScheduler(Schedule):
    """Along a power from 1 to `alpha_f`: `alpha_f + (1 - alpha_f) * (1 - x) ** power`.

    Args:
        power: The exponent.
        t_max: When `alpha_f` is reached; it is kept for the rest of a longer run.
        alpha_f: The last factor.
    """

    def __init__(self, power: float, t_max: str | Time[Any] = "1dur", alpha_f: float = 0.0) -> None:
        self.power = exponent(power)
        self.t_max = parse(t_max, "t_max")
        self.alpha_f = factor(alpha_f, "alpha_f")

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return polynomial(done(self.t_max, state, ssr), self.power, self.alpha_f)
