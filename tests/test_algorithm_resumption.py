"""A run with any algorithm that dies twice in mid-epoch ends bit for bit like the run that did not.

Each time everything is made anew, with other weights and generators: what the run goes on with is from its files.

The weights at the end of each uninterrupted run are recorded in `programs/held/weights.json`, so that a change of the
loop or of a method shows. `python -m tests.test_algorithm_resumption` records them again, after an intended change.
"""

from __future__ import annotations

import json
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algorithm_runs import (
    ARGUMENTS,
    CLASSES,
    LANGUAGE,
    LOWER_PRECISION,
    RECORD,
    WITHOUT_LOGITS,
    EvaluatedCaptioned,
    Measured,
    MeasuredCaptioned,
    arguments_of,
    captioned,
    choose,
    make,
    noise,
)
from torch.utils.data import DataLoader
from torchvision.transforms import Compose, RandomCrop, RandomHorizontalFlip, ToTensor

from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning, NotIntendedUseWarning
from composer.checkpoint.file import read_file
from composer.core import Callback, Precision, State
from composer.loggers import Logger, LoggerDestination
from composer.optim import ConstantWithWarmupScheduler, LinearWithWarmupScheduler
from composer.testing import deep_compare, run_on_ranks
from composer.utils import dist, reproducibility

LENGTH, BATCHES = 4, 9  # of an epoch, and of the run
DEATHS = (3, 6)  # in mid-epoch: at the start of the batch of this number, counted from 0
WHOLE = -1
HELD = Path(__file__).parent / "programs" / "held" / "weights.json"
# Wall-clock times and paths.
OF_THIS_RUN = ["total_wct", "iteration_wct", "epoch_wct", "batch_wct", "all_saved_checkpoints_to_timestamp"]
OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {
    "ColOut of the data set": ("ColOut", {"batch": False}),
    "EMA by epochs": ("EMA", {"smoothing": 0.5, "half_life": None, "update_interval": "1ep"}),
    "MixUp of losses": ("MixUp", {"interpolate_loss": True}),
    "SWA by epochs": ("SWA", {"swa_start": "1ep", "swa_end": "2ep", "update_interval": "1ep"}),
    "StochasticDepth by sample": (
        "StochasticDepth",
        {"target_layer_name": "ResNetBottleneck", "stochastic_method": "sample", "drop_rate": 0.9},
    ),
}
# Those that hold most between batches; none of low precision.
STATEFUL = ["EMA", "SAM", "LayerFreezing", "GyroDropout", "StochasticDepth", "ProgressiveResizing"]
STATEFUL += ["SelectiveBackprop", "ScaleSchedule", "RandAugment", "MixUp"]


@dataclass(frozen=True)
class Case:
    """The model, data and arguments of a run.

    Attributes:
        algorithms: Names, with arguments.
        has_text: Whether it trains on texts.
        is_lower: Whether it trains in bfloat16.
        options: Of the Trainer.
    """

    algorithms: tuple[tuple[str, dict[str, Any]], ...]
    has_text: bool = False
    is_lower: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, *algorithms: tuple[str, dict[str, Any]], **options: Any) -> Case:
        names = {name for name, _ in algorithms}
        return cls(algorithms, bool(names & LANGUAGE), bool(names & LOWER_PRECISION), options)

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.algorithms}


def together(names: Sequence[str], **options: Any) -> Case:
    return Case.of(*((name, arguments_of(name)) for name in choose(names)), **options)


CASES = {name: together([name]) for name in sorted(CLASSES)}
CASES |= {label: Case.of((name, {**ARGUMENTS.get(name, {}), **more})) for label, (name, more) in OTHERWISE.items()}
CASES |= {
    # It runs the model before BATCH_START, with whatever the others have set by then.
    f"SelectiveBackprop of every batch and {name}": Case.of(
        ("SelectiveBackprop", {"start": 0.0, "end": 1.0, "interrupt": 0}), (name, arguments_of(name))
    )
    for name in ("EMA", "GyroDropout", "StochasticDepth")
}
CASES |= {
    # `SWA` with a schedule needs one optimizer, and `Muon` and `SOAP` make two.
    "all of vision": together(sorted(CLASSES.keys() - LANGUAGE - {"NoOpModel", "Muon", "SOAP"})),
    "all of vision but SWA": together(sorted(CLASSES.keys() - LANGUAGE - {"NoOpModel", "SWA"})),
    "all that remember": together(STATEFUL),
    "the stack of records": Case.of(*RECORD.items()),
    "microbatches": together(STATEFUL, device_train_microbatch_size=3),
}
ON_TWO_RANKS = ["EMA", "SAM", "SelectiveBackprop", "all of vision", "all that remember", "microbatches"]


