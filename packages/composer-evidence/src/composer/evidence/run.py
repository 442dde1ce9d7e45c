"""One run: its description, its training, and its result, which is stored in a file."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import platform
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from composer.algorithms.utils.batchnorm import recalibrate_batchnorm
from composer.algorithms.warnings import NoEffectWarning, NotIntendedUseWarning
from composer.checkpoint.durable import atomic_write
from composer.core import Callback, Engine, Evaluator, Event, State
from composer.evidence.methods import make_algorithms, training_beside
from composer.evidence.task import Part, Task, digest
from composer.loggers import InMemoryLogger, Logger
from composer.models import ComposerModel
from composer.recipes.runner import trainer_of_run

if TYPE_CHECKING:
    from composer.trainer import Trainer

_LABEL, _CURVE = "part", "curve"  # labels of the evaluators at the end and during the training
_TEACHER_BUDGETS, _TEACHER_SEED = 4, 60_000  # `TEACHER` states the first
_COMPUTING = ("numpy", "torchvision", "transformers", "pytorch-optimizer", "schedulefree")  # what changes numbers
# Averages that do not bring statistics of batch norm with them.
_WITHOUT_STATISTICS = frozenset({"LAWA", "SWA", "ScheduleFree"})


@dataclass(frozen=True)
class RunSpec:
    """Complete description of one run; equal descriptions are one run.

    Attributes:
        task: The name of the task.
        task_hash: Its hash with its data.
        part: The part that is evaluated, once, at the end.
        variant: The variant of plain training.
        steps: Optimizer steps, with the batch size of the variant.
        settings: Values that replace fields of the variant's training.
        stack: Class names and arguments of the algorithms.
        averages: Label -> class name and arguments of averages of the weights that are scored too; training is the
            same with and without them.
        seed: Seed of initial weights, order of the data and augmentation.
        device: "cpu" or "gpu".
        precision: The numerical precision of the Trainer.
        threads: Threads of the process.
        num_curve: Evaluations of the part during training, for a curve.
        eval_batches: Batches to evaluate; -1: all.
    """

    task: str
    task_hash: str
    part: Part
    variant: str
    steps: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    stack: Sequence[tuple[str, Mapping[str, Any]]] = ()
    averages: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    seed: int = 0
    device: str = "cpu"
    precision: str = "fp32"
    threads: int = 1
    num_curve: int = 0
    eval_batches: int = -1

    @property
    def id(self) -> str:
        """The name of the run: a hash of all fields."""
        return digest(asdict(self))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunSpec:
        """Return the description from the values of `dataclasses.asdict`, read back from JSON."""
        stack = tuple((name, dict(arguments)) for name, arguments in values["stack"])
        averages = {label: (name, dict(arguments)) for label, (name, arguments) in values["averages"].items()}
        return cls(**{**values, "stack": stack, "averages": averages})


@dataclass(frozen=True)
class RunResult:
    """Result of a run.

    Attributes:
        spec: Its description.
        status: "finished", "diverged" (the metric is not finite) or "failed".
        scores: The metric at the end: "" for the weights of the run, and each label of `averages`.
        metrics: All metrics of the weights of the run.
        train_seconds: CPU time of the training on one thread; on a GPU wall-clock time.
        seconds: Wall-clock time of the whole run.
        curve: Pairs of a step and the metric on the part.
        message: The error, or the warning that an algorithm changed nothing or is not intended for this use.
        environment: Versions, hardware and hash of the source.
    """

    spec: RunSpec
    status: str
    scores: Mapping[str, float | None] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    train_seconds: float = 0.0
    seconds: float = 0.0
    curve: Sequence[tuple[int, float]] = ()
    message: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)

    def score(self, label: str = "") -> float:
        """Return a score; NaN if the run diverged or failed."""
        value = self.scores.get(label)
        return math.nan if value is None else value

    def as_json(self) -> dict[str, Any]:
        """Return the result as values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunResult:
        """Return the result from the values of `as_json`; other keys, such as those of a ledger, are ignored."""
        names = cls.__dataclass_fields__
        known = {key: value for key, value in values.items() if key in names}
        return cls(**{**known, "spec": RunSpec.from_json(values["spec"])})


