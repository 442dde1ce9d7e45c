from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from composer.core import State, Timestamp
from composer.loggers import DeferredValue, Logger
from composer.loggers.in_memory_logger import InMemoryLogger


@pytest.fixture
def memory(start: Any) -> InMemoryLogger:
    memory = InMemoryLogger()
    start(memory, "2ep", 2)
    return memory


def test_a_run_is_kept_with_its_timestamps(start: Any) -> None:
    memory = InMemoryLogger()
    start(memory, "2ep", 2).fit()

    losses = memory.data["loss/train/total"]

    assert [value for _, value in losses] == [1.0, 2.0, 3.0, 4.0]
    assert all(type(value) is float for _, value in losses)
    assert [timestamp.batch.value for timestamp, _ in losses] == [0, 1, 2, 3]
    assert [timestamp.epoch.value for timestamp, _ in losses] == [0, 0, 1, 1]
    assert memory.most_recent_values["loss/train/total"] == 4.0
    assert str(memory.most_recent_timestamps["loss/train/total"].batch) == "3ba"


def test_metrics_are_kept_as_tensors_and_survive_their_batch(start: Any) -> None:
    memory = InMemoryLogger()
    start(memory, "3ba", 3).fit()

    values = [value for _, value in memory.data["metrics/train/accuracy"]]

    assert torch.equal(torch.tensor([0.01, 0.02, 0.03, 0.03]), torch.stack(values))


def test_values_are_read_on_access_only(memory: InMemoryLogger) -> None:
    loss = DeferredValue.of_tensor(torch.tensor(1.0))
    memory.log_metrics({"loss": loss})

    assert repr(loss) == "DeferredValue(<not read>)"
    assert memory.most_recent_values["loss"] == 1.0
    assert repr(loss) == "DeferredValue(1.0)"


def test_unread_values_do_not_pile_up_for_ever(memory: InMemoryLogger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.loggers.in_memory_logger._MAX_PENDING", 3)
    losses = [DeferredValue.of_tensor(torch.tensor(float(i))) for i in range(4)]
    for loss in losses:
        memory.log_metrics({"loss": loss})

    assert ["not read" not in repr(loss) for loss in losses] == [True, True, True, False]
    assert [value for _, value in memory.data["loss"]] == [0.0, 1.0, 2.0, 3.0]


def test_later_changes_of_what_was_logged_do_not_show(memory: InMemoryLogger) -> None:
    tensor, array, nested = torch.zeros(2, requires_grad=True), np.zeros(2), {"a": [1]}
    with torch.no_grad():
        grown = tensor * 1
    memory.log_metrics({"tensor": tensor, "grown": grown, "array": array, "nested": nested})
    with torch.no_grad():
        tensor += 1
        grown += 1
    array += 1
    nested["a"].append(2)

    values = memory.most_recent_values

    assert torch.equal(torch.zeros(2), values["tensor"])
    assert torch.equal(torch.zeros(2), values["grown"])
    assert not values["tensor"].requires_grad
    assert np.array_equal(np.zeros(2), values["array"])
    assert values["nested"] == {"a": [1]}


def test_the_properties_return_the_dictionaries_themselves(memory: InMemoryLogger) -> None:
    memory.log_metrics({"a": 1})

    assert type(memory.data) is dict
    assert memory.data is memory.data
    assert [(str(timestamp.batch), value) for timestamp, value in memory.data["a"]] == [("0ba", 1)]
    memory.data.clear()
    memory.log_metrics({"a": 2})
    assert [value for _, value in memory.data["a"]] == [2]


def test_a_timeseries_has_the_metric_and_every_field_of_the_timestamp(start: Any) -> None:
    memory = InMemoryLogger()
    start(memory, "4ba", 2).fit()

    series = memory.get_timeseries("loss/train/total")

    assert {"loss/train/total", *Timestamp().state_dict()} == set(series)
    assert series["loss/train/total"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert series["sample"].tolist() == [0, 2, 4, 6]
    assert series["batch_in_epoch"].tolist() == [0, 1, 0, 1]
    assert series["total_wct"].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert pytest.approx(memory.get_timeseries("metrics/train/accuracy")["metrics/train/accuracy"].tolist()) == [
        0.01,
        0.02,
        0.02,
        0.03,
        0.04,
        0.04,
    ]


def test_a_timeseries_of_curves_of_different_lengths_is_an_array_of_objects(memory: InMemoryLogger) -> None:
    memory.log_metrics({"curve": (torch.ones(2), torch.ones(3)), "confusion": torch.eye(2)})
    memory.log_metrics({"curve": (torch.ones(4), torch.ones(5)), "confusion": torch.eye(2)})

    assert [(2, 3), (4, 5)] == [tuple(map(len, value)) for value in memory.get_timeseries("curve")["curve"]]
    assert (2, 2, 2) == memory.get_timeseries("confusion")["confusion"].shape


def test_a_timeseries_of_an_unknown_metric_is_refused(memory: InMemoryLogger) -> None:
    memory.log_metrics({"loss": 1.0})

    with pytest.raises(ValueError, match=r"`metric` must be a logged name, got 'lost'\. Logged names: loss\."):
        memory.get_timeseries("lost")


def test_logging_before_the_run_is_refused() -> None:
    with pytest.raises(RuntimeError, match="must not be called before the run has begun"):
        InMemoryLogger().log_metrics({"a": 1})


def test_hyperparameters_and_tables_are_kept(memory: InMemoryLogger) -> None:
    memory.log_hyperparameters({"lr": 0.1})
    memory.log_hyperparameters({"seed": 3})
    memory.log_table(["prompt", "generation"], [["p0", "g0"], ["p1", "g1"]], name="generations")

    assert memory.hyperparameters == {"lr": 0.1, "seed": 3}
    assert json.loads(memory.tables["generations"]) == {
        "columns": ["prompt", "generation"],
        "data": [["p0", "g0"], ["p1", "g1"]],
    }


def test_the_state_is_known_from_the_start_of_the_run() -> None:
    memory = InMemoryLogger()

    assert memory.state is None

    state = State(model=torch.nn.Linear(1, 1), max_duration="1ep")
    memory.init(state, Logger(state, memory))

    assert state is memory.state