class Died(Exception):
    """The process is lost."""


class Death(Callback):
    """Ends the process at the start of a batch; the last checkpoint is that of the batch before."""

    def __init__(self, batch: int | None) -> None:
        self.batch = batch

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch == self.batch:
            raise Died


class Journal(LoggerDestination):
    """Records the logged values by step and name in a file."""

    def __init__(self, logged: dict[tuple[int | None, str], Any]) -> None:
        self.logged = logged

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged |= {(step, name): torch.as_tensor(value).clone() for name, value in metrics.items()}


def train(case: Case, folder: Path, logged: dict[Any, Any], death: int | None, number: int) -> Trainer:
    """Run the program of a run, until it dies or ends."""
    has_text = case.has_text
    kind = EvaluatedCaptioned if case.names & WITHOUT_LOGITS else MeasuredCaptioned if has_text else Measured
    model = kind(seed=number)
    keys = {"input_key": "image", "target_key": "label"} if has_text else {}
    augmented = Compose([RandomHorizontalFlip(), RandomCrop(16, padding=2), ToTensor()])
    training, measuring = noise(8 * LENGTH, augmented), noise(8)
    world = dist.get_world_size()
    order: dict[str, Any] = {"sampler": dist.get_sampler(training, shuffle=True)} if world > 1 else {"shuffle": True}
    # `ScheduleFree` refuses a schedule that falls.
    schedule = ConstantWithWarmupScheduler if "ScheduleFree" in case.names else LinearWithWarmupScheduler
    batches: dict[str, Any] = {"batch_size": 8 // world, "collate_fn": captioned if has_text else None}
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(training, **order, **batches),
        eval_dataloader=DataLoader(measuring, sampler=dist.get_sampler(measuring), **batches),
        eval_interval="3ba",
        max_duration=f"{BATCHES}ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        schedulers=schedule("5ba", scale_warmup=True),
        algorithms=[make(name, keys, arguments) for name, arguments in case.algorithms],
        callbacks=Death(death),
        loggers=Journal(logged),
        precision=Precision.AMP_BF16 if case.is_lower else Precision.FP32,
        progress_bar=False,
        seed=3,
        run_name="run",
        save_folder=folder,
        save_interval="3ba",  # at each death; a save takes longer than a batch
        save_metrics=True,
        autoresume=True,
        **{"device": "cpu", **case.options},
    )
    if death is None:
        trainer.fit()
    else:
        with pytest.raises(Died):
            trainer.fit()
    return trainer


