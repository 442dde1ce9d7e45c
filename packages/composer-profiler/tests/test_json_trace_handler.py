from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from composer import Trainer
from composer.core import Callback, State
from composer.profiler import JSONTraceHandler, Profiler, cyclic_schedule
from composer.testing import RandomClassificationDataset, SimpleModel, run_on_ranks
from composer.utils import dist

ALL = {"wait": 0, "warmup": 0, "active": 1000, "repeat": 0}


def profiler_of(handler: JSONTraceHandler, torch_too: bool = False, **schedule: int) -> Profiler:
    return Profiler(
        schedule=cyclic_schedule(**(schedule or ALL)),
        trace_handlers=handler,
        sys_prof_cpu=False,
        torch_prof_profile_memory=torch_too,
        torch_prof_with_flops=False,
    )


def names(events: Sequence[dict[str, Any]], phase: str) -> Counter[str]:
    return Counter(event["name"] for event in events if event["ph"] == phase)


def test_a_run_of_two_epochs(
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    read: Callable[[Path], Any],
    check_trace: Callable[[Any], None],
) -> None:
    handler = JSONTraceHandler(folder="traces")
    make_trainer(profiler_of(handler, torch_too=True)).fit()

    merged = read(tmp_path / "traces/merged_trace.json")
    check_trace(merged)
    begun = names(merged, "B")
    assert begun == names(merged, "E")
    assert (begun["event/fit"], begun["event/epoch"], begun["event/batch"], begun["event/forward"]) == (1, 2, 8, 8)
    assert begun["event/dataloader"] == 10
    assert names(merged, "X")["ProfilerStep#0"] == 2
    assert names(merged, "M")["global_rank"] == 1
    for _, paths in handler.saved_traces:
        check_trace(read(paths[0]))
    assert [str(paths[0]) for _, paths in handler.saved_traces] == [
        f"traces/{name}-rank0.json" for name in ("ep0-ba4", "ep1-ba8", "ep2-ba8")
    ]


