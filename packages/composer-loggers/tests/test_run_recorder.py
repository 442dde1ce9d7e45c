from __future__ import annotations

import copy
import json
import math
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from composer.core import Algorithm, Callback, Event, State, Timestamp
from composer.loggers import DeferredValue, Logger
from composer.loggers.run_recorder import RunRecorder, _plain


def lines(path: str | Path = "my-run/run-rank0.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def of(kind: str, path: str | Path = "my-run/run-rank0.jsonl") -> list[dict[str, Any]]:
    return [record for record in lines(path) if record["type"] == kind]


class Everywhere(Algorithm):
    """Acts before every forward pass, and replaces the model at the start."""

    events = frozenset({Event.INIT, Event.BATCH_START})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.INIT:
            state.model.layer = torch.nn.Identity()  # type: ignore[assignment]
            logger.log_hyperparameters({"everywhere/num_replaced": 1})


def test_a_run_is_recorded_from_start_to_end(start: Any) -> None:
    run = start(RunRecorder(), "2ep", 3, eval_every=3)
    run.engine.run_event("after_load")
    run.logger.log_hyperparameters({"lr": 0.1})
    run.fit()
    run.close()

    begin, end = lines()[0], lines()[-1]
    assert (begin["type"], begin["schema"], begin["run_name"]) == ("start", 1, "my-run")
    assert (end["type"], end["status"], end["error"], end["batch"], end["epoch"]) == ("end", "finished", None, 6, 2)
    assert of("hyperparameters")[0]["values"] == {"lr": 0.1}
    assert of("resume") == []
    assert [(e["label"], e["step"], e["batches"]) for e in of("evaluation")] == [("eval", 3, 3), ("eval", 6, 3)]
    losses = [(r["step"], r["values"]["loss/train/total"]) for r in of("metrics") if "loss/train/total" in r["values"]]
    assert losses == [(i, float(i + 1)) for i in range(6)]
    assert [r["epoch"] for r in of("metrics") if "loss/train/total" in r["values"]] == [0, 0, 0, 1, 1, 1]
    assert of("fit_start")[0]["max_duration"] == "2ep"
    seconds = [record["seconds"] for record in of("metrics")]
    assert seconds == sorted(seconds)


def test_images_are_recorded_before_the_start_too_and_their_channels_are_found(start: Any) -> None:
    recorder = RunRecorder()
    recorder.log_images(np.zeros((8, 9, 3), np.uint8), name="colors")
    start(recorder).close()

    (images,) = of("images")
    size_and_color = Path("my-run", images["files"][0]).read_bytes()[16:26]
    assert size_and_color == struct.pack(">IIBB", 9, 8, 8, 2)  # 2: RGB


def test_a_step_is_one_line(start: Any) -> None:
    run = start(RunRecorder(), "5ba", 5)
    run.fit()
    run.close()

    steps = [record["step"] for record in of("metrics")]
    assert [0, 1, 2, 3, 4] == sorted(set(steps))[:5]
    assert len([step for step in steps if step == 2]) == 1


def test_machine_and_versions_are_there_and_nothing_of_the_environment(start: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    run = start(RunRecorder())
    run.close()
    (environment,) = of("environment")

    assert environment["values"]["torch"] == str(torch.__version__)
    assert environment["values"]["device"]["kind"] == "cpu"
    assert "composer-core" in environment["values"]["packages"]
    text = Path("my-run/run-rank0.jsonl").read_text()
    assert "hunter2" not in text
    assert str(Path.cwd()) not in text
    assert str(Path.home()) not in text or str(Path.home()) == "/"


def test_the_plan_is_that_of_the_engine(start: Any) -> None:
    state = State(model=torch.nn.ModuleDict({"layer": torch.nn.Linear(1, 1)}), max_duration="2ba", run_name="my-run")
    state.set_dataloader([None] * 2, "train")
    state.algorithms = [Everywhere()]
    run = start(RunRecorder(), "2ba", 2, state=state)
    run.fit()
    expected = [[r.event.value, r.order, r.kind, r.name, r.reason] for r in run.engine.explain()]
    run.close()

    (plan,) = of("plan")
    assert expected == [[row[k] for k in ("event", "order", "kind", "name", "reason")] for row in plan["rows"]]
    (algorithms,) = of("algorithms")
    assert [(a["name"], a["events"]) for a in algorithms["values"]] == [("Everywhere", ["batch_start", "init"])]
    assert "0x" not in algorithms["values"][0]["config"]
    (modules,) = of("modules")
    assert modules["replaced"] == [{"module": "layer", "before": "Linear", "after": "Identity"}]
    assert [act for record in of("actions") for act in record["values"] if act["event"] == "batch_start"] == [
        {"algorithm": "Everywhere", "event": "batch_start", "count": 2, "spans": [[0, 1, 2]]}
    ]
    assert {"everywhere/num_replaced": 1} in [record["values"] for record in of("hyperparameters")]


def test_the_last_array_before_each_other_record_is_written(start: Any) -> None:
    run = start(RunRecorder())
    run.logger.log_metrics({"confusion": torch.tensor([[1, 0], [0, 1]])}, 0)
    run.logger.log_metrics({"confusion": torch.tensor([[3, 0], [1, 2]]), "loss": 0.5}, 1)
    run.logger.log_metrics({"curves": ([torch.tensor([0.5, math.nan]), torch.ones(3)], [1, 2]), "named": {"a": 2}}, 2)
    run.close()

    arrays = [(record["name"], record["step"], record["values"]) for record in of("array")]
    expected = [("confusion", 1, [[3, 0], [1, 2]]), ("curves/0/0", 2, [0.5, "NaN"]), ("curves/0/1", 2, [1.0, 1.0, 1.0])]
    assert expected == arrays
    values = {name: value for record in of("metrics") for name, value in record["values"].items()}
    assert {"loss": 0.5, "named/a": 2} == values
    assert [{"curves/1": "[1, 2]"}] == [record["texts"] for record in of("metrics") if "texts" in record]


def test_numbers_that_json_does_not_know_are_written_as_text(start: Any) -> None:
    run = start(RunRecorder())
    run.logger.log_metrics({"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.5), "e": torch.tensor([2])})
    run.logger.log_metrics({"f": True, "g": "words", "h": None, "i": np.arange(3), "j": DeferredValue(lambda: 1.5)})
    run.close()

    (record,) = of("metrics")
    assert record["values"] == {
        "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 0.5, "e": 2, "f": 1, "j": 1.5,
    }  # fmt: skip
    assert set(record["texts"]) == {"g", "h"}


def test_the_host_that_the_trainer_logs_is_not_recorded(start: Any) -> None:
    run = start(RunRecorder())
    run.logger.log_hyperparameters({"num_nodes": 2, "node_name": "host-7"})
    run.close()

    assert [record["values"] for record in of("hyperparameters")] == [{"num_nodes": 2}]


def test_what_is_named_like_a_secret_is_hidden(start: Any) -> None:
    run = start(RunRecorder())
    run.logger.log_hyperparameters(
        {"api_key": "a", "wandb/api_key": "b", "nested": {"password": "c", "num_tokens": 3}, "hf_token": "d"}
    )
    run.logger.log_hyperparameters({"save_folder": "s3://me:word@bucket/folder", "model": object()})
    run.close()

    first, second = (record["values"] for record in of("hyperparameters"))
    hidden = "(hidden)"
    assert first == {
        "api_key": hidden, "wandb/api_key": hidden, "nested": {"password": hidden, "num_tokens": 3}, "hf_token": hidden,
    }  # fmt: skip
    assert second == {"save_folder": "s3://bucket/folder", "model": "<object object>"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3),
        (True, True),
        (None, None),
        (math.nan, "NaN"),
        (np.int64(4), 4),
        (torch.tensor(0.5), 0.5),
        ((1, "a"), [1, "a"]),
        ({1: {"b": 2}}, {"1": {"b": 2}}),
        (torch.zeros(2), "Tensor of shape torch.Size([2])"),
        ("x" * 5000, "x" * 4000 + " ... (5000 characters)"),
    ],
)
def test_hyperparameters_become_plain_values(value: Any, expected: Any) -> None:
    assert _plain(value) == expected
    json.dumps(_plain(value), allow_nan=False)


def test_what_is_logged_before_the_run_begins_is_kept(start: Any) -> None:
    recorder = RunRecorder()
    recorder.log_hyperparameters({"early": 1})
    recorder.log_metrics({"lost": 1.0}, 0)
    run = start(recorder)
    run.close()

    assert of("hyperparameters")[0]["values"] == {"early": 1}


class Saver(Callback):
    """As the Trainer's, without saving anything."""

    def __init__(self) -> None:
        self.all_saved_checkpoints_to_timestamp: dict[str, Timestamp] = {}
        self.saved_checkpoints: list[str] = []

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        path = f"my-run/checkpoints/ba{state.timestamp.batch.value}.pt"
        self.all_saved_checkpoints_to_timestamp[path] = state.timestamp
        self.saved_checkpoints = [path]


def test_checkpoints_are_noted_with_the_path_seen_from_the_folder(start: Any) -> None:
    saver = Saver()
    run = start(RunRecorder(), "2ba", 2)
    run.state.callbacks = [saver, *run.state.callbacks]
    run.fit()
    run.close()

    assert [(r["path"], r["batch"]) for r in of("checkpoint")] == [("checkpoints/ba1.pt", 1), ("checkpoints/ba2.pt", 2)]
    assert of("end")[0]["kept_checkpoints"] == ["checkpoints/ba2.pt"]


def test_a_crash_is_recorded_with_its_error(start: Any) -> None:
    run = start(RunRecorder(), "5ba", 5)
    run.fit(stop_after=2)
    try:
        raise ValueError("the loss is gone")
    except ValueError:
        run.close()

    (end,) = of("end")
    assert (end["status"], end["error"]) == ("crashed", {"type": "ValueError", "message": "the loss is gone"})
    assert end["batch"] == 2


def test_a_run_that_is_closed_early_is_stopped(start: Any) -> None:
    run = start(RunRecorder(), "5ba", 5)
    run.fit(stop_after=2)
    run.close()

    assert of("end")[0]["status"] == "stopped"


def test_a_run_that_is_stopped_early_is_recorded_as_stopped(start: Any) -> None:
    run = start(RunRecorder(), "5ba", 5)
    run.fit(stop_after=3)
    run.engine.run_event("fit_start")
    run.state.stop_training()
    run.engine.run_event("fit_end")
    run.close()

    assert of("end")[0]["status"] == "stopped"


def test_a_run_that_never_trains_says_so(start: Any) -> None:
    start(RunRecorder()).close()

    assert of("end")[0]["status"] == "unused"


def test_an_error_after_the_training_is_not_the_runs(start: Any) -> None:
    run = start(RunRecorder(), "2ba", 2)
    run.fit()
    try:
        raise ValueError("while plotting")
    except ValueError:
        run.close()

    assert (of("end")[0]["status"], of("end")[0]["error"]) == ("finished", None)


SCRIPT = """
import sys, torch
from composer.core import Engine, State
from composer.loggers import RunRecorder
state = State(model=torch.nn.Linear(1, 1), max_duration="2ba", run_name="my-run", dataloader=[1])
state.callbacks = [RunRecorder()]
engine = Engine(state)
engine.run_event("init")
engine.run_event("fit_start")
engine.logger.log_metrics({"loss": 1.0})
if sys.argv[1] == "raise":
    raise RuntimeError("out of luck")
elif sys.argv[1] == "kill":
    import os, signal, time
    time.sleep(0.1)
    while not open("my-run/run-rank0.jsonl").read().count('"metrics"'):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_an_uncaught_exception_and_a_kill_leave_a_record(tmp_path: Path) -> None:
    processes = []
    for how in ("raise", "kill"):
        (tmp_path / how).mkdir()
        command = [sys.executable, "-c", SCRIPT, how]
        processes.append(subprocess.Popen(command, cwd=tmp_path / how, stderr=subprocess.DEVNULL))
    for process in processes:
        process.wait(60)

    (end,) = of("end", tmp_path / "raise/my-run/run-rank0.jsonl")
    assert (end["status"], end["error"]) == ("crashed", {"type": "RuntimeError", "message": "out of luck"})
    killed = tmp_path / "kill/my-run/run-rank0.jsonl"
    assert of("metrics", killed)[0]["values"] == {"loss": 1.0}
    assert of("end", killed) == []


def test_the_hook_for_exceptions_is_put_back(start: Any) -> None:
    before = sys.excepthook
    run = start(RunRecorder())
    assert sys.excepthook is not before
    run.close()

    assert sys.excepthook is before


def test_a_torn_line_is_ended_before_more_is_written(start: Any) -> None:
    Path("my-run").mkdir()
    Path("my-run/run-rank0.jsonl").write_text('{"type": "st')
    start(RunRecorder()).close()

    text = Path("my-run/run-rank0.jsonl").read_text().splitlines()
    assert text[0] == '{"type": "st'
    assert json.loads(text[1])["type"] == "start"


def test_a_resumed_run_names_its_checkpoint(start: Any) -> None:
    recorder = RunRecorder()
    run = start(recorder, "5ba", 5)
    run.fit(stop_after=2)
    saved = copy.deepcopy(recorder.state_dict())
    run.close()
    again = RunRecorder()
    run = start(again, "5ba", 5)
    again.load_state_dict(saved)
    run.state.timestamp = Timestamp(batch=2, batch_in_epoch=2)
    run.engine.run_event("after_load")
    run.fit()
    run.close()

    (mark,), (resume,) = of("mark"), of("resume")
    assert (resume["mark"], resume["batch"]) == (mark["mark"], 2)
    assert saved == {"mark": mark["mark"]}


def test_a_checkpoint_waits_for_what_was_logged_before_it(start: Any) -> None:
    recorder = RunRecorder()
    run = start(recorder)
    run.logger.log_metrics({"loss": 0.25})
    recorder.state_dict()

    assert of("metrics")[0]["values"] == {"loss": 0.25}
    assert lines()[-1]["type"] == "mark"
    run.close()


def test_only_rank_zero_records_by_default(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("composer.utils.dist.get_global_rank", lambda: 1)
    computed: list[int] = []
    quiet = RunRecorder()
    run = start(quiet)
    run.logger.log_metrics({"together": DeferredValue(lambda: computed.append(1))})
    run.fit()
    assert quiet.state_dict() == {}
    run.close()
    assert not Path("my-run").exists()
    assert computed == [1]  # it may take all ranks
    assert quiet.path is None

    run = start(RunRecorder(rank_zero_only=False))
    run.close()
    assert lines("my-run/run-rank1.jsonl")[0]["rank"] == 1


def test_a_folder_that_cannot_be_written_warns_once_and_the_run_continues(start: Any) -> None:
    Path("my-run").write_text("in the way")
    with pytest.warns(UserWarning, match="`RunRecorder` failed to log"):
        run = start(RunRecorder(), "2ba", 2)
    run.fit()
    run.close()

    with pytest.raises(RuntimeError, match="`RunRecorder` failed to log"):
        start(RunRecorder(on_error="raise"))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="`timeout` must be positive, got 0"):
        RunRecorder(timeout=0)
    with pytest.raises(ValueError, match="`on_error` must be 'warn' or 'raise', got 'ignore'"):
        RunRecorder(on_error="ignore")


def test_a_copy_leaves_thread_and_file_behind(start: Any) -> None:
    recorder = RunRecorder("somewhere", group="seeds")
    run = start(recorder)
    twin = pickle.loads(pickle.dumps(recorder))
    run.close()

    assert (twin.folder, twin.group) == ("somewhere", "seeds")


def test_long_tables_are_cut_and_say_so(start: Any) -> None:
    run = start(RunRecorder())
    run.logger.log_table(["a"], [[i] for i in range(1500)], name="long")
    run.close()

    (table,) = of("table")
    assert (table["num_rows"], len(table["rows"]), table["rows"][-1]) == (1500, 1000, [999])


def test_a_step_puts_and_nothing_more(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The training's thread neither writes nor formats."""
    import threading

    written: list[str] = []
    original = json.dumps

    def dumps(*args: Any, **kwargs: Any) -> str:
        written.append(threading.current_thread().name)
        return original(*args, **kwargs)

    monkeypatch.setattr("composer.loggers.run_recorder.json.dumps", dumps)
    run = start(RunRecorder(), "20ba", 20)
    run.fit()
    run.close()

    assert set(written) == {"composer-RunRecorder"}


def test_traces_of_others_are_kept_as_metrics(start: Any) -> None:
    run = start(RunRecorder())
    run.logger.log_traces({"mine": 3, "yours": "x"})
    run.close()

    (record,) = of("metrics")
    assert (record["values"], record["texts"]) == ({"mine": 3}, {"yours": "x"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_does_not_wait_for_the_device(start: Any) -> None:
    run = start(RunRecorder(), "50ba", 50)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(50):
            run.logger.log_metrics({"loss": DeferredValue.of_tensor(torch.full((), float(i), device="cuda"))}, i)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.close()

    values = [record["values"]["loss"] for record in of("metrics")]
    assert values == [float(i) for i in range(50)]
