from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import composer.loggers
from composer.core import Callback, Engine, State
from composer.loggers import DeferredValue, Logger, LoggerDestination, format_log_data_value


class Recorder(LoggerDestination):
    """Keeps the arguments of every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.calls.append(("metrics", metrics, step))

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        self.calls.append(("hyperparameters", hyperparameters))

    def log_traces(self, traces: dict[str, Any]) -> None:
        self.calls.append(("traces", traces))

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "Table", step: int | None = None
    ) -> None:
        self.calls.append(("table", columns, rows, name, step))

    def log_images(
        self,
        images: Any,
        name: str = "Images",
        channels_last: bool = False,
        step: int | None = None,
        masks: Any = None,
        mask_class_labels: Any = None,
        use_table: bool = True,
    ) -> None:
        self.calls.append(("images", images, name, channels_last, step, masks, mask_class_labels, use_table))

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        self.calls.append(("upload", state, remote_file_name, file_path, overwrite))

    def can_upload_files(self) -> bool:
        return True


class DeferredRecorder(Recorder):
    accepts_deferred = True


@pytest.fixture
def state() -> State:
    return State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="my-run")


class Compute:
    """A metric that counts how often it is computed."""

    def __init__(self, value: float) -> None:
        self.calls = 0
        self.tensor = torch.tensor(value)

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return self.tensor


def test_destinations_may_be_none_one_or_several(state: State) -> None:
    one, two = Recorder(), Recorder()

    assert Logger(state).destinations == ()
    assert (one,) == Logger(state, one).destinations
    assert (one, two) == Logger(state, [one, two]).destinations


def test_everything_reaches_every_destination_in_order(state: State) -> None:
    order = []

    class Ordered(LoggerDestination):
        def __init__(self, name: str) -> None:
            self.name = name

        def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
            order.append(self.name)

    Logger(state, [Ordered("a"), Ordered("b"), Ordered("c")]).log_metrics({})

    assert order == ["a", "b", "c"]


def test_each_kind_of_data_arrives_as_it_was_logged(state: State) -> None:
    recorder = Recorder()
    logger = Logger(state, recorder)
    image = np.zeros((2, 2))

    logger.log_hyperparameters({"lr": 1})
    logger.log_traces({"MixUp": 1})
    logger.log_table(["a"], [[1]])
    logger.log_table(["a"], [[1]], name="t", step=7)
    logger.log_images(image, "i", True, masks={"m": image}, mask_class_labels={0: "cat"}, use_table=False)

    assert [
        ("hyperparameters", {"lr": 1}),
        ("traces", {"MixUp": 1}),
        ("table", ["a"], [[1]], "Table", 0),
        ("table", ["a"], [[1]], "t", 7),
        ("images", image, "i", True, 0, {"m": image}, {0: "cat"}, False),
    ] == recorder.calls


def test_the_step_is_the_number_of_trained_batches_unless_given(state: State) -> None:
    recorder = Recorder()
    logger = Logger(state, recorder)
    state.timestamp = state.timestamp.to_next_batch().to_next_batch()

    logger.log_metrics({"a": 1})
    logger.log_metrics({"a": 1}, step=0)

    assert [step for _, _, step in recorder.calls] == [2, 0]


def test_the_destinations_can_be_replaced(state: State) -> None:
    logger = Logger(state)
    recorder = Recorder()
    logger.destinations = (recorder,)

    logger.log_metrics({"a": 1})

    assert recorder.calls == [("metrics", {"a": 1}, 0)]


def test_upload_file_fills_in_names_and_passes_a_path(state: State) -> None:
    recorder = Recorder()

    Logger(state, recorder).upload_file("{run_name}/r{rank}.txt", "dir/{run_name}.txt", overwrite=True)

    assert [("upload", state, "my-run/r0.txt", Path("dir/my-run.txt"), True)] == recorder.calls


def test_whether_files_can_be_uploaded_depends_on_the_destinations(state: State) -> None:
    class Plain(LoggerDestination):
        pass

    assert not Logger(state).has_file_upload_destination()
    assert not Logger(state, Plain()).has_file_upload_destination()
    assert Logger(state, [Plain(), Recorder()]).has_file_upload_destination()


def test_a_destination_that_stores_no_files_cannot_download() -> None:
    class Plain(LoggerDestination):
        pass

    with pytest.raises(NotImplementedError, match="`Plain` does not store files"):
        Plain().download_file("a", "b")


def test_every_method_of_a_destination_may_be_left_out(state: State) -> None:
    class Plain(LoggerDestination):
        pass

    logger = Logger(state, Plain())
    logger.log_metrics({"a": DeferredValue(lambda: torch.tensor(1.0))})
    logger.log_hyperparameters({})
    logger.log_traces({})
    logger.log_table([], [])
    logger.log_images(np.zeros((1, 1)))
    logger.upload_file("a", "b")


# ---- deferred values ----


def test_a_destination_that_accepts_deferred_values_gets_the_very_dictionary(state: State) -> None:
    compute = Compute(0.5)
    recorder = DeferredRecorder()
    metrics = {"a": DeferredValue(compute)}

    Logger(state, recorder).log_metrics(metrics)

    assert metrics is recorder.calls[0][1]
    assert compute.calls == 0


def test_other_destinations_get_plain_values_converted_once(state: State) -> None:
    compute = Compute(0.5)
    deferred, first, second = DeferredRecorder(), Recorder(), Recorder()
    loss = DeferredValue.of_tensor(torch.tensor(0.25))

    Logger(state, [deferred, first, second]).log_metrics({"loss": loss, "metric": DeferredValue(compute), "lr": 0.1})

    assert {"loss": 0.25, "metric": torch.tensor(0.5), "lr": 0.1} == first.calls[0][1]
    assert type(first.calls[0][1]["loss"]) is float
    assert first.calls[0][1] is second.calls[0][1]
    assert compute.calls == 1


def test_metrics_without_deferred_values_are_not_copied(state: State) -> None:
    recorder = Recorder()
    metrics = {"a": 1}

    Logger(state, recorder).log_metrics(metrics)

    assert metrics is recorder.calls[0][1]


def test_nothing_is_read_for_a_destination_that_takes_no_metrics(state: State) -> None:
    class Files(LoggerDestination):
        def can_upload_files(self) -> bool:
            return True

    files = Files()
    loss = DeferredValue.of_tensor(torch.tensor(0.25))
    Logger(state, files).log_metrics({"loss": loss})

    assert repr(loss) == "DeferredValue(<not read>)"

    seen = []
    files.log_metrics = lambda metrics, step: seen.append(metrics)  # type: ignore[method-assign,assignment]
    Logger(state, files).log_metrics({"loss": loss})

    assert seen == [{"loss": 0.25}]


def test_accepting_deferred_values_must_be_declared_true(state: State) -> None:
    """A mock has any attribute, and every one is truthy; it must see plain values all the same."""
    mock = MagicMock()

    Logger(state, mock).log_metrics({"loss": DeferredValue.of_tensor(torch.tensor(0.25))})

    mock.log_metrics.assert_called_once_with({"loss": 0.25}, 0)


# ---- text ----


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, "None"),
        ("text", '"text"'),
        (3, "3"),
        (True, "True"),
        (0.12345, "0.1235"),
        (torch.tensor(0.5), "0.5000"),
        (torch.tensor([3]), "3"),
        (torch.zeros(2, 3), "Tensor of shape torch.Size([2, 3])"),
        (np.float32(0.5), "0.5000"),
        (np.array(0.5), "0.5000"),
        (np.array([1, 2]), "[1, 2]"),
        ({"a": 1, "b": "c"}, '{ "a": 1, "b": "c", }'),
        ({}, "{ }"),
        ([1, 0.5, [None]], "[1, 0.5000, [None]]"),
        (DeferredValue.of_tensor(torch.tensor(0.5)), "0.5000"),
        (torch.float32, "torch.float32"),
    ],
)
def test_data_as_text(data: Any, expected: str) -> None:
    assert expected == format_log_data_value(data)


# ---- the namespace ----


def test_the_namespace_lists_its_own_names_first_hand() -> None:
    own = {"DeferredValue", "Logger", "LoggerDestination", "format_log_data_value"}

    assert own <= set(composer.loggers.__all__)
    assert own <= set(dir(composer.loggers))
    assert issubclass(LoggerDestination, Callback)


def test_the_modules_of_the_established_api_exist() -> None:
    from composer.loggers.logger import Logger as SameLogger
    from composer.loggers.logger import format_log_data_value as same_function
    from composer.loggers.logger_destination import LoggerDestination as SameDestination

    assert (Logger, LoggerDestination, format_log_data_value) == (SameLogger, SameDestination, same_function)


def test_a_destination_is_a_callback_of_the_engine(state: State) -> None:
    class Closing(Recorder):
        def init(self, state: State, logger: Logger) -> None:
            logger.log_metrics({"begun": 1})

        def close(self, state: State, logger: Logger) -> None:
            self.calls.append(("closed",))

    closing = Closing()
    state.callbacks = [closing]
    engine = Engine(state, Logger(state, closing))

    engine.run_event("init")
    engine.close()

    assert closing.calls == [("metrics", {"begun": 1}, 0), ("closed",)]


def test_it_has_the_plan_of_the_engine_that_logs_there() -> None:
    logger = Logger(State(model=torch.nn.Linear(1, 1), max_duration="1ep"))
    assert logger.plan is None
    logger._state.callbacks = Callback()
    engine = Engine(logger._state, logger)
    assert str(logger.plan) == str(engine.explain())
    assert copy.deepcopy(logger).plan is None
    del engine
    gc.collect()
    assert logger.plan is None
