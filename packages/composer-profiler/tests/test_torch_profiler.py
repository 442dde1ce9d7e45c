from __future__ import annotations

import gzip
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from composer import Trainer
from composer.profiler import Profiler, TorchProfiler, TraceHandler, cyclic_schedule
from composer.profiler.utils import export_memory_timeline_html


class Files(TraceHandler):
    """Reads the files it is handed."""

    def __init__(self) -> None:
        self.traces: list[Any] = []
        self.paths: list[Path] = []

    def process_chrome_json_trace_file(self, filepath: Path) -> None:
        opened = gzip.open if filepath.suffix == ".gz" else open
        with opened(filepath, "rt") as file:
            self.traces.append(json.load(file))
        self.paths.append(filepath)


def profiler_of(files: Files, schedule: Any = None, **kwargs: Any) -> Profiler:
    chosen = cyclic_schedule(warmup=1, active=2, repeat=1) if schedule is None else schedule
    return Profiler(
        chosen, files, sys_prof_cpu=False, **{f"torch_prof_{name}": value for name, value in kwargs.items()}
    )


def part_of(profiler: Profiler) -> TorchProfiler:
    (part,) = (callback for callback in profiler._callbacks if isinstance(callback, TorchProfiler))
    return part


def test_a_trace_holds_the_scheduled_batches_of_each_epoch(make_trainer: Callable[..., Trainer]) -> None:
    files = Files()
    make_trainer(profiler_of(files)).fit()

    assert [path.as_posix() for path in files.paths] == [f"run/torch_traces/rank0.{n}.pt.trace.json" for n in (3, 7)]
    for trace in files.traces:
        found = {event["name"] for event in trace["traceEvents"]}
        assert {"ProfilerStep#1", "ProfilerStep#2", "aten::addmm"} <= found
        assert "ProfilerStep#0" not in found
        assert trace["global_rank"] == 0
        assert trace["clock_sync_timestamp_us"] > 1.7e15


def test_traces_can_be_compressed(make_trainer: Callable[..., Trainer], store: Any) -> None:
    files = Files()
    make_trainer(profiler_of(files, use_gzip=True), loggers=store).fit()

    assert [path.name for path in files.paths] == [f"rank0.{n}.pt.trace.json.gz" for n in (3, 7)]
    assert set(store.files) == {f"run/torch_traces/rank0.{n}.pt.trace.json.gz" for n in (3, 7)}
    assert all(json.loads(gzip.decompress(content))["traceEvents"] for content in store.files.values())


@pytest.mark.parametrize(("keep", "left"), [(-1, 4), (2, 2), (1, 1), (0, 0)])
def test_old_traces_are_removed(make_trainer: Callable[..., Trainer], tmp_path: Path, keep: int, left: int) -> None:
    files = Files()
    profiler = profiler_of(files, cyclic_schedule(warmup=0, active=2, repeat=0), num_traces_to_keep=keep)
    trainer = make_trainer(profiler)
    trainer.fit()
    trainer.close()

    expected = [f"rank0.{n}.pt.trace.json" for n in (2, 4, 6, 8)]
    assert [path.name for path in files.paths] == expected
    assert sorted(path.name for path in tmp_path.rglob("*.json")) == expected[4 - left :]
    assert [paths[0].name for _, paths in part_of(profiler).saved_traces] == expected[4 - left :]


def test_a_run_that_ends_while_it_records_is_saved(make_trainer: Callable[..., Trainer]) -> None:
    files = Files()
    make_trainer(profiler_of(files, cyclic_schedule(warmup=1, active=50)), max_duration="3ba").fit()

    assert [path.name for path in files.paths] == ["rank0.3.pt.trace.json"]


def test_a_run_that_ends_before_a_batch_is_recorded_saves_nothing(make_trainer: Callable[..., Trainer]) -> None:
    files = Files()
    make_trainer(profiler_of(files, cyclic_schedule(warmup=3, active=1)), max_duration="3ba").fit()

    assert files.paths == []


def test_newer_traces_are_not_replaced(make_trainer: Callable[..., Trainer]) -> None:
    make_trainer(profiler_of(Files())).fit()
    with pytest.raises(FileExistsError, match="must not be newer than the run"):
        make_trainer(profiler_of(Files()))
    make_trainer(profiler_of(Files(), overwrite=True)).fit()


def test_the_operations_are_summed_in_the_log(
    make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(profiler_of(Files()))
    trainer.fit()
    with caplog.at_level(logging.INFO, logger="composer.profiler"):
        trainer.close()

    assert "aten::addmm" in caplog.text


@pytest.mark.parametrize("argument", ["memory_filename", "memory_remote_file_name"])
def test_pages_are_called_so(argument: str) -> None:
    names = {"memory_filename": "m.html", "memory_remote_file_name": "m.html", argument: "m.json"}
    with pytest.raises(AssertionError, match=f"`{argument}` must end in '.html'"):
        TorchProfiler(**names)


def test_how_many_are_kept() -> None:
    with pytest.raises(ValueError, match="`num_traces_to_keep` must be"):
        TorchProfiler(num_traces_to_keep=-2)


FULL = {"record_shapes": True, "profile_memory": True, "with_stack": True}


def test_the_memory_timeline_is_a_page_of_its_own(
    make_trainer: Callable[..., Trainer], tmp_path: Path, store: Any
) -> None:
    profiler = profiler_of(Files(), memory_filename="{batch}.html", memory_remote_file_name="m/{batch}.html", **FULL)
    make_trainer(profiler, loggers=store, max_duration="1ep").fit()

    page = (tmp_path / "run/torch_traces/3.html").read_text()
    assert "data:image/png;base64," in page
    assert "http" not in page
    assert store.files["m/3.html"].decode() == page


def recorded(**kwargs: bool) -> Any:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **{**FULL, **kwargs}) as profile:
        model = torch.nn.Linear(100, 100)
        model(torch.randn(1000, 100)).sum().backward()
    return profile


def test_the_figure_can_be_had(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    figure = export_memory_timeline_html(
        recorded(), tmp_path / "m.html", figsize=(5, 3), title="A title", yxis_step_size=1e-5, return_fig=True
    )

    assert isinstance(figure, Figure)
    assert "A title" in figure.gca().get_title()
    assert "Most at a time: 0.000" in figure.gca().get_title()
    assert len(figure.gca().get_yticks()) > 10
    assert export_memory_timeline_html(recorded(), str(tmp_path / "m.html"), device="cpu") is None


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="`prof` must have recorded with"):
        export_memory_timeline_html(recorded(with_stack=False), tmp_path / "m.html")
    with pytest.raises(ValueError, match="has recorded no memory of the device 'cuda:3'"):
        export_memory_timeline_html(recorded(), tmp_path / "m.html", device="cuda:3")
    with pytest.raises(ValueError, match="`yxis_step_size` must be positive"):
        export_memory_timeline_html(recorded(), tmp_path / "m.html", yxis_step_size=0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="composer-profiler\\[memory\\]"):
        export_memory_timeline_html(recorded(), tmp_path / "m.html")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_trace_holds_the_kernels_of_a_gpu(make_trainer: Callable[..., Trainer]) -> None:
    files = Files()
    make_trainer(profiler_of(files), device="gpu", precision="fp32").fit()

    for trace in files.traces:
        assert any(event.get("cat") == "kernel" for event in trace["traceEvents"])
