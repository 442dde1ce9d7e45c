"""The runner: one run from its seed, for recipes and for composer-evidence, and recipes over several seeds."""

from __future__ import annotations

import copy
import glob
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from composer.callbacks import LRMonitor, MemoryMonitor, SpeedMonitor
from composer.core import Callback, Evaluator, Event
from composer.devices import Device
from composer.loggers import ProgressBarLogger
from composer.loggers.run_recorder import RunRecorder
from composer.models import ComposerModel
from composer.recipes._monitors import RunMemory, RunMonitor, StopAfter
from composer.recipes._recipe import Dataset, Recipe, Runs
from composer.recipes._results import Result, Run
from composer.utils import dist, get_device
from composer.utils.reproducibility import seed_context

if TYPE_CHECKING:
    from composer.trainer import Trainer

_EVAL_LABEL = "test"
_WARMUP_BATCHES = 2


@contextmanager
def trainer_of_run(
    network: Callable[[], ComposerModel],
    loaders: Callable[[Device], tuple[Any, Any]],
    training: Any,
    *,
    num_batches: int,
    seed: int,
    device: str | None,
    eval_label: str | None = None,
    **others: Any,
) -> Iterator[tuple[Trainer, Any, Any]]:
    """Build network, data, optimizer and Trainer of one run, in which only the seed determines random numbers.

    The global generators are seeded in the context, and restored after it. The Trainer is closed if no error is raised.

    Args:
        network: Returns a new network.
        loaders: Returns the loader of the training samples, and that of the samples to evaluate, for a device.
        training: An object with `optimizer(model)` and `schedule()`.
        num_batches: The length of the run.
        seed: The seed.
        device: The device. None: a GPU if available, otherwise the CPU.
        eval_label: Evaluate during the training, under this label. None: only the caller evaluates.
        **others: More arguments of the Trainer.

    Yields:
        The Trainer and both loaders.
    """
    from composer.trainer import Trainer  # imports torchmetrics, which takes seconds

    found = get_device(device)
    with seed_context(seed):
        model = network()
        train, test = loaders(found)
        if eval_label is not None:
            others["eval_dataloader"] = Evaluator(label=eval_label, dataloader=test)
        trainer = Trainer(
            model=model,
            train_dataloader=train,
            max_duration=f"{num_batches}ba",  # with a number of epochs, each would get its own progress bar
            optimizers=training.optimizer(model),
            schedulers=training.schedule(),
            device=found,
            seed=seed,
            **{"progress_bar": False, **others},
        )
        yield trainer, train, test
        trainer.close()


def run(recipe: Recipe, runs: Runs | None = None) -> Result:
    """Train a recipe with each seed.

    The global random generators and torch's deterministic mode are restored afterwards.

    Args:
        recipe: The recipe.
        runs: Number of runs, and how they are computed. None: the defaults.

    Raises:
        FileNotFoundError: The data do not exist.
        ValueError: A hyperparameter does not fit the data or the device.

    Example:
        >>> from composer.recipes import SGD, digits
        >>> quick = digits.plain(digits.Data(train_samples=100), training=SGD(epochs=2))
        >>> result = run(quick, Runs(device="cpu", progress=False))
        >>> result.runs[0].samples, len(result.runs[0].tested_at)
        (200, 2)
    """
    return compare([recipe], runs)[0]


def compare(recipes: Sequence[Recipe], runs: Runs | None = None, *, folder: Path | None = None) -> list[Result]:
    """Train several recipes; see `Comparison`.

    Args:
        recipes: The recipes.
        runs: Number of runs, and how they are computed. None: the defaults.
        folder: Each run is recorded in a subfolder of this folder. None: no records.

    Returns:
        The results, in the order of the recipes.

    Raises:
        FileNotFoundError: The data do not exist.
        ValueError: A hyperparameter does not fit the data or the device.
    """
    return Comparison(recipes, runs, folder=folder).run()


