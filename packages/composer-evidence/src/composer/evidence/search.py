"""A declared search over settings, one after the other until none improves, and beyond the edges of their grids."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from composer.evidence.task import Grid

_MAX_PASSES = 4  # over all settings


class SearchError(ValueError):
    """All trials of a search failed or diverged."""


@dataclass(frozen=True)
class Trial:
    """A point of a search and its score."""

    point: Mapping[str, Any]
    score: float


@dataclass(frozen=True)
class Search:
    """Result of a search.

    Attributes:
        best: The best trial.
        trials: All trials, in the order in which they were made.
        at_bound: Settings whose best value is at a bound of the search: beyond it may be a better one.
        grid: The values that were tried, with extensions.
    """

    best: Trial
    trials: Sequence[Trial]
    at_bound: Sequence[str]
    grid: Mapping[str, Sequence[Any]]


def search(
    grid: Mapping[str, Grid],
    start: Mapping[str, Any],
    evaluate: Callable[[list[dict[str, Any]]], Sequence[float]],
    *,
    higher_is_better: bool,
    max_trials: int | None = None,
) -> Search:
    """Search for the best point, one setting after the other, from a starting point.

    All values of a setting are tried with the best values of the others so far, then the next setting follows. With
    several settings, this repeats with the neighbors of each best value, up to three times, until the best point stays:
    the best learning rate for a short warmup may not be the best for a long one. While the best value of a numeric grid
    with two or more values is at an edge, the grid is extended there, up to its bound. A grid lets other steps reuse
    the trials, and readers of the ledger follow the search.

    Args:
        grid: The values by setting, in the order of the search.
        start: Values of the settings to begin with.
        evaluate: Returns a score for each of some points, which may be trained in parallel; NaN for a point that fails.
        higher_is_better: True for accuracies, False for losses.
        max_trials: The most points to evaluate, besides those that extend a grid: a search that ends at an edge says
            nothing. None: no limit.

    Raises:
        SearchError: All trials failed.

    Example:
        >>> def far_from_one(points):
        ...     return [abs(math.log2(point["lr"])) for point in points]
        >>> found = search({"lr": Grid((4.0, 8.0))}, {"lr": 4.0}, far_from_one, higher_is_better=False)
        >>> found.best.point, found.grid["lr"]
        ({'lr': 1.0}, (0.5, 1.0, 2.0, 4.0, 8.0))
    """
    trials: dict[str, Trial] = {}
    sign = 1.0 if higher_is_better else -1.0

    def try_all(points: list[dict[str, Any]], limit: int | None = max_trials) -> None:
        new = {_key(point): point for point in points if _key(point) not in trials}
        names = list(new)
        if limit is not None:
            names = names[: max(0, limit - len(trials))]
        if names:
            for name, score in zip(names, evaluate([new[name] for name in names]), strict=True):
                trials[name] = Trial(new[name], score)

    def best() -> Trial:
        finished = [trial for trial in trials.values() if math.isfinite(trial.score)]
        if not finished:
            raise SearchError("All trials of the search failed or diverged. Lower the learning rates of the grid.")
        return max(finished, key=lambda trial: sign * trial.score)

    grids = {
        name: replace(values, values=sorted({*values.values, start[name]})) if values.is_numeric else values
        for name, values in grid.items()
    }
    current = dict(start)
    try_all([current])
    for index in range(_MAX_PASSES):
        before = current
        for name in grid:
            values = grids[name].values if index == 0 else _beside(grids[name], current[name])
            try_all([{**current, name: value} for value in values])
            while (further := _further(grids[name], best().point[name])) is not None:
                try_all([{**current, name: further}], limit=None)
                grids[name] = replace(grids[name], values=sorted((*grids[name].values, further)))
            current = dict(best().point)
        if current == before or len(grid) == 1:
            break
    at_bound = tuple(
        name
        for name, values in grids.items()
        if values.is_numeric and len(values.values) > 1 and current[name] in values.bounds
    )
    tried = {name: tuple(values.values) for name, values in grids.items()}
    return Search(best(), tuple(trials.values()), at_bound, tried)


def _beside(grid: Grid, value: Any) -> Sequence[Any]:
    """Return the values next to one of a grid, or all if they have no order."""
    if not grid.is_numeric:
        return grid.values
    index = grid.values.index(value)
    return grid.values[max(0, index - 1) : index + 2]


def _further(grid: Grid, value: Any) -> float | None:
    """Return the value by which a grid is extended if `value` is at its edge; None if it is inside, or at a bound."""
    if not grid.is_numeric or len(grid.values) < 2:
        return None
    if value == grid.values[-1]:
        return grid.extended(upwards=True)
    return grid.extended(upwards=False) if value == grid.values[0] else None


def _key(point: Mapping[str, Any]) -> str:
    return json.dumps(point, sort_keys=True)
