from __future__ import annotations

import copy
import json
import math
import os
import pickle
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from PIL import Image

import composer.loggers
from composer.core import Event
from composer.loggers import DeferredValue
from composer.loggers.mlflow_logger import MLFlowLogger, _MLFlowRun
from composer.loggers.spi import Logged
from composer.utils.delivery import DeliveryDeadline


def only_run(client: MlflowClient, arguments: dict[str, Any]) -> Any:
    experiment = client.get_experiment_by_name(arguments["experiment_name"])
    [run] = client.search_runs([experiment.experiment_id])
    return run


def history(client: MlflowClient, run_id: str, key: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, key)]


def test_the_name_is_found() -> None:
    [point] = entry_points(group="composer.loggers", name="MLFlowLogger")

    assert MLFlowLogger is point.load() is composer.loggers.MLFlowLogger


def test_a_run_is_read_back_as_logged(start: Any, client: Any, arguments: Any) -> None:
    run = start(MLFlowLogger(**arguments, tags={"team": "a"}, run_group="group"))
    run.logger.log_hyperparameters({"lr": 0.1, "sizes": [1, 2], "strange: #key": None})
    run.fit()
    run.close()

    stored = only_run(client, arguments)
    assert [(n, n + 1) for n in range(5)] == history(client, stored.info.run_id, "loss")
    assert [(n, (n + 1) / 4) for n in range(5)] == history(client, stored.info.run_id, "accuracy")
    assert {"lr": "0.1", "sizes": "[1, 2]", "strange: .key": "None"} == stored.data.params
    assert stored.info.run_name == "my-run"
    assert stored.info.status == "FINISHED"
    assert {"team": "a", "run_group": "group", "run_name": "my-run"}.items() <= stored.data.tags.items()


def test_names_of_the_environment(start: Any, client: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_NAME", "from-outside")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", arguments["experiment_name"])
    start(MLFlowLogger(**{**arguments, "experiment_name": None}, run_name="mine"))

    stored = only_run(client, arguments)
    assert stored.info.run_name == "mine"
    assert stored.data.tags["run_name"] == "from-outside"


def test_the_default_experiment(start: Any, client: Any, arguments: Any) -> None:
    start(MLFlowLogger(**{**arguments, "experiment_name": None}))

    assert client.get_experiment_by_name("my-mlflow-experiment") is not None