class Comparison:
    """Train several recipes in turn, seed by seed, so that a slowdown of the machine affects all of them.

    The constructor checks the recipes; `run` trains.

    Args:
        recipes: The recipes.
        runs: Number of runs, and how they are computed. None: the defaults.
        folder: Each run is recorded in the subfolder `<recipe>-seed<seed>`, for `composer-report`; older records of
            these recipes are removed. None: no records.

    Attributes:
        datasets: The data of each recipe.
        folders: The folders of the recorded runs.

    Raises:
        FileNotFoundError: The data do not exist.
        ValueError: A hyperparameter does not fit the data or the device.
    """

    def __init__(self, recipes: Sequence[Recipe], runs: Runs | None = None, *, folder: Path | None = None) -> None:
        if not recipes:
            raise ValueError("`recipes` must have at least one recipe, got none.")
        self._runs = Runs() if runs is None else runs
        sources = {recipe.data for recipe in recipes}
        loaded = {source: source.load() for source in sources}
        self.datasets = [loaded[recipe.data] for recipe in recipes]
        width = max(len(recipe.name) for recipe in recipes)
        self._sessions = [
            _Session(recipe, dataset, self._runs, width, folder)
            for recipe, dataset in zip(recipes, self.datasets, strict=True)
        ]
        self._seeds = range(self._runs.seed, self._runs.seed + self._runs.seeds)
        self.folders = [each.folder_of(seed) for each in self._sessions for seed in self._seeds if folder is not None]
        with _deterministic(self._runs.threads):
            for session in self._sessions:
                session.check()

    def run(self) -> list[Result]:
        """Train each recipe with each seed.

        Returns:
            The results, in the order of the recipes.
        """
        with _deterministic(self._runs.threads):
            for session in self._sessions:
                session.warm_up()
                session.remove_records()
            rounds = [[session.train(seed) for session in self._sessions] for seed in self._seeds]
        return [
            session.result(list(runs)) for session, runs in zip(self._sessions, zip(*rounds, strict=True), strict=True)
        ]


