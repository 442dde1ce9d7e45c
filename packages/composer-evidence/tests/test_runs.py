"""Runs in processes of their own: results, kills, shards, averages."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tasks import Points, network, tiny

from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.muon import Muon
from composer.core import Callback
from composer.datasets.device_loader import DeviceLoader
from composer.evidence import Incomplete, Ledger, Runner, RunResult, RunSpec, Variant, _preload, merge
from composer.evidence.methods import TEACHER, member_of
from composer.evidence.run import environment, execute, hold_machine, machine_lock, make_trainer, write_atomically
from composer.evidence.runner import visible_gpus
from composer.evidence.steptime import measure_in_process
from composer.evidence.task import load_task
from composer.recipes import AdamW
from composer.testing import deep_compare

AVERAGES = {
    "EMA": ("EMA", {"half_life": "2ba", "update_interval": "1ba"}),
    "SWA": ("SWA", {"swa_start": "0.5dur", "swa_end": "1dur", "update_interval": "1ba"}),
}


def spec(**others: object) -> RunSpec:
    return RunSpec("tiny", "hash", "validation", "adamw", 8, **others)  # type: ignore[arg-type]


def run(one: RunSpec) -> RunResult:
    task = tiny()
    return execute(task, task.data(None), one)


def missing(runner: Runner, specs: Sequence[RunSpec]) -> int:
    return sum(runner._find(one.id) is None for one in specs)


def test_a_run_depends_on_its_description_only() -> None:
    first, again, other = run(spec(seed=1)), run(spec(seed=1)), run(spec(seed=2))

    assert first.status == "finished"
    assert first.metrics == again.metrics != other.metrics
    assert first.train_seconds > 0
    assert first.environment["versions"]["torch"]


def test_descriptions_and_results_survive_json() -> None:
    one = spec(stack=(("EMA", {"half_life": "2ba"}),), averages=AVERAGES, settings={"lr": 0.1})
    result = RunResult(one, "finished", {"": 0.5}, curve=[(1, 0.5)])

    again = RunResult.from_json({"kind": "run", "id": "x", **result.as_json()})
    assert again.spec.id == one.id != spec().id
    assert again.score() == 0.5
    assert math.isnan(again.score("EMA"))


def test_averages_do_not_change_the_training_and_equal_those_of_runs_of_their_own() -> None:
    plain, both = run(spec(seed=3)), run(spec(seed=3, averages=AVERAGES))
    alone = run(spec(seed=3, stack=(AVERAGES["EMA"],)))

    assert plain.metrics == both.metrics
    assert both.scores["EMA"] == alone.score()
    assert both.scores["SWA"] is not None


def test_a_method_that_replaces_the_schedule_runs_at_a_constant_rate() -> None:
    stack = (("ScheduleFree", {"recalibration_batches": 0, "warmup": "3ba"}),)
    result = run(spec(seed=3, stack=stack, settings={"lr": 3e-3, "warmup": 0.3}))
    others = [run(spec(seed=3, stack=stack, settings={"lr": 3e-3, "warmup": other})) for other in (0.0, 0.6)]

    assert (result.status, result.message) == ("finished", "")
    assert [other.metrics for other in others] == [result.metrics] * 2  # that of the schedule


def test_averages_in_the_model_are_scored_with_their_own_batch_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {"SWA": AVERAGES["SWA"], "ScheduleFree": ("ScheduleFree", {"recalibration_batches": 0})}
    measured = {name: run(spec(seed=3, stack=(method,))).metrics for name, method in of.items()}
    beside = run(spec(seed=3, averages={"SWA": AVERAGES["SWA"]}))

    assert measured["SWA"]["MulticlassAccuracy"] == beside.score("SWA")
    monkeypatch.setattr("composer.evidence.run.recalibrate_batchnorm", lambda *args: None)
    assert all(run(spec(seed=3, stack=(method,))).metrics != measured[name] for name, method in of.items())


def test_a_teacher_is_plain_trained_for_longer_and_shared_by_all_runs(tmp_path: Path) -> None:
    task, own = tiny(), tmp_path / "own"
    data = task.data(None)
    taught = spec(stack=(("Distillation", {"teacher": TEACHER, "weight": 1.0}),))
    results = [execute(task, data, replace(taught, seed=seed), tmp_path).score() for seed in (1, 2)]
    (file,) = tmp_path.glob("teacher-*.pt")
    modified = file.stat().st_mtime_ns

    execute(task, data, replace(taught, seed=1, settings={"lr": 0.1}), tmp_path)
    assert file.stat().st_mtime_ns == modified
    assert results == [execute(task, data, replace(taught, seed=seed), own).score() for seed in (1, 2)]
    with make_trainer(task, data, replace(spec(seed=60_000), steps=4 * task.steps)) as (trainer, _, _):
        trainer.fit()
    deep_compare(torch.load(file, weights_only=True), dict(trainer.state.model.state_dict()))


def test_a_run_that_raises_is_a_failed_result_with_the_reason() -> None:
    failed = run(spec(stack=(("LabelSmoothing", {"smoothing": 2.0}),)))

    assert failed.status == "failed"
    assert "smoothing" in failed.message


def test_a_method_that_should_not_be_used_so_says_why() -> None:
    together = run(spec(stack=(AVERAGES["EMA"], AVERAGES["SWA"])))

    assert "`EMA` should not be used together with `SWA`, which also averages weights" in together.message
    assert run(spec(averages=AVERAGES)).message == ""  # each by itself
    # A method is tried for a few steps, with arguments for all of them.
    assert run(spec(stack=(("ScheduleFree", {"recalibration_batches": 0, "warmup": "250ba"}),))).message == ""


def test_a_run_whose_loss_is_not_finite_has_diverged() -> None:
    task = tiny(metric=replace(tiny().metric, key="CrossEntropy"))
    result = execute(task, task.data(None), spec(settings={"lr": 1e30}))

    assert result.status == "diverged"
    assert math.isnan(result.score())


def test_the_process_from_which_runs_are_forked_has_read_the_metadata_of_packages() -> None:
    """Reading them takes longer than a short run."""
    environment.cache_clear()
    importlib.reload(_preload)
    run(spec())

    assert environment.cache_info().misses == 1


def test_a_metric_that_the_model_lacks_is_named() -> None:
    task = tiny(metric=replace(tiny().metric, key="Speed"))

    assert "must be a metric of the model" in execute(task, task.data(None), spec()).message


def test_a_curve_has_the_validation_part() -> None:
    result = run(spec(num_curve=2))

    assert [step for step, _ in result.curve] == [4, 8]
    assert result.curve[-1][1] == pytest.approx(result.score())


def test_the_lock_of_the_machine_is_in_the_cache_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    in_cache_folder = machine_lock()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    with hold_machine(alone=True):
        locks = [str(path.relative_to(tmp_path).parent) for path in tmp_path.rglob("*.lock")]

    assert tmp_path / "cache" / "composer" == in_cache_folder.parent
    assert ["home/.cache/composer"] == locks


def test_files_have_the_permissions_that_the_user_chose(tmp_path: Path) -> None:
    usual = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a.json", "1")
    finally:
        os.umask(usual)

    assert 0o640 == (tmp_path / "a.json").stat().st_mode & 0o777


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b.json", "1")
    with pytest.raises(TypeError):
        write_atomically(tmp_path / "a" / "b.json", None)  # type: ignore[arg-type]

    assert [file.name for file in (tmp_path / "a").iterdir()] == ["b.json"]
    assert (tmp_path / "a" / "b.json").read_text() == "1"


def test_runs_are_trained_once_and_read_back(runner: Callable[..., Runner]) -> None:
    first = runner()
    specs = [first.spec("validation", "adamw", 8, seed=seed) for seed in range(3)]
    results = first.results([*specs, specs[0]], "test")

    assert len(results) == 4
    assert len(list(first.ledger.lines("run"))) == 3
    again = runner()
    assert missing(again, specs) == 0
    assert [r.metrics for r in again.results(specs, "test")] == [r.metrics for r in results[:3]]


def test_results_without_a_line_in_the_ledger_are_added(runner: Callable[..., Runner]) -> None:
    first = runner()
    specs = [first.spec("validation", "adamw", 8)]
    first.results(specs, "test")
    first.ledger.path.unlink()  # as after a kill between the result and the line

    again = runner()
    again.results(specs, "test")
    assert len(list(Ledger(again.folder).lines("run"))) == 1


def test_a_run_whose_process_dies_is_tried_again(runner: Callable[..., Runner], tmp_path: Path) -> None:
    patient = runner(reference="tiny_tasks:dies_once", workers=1, data_folder=tmp_path)

    assert patient.results([patient.spec("validation", "adamw", 2)], "test")[0].status == "finished"
    assert (tmp_path / "died").exists()
    hopeless = runner("other", reference="tiny_tasks:always_dies", workers=1)
    with pytest.raises(RuntimeError, match="died 2 times, the last time with exit code 9"):
        hopeless.results([hopeless.spec("validation", "adamw", 2)], "test")


def test_shards_together_have_all_runs(runner: Callable[..., Runner], tmp_path: Path) -> None:
    whole = runner("whole", shard=(1, 1))
    specs = [whole.spec("validation", "adamw", 2, seed=seed) for seed in range(6)]
    for part in (1, 2):
        shard = runner(f"shard{part}", shard=(part, 2))
        with pytest.raises(Incomplete, match="belong to other shards"):
            shard.results(specs, "test")

    merge(whole.ledger, [tmp_path / "shard1", tmp_path / "shard2"])
    merged = runner("whole")
    assert missing(merged, specs) == 0
    assert [result.spec.seed for result in merged.results(specs, "test")] == list(range(6))
    assert not (tmp_path / "whole" / "runs").exists()


def test_a_killed_command_continues_with_the_runs_that_are_missing(runner: Callable[..., Runner]) -> None:
    first = runner()
    specs = [first.spec("validation", "adamw", 8, seed=seed) for seed in range(4)]
    first.results(specs[:1], "test")
    first.ledger.path.unlink()  # as if it was killed after the end of the run, and before it added the line

    again = runner()
    assert missing(again, specs) == 3
    assert len(again.results(specs, "test")) == 4
    assert len(list(Ledger(again.folder).lines("run"))) == 4


def test_a_run_holds_the_machine_itself_and_time_is_measured_alone(
    runner: Callable[..., Runner], tmp_path: Path
) -> None:
    """The processes of a command that is killed go on for a moment."""
    own = runner(reference="tiny_tasks:reports_the_lock", workers=1, data_folder=tmp_path)
    specs = [own.spec("validation", "adamw", 4, seed=seed) for seed in range(2)]

    own.results(specs, "test")
    assert (tmp_path / "held").read_text() == "shared"
    texts = tuple(json.dumps(asdict(one)) for one in specs)
    own.call(measure_in_process, (own.reference, str(tmp_path), texts, 0, str(tmp_path / "time.json")))
    assert (tmp_path / "held").read_text() == "alone"
    assert len(json.loads((tmp_path / "time.json").read_text())["seconds"]) == 3


@dataclass(frozen=True)
class Tuned(AdamW):
    """Training with everything that may be tuned."""

    initial: float = 0.5
    batch_size: int = 16

    def prepare(self, model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, self.initial)

    def callbacks(self) -> list[Callback]:
        return [Callback()]

    def algorithms(self) -> list[tuple[str, dict[str, Any]]]:
        return [("Muon", {"momentum": 0.9})]


@dataclass(frozen=True)
class Batched(Points):
    def loaders(self, part: str, seed: int, device: Any, batch_size: int = 1) -> tuple[Any, Any]:
        _, other = super().loaders(part, seed, device)
        return DeviceLoader(*self._part(0), batch_size, device=device, seed=seed), other


def test_initialization_callbacks_algorithms_and_batch_size_belong_to_the_settings() -> None:
    task, data = tiny(variants={"tuned": Variant(partial(network, 8), Tuned(lr=0.1), {})}), Batched()
    spec = RunSpec("tiny", "hash", "validation", "tuned", 8, settings={"initial": 0.25, "batch_size": 32})
    stack = (("LabelSmoothing", {}), ("Muon", {"row_floor": 0.5}))  # an option of what plain training has already
    with make_trainer(task, data, replace(spec, stack=stack)) as (trainer, train, _):
        muon, smoothing = trainer.state.algorithms
        assert isinstance(muon, Muon)
        assert isinstance(smoothing, LabelSmoothing)
        assert (muon.momentum, muon.row_floor) == (0.9, 0.5)
        assert all(bool((p == 0.25).all()) for p in trainer.state.model.parameters())
        assert any(type(callback) is Callback for callback in trainer.state.callbacks)
        assert (train.batch_size, str(trainer.state.max_duration)) == (32, "4ba")  # as many samples in fewer steps


@pytest.mark.parametrize("variant", ["shakespeare learned", "shakespeare rope", "records_small muon"])
def test_the_tasks_on_text_train(tmp_path: Path, variant: str) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 1000)
    name, variant = variant.split()
    task = load_task(name)
    data = task.data(text)
    options = tuple(member_of(task, method) for method in task.algorithms)  # all together
    spec = RunSpec(name, task.hash(data), "validation", variant, 2, stack=options, eval_batches=1)

    result = execute(task, data, spec)

    assert result.status == "finished", result.message
    assert result.message == ""


def test_muon_belongs_to_plain_training_of_the_records(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question. " * 1000)
    task = load_task("records_small")
    data = task.data(text)
    parameters, optimizers = [], []
    for settings in ({}, {"initial_scale": 2.0, "projection_std": 1.0, "matrix_rate": 0.25, "momentum": 0.9}):
        spec = RunSpec(task.name, task.hash(data), "validation", "muon", 1, settings=settings)
        with make_trainer(task, data, spec) as (trainer, _, _):
            parameters.append(
                {name.rpartition(".")[0]: p.detach() for name, p in trainer.state.model.named_parameters()}
            )
            optimizers.append(trainer.state.optimizers[0].param_groups[0])
    for name, factor in (("blocks.0.up", 2.0), ("blocks.1.down", 4.0), ("blocks.1.attention_out", 4.0)):
        torch.testing.assert_close(parameters[1][name], factor * parameters[0][name])
    assert [group["momentum"] for group in optimizers] == [0.95, 0.9]
    assert optimizers[1]["initial_lr"] == 0.25 * optimizers[0]["initial_lr"]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"workers": 0}, "`workers`"), ({"shard": (3, 2)}, "`shard`"), ({"device": "tpu"}, "`device`")],
)
def test_bad_options_are_refused(runner: Callable[..., Runner], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        runner(**options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu_knows_its_device_and_its_memory() -> None:
    found, again = run(spec(seed=1, device="gpu")), run(spec(seed=1, device="gpu"))

    assert found.status == "finished"
    assert found.metrics == again.metrics
    assert found.environment["hardware"] == torch.cuda.get_device_name()
    assert found.peak_bytes > 0


@pytest.mark.parametrize(
    ("variable", "count", "expected"),
    [(None, 2, ["0", "1"]), ("3,5", 2, ["3", "5"]), ("GPU-1a", 1, ["GPU-1a"]), ("1,-1,0", 1, ["1"]), ("", 0, [])],
)
def test_runs_use_the_gpus_that_are_visible(
    variable: str | None, count: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    assert visible_gpus() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'gpu', but torch sees no CUDA device here. Pass 'cpu'."):
        Runner("tiny_tasks:tiny", tmp_path, device="gpu")


def test_a_ledger_has_the_runs_of_a_task_in_one_precision(runner: Callable[..., Runner]) -> None:
    first = runner("tiny_tasks:tiny")
    first.results([first.spec("validation", "adamw", 2)], "one")

    with pytest.raises(ValueError, match=r"has some on cpu in fp32, got cpu and amp_bf16. Name another folder"):
        runner("tiny_tasks:tiny", precision="amp_bf16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_processes_than_gpus_share_them(tmp_path: Path) -> None:
    runner = Runner("tiny_tasks:tiny", tmp_path, device="gpu", workers=2 * torch.cuda.device_count() + 1, say=print)
    specs = [runner.spec("validation", "adamw", 8, seed=seed) for seed in range(runner.workers)]

    assert {result.status for result in runner.results(specs, "shared")} == {"finished"}
