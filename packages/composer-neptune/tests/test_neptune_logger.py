from __future__ import annotations

import base64
import copy
import io
import json
import pickle
import socket
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import composer.loggers
from composer.core import Event
from composer.loggers import DeferredValue
from composer.loggers.neptune_logger import NeptuneLogger


def test_the_name_is_found() -> None:
    [point] = entry_points(group="composer.loggers", name="NeptuneLogger")

    assert NeptuneLogger is point.load() is composer.loggers.NeptuneLogger


def test_a_run_is_read_back_as_logged(start: Any, stored: Any, make: Any) -> None:
    logger = make()
    logger.log_hyperparameters({"early": 1})
    run = start(logger)
    run.logger.log_hyperparameters({"lr": 0.1, "sizes": [1, 2], "nothing": None, "nested": {"a": True}})
    run.logger.log_traces({"algorithms/MixUp": 1})
    run.fit()
    run.logger.log_metrics({"bf16": torch.tensor([0.5], dtype=torch.bfloat16), "text": "a", "vector": torch.zeros(3)})
    logger.base_handler["mine"] = "x"
    run.close()
    run.close()

    [found] = stored()
    assert [(n, n + 1) for n in range(5)] == found.series("training/metrics/loss")
    assert [(n, (n + 1) / 4) for n in range(5)] == found.series("training/metrics/accuracy")
    assert [(5, 0.5)] == found.series("training/metrics/bf16")
    assert [] == found.of("training/metrics/vector") == found.of("training/metrics/text")
    [upload] = found.of("training/arrays/vector")
    [kept] = Path(".neptune").rglob(upload["tmp_file_name"])
    assert {"step": 5, "values": [0.0, 0.0, 0.0]} == json.loads(kept.read_text())
    hyperparameters = {"early": 1, "lr": 0.1, "sizes": "[1, 2]", "nothing": "None", "nested/a": True}
    assert hyperparameters == {key: found.value(f"training/hyperparameters/{key}") for key in hyperparameters}
    assert 1 == found.value("training/traces/algorithms/MixUp")
    assert (0, "my-run", "x") == (found.value("training/rank"), found.value("sys/name"), found.value("training/mine"))
    assert version("composer-neptune") == found.value("source_code/integrations/neptune-MosaicML")


def test_steps_that_do_not_grow_are_left_out(start: Any, stored: Any, make: Any) -> None:
    run = start(make(base_namespace="a/b/"))
    for step in (1, 3, 3, 2, 4):
        run.logger.log_metrics({"x": float(step)}, step)
    run.logger.log_metrics({"y": 1.0}, 2)
    run.close()

    [found] = stored()
    assert [(1, 1), (3, 3), (4, 4)] == found.series("a/b/metrics/x")
    assert [(2, 1)] == found.series("a/b/metrics/y")


@pytest.mark.parametrize(
    ("images", "channels_last", "shapes"),
    [
        (torch.rand(3, 4, 6), False, [(4, 6, 3)]),
        (np.random.default_rng(0).random((2, 4, 6, 3)), True, [(4, 6, 3)] * 2),
        ([torch.rand(4, 6), torch.rand(1, 4, 6, dtype=torch.bfloat16)], False, [(4, 6), (4, 6)]),
    ],
)
def test_images_are_read_back(
    start: Any, stored: Any, make: Any, images: Any, channels_last: bool, shapes: list[Any]
) -> None:
    run = start(make())
    run.logger.log_images(images, "seen", channels_last, step=2)
    run.logger.log_images(torch.tensor([[-2.0, 0.0], [2.0, 1.0]]), "beyond")
    run.close()

    [found] = stored()
    series = found.series("training/seen")
    assert [2] * len(shapes) == [step for step, _ in series]
    assert shapes == [_pixels(value).shape for _, value in series]
    [(_, beyond)] = found.series("training/beyond")
    assert [[0, 127], [255, 191]] == _pixels(beyond).tolist()


def _pixels(value: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(value["data"]))))


def test_files_are_stored_without_links(start: Any, stored: Any, make: Any, tmp_path: Path) -> None:
    logger = make(upload_checkpoints=True)
    run = start(logger)
    source, link = tmp_path / "ep1.pt", tmp_path / "latest.pt"
    source.write_text("weights")
    link.symlink_to(source)
    assert logger.can_upload_files()
    run.logger.upload_file("{run_name}/ep1.pt", source)
    run.logger.upload_file("latest.pt", link)
    source.unlink()  # which the contract allows
    run.close()

    [found] = stored()
    [upload] = found.of("training/my-run/ep1.pt")
    assert "weights" == Path(upload["file_path"]).read_text()  # kept until `neptune sync` reads it
    assert [] == found.of("training/latest.pt")


def test_a_stored_file_is_replaced_only_if_asked(start: Any, stored: Any, make: Any, tmp_path: Path) -> None:
    run = start(make(upload_checkpoints=True))
    source = tmp_path / "a.pt"
    source.write_text("a")
    run.logger.upload_file("a.pt", source)
    run.logger.upload_file("a.pt", source, overwrite=True)
    run.logger.upload_file("a.pt", source)
    with pytest.warns(UserWarning, match=r"Neptune has a file 'training/a.pt', which is kept"):
        run.engine.run_event("fit_end")
    run.close()

    assert 2 == len(stored()[0].of("training/a.pt"))


def test_files_are_not_stored_by_default(start: Any, stored: Any, make: Any, tmp_path: Path) -> None:
    logger = make()
    run = start(logger)
    (tmp_path / "a").write_text("a")
    run.logger.upload_file("a", tmp_path / "a")
    run.close()

    assert not logger.can_upload_files()
    assert [] == stored()[0].of("training/a")


