"""Training time: a length with a unit (`Time`), and the progress of a run in all units (`Timestamp`)."""

from __future__ import annotations

import datetime
import math
import re
from functools import total_ordering
from typing import Any, Generic, SupportsIndex, TypeVar, Union, overload

from composer.core.serializable import Serializable
from composer.utils.numbers import plain_int, plain_number
from composer.utils.string_enum import StringEnum

TValue = TypeVar("TValue", int, float)
TimeInput = Union["Time[Any]", str, float, SupportsIndex]

_CLOCK = re.compile(r"(?:(\d{1,2})h)?(?:(\d{1,2})m)?(?:(\d{1,2})s)?", re.IGNORECASE)
_STRING = re.compile(r"\s*([-+]?[\d._]+(?:e[-+]?\d+)?)\s*([a-z]+)\s*", re.IGNORECASE)


class TimeUnit(StringEnum):
    """The unit of a `Time`."""

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    SECOND = "sec"


@total_ordering
class Time(Serializable, Generic[TValue]):
    """A length of training time, such as 10 epochs or half of the run. Immutable.

    A time string is a number with a unit: `"10ep"`, `"500ba"`, `"3e9tok"`, `"0.5dur"` (a fraction of the run),
    `"30sec"`, or a wall-clock time such as `"1h20m"`. Lengths of the same unit can be compared and added; plain numbers
    have the unit of the other operand.

    Args:
        value: A number of any library, stored as a plain int; for `DURATION` a fraction, stored as a float.
        unit: A `TimeUnit`, its name or its value.

    Raises:
        TypeError: `value` is not an integer, and the unit is not `DURATION`.
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
        elif type(value) is not int:
            number = plain_int(value)
            if number is None:
                raise TypeError(
                    f"`value` must be an int for the unit {unit.value!r}, got {value!r} of type "
                    f"{type(value).__name__}. Only 'dur' takes fractions."
                )
            value = number
        self._value: TValue = value
        self._unit: TimeUnit = unit

    @classmethod
    def from_iteration(cls, iteration: SupportsIndex) -> Time[int]:
        """Return `Time(iteration, "iter")`."""
        return Time(iteration, TimeUnit.ITERATION)

    @classmethod
    def from_epoch(cls, epoch: SupportsIndex) -> Time[int]:
        """Return `Time(epoch, "ep")`."""
        return Time(epoch, TimeUnit.EPOCH)

    @classmethod
    def from_batch(cls, batch: SupportsIndex) -> Time[int]:
        """Return `Time(batch, "ba")`."""
        return Time(batch, TimeUnit.BATCH)

    @classmethod
    def from_sample(cls, sample: SupportsIndex) -> Time[int]:
        """Return `Time(sample, "sp")`."""
        return Time(sample, TimeUnit.SAMPLE)

    @classmethod
    def from_token(cls, token: SupportsIndex) -> Time[int]:
        """Return `Time(token, "tok")`."""
        return Time(token, TimeUnit.TOKEN)

    @classmethod
    def from_duration(cls, duration: float) -> Time[float]:
        """Return `Time(duration, "dur")`, a fraction of the run."""
        return Time(float(duration), TimeUnit.DURATION)

    @classmethod
    def from_timedelta(cls, timestring: str) -> Time[int]:
        """Parse a wall-clock string such as `"1h20m40s"`, whose parts are optional, to a `Time` in seconds.

        Raises:
            ValueError: The string has another form, 24 or more hours, or 60 or more minutes or seconds.
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
        """Convert a `Time`, a time string, or a number in `default_int_unit` to a `Time`.

        Raises:
            RuntimeError: `i` is a number without a default unit, or has another type.
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
            ValueError: The string cannot be parsed or has an unknown unit.
            TypeError: A unit other than "dur" has a fraction (`"1.5ep"`).
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
        if unit is TimeUnit.DURATION or number != number // 1:
            return Time(number, unit)
        # Plain digits are parsed as an int: floats are not exact above 2**53.
        is_plain = match[1].lstrip("+-").replace("_", "").isdigit()
        return Time(int(match[1]) if is_plain else int(number), unit)

    @property
    def value(self) -> TValue:
        """The number."""
        return self._value

    @property
    def unit(self) -> TimeUnit:
        """The unit."""
        return self._unit

    def to_timestring(self) -> str:
        """Return the time string, for example `"10ep"`."""
        return f"{self._value}{self._unit.value}"

    def __repr__(self) -> str:
        return f"Time({self._value!r}, TimeUnit.{self._unit.name})"

    __str__ = to_timestring

    def __hash__(self) -> int:
        return hash((self._value, self._unit))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Time, (self._value, self._unit.value))

    def _same(self, other: object) -> Any:
        """Return `other` as a number in the unit of this time; NotImplemented if it has another type."""
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

    def __eq__(self, other: object) -> bool:
        value = self._same(other)
        return value if value is NotImplemented else self._value == value

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
        """Return `{"value": ..., "unit": ...}`."""
        return {"value": self._value, "unit": self._unit.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set value and unit from a result of `state_dict`."""
        self._value, self._unit = state["value"], TimeUnit(state["unit"])


