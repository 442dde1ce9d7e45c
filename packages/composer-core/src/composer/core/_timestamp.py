"""How far a run has come, in every unit at once."""

from __future__ import annotations

import datetime
from typing import Any, SupportsIndex

from composer.core._time import Time, TimeInput, TimeUnit
from composer.core.serializable import Serializable

__all__ = ["Timestamp"]

_ZERO = datetime.timedelta()
_UNIT_OF = {
    "iteration": TimeUnit.ITERATION,
    "epoch": TimeUnit.EPOCH,
    "batch": TimeUnit.BATCH,
    "sample": TimeUnit.SAMPLE,
    "token": TimeUnit.TOKEN,
    "epoch_in_iteration": TimeUnit.EPOCH,
    "token_in_iteration": TimeUnit.TOKEN,
    "batch_in_epoch": TimeUnit.BATCH,
    "sample_in_epoch": TimeUnit.SAMPLE,
    "token_in_epoch": TimeUnit.TOKEN,
}
_CLOCKS = ("total_wct", "iteration_wct", "epoch_wct", "batch_wct")
_TOTAL_OF = {_UNIT_OF[name]: f"_{name}" for name in ("iteration", "epoch", "batch", "sample", "token")}


def _counter(name: str) -> property:
    attribute, unit = f"_{name}", _UNIT_OF[name]

    def read(self: Timestamp) -> Time[int]:
        return Time(getattr(self, attribute), unit)

    return property(read, doc=f"`{name}` as a `Time` in {unit.value!r}.")


def _clock(name: str) -> property:
    attribute = f"_{name}"

    def read(self: Timestamp) -> datetime.timedelta:
        value: datetime.timedelta = getattr(self, attribute)
        return value

    return property(read, doc=f"`{name}`: wall-clock time, a `datetime.timedelta`.")


