"""`DeliveryDeadline`: how long the end of a run waits for services that fail."""

from __future__ import annotations

import time

import pytest

from composer.utils.delivery import DeliveryDeadline


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
