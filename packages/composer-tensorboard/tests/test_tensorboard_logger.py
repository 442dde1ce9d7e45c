from __future__ import annotations

import copy
import io
import math
import pickle
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.plugins.hparams import metadata
from torchmetrics import MeanMetric

import composer.loggers
from composer.core import Event
from composer.loggers import DeferredValue, LoggerDestination
from composer.loggers.tensorboard_logger import TensorboardLogger

FOLDER = Path("tensorboard_logs/my-run")


def test_the_name_is_found() -> None:
    [point] = entry_points(group="composer.loggers", name="TensorboardLogger")

    assert TensorboardLogger is point.load() is composer.loggers.TensorboardLogger


def test_importing_it_does_not_import_tensorboard() -> None:
    code = "import sys, composer.loggers.tensorboard_logger; print('tensorboard' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout == "False\n"


def test_curves_are_read_back_as_logged(start: Any, curve: Any) -> None:
    run = start(TensorboardLogger())
    run.fit()

    assert [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)] == curve("loss")
    assert [(n, (n + 1) / 4) for n in range(5)] == curve("accuracy")
    assert [(n, n) for n in range(5)] == curve("time/batch")


def test_all_kinds_of_values(start: Any, curve: Any, events: Any) -> None:
    run = start(TensorboardLogger())
    values = {
        "int": (3, 3),
        "bool": (True, 1),
        "bf16": (torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
        "element": (torch.ones(1, 1, requires_grad=True), 1),
        "numpy": (np.float64(0.25), 0.25),
        "array of one": (np.ones(1), 1),
        "infinite": (float("-inf"), float("-inf")),
        "strange: #?* {key}": (1.5, 1.5),
    }
    run.logger.log_metrics({key: value for key, (value, _) in values.items()})
    run.logger.log_metrics({"nan": torch.tensor(float("nan"))})
    run.logger.log_metrics({"text": "a", "vector": torch.zeros(2), "none": None, "nested": {"a": 1}})
    run.close()

    assert {*values, "nan", "nested/a"} == set(events().Tags()["scalars"])
    for key, (_, expected) in values.items():
        assert [(0, expected)] == curve(key)
    assert math.isnan(curve("nan")[0][1])


def test_a_confusion_matrix_is_an_image(start: Any, events: Any) -> None:
    run = start(TensorboardLogger())
    run.logger.log_metrics({"confusion": torch.tensor([[4, 0, 0], [0, 2, 0]]), "curves": (torch.ones(2), [0.5])}, 3)
    run.close()

    assert {"confusion", "curves/0"} == set(events().Tags()["images"])
    [image] = events().Images("confusion")
    pixels = np.asarray(Image.open(io.BytesIO(image.encoded_image_string)).convert("L"))
    assert 3 == image.step
    assert [[255, 0, 0], [0, 127, 0]] == pixels[40::86, 40::86].tolist()


def test_one_bad_value_costs_nothing_else(start: Any, curve: Any) -> None:
    run = start(TensorboardLogger())
    run.logger.log_metrics({"a": 1}, 0)
    run.logger.log_metrics({"a": 10**400, 3: 4}, 1)
    run.logger.log_metrics({"a": 2, "\ud800": 1}, 2)  # no UTF-8
    run.logger.log_metrics({"a": 3}, 3)
    with pytest.warns(UserWarning, match="`TensorboardLogger` failed to log: Unicode"):
        run.close()

    assert [(0, 1), (1, math.inf), (3, 3)] == curve("a")
    assert [(1, 4)] == curve("3")


def test_integers_are_shown_as_bytes(start: Any, events: Any) -> None:
    run = start(TensorboardLogger())
    run.logger.log_images(np.array([[0, 1], [128, 255]]), "bytes")
    run.close()

    [event] = events().Images("bytes")
    assert [[0, 1], [128, 255]] == np.array(Image.open(io.BytesIO(event.encoded_image_string)))[..., 0].tolist()


def test_a_table_is_read_back(start: Any, events: Any) -> None:
    run = start(TensorboardLogger())
    run.logger.log_table(["prompt", "score"], [["a|b\nc", 0.5]], "generations", step=3)
    run.close()

    [event] = events().Tensors("generations/text_summary")
    assert event.step == 3
    text = event.tensor_proto.string_val[0].decode()
    assert text == "| prompt | score |\n| --- | --- |\n| a\\|b<br>c | 0.5000 |"


@pytest.mark.parametrize(
    ("images", "channels_last", "sizes"),
    [
        (torch.rand(4, 6), False, [(6, 4)]),
        (torch.rand(3, 4, 6), False, [(6, 4)]),
        (torch.rand(4, 6, 3).numpy(), True, [(6, 4)]),
        (torch.rand(1, 4, 6, dtype=torch.bfloat16), False, [(6, 4)]),
        (torch.rand(2, 3, 4, 6, dtype=torch.float16), False, [(12, 4)]),
        ([torch.rand(3, 4, 6), torch.rand(3, 5, 7, requires_grad=True)], False, [(6, 4), (7, 5)]),
        (torch.randint(255, (3, 4, 6), dtype=torch.uint8), False, [(6, 4)]),
    ],
)
def test_images_are_read_back(start: Any, events: Any, images: Any, channels_last: bool, sizes: Any) -> None:
    run = start(TensorboardLogger())
    run.logger.log_images(images, "pictures", channels_last, step=7)
    run.close()

    found = events()
    names = ["pictures"] if len(sizes) == 1 else ["pictures_0", "pictures_1"]
    assert names == [tag.removesuffix("/0") for tag in found.Tags()["images"]]
    read = [found.Images(tag)[0] for tag in found.Tags()["images"]]
    assert [7] * len(sizes) == [event.step for event in read]
    assert sizes == [Image.open(io.BytesIO(event.encoded_image_string)).size for event in read]


def test_an_image_is_a_snapshot(start: Any, events: Any) -> None:
    run = start(TensorboardLogger())
    image = torch.ones(1, 2, 2)
    run.logger.log_images(image, "white")
    image.zero_()
    run.close()

    [event] = events().Images("white")
    assert np.all(np.array(Image.open(io.BytesIO(event.encoded_image_string))) == 255)


def test_images_of_another_shape_are_refused(start: Any) -> None:
    run = start(TensorboardLogger())
    with pytest.raises(ValueError, match=r"`images` must have 2 to 4 dimensions, got shape \(3,\)"):
        run.logger.destinations[0].log_images(torch.zeros(3))


def session(events: Any) -> dict[str, Any]:
    """The hyperparameters, as TensorBoard reads them."""
    found = events().summary_metadata[metadata.SESSION_START_INFO_TAG]
    data = metadata.parse_session_start_info_plugin_data(found.plugin_data.content)
    return {key: getattr(value, value.WhichOneof("kind")) for key, value in data.hparams.items()}


def test_hyperparameters_stand_next_to_the_results_of_the_evaluation(start: Any, events: Any, curve: Any) -> None:
    run = start(TensorboardLogger())
    run.logger.log_hyperparameters({"lr": 0.1, "name": "a", "flag": True, "sizes": [1, 2], "nothing": None})
    run.fit(3, end=False)
    run.evaluate(0.25)
    run.fit(2)
    run.evaluate(0.75)
    run.close()

    assert {"lr": 0.1, "name": "a", "flag": True, "sizes": "[1, 2]", "nothing": "None"} == session(events)
    assert [(3, 0.25), (5, 0.75)] == curve("hparams/metrics/eval/accuracy")
    assert [(3, 0.25), (5, 0.75)] == curve("metrics/eval/accuracy")


def test_the_results_of_all_evaluators_are_listed(start: Any, events: Any) -> None:
    run = start(TensorboardLogger())
    run.state.eval_metrics = {"eval": {"accuracy": MeanMetric()}, "other": {"loss": MeanMetric()}}
    run.logger.log_hyperparameters({"lr": 0.1})
    run.evaluate(0.25)
    run.close()

    found = events().summary_metadata[metadata.EXPERIMENT_TAG]
    listed = metadata.parse_experiment_plugin_data(found.plugin_data.content).metric_infos
    assert {"hparams/metrics/eval/accuracy", "hparams/metrics/other/loss"} == {info.name.tag for info in listed}


def test_a_new_run_has_no_hyperparameters_of_the_old_one(start: Any, events: Any) -> None:
    logger = TensorboardLogger()
    for name in ("first", "second"):
        run = start(logger, name=name)
        run.logger.log_hyperparameters({name: 1})
        run.fit()
        run.close()

    data = events("tensorboard_logs/second").summary_metadata[metadata.SESSION_START_INFO_TAG].plugin_data.content
    assert ["second"] == list(metadata.parse_session_start_info_plugin_data(data).hparams)


def test_what_is_saved_does_not_grow_while_the_step_stays(start: Any) -> None:
    logger = TensorboardLogger()
    run = start(logger)
    for i in range(100):  # as in an evaluation
        run.logger.log_metrics({"cpu": i})

    assert {"cpu": 99.0} == logger.state_dict()["metrics"]


def test_hyperparameters_are_written_without_an_evaluation(start: Any, events: Any) -> None:
    run = start(TensorboardLogger())
    run.logger.log_hyperparameters({"lr": 0.1})
    run.fit()

    assert {"lr": 0.1} == session(events)


def test_a_resumed_run_continues_at_its_checkpoint(start: Any, curve: Any) -> None:
    logger = TensorboardLogger()
    run = start(logger)
    run.fit(3, end=False)
    run.evaluate(0.5)
    saved, time = pickle.loads(pickle.dumps(logger.state_dict())), run.state.timestamp
    run.fit(2)  # lost in a crash
    run.close()
    assert len(curve("loss")) == 5

    logger = TensorboardLogger()
    run = start(logger)
    logger.load_state_dict(saved)
    run.state.timestamp = time
    run.engine.run_event("after_load")
    run.logger.log_metrics({"resumed": 1})
    run.fit(1)

    assert [(0, 1), (1, 2), (2, 3), (3, 4)] == curve("loss")
    assert [(3, 0.5)] == curve("metrics/eval/accuracy")
    assert [(3, 1)] == curve("resumed")


def test_another_run_hides_nothing(start: Any, curve: Any) -> None:
    logger = TensorboardLogger()
    run = start(logger)
    run.fit(3)
    saved = logger.state_dict()
    run.close()
    other = TensorboardLogger()
    run = start(other, name="another")
    other.load_state_dict(saved)
    run.engine.run_event("after_load")
    run.fit(1)

    assert [(0, 1), (1, 2), (2, 3)] == curve("loss")
    assert [(0, 1)] == curve("loss", "tensorboard_logs/another")


class Store(LoggerDestination):
    """Keeps files, as an object store does."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def can_upload_files(self) -> bool:
        return True

    def upload_file(self, state: Any, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        self.files[remote_file_name] = file_path.read_bytes()


def test_finished_files_are_handed_to_who_stores_files(start: Any, curve: Any, tmp_path: Path) -> None:
    store = Store()
    run = start(TensorboardLogger(flush_interval=2), store)
    run.fit()
    run.close()

    assert store.files
    assert all(name.startswith("tensorboard_logs/my-run/events.out.tfevents.") for name in store.files)
    assert all(name.endswith("-0") for name in store.files)
    copies = tmp_path / "copies"
    copies.mkdir()
    for number, data in enumerate(store.files.values()):
        (copies / f"events.out.tfevents.{number}").write_bytes(data)
    assert [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)] == curve("loss", copies) == curve("loss")


def test_without_a_store_there_is_one_file(start: Any) -> None:
    run = start(TensorboardLogger(flush_interval=1))
    run.fit()
    run.close()

    assert 1 == len(list(FOLDER.iterdir()))


def test_only_rank_zero_writes_and_the_others_take_part_in_computing(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = start(TensorboardLogger())
    computed: list[int] = []
    run.logger.log_metrics({"a": DeferredValue(lambda: computed.append(1))})
    run.logger.log_images(torch.zeros(2, 2))
    run.logger.log_table(["a"], [[1]])
    run.fit()
    run.evaluate(0.5)
    run.close()

    assert computed == [1]
    assert not FOLDER.exists()


def test_all_ranks_write_with_rank_zero_only_false(start: Any, monkeypatch: pytest.MonkeyPatch, curve: Any) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    start(TensorboardLogger("elsewhere", rank_zero_only=False)).fit()

    assert 5 == len(curve("loss", "elsewhere/my-run/rank1"))  # TensorBoard follows one file of a folder at a time


def test_a_failure_is_a_warning_and_the_run_continues(start: Any) -> None:
    Path("tensorboard_logs").write_text("not a folder")
    with pytest.warns(UserWarning, match="`TensorboardLogger` failed to log: .*The run continues"):
        run = start(TensorboardLogger())
    run.fit()
    run.evaluate(0.5)
    run.close()


def test_a_failure_is_an_error_with_on_error_raise(start: Any) -> None:
    Path("tensorboard_logs").write_text("not a folder")
    logger = TensorboardLogger(on_error="raise")
    with pytest.raises(RuntimeError, match="`TensorboardLogger` failed to log"):
        start(logger)
    logger.post_close()


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_failure_while_writing(start: Any, on_error: Any, curve: Any) -> None:
    logger = TensorboardLogger(on_error=on_error)
    run = start(logger)
    run.logger.log_images(torch.zeros(5, 2, 2), "five channels are no image")
    if on_error == "warn":
        with pytest.warns(UserWarning, match="`TensorboardLogger` failed to log"):
            run.fit()
        assert 5 == len(curve("loss"))
    else:
        with pytest.raises(RuntimeError, match="`TensorboardLogger` failed to log"):
            run.fit()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"flush_interval": 0}, "`flush_interval` must be at least 1, got 0"),
        ({"delivery_timeout": 0}, "`delivery_timeout` must be positive, got 0"),
        ({"on_error": "ignore"}, "`on_error` must be 'warn' or 'raise', got 'ignore'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorboardLogger(**arguments)


def test_it_logs_only_during_a_run() -> None:
    logger = TensorboardLogger()
    for log in (
        lambda: logger.log_metrics({"a": 1}, 0),
        lambda: logger.log_table([], []),
        lambda: logger.log_images(torch.zeros(2, 2)),
    ):
        with pytest.raises(RuntimeError, match="`TensorboardLogger` can only log during a run"):
            log()


def test_it_survives_several_fits_and_a_new_run(start: Any, curve: Any) -> None:
    logger = TensorboardLogger()
    run = start(logger)
    run.fit(2)
    run.fit(2)
    run.close()
    run.close()
    assert logger.writer is None
    start(logger, name="second").fit(1)

    assert 4 == len(curve("loss"))
    assert [(0, 1)] == curve("loss", "tensorboard_logs/second")


def test_it_can_be_closed_without_a_fit_or_a_run(start: Any) -> None:
    start(TensorboardLogger()).close()
    TensorboardLogger().post_close()


def test_it_accepts_every_event_in_any_order(start: Any) -> None:
    run = start(TensorboardLogger())
    for event in Event:
        if event is not Event.INIT:
            run.engine.run_event(event)


def test_it_can_be_copied_during_a_run(start: Any) -> None:
    logger = TensorboardLogger(flush_interval=7)
    start(logger).fit(1)

    for copied in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        assert copied.flush_interval == 7
        assert copied.writer is None
        copied.close(None, None)
        copied.post_close()


def test_a_crash_loses_nothing(curve: Any) -> None:
    code = """
import torch
from composer.core import Engine, State
from composer.loggers import Logger, TensorboardLogger
loggers = [TensorboardLogger()]
state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="my-run", dataloader=[1], callbacks=loggers)
engine = Engine(state, Logger(state, loggers))
engine.run_event("init")
for step in range(50):
    engine.logger.log_metrics({"loss": torch.tensor(float(step))}, step)
raise ValueError("a crash")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert "ValueError: a crash" in run.stderr
    assert [(n, n) for n in range(50)] == curve("loss")


def test_what_could_not_be_written_names_where_the_rest_is(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = start(TensorboardLogger(log_dir="here"))
    run.logger.log_metrics({"\ud800": 1}, 0)  # no UTF-8
    with pytest.warns(UserWarning, match="`TensorboardLogger` failed to log"):
        run.close()

    assert f"What was written is kept in {str(Path('here', 'my-run'))!r}; the rest is lost." in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_does_not_wait_for_the_device(start: Any, curve: Any) -> None:
    start(TensorboardLogger(), device="cuda").fit()

    assert [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)] == curve("loss")
    assert [(n, (n + 1) / 4) for n in range(5)] == curve("accuracy")
