"""`retry`: when it tries again, how long it waits, and what it raises."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from composer.utils import retry


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
