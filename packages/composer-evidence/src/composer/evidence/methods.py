"""Methods: what can be added to plain training, with the arguments to tune; and why some do not apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import composer.algorithms
from composer.core import Algorithm, ConflictError, OrderingError
from composer.core.ordering import Ordering
from composer.evidence.task import Grid, Task
from composer.optim import ComposerScheduler, ConstantScheduler

Stack = tuple[tuple[str, dict[str, Any]], ...]
"""Algorithms by class name, with their arguments, in the order for the engine."""


@dataclass(frozen=True)
class Method:
    """One algorithm, as it is measured.

    Attributes:
        name: The class in `composer.algorithms`.
        arguments: Arguments that differ from the defaults of the class.
        grid: Arguments to tune. Where `arguments` does not have one, the last value is the default of the class.
        kind: Inputs it needs; "any" for all.
        regularizes: True if only training that fits its data can show its effect.
        averages: True if it does not change the training: its weights are scored in the runs of plain.
        schedules: True if it replaces the schedule: it is trained with a constant learning rate, plain's peak.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Grid] = field(default_factory=dict)
    kind: Literal["any", "images", "tokens"] = "any"
    regularizes: bool = False
    averages: bool = False
    schedules: bool = False


TEACHER = "plain, 4 times the steps"
"""The value of an argument that takes a trained network: that of plain, trained for four times the full budget."""

_UNIT = {"high": 0.95}
_ALL = (
    Method("Muon", grid={"momentum": Grid((0.9, 0.95), high=0.999)}),
    Method("SOAP", grid={"precondition_frequency": Grid((2, 10), low=1, high=50)}),
    Method("Hyperball", {"lr": 0.03}, {"lr": Grid((0.01, 0.03, 0.1), high=1.0)}),
    Method("CautiousDecay", grid={"weight_decay": Grid((0.01, 0.1))}),
    Method(
        "EMANesterov",
        {"beta": 0.3},
        {"beta": Grid((0.3, 0.6)), "decay": Grid((0.9, 0.99), low=0.5, high=0.999)},
    ),
    Method("Alibi", kind="tokens"),
    Method("WeightStandardization", kind="images"),
    Method(
        "EMA",
        {"half_life": "20ba", "update_interval": "5ba"},
        {"half_life": Grid(("10ba", "20ba", "40ba"))},  # in short runs its warmup makes longer ones equal
        averages=True,
    ),
    # The harness recalibrates batch norm, since the loader of a task cannot be iterated again during training.
    Method(
        "LAWA", {"interval": "20ba", "recalibration_batches": 0}, {"num_snapshots": Grid((3, 6), low=1)}, averages=True
    ),
    Method("SWA", {"swa_start": "0.75dur", "swa_end": "1dur", "update_interval": "10ba"}, averages=True),
    Method(
        "ScheduleFree",
        {"recalibration_batches": 0},  # for the same reason as LAWA's
        {"warmup": Grid(("30ba", "100ba", "300ba"))},
        schedules=True,
    ),
    Method(
        "Distillation",
        {"teacher": TEACHER},
        {"weight": Grid((0.5, 0.9), **_UNIT), "temperature": Grid((2.0, 4.0))},
    ),
    Method("LabelSmoothing", grid={"smoothing": Grid((0.05, 0.1), **_UNIT)}, kind="images"),
    Method("QKNorm", kind="tokens"),
    Method(
        "ProgressiveResizing",
        {"initial_scale": 0.5},
        {"initial_scale": Grid((0.5, 0.75), **_UNIT)},
        kind="images",
    ),
    Method("SeqLengthWarmup", grid={"duration": Grid((0.2, 0.3), **_UNIT)}, kind="tokens"),
    Method("Whitening", kind="images"),
    Method("AlternatingFlip", kind="images"),
    Method("TestTimeAugmentation", kind="images"),
    Method("GradientClipping", {"clipping_type": "norm", "clipping_threshold": 1.0}),
    Method("ChannelsLast", kind="images"),
    Method("GhostBatchNorm", grid={"ghost_batch_size": Grid((16, 32), low=1)}, kind="images"),
    Method("GatedLinearUnits", kind="tokens"),
    Method("SAM", grid={"rho": Grid((0.02, 0.05))}),
    Method("BlurPool", kind="images"),
    Method("SqueezeExcite", {"min_channels": 32, "latent_channels": 0.25}, kind="images"),
    Method("LogitSoftcap", kind="tokens"),
    Method("ZLoss"),
    Method("LayerFreezing"),
    Method("SelectiveBackprop"),
    Method("MixUp", grid={"alpha": Grid((0.1, 0.2))}, kind="images", regularizes=True),
    Method("CutMix", grid={"alpha": Grid((0.5, 1.0))}, kind="images", regularizes=True),
    Method("CutOut", grid={"length": Grid((0.25, 0.5), **_UNIT)}, kind="images", regularizes=True),
    Method("ColOut", grid={"p_row": Grid((0.05, 0.15), **_UNIT)}, kind="images", regularizes=True),
    Method("StochasticDepth", regularizes=True),
    Method("GyroDropout", regularizes=True),
)
METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
"""The declared methods by name; those at the beginning are tried first if time is limited."""


