from __future__ import annotations

import copy
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import comet_ml
import numpy as np
import pytest
import torch

import composer.loggers
from composer.core import Event
from composer.loggers import DeferredValue, cometml_logger
from composer.loggers.cometml_logger import CometMLLogger


def test_the_name_is_found() -> None:
    [point] = entry_points(group="composer.loggers", name="CometMLLogger")

    assert CometMLLogger is point.load() is composer.loggers.CometMLLogger


def test_an_experiment_is_read_back_as_logged(start: Any, stored: Any, offline: Any) -> None:
    logger = offline("team", "tests")
    assert isinstance(logger.experiment, comet_ml.OfflineExperiment)
    logger.log_hyperparameters({"early": 1})
    run = start(logger)
    run.logger.log_hyperparameters({"lr": 0.1, "sizes": [1, 2], "nothing": None})
    run.fit()
    values = {"bf16": torch.tensor([0.5], dtype=torch.bfloat16), "numpy": np.float64(0.25), "text": "a"}
    run.logger.log_metrics({**values, "vector": torch.zeros(3)})
    run.logger.log_table(["prompt", "score"], [["a", torch.tensor(0.5)], ["b", None]], "generations", step=3)
    run.close()
    run.close()

    [found] = stored()
    assert [(n, n + 1) for n in range(5)] == found.curve("loss")
    assert [(n, (n + 1) / 4) for n in range(5)] == found.curve("accuracy")
    assert [(5, 0.5)] == found.curve("bf16")
    assert [(5, 0.25)] == found.curve("numpy")
    assert [] == found.curve("vector") == found.curve("text")
    assert {"text": "a", "Name": "my-run"}.items() <= found.others.items()
    assert 0.1 == found.parameters["lr"]
    assert 1 == found.parameters["early"]
    assert ("team", "tests") == (found.about["workspace"], found.about["project_name"])
    table = {"columns": ["prompt", "score"], "data": [["a", "0.5000"], ["b", None]]}
    vector = {"step": 5, "values": [0.0, 0.0, 0.0]}
    assert {"generations.json": (3, table), "vector.json": (5, vector)} == found.assets
    assert logger.experiment is None


def test_images_and_masks_are_read_back(start: Any, stored: Any, offline: Any) -> None:
    run = start(offline())
    mask = torch.tensor([[0, 1], [1, 0], [2, 2]])
    white = torch.ones(2, 3, 3, 2, dtype=torch.bfloat16)
    run.logger.log_images(white, "seen", step=2, masks={"truth": torch.stack([mask, mask])}, mask_class_labels={1: "x"})
    run.logger.log_images([np.zeros((4, 6)), np.full((4, 6, 3), -3.0)], "last", channels_last=True, step=3)
    run.close()

    [found] = stored()
    names = [f"seen_{i}{end}" for i in range(2) for end in ("", " + truth mask overlaid")]
    assert {*names, "truth_0 mask", "truth_1 mask", "last_0", "last_1"} == set(found.images)
    assert (found.images["seen_1"] == 255).all()
    red, green = (128, 0, 0), (0, 128, 0)
    assert [[(0, 0, 0), red], [red, (0, 0, 0)], [green] * 2] == [
        [tuple(map(int, color)) for color in row] for row in found.images["truth_0 mask"]
    ]
    assert [102, 102, 102] == found.images["seen_0 + truth mask overlaid"][0, 0].tolist()  # 40% of white, 60% of black
    assert [179, 102, 102] == found.images["seen_0 + truth mask overlaid"][0, 1].tolist()
    assert {"classes": {"1": "x"}} == found.image_metadata["truth_0 mask"]
    assert (4, 6) == found.images["last_0"].shape
    assert (4, 6, 3) == found.images["last_1"].shape


