"""Verdicts: what ledgers say about each method, with all comparisons by one metric as one family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from composer.evidence.ledger import Ledger
from composer.evidence.statistics import Comparison, compare_one, correct, judge

Key = tuple[str, str, str]
"""Task, its hash, and method."""


def verdicts(ledgers: Iterable[Ledger]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Return the entries that count, by task and hash, and by method: the latest confirmation, or else measurement.

    They have two values more than in the ledger, since both depend on all other entries: a `verdict`, and in their
    `comparison` the correction for the family, which is all measurements, or all confirmations, by the same metric.

    Args:
        ledgers: The ledgers.
    """
    first: dict[Key, dict[str, Any]] = {}
    second: dict[Key, dict[str, Any]] = {}
    entries = [entry for ledger in ledgers for entry in ledger.entries()]
    for entry in sorted(entries, key=lambda entry: str(entry.get("created"))):  # not in the order of a merge
        key: Key = entry["task"], entry["task_hash"], entry.get("method", "")
        if entry["about"] == "measurement":
            if "scores" in entry or "scores" not in first.get(key, {}):  # a refusal does not hide a measurement
                first[key] = entry
        elif entry["about"] == "confirmation":
            second[key] = entry
    second = {key: entry for key, entry in second.items() if entry.get("confirms") == first.get(key, {}).get("id")}
    screening, confirmed = _families(first), _families(second)
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for key, measured in first.items():
        entry = second.get(key, measured)
        if key in screening:
            if key in second and key not in confirmed:  # some of its fresh runs diverged
                verdict = entry["verdict"]
            else:
                verdict = asdict(judge(screening[key], confirmed.get(key)))
            comparison = confirmed.get(key, screening[key])
            shown = {**asdict(comparison), "smallest_visible": comparison.smallest_visible}
            entry = {**entry, "verdict": verdict, "comparison": shown}
        found.setdefault(key[:2], {})[key[2]] = entry
    return found


def _families(entries: Mapping[Key, Mapping[str, Any]]) -> dict[Key, Comparison]:
    """Return the comparisons of entries, corrected in families of one metric each."""
    families: dict[str, dict[Key, Comparison]] = {}
    for key, entry in entries.items():
        if entry.get("comparison") is not None:
            control, scores = (
                {int(seed): value for seed, value in entry[name].items()} for name in ("control_scores", "scores")
            )
            compared = compare_one(
                control,
                scores,
                higher_is_better=entry["metric"].get("higher_is_better", True),
                paired=entry["comparison"]["test"] == "paired",
            )
            families.setdefault(entry["metric"]["key"], {})[key] = compared
    return {key: each for family in families.values() for key, each in correct(family).items()}