class _Session:
    """Training of one recipe with any seed."""

    def __init__(self, recipe: Recipe, dataset: Dataset, runs: Runs, width: int, folder: Path | None) -> None:
        self.recipe, self.dataset, self.settings, self.width, self.folder = recipe, dataset, runs, width, folder
        self.plan = self.device = ""
        self.threads = self.num_parameters = 0

    def result(self, runs: list[Run]) -> Result:
        """Return the result of runs, with the facts that `check` recorded."""
        return Result(self.recipe, runs, self.plan, self.device, self.threads, self.num_parameters)

    def check(self) -> None:
        """Build a Trainer, which checks the arguments, and record facts about it."""
        with self._trainer(0) as (trainer, _, _):
            plan = trainer.engine.explain()
            self.plan = str(type(plan)([row for row in plan if row.kind == "algorithm"]))
            self.device = trainer.state.device.name
            self.threads = torch.get_num_threads()
            self.num_parameters = sum(parameter.numel() for parameter in trainer.state.model.parameters())

    def warm_up(self) -> None:
        """Train a few batches that do not count: the first ones load libraries and select kernels."""
        with self._trainer(0, callbacks=[StopAfter(_WARMUP_BATCHES)]) as (trainer, _, _):
            trainer.fit()

    def folder_of(self, seed: int) -> Path:
        """Return the folder of the record of a run."""
        assert self.folder is not None
        return self.folder / f"{self.recipe.name}-seed{seed}"

    def remove_records(self) -> None:
        """Remove this recipe's records of an earlier comparison, unless its runs may be resumed."""
        if self.folder is not None and self.settings.save_folder is None and dist.get_global_rank() == 0:
            for record in self.folder.glob(f"{glob.escape(self.recipe.name)}-seed*/run-rank*.jsonl"):
                record.unlink()

    def train(self, seed: int) -> Run:
        """Train with a seed."""
        memory, monitor = RunMemory(), RunMonitor()
        loggers: list[Any] = [memory, monitor]
        monitors: list[Callback] = []
        recorded = self.folder is not None
        if recorded:
            monitors = [LRMonitor(), SpeedMonitor(window_size=10, time_unit="seconds")]
            if get_device(self.settings.device).name == "gpu":  # other devices report nothing
                monitors.append(MemoryMonitor())
            loggers.append(RunRecorder(self.folder_of(seed), group=self.recipe.name))
        began = time.perf_counter()
        if self.settings.progress:
            loggers.append(_Bars())
        options = self._saving(seed)
        with self._trainer(seed, loggers=loggers, callbacks=monitors, **options) as (trainer, _, _):
            if recorded:
                trainer.logger.log_hyperparameters(_hyperparameters(self.recipe))
            trainer.fit()
            seconds = monitor.seconds_before + time.perf_counter() - began
            names = dict.fromkeys(type(each).__name__ for each in trainer.state.algorithms)
            actions = {name: _describe(monitor.calls.get(name, {})) for name in names}
        scores = {each.key: memory.series(f"metrics/{_EVAL_LABEL}/{each.key}") for each in self.recipe.metrics}
        samples = trainer.state.timestamp.sample.value
        return Run(seed, scores, monitor.tested_at, monitor.train_seconds, seconds, samples, actions)

    def _saving(self, seed: int) -> dict[str, Any]:
        """Return the arguments of the Trainer that save and resume a run."""
        recipe, settings = self.recipe, self.settings
        if settings.save_folder is None:
            return {}
        options = {key: value for key, value in _hyperparameters(recipe).items() if not isinstance(value, Path)}
        described = repr((options, list(recipe.algorithms), settings.eval_interval))
        digest = hashlib.sha256(described.encode()).hexdigest()[:8]
        return {
            "save_folder": f"{settings.save_folder.rstrip('/')}/{recipe.name}-seed{seed}-{digest}",
            "save_interval": settings.eval_interval,
            "save_num_checkpoints_to_keep": 2,  # the newest one may be damaged
            "autoresume": True,
        }

    def _trainer(self, seed: int, **others: Any) -> AbstractContextManager[tuple[Trainer, Any, Any]]:
        """Return the context of a run; `others` are arguments of the Trainer."""
        recipe, settings, dataset = self.recipe, self.settings, self.dataset
        num_batches = max(1, round(recipe.training.epochs * (dataset.num_train // dataset.batch_size)))
        return trainer_of_run(
            partial(recipe.network.build, dataset),
            partial(dataset.loaders, seed),
            recipe.training,
            num_batches=num_batches,
            seed=seed,
            device=settings.device,
            eval_label=_EVAL_LABEL,
            train_dataloader_label=f"{recipe.name:<{self.width}} seed {seed}",
            run_name=f"{recipe.name}-seed{seed}",
            algorithms=copy.deepcopy(list(recipe.algorithms)),
            eval_interval=settings.eval_interval,
            precision=settings.precision,
            deterministic_mode=settings.deterministic,
            compile_config=None if settings.compile is None else {},
            compile_step=settings.compile == "step",
            **others,
        )


class _Bars(ProgressBarLogger):
    """Without the hyperparameters, which would be forty lines before each run: `config.yaml` has them."""

    def log_hyperparameters(self, hyperparameters: dict[str, Any]) -> None:
        pass


def _describe(calls: Mapping[Event, int]) -> str:
    """Return what an algorithm did, without a subject."""
    if not calls:
        return "did nothing"
    counts = (f"{count:,} time{'' if count == 1 else 's'} at {event.value}" for event, count in calls.items())
    return f"acted {', '.join(counts)}"


def _hyperparameters(recipe: Recipe) -> dict[str, Any]:
    """Return the hyperparameters of a recipe, for the record of a run."""
    parts: dict[str, Any] = {"data": recipe.data, "network": recipe.network, "training": recipe.training}
    groups = {name: asdict(part) for name, part in parts.items()}
    values = {f"{name}/{key}": value for name, group in groups.items() for key, value in group.items()}
    return values | {"recipe": recipe.name}


@contextmanager
def _deterministic(threads: int | None) -> Iterator[None]:
    """Set the number of threads, and restore it and torch's deterministic mode, which the Trainer changes.

    Filling of uninitialized memory, a debugging aid of that mode, is off: it costs 6% of the time of a small network.
    """
    threads_before = torch.get_num_threads()
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    memory: Any = torch.utils.deterministic  # Any: the attribute is created at import
    filled = memory.fill_uninitialized_memory
    try:
        memory.fill_uninitialized_memory = False
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    finally:
        memory.fill_uninitialized_memory = filled
        torch.set_num_threads(threads_before)
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
