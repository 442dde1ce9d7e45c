"""A training loop by hand, and a store on the local disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient

from composer.core import Engine, State
from composer.loggers import DeferredValue, Logger, LoggerDestination


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # warnings of MLflow's own
        item.add_marker(pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore:For backward compatibility, 'str' dtypes"))


class Run:
    """The loss of batch n, counted from 1, is n."""

    def __init__(self, *loggers: LoggerDestination, name: str = "my-run") -> None:
        self.state = State(model=torch.nn.Linear(1, 1), max_duration="5ba", run_name=name, dataloader=[None] * 5)
        self.state.callbacks = list(loggers)
        self.logger = Logger(self.state, loggers)
        self.engine = Engine(self.state, self.logger)
        self.engine.run_event("init")

    def fit(self, batches: int = 5, *, end: bool = True) -> None:
        self.engine.run_event("fit_start")
        for _ in range(batches):
            number = self.state.timestamp.batch.value + 1
            metric = DeferredValue(lambda number=number: torch.tensor(number / 4))
            self.logger.log_metrics({"loss": DeferredValue.of_tensor(torch.tensor(float(number))), "accuracy": metric})
            self.state.timestamp = self.state.timestamp.to_next_batch(samples=2)
            self.engine.run_event("batch_end")
            metric.expire()
        if end:
            self.engine.run_event("epoch_end")
            self.engine.run_event("fit_end")

    def close(self) -> None:
        self.engine.close()


@pytest.fixture
def start() -> Any:
    """Begins a run, which is closed at the end of the test."""
    runs: list[Run] = []

    def begin(*args: Any, **kwargs: Any) -> Run:
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The URI of a store; to make one takes seconds, so all tests share it, each with an experiment of its own."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


@pytest.fixture
def client(store: str) -> MlflowClient:
    return MlflowClient(store)


@pytest.fixture
def arguments(store: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """For a logger into the store."""
    name = request.node.name.replace("/", " ")
    return {"experiment_name": name, "tracking_uri": store, "log_system_metrics": False}


@pytest.fixture(autouse=True)
def in_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RUN_NAME", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