def ensure_time(maybe_time: TimeInput, int_unit: TimeUnit | str, *, argument: str = "") -> Time[Any]:
    """Convert a `Time`, a time string, or a number in `int_unit` to a `Time`.

    Args:
        maybe_time: The value.
        int_unit: The unit of plain numbers.
        argument: The name of the argument, for error messages.

    Raises:
        ValueError: The string cannot be parsed.
        TypeError: The number is a fraction, and the unit is not "dur".
        RuntimeError: `maybe_time` has another type.
    """
    try:
        return Time.from_input(maybe_time, int_unit)
    except (ValueError, TypeError, RuntimeError) as error:
        if not argument:
            raise
        reason = str(error).replace(f", got {maybe_time!r}.", ".")
        raise type(error)(f"`{argument}` must be a time, got {maybe_time!r}. {reason}") from None


def _seconds(duration: datetime.timedelta | float | None) -> float:
    if isinstance(duration, datetime.timedelta):
        return duration.total_seconds()
    return 0.0 if duration is None else float(duration)


_COUNTERS = {  # the attributes that store the plain numbers
    "iteration": "iterations",
    "epoch": "epochs",
    "batch": "batches",
    "sample": "samples",
    "token": "tokens",
    "epoch_in_iteration": "epochs_in_iteration",
    "token_in_iteration": "tokens_in_iteration",
    "batch_in_epoch": "batches_in_epoch",
    "sample_in_epoch": "samples_in_epoch",
    "token_in_epoch": "tokens_in_epoch",
}
_UNIT_OF = {name: TimeUnit(name.partition("_in_")[0]) for name in _COUNTERS}
_CLOCKS = {f"{name}_wct": f"{name}_seconds" for name in ("total", "iteration", "epoch", "batch")}
_NUMBERS = _COUNTERS | _CLOCKS
_TOTAL_OF = {_UNIT_OF[name]: _COUNTERS[name] for name in ("iteration", "epoch", "batch", "sample", "token")}


def _counter(name: str, settable: bool = False) -> Any:  # a property; type checkers go by the annotation
    attribute, unit = _COUNTERS[name], _UNIT_OF[name]

    def read(self: Timestamp) -> Time[int]:
        return Time(getattr(self, attribute), unit)

    def write(self: Timestamp, value: SupportsIndex | Time[int]) -> None:
        setattr(self, attribute, _count_of(name, value))

    return property(read, write if settable else None, doc=f"The counter `{name}`, a `Time` in {unit.value!r}.")


def _count_of(name: str, value: SupportsIndex | Time[int]) -> int:
    time = Time.from_input(value, _UNIT_OF[name])
    if time.unit is not _UNIT_OF[name]:
        raise ValueError(f"`{name}` must be counted in {_UNIT_OF[name].value!r}, got {time!r}.")
    return int(time.value)


def _clock(name: str, settable: bool = False) -> Any:
    attribute = _CLOCKS[name]

    def read(self: Timestamp) -> datetime.timedelta:
        return datetime.timedelta(seconds=getattr(self, attribute))

    def write(self: Timestamp, value: datetime.timedelta | float | None) -> None:
        setattr(self, attribute, _seconds(value))

    return property(read, write if settable else None, doc=f"The wall-clock time `{name}`, a `datetime.timedelta`.")


