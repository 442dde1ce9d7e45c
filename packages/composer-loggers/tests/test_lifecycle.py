"""Tests that every logger must pass."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch

import composer.loggers
from composer.core import Event
from composer.loggers import LoggerDestination
from composer.loggers.console_logger import ConsoleLogger
from composer.loggers.file_logger import FileLogger
from composer.loggers.in_memory_logger import InMemoryLogger
from composer.loggers.progress_bar_logger import ProgressBarLogger
from composer.loggers.run_recorder import RunRecorder

MAKERS: dict[str, Callable[[], LoggerDestination]] = {
    "ConsoleLogger": lambda: ConsoleLogger(stream=io.StringIO()),
    "FileLogger": FileLogger,
    "InMemoryLogger": InMemoryLogger,
    "ProgressBarLogger": lambda: ProgressBarLogger(stream=io.StringIO()),
    "RunRecorder": RunRecorder,
}
each = pytest.mark.parametrize("name", list(MAKERS))


@each
def test_the_name_is_found_and_accepts_values_on_the_device(name: str) -> None:
    logger = MAKERS[name]()
    points = {point.name: point for point in entry_points(group="composer.loggers")}
    logger.close(None, None)  # type: ignore[arg-type]

    assert type(logger) is points[name].load() is getattr(composer.loggers, name)
    assert name in composer.loggers.__all__
    assert logger.accepts_deferred is True


@each
def test_it_survives_several_fits_and_a_new_run(start: Any, name: str) -> None:
    logger = MAKERS[name]()
    for _ in range(2):
        run = start(logger, "1ep", 2, eval_every=2, eval_batches=1)
        run.fit()
        run.state.max_duration = "2ep"
        run.fit()
        run.close()
        run.close()
        logger.close(run.state, run.logger)


@each
def test_it_can_be_closed_without_a_fit(start: Any, name: str) -> None:
    run = start(MAKERS[name]())
    run.close()


@each
def test_it_survives_an_exception_in_the_middle(start: Any, name: str) -> None:
    run = start(MAKERS[name](), "5ba", 5)
    run.fit(stop_after=2)
    run.fit()
    assert run.state.timestamp.batch == "5ba"


@each
def test_it_can_evaluate_alone(start: Any, name: str) -> None:
    run = start(MAKERS[name]())
    run.state.set_dataloader()
    run.engine.run_event("eval_standalone_start")
    run.evaluate()
    run.engine.run_event("eval_standalone_end")


@each
def test_it_accepts_every_event_in_any_order(start: Any, name: str) -> None:
    run = start(MAKERS[name](), "3ba", 3)
    for event in Event:
        if event is not Event.INIT:
            run.engine.run_event(event)


@each
def test_it_takes_everything_that_can_be_logged(start: Any, name: str) -> None:
    run = start(MAKERS[name](), "2ba", 2)
    run.engine.run_event("fit_start")
    run.logger.log_hyperparameters({"nested": {"a": [1, None]}, "object": torch.nn.Linear(1, 1)})
    run.logger.log_table(["a"], [[torch.tensor(1)]])
    run.logger.log_traces({"a": 1})
    run.logger.log_images(torch.zeros(3, 4, 4))
    run.logger.log_metrics({"loss/train/odd": "text", "a": None, "b": torch.zeros(2), "c": {"d": 1}, "e": [1, "x"]})
    run.train_batch()
    run.logger.upload_file("a", "b")
    run.engine.run_event("fit_end")


@each
def test_its_state_survives_a_round_trip(start: Any, name: str) -> None:
    logger = MAKERS[name]()
    run = start(logger, "5ba", 5)
    run.fit(stop_after=2)
    saved = copy.deepcopy(logger.state_dict())
    logger.load_state_dict(saved)

    assert saved == logger.state_dict()


@each
def test_another_rank_logs_as_well(start: Any, name: str, local_rank: Callable[[int], None]) -> None:
    local_rank(1)
    run = start(MAKERS[name](), "1ep", 2, eval_every=1)
    run.fit()
    run.close()
