"""Trains recipes, over several seeds, and keeps what came out."""

from __future__ import annotations

import copy
import glob
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from composer.callbacks import LRMonitor, MemoryMonitor, SpeedMonitor
from composer.core import Callback, Evaluator
from composer.loggers import InMemoryLogger
from composer.loggers.run_recorder import RunRecorder
from composer.recipes._deeds import Evidence, describe_deeds
from composer.recipes._hparams import Recipe, Runs
from composer.recipes._parts import Dataset
from composer.recipes._profile import profile_run
from composer.recipes._results import Result, Run
from composer.recipes._watch import RunBar, StopAfter, Watch
from composer.utils import dist, get_device
from composer.utils.reproducibility import seed_context

if TYPE_CHECKING:
    from composer.trainer import Trainer

__all__ = ["Comparison", "compare", "run"]

_TEST = "test"  # the label of the evaluation
_WARMUP_BATCHES = 2


def run(recipe: Recipe, runs: Runs | None = None) -> Result:
    """Train a recipe from each seed.

    Nothing outside is changed: the random generators and torch's deterministic mode are as before afterwards.

    Args:
        recipe: What to train.
        runs: How often and where. None: the defaults.

    Raises:
        FileNotFoundError: The data are not there.
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
        recipes: What to train.
        runs: How often and where. None: the defaults.
        folder: Where to record each run, in a folder of its own. None: nowhere.

    Returns:
        The results, in the order of the recipes.

    Raises:
        FileNotFoundError: The data are not there.
        ValueError: A hyperparameter does not fit the data or the device.
    """
    return Comparison(recipes, runs, folder=folder).run()


