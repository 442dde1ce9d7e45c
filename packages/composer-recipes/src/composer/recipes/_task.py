"""A task: data, a network, an optimisation, and two recipes for it, plain and composed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer.core import Algorithm
from composer.recipes._hparams import Recipe, Runs
from composer.recipes._parts import DataSource, Metric, NetworkPlan, TrainingPlan

__all__ = ["Task"]


@dataclass(frozen=True)
class Task:
    """What `composer-train NAME` trains: the defaults of two recipes, and what can be composed.

    Attributes:
        name: What it is called.
        summary: What is trained, in a few sentences.
        data: The data, by default.
        network: The network, by default.
        training: The optimisation, by default: tuned for the plain recipe, and used by both.
        metrics: What is measured; the first one is what is compared.
        algorithms: What can be composed, by the names that the command line uses.
        chosen: What the composed recipe composes.
        tuned: Arguments that suit the task better than an algorithm's own defaults, by name.
        runs: How often and where to train, by default.
        fitted: Arguments of algorithms that follow from the data, by name.
    """

    name: str
    summary: str
    data: DataSource
    network: NetworkPlan
    training: TrainingPlan
    metrics: Sequence[Metric]
    algorithms: Mapping[str, type[Algorithm]]
    chosen: Sequence[str]
    tuned: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    runs: Runs = field(default_factory=Runs)
    fitted: Callable[[Any], Mapping[str, Mapping[str, Any]]] = lambda data: {}

    def plain(
        self, data: DataSource | None = None, network: NetworkPlan | None = None, training: TrainingPlan | None = None
    ) -> Recipe:
        """The plain recipe: no algorithms.

        Args:
            data: What to train on. None: the default.
            network: The network. None: the default.
            training: The optimisation. None: the default.
        """
        return Recipe("plain", data or self.data, network or self.network, training or self.training, self.metrics)

    def composed(
        self,
        data: DataSource | None = None,
        network: NetworkPlan | None = None,
        training: TrainingPlan | None = None,
        algorithms: Sequence[Algorithm] | None = None,
    ) -> Recipe:
        """The composed recipe: the plain one, and algorithms.

        Args:
            data: What to train on. None: the default.
            network: The network. None: the default.
            training: The optimisation. None: the default.
            algorithms: What to compose. None: what helps, with the arguments that suit the task.
        """
        chosen = self.make_algorithms(data=data) if algorithms is None else algorithms
        parts = data or self.data, network or self.network, training or self.training
        return Recipe("composed", *parts, self.metrics, chosen)

    def make_algorithms(
        self,
        names: Sequence[str] | None = None,
        arguments: Mapping[str, Mapping[str, Any]] | None = None,
        data: DataSource | None = None,
    ) -> list[Algorithm]:
        """Algorithms by name.

        Args:
            names: Keys of `algorithms`. None: `chosen`.
            arguments: Arguments by name. None: `tuned`.
            data: What they are for. None: the default.

        Raises:
            ValueError: A name is unknown, or an algorithm refuses its arguments.
        """
        arguments = self.tuned if arguments is None else arguments
        fitted = self.fitted(data or self.data)
        made = []
        for name in self.chosen if names is None else names:
            if name not in self.algorithms:
                raise ValueError(f"`names` must be among {', '.join(self.algorithms)}, got {name!r}.")
            made.append(self.algorithms[name](**arguments.get(name, {}), **fitted.get(name, {})))
        return made