def test_all_kinds_of_values(start: Any, client: Any, arguments: Any) -> None:
    run = start(MLFlowLogger(**arguments))
    values = {
        "int": (3, 3),
        "bool": (True, 1),
        "bf16": (torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
        "numpy": (np.float64(0.25), 0.25),
        "array of one": (np.ones(1), 1),
    }
    run.logger.log_metrics({key: value for key, (value, _) in values.items()})
    run.logger.log_metrics({"nan": torch.tensor(float("nan")), "infinite": float("inf")})
    run.logger.log_metrics({"text": "a", "vector": torch.zeros(2), "none": None})
    run.close()

    metrics = only_run(client, arguments).data.metrics
    assert {*values, "nan", "infinite"} == set(metrics)
    assert {key: expected for key, (_, expected) in values.items()}.items() <= metrics.items()
    assert math.isnan(metrics["nan"])
    assert metrics["infinite"] > 1e308


@pytest.mark.parametrize(
    ("key", "stored_key"),
    [
        ("l2_norm/grad/module.0", "l2_norm/grad/module.0"),
        ("a#b{c}", "a.b.c."),
        ("a//b", "a/b"),
        ("/a/", "a"),
        ("../../a", "_a"),
        ("..", "_"),
        ("x" * 300, "x" * 250),
    ],
)
def test_names_that_mlflow_refuses_are_changed(
    start: Any, client: Any, arguments: Any, key: str, stored_key: str
) -> None:
    run = start(MLFlowLogger(**arguments))
    run.logger.log_metrics({key: 1})
    run.close()

    assert [stored_key] == list(only_run(client, arguments).data.metrics)


def test_one_bad_value_costs_nothing_else(start: Any, client: Any, arguments: Any) -> None:
    run = start(MLFlowLogger(**arguments))
    run.logger.log_metrics({"a": 10**400, 3: 4}, 0)
    run.logger.log_metrics({"a": 1}, 1)
    run.close()

    run_id = only_run(client, arguments).info.run_id
    assert [(0, sys.float_info.max), (1, 1)] == history(client, run_id, "a")
    assert [(0, 4)] == history(client, run_id, "3")


def test_a_request_that_fails_costs_no_other_and_its_values_are_sent_again() -> None:
    sent: list[list[Any]] = []
    busy = [OSError("busy"), None, None]

    def log_batch(run_id: str, metrics: list[Any]) -> None:
        error = busy.pop(0)
        if error is not None:
            raise error
        sent.append([(metric.key, metric.step) for metric in metrics])

    empty = SimpleNamespace(data=SimpleNamespace(params={}))
    run = _MLFlowRun(SimpleNamespace(log_batch=log_batch, get_run=lambda _: empty), "id", {}, repeat_after=100)
    values = {f"m{i}": 1.0 for i in range(1001)}
    with pytest.raises(OSError, match="busy"):
        run.send([Logged(values, 0, 0.0)])
    assert sent == [[("m1000", 0)]]
    run.send([Logged(values, 1, 0.0)])
    assert sent[1] == [(f"m{i}", 1) for i in range(1000)]


def test_unchanged_values_are_sent_now_and_then(start: Any, client: Any, arguments: Any) -> None:
    logger = MLFlowLogger(**arguments, log_duplicated_metric_every_n_steps=4)
    run = start(logger)
    for step in range(10):
        run.logger.log_metrics({"same": torch.tensor(1.0), "other": step}, step)
    run.engine.run_event("fit_end")
    assert {"same": (1.0, 8), "other": (9.0, 9)} == logger._metrics_cache
    run.close()

    run_id = only_run(client, arguments).info.run_id
    assert [(0, 1), (4, 1), (8, 1)] == history(client, run_id, "same")
    assert 10 == len(history(client, run_id, "other"))


def test_renaming_and_ignoring(start: Any, client: Any, arguments: Any) -> None:
    computed: list[int] = []
    run = start(
        MLFlowLogger(
            **arguments,
            rename_metrics={"loss": "training loss"},
            ignore_metrics=["time/*", "*secret*"],
            ignore_hyperparameters=["path*"],
        )
    )
    run.logger.log_hyperparameters({"paths": 1, "lr": 2})
    run.logger.log_metrics({"loss": 1, "time/batch": 1, "a secret": DeferredValue(lambda: computed.append(1))})
    run.close()

    stored = only_run(client, arguments)
    assert {"training loss": 1} == stored.data.metrics
    assert {"lr": "2"} == stored.data.params
    assert computed == []


def test_many_values_need_few_requests(start: Any, client: Any, arguments: Any) -> None:
    run = start(MLFlowLogger(**arguments))
    for step in range(250):
        run.logger.log_metrics({f"m{i}": step + i for i in range(10)}, step)
    run.close()

    run_id = only_run(client, arguments).info.run_id
    assert [(step, step + 7) for step in range(250)] == history(client, run_id, "m7")


def test_synchronous_logging_has_arrived_when_the_call_returns(start: Any, client: Any, arguments: Any) -> None:
    run = start(MLFlowLogger(**arguments, synchronous=True))
    run.logger.log_metrics({"a": 1})

    assert {"a": 1} == only_run(client, arguments).data.metrics


@pytest.mark.filterwarnings("ignore:The behavior of DataFrame concatenation:FutureWarning")  # of pandas 2
def test_tables_and_images_are_artifacts(start: Any, client: Any, arguments: Any, tmp_path: Path) -> None:
    run = start(MLFlowLogger(**arguments))
    run.logger.log_table(["prompt", "score"], [["a", torch.tensor(0.5)]], "generations")
    run.logger.log_table(["prompt", "score"], [["b", None]], "generations")
    run.logger.log_images(torch.rand(2, 3, 4, 6, dtype=torch.bfloat16), "train")
    run.logger.log_images([np.zeros((4, 6), np.uint8), torch.rand(4, 6, 3)], "mixed", channels_last=True)
    run.logger.log_metrics({"eval/confusion": torch.tensor([[3, 0], [1, 2]])}, 7)
    run.close()

    run_id = only_run(client, arguments).info.run_id
    table = json.loads(Path(client.download_artifacts(run_id, "generations.json", str(tmp_path))).read_text())
    assert {"columns": ["prompt", "score"], "data": [["a", 0.5], ["b", None]]} == table
    names = {artifact.path for artifact in client.list_artifacts(run_id)}
    assert {"generations.json", "train_0_0.png", "train_0_1.png", "mixed_0_0.png", "mixed_0_1.png"} <= names
    path = client.download_artifacts(run_id, "train_0_1.png", str(tmp_path))
    with Image.open(path) as picture:
        assert picture.size == (6, 4)
    matrix = client.download_artifacts(run_id, "eval/confusion_7.json", str(tmp_path))
    assert {"step": 7, "values": [[3, 0], [1, 2]]} == json.loads(Path(matrix).read_text())


def test_images_of_another_shape_are_refused(start: Any, arguments: Any) -> None:
    run = start(MLFlowLogger(**arguments))
    with pytest.raises(ValueError, match=r"`images` must have 2 to 4 dimensions, got shape \(3,\)"):
        run.logger.destinations[0].log_images(torch.zeros(3))


def test_files_are_stored_and_fetched(start: Any, arguments: Any, tmp_path: Path) -> None:
    logger = MLFlowLogger(**arguments, log_artifacts=True)
    assert logger.can_upload_files()
    with pytest.raises(RuntimeError, match=r"`MLFlowLogger.download_file` needs a run"):
        logger.download_file("a", str(tmp_path / "b"))
    run = start(logger)
    source = tmp_path / "ep1.pt"
    source.write_text("weights")
    run.logger.upload_file("{run_name}/checkpoints/ep1.pt", source)
    source.unlink()  # which the contract allows

    target = tmp_path / "fetched.pt"
    logger.download_file("my-run/checkpoints/ep1.pt", str(target))
    assert target.read_text() == "weights"
    assert ["fetched.pt"] == [path.name for path in tmp_path.iterdir() if path.name != "mlruns"]
    with pytest.raises(FileExistsError, match="Pass `overwrite=True`"):
        logger.download_file("my-run/checkpoints/ep1.pt", str(target))
    with pytest.raises(FileNotFoundError, match="'nothing' is not among the artifacts"):
        logger.download_file("nothing", str(target), overwrite=True)


def test_a_server_that_is_down_is_not_one_without_the_file(start: Any, arguments: Any, tmp_path: Path) -> None:
    logger = MLFlowLogger(**arguments, log_artifacts=True)
    start(logger)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # and never answers
        logger.tracking_uri = f"http://127.0.0.1:{listening.getsockname()[1]}"
        logger._deadline = DeliveryDeadline(0.5)
        with pytest.raises(TimeoutError, match="Asking MLflow for its artifacts"):
            logger.download_file("my-run/latest.symlink", str(tmp_path / "b"))


def test_files_are_not_stored_by_default(start: Any, client: Any, arguments: Any, tmp_path: Path) -> None:
    logger = MLFlowLogger(**arguments)
    run = start(logger)
    (tmp_path / "a").write_text("a")
    run.logger.upload_file("a", tmp_path / "a")
    run.close()

    assert not logger.can_upload_files()
    assert [] == client.list_artifacts(only_run(client, arguments).info.run_id)


def test_a_resumed_run_continues_its_run(start: Any, client: Any, arguments: Any) -> None:
    logger = MLFlowLogger(**arguments)
    run = start(logger)
    run.logger.log_hyperparameters({"lr": 0.1})
    run.fit(3)
    saved, time = pickle.loads(pickle.dumps(logger.state_dict())), run.state.timestamp
    run.close()

    logger = MLFlowLogger(**arguments)
    run = start(logger)
    run.logger.log_hyperparameters({"lr": 0.1, "new": 1})
    logger.load_state_dict(saved)
    run.state.timestamp = time
    run.engine.run_event("after_load")
    run.fit(2)
    run.close()

    stored = only_run(client, arguments)
    assert saved["run_id"] == stored.info.run_id == logger._run_id
    assert [(n, n + 1) for n in range(5)] == history(client, stored.info.run_id, "loss")
    assert {"lr": "0.1", "new": "1"} == stored.data.params
    assert stored.info.status == "FINISHED"


def test_only_rank_zero_deletes_the_unused_run(
    start: Any, client: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = MLFlowLogger(**arguments)
    start(first).close()
    loggers = {0: MLFlowLogger(**arguments), 1: MLFlowLogger(**arguments, rank_zero_only=False)}
    runs = {0: start(loggers[0])}
    begun = loggers[0]._run_id
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    ids = [loggers[0]._experiment_id, begun, True]
    monkeypatch.setattr("composer.utils.dist.broadcast_object_list", lambda given: given.__setitem__(slice(3), ids))
    runs[1] = start(loggers[1])
    for rank in (1, 0):
        monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda rank=rank: rank)
        loggers[rank].load_state_dict(first.state_dict())
        runs[rank].engine.run_event("after_load")
        runs[rank].fit(1)
        assert client.get_run(begun).info.lifecycle_stage == ("deleted" if rank == 0 else "active")

    assert [(0, 1)] * 2 == history(client, first._run_id, "loss")


def test_hyperparameters_may_come_first_and_stay_with_their_run(start: Any, client: Any, arguments: Any) -> None:
    logger = MLFlowLogger(**arguments)
    for name in ("first", "second"):
        logger.log_hyperparameters({name: 1})
        start(logger, name=name).close()
        assert {name: "1"} == client.get_run(logger._run_id).data.params


def test_another_run_begins_a_run_of_its_own(start: Any, arguments: Any) -> None:
    logger = MLFlowLogger(**arguments)
    run = start(logger)
    saved = logger.state_dict()
    run.close()
    other = MLFlowLogger(**arguments)
    run = start(other, name="finetuning")
    other.load_state_dict(saved)
    run.engine.run_event("after_load")

    assert saved["run_id"] != other._run_id


@pytest.mark.parametrize(("resume", "runs"), [(True, 1), (False, 2)])
def test_resuming_by_the_tag(start: Any, client: Any, arguments: Any, resume: bool, runs: int) -> None:
    for _ in range(2):
        run = start(MLFlowLogger(**arguments, resume=resume), name="it's mine")
        run.close()

    experiment = client.get_experiment_by_name(arguments["experiment_name"])
    assert runs == len(client.search_runs([experiment.experiment_id]))


def test_a_run_that_is_gone_is_a_warning(start: Any, client: Any, arguments: Any) -> None:
    logger = MLFlowLogger(**arguments)
    run = start(logger)
    logger.load_state_dict({"run_name": "my-run", "run_id": "0" * 32, "experiment_id": "0"})
    with pytest.warns(UserWarning, match="`MLFlowLogger` failed to log: .*not found"):
        run.engine.run_event("after_load")
    run.fit(1)
    run.close()

    assert [(0, 1)] == history(client, only_run(client, arguments).info.run_id, "loss")


@pytest.mark.parametrize(("error", "status"), [(ValueError, "FAILED"), (KeyboardInterrupt, "KILLED")])
def test_the_status_after_an_exception(start: Any, client: Any, arguments: Any, error: Any, status: str) -> None:
    run = start(MLFlowLogger(**arguments))

    def train() -> None:
        try:
            run.fit(2, end=False)
            raise error
        finally:
            run.close()

    with pytest.raises(error):
        train()
    assert status == only_run(client, arguments).info.status


def test_a_crash_loses_nothing_and_importing_is_cheap(client: Any, arguments: Any) -> None:
    code = f"""
import sys, torch
from composer.core import Engine, State
from composer.loggers import Logger, MLFlowLogger
print("mlflow" in sys.modules)
loggers = [MLFlowLogger(**{arguments!r})]
state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="my-run", dataloader=[1], callbacks=loggers)
engine = Engine(state, Logger(state, loggers))
engine.run_event("init")
engine.run_event("fit_start")
for step in range(50):
    engine.logger.log_metrics({{"loss": torch.tensor(float(step))}}, step)
raise ValueError("a crash")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert run.stdout == "False\n"
    assert "ValueError: a crash" in run.stderr
    stored = only_run(client, arguments)
    assert [(n, n) for n in range(50)] == history(client, stored.info.run_id, "loss")
    assert stored.info.status == "FAILED"


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_store_that_cannot_be_reached(start: Any, arguments: Any, on_error: str) -> None:
    logger = MLFlowLogger(**{**arguments, "tracking_uri": "nonsense://nowhere"}, on_error=on_error)
    if on_error == "raise":
        with pytest.raises(RuntimeError, match="`MLFlowLogger` failed to log"):
            start(logger)
        return
    with pytest.warns(UserWarning, match="`MLFlowLogger` failed to log: .*The run continues"):
        run = start(logger)
    run.logger.log_hyperparameters({"a": 1})
    run.fit()
    run.close()


def test_a_failure_while_logging_is_a_warning(start: Any, client: Any, arguments: Any) -> None:
    run = start(MLFlowLogger(**arguments))
    client.delete_run(only_run(client, arguments).info.run_id)  # MLflow then takes nothing more
    with pytest.warns(UserWarning, match="`MLFlowLogger` failed to log: MlflowException"):
        run.fit()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"flush_interval": 0}, "`flush_interval` must be positive, got 0"),
        ({"logging_buffer_seconds": -1}, "`logging_buffer_seconds` must be positive, got -1"),
        ({"log_duplicated_metric_every_n_steps": 0}, "`log_duplicated_metric_every_n_steps` must be positive, got 0"),
        ({"delivery_timeout": 0}, "`delivery_timeout` must be positive, got 0"),
        ({"on_error": "ignore"}, "`on_error` must be 'warn' or 'raise', got 'ignore'"),
        (
            {"model_registry_uri": "databricks-uc", "model_registry_prefix": "catalog"},
            "When registering to Unity Catalog, `model_registry_prefix` must be of the form 'catalog.schema'",
        ),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MLFlowLogger(**changes)


def test_models_are_registered(start: Any, client: Any, arguments: Any, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    logger = MLFlowLogger(**arguments, model_registry_prefix="house", model_registry_uri=arguments["tracking_uri"])
    assert logger.register_model("file:model", "a") is None  # there is no run yet
    start(logger)
    first = logger.register_model(f"file://{tmp_path}/model", "a", tags={"k": "v"})
    second = logger.register_model_with_run_id(f"file://{tmp_path}/model", "a")
    for name in ("await_registration_for", "await_creation_for"):
        logger.register_model(f"file://{tmp_path}/model", "b", **{name: 10})

    assert ("house.a", "1", {"k": "v"}) == (first.name, str(first.version), first.tags)
    assert ("house.a", "2", logger._run_id) == (second.name, str(second.version), second.run_id)
    logger.model_registry_prefix = ""
    with pytest.raises(MlflowException, match="name"):
        logger.register_model(f"file://{tmp_path}/model", "")


def test_a_metric_has_its_new_name() -> None:
    logger = MLFlowLogger(rename_metrics={"loss": "error"})

    assert ("error", "accuracy") == (logger.rename("loss"), logger.rename("accuracy"))


@pytest.mark.parametrize(
    ("uri", "host", "page"),
    [
        ("http://server:5000/", "", "http://server:5000/#/experiments/7/runs/r"),
        ("databricks", "https://house.example/", "https://house.example/ml/experiments/7/runs/r"),
        ("databricks", "", None),
        ("sqlite:///mlflow.db", "", None),
        (None, "", None),
    ],
)
def test_a_run_of_a_server_has_a_page(
    uri: str | None, host: str, page: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_HOST", host)
    logger = MLFlowLogger(tracking_uri=uri)
    assert logger.run_url is None  # there is no run yet
    logger._experiment_id, logger._run_id = "7", "r"

    assert page == logger.run_url


def test_models_are_saved_by_flavor(start: Any, arguments: Any, tmp_path: Path) -> None:
    logger = MLFlowLogger(**arguments)
    logger.save_model("none", path="a")  # there is no run yet
    assert logger.log_model("none") is None
    start(logger)

    for method in (logger.save_model, logger.log_model):
        with pytest.raises(ValueError, match="`flavor` must be a kind of model that MLflow knows"):
            method("entities")
        with pytest.raises(ValueError, match="got 'no_such_thing'"):
            method("no_such_thing")


def test_a_model_is_logged_to_the_store_of_the_logger(
    start: Any, client: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[Any] = []

    def log_model(**kwargs: Any) -> str:
        logged.append((mlflow.active_run().info.run_id, kwargs))
        return "done"

    monkeypatch.setitem(sys.modules, "mlflow.toy", SimpleNamespace(log_model=log_model))
    before = mlflow.get_tracking_uri()
    logger = MLFlowLogger(**arguments)
    start(logger)

    assert logger.log_model("toy", name="m") == "done"
    assert logged == [(logger._run_id, {"name": "m"})]
    assert only_run(client, arguments).info.status == "RUNNING"
    assert mlflow.get_tracking_uri() == before
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_system_metrics_are_logged_by_mlflow(
    start: Any, client: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL", "0.1")
    logger = MLFlowLogger(**{**arguments, "log_system_metrics": True})
    run = start(logger)
    thread = logger._monitor._process
    assert thread.is_alive()
    run.close()

    assert not thread.is_alive()


def test_other_ranks_know_the_run_and_take_part_in_computing(
    start: Any, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = MLFlowLogger(**arguments)
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    monkeypatch.setattr("composer.utils.dist.broadcast_object_list", lambda ids: ids.__setitem__(slice(3), "abc"))
    run = start(logger)
    computed: list[int] = []
    run.logger.log_metrics({"a": DeferredValue(lambda: computed.append(1))})
    run.logger.log_images(torch.zeros(2, 2))
    run.logger.log_table(["a"], [[1]])
    run.fit()
    run.close()

    assert computed == [1]
    assert logger._run_id == "b"


def test_it_survives_several_fits_and_a_new_run(start: Any, client: Any, arguments: Any) -> None:
    logger = MLFlowLogger(**arguments)
    run = start(logger)
    run.fit(2)
    run.fit(2)
    run.close()
    run.close()
    first = logger._run_id
    start(logger, name="second").fit(1)

    assert 4 == len(history(client, first, "loss"))
    assert first != logger._run_id


def test_it_can_be_closed_without_a_fit_or_a_run(start: Any, arguments: Any) -> None:
    start(MLFlowLogger(**arguments)).close()
    MLFlowLogger().post_close()
    assert MLFlowLogger().state_dict() == {}


def test_it_accepts_every_event_in_any_order(start: Any, arguments: Any) -> None:
    run = start(MLFlowLogger(**arguments))
    for event in Event:
        if event is not Event.INIT:
            run.engine.run_event(event)


def test_it_can_be_copied_during_a_run(start: Any, arguments: Any) -> None:
    logger = MLFlowLogger(**arguments)
    start(logger).fit(1)

    for copied in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        assert copied._run_id == logger._run_id
        copied.close(None, None)
        copied.post_close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_does_not_wait_for_the_device(start: Any, client: Any, arguments: Any) -> None:
    run = start(MLFlowLogger(**arguments), device="cuda")
    run.fit()
    run.close()

    stored = only_run(client, arguments)
    assert [(n, n + 1) for n in range(5)] == history(client, stored.info.run_id, "loss")
    assert [(n, (n + 1) / 4) for n in range(5)] == history(client, stored.info.run_id, "accuracy")
