"""The platform's client needs an account, so a double stands for its one function, with its signature."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import time
from concurrent.futures import Future
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import composer.loggers
from composer.core import Event, Time
from composer.loggers import DeferredValue, LoggerDestination, mosaicml_logger
from composer.loggers.mosaicml_logger import (
    MosaicMLLogger,
    dict_to_str,
    exception_to_json_serializable_dict,
    format_data_to_json_serializable,
)
from composer.testing import LoggedRun


class Platform(ModuleType):
    """The module `mcli`."""

    def __init__(self) -> None:
        super().__init__("mcli")
        self.requests: list[dict[str, Any]] = []
        self.runs: set[str] = set()
        self.failure: Exception | None = None
        self.received = threading.Event()

    def update_run_metadata(
        self, run: str, metadata: dict[str, Any], *, timeout: float = 10, future: bool = False, protect: bool = False
    ) -> Future[None]:
        assert future
        assert protect
        result: Future[None] = Future()
        if self.failure is None:
            self.requests.append(metadata)
            self.runs.add(run)
            result.set_result(None)
            self.received.set()
        else:
            result.set_exception(self.failure)
        return result

    @property
    def known(self) -> dict[str, Any]:
        return {key: value for request in self.requests for key, value in request.items()}


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Platform:
    module = Platform()
    monkeypatch.setitem(sys.modules, "mcli", module)
    monkeypatch.setenv("RUN_NAME", "run-abc")
    return module


def test_the_names_are_found() -> None:
    [point] = entry_points(group="composer.loggers", name="MosaicMLLogger")

    assert MosaicMLLogger is point.load() is composer.loggers.MosaicMLLogger
    names = "MOSAICML_PLATFORM MOSAICML_ACCESS_TOKEN_FILE RUN_NAME MOSAICML_LOG_DIR MOSAICML_GPU_LOG_FILE_PREFIX"
    constants = [value for name, value in vars(mosaicml_logger).items() if name.endswith("_ENV_VAR")]
    assert set(names.split()) == set(constants)


def test_the_latest_values_are_sent(platform: Platform) -> None:
    logger = MosaicMLLogger(ignore_keys=["time/*", "secret"])
    logger.log_metadata({"early": [1, 2]})
    run = LoggedRun(logger, duration="2ep")
    run.logger.log_hyperparameters({"lr": 0.1, "secret": "x"})
    run.state.load_path = "s3://me:secret@there/ep1.pt"
    before = time.time()
    run.engine.run_event("after_load")
    run.fit()
    run.state.timestamp = run.state.timestamp.to_next_epoch()
    run.engine.run_event("epoch_end")
    run.close()
    run.close()

    known = platform.known
    assert platform.runs == {"run-abc"}
    expected = {
        "early": [1, 2],
        "lr": 0.1,
        "loss": 5.0,
        "accuracy": 1.25,
        "checkpoint_resumed_path": "s3://me:...@there/ep1.pt",
    }
    assert {f"mosaicml/{key}": value for key, value in expected.items()}.items() <= known.items()
    assert not {"mosaicml/time/batch", "mosaicml/secret"} & known.keys()
    for name in ("model_initialized_time", "train_started_time", "train_finished_time"):
        assert before - 60 < known[f"mosaicml/{name}"] <= time.time()
    assert len(platform.requests) <= 4  # one at the start of training, one at its end, one at close


@pytest.mark.parametrize(
    ("duration", "batches", "expected"),
    [
        ("2ep", 3, {"training_progress": "[epoch=1/2]", "training_sub_progress": "[batch=3/5]"}),
        ("2ep", 0, {"training_progress": "[epoch=0/2]", "training_sub_progress": "[batch=0/5]"}),
        ("10ba", 3, {"training_progress": "[batch=3/10]"}),
        ("20sp", 3, {"training_progress": "[sample=6/20]"}),
    ],
)
def test_progress_is_told_in_the_unit_of_the_run(
    platform: Platform, duration: str, batches: int, expected: dict[str, str]
) -> None:
    run = LoggedRun(MosaicMLLogger(), duration=duration)
    run.fit(batches, end=False)
    run.close()

    progress = {key.removeprefix("mosaicml/"): value for key, value in platform.known.items() if "progress" in key}
    assert expected == progress


def test_metadata_can_be_sent_now(platform: Platform) -> None:
    logger = MosaicMLLogger(log_interval=3600)
    logger.log_metadata({"a": 1})
    logger._flush_metadata()
    assert not platform.requests
    logger.log_metadata({"b": 2}, force_flush=True)

    assert platform.received.wait(30)
    assert {"mosaicml/a": 1, "mosaicml/b": 2} == platform.requests[0]
    platform.received.clear()
    logger.log_exception(ValueError("too large"))
    assert platform.received.wait(30)
    assert "too large" == platform.requests[1]["mosaicml/exception"]["message"]
    logger.post_close()


class WandBLogger(LoggerDestination):
    run_url = "https://wandb.example/run"


class MLFlowLogger(LoggerDestination):
    run_url = None  # of a store on the disk


def test_the_pages_of_other_services_are_sent(platform: Platform) -> None:
    run = LoggedRun(MosaicMLLogger(), WandBLogger(), MLFlowLogger())
    run.engine.run_event("after_load")
    run.close()

    assert "https://wandb.example/run" == platform.known["mosaicml/wandb/run_url"]
    assert "mosaicml/mlflow/run_url" not in platform.known


def test_the_end_of_uploads_is_noted(platform: Platform) -> None:
    uploader = SimpleNamespace(pending=1)
    saver = WandBLogger()
    saver.all_saved_checkpoints_to_timestamp = {}
    saver.remote_uploader = uploader
    logger = MosaicMLLogger()
    run = LoggedRun(logger)
    run.state.callbacks = [*run.state.callbacks, saver]
    run.fit(1, end=False)
    saver.all_saved_checkpoints_to_timestamp["ep1.pt"] = None
    run.engine.run_event("batch_end")
    logger._sender.flush()
    assert "mosaicml/checkpoint_uploaded_time" not in platform.known
    uploader.pending = 0
    run.engine.run_event("batch_end")
    run.close()

    assert platform.known["mosaicml/checkpoint_uploaded_time"] <= time.time()


def test_a_failed_request_is_a_warning_and_its_values_are_sent_with_the_next(platform: Platform) -> None:
    platform.failure = ConnectionError("no route")
    run = LoggedRun(MosaicMLLogger())
    run.logger.log_metrics({"a": 1})
    with pytest.warns(UserWarning, match="`MosaicMLLogger` failed to log: ConnectionError: no route"):
        run.engine.run_event("fit_end")
    platform.failure = None
    run.logger.log_metrics({"b": 2})
    run.close()

    assert {"mosaicml/a": 1, "mosaicml/b": 2}.items() <= platform.requests[-1].items()


def test_a_failed_request_can_stop_the_run(platform: Platform) -> None:
    platform.failure = ConnectionError("no route")
    run = LoggedRun(MosaicMLLogger(ignore_exceptions=False))
    run.logger.log_metrics({"a": 1})
    with pytest.raises(RuntimeError, match="failed to log: ConnectionError: no route"):
        run.engine.run_event("fit_end")
    run.close()


def test_it_does_nothing_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcli", None)
    monkeypatch.setenv("RUN_NAME", "run-abc")
    with pytest.warns(UserWarning, match="`MosaicMLLogger` does nothing: `mcli` is not installed") as warned:
        logger = MosaicMLLogger()
    run = LoggedRun(logger)  # another warning would be an error
    run.fit()
    logger.log_metadata({"a": 1}, force_flush=True)
    run.close()

    assert 1 == len(warned)


@pytest.mark.parametrize("missing", ["run name", "rank zero"])
def test_it_does_nothing_elsewhere(platform: Platform, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "run name":
        monkeypatch.delenv("RUN_NAME")
    else:
        monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    run = LoggedRun(MosaicMLLogger())
    computed: list[int] = []
    run.logger.log_metrics({"a": DeferredValue(lambda: computed.append(1))})
    run.fit()
    run.close()

    assert computed == [1]
    assert platform.requests == []


def test_it_survives_all_events_copies_and_a_new_run(platform: Platform) -> None:
    logger = MosaicMLLogger()
    run = LoggedRun(logger)
    run.fit(1)
    for copied in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        copied.close(None, None)
        copied.post_close()
    for event in Event:
        if event is not Event.INIT:
            run.engine.run_event(event)
    run.close()
    platform.requests.clear()
    again = LoggedRun(logger)
    again.fit(2)
    again.close()

    assert 2.0 == platform.known["mosaicml/loss"]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`log_interval`"):
        MosaicMLLogger(log_interval=0)


class Failure(Exception):
    def __init__(self) -> None:
        super().__init__("it failed")
        self.code, self._private = torch.tensor(3), 1


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, None),
        ("a", "a"),
        (True, True),
        (1.5, 1.5),
        (torch.tensor([2]), 2),
        (torch.zeros(2, 3), "Tensor of shape (2, 3)"),
        (np.float32(0.5), 0.5),
        (np.zeros(2), "ndarray of shape (2,)"),
        ({1: (torch.tensor(1.0), [None])}, {"1": [1.0, [None]]}),
        (Time(1, "ba"), "Time(1, TimeUnit.BATCH)"),
        (Failure(), {"class": "Failure", "message": "it failed", "attributes": {"code": 3}}),
    ],
)
def test_values_become_json(data: Any, expected: Any) -> None:
    converted = format_data_to_json_serializable(data)

    assert expected == converted or isinstance(data, Time)
    assert isinstance(converted, type(expected))


def test_exceptions_and_dicts_become_text() -> None:
    assert "it failed" == exception_to_json_serializable_dict(Failure())["message"]
    assert "a: 1, b: x" == dict_to_str({"a": 1, "b": "x"})
