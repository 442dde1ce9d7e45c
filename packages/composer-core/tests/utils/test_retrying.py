"""`retry`: when it tries again, how long it waits, and what it raises."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from composer.utils import retry
from composer.utils.retrying import DeliveryDeadline


class Flaky:
    """Fails a number of times, then returns its arguments."""

    def __init__(self, failures: int, error: type[Exception] = OSError) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error(f"failure {self.calls}")
        return args, kwargs


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


def test_a_failing_call_is_repeated_with_growing_pauses(pauses: list[float]) -> None:
    flaky = Flaky(3)
    call = retry(OSError, num_attempts=4, initial_backoff=2.0, max_jitter=0.5)(flaky)

    assert ((1,), {"x": 2}) == call(1, x=2)
    assert 4 == flaky.calls
    assert all(base <= pause < base + 0.5 for base, pause in zip([2.0, 4.0, 8.0], pauses, strict=True))


def test_the_last_failure_is_raised(pauses: list[float]) -> None:
    flaky = Flaky(9)

    with pytest.raises(OSError, match="failure 3"):
        retry(OSError)(flaky)()
    assert 2 == len(pauses)


@pytest.mark.parametrize("exceptions", [KeyError, (KeyError, IndexError)])
def test_other_exceptions_are_raised_immediately(exceptions: Any, pauses: list[float]) -> None:
    flaky = Flaky(1)

    with pytest.raises(OSError, match="failure 1"):
        retry(exceptions)(flaky)()
    assert [] == pauses


def test_several_exceptions_can_be_named(pauses: list[float]) -> None:
    assert ((), {}) == retry((KeyError, OSError))(Flaky(1))()


def test_the_decorator_works_without_parentheses(pauses: list[float]) -> None:
    calls: list[int] = []

    @retry
    def flaky() -> str:
        """Sometimes fails."""
        calls.append(1)
        if len(calls) < 3:
            raise ValueError
        return "done"

    assert "done" == flaky()
    assert (flaky.__name__, flaky.__doc__) == ("flaky", "Sometimes fails.")


def test_a_function_with_retry_index_gets_the_attempt(pauses: list[float]) -> None:
    seen: list[tuple[int, int]] = []

    @retry(ValueError, num_attempts=3)
    def flaky(x: int, retry_index: int = -1) -> None:
        seen.append((x, retry_index))
        if retry_index < 2:
            raise ValueError

    flaky(7)

    assert [(7, 0), (7, 1), (7, 2)] == seen


def test_waiting_advances_no_seeded_generator(pauses: list[float]) -> None:
    random.seed(0)
    state = random.getstate()

    retry(OSError)(Flaky(2))()

    assert state == random.getstate()


def test_there_must_be_an_attempt() -> None:
    with pytest.raises(ValueError, match="`num_attempts` must be at least 1, got 0"):
        retry(OSError, num_attempts=0)


class Clock:
    """Stands for `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def wait(deadline: DeliveryDeadline, clock: Clock) -> float:
    """Wait in vain, as a sender does; returns how long."""
    since = clock.now
    clock.now += max(0.0, deadline.left(since))
    deadline.record_timeout(since)
    return clock.now - since


def test_services_that_share_a_deadline_are_waited_for_once(clock: Clock) -> None:
    shared = DeliveryDeadline(60)
    several = [shared.for_service() for _ in range(3)]

    assert [60, 0, 0] == [wait(deadline, clock) for deadline in several]
    assert [0, 0, 0] == [wait(deadline, clock) for deadline in several]  # at the next occasion


def test_a_failure_during_the_wait_does_not_prolong_it(clock: Clock) -> None:
    deadline = DeliveryDeadline(60)
    since = clock.now
    clock.now += 50
    deadline.failed()

    assert 10 == deadline.left(since)


def test_the_time_counts_from_the_first_failure(clock: Clock) -> None:
    shared = DeliveryDeadline(60)
    failing, hanging = shared.for_service(), shared.for_service()
    failing.failed()
    clock.now += 40

    assert 20 == wait(failing, clock)
    assert 40 == wait(hanging, clock)


def test_a_service_that_works_loses_nothing_by_others(clock: Clock) -> None:
    shared = DeliveryDeadline(60)
    dead, alive, idle, late = (shared.for_service() for _ in range(4))
    since = clock.now
    wait(dead, clock)
    alive.progressed()
    assert 60 == alive.left(since)
    assert 0 == idle.left(clock.now)
    idle.progressed()  # it is given something now
    assert 60 == idle.left(clock.now)
    late.delivered()
    clock.now += 10
    assert 50 == late.left(since)


def test_a_service_that_failed_immediately_does_not_shorten_the_wait_for_others(clock: Clock) -> None:
    shared = DeliveryDeadline(60)
    failing, other = shared.for_service(), shared.for_service()
    failing.failed()
    clock.now += 3600

    assert 0 == wait(failing, clock)
    assert 60 == other.left(clock.now)


def test_a_separate_timeout_is_not_shared(clock: Clock) -> None:
    shared = DeliveryDeadline(60)
    own = shared.for_service(10)
    wait(shared.for_service(), clock)

    assert 10 == own.left(clock.now)
    wait(own, clock)
    own.delivered()
    assert 10 == own.left(clock.now)
    assert 0 == shared.for_service().left(clock.now)


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
def test_a_deadline_needs_a_positive_time(timeout: float) -> None:
    with pytest.raises(ValueError, match="`timeout` must be positive, got"):
        DeliveryDeadline(timeout)