def test_a_file_that_was_uploaded_is_released(start: Any, make: Any, tmp_path: Path) -> None:
    run = start(make(mode="debug", upload_checkpoints=True))
    (tmp_path / "a").write_text("a")
    run.logger.upload_file("a", tmp_path / "a")
    run.close()

    assert [] == list(tmp_path.glob(".held-*"))


def test_what_cannot_be_downloaded_is_an_error(start: Any, make: Any, tmp_path: Path) -> None:
    logger = make(mode="debug", upload_checkpoints=True)
    run = start(logger)
    (tmp_path / "a").write_text("a")
    with pytest.raises(FileNotFoundError, match="There is no file 'training/absent' in the Neptune run"):
        logger.download_file("absent", str(tmp_path / "b"))
    with pytest.raises(FileExistsError, match="Pass `overwrite=True`"):
        logger.download_file("a", str(tmp_path / "a"))
    run.close()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"project": 1}, TypeError, "`project` must be a str or None, got 1"),
        ({"api_token": 1}, TypeError, "`api_token` must be a str or None"),
        ({"rank_zero_only": "yes"}, TypeError, "`rank_zero_only` must be True or False, got 'yes'"),
        ({"upload_checkpoints": None}, TypeError, "`upload_checkpoints` must be True or False"),
        ({"base_namespace": None}, TypeError, "`base_namespace` must be a str, got None"),
        ({"base_namespace": ""}, ValueError, "`base_namespace` must not be empty"),
        ({"mode": "nonsense"}, ValueError, "`mode` must be 'async', 'sync', .* got 'nonsense'"),
        ({"on_error": "ignore"}, ValueError, "`on_error` must be 'warn' or 'raise'"),
        ({"delivery_timeout": 0}, ValueError, "`delivery_timeout` must be positive"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NeptuneLogger(**arguments)


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "neptune", None)
    with pytest.raises(ImportError, match="`NeptuneLogger` needs `neptune`, which is not installed"):
        NeptuneLogger()


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_run_that_cannot_be_begun(start: Any, on_error: str) -> None:
    logger = NeptuneLogger(mode="async", api_token="not a token", project="a/b", on_error=on_error)
    if on_error == "raise":
        with pytest.raises(RuntimeError, match="`NeptuneLogger` failed to log"):
            start(logger)
        return
    with pytest.warns(UserWarning, match="`NeptuneLogger` failed to log"):
        run = start(logger)
    run.logger.log_hyperparameters({"a": 1})
    run.fit()
    run.close()


def test_the_run_goes_on_without_a_server_that_hangs(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts connections and never answers
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        token = base64.b64encode(json.dumps({"api_address": url, "api_url": url}).encode()).decode()
        logger = NeptuneLogger(mode="async", api_token=token, project="a/b", delivery_timeout=0.2)
        with pytest.warns(UserWarning, match="Opening a run of Neptune has not ended in 0.2 seconds"):
            run = start(logger)
        run.fit()
        run.close()


def test_other_ranks_take_part_in_computing(
    start: Any, stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    logger = make()
    run = start(logger)
    computed: list[int] = []
    run.logger.log_metrics({"a": DeferredValue(lambda: computed.append(1))})
    run.logger.log_images(torch.zeros(3, 2, 2))
    run.fit()
    logger.base_handler["mine"] = 1  # works on every rank
    run.close()

    assert computed == [1]
    assert stored() == []  # its mode is "debug"


def test_every_rank_can_have_a_run(start: Any, stored: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    start(make(rank_zero_only=False)).close()

    assert 1 == stored()[0].value("training/rank")


def test_the_run_is_made_when_it_is_used(stored: Any, make: Any) -> None:
    logger = make()
    assert stored() == []

    assert logger.neptune_run is logger.neptune_run
    assert 1 == len(stored())
    logger.post_close()


def test_it_survives_all_events_copies_and_a_new_run(start: Any, stored: Any, make: Any) -> None:
    logger = make()
    run = start(logger)
    run.fit(2)
    for copied in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        copied.close(None, None)
        copied.post_close()
    for event in Event:
        if event is not Event.INIT:
            run.engine.run_event(event)
    run.close()
    start(logger, name="second").fit(1)
    logger.post_close()

    first, second = stored()
    assert (2, 1) == (len(first.series("training/metrics/loss")), len(second.series("training/metrics/loss")))
    assert "second" == second.value("sys/name")


def test_the_end_of_the_process_loses_nothing_and_importing_is_cheap(stored: Any) -> None:
    code = """
import sys, torch
from composer.core import Engine, State
from composer.loggers import Logger, NeptuneLogger
print("neptune" in sys.modules)
loggers = [NeptuneLogger(mode="offline", capture_hardware_metrics=False, source_files=[])]
state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="my-run", dataloader=[1], callbacks=loggers)
engine = Engine(state, Logger(state, loggers))
engine.run_event("init")
for step in range(50):
    engine.logger.log_metrics({"loss": torch.tensor(float(step))}, step)
raise ValueError("a crash")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert run.stdout.startswith("False\n")
    assert "ValueError: a crash" in run.stderr
    [found] = stored()
    assert [(n, n) for n in range(50)] == found.series("training/metrics/loss")
    assert found.value("sys/failed") is True


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_does_not_wait_for_the_device(start: Any, stored: Any, make: Any) -> None:
    run = start(make(), device="cuda")
    run.fit()
    run.close()

    [found] = stored()
    assert [(n, n + 1) for n in range(5)] == found.series("training/metrics/loss")
    assert [(n, (n + 1) / 4) for n in range(5)] == found.series("training/metrics/accuracy")
