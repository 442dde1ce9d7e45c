"""A task: frozen data, networks, training, one metric, and the budgets on which methods are compared."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import torch

from composer.devices import Device
from composer.evidence.tasks import TASKS
from composer.models import ComposerModel
from composer.optim import ComposerScheduler
from composer.recipes import Metric

Part: TypeAlias = Literal["validation", "test"]


class Parts(Protocol):
    """Loaded data of a task with fixed training, validation and test parts."""

    def loaders(self, part: Part, seed: int, device: Device, **batch_size: int) -> tuple[Any, Any]:
        """Return a loader of the training part, and one of the validation or the test part.

        Args:
            part: The part to evaluate. The training part is the same in both cases.
            seed: Seed of the order and the augmentation of the training part.
            device: The device of the run.
            **batch_size: `batch_size=...`, only if the task's training has one.
        """
        ...


class Training(Protocol):
    """Optimization of a run: a frozen dataclass whose fields can be tuned, such as `composer.recipes.AdamW`.

    A class of your own may also have what else a practitioner tunes: `prepare(model)`, which is called with the new
    network (another initialization), `callbacks()` (gradient clipping), `algorithms()` (names and arguments of what
    plain training has already, such as Muon), and `batch_size`, which is then passed on to the loaders. Runs with
    another batch size have as many more or fewer steps, so that all see the same samples.
    """

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return an optimizer of a model's parameters."""
        ...

    def schedule(self) -> ComposerScheduler:
        """Return the learning rate schedule, in fractions of the run, so that it fits every budget."""
        ...


