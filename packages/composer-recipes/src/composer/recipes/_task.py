"""A task: data, a network, an optimization, and two recipes for it, plain and composed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer.core import Algorithm
from composer.recipes._hparams import Recipe, Runs
from composer.recipes._parts import DataSource, Metric, NetworkPlan, TrainingPlan


@dataclass(frozen=True)
class Task:
    """Defaults of the plain and the composed recipe of `composer-train NAME`, and the available algorithms.

    Attributes:
        name: The name on the command line.
        summary: A few sentences for its help.
        data: Default data.
        network: Default network.
        training: Default optimization of both recipes, tuned for the plain one.
        metrics: Evaluation metrics; recipes are compared by the first one.
        algorithms: The available algorithms, by their names on the command line.
        chosen: The algorithms of the composed recipe by default.
        tuned: Arguments that replace the defaults of an algorithm, by name.
        runs: Default number of runs and how they are computed.
        fitted: Returns arguments of algorithms that depend on the data, by name.
        stacks: Files of options that `--config` takes by name.
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
    stacks: Mapping[str, Path] = field(default_factory=dict)

    def plain(
        self, data: DataSource | None = None, network: NetworkPlan | None = None, training: TrainingPlan | None = None
    ) -> Recipe:
        """Return the recipe without algorithms.

        Args:
            data: The data. None: the default.
            network: The network. None: the default.
            training: The optimization. None: the default.
        """
        return Recipe("plain", data or self.data, network or self.network, training or self.training, self.metrics)

    def composed(
        self,
        data: DataSource | None = None,
        network: NetworkPlan | None = None,
        training: TrainingPlan | None = None,
        algorithms: Sequence[Algorithm] | None = None,
    ) -> Recipe:
        """Return the recipe with algorithms.

        Args:
            data: The data. None: the default.
            network: The network. None: the default.
            training: The optimization. None: the default.
            algorithms: The algorithms. None: `chosen`, with the arguments of `tuned`.
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
        """Construct algorithms by name.

        Args:
            names: Keys of `algorithms`. None: `chosen`.
            arguments: Arguments by name. None: `tuned`.
            data: The data they are for. None: the default.

        Raises:
            ValueError: A name is unknown, or an argument is invalid.
        """
        arguments = self.tuned if arguments is None else arguments
        fitted = self.fitted(data or self.data)
        algorithms = []
        for name in self.chosen if names is None else names:
            if name not in self.algorithms:
                raise ValueError(f"`names` must be among {', '.join(self.algorithms)}, got {name!r}.")
            algorithms.append(self.algorithms[name](**arguments.get(name, {}), **fitted.get(name, {})))
        return algorithms
