"""A run, and a store on the local disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from composer.testing import LoggedRun


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # warnings of MLflow's own
        item.add_marker(pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"))
        item.add_marker(pytest.mark.filterwarnings("ignore:For backward compatibility, 'str' dtypes"))


@pytest.fixture
def start() -> Any:
    """Begins a run, which is closed at the end of the test."""
    runs: list[LoggedRun] = []

    def begin(*args: Any, **kwargs: Any) -> LoggedRun:
        runs.append(LoggedRun(*args, **kwargs))
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
