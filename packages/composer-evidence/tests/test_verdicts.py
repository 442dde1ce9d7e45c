"""Verdicts from entries: one family for a ledger and a metric, however many commands and tasks there were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from composer.evidence import Ledger
from composer.evidence.statistics import ALPHA
from composer.evidence.verdicts import verdicts

ACCURACY, LOSS = {"key": "accuracy"}, {"key": "loss", "higher_is_better": False}


def entry(method: str, effect: float, seed: int = 0, **others: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    control, scores = (dict(enumerate(rng.normal(mean, 1.0, 10).tolist())) for mean in (0.0, effect))
    values = {"about": "measurement", "task": "a", "task_hash": "1", "method": method, "metric": ACCURACY}
    return {**values, "scores": scores, "control_scores": control, "comparison": {"test": "welch"}, **others}


def ledger_of(folder: Path, *entries: dict[str, Any]) -> tuple[Ledger, list[str]]:
    ledger = Ledger(folder)
    return ledger, [ledger.add("entry", each) for each in entries]


def test_all_measurements_by_a_metric_are_one_family(tmp_path: Path) -> None:
    alone, _ = ledger_of(tmp_path / "alone", entry("M", 1.6))
    assert verdicts([alone])["a", "1"]["M"]["verdict"]["word"] == "not judged"  # a gain, to be confirmed

    others = [entry(f"null{i}", 0.0, i, task="b") for i in range(1, 30)]
    many, _ = ledger_of(tmp_path / "many", entry("M", 1.6), *others)
    found = verdicts([many])["a", "1"]["M"]
    assert found["comparison"]["family"] == 30
    assert found["comparison"]["p"] < ALPHA < found["comparison"]["p_corrected"]
    assert found["verdict"]["word"] == "no effect found"

    by_another_metric = [{**each, "metric": LOSS} for each in others]
    two, _ = ledger_of(tmp_path / "two", entry("M", 1.6), *by_another_metric)
    assert verdicts([two])["a", "1"]["M"]["comparison"]["family"] == 1


def test_a_later_measurement_replaces_one_and_its_confirmation(tmp_path: Path) -> None:
    ledger, (first,) = ledger_of(tmp_path, entry("M", 5.0))
    ledger.add("entry", entry("M", 5.0, 1, about="confirmation", confirms=first))
    assert verdicts([ledger])["a", "1"]["M"]["verdict"]["word"] == "gain"

    ledger.add("entry", entry("M", 5.0, 2))
    found = verdicts([ledger])["a", "1"]["M"]
    assert (found["about"], found["verdict"]["word"]) == ("measurement", "not judged")


def test_refusals_and_diverged_runs_keep_their_verdict(tmp_path: Path) -> None:
    loss = {"word": "loss", "why": "2 of 10 runs diverged or failed"}
    ledger, (first, _) = ledger_of(
        tmp_path, entry("M", 5.0), entry("N", 0.0, comparison=None, verdict={"word": "not applicable", "why": "x"})
    )
    ledger.add("entry", entry("M", 5.0, 1, about="confirmation", confirms=first, comparison=None, verdict=loss))

    found = verdicts([ledger])["a", "1"]
    assert found["M"]["verdict"] == loss
    assert found["N"]["verdict"]["word"] == "not applicable"


@pytest.mark.parametrize("metric", [ACCURACY, LOSS])
def test_the_direction_of_the_metric_decides(tmp_path: Path, metric: dict[str, Any]) -> None:
    ledger, _ = ledger_of(tmp_path, entry("M", 5.0, metric=metric))

    assert (verdicts([ledger])["a", "1"]["M"]["verdict"]["word"] == "loss") == (metric is LOSS)


def test_the_latest_entry_counts_whatever_the_order_of_ledgers(tmp_path: Path) -> None:
    early, _ = ledger_of(tmp_path / "early", entry("M", 0.0, created="2026-01-01T00:00:00+00:00"))
    late, _ = ledger_of(tmp_path / "late", entry("M", -5.0, 1, created="2026-01-02T00:00:00+00:00"))

    for ledgers in ([early, late], [late, early]):
        assert verdicts(ledgers)["a", "1"]["M"]["verdict"]["word"] == "loss"


def test_a_later_refusal_does_not_hide_a_measurement(tmp_path: Path) -> None:
    ledger, _ = ledger_of(tmp_path, entry("M", -5.0))
    refusal = {"word": "not judged", "why": "no time was left"}
    values = {"about": "measurement", "task": "a", "task_hash": "1", "method": "M", "metric": ACCURACY}
    ledger.add("entry", {**values, "verdict": refusal, "runs": {}})

    assert verdicts([ledger])["a", "1"]["M"]["verdict"]["word"] == "loss"
