"""Sort algorithms by their declared placements."""

from __future__ import annotations

import heapq
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core.algorithm import declared_placement
from composer.core.effects import EFFECTS

if TYPE_CHECKING:
    from composer.core.algorithm import Algorithm
    from composer.core.event import Event


class ComposerError(Exception):
    """Base class of the library's own errors."""


class ConflictError(ComposerError, ValueError):
    """Two algorithms are used together although one excludes the other."""


class OrderingError(ComposerError, ValueError):
    """The declared orders of some algorithms contradict each other."""


def opener_of(event: Event) -> Event | None:
    """Return the first event of the pair that `event` ends, such as BEFORE_LOSS for AFTER_LOSS; else None."""
    if not event.is_after_event:
        return None
    same = (e for e in type(event) if e.is_before_event and e.canonical_name == event.canonical_name)
    return next(same, None)


class Ordering:
    """The declared order of a set of algorithms. Computed once per set.

    Args:
        algorithms: The algorithms, in the order in which the user listed them.

    Raises:
        ConflictError: One algorithm excludes another; the message has a line for each such pair.
        OrderingError: The declared orders contradict each other.
    """

    def __init__(self, algorithms: Sequence[Algorithm]) -> None:
        self.algorithms = tuple(algorithms)
        self._placements = [declared_placement(algorithm) for algorithm in self.algorithms]
        problems: dict[frozenset[int], str] = {}
        for i, j, effects in self._pairs("excludes"):
            problem = f"`{self._name(i)}` cannot be used together with `{self._name(j)}`, which {_words(effects)}."
            if type(self.algorithms[i]) is type(self.algorithms[j]):
                problem = f"`{self._name(i)}` is given twice, but one of them already {_words(effects)}."
            # Where both exclude each other, one sentence is enough.
            problems.setdefault(frozenset((i, j)), f"{problem} Remove one of the two from `algorithms`.")
        if problems:
            raise ConflictError("\n".join(problems.values()))
        # edges[i][j] is the reason why algorithm i acts before algorithm j.
        self._edges: dict[int, dict[int, str]] = {i: {} for i in range(len(self.algorithms))}
        for i, j, effects in self._pairs("before"):
            self._edges[i][j] = f"{self._name(j)} {_words(effects)}, which {self._name(i)} precedes"
        for i, j, effects in self._pairs("after"):
            self._edges[j][i] = f"{self._name(j)} {_words(effects)}, which {self._name(i)} follows"
        self._after: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, ...]] = {}
        self.declared = any(self._edges.values())
        self.forward = self._sorted(range(len(self.algorithms)), self._edges)

    def backward(self, present: tuple[int, ...], acted: tuple[int, ...]) -> tuple[int, ...]:
        """Return the order at an AFTER or END event: first in, last out, without breaking a declared order.

        Algorithms that also acted at the first event of the pair undo that in exactly the reverse order.

        Args:
            present: The indices of the algorithms that act now, ascending.
            acted: The indices of those that acted at the first event, in that order.
        """
        if not self.declared:
            return present[::-1]
        key = (present, acted)
        if key not in self._after:
            now = set(present)
            undone = [i for i in reversed(acted) if i in now]
            edges = {
                i: {j: why for j, why in self._edges[i].items() if j in now and not (i in undone and j in undone)}
                for i in present
            }
            for i, j in itertools.pairwise(undone):
                edges[i][j] = "it acted later at the first event of the pair"
            self._after[key] = self._sorted([i for i in reversed(self.forward) if i in now], edges)
        return self._after[key]

    def why(self, index: int, order: Sequence[int], acted: Sequence[int] | None) -> str:
        """Return the reason for the position of an algorithm in `order`, in words."""
        reasons = []
        for other in order:
            undone = acted is not None and index in acted and other in acted
            if undone and other != index:
                continue
            if other in self._edges[index]:
                reasons.append(f"before {self._name(other)}: {self._edges[index][other]}")
            if index in self._edges[other]:
                reasons.append(f"after {self._name(other)}: {self._edges[other][index]}")
        if acted is not None and index in acted and len(acted) > 1:
            reasons.append("also acted at the first event of the pair: reverse of the order there")
        if reasons:
            return "; ".join(reasons)
        if acted is None or len(order) == 1:
            return "as listed"
        return "reverse of the list: first in, last out"

    def warn_discouraged(self) -> None:
        """Warn about every pair that a placement discourages."""
        for i, j, effects in self._pairs("discourages"):
            if j < i and self._placements[j].discourages & self._placements[i].provides:
                continue  # both discourage each other: one warning is enough
            warnings.warn(
                f"`{self._name(i)}` should not be used together with `{self._name(j)}`, which also "
                f"{_words(effects)}. Remove one of them unless you mean it.",
                NotIntendedUseWarning,
                stacklevel=2,
            )

    def _name(self, index: int) -> str:
        return type(self.algorithms[index]).__name__

    def _pairs(self, field: str) -> list[tuple[int, int, frozenset[str]]]:
        """Return the pairs of algorithms (i, j) where a field of i's placement has effects that j provides."""
        pairs = []
        for i, placement in enumerate(self._placements):
            for j, other in enumerate(self._placements):
                effects = getattr(placement, field) & other.provides
                if i != j and effects:
                    pairs.append((i, j, effects))
        return pairs

    def _sorted(self, base: Sequence[int], edges: Mapping[int, Mapping[int, str]]) -> tuple[int, ...]:
        """Sort topologically; where the edges allow several orders, keep that of `base`."""
        rank = {i: position for position, i in enumerate(base)}
        num_predecessors = dict.fromkeys(base, 0)
        for successors in edges.values():
            for j in successors:
                num_predecessors[j] += 1
        ready = [rank[i] for i in base if not num_predecessors[i]]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            i = base[heapq.heappop(ready)]
            order.append(i)
            for j in edges[i]:
                num_predecessors[j] -= 1
                if not num_predecessors[j]:
                    heapq.heappush(ready, rank[j])
        if len(order) < len(base):
            raise OrderingError(self._cycle(set(base) - set(order), edges))
        return tuple(order)

    def _cycle(self, stuck: set[int], edges: Mapping[int, Mapping[int, str]]) -> str:
        # Walk backwards: every stuck algorithm has a stuck predecessor, so some algorithm repeats.
        path = [min(stuck)]
        while path.count(path[-1]) < 2:
            path.append(next(i for i in stuck if path[-1] in edges[i]))
        cycle = path[path.index(path[-1]) : -1][::-1]
        steps = [
            f"`{self._name(i)}` must act before `{self._name(j)}` ({edges[i][j]})"
            for i, j in zip(cycle, cycle[1:] + cycle[:1], strict=True)
        ]
        return (
            f"The declared orders of {', '.join(f'`{self._name(i)}`' for i in cycle)} contradict each other: "
            f"{' and '.join(steps)}. Remove one of them, or change the `placement` of one that is yours."
        )


def _words(effects: frozenset[str]) -> str:
    words = (effect.replace("_", " ") if effect in EFFECTS else f"provides '{effect}'" for effect in sorted(effects))
    return " and ".join(words)
