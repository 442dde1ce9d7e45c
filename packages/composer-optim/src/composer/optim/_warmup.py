"""The schedules that begin with a linear warm-up.

In the formulas, x = (t - t_warmup) / (t_max - t_warmup) within [0, 1] is the part of the schedule after the warm-up
that is done. The scale schedule ratio multiplies all times but `t_warmup`: a shorter run needs no shorter warm-up. With
`scale_warmup` the ramp is scaled, so with a ratio of 0.5 it reaches its top at half of `t_warmup` and stays there.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer.core import Time
from composer.optim._compile import Schedule
from composer.optim._schedules import cosine, exponent, parse_milestones, polynomial, steps_down
from composer.optim._time import _convert_time, check_covers_run, check_warmup, elapsed, factor, fraction, parse
from composer.utils import check_flags

if TYPE_CHECKING:
    from composer.core import State

__all__ = [
    "ConstantWithWarmupScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "LinearWithWarmupScheduler",
    "MultiStepWithWarmupScheduler",
    "PolynomialWithWarmupScheduler",
]


def _ramp(t_warmup: Time[Any], scale_warmup: bool, state: State, ssr: float, stacklevel: int = 3) -> float | None:
    """The height of the warm-up ramp, in [0, 1]; None after the warm-up."""
    end = _convert_time(t_warmup, state)
    if end.value == 0 and t_warmup.value != 0:  # who writes zero means it
        warnings.warn(
            f"`t_warmup` comes to {str(end)!r}, so there is no warm-up. Give a longer time than {str(t_warmup)!r}, or "
            f"use a schedule without warm-up.",
            UserWarning,
            stacklevel=stacklevel,
        )
    now = elapsed(state, end.unit)
    if now >= end.value:
        return None
    return fraction(now, _convert_time(t_warmup, state, ssr).value if scale_warmup else end.value)


class _WithWarmup(Schedule):
    """A warm-up, followed by a schedule that ends at `t_max`."""

    t_warmup: Time[Any]
    t_max: Time[Any]
    scale_warmup: bool

    def _progress(self, state: State, ssr: float) -> tuple[float, float]:
        """The height of the ramp, and the part x of the schedule after it that is done; both in [0, 1]."""
        begin, end = _convert_time(self.t_warmup, state), _convert_time(self.t_max, state, ssr)
        if begin.unit is not end.unit:
            raise ValueError(
                f"Cannot use warmup scheduler: `t_warmup` and `t_max` must come to the same unit, got "
                f"{str(self.t_warmup)!r}, which comes to {str(begin)!r}, and {str(self.t_max)!r}, which comes to "
                f"{str(end)!r}. Give both in one unit."
            )
        check_covers_run(end, state)
        check_warmup(_convert_time(self.t_warmup, state, ssr) if self.scale_warmup else begin, end, state)
        height = _ramp(self.t_warmup, self.scale_warmup, state, ssr, stacklevel=4)
        if height is not None:
            return height, 0.0
        whole = end.value - begin.value
        return 1.0, fraction(elapsed(state, end.unit) - begin.value, whole) if whole > 0 else 0.0


class MultiStepWithWarmupScheduler(Schedule):
    """From 0 to 1 on a line, then `gamma ** (number of milestones <= t)`.

    Args:
        t_warmup: Length of the warm-up.
        milestones: Times of the changes, counted from the start of the run.
        gamma: The factor of one change.
        scale_warmup: Whether the scale schedule ratio applies to the ramp.

    Warns:
        UserWarning: When called, a `t_warmup` above zero comes to nothing.
    """

    def __init__(
        self,
        t_warmup: str | Time[Any],
        milestones: Sequence[str | Time[Any]],
        gamma: float = 0.1,
        scale_warmup: bool = False,
    ) -> None:
        self.t_warmup = parse(t_warmup, "t_warmup", zero=True)
        self.milestones = parse_milestones(milestones)
        self.gamma = factor(gamma, "gamma")
        check_flags(scale_warmup=scale_warmup)
        self.scale_warmup = scale_warmup

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        check_warmup(_convert_time(self.t_warmup, state, ssr if self.scale_warmup else 1.0), None, state)
        height = _ramp(self.t_warmup, self.scale_warmup, state, ssr)
        return steps_down(self.milestones, self.gamma, state, ssr) if height is None else height


class LinearWithWarmupScheduler(_WithWarmup):
    """From 0 to `alpha_i` on a line, then on a line to `alpha_f`: `alpha_i + x * (alpha_f - alpha_i)`.

    Args:
        t_warmup: Length of the warm-up.
        alpha_i: The factor at the end of the warm-up.
        alpha_f: The last factor.
        t_max: When the last factor is reached, counted from the start of the run.
        scale_warmup: Whether the scale schedule ratio applies to the ramp.

    Raises:
        ValueError: When called, `t_max` is shorter than the run or comes to another unit than `t_warmup`.

    Warns:
        UserWarning: When called, a `t_warmup` above zero comes to nothing.
    """

    def __init__(
        self,
        t_warmup: str | Time[Any],
        alpha_i: float = 1.0,
        alpha_f: float = 0.0,
        t_max: str | Time[Any] = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        self.t_warmup = parse(t_warmup, "t_warmup", zero=True)
        self.alpha_i = factor(alpha_i, "alpha_i")
        self.alpha_f = factor(alpha_f, "alpha_f")
        self.t_max = parse(t_max, "t_max")
        check_flags(scale_warmup=scale_warmup)
        self.scale_warmup = scale_warmup

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        height, x = self._progress(state, ssr)
        return height * (self.alpha_i + x * (self.alpha_f - self.alpha_i))


class ConstantWithWarmupScheduler(_WithWarmup):
    """From 0 to `alpha` on a line, then `alpha`.

    Args:
        t_warmup: Length of the warm-up.
        alpha: The factor after the warm-up, for the rest of the run.
        t_max: When the schedule ends; as for the other schedules it must not be before the run does.
        scale_warmup: Whether the scale schedule ratio applies to the ramp.

    Raises:
        ValueError: When called, `t_max` is shorter than the run or comes to another unit than `t_warmup`.

    Warns:
        UserWarning: When called, a `t_warmup` above zero comes to nothing.
    """

    def __init__(
        self,
        t_warmup: str | Time[Any],
        alpha: float = 1.0,
        t_max: str | Time[Any] = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        self.t_warmup = parse(t_warmup, "t_warmup", zero=True)
        self.alpha = factor(alpha, "alpha")
        self.t_max = parse(t_max, "t_max")
        check_flags(scale_warmup=scale_warmup)
        self.scale_warmup = scale_warmup

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        return self._progress(state, ssr)[0] * self.alpha


class CosineAnnealingWithWarmupScheduler(_WithWarmup):
    """From 0 to 1 on a line, then along half a cosine: `alpha_f + (1 - alpha_f) * (1 + cos(pi * x)) / 2`.

    Args:
        t_warmup: Length of the warm-up.
        t_max: When `alpha_f` is reached, counted from the start of the run.
        alpha_f: The last factor.
        scale_warmup: Whether the scale schedule ratio applies to the ramp.

    Raises:
        ValueError: When called, `t_max` is shorter than the run or comes to another unit than `t_warmup`.

    Warns:
        UserWarning: When called, a `t_warmup` above zero comes to nothing.
    """

    def __init__(
        self,
        t_warmup: str | Time[Any],
        t_max: str | Time[Any] = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:
        self.t_warmup = parse(t_warmup, "t_warmup", zero=True)
        self.t_max = parse(t_max, "t_max")
        self.alpha_f = factor(alpha_f, "alpha_f")
        check_flags(scale_warmup=scale_warmup)
        self.scale_warmup = scale_warmup

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        height, x = self._progress(state, ssr)
        return height * cosine(x, self.alpha_f)


class PolynomialWithWarmupScheduler(_WithWarmup):
    """From 0 to 1 on a line, then along a power: `alpha_f + (1 - alpha_f) * (1 - x) ** power`.

    Args:
        t_warmup: Length of the warm-up.
        power: The exponent.
        t_max: When `alpha_f` is reached, counted from the start of the run.
        alpha_f: The last factor.
        scale_warmup: Whether the scale schedule ratio applies to the ramp.

    Raises:
        ValueError: When called, `t_max` is shorter than the run or comes to another unit than `t_warmup`.

    Warns:
        UserWarning: When called, a `t_warmup` above zero comes to nothing.
    """

    def __init__(
        self,
        t_warmup: str | Time[Any],
        power: float = 2.0,
        t_max: str | Time[Any] = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:
        self.t_warmup = parse(t_warmup, "t_warmup", zero=True)
        self.power = exponent(power)
        self.t_max = parse(t_max, "t_max")
        self.alpha_f = factor(alpha_f, "alpha_f")
        check_flags(scale_warmup=scale_warmup)
        self.scale_warmup = scale_warmup

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        height, x = self._progress(state, ssr)
        return height * polynomial(x, self.power, self.alpha_f)
