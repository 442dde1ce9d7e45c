"""Counts when algorithms act, in a space that does not grow with the run."""

from __future__ import annotations

from typing import Any

__all__ = ["ALGORITHM", "ActCounter"]

ALGORITHM = "algorithm_traces/"  # what traces of algorithms begin with

_MOST_SPANS = 128  # of one algorithm at one event, between two records


class ActCounter:
    """How often each algorithm acted at each event since the last `take`, and at which batches.

    Batches that follow each other become one span. An algorithm that acts now and then would give many short ones:
    then those that are near each other are joined, so that there are never more than a few.
    """

    def __init__(self) -> None:
        self._acts: dict[str, _Acts] = {}

    def add(self, key: str, batch: int) -> None:
        """Count an act. Called several times in every step.

        Args:
            key: `algorithm_traces/<algorithm>/Event.<EVENT>`.
            batch: The number of trained batches.
        """
        acts = self._acts.get(key)
        if acts is None:
            acts = self._acts[key] = _Acts(batch)
        span = acts.spans[-1]
        if batch - span[1] > acts.gap:
            acts.spans.append([batch, batch, 1])
            if len(acts.spans) > _MOST_SPANS:
                acts.join()
        else:
            span[1] = batch
            span[2] += 1

    def take(self) -> list[dict[str, Any]]:
        """What was counted, as records `{"algorithm", "event", "count", "spans": [[first, last, count], ...]}`."""
        taken, self._acts = self._acts, {}
        records = []
        for key, acts in taken.items():
            algorithm, event = key.removeprefix(ALGORITHM).split("/", 1)
            spans = [span for span in acts.spans if span[2]]
            record = {"algorithm": algorithm, "event": event.removeprefix("Event.").lower()}
            records.append(record | {"count": sum(span[2] for span in spans), "spans": spans})
        return records


class _Acts:
    """The spans `[first batch, last batch, acts]` of one algorithm at one event."""

    __slots__ = ("gap", "spans")

    def __init__(self, batch: int) -> None:
        self.gap = 1  # batches between two acts of one span
        self.spans = [[batch, batch, 0]]

    def join(self) -> None:
        """Join neighbours until half of the room is free."""
        while len(self.spans) > _MOST_SPANS // 2:
            self.gap *= 2
            joined = [self.spans[0]]
            for first, last, count in self.spans[1:]:
                if first - joined[-1][1] <= self.gap:
                    joined[-1][1] = last
                    joined[-1][2] += count
                else:
                    joined.append([first, last, count])
            self.spans = joined
