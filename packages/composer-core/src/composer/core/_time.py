"""A length of training time: a number with a unit."""

from __future__ import annotations

import math
import re
from typing import Any, Generic, SupportsIndex, TypeVar, Union, overload

from composer.core.serializable import Serializable
from composer.utils.misc import plain_int, plain_number
from composer.utils.string_enum import StringEnum

__all__ = ["Time", "TimeUnit", "ensure_time"]

TValue = TypeVar("TValue", int, float)
TimeInput = Union["Time[Any]", str, float, SupportsIndex]

_CLOCK = re.compile(r"(?:(\d{1,2})h)?(?:(\d{1,2})m)?(?:(\d{1,2})s)?", re.IGNORECASE)
_STRING = re.compile(r"\s*([-+]?[\d._]+(?:e[-+]?\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


class TimeUnit(StringEnum):
    """The unit of a `Time`: what is counted."""

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    SECOND = "sec"


class Time(Serializable, Generic[TValue]):
    """A length of training time, such as 10 epochs or half of the run. Immutable.

    Written as a string it is a number and a unit: `"10ep"`, `"500ba"`, `"3e9tok"`, `"0.5dur"` (a fraction of the run),
    `"30sec"`, or a wall-clock time such as `"1h20m"`. Lengths of one unit can be compared and added; plain numbers are
    taken to be of the same unit.

    Args:
        value: A number; an integer for every unit but `DURATION`, which takes a fraction. It is kept as a plain int or
            float, whatever library it is of.
        unit: A `TimeUnit`, its name or its value.

    Raises:
        TypeError: `value` is not an integer although the unit counts whole things.
        ValueError: The unit is unknown, or `value` is NaN or infinite.

    Example:
        >>> Time(2, "ep") + "3ep" == "5ep"
        True
        >>> Time.from_timestring("10ep") / Time(4, "ep")
        Time(2.5, TimeUnit.DURATION)
    """

    __slots__ = ("_unit", "_value")

    @overload
    def __init__(self: Time[int], value: SupportsIndex, unit: str | TimeUnit) -> None: ...

    @overload
    def __init__(self: Time[float], value: float, unit: str | TimeUnit) -> None: ...

    def __init__(self, value: Any, unit: str | TimeUnit) -> None:
        unit = TimeUnit(unit)
        if unit is TimeUnit.DURATION:
            value = float(value)
            if not math.isfinite(value):
                raise ValueError(f"`value` must be finite, got {value!r}. Use for example '0.5dur'.")
        elif (number := plain_int(value)) is not None:
            value = number
        else:
            raise TypeError(
                f"`value` must be an int for the unit {unit.value!r}, got {value!r} of type {type(value).__name__}. "
                f"Only 'dur' takes fractions."
            )
        self._value: TValue = value
        self._unit: TimeUnit = unit

    @classmethod
    def from_iteration(cls, iteration: SupportsIndex) -> Time[int]:
        """`Time(iteration, "iter")`."""
        return Time(iteration, TimeUnit.ITERATION)

    @classmethod
    def from_epoch(cls, epoch: SupportsIndex) -> Time[int]:
        """`Time(epoch, "ep")`."""
        return Time(epoch, TimeUnit.EPOCH)

    @classmethod
    def from_batch(cls, batch: SupportsIndex) -> Time[int]:
        """`Time(batch, "ba")`."""
        return Time(batch, TimeUnit.BATCH)

    @classmethod
    def from_sample(cls, sample: SupportsIndex) -> Time[int]:
        """`Time(sample, "sp")`."""
        return Time(sample, TimeUnit.SAMPLE)

    @classmethod
    def from_token(cls, token: SupportsIndex) -> Time[int]:
        """`Time(token, "tok")`."""
        return Time(token, TimeUnit.TOKEN)

    @classmethod
    def from_duration(cls, duration: float) -> Time[float]:
        """`Time(duration, "dur")`: a fraction of the run."""
        return Time(float(duration), TimeUnit.DURATION)

    @classmethod
    def from_timedelta(cls, timestring: str) -> Time[int]:
        """Seconds from a wall-clock string such as `"1h20m40s"`, any part of which may be missing.

        Raises:
            ValueError: The text has another form, 24 or more hours, or 60 or more minutes or seconds.
        """
        match = _CLOCK.fullmatch(timestring.strip())
        if match is None or not any(match.groups()):
            raise ValueError(f"A wall-clock time must look like '1h20m40s', got {timestring!r}.")
        hours, minutes, seconds = (int(part or 0) for part in match.groups())
        if hours > 23 or minutes > 59 or seconds > 59:
            raise ValueError(
                f"A wall-clock time must have at most 23 hours, 59 minutes and 59 seconds, got {timestring!r}. "
                f"Write longer times in seconds, for example '100000sec'."
            )
        return Time(3600 * hours + 60 * minutes + seconds, TimeUnit.SECOND)

    @classmethod
    def from_input(cls, i: TimeInput, default_int_unit: TimeUnit | str | None = None) -> Time[Any]:
        """A `Time` from a `Time`, a time string, or a number of any library, of `default_int_unit`.

        Raises:
            RuntimeError: A number is given without a default unit, or something that is no time at all.
        """
        if isinstance(i, Time):
            return i
        if isinstance(i, str):
            return Time.from_timestring(i)
        i = plain_number(i)
        if isinstance(i, (int, float)):
            if default_int_unit is None:
                raise RuntimeError(f"A time must have a unit, got the plain number {i!r}. Write for example '{i}ep'.")
            return Time(i, default_int_unit)
        raise RuntimeError(f"A time must be a `Time`, a string such as '10ep' or a number, got {i!r}.")

    @classmethod
    def from_timestring(cls, timestring: str) -> Time[Any]:
        """Parse a time string; see the class for the forms.

        Raises:
            ValueError: The text does not parse or names an unknown unit.
            TypeError: A fraction is given for a unit that counts whole things (`"1.5ep"`).
        """
        if _CLOCK.fullmatch(timestring) and timestring:
            return Time.from_timedelta(timestring)
        match = _STRING.fullmatch(timestring)
        try:
            if match is None:
                raise ValueError("no number followed by a unit")
            unit, number = TimeUnit(match[2]), float(match[1])
        except ValueError as error:
            units = ", ".join(repr(u.value) for u in TimeUnit)
            raise ValueError(
                f"A time string must be a number and one of {units}, such as '10ep' or '0.5dur', got {timestring!r}."
            ) from error
        whole = unit is not TimeUnit.DURATION and number == number // 1
        return Time(_exact_int(match[1], number) if whole else number, unit)

    @property
    def value(self) -> TValue:
        """The number."""
        return self._value

    @property
    def unit(self) -> TimeUnit:
        """The unit."""
        return self._unit

    def to_timestring(self) -> str:
        """The time string, for example `"10ep"`."""
        return f"{self._value}{self._unit.value}"

    def __repr__(self) -> str:
        return f"Time({self._value!r}, TimeUnit.{self._unit.name})"

    __str__ = to_timestring

    def __hash__(self) -> int:
        return hash((self._value, self._unit))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Time, (self._value, self._unit.value))

    def _same(self, other: object) -> Any:
        """`other` as a number of this unit; NotImplemented if it is no time."""
        other = plain_number(other)
        if isinstance(other, (int, float)):
            return other
        if isinstance(other, str):
            other = Time.from_timestring(other)
        if not isinstance(other, Time):
            return NotImplemented
        if other._unit is not self._unit:
            raise RuntimeError(
                f"`{self!r}` and `{other!r}` have different units and cannot be compared or combined. "
                f"Use one unit for both."
            )
        return other._value

    def __lt__(self, other: object) -> bool:
        value = self._same(other)
        return value if value is NotImplemented else self._value < value

    def __le__(self, other: object) -> bool:
        value = self._same(other)
        return value if value is NotImplemented else self._value <= value

    def __gt__(self, other: object) -> bool:
        value = self._same(other)
        return value if value is NotImplemented else self._value > value

    def __ge__(self, other: object) -> bool:
        value = self._same(other)
        return value if value is NotImplemented else self._value >= value

    def __eq__(self, other: object) -> bool:
        value = self._same(other)
        return value if value is NotImplemented else self._value == value

    def __ne__(self, other: object) -> bool:
        value = self._same(other)
        return value if value is NotImplemented else self._value != value

    def _cast(self, value: float) -> Time[TValue]:
        number: Any = type(self._value)(value)
        return Time(number, self._unit)

    def __add__(self, other: TimeInput) -> Time[TValue]:
        value = self._same(other)
        return value if value is NotImplemented else self._cast(self._value + value)

    def __radd__(self, other: TimeInput) -> Time[TValue]:
        return self + other

    def __sub__(self, other: TimeInput) -> Time[TValue]:
        value = self._same(other)
        return value if value is NotImplemented else self._cast(self._value - value)

    def __rsub__(self, other: TimeInput) -> Time[TValue]:
        return (-self) + other

    def __mod__(self, other: TimeInput) -> Time[TValue]:
        value = self._same(other)
        return value if value is NotImplemented else self._cast(self._value % value)

    def __neg__(self) -> Time[TValue]:
        return self._cast(-self._value)

    def __pos__(self) -> Time[TValue]:
        return self

    def __int__(self) -> int:
        return int(self._value)

    def __float__(self) -> float:
        return float(self._value)

    def __truediv__(self, other: TimeInput) -> Time[Any]:
        other = plain_number(other)
        if isinstance(other, (int, float)):
            return self._cast(self._value / other)
        value = self._same(other)
        return value if value is NotImplemented else Time(self._value / value, TimeUnit.DURATION)

    def __rtruediv__(self, other: TimeInput) -> Time[Any]:
        return ensure_time(other, self._unit) / self if isinstance(other, (str, Time)) else NotImplemented

    def __mul__(self, other: TimeInput) -> Time[Any]:
        other = plain_number(other)
        if isinstance(other, (int, float)):
            return self._cast(self._value * other)
        if not isinstance(other, (str, Time)):
            return NotImplemented
        other = ensure_time(other, self._unit)
        if TimeUnit.DURATION not in (self._unit, other._unit):
            raise RuntimeError(f"One of two multiplied times must be a duration ('dur'), got {self!r} and {other!r}.")
        unit = other._unit if self._unit is TimeUnit.DURATION else self._unit
        product = self._value * other._value
        return Time(product if unit is TimeUnit.DURATION else int(product), unit)

    def __rmul__(self, other: TimeInput) -> Time[Any]:
        return self * other

    def state_dict(self) -> dict[str, Any]:
        """`{"value": ..., "unit": ...}`."""
        return {"value": self._value, "unit": self._unit.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the time that `state_dict` described."""
        self._value, self._unit = state["value"], TimeUnit(state["unit"])


def _exact_int(text: str, number: float) -> int:
    # Plain digits are parsed as an int: a float loses whole numbers above 2**53.
    digits = text.lstrip("+-").replace("_", "")
    return int(text) if digits.isdigit() and "__" not in text and text[-1] != "_" else int(number)


def ensure_time(maybe_time: TimeInput, int_unit: TimeUnit | str, *, argument: str = "") -> Time[Any]:
    """Return a `Time` from a `Time`, a time string, or a plain number of `int_unit`.

    Args:
        maybe_time: Any of the three.
        int_unit: The unit of plain numbers.
        argument: Whose value it is, for the messages of errors.

    Raises:
        ValueError: The string does not parse.
        TypeError: The number is a fraction and the unit counts whole things.
        RuntimeError: `maybe_time` is something else.
    """
    try:
        return Time.from_input(maybe_time, int_unit)
    except (ValueError, TypeError, RuntimeError) as error:
        if not argument:
            raise
        raise type(error)(f"`{argument}` must be a time, got {maybe_time!r}. {error}") from None
