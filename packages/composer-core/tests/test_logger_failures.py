"""A logger that fails does not end the training."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from composer.core import Callback, Engine, State
from composer.core.logging import log_failure_count
from composer.loggers import Logger, LoggerDestination

METHODS: dict[str, tuple[Any, ...]] = {
    "log_metrics": ({"a": 1.0},),
    "log_hyperparameters": ({"a": 1},),
    "log_traces": ({"a": 1},),
    "log_table": (["a"], [[1]]),
    "log_images": (torch.zeros(1, 2, 2),),
    "upload_file": ("name", "path"),
}


class Good(LoggerDestination):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.seen.append(metrics)


class Bad(LoggerDestination):
    """Raises in every method of a destination, and at some events."""

    def __init__(self, error: BaseException | None = None, at_init: BaseException | None = None) -> None:
        self.error, self.at_init = error or RuntimeError("the disk is gone"), at_init

    def _fail(self, *args: Any, **kwargs: Any) -> Any:
        raise self.error

    log_metrics = log_hyperparameters = log_traces = log_table = log_images = upload_file = _fail  # type: ignore[assignment]
    state_dict = load_state_dict = epoch_end = _fail

    def init(self, state: State, logger: Logger) -> None:
        if self.at_init is not None:
            raise self.at_init


def _state(*callbacks: Callback) -> State:
    return State(model=torch.nn.Linear(1, 1), max_duration="1ep", dataloader=[1], callbacks=list(callbacks))


@pytest.mark.parametrize("method", METHODS)
def test_the_first_failure_is_reported_with_its_traceback_and_later_ones_are_counted(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Bad(), Good()
    logger = Logger(_state(), [bad, good])
    with pytest.warns(UserWarning, match=f"`Bad.{method}` failed: RuntimeError: the disk is gone"):
        getattr(logger, method)(*METHODS[method])
    for _ in range(2):  # warnings are errors in tests
        getattr(logger, method)(*METHODS[method])
    assert [RuntimeError] == [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert (3 if method == "log_metrics" else 0) == len(good.seen)
    caplog.clear()
    log_failure_count(bad)

    assert ["`Bad` failed 3 times in this run; the first was reported."] == [r.getMessage() for r in caplog.records]


def test_a_failure_at_an_event_is_reported_and_the_end_reports_the_count(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(_state(Bad()))
    engine.run_event("init")
    with pytest.warns(UserWarning, match="`Bad.epoch_end` failed"):
        engine.run_event("epoch_end")
    engine.run_event("epoch_end")
    with caplog.at_level(logging.WARNING):
        engine.close()

    assert "`Bad` failed 2 times in this run; the first was reported." == caplog.messages[-1]


def test_a_logger_whose_state_cannot_be_saved_or_restored_does_not_keep_the_run_from_it() -> None:
    bad = Bad()
    state = _state(bad)
    with pytest.warns(UserWarning, match="`Bad.state_dict` failed"):
        saved = state.state_dict()
    assert {} == saved["callbacks"]["Bad"]
    with pytest.warns(UserWarning, match="`Bad.load_state_dict` failed"):
        _state(Bad()).load_state_dict(saved, Logger(_state()))


def test_a_service_that_is_down_when_the_run_is_set_up_does_not_end_it() -> None:
    engine = Engine(_state(Bad(at_init=ConnectionRefusedError("nobody listens"))))
    with pytest.warns(UserWarning, match="`Bad.init` failed: ConnectionRefusedError: nobody listens"):
        engine.run_event("init")
    engine.close()


def test_a_mistake_that_shows_when_the_run_is_set_up_is_raised() -> None:
    engine = Engine(_state(Bad(at_init=FileExistsError("choose another file"))))
    with pytest.raises(FileExistsError, match="choose another file"):
        engine.run_event("init")
    engine.close()


def test_on_error_raise_ends_the_run() -> None:
    bad = Bad()
    bad.on_error = "raise"
    with pytest.raises(RuntimeError, match="the disk is gone"):
        Logger(_state(), bad).log_metrics({"a": 1.0})


def test_an_interrupt_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        Logger(_state(), Bad(KeyboardInterrupt())).log_metrics({"a": 1.0})


def test_a_callback_that_is_no_logger_still_raises() -> None:
    class Strict(Callback):
        def epoch_end(self, state: State, logger: Logger) -> None:
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        Engine(_state(Strict())).run_event("epoch_end")