def test_what_happens_within_another_thing_is_shown_there(
    make_trainer: Callable[..., Trainer], tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    make_trainer(profiler_of(JSONTraceHandler()), eval_dataloader=DataLoader(RandomClassificationDataset(size=4))).fit()

    inside, parents = [], {}
    for event in read(tmp_path / "run/traces/merged_trace.json"):
        if event["ph"] == "B":
            parents.setdefault(event["name"], set()).add(inside[-1] if inside else None)
            inside.append(event["name"])
        elif event["ph"] == "E":
            inside.pop()
    expected = {
        "event/iteration": {"event/fit"},
        "event/epoch": {"event/iteration"},
        "event/batch": {"event/epoch"},
        "event/train_batch": {"event/batch"},
        "event/forward": {"event/train_batch"},
        "event/eval": {"event/eval_all"},
        "event/eval_forward": {"event/eval_batch"},
    }
    assert {name: parents[name] for name in expected} == expected


def test_only_scheduled_batches_are_in_it(
    make_trainer: Callable[..., Trainer], tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    handler = JSONTraceHandler()
    make_trainer(profiler_of(handler, wait=1, warmup=0, active=1, repeat=1), max_duration="1ep").fit()

    merged = read(tmp_path / "run/traces/merged_trace.json")
    assert [e["args"]["batch"] for e in merged if e["name"] == "event/forward" and e["ph"] == "B"] == [1]
    assert names(merged, "B")["event/epoch"] == 1


def test_old_files_are_removed_and_the_merged_one_holds_all(
    make_trainer: Callable[..., Trainer], tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    handler = JSONTraceHandler(folder="traces", num_traces_to_keep=1)
    make_trainer(profiler_of(handler, warmup=0, active=1, repeat=0)).fit()

    left = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert left == ["ep2-ba8-rank0.json", "merged_trace.json"]
    assert [paths for _, paths in handler.saved_traces] == [[Path("traces/ep2-ba8-rank0.json")]]
    assert names(read(tmp_path / "traces/merged_trace.json"), "B")["event/batch"] == 8


def test_nothing_is_kept_but_the_merged_file(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    handler = JSONTraceHandler(folder="traces", num_traces_to_keep=0)
    make_trainer(profiler_of(handler)).fit()

    assert ([p.name for p in (tmp_path / "traces").iterdir()], handler.saved_traces) == (["merged_trace.json"], [])


def test_files_are_handed_to_loggers_and_the_merged_one_itself(
    make_trainer: Callable[..., Trainer], tmp_path: Path, store: Any, read: Callable[[Path], Any]
) -> None:
    make_trainer(profiler_of(JSONTraceHandler()), loggers=store).fit()

    files = ("ep0-ba4-rank0", "ep1-ba8-rank0", "ep2-ba8-rank0", "merged_trace")
    assert set(store.files) == {f"run/traces/{name}.json" for name in files}
    assert json.loads(store.files["run/traces/merged_trace.json"]) == read(tmp_path / "run/traces/merged_trace.json")


def test_nothing_is_handed_over_without_a_name(make_trainer: Callable[..., Trainer], store: Any) -> None:
    handler = JSONTraceHandler(remote_file_name=None, merged_trace_remote_file_name=None)
    make_trainer(profiler_of(handler), loggers=store).fit()

    assert store.files == {}


def test_the_merged_file_can_be_left_out(make_trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    handler = JSONTraceHandler(folder="traces", merged_trace_filename=None)
    make_trainer(profiler_of(handler)).fit()

    assert handler.merged_trace_path is None
    assert not (tmp_path / "traces/merged_trace.json").exists()


def test_a_folder_must_be_empty(
    make_trainer: Callable[..., Trainer], tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    make_trainer(profiler_of(JSONTraceHandler())).fit()
    with pytest.raises(FileExistsError, match="must be empty"):
        make_trainer(profiler_of(JSONTraceHandler()))
    make_trainer(profiler_of(JSONTraceHandler(overwrite=True))).fit()

    assert names(read(tmp_path / "run/traces/merged_trace.json"), "B")["event/fit"] == 1


def test_several_fits_are_on_one_timeline(
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    read: Callable[[Path], Any],
    check_trace: Callable[[Any], None],
) -> None:
    trainer = make_trainer(profiler_of(JSONTraceHandler()), max_duration="3ba")
    trainer.fit()
    trainer.fit(duration="3ba")
    trainer.fit(duration="1ep", reset_time=True)
    trainer.eval(DataLoader(RandomClassificationDataset(size=4)))
    trainer.close()
    merged = read(tmp_path / "run/traces/merged_trace.json")

    check_trace(merged)
    begun = names(merged, "B")
    assert (begun["event/fit"], begun["event/batch"], begun["event/eval_standalone"]) == (3, 10, 1)


def test_a_resumed_run_continues_the_merged_file(
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    read: Callable[[Path], Any],
    check_trace: Callable[[Any], None],
) -> None:
    trainer = make_trainer(profiler_of(JSONTraceHandler()), max_duration="2ba")
    trainer.fit()
    trainer.save_checkpoint("checkpoint.pt")
    trainer.close()
    profiler = profiler_of(JSONTraceHandler(), skip_first=1, warmup=0, active=1)
    trainer = make_trainer(profiler, max_duration="1ep", load_path="checkpoint.pt")

    assert profiler.resumption_batch_idx == 2
    trainer.fit()
    merged = read(tmp_path / "run/traces/merged_trace.json")
    check_trace(merged)
    assert [e["args"]["batch"] for e in merged if e["name"] == "event/forward" and e["ph"] == "B"] == [0, 1, 3]


def test_an_error_leaves_a_complete_trace(
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    read: Callable[[Path], Any],
    check_trace: Callable[[Any], None],
) -> None:
    class Failing(Callback):
        def after_forward(self, state: State, logger: Any) -> None:
            if state.timestamp.batch == "2ba":
                raise ZeroDivisionError

    trainer = make_trainer(profiler_of(JSONTraceHandler()), callbacks=Failing())
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    trainer.close()
    merged = read(tmp_path / "run/traces/merged_trace.json")

    check_trace(merged)
    assert names(merged, "B")["event/batch"] == 3
    assert names(merged, "B")["callback/Failing/event/after_forward"] == 3


def test_after_an_error_fit_can_go_on(
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    read: Callable[[Path], Any],
    check_trace: Callable[[Any], None],
) -> None:
    class FailingOnce(Callback):
        failed = False

        def batch_end(self, state: State, logger: Any) -> None:
            if not self.failed:
                self.failed = True
                raise ZeroDivisionError

    trainer = make_trainer(profiler_of(JSONTraceHandler(), torch_too=True), callbacks=FailingOnce())
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    trainer.fit()
    merged = read(tmp_path / "run/traces/merged_trace.json")

    check_trace(merged)
    assert names(merged, "B")["event/fit"] == 2


def test_an_epoch_of_unknown_length(
    make_trainer: Callable[..., Trainer],
    tmp_path: Path,
    read: Callable[[Path], Any],
    check_trace: Callable[[Any], None],
) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([RandomClassificationDataset(size=3)[i] for i in range(3)])

    loader: Any = DataLoader(Stream(), batch_size=1)
    profiler = profiler_of(JSONTraceHandler(), torch_too=True, wait=1, warmup=1, active=5)
    make_trainer(profiler, train_dataloader=loader, max_duration="6ba").fit()
    merged = read(tmp_path / "run/traces/merged_trace.json")

    check_trace(merged)
    assert [e["args"]["batch"] for e in merged if e["name"] == "event/batch" and e["ph"] == "B"] == [1, 2, 4, 5]
    assert len(list(tmp_path.rglob("*.pt.trace.json"))) == 2


def test_files_are_written_where_temporary_files_cannot_be_moved_to(
    make_trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any]
) -> None:
    def refuse(self: Path, target: Any) -> None:
        assert Path(target).parent == self.parent, "another file system"
        replace(self, target)

    replace = Path.replace
    monkeypatch.setattr(Path, "replace", refuse)
    monkeypatch.setattr("os.rename", lambda *_: pytest.fail("moved"))
    make_trainer(profiler_of(JSONTraceHandler(), torch_too=True)).fit()

    assert names(read(tmp_path / "run/traces/merged_trace.json"), "B")["event/fit"] == 1
    assert [path for path in tmp_path.rglob(".*") if path.is_file()] == []


def test_how_many_are_kept() -> None:
    with pytest.raises(ValueError, match="`num_traces_to_keep` must be at least -1, got -2"):
        JSONTraceHandler(num_traces_to_keep=-2)


def _train(folder: str) -> list[int]:
    model = SimpleModel()
    data = RandomClassificationDataset(size=8)
    loader = DataLoader(data, batch_size=2, sampler=dist.get_sampler(data))
    handler = JSONTraceHandler(folder=f"{folder}/traces", num_traces_to_keep=1)
    profiler = Profiler(
        cyclic_schedule(warmup=0, active=2, repeat=0),
        handler,
        sys_prof_cpu=False,
        torch_prof_folder=f"{folder}/torch",
        torch_prof_use_gzip=True,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The profiler is enabled")
        trainer = Trainer(
            model=model,
            train_dataloader=loader,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="2ep",
            device="cpu",
            progress_bar=False,
            profiler=profiler,
        )
    trainer.fit()
    trainer.close()
    return [len(paths) for _, paths in handler.saved_traces]


def test_two_ranks_are_on_one_timeline(
    tmp_path: Path, read: Callable[[Path], Any], check_trace: Callable[[Any], None]
) -> None:
    kept = run_on_ranks(_train, 2, str(tmp_path))
    merged = read(tmp_path / "traces/merged_trace.json")

    check_trace(merged)
    assert kept == [[2], [2]]
    assert {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"} == {
        rank: f"Rank {rank} training loop process" for rank in (0, 1)
    }
    for rank in (0, 1):
        own = [event for event in merged if event["pid"] == rank]
        begun = names(own, "B")
        assert (begun["event/fit"], begun["event/epoch"], begun["event/batch"]) == (1, 2, 4)
        assert sum(event["ph"] == "X" and event["name"] == "aten::addmm" for event in own) >= 4
    # The ranks train a batch at the same time: the exchange of gradients waits for both. Their clock is one, but each
    # rank reads it late after the barrier, if something else runs on its core; it knows by how much at most.
    late = max(e["args"]["value"] for e in merged if e["name"] == "clock_sync_error_bound")
    syncs = {
        (e["pid"], e["args"]["number"]): e["args"]["value"] for e in merged if e["name"] == "clock_sync_timestamp_us"
    }
    assert abs(syncs[0, 1] - syncs[1, 1]) <= late
    spans = {(e["pid"], e["args"]["batch"], e["ph"]): e["ts"] for e in merged if e["name"] == "event/backward"}
    for batch in range(4):
        assert max(spans[(r, batch, "B")] for r in (0, 1)) < min(spans[(r, batch, "E")] for r in (0, 1)) + late
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == [
        "ep2-ba4-rank0.json",
        "ep2-ba4-rank1.json",
        "merged_trace.json",
    ]