def method_of(task: Task, name: str) -> Method:
    """Return a declared method, or one with the defaults of any other installed algorithm.

    Args:
        task: The task, which may have methods of its own.
        name: The name of the method.
    """
    algorithm = task.algorithms.get(name, name)
    return METHODS.get(algorithm, Method(algorithm))


def names_of(task: Task) -> list[str]:
    """Return all declared methods, those of the task first."""
    return [*task.algorithms, *METHODS]


def member_of(task: Task, name: str) -> tuple[str, dict[str, Any]]:
    """Return the algorithm of a method on a task, and its arguments before they are tuned."""
    method = method_of(task, name)
    return method.name, {**method.arguments, **task.arguments.get(name, {})}


def grid_of(task: Task, name: str) -> Mapping[str, Grid]:
    """Return the arguments of a method to tune on a task."""
    fixed = task.arguments.get(name, {})
    grid = task.grids.get(name, method_of(task, name).grid)
    return {key: values for key, values in grid.items() if key not in fixed or name in task.grids}


def class_of(name: str) -> type[Algorithm]:
    """Return the class of an algorithm.

    Args:
        name: Its name in `composer.algorithms`.

    Raises:
        ValueError: It is not installed (the message has the command), or it is not an algorithm.
    """
    try:
        found = getattr(composer.algorithms, name)
    except AttributeError as error:
        raise ValueError(f"`methods` must be installed algorithms, got {name!r}. {error}") from error
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise ValueError(f"`methods` must be algorithms, got {name!r}, which is not one.")
    return found


def make_algorithms(
    stack: Sequence[tuple[str, Mapping[str, Any]]], teacher: Callable[[], torch.nn.Module] = torch.nn.Identity
) -> list[Algorithm]:
    """Construct the algorithms of a stack.

    Args:
        stack: Class names and arguments; those of one class are joined.
        teacher: Returns the network for an argument that is `TEACHER`.

    Raises:
        ValueError: An algorithm is not installed, or an argument is invalid.
    """
    joined: dict[str, dict[str, Any]] = {}
    for name, arguments in stack:
        joined.setdefault(name, {}).update(arguments)
    algorithms = []
    for name, arguments in joined.items():
        make = class_of(name)
        try:
            algorithms.append(
                make(**{key: teacher() if value == TEACHER else value for key, value in arguments.items()})
            )
        except TypeError as error:
            raise ValueError(
                f"`{name}` cannot be constructed: {error}. Give its arguments in `Task.arguments`."
            ) from error
    return algorithms


@dataclass(frozen=True)
class _Constant:
    """Training without a schedule and without Nesterov momentum."""

    training: Any

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = self.training.optimizer(model)
        for group in optimizer.param_groups:
            if group.get("nesterov"):  # has no schedule-free counterpart: `ScheduleFree` refuses it
                group["nesterov"] = False
        return optimizer

    def schedule(self) -> ComposerScheduler:
        return ConstantScheduler()


def training_beside(stack: Sequence[tuple[str, Mapping[str, Any]]], training: Any) -> Any:
    """Return the optimization of a run with some methods.

    Args:
        stack: Class names and arguments.
        training: The optimization of plain; see `composer.evidence.Training`.

    Returns:
        `training`, or the same with a constant learning rate if a method replaces its schedule.
    """
    return _Constant(training) if any(name in METHODS and METHODS[name].schedules for name, _ in stack) else training


def reason_against(task: Task, names: Sequence[str]) -> tuple[str, str] | None:
    """Return why methods cannot be measured on a task, as far as that is known without training.

    Args:
        task: The task.
        names: The methods of a stack.

    Returns:
        A verdict ("not applicable" or "not judged") and the reason; None if nothing is known against them.
    """
    for name in names:
        method = method_of(task, name)
        if name in task.not_judged:
            return "not judged", task.not_judged[name]
        if method.kind not in ("any", task.kind):
            return "not applicable", f"{name} needs {method.kind}, and the inputs of {task.name} are {task.kind}"
        if method.regularizes and not task.judges_regularizers:
            return "not judged", f"{name} regularizes, and the budget of {task.name} is too short for that"
    if len(set(names)) < len(names):
        return "not applicable", f"a method is given twice: {', '.join(names)}"
    taken: set[tuple[str, str]] = set()
    for name in names:
        algorithm, arguments = member_of(task, name)
        own = {(algorithm, key) for key in (*arguments, *grid_of(task, name))}
        for _, key in sorted(taken & own)[:1]:
            return "not applicable", f"two members of {'+'.join(names)} set `{key}` of {algorithm}"
        taken |= own
    try:
        Ordering(make_algorithms([member_of(task, name) for name in names]))
    except (ConflictError, OrderingError, ValueError) as error:
        return "not applicable", str(error)
    return None