class SideAverages(Callback):
    """Averages of the weights that are scored in addition to them, in one run.

    Each average is an algorithm in an engine of its own, which sees the model and the clock of the run, but not its
    evaluations: the training is the same, bit for bit.

    Args:
        averages: Label -> class name and arguments.

    Attributes:
        weights: Label -> the average as a `state_dict`, when the run has ended.
    """

    _EVENTS = (Event.FIT_START, Event.BATCH_END, Event.EPOCH_END, Event.FIT_END)

    def __init__(self, averages: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
        self._algorithms = {label: make_algorithms([average])[0] for label, average in averages.items()}
        self._engines: dict[str, Engine] = {}
        self.weights: dict[str, dict[str, torch.Tensor]] = {}

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Forward an event to the engine of each average."""
        if event not in self._EVENTS:
            return
        if not self._engines:
            for label, algorithm in self._algorithms.items():
                side = State(
                    model=state.model,
                    max_duration=state.max_duration,
                    device=state.device,
                    train_dataloader=state.train_dataloader,
                )
                side.set_dataloader(state.dataloader, "train")
                self._engines[label] = Engine(side, Logger(side), algorithms=[algorithm])
                self._engines[label].run_event(Event.INIT)
        assert state.max_duration is not None
        is_over = state.timestamp >= state.max_duration
        for label, engine in self._engines.items():
            engine.state.timestamp, engine.state.max_duration = state.timestamp, state.max_duration
            if is_over:
                self._take(label, engine, event, state.model)
            else:
                engine.run_event(event)

    def _take(self, label: str, engine: Engine, event: Event, model: torch.nn.Module) -> None:
        """Copy the average that an algorithm puts into the model at the end of the run, and undo that."""
        before = _copy(model)
        engine.run_event(event)
        after = _copy(model)
        if any(not torch.equal(after[key], value) for key, value in before.items()) or label not in self.weights:
            self.weights[label] = after
        model.load_state_dict(before)


def _copy(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def execute(task: Task, data: Any, spec: RunSpec, folder: Path | None = None) -> RunResult:
    """Train and evaluate one run in this process.

    Args:
        task: The task.
        data: Its loaded data.
        spec: The run.
        folder: The folder where runs share their teacher. None: each trains its own.

    Returns:
        The result. Exceptions of the run are in it, as "failed".
    """
    begin = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = _train(task, data, spec, folder)
    except Exception as error:  # noqa: BLE001 -- the result has the reason, and other runs continue
        where = traceback.extract_tb(error.__traceback__)[-1]
        message = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
        result = RunResult(spec, "failed", message=message)
    else:
        # Averages that are only scored do not act together.
        unfit = (NoEffectWarning,) if spec.averages else (NoEffectWarning, NotIntendedUseWarning)
        warned = [str(warning.message) for warning in caught if issubclass(warning.category, unfit)]
        result = replace(result, message=warned[0] if warned else "")
    return replace(result, seconds=time.perf_counter() - begin, environment=environment(spec.device))


def _train(task: Task, data: Any, spec: RunSpec, folder: Path | None) -> RunResult:
    memory, sides = InMemoryLogger(), SideAverages(spec.averages)
    others: dict[str, Any] = {"run_name": spec.id, "loggers": [memory], "callbacks": [sides] if spec.averages else []}
    if spec.num_curve:
        others |= {"eval_label": _CURVE, "eval_interval": f"{max(1, spec.steps // spec.num_curve)}ba"}
    teacher = partial(_teach, task, data, spec, folder)
    with make_trainer(task, data, spec, teacher, **others) as (trainer, train, evaluated):
        begin = _clock(spec.device)
        trainer.fit()
        train_seconds = _clock(spec.device) - begin
        scores, metrics = _evaluate(trainer, task, spec, evaluated, train, sides)
    logged = memory.data.get(f"metrics/{_CURVE}/{task.metric.key}", [])
    points = [(int(at.batch), float(value)) for at, value in logged]
    finite = all(value is not None for value in scores.values())
    return RunResult(spec, "finished" if finite else "diverged", scores, metrics, train_seconds, 0.0, points)


def make_trainer(
    task: Task, data: Any, spec: RunSpec, teacher: Callable[[], torch.nn.Module] = torch.nn.Identity, **others: Any
) -> AbstractContextManager[tuple[Trainer, Any, Any]]:
    """Return the context of a run, which has its Trainer and both loaders; see `trainer_of_run` of composer-recipes.

    Args:
        task: The task.
        data: Its loaded data.
        spec: The run.
        teacher: Returns the network for an argument that is `TEACHER`.
        **others: More arguments of the Trainer.
    """
    variant: Any = task.variants[spec.variant]
    training: Any = variant.training
    if spec.settings:
        training = replace(training, **spec.settings)
    batches, num_batches = {}, spec.steps
    if hasattr(training, "batch_size"):
        batches = {"batch_size": training.batch_size}
        num_batches = max(1, round(spec.steps * variant.training.batch_size / training.batch_size))
    others["callbacks"] = [*others.pop("callbacks", []), *getattr(training, "callbacks", list)()]

    def network() -> ComposerModel:
        model: ComposerModel = variant.model(data)
        if hasattr(training, "prepare"):
            training.prepare(model)
        return model

    return trainer_of_run(
        network,
        partial(data.loaders, spec.part, spec.seed, **batches),
        training_beside(spec.stack, training),
        num_batches=num_batches,
        seed=spec.seed,
        device=spec.device,
        algorithms=make_algorithms([*getattr(training, "algorithms", list)(), *spec.stack], teacher),
        precision=spec.precision,
        deterministic_mode=True,
        **others,
    )


def _teach(task: Task, data: Any, spec: RunSpec, folder: Path | None) -> torch.nn.Module:
    """Return the teacher of a run: its network, trained with the default settings of its variant.

    All runs of a ledger share one. The first trains it, and the others wait.
    """
    others: dict[str, Any] = {"device": spec.device, "precision": spec.precision, "threads": spec.threads}
    steps = _TEACHER_BUDGETS * task.steps
    own = RunSpec(spec.task, spec.task_hash, "validation", spec.variant, steps, seed=_TEACHER_SEED, **others)
    path = None if folder is None else folder / f"teacher-{own.id}.pt"
    with _alone(path), make_trainer(task, data, own) as (trainer, _, _):
        model = trainer.state.model
        if path is not None and path.exists():
            model.load_state_dict(torch.load(path, weights_only=True))
        else:
            trainer.fit()
            if path is not None:
                with atomic_write(path) as temporary:
                    torch.save(model.state_dict(), temporary)
    return model


@contextmanager
def _alone(path: Path | None) -> Iterator[None]:
    """Let one process at a time make a file."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _evaluate(
    trainer: Any, task: Task, spec: RunSpec, evaluated: Any, train: Any, sides: SideAverages
) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Return the scores of the weights and of all averages, and all metrics of the weights."""

    def metrics() -> dict[str, float | None]:
        evaluator = Evaluator(label=_LABEL, dataloader=evaluated)
        trainer.eval(eval_dataloader=evaluator, subset_num_batches=spec.eval_batches)
        values = {key: float(value.compute()) for key, value in trainer.state.eval_metrics[_LABEL].items()}
        return {key: value if math.isfinite(value) else None for key, value in values.items()}

    def recalibrate() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoEffectWarning)  # a model without batch norm
            recalibrate_batchnorm(trainer.state.model, train)

    weights = _copy(trainer.state.model) if spec.averages else {}
    if any(name in _WITHOUT_STATISTICS for name, _ in spec.stack):
        recalibrate()
    first = metrics()
    if task.metric.key not in first:
        raise ValueError(f"`metric.key` must be a metric of the model, {', '.join(first)}, got {task.metric.key!r}.")
    scores = {"": first[task.metric.key]}
    for label, (name, _) in spec.averages.items():
        trainer.state.model.load_state_dict(sides.weights[label])
        if name in _WITHOUT_STATISTICS:
            recalibrate()
        scores[label] = metrics()[task.metric.key]
        trainer.state.model.load_state_dict(weights)
    return scores, first


@contextmanager
def hold_machine(*, alone: bool) -> Iterator[None]:
    """Hold this user's lock of this machine, so that no step time is measured during another run.

    The training process holds it, not the command, since it may outlive a killed command. It is a file in the user's
    cache folder, where other users cannot create it first, with the name of the machine, as machines may share the
    folder.

    Args:
        alone: Wait until no other process holds the lock, and let no other one begin. False: share it.
    """
    with machine_lock().open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def machine_lock() -> Path:
    """Return the path of the file that `hold_machine` locks."""
    return cache_folder() / f"evidence-{platform.node()}.lock"


def cache_folder() -> Path:
    """Return this user's folder of files that can be made again."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "composer")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, also after a kill."""
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


@cache
def environment(device: str) -> Mapping[str, Any]:
    """Return versions, hardware and the hash of the source, for the ledger.

    Args:
        device: "cpu" or "gpu".
    """
    hardware = _processor() if device == "cpu" else torch.cuda.get_device_name()
    installed = {distribution.name: distribution.version for distribution in distributions()}
    versions = {
        name: version
        for name, version in sorted(installed.items())
        if name.startswith("composer-") or name in _COMPUTING
    }
    versions |= {"python": platform.python_version(), "torch": torch.__version__}
    return {
        "hardware": hardware,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "system": platform.platform(),
        "versions": versions,
        "source": source_hash(),
    }


@cache
def source_hash() -> str:
    """Return a hash of the source code of all installed packages of Composer."""
    import composer

    folders = sorted({Path(path) for path in composer.__path__})
    sums = []
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            name = file.relative_to(folder).as_posix()
            sums.append((name, hashlib.sha256(file.read_bytes()).hexdigest()))
    return digest(sorted(sums))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def read_result(path: Path) -> RunResult | None:
    """Return the result in a file; None if there is no such file."""
    try:
        return RunResult.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