@dataclass(frozen=True)
class Grid:
    """Declared values of one setting; extended while the best value is at an edge, until a bound.

    Args:
        values: The values. Numbers must be sorted and are extended by the ratio of the two values at the edge.
        low: The least value. None: a hundredth of the first one.
        high: The greatest value. None: a hundred times the last one.

    Raises:
        ValueError: There is no value, or numbers are not sorted, or outside the bounds.

    Example:
        >>> Grid((1e-3, 3e-3)).extended(upwards=True)
        0.009
        >>> Grid((0.1, 0.3), high=0.7).extended(upwards=True)
        0.7
        >>> Grid((0.1, 0.7), high=0.7).extended(upwards=True) is None
        True
    """

    values: Sequence[Any]
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise ValueError("`values` must have at least one value, got none.")
        if self.is_numeric:
            if list(self.values) != sorted(set(self.values)):
                raise ValueError(f"`values` must be sorted and differ from each other, got {self.values!r}.")
            low, high = self.bounds
            if self.values[0] < low or self.values[-1] > high:
                raise ValueError(f"`values` must be from {low} to {high}, got {self.values!r}.")

    @property
    def is_numeric(self) -> bool:
        """True if all values are numbers, so that there is an order and an edge."""
        return all(isinstance(value, int | float) and not isinstance(value, bool) for value in self.values)

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest value to which numbers are extended."""
        first, last = self.values[0], self.values[-1]
        low = min(first / 100, first * 100) if self.low is None else self.low
        return low, max(last / 100, last * 100) if self.high is None else self.high

    def extended(self, *, upwards: bool) -> float | None:
        """Return the value beyond an edge, rounded to three digits, to integers if all are integers; None at a bound.

        Args:
            upwards: Go beyond the largest value, otherwise beyond the smallest.
        """
        if not self.is_numeric or len(self.values) < 2:
            return None
        low, high = self.bounds
        edge, inner = (self.values[-1], self.values[-2]) if upwards else (self.values[0], self.values[1])
        value = float(f"{edge * (edge / inner if inner else 2.0):.3g}")
        if all(isinstance(each, int) for each in self.values):
            value, low, high = round(value), math.ceil(low), math.floor(high)
        value = min(max(value, low), high)
        return value if (value > edge if upwards else value < edge) else None


@dataclass(frozen=True)
class Variant:
    """One way of plain training: a network and its optimization. The best variant on validation is *plain*.

    Attributes:
        model: Returns a new network for the loaded data, initialized with torch's global generator.
        training: The default optimization.
        grid: The settings of `training` to tune, in that order.
    """

    model: Callable[[Any], ComposerModel]
    training: Training
    grid: Mapping[str, Grid]


@dataclass(frozen=True)
class Task:
    """Frozen description of what is trained and how it is judged. Change `version` when you change anything.

    Attributes:
        name: The name.
        version: The version; results of different versions are never mixed.
        summary: One sentence about it.
        data: Loads the data from a folder, or without one.
        variants: Ways of plain training by name; methods are compared with the best one.
        metric: The metric by which methods are judged, and its direction.
        steps: The full budget, in optimizer steps.
        ladder: The budgets of plain training as fractions of the full one. It has 1 and a smaller one.
        kind: Inputs of the network, which say what applies: "images", "tokens" or "other".
        algorithms: Method -> algorithm in `composer.algorithms`, where a method is an option of an algorithm. One that
            plain training has already gets that option.
        base: Method -> variant to which it is applied, where that is not plain (ALiBi replaces learned positions).
        arguments: Method -> arguments that this task determines.
        grids: Method -> argument -> grid, in place of those of the method.
        not_judged: Method -> reason why this task cannot judge it, such as a budget that is too short.
        judges_regularizers: False if the budget underfits, so that regularizers are not judged.
        data_hash: Checksum or version of the data, if `data` does not have a `digest`.

    Raises:
        ValueError: A number is out of range, or a name is unknown.
    """

    name: str
    version: int
    summary: str
    data: Callable[[Path | None], Any]
    variants: Mapping[str, Variant]
    metric: Metric
    steps: int
    ladder: Sequence[float] = (0.25, 0.5, 0.75, 1.0)
    kind: Literal["images", "tokens", "other"] = "other"
    algorithms: Mapping[str, str] = field(default_factory=dict)
    base: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    grids: Mapping[str, Mapping[str, Grid]] = field(default_factory=dict)
    not_judged: Mapping[str, str] = field(default_factory=dict)
    judges_regularizers: bool = True
    data_hash: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ladder", tuple(sorted(self.ladder)))
        if self.steps < 1:
            raise ValueError(f"`steps` must be at least 1, got {self.steps!r}.")
        if not self.variants:
            raise ValueError("`variants` must have at least one way of plain training, got none.")
        if 1.0 not in self.ladder or self.ladder[0] <= 0 or self.ladder[0] >= 1:
            raise ValueError(f"`ladder` must have 1 and a smaller positive fraction, got {self.ladder!r}.")
        for base in self.base.values():
            if base not in self.variants:
                raise ValueError(f"`base` must name variants among {', '.join(self.variants)}, got {base!r}.")
        for name, variant in self.variants.items():
            missing = [key for key in variant.grid if not hasattr(variant.training, key)]
            if missing:
                raise ValueError(
                    f"`grid` of {name!r} must name fields of {type(variant.training).__name__}, got {missing[0]!r}."
                )

    def steps_of(self, fraction: float) -> int:
        """Return the number of steps of a fraction of the full budget."""
        return max(1, round(self.steps * fraction))

    def describe(self) -> dict[str, Any]:
        """Return what the hash covers, as values for JSON: settings, and the source code of the functions."""
        return {
            "name": self.name,
            "version": self.version,
            "data": source_of(self.data),
            "data_hash": self.data_hash,
            "variants": {
                name: {
                    "model": source_of(variant.model),
                    "training": _values(variant.training),
                    "class": type(variant.training).__qualname__,
                }
                for name, variant in self.variants.items()
            },
            "metric": asdict(self.metric),
            "steps": self.steps,
            "arguments": {name: dict(values) for name, values in self.arguments.items()},
        }

    def hash(self, data: Any) -> str:
        """Return the hash of the task with its loaded data, which every entry of a ledger has.

        Args:
            data: The result of `data(folder)`. If it has a method `digest() -> str`, the hash covers that.
        """
        of_data = data.digest() if hasattr(data, "digest") else ""
        return digest({**self.describe(), "digest": of_data})


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a value that JSON can represent.

    Example:
        >>> digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
        True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def source_of(function: Any) -> str:
    """Return a hash of the source code of a function, a class or an instance; "" where there is none."""
    is_partial = isinstance(function, partial)
    target = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    try:
        source = inspect.getsource(function.func if is_partial else target)
    except (OSError, TypeError):
        return ""
    owner = getattr(function, "__self__", function)
    arguments = {**dict(enumerate(function.args)), **function.keywords} if is_partial else {}
    bound = {key: source_of(value) if inspect.isroutine(value) else value for key, value in arguments.items()}
    fields = owner if is_dataclass(owner) and not isinstance(owner, type) else None
    text = re.sub(r" at 0x[0-9a-f]+", "", repr((bound, fields)))  # addresses differ between processes
    return hashlib.sha256(f"{source}{text}".encode()).hexdigest()[:16]


def _values(training: Any) -> dict[str, Any]:
    return asdict(training) if is_dataclass(training) and not isinstance(training, type) else {"repr": repr(training)}


def load_task(reference: str) -> Task:
    """Return a task: a built-in one by name, or `module:attribute`.

    Args:
        reference: The name, or a module (also one in the current folder) and its attribute: a `Task`, or a function
            that returns one.

    Raises:
        ValueError: There is no such task.
        TypeError: The attribute is not a task.
    """
    module = module_of(reference)
    attribute = TASKS.get(reference, reference).partition(":")[2]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"`task` must be an attribute of a module, got {reference!r}: {error}.") from error
    task = found if isinstance(found, Task) else found() if callable(found) else found
    if not isinstance(task, Task):
        raise TypeError(f"`task` must be a `Task` or a function that returns one, got {task!r} for {reference!r}.")
    return task


def module_of(reference: str) -> str:
    """Return the module of a task.

    Args:
        reference: The name of a built-in task, or `module:attribute`.

    Raises:
        ValueError: There is no such built-in task.
    """
    module, _, attribute = TASKS.get(reference, reference).partition(":")
    if not attribute:
        raise ValueError(f"`task` must be {', '.join(TASKS)} or `module:attribute`, got {reference!r}.")
    return module