def launch(case: Case, folder: Path, number: int) -> dict[str, Any]:
    """Launch a run's program, as a new process would.

    Args:
        case: The model, data and arguments of a run.
        folder: Where it saves.
        number: How often it was launched before; `WHOLE`: it does not die.

    Returns:
        What was logged, and where it ended.
    """
    other = 100 + number  # as a new process has other generators
    random.seed(other)
    np.random.seed(other)  # noqa: NPY002
    torch.manual_seed(other)
    logged: dict[Any, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        warnings.simplefilter("ignore", NotIntendedUseWarning)
        trainer = train(case, folder, logged, dict(enumerate(DEATHS)).get(number), max(number, 0))
    found = {
        "logged": logged,
        "state": trainer.state.state_dict(),
        "rng": reproducibility.get_rng_state(),
        "files": sorted(path.name for path in folder.iterdir()),
    }
    trainer.close()
    return found


def assert_same(whole: dict[str, Any], launches: Sequence[dict[str, Any]], *ignored: str) -> None:
    """The combined log of all launches, and the end of the last one, equal those of an uninterrupted run."""
    logged = {key: value for each in launches for key, value in each["logged"].items()}

    deep_compare(whole, {**launches[-1], "logged": logged}, ignore_keys=[*OF_THIS_RUN, *ignored])


def size_of_weights(found: dict[str, Any]) -> float:
    """Return the sum of the absolute values of all weights and buffers at the end of a run."""
    tensors = [each for each in found["state"]["model"].values() if each.is_floating_point()]
    return float(sum(tensor.double().abs().sum() for tensor in tensors))


def content_of(folder: Path, batch: int) -> Any:
    """The checkpoint after some batches."""
    (path,) = folder.glob(f"ep*-ba{batch}-rank0.pt")
    return read_file(path)


def last_of(folder: Path) -> Any:
    return read_file(folder / "latest-rank0.pt")


LATE = {"EMA by epochs", "EMANesterov", "LayerFreezing"}  # they act after the first death
# In the weights; SWA until it ends. The texts fill rows, so that none are packed.
WITHOUT_TRACE = {
    "ChannelsLast",
    "FusedLayerNorm",
    "PostHocEMA",
    "SWA by epochs",
    "SequencePacking",
    "TestTimeAugmentation",
}
# What grows from the first to the second death, and on.
RAMPS = {
    "LayerFreezing": "layer_freezing/layers_frozen",
    "ProgressiveResizing": "progressive_resizing/width",
    "SeqLengthWarmup": "seq_length_warmup/curr_seq_len",
    "StochasticDepth": "stochastic_depth/drop_rate",
}


def assert_acted(label: str, whole: dict[str, Any], folder: Path, plain: Path) -> None:
    """The algorithms had done something when the run died, and go on afterwards."""
    case = CASES[label]
    for batch in () if label in WITHOUT_TRACE else DEATHS[label in LATE :]:
        ours, without = (content_of(path, batch)["state"]["model"] for path in (folder, plain))
        assert ours.keys() != without.keys() or any(not torch.equal(ours[key], without[key]) for key in ours)
    if label not in CLASSES:
        return
    for name in case.names & RAMPS.keys():
        logged = {step: float(value) for (step, key), value in sorted(whole["logged"].items()) if key == RAMPS[name]}
        first, second, last = (max([0.0, *(logged[k] for k in logged if k <= n)]) for n in (*DEATHS, BATCHES))
        assert first < second < last
    saved = [dict(content_of(folder, batch)["state"]["algorithms"]) for batch in (*DEATHS, BATCHES)]
    if "EMA" in case.names:
        assert [True] * 3 == [each["EMA"]["ema_weights_active"] for each in saved]
    if label == "SWA":
        assert [False, False, True] == [each["SWA"]["swa_completed"] for each in saved]
        assert [True] * 3 == [each["SWA"]["swa_started"] for each in saved]


# ---- one process ----


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool, bool], Path]:
    """The checkpoints of the run without algorithms that a case changes."""

    @cache
    def folder_of(has_text: bool, is_lower: bool) -> Path:
        folder = tmp_path_factory.mktemp("plain")
        launch(Case((), has_text=has_text, is_lower=is_lower), folder, WHOLE)
        return folder

    return folder_of


@pytest.mark.parametrize("label", CASES)
def test_a_run_that_died_twice_ends_like_the_one_that_did_not(label: str, tmp_path: Path, plain: Any) -> None:
    case, resumed = CASES[label], tmp_path / "resumed"
    whole = launch(case, tmp_path / "whole", WHOLE)
    launches = [launch(case, resumed, number) for number in (0, 1, 2)]

    assert_same(whole, launches)
    deep_compare(last_of(tmp_path / "whole"), last_of(resumed), ignore_keys=OF_THIS_RUN)
    assert_acted(label, whole, tmp_path / "whole", plain(case.has_text, case.is_lower))
    held = json.loads(HELD.read_text())
    if label in held:  # a new method has no record yet
        # Processors sum in different orders, whose differences grow over the steps; a changed method differs by more.
        assert size_of_weights(whole) == pytest.approx(held[label], rel=1e-3)


# ---- a GPU ----


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operations add up in the same order each time, where there is such an operation."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("repeatable")
@pytest.mark.filterwarnings("ignore:.* does not have a deterministic implementation")
@pytest.mark.filterwarnings("ignore:Memory Efficient attention defaults to a non-deterministic algorithm")
@pytest.mark.parametrize("label", CASES)
def test_the_same_on_a_gpu(label: str, tmp_path: Path) -> None:
    case, resumed = CASES[label], tmp_path / "resumed"
    case = replace(case, options={**case.options, "device": "gpu"})
    whole = launch(case, tmp_path / "whole", WHOLE)
    launches = [launch(case, resumed, number) for number in (0, 1, 2)]

    assert_same(whole, launches)
    deep_compare(last_of(tmp_path / "whole"), last_of(resumed), ignore_keys=OF_THIS_RUN)


