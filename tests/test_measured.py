"""The measured effects in READMEs follow from the published ledger."""

from __future__ import annotations

import pytest

from composer.evidence.ledger import PUBLISHED, Ledger
from tools.measured import BEGIN, END, documents, written
from tools.workspace import ROOT, Workspace

LEDGER = Ledger(PUBLISHED)
DOCUMENTS = dict(documents(Workspace(), LEDGER))


def test_sections_are_replaced_or_added() -> None:
    text = "# A\n\nText.\n\n## When not to use it\n\nNever.\n"
    first = written(text, "one\n")

    assert first == f"# A\n\nText.\n\n## Measured\n\n{BEGIN}one\n{END}\n## When not to use it\n\nNever.\n"
    assert written(first, "two\n") == first.replace("one\n", "two\n")
    with pytest.raises(ValueError, match="must have the line '## When not to use it'"):
        written("# A\n", "one\n")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_readme_says_what_the_ledger_says(path: object) -> None:
    text = path.read_text(encoding="utf-8")  # type: ignore[attr-defined]

    assert written(text, DOCUMENTS[path]) == text, "run `python -m tools.measured`"  # type: ignore[index]


def test_every_claim_has_an_entry() -> None:
    claimed = {path for path in ROOT.glob("packages/*/README.md") if BEGIN in path.read_text(encoding="utf-8")}

    assert set(DOCUMENTS) == claimed