class Comparison:
    """Trains several recipes, seed by seed in turn, so that a machine that slows down slows all of them down.

    Everything that can be wrong with the recipes is found here; `run` then trains.

    Args:
        recipes: What to train.
        runs: How often and where. None: the defaults.
        folder: Where to record each run, in a folder `<recipe>-seed<seed>` as `composer-report` shows it; older records
            of these recipes there are removed. None: nowhere.

    Attributes:
        datasets: What each recipe trains on.
        folders: The folders of the recorded runs.

    Raises:
        FileNotFoundError: The data are not there.
        ValueError: A hyperparameter does not fit the data or the device.
    """

    def __init__(self, recipes: Sequence[Recipe], runs: Runs | None = None, *, folder: Path | None = None) -> None:
        if not recipes:
            raise ValueError("`recipes` must hold at least one recipe, got none.")
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
        """Train each recipe from each seed.

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

    def profile(self, folder: Path) -> Path:
        """Train one epoch of the last recipe with the profiler, which `composer-profiler` brings.

        Args:
            folder: The folder to write to; profiles in it are replaced.

        Returns:
            The trace, which https://ui.perfetto.dev opens.
        """
        with _deterministic(self._runs.threads):
            return self._sessions[-1].profile(folder)


class _Session:
    """Trains one recipe from any seed."""

    def __init__(self, recipe: Recipe, dataset: Dataset, runs: Runs, width: int, folder: Path | None) -> None:
        self.recipe, self.dataset, self.settings, self.width, self.folder = recipe, dataset, runs, width, folder
        self.plan = self.device = ""
        self.threads = self.num_parameters = 0

    def result(self, runs: list[Run]) -> Result:
        """What the runs gave, together with what `check` saw."""
        return Result(self.recipe, runs, self.plan, self.device, self.threads, self.num_parameters)

    def check(self) -> None:
        """Build a Trainer, which checks its arguments and sees what the network looks like."""
        with seed_context(0):
            trainer = self._trainer(0, self._num_batches(), [])
            plan = trainer.engine.explain()
            self.plan = str(type(plan)([row for row in plan if row.kind == "algorithm"]))
            self.device = trainer.state.device.name
            self.threads = torch.get_num_threads()
            self.num_parameters = sum(parameter.numel() for parameter in trainer.state.model.parameters())
            trainer.close()

    def warm_up(self) -> None:
        """Train a few batches that do not count: the first ones wait for libraries to load and kernels to be chosen."""
        with seed_context(0):
            trainer = self._trainer(0, self._num_batches(), [], [StopAfter(_WARMUP_BATCHES)])
            trainer.fit()
            trainer.close()

    def folder_of(self, seed: int) -> Path:
        """Where the run from a seed is recorded."""
        assert self.folder is not None
        return self.folder / f"{self.recipe.name}-seed{seed}"

    def remove_records(self) -> None:
        """Remove what an earlier comparison recorded of this recipe."""
        if self.folder is not None and dist.get_global_rank() == 0:
            for record in self.folder.glob(f"{glob.escape(self.recipe.name)}-seed*/run-rank*.jsonl"):
                record.unlink()

    def train(self, seed: int) -> Run:
        """Train from a seed."""
        memory, watch = InMemoryLogger(), Watch()
        loggers = [memory, watch, *([RunBar(self.recipe.metrics[0].key)] if self.settings.progress else [])]
        monitors: list[Callback] = []
        recorded = self.folder is not None
        if recorded:
            monitors = [LRMonitor(), SpeedMonitor(window_size=10, time_unit="seconds")]
            if get_device(self.settings.device).name == "gpu":  # it has nothing to say of others
                monitors.append(MemoryMonitor())
            loggers.append(RunRecorder(self.folder_of(seed), group=self.recipe.name))
        began = time.perf_counter()
        with seed_context(seed):
            trainer = self._trainer(seed, self._num_batches(), loggers, monitors)
            if recorded:
                trainer.logger.log_hyperparameters(_hyperparameters(self.recipe))
            trainer.fit()
        seconds = time.perf_counter() - began
        evidence = Evidence(trainer.state, memory, watch)
        deeds = {type(each).__name__: describe_deeds(each, evidence) for each in trainer.state.algorithms}
        if recorded and deeds:
            trainer.logger.log_table(["algorithm", "deed"], [list(item) for item in deeds.items()], name="algorithms")
        trainer.close()
        scores = {metric.key: _series(memory, metric.key) for metric in self.recipe.metrics}
        samples = trainer.state.timestamp.sample.value
        return Run(seed, scores, watch.tested_at, watch.train_seconds, seconds, samples, deeds)

    def profile(self, folder: Path) -> Path:
        """Train an epoch with the profiler; returns the trace."""
        seed, batches = self.settings.seed, self._batches_per_epoch()
        with seed_context(seed):
            return profile_run(lambda profiler: self._trainer(seed, batches, [], profiler=profiler), folder)

    def _num_batches(self) -> int:
        return max(1, round(self.recipe.training.epochs * self._batches_per_epoch()))

    def _batches_per_epoch(self) -> int:
        return self.dataset.num_train // self.dataset.batch_size

    def _trainer(
        self,
        seed: int,
        num_batches: int,
        loggers: list[Any],
        monitors: Sequence[Callback] = (),
        profiler: Any = None,
    ) -> Trainer:
        """A Trainer whose every random choice is decided by the seed. To be called under its `seed_context`."""
        from composer.trainer import Trainer  # loads torchmetrics, which takes seconds

        recipe, settings = self.recipe, self.settings
        device = get_device(settings.device)
        model = recipe.network.build(self.dataset)
        train, test = self.dataset.loaders(seed, device)
        return Trainer(
            model=model,
            train_dataloader=train,
            train_dataloader_label=f"{recipe.name:<{self.width}} seed {seed}",
            eval_dataloader=Evaluator(label=_TEST, dataloader=test),
            run_name=f"{recipe.name}-seed{seed}",
            max_duration=f"{num_batches}ba",  # not in epochs, each of which would get a progress bar of its own
            algorithms=copy.deepcopy(list(recipe.algorithms)),
            optimizers=recipe.training.optimizer(model),
            schedulers=recipe.training.schedule(),
            eval_interval=settings.eval_interval,
            loggers=loggers,
            callbacks=list(monitors),
            profiler=profiler,
            progress_bar=False,
            device=device,
            precision=settings.precision,
            seed=seed,
            deterministic_mode=settings.deterministic,
        )


def _hyperparameters(recipe: Recipe) -> dict[str, Any]:
    """What decides a training, for its record."""
    parts: dict[str, Any] = {"data": recipe.data, "network": recipe.network, "training": recipe.training}
    groups = {name: asdict(part) for name, part in parts.items()}
    values = {f"{name}/{key}": value for name, group in groups.items() for key, value in group.items()}
    return values | {"recipe": recipe.name}


def _series(memory: InMemoryLogger, metric: str) -> list[float]:
    """What the evaluations gave, one number for each."""
    return [float(value) for _, value in memory.data[f"metrics/{_TEST}/{metric}"]]


@contextmanager
def _deterministic(threads: int | None) -> Iterator[None]:
    """Leave torch's deterministic mode, which the Trainer switches on, and the number of threads as they were.

    In this mode torch would fill all new memory, so that what reads it before it is written can be found: 6% of the
    time of a small network, and nothing here is about finding that.
    """
    threads_before = torch.get_num_threads()
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    memory: Any = torch.utils.deterministic  # whose attribute is made when it is loaded
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