# ---- two processes ----


def launch_all(folder: Path, *numbers: int) -> dict[tuple[str, int], dict[str, Any]]:
    """In one of several processes: launch the programs of all runs, one after the other."""
    found = {}
    for label in ON_TWO_RANKS:
        for number in numbers:
            where = folder / label / ("whole" if number == WHOLE else "resumed")
            found[label, number] = launch(CASES[label], where, number)
    return found


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[Any, Any]]]:
    """The checkpoints of all runs, and by rank what was found, for each launch in new processes."""
    folder = tmp_path_factory.mktemp("ranks")
    found: list[dict[Any, Any]] = [{}, {}]
    for numbers in ((WHOLE, 0), (1,), (2,)):
        for own, more in zip(found, run_on_ranks(launch_all, 2, folder, *numbers, timeout=300), strict=True):
            own.update(more)
    return folder, found


@pytest.mark.parametrize("label", ON_TWO_RANKS)
def test_the_same_on_two_ranks(label: str, on_two_ranks: Any) -> None:
    folder, ranks = on_two_ranks
    for own, ignored in zip(ranks, ([], ["named_buffers_dict"]), strict=True):
        # EMA averages the statistics that each rank has measured; those of the first rank are saved and evaluated.
        assert_same(own[label, WHOLE], [own[label, number] for number in (0, 1, 2)], *ignored)
    whole, resumed = (last_of(folder / label / name) for name in ("whole", "resumed"))
    deep_compare(whole, resumed, ignore_keys=OF_THIS_RUN)


# ---- a checkpoint of another list ----


def go_on(saved: Sequence[str], listed: Sequence[str], tmp_path: Path, **options: Any) -> tuple[Any, list[Any]]:
    """A whole run, and one that dies and is gone on with by another list: what both ended with."""
    whole = launch(together(saved), tmp_path / "whole", WHOLE)
    died = launch(together(saved), tmp_path / "died", 0)
    (path,) = (tmp_path / "died").glob(f"ep*-ba{DEATHS[0]}-rank0.pt")
    case = Case.of(*((name, arguments_of(name)) for name in listed), load_path=str(path), **options)
    resumed = launch(case, tmp_path / "resumed", 2)
    for each in (whole, died, resumed):
        each["state"]["algorithms"] = dict(each["state"]["algorithms"])
    return whole, [died, resumed]


def test_algorithms_may_be_listed_in_another_order(tmp_path: Path) -> None:
    names = ["BlurPool", "EMA", "GyroDropout"]

    assert_same(*go_on(names, names[::-1], tmp_path), "files")


def test_what_the_model_needs_is_applied_though_it_is_not_listed(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="^Automatically adding required_on_load algorithm `") as seen:
        ends = go_on(["BlurPool", "GyroDropout", "SAM"], ["SAM"], tmp_path)

    assert {"BlurPool", "GyroDropout"} == {str(warning.message).split("`")[1].partition("(")[0] for warning in seen}
    assert_same(*ends, "files")


def test_what_should_have_come_before_a_listed_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`BlurPool` .* must act before `EMA`.*`algorithms=\[BlurPool\("):
        go_on(["BlurPool", "EMA"], ["EMA"], tmp_path)


def test_what_is_left_out_on_purpose_is_missed_by_the_model(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*vision\.0\.weight"):
        go_on(["BlurPool", "SAM"], ["SAM"], tmp_path, load_exclude_algorithms=["BlurPool"])


def test_one_that_the_checkpoint_lacks_begins_anew(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="^EMA of `algorithms` is not in the state_dict"):
        whole, (_, resumed) = go_on(["BlurPool"], ["BlurPool", "EMA"], tmp_path)

    ema = resumed["state"]["algorithms"]["EMA"]
    assert ema["ema_started"]
    assert ema["ema_weights_active"]  # so the model holds the averages, and EMA the training weights
    trained = {**ema["ema_model"]["named_parameters_dict"], **ema["ema_model"]["named_buffers_dict"]}
    deep_compare({name: whole["state"]["model"][name] for name in trained}, trained)


if __name__ == "__main__":
    held = {}
    for label in (*sorted(CLASSES), *OTHERWISE):
        with tempfile.TemporaryDirectory() as folder:
            held[label] = size_of_weights(launch(CASES[label], Path(folder), WHOLE))
    HELD.write_text(json.dumps(held, indent=1) + "\n")
