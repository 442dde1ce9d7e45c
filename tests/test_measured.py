"""The measured effects in READMEs follow from the published ledger."""

from __future__ import annotations

from statistics import fmean, stdev

import pytest

from composer.evidence.ledger import PUBLISHED, Ledger
from composer.evidence.page import conditions, ranked
from tools.measured import BEGIN, END, NOT_YET, documents, written
from tools.workspace import ROOT, Workspace

LEDGER = Ledger(PUBLISHED)
DOCUMENTS = dict(documents(Workspace(), LEDGER))


def test_a_section_is_replaced() -> None:
    text = f"# A\n\n## Measured\n\n{BEGIN}one\n{END}\n## Install\n"

    assert written(text, "two\n") == text.replace("one\n", "two\n")
    with pytest.raises(ValueError, match="A README must have the lines"):
        written("# A\n", "one\n")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_readme_says_what_the_ledger_says(path: object) -> None:
    text = path.read_text(encoding="utf-8")  # type: ignore[attr-defined]

    assert written(text, DOCUMENTS[path]) == text, "run `python -m tools.measured`"  # type: ignore[index]


def test_every_claim_has_an_entry() -> None:
    claimed = {path for path in ROOT.glob("packages/*/README.md") if BEGIN in path.read_text(encoding="utf-8")}

    assert set(DOCUMENTS) == claimed


def test_a_new_method_is_not_measured_yet() -> None:
    for path in ROOT.glob("tools/template/*/README.md"):
        text = path.read_text(encoding="utf-8")

        assert written(text, NOT_YET) == text


def test_controls_that_rows_share_count_once() -> None:
    entries = next(rows for (task, _), rows in ranked([LEDGER]).items() if task == "shakespeare")
    values: dict[str, float] = {}
    for entry in entries:
        values |= entry.get("control_scores", {})

    assert len(values) == 180  # 20 that all rows share, and 20 of each of eight confirmations
    assert f"; {fmean(values.values()):.4f} +- {stdev(values.values()):.4f}." in conditions(entries)