@pytest.mark.parametrize(
    ("images", "masks", "message"),
    [
        (torch.zeros(3, 0, 2), {}, r"`images` must be images of 2 or 3 dimensions .* got shape \(3, 0, 2\)"),
        (torch.zeros(1, 1, 3, 4, 6), {}, r"`images` must be images of 2 or 3 dimensions"),
        (torch.zeros(2, 4, 6), {}, r"`images` must have 1, 3 or 4 channels, got shape \(2, 4, 6\)"),
        (torch.zeros(2, 3, 4, 6), {"m": torch.zeros(4, 6)}, r"`masks\['m'\]` must hold 2 masks, got 1"),
        (torch.zeros(3, 4, 6), {"m": [torch.zeros(1, 4, 6)]}, r"masks of 2 dimensions .* got shape \(1, 4, 6\)"),
        (torch.zeros(3, 4, 6), {"m": torch.zeros(6, 4)}, r"the size of their images, \(4, 6\), got shape \(6, 4\)"),
    ],
)
def test_images_of_another_shape_are_refused(
    images: Any, masks: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    with pytest.raises(ValueError, match=message):
        CometMLLogger().log_images(images, masks=masks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delivery_timeout": 0}, "`delivery_timeout` must be positive, got 0"),
        ({"on_error": "ignore"}, "`on_error` must be 'warn' or 'raise', got 'ignore'"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CometMLLogger(**arguments)


def test_an_experiment_needs_a_key() -> None:
    with pytest.raises(ValueError, match="requires an API key"):
        CometMLLogger()


def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(ImportError, match="`CometMLLogger` needs `comet_ml`, which is not installed"):
        CometMLLogger()


def test_an_experiment_that_the_client_has_stopped_is_reported(start: Any, offline: Any) -> None:
    logger = offline()
    run = start(logger)
    run.engine.run_event("fit_end")
    logger.experiment.end()
    run.logger.log_metrics({"a": 1})
    with pytest.warns(UserWarning, match="`CometMLLogger` failed to log: ConnectionError: Comet's client has stopped"):
        run.engine.run_event("fit_end")


def test_the_end_does_not_wait_for_a_client_that_hangs(
    start: Any, offline: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger, answered = offline(delivery_timeout=0.2), threading.Event()
    end = logger.experiment.end
    run = start(logger)
    monkeypatch.setattr(logger.experiment, "end", lambda: answered.wait(30))
    run.close()
    answered.set()
    end()

    assert "Ending the experiment of Comet has not ended in 0.2 seconds" in caplog.text


@contextmanager
def silent_server() -> Iterator[str]:
    """Accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/clientlib/"


def test_a_comet_that_never_answers_holds_up_neither_the_start_nor_the_end(tmp_path: Path) -> None:
    code = """
import torch
from composer.loggers import CometMLLogger
from composer.testing import LoggedRun
run = LoggedRun(CometMLLogger(delivery_timeout=1.0))
run.fit()
run.close()
print(run.state.timestamp.batch)
"""
    with silent_server() as url:
        settings = {"COMET_URL_OVERRIDE": url, "COMET_API_KEY": "k" * 25, "HOME": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | settings,
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip

    assert "Comet has not answered in 10 seconds. The run continues" in run.stderr
    assert "`CometMLLogger` could not send everything in 1 seconds" in run.stderr
    assert "5ba\n" == run.stdout


def test_a_comet_that_answers_late_gets_everything(
    start: Any, stored: Any, offline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, made = threading.Event(), comet_ml.OfflineExperiment
    monkeypatch.setattr(cometml_logger, "_CONNECT_SECONDS", 0.01)
    monkeypatch.setattr(comet_ml, "Experiment", lambda **kwargs: answered.wait(60) and made(**kwargs))
    logger = offline(offline=False)
    assert logger.experiment is None
    run = start(logger)
    run.fit(end=False)
    answered.set()
    run.close()

    [found] = stored()
    assert "my-run" == found.others["Name"]
    assert [(n, n + 1) for n in range(5)] == found.curve("loss")


def test_other_ranks_take_part_in_computing(start: Any, stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    logger = CometMLLogger()
    run = start(logger)
    computed: list[int] = []
    run.logger.log_metrics({"a": DeferredValue(lambda: computed.append(1))})
    run.logger.log_images(torch.zeros(3, 2, 2))
    run.logger.log_table(["a"], [[1]])
    run.fit()
    run.close()

    assert logger.experiment is None
    assert computed == [1]
    assert stored() == []


def test_every_rank_can_have_an_experiment(
    start: Any, stored: Any, offline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    logger = offline(rank_zero_only=False, name="mine")
    run = start(logger)
    run.fit(2)
    for copied in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        copied.close(None, None)
        copied.post_close()
    for event in Event:
        if event is not Event.INIT:
            run.engine.run_event(event)
    run.close()
    start(logger, name="second").close()

    first, second = stored()
    assert "mine-rank1" == first.others["Name"] == second.others["Name"]
    assert first.about["offline_id"] != second.about["offline_id"]


def test_the_end_of_the_process_loses_nothing_and_importing_is_cheap(stored: Any, tmp_path: Any) -> None:
    code = f"""
import sys, torch
from composer.core import Engine, State
from composer.loggers import Logger, CometMLLogger
print("comet_ml" in sys.modules)
quiet = {{"log_env_details": False, "parse_args": False, "display_summary_level": 0}}
folder = {{"offline_directory": {str(tmp_path / "comet")!r}}}
loggers = [CometMLLogger(offline=True, exp_kwargs=quiet | folder)]
state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="my-run", dataloader=[1], callbacks=loggers)
engine = Engine(state, Logger(state, loggers))
engine.run_event("init")
for step in range(50):
    engine.logger.log_metrics({{"loss": torch.tensor(float(step))}}, step)
raise ValueError("a crash")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert run.stdout.startswith("False\n")
    assert "ValueError: a crash" in run.stderr
    [found] = stored()
    assert [(n, n) for n in range(50)] == found.curve("loss")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_does_not_wait_for_the_device(start: Any, stored: Any, offline: Any) -> None:
    run = start(offline(), device="cuda")
    run.fit()
    run.close()

    [found] = stored()
    assert [(n, n + 1) for n in range(5)] == found.curve("loss")
    assert [(n, (n + 1) / 4) for n in range(5)] == found.curve("accuracy")
