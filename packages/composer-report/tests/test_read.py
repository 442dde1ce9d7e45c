"""Recorded runs are read as they were recorded."""

from __future__ import annotations

import datetime
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer.core import Engine, State
from composer.loggers import Logger, RunRecorder
from composer.report import RunNotFoundError, find_runs, read_run
from composer.report._read import read_attempts
from composer.testing import run_on_ranks

Train = Callable[..., Path]

_names = st.text(min_size=1, max_size=12).filter(lambda name: "loss" not in name)
_values = st.one_of(st.floats(width=64), st.integers(-(2**70), 2**70), st.booleans())
_logged = st.lists(st.tuples(st.integers(0, 50), st.dictionaries(_names, _values, max_size=4)), max_size=30)
_plain = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=8,
)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@settings(max_examples=8, deadline=None)
@given(_logged, st.dictionaries(st.sampled_from(["a", "b/c", "d.e", "\u00e9<"]), _plain), st.text(max_size=20))
def test_everything_logged_comes_back(recording: Any, logged: Any, hyperparameters: Any, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = recording(Path(folder) / "run", name=name)
        run.logger.log_hyperparameters(hyperparameters)
        for step, metrics in logged:
            run.logger.log_metrics(metrics, step)
        run.close()
        found = read_run(Path(folder) / "run")

    expected: dict[str, list[tuple[int, float]]] = {}
    for step, metrics in logged:
        for key, value in metrics.items():
            expected.setdefault(key, []).append((step, float(value)))
    assert {key: [step for step, _ in pairs] for key, pairs in expected.items()} == {
        key: series.steps.tolist() for key, series in found.metrics.items()
    }
    for key, pairs in expected.items():
        np.testing.assert_array_equal(found.metrics[key].values, [value for _, value in pairs])
    assert found.hyperparameters == hyperparameters
    assert found.name == name


def test_a_run_of_the_trainer(trained: Path) -> None:
    run = read_run(trained / "long-1")

    assert (run.name, run.group, run.seed, run.status, run.error) == ("long-1", "long", 1, "finished", None)
    assert (run.batches, run.epochs, run.max_duration) == (24, 3, "3ep")
    assert run.started is not None
    assert abs(datetime.datetime.now(datetime.UTC) - run.started) < datetime.timedelta(hours=1)
    assert run.metrics["loss/train/total"].steps.tolist() == list(range(24))
    assert run.metrics["metrics/eval/MulticlassAccuracy"].steps.tolist() == [8, 16, 24]
    assert [(e.label, e.step, e.batches, e.samples) for e in run.evaluations] == [
        ("eval", step, 8, 32) for step in (8, 16, 24)
    ]
    assert run.epoch_starts[:3] == [(0, 0), (1, 8), (2, 16)]
    assert (run.model["class"], run.epoch_batches) == ("SimpleModel", 8)
    assert [(c.batch, c.state) for c in run.checkpoints] == [(8, "there"), (16, "there"), (24, "there")]
    assert all(c.path is not None and c.size == c.path.stat().st_size for c in run.checkpoints)
    ema, smoothing = run.algorithms
    assert (ema.name, smoothing.name) == ("EMA", "LabelSmoothing")
    assert [(act.event, act.count, act.spans) for act in smoothing.acts if act.event == "before_loss"] == [
        ("before_loss", 24, ((0, 23, 24),))
    ]
    assert {entry.name for entry in run.plan if entry.kind == "algorithm"} == {"EMA", "LabelSmoothing"}
    assert run.notes == []


def test_missing_and_removed_checkpoints_are_distinguished(run_trainer: Train, tmp_path: Path) -> None:
    folder = run_trainer(
        tmp_path / "run", save_folder=str(tmp_path / "run/ckpt"), save_num_checkpoints_to_keep=2, run_name="a"
    )
    (folder / "ckpt/ep3-ba24-rank0.pt").unlink()

    assert [(c.batch, c.state, c.size is None) for c in read_run(folder).checkpoints] == [
        (8, "removed", True),
        (16, "there", False),
        (24, "missing", True),
    ]


def test_a_moved_folder_still_finds_its_checkpoints(run_trainer: Train, tmp_path: Path) -> None:
    folder = run_trainer(tmp_path / "run", "1ep", save_folder=str(tmp_path / "run/ckpt"))
    folder.rename(tmp_path / "elsewhere")

    assert [c.state for c in read_run(tmp_path / "elsewhere").checkpoints] == ["there"]


def test_a_resumed_run_is_one_run(run_trainer: Train, tmp_path: Path) -> None:
    options = {"save_folder": str(tmp_path / "run/ckpt"), "autoresume": True, "run_name": "again"}
    run_trainer(tmp_path / "run", "2ep", **options)
    whole = read_run(tmp_path / "run")
    run_trainer(tmp_path / "run", "3ep", **options)
    run = read_run(tmp_path / "run")

    for name, series in run.metrics.items():
        assert (np.diff(series.steps) >= 0).all(), name
        assert (np.diff(series.seconds) >= 0).all(), name
    assert run.metrics["loss/train/total"].steps.tolist() == list(range(24))
    assert run.metrics["metrics/eval/MulticlassAccuracy"].steps.tolist() == [8, 16, 24]
    assert [e.step for e in run.evaluations] == [8, 16, 24]
    assert [(c.batch, c.state) for c in run.checkpoints] == [(8, "there"), (16, "there"), (24, "there")]
    assert [(r.batch, r.epoch, r.superseded) for r in run.resumes] == [(16, 2, 0)]
    (smoothing,) = [a for a in run.algorithms if a.name == "LabelSmoothing"]
    assert [act.spans for act in smoothing.acts if act.event == "before_loss"] == [((0, 23, 24),)]
    assert (run.started, run.status) == (whole.started, "finished")
    assert run.seconds > whole.metrics["loss/train/total"].seconds[-1]
    assert run.notes == []


def resumed(recording: Any, folder: Path, saved: dict[str, Any], batch: int) -> Any:
    """A run that goes on from a checkpoint at a batch."""
    from composer.core import Timestamp

    run = recording(folder)
    run.recorder.load_state_dict(saved)
    run.state.timestamp = Timestamp(epoch=batch // 10, batch=batch, batch_in_epoch=batch % 10)
    run.engine.run_event("after_load")
    return run


def test_records_after_the_checkpoint_are_superseded(recording: Any, tmp_path: Path) -> None:
    first = recording(tmp_path).fit([1.0, 2.0, 3.0])
    saved = first.recorder.state_dict()
    first.logger.log_metrics({"after": 1.0})
    first.fit([-4.0, -5.0, -6.0]).close()
    second = resumed(recording, tmp_path, saved, 3).fit([4.0])
    newer = second.recorder.state_dict()
    second.fit([-5.0]).close()
    resumed(recording, tmp_path, newer, 4).fit([5.0]).close()
    run = read_run(tmp_path)

    loss = run.metrics["loss/train/total"]
    assert (loss.steps.tolist(), loss.values.tolist()) == ([0, 1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert "after" not in run.metrics
    assert [r.batch for r in run.resumes] == [3, 4]
    assert run.resumes[0].superseded > 0


def test_going_back_to_an_early_checkpoint_leaves_out_all_that_followed(recording: Any, tmp_path: Path) -> None:
    first = recording(tmp_path).fit([1.0])
    early = first.recorder.state_dict()
    late = first.fit([-2.0]).recorder.state_dict()
    first.close()
    resumed(recording, tmp_path, late, 2).fit([-3.0]).close()
    resumed(recording, tmp_path, early, 1).fit([2.0]).close()
    run = read_run(tmp_path)

    assert run.metrics["loss/train/total"].values.tolist() == [1.0, 2.0]
    assert [r.batch for r in run.resumes] == [1]


def test_a_checkpoint_costs_the_same_however_many_metrics_there_are(record: Any, tmp_path: Path) -> None:
    """A run of 10,000 metrics may have a thousand checkpoints."""
    sizes = []
    for num_metrics in (1, 1000):
        run = record(f"{num_metrics}")
        run.logger.log_metrics({f"m{i}": 0.5 for i in range(num_metrics)})
        run.recorder.state_dict()
        run.close()
        [attempt] = read_attempts(run.recorder.path, [])
        sizes.append(len(json.dumps(list(attempt.marks.values()))))

    assert abs(sizes[0] - sizes[1]) < 20


def test_a_run_resumed_from_elsewhere_has_a_note(recording: Any, tmp_path: Path) -> None:
    resumed(recording, tmp_path, {"mark": "unknown"}, 7).fit([1.0]).close()
    run = read_run(tmp_path)

    assert run.metrics["loss/train/total"].steps.tolist() == [7]
    assert run.notes == ["The run resumed from batch 7; earlier batches were recorded elsewhere."]


def test_a_run_begun_anew_replaces_the_earlier_one(recording: Any, tmp_path: Path) -> None:
    recording(tmp_path).fit([-1.0]).close()
    recording(tmp_path).fit([1.0]).close()
    run = read_run(tmp_path)

    assert run.metrics["loss/train/total"].values.tolist() == [1.0]
    assert len(run.notes) == 1
    assert "1 earlier attempt that was not resumed" in run.notes[0]


def test_several_fits_are_one_run(record: Any, tmp_path: Path) -> None:
    run = record()
    run.fit([1.0, 2.0]).end().fit([3.0]).end().close()
    found = read_run(tmp_path / "run")

    assert found.metrics["loss/train/total"].values.tolist() == [1.0, 2.0, 3.0]
    assert (found.status, found.batches) == ("finished", 3)


def test_a_close_without_a_fit(record: Any, tmp_path: Path) -> None:
    record().close()
    run = read_run(tmp_path / "run")

    assert (run.status, run.batches, run.metrics, run.seconds >= 0) == ("unused", 0, {}, True)


def test_a_crash(record: Any, tmp_path: Path) -> None:
    run = record().fit([1.0])
    try:
        raise OSError("disk <full>")
    except OSError:
        run.close()
    found = read_run(tmp_path / "run")

    assert (found.status, found.error) == ("crashed", "OSError: disk <full>")


@pytest.mark.parametrize("keep", [1, 20, 60])
def test_a_killed_run_with_a_torn_line(record: Any, tmp_path: Path, keep: int) -> None:
    record().fit([1.0, 2.0, 3.0]).close()
    path = tmp_path / "run/run-rank0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    losses = [i for i, line in enumerate(lines) if b"loss/train" in line]
    path.write_bytes(b"".join(lines[: losses[-1]]) + lines[losses[-1]][:keep])
    run = read_run(tmp_path / "run")

    assert run.metrics["loss/train/total"].values.tolist() == [1.0, 2.0]
    assert run.status == "unfinished"
    assert run.notes[0].startswith("1 line was damaged")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_record_cut_anywhere_is_read(trained: Path, data: st.DataObject) -> None:
    content = (trained / "short-1/run-rank0.jsonl").read_bytes()
    first = content.index(b"\n") + 1
    cut = data.draw(st.integers(first, len(content)))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run-rank0.jsonl").write_bytes(content[:cut])
        run = read_run(folder)

    assert run.name == "short-1"
    assert run.batches <= 16


def _on_a_rank(folder: str) -> None:
    recorder = RunRecorder(folder)
    state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", run_name="ranks", dataloader=[None])
    state.callbacks = [recorder]
    engine = Engine(state, Logger(state, [recorder]))
    engine.run_event("init")
    engine.logger.log_metrics({"rank": float(torch.distributed.get_rank())})
    engine.close()


def test_of_two_ranks_the_first_records(tmp_path: Path) -> None:
    run_on_ranks(_on_a_rank, 2, str(tmp_path / "run"))
    run = read_run(tmp_path / "run")

    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run-rank0.jsonl"]
    assert run.metrics["rank"].values.tolist() == [0.0]
    assert run.environment["world_size"] == 2


def test_a_record_of_a_later_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run-rank0.jsonl").write_text('{"type":"start","schema":2,"time":0,"run_name":"a"}\n')

    with pytest.raises(ValueError, match=r"must be a record of schema 1, got 2.*pip install --upgrade composer-report"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "it does not exist"),
        (lambda path: path.write_text(""), "it is not a folder"),
        (lambda path: path.mkdir(), "have a `run-rank0.jsonl` with a run.*RunRecorder"),
    ],
)
def test_the_error_for_a_folder_without_a_run_names_what_is_missing(make: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "nothing"
    make(path)

    with pytest.raises(RunNotFoundError, match=message):
        read_run(path)
    with pytest.raises(RunNotFoundError, match=message):
        find_runs([path])


def test_a_record_without_a_start_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run-rank0.jsonl").write_text('{"type":"metrics"}\n')

    with pytest.raises(RunNotFoundError):
        read_run(tmp_path)


def test_folders_of_runs_are_found_in_order(record: Any, tmp_path: Path) -> None:
    for name in ("a/seed10", "a/seed2", "b/c/only", "d/0.1-a", "d/0.01-b"):
        record(name).close()

    assert [p.name for p in find_runs([tmp_path / "a"])] == ["seed2", "seed10"]
    assert [p.name for p in find_runs([tmp_path / "d"])] == ["0.01-b", "0.1-a"]
    assert [p.name for p in find_runs([tmp_path / "b", tmp_path / "a/seed2", tmp_path / "a"])] == [
        "only",
        "seed2",
        "seed10",
    ]


def test_tables_actions_and_texts(record: Any, tmp_path: Path) -> None:
    run = record()
    run.logger.log_traces({"algorithm_traces/MixUp/Event.BATCH_START": 1})
    run.logger.log_hyperparameters({"mix_up/alpha": 0.5, "mixing": 1})
    run.logger.log_table(["a", "b"], [[1, math.nan]], name="other")
    run.logger.log_metrics({"note": "hello"})
    run.close()
    found = read_run(tmp_path / "run")

    (mixup,) = found.algorithms
    assert mixup.logged == {"mix_up/alpha": 0.5}
    assert [(t.name, t.columns, t.rows) for t in found.tables if t.name == "other"] == [
        ("other", ("a", "b"), ((1, "NaN"),))
    ]
    assert found.texts == {"note": "hello"}