@total_ordering
class Timestamp(Serializable):
    """The progress of a run: counters and wall-clock times. Immutable; the `to_next_*` methods return the next one.

    Counters are read as `Time` objects, which compare with time strings (`timestamp.batch == "3ba"`), and wall-clock
    times as `datetime.timedelta`. Code that runs at every step reads the plain numbers, which is faster: ints such as
    `batches` and `samples_in_epoch`, and seconds such as `total_seconds`.

    Args:
        iteration: Finished iterations of an outer loop, in runs that have one.
        epoch: Finished epochs.
        batch: Trained batches.
        sample: Trained samples, over all ranks.
        token: Trained tokens, over all ranks.
        epoch_in_iteration: Finished epochs of the current iteration.
        token_in_iteration: Tokens of the current iteration.
        batch_in_epoch: Batches of the current epoch.
        sample_in_epoch: Samples of the current epoch.
        token_in_epoch: Tokens of the current epoch.
        total_wct: Wall-clock time of training, measured on rank 0: a `timedelta` or seconds; None: zero.
        iteration_wct: Wall-clock time of the current iteration.
        epoch_wct: Wall-clock time of the current epoch.
        batch_wct: Wall-clock time of the last batch.

    Raises:
        ValueError: A counter is a `Time` of another unit.

    Example:
        >>> Timestamp(batch=2).to_next_batch(samples=8).batch == "3ba"
        True
    """

    __slots__ = tuple(_NUMBERS.values())

    # For type checkers.
    iterations: int
    epochs: int
    batches: int
    samples: int
    tokens: int
    epochs_in_iteration: int
    tokens_in_iteration: int
    batches_in_epoch: int
    samples_in_epoch: int
    tokens_in_epoch: int
    total_seconds: float
    iteration_seconds: float
    epoch_seconds: float
    batch_seconds: float

    def __init__(
        self,
        iteration: SupportsIndex | Time[int] = 0,
        epoch: SupportsIndex | Time[int] = 0,
        batch: SupportsIndex | Time[int] = 0,
        sample: SupportsIndex | Time[int] = 0,
        token: SupportsIndex | Time[int] = 0,
        epoch_in_iteration: SupportsIndex | Time[int] = 0,
        token_in_iteration: SupportsIndex | Time[int] = 0,
        batch_in_epoch: SupportsIndex | Time[int] = 0,
        sample_in_epoch: SupportsIndex | Time[int] = 0,
        token_in_epoch: SupportsIndex | Time[int] = 0,
        total_wct: datetime.timedelta | float | None = None,
        iteration_wct: datetime.timedelta | float | None = None,
        epoch_wct: datetime.timedelta | float | None = None,
        batch_wct: datetime.timedelta | float | None = None,
    ) -> None:
        self.iterations = _count_of("iteration", iteration)
        self.epochs = _count_of("epoch", epoch)
        self.batches = _count_of("batch", batch)
        self.samples = _count_of("sample", sample)
        self.tokens = _count_of("token", token)
        self.epochs_in_iteration = _count_of("epoch_in_iteration", epoch_in_iteration)
        self.tokens_in_iteration = _count_of("token_in_iteration", token_in_iteration)
        self.batches_in_epoch = _count_of("batch_in_epoch", batch_in_epoch)
        self.samples_in_epoch = _count_of("sample_in_epoch", sample_in_epoch)
        self.tokens_in_epoch = _count_of("token_in_epoch", token_in_epoch)
        self.total_seconds = _seconds(total_wct)
        self.iteration_seconds = _seconds(iteration_wct)
        self.epoch_seconds = _seconds(epoch_wct)
        self.batch_seconds = _seconds(batch_wct)

    iteration: Time[int] = _counter("iteration")
    epoch: Time[int] = _counter("epoch")
    batch: Time[int] = _counter("batch")
    sample: Time[int] = _counter("sample")
    token: Time[int] = _counter("token")
    epoch_in_iteration: Time[int] = _counter("epoch_in_iteration", settable=True)  # may be missing in checkpoints
    token_in_iteration: Time[int] = _counter("token_in_iteration")
    batch_in_epoch: Time[int] = _counter("batch_in_epoch")
    sample_in_epoch: Time[int] = _counter("sample_in_epoch")
    token_in_epoch: Time[int] = _counter("token_in_epoch")
    total_wct: datetime.timedelta = _clock("total_wct")
    iteration_wct: datetime.timedelta = _clock("iteration_wct")
    epoch_wct: datetime.timedelta = _clock("epoch_wct")
    batch_wct: datetime.timedelta = _clock("batch_wct")

    def get(self, unit: str | TimeUnit) -> Time[int]:
        """Return the total count in a unit; for seconds the wall-clock time, rounded down.

        Raises:
            ValueError: The unit is unknown, or "dur": a timestamp does not know the length of the run.
        """
        unit = TimeUnit(unit)
        return Time(self.count(unit), unit)

    def count(self, unit: TimeUnit) -> int:
        """Return the value of `get` as a plain int, which is faster."""
        name = _TOTAL_OF.get(unit)
        if name is not None:
            count: int = getattr(self, name)
            return count
        if unit is TimeUnit.SECOND:
            return int(self.total_seconds)
        raise ValueError(
            "`unit` must not be 'dur': a timestamp does not know the length of the run. "
            "Use `state.get_elapsed_duration()`."
        )

    def _compare(self, other: TimeInput) -> tuple[Any, Any] | None:
        if isinstance(other, str):
            other = Time.from_timestring(other)
        if not isinstance(other, Time):
            return None
        return self.get(other.unit).value, other.value

    def __lt__(self, other: TimeInput) -> bool:
        pair = self._compare(other)
        return NotImplemented if pair is None else pair[0] < pair[1]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Timestamp):
            return self._fields() == other._fields()
        if isinstance(other, (str, Time)):
            pair = self._compare(other)
            return pair is not None and pair[0] == pair[1]
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def copy(self, **overrides: Any) -> Timestamp:
        """Return a copy with some constructor arguments replaced."""
        return Timestamp(**{**self._fields(), **{k: v for k, v in overrides.items() if v is not None}})

    def to_next_batch(
        self,
        samples: float | Time[int] = 0,
        tokens: int | Time[int] = 0,
        duration: datetime.timedelta | float | None = None,
    ) -> Timestamp:
        """Return the timestamp after one more batch.

        Args:
            samples: Samples in the batch, over all ranks.
            tokens: Tokens in the batch, over all ranks.
            duration: Wall-clock time of the batch, a `timedelta` or seconds; None: zero.
        """
        if type(samples) is not int or type(tokens) is not int:
            samples, tokens = int(samples), int(tokens)
        if type(duration) is not float:
            duration = _seconds(duration)
        # For speed: called at every step, so without `__init__` and its checks.
        new = _NEW(Timestamp)
        new.iterations = self.iterations
        new.epochs = self.epochs
        new.batches = self.batches + 1
        new.samples = self.samples + samples
        new.tokens = self.tokens + tokens
        new.epochs_in_iteration = self.epochs_in_iteration
        new.tokens_in_iteration = self.tokens_in_iteration + tokens
        new.batches_in_epoch = self.batches_in_epoch + 1
        new.samples_in_epoch = self.samples_in_epoch + samples
        new.tokens_in_epoch = self.tokens_in_epoch + tokens
        new.total_seconds = self.total_seconds + duration
        new.iteration_seconds = self.iteration_seconds + duration
        new.epoch_seconds = self.epoch_seconds + duration
        new.batch_seconds = duration
        return new

    def to_next_epoch(self, duration: datetime.timedelta | float | None = None) -> Timestamp:
        """Return the timestamp after the end of the epoch.

        Args:
            duration: Wall-clock time to add to those of the run and of the iteration, as in `to_next_batch`.
        """
        duration = _seconds(duration)
        return self.copy(
            epoch=self.epochs + 1,
            epoch_in_iteration=self.epochs_in_iteration + 1,
            batch_in_epoch=0,
            sample_in_epoch=0,
            token_in_epoch=0,
            total_wct=self.total_seconds + duration,
            iteration_wct=self.iteration_seconds + duration,
            epoch_wct=0.0,
            batch_wct=0.0,
        )

    def to_next_iteration(self, duration: datetime.timedelta | float | None = None) -> Timestamp:
        """Return the timestamp after the end of the iteration.

        Args:
            duration: Wall-clock time to add to that of the run, as in `to_next_batch`.
        """
        return self.copy(
            iteration=self.iterations + 1,
            epoch_in_iteration=0,
            token_in_iteration=0,
            batch_in_epoch=0,
            sample_in_epoch=0,
            token_in_epoch=0,
            total_wct=self.total_seconds + _seconds(duration),
            iteration_wct=0.0,
            epoch_wct=0.0,
            batch_wct=0.0,
        )

    def _fields(self) -> dict[str, Any]:
        """Return the constructor arguments."""
        return {name: getattr(self, attribute) for name, attribute in _NUMBERS.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the constructor arguments: an int per counter, and the float seconds of each wall-clock time."""
        return self._fields()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the counters and wall-clock times from a saved state.

        Args:
            state: The result of `state_dict`, or of an older version, with `timedelta` objects. Missing keys are zero.
        """
        for name, attribute in _COUNTERS.items():
            setattr(self, attribute, int(state.get(name, 0)))
        for name, attribute in _CLOCKS.items():
            setattr(self, attribute, _seconds(state.get(name)))

    def __repr__(self) -> str:
        return f"Timestamp({', '.join(f'{k}={v!r}' for k, v in self._fields().items())})"


# MosaicML's Composer stores `Time` objects and timedeltas under these names, and its users set them.
for _name in _COUNTERS:
    setattr(Timestamp, f"_{_name}", _counter(_name, settable=True))
for _name in _CLOCKS:
    setattr(Timestamp, f"_{_name}", _clock(_name, settable=True))

_NEW = object.__new__