class Timestamp(Serializable):
    """How far a run has come: counters and wall-clock times. Immutable; the `to_next_*` methods give the next one.

    Counters are read as `Time` objects (`timestamp.batch == "3ba"`), so they compare with time strings. The counters
    themselves are plain ints in underscored attributes, which the training loop reads because that costs nothing.

    Args:
        iteration: Iterations of the outer loop of runs that have one.
        epoch: Finished epochs.
        batch: Trained batches.
        sample: Trained samples, over all ranks.
        token: Trained tokens, over all ranks.
        epoch_in_iteration: Finished epochs of the current iteration.
        token_in_iteration: Tokens of the current iteration.
        batch_in_epoch: Batches of the current epoch.
        sample_in_epoch: Samples of the current epoch.
        token_in_epoch: Tokens of the current epoch.
        total_wct: Wall-clock training time, that of rank 0 on all ranks; None is zero.
        iteration_wct: The same for the current iteration.
        epoch_wct: The same for the current epoch.
        batch_wct: The same for the last batch.

    Raises:
        ValueError: A counter is given as a `Time` of another unit.

    Example:
        >>> Timestamp(batch=2).to_next_batch(samples=8).batch == "3ba"
        True
    """

    __slots__ = (*(f"_{name}" for name in _UNIT_OF), *(f"_{name}" for name in _CLOCKS))

    # Declared one by one for type checkers.
    _iteration: int
    _epoch: int
    _batch: int
    _sample: int
    _token: int
    _epoch_in_iteration: int
    _token_in_iteration: int
    _batch_in_epoch: int
    _sample_in_epoch: int
    _token_in_epoch: int
    _total_wct: datetime.timedelta
    _iteration_wct: datetime.timedelta
    _epoch_wct: datetime.timedelta
    _batch_wct: datetime.timedelta

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
        total_wct: datetime.timedelta | None = None,
        iteration_wct: datetime.timedelta | None = None,
        epoch_wct: datetime.timedelta | None = None,
        batch_wct: datetime.timedelta | None = None,
    ) -> None:
        given = locals()
        for name, unit in _UNIT_OF.items():
            value = Time.from_input(given[name], unit)
            if value.unit is not unit:
                raise ValueError(f"`{name}` must be counted in {unit.value!r}, got {value!r}.")
            setattr(self, f"_{name}", value.value)
        for name in _CLOCKS:
            setattr(self, f"_{name}", _ZERO if given[name] is None else given[name])

    iteration = _counter("iteration")
    epoch = _counter("epoch")
    batch = _counter("batch")
    sample = _counter("sample")
    token = _counter("token")
    token_in_iteration = _counter("token_in_iteration")
    batch_in_epoch = _counter("batch_in_epoch")
    sample_in_epoch = _counter("sample_in_epoch")
    token_in_epoch = _counter("token_in_epoch")
    total_wct = _clock("total_wct")
    iteration_wct = _clock("iteration_wct")
    epoch_wct = _clock("epoch_wct")
    batch_wct = _clock("batch_wct")

    @property
    def epoch_in_iteration(self) -> Time[int]:
        """`epoch_in_iteration` as a `Time` in 'ep'. Settable, for checkpoints older than iterations."""
        return Time(self._epoch_in_iteration, TimeUnit.EPOCH)

    @epoch_in_iteration.setter
    def epoch_in_iteration(self, value: int | Time[int]) -> None:
        self._epoch_in_iteration = int(value)

    def get(self, unit: str | TimeUnit) -> Time[int]:
        """The total count of a unit; for seconds the whole seconds of the wall-clock time.

        Raises:
            ValueError: The unit is unknown or is a duration, which a timestamp alone does not know.
        """
        unit = TimeUnit(unit)
        return Time(self._count(unit), unit)

    def _count(self, unit: TimeUnit) -> int:
        # The loop asks this every step, so it gets a plain int.
        if unit in _TOTAL_OF:
            count: int = getattr(self, _TOTAL_OF[unit])
            return count
        if unit is TimeUnit.SECOND:
            return int(self._total_wct.total_seconds())
        raise ValueError(
            "`unit` must not be 'dur': a timestamp does not know how long the run is. "
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

    def __le__(self, other: TimeInput) -> bool:
        pair = self._compare(other)
        return NotImplemented if pair is None else pair[0] <= pair[1]

    def __gt__(self, other: TimeInput) -> bool:
        pair = self._compare(other)
        return NotImplemented if pair is None else pair[0] > pair[1]

    def __ge__(self, other: TimeInput) -> bool:
        pair = self._compare(other)
        return NotImplemented if pair is None else pair[0] >= pair[1]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Timestamp):
            return self._fields() == other._fields()
        if isinstance(other, (str, Time)):
            pair = self._compare(other)
            return pair is not None and pair[0] == pair[1]
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def copy(self, **overrides: Any) -> Timestamp:
        """A copy with some constructor arguments replaced."""
        return Timestamp(**{**self._fields(), **{k: v for k, v in overrides.items() if v is not None}})

    def to_next_batch(
        self, samples: float | Time[int] = 0, tokens: int | Time[int] = 0, duration: datetime.timedelta | None = None
    ) -> Timestamp:
        """The timestamp after one more batch.

        Args:
            samples: Samples in the batch, over all ranks.
            tokens: Tokens in the batch, over all ranks.
            duration: Wall-clock time the batch took; None is zero.
        """
        samples, tokens = int(samples), int(tokens)
        duration = _ZERO if duration is None else duration
        # Once per step: slots are copied one by one, without `__init__` and its checks.
        new = _NEW(Timestamp)
        new._iteration = self._iteration
        new._epoch = self._epoch
        new._batch = self._batch + 1
        new._sample = self._sample + samples
        new._token = self._token + tokens
        new._epoch_in_iteration = self._epoch_in_iteration
        new._token_in_iteration = self._token_in_iteration + tokens
        new._batch_in_epoch = self._batch_in_epoch + 1
        new._sample_in_epoch = self._sample_in_epoch + samples
        new._token_in_epoch = self._token_in_epoch + tokens
        new._total_wct = self._total_wct + duration
        new._iteration_wct = self._iteration_wct + duration
        new._epoch_wct = self._epoch_wct + duration
        new._batch_wct = duration
        return new

    def to_next_epoch(self, duration: datetime.timedelta | None = None) -> Timestamp:
        """The timestamp after the end of the epoch.

        Args:
            duration: Wall-clock time to add to the run's and the iteration's; None is zero.
        """
        duration = _ZERO if duration is None else duration
        return self.copy(
            epoch=self._epoch + 1,
            epoch_in_iteration=self._epoch_in_iteration + 1,
            batch_in_epoch=0,
            sample_in_epoch=0,
            token_in_epoch=0,
            total_wct=self._total_wct + duration,
            iteration_wct=self._iteration_wct + duration,
            epoch_wct=_ZERO,
            batch_wct=_ZERO,
        )

    def to_next_iteration(self, duration: datetime.timedelta | None = None) -> Timestamp:
        """The timestamp after the end of the iteration.

        Args:
            duration: Wall-clock time to add to the run's; None is zero.
        """
        return self.copy(
            iteration=self._iteration + 1,
            epoch_in_iteration=0,
            token_in_iteration=0,
            batch_in_epoch=0,
            sample_in_epoch=0,
            token_in_epoch=0,
            total_wct=self._total_wct + (_ZERO if duration is None else duration),
            iteration_wct=_ZERO,
            epoch_wct=_ZERO,
            batch_wct=_ZERO,
        )

    def _fields(self) -> dict[str, Any]:
        """The constructor arguments."""
        return {name: getattr(self, f"_{name}") for name in (*_UNIT_OF, *_CLOCKS)}

    def state_dict(self) -> dict[str, Any]:
        """Return one int per counter, and the float seconds of each clock, under the names of the arguments."""
        # No `timedelta`: loaders that run no code from a file refuse it. The floats give back the exact microseconds.
        clocks = {name: getattr(self, f"_{name}").total_seconds() for name in _CLOCKS}
        return {**self._fields(), **clocks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the saved timestamp.

        Args:
            state: What `state_dict` returned, or that of an older file, with a `timedelta` per clock. What it does not
                have counts as zero.
        """
        for name in _UNIT_OF:
            setattr(self, f"_{name}", int(state.get(name, 0)))
        for name in _CLOCKS:
            value = state.get(name, _ZERO)
            clock = value if isinstance(value, datetime.timedelta) else datetime.timedelta(seconds=value)
            setattr(self, f"_{name}", clock)

    def __repr__(self) -> str:
        return f"Timestamp({', '.join(f'{k}={v!r}' for k, v in self._fields().items())})"


_NEW = object.__new__
