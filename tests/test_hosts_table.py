"""`packages/composer-core/HOSTS.md`: which algorithms work in the loops of which libraries, from the tests of each.

PYTHONPATH=. python tests/test_hosts_table.py    # writes it
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from algorithm_runs import CLASSES
from test_hosts import REFUSED_BY_LIGHTNING
from test_hosts_accelerate import REFUSED_BY_ACCELERATE
from test_hosts_ignite import REFUSED_BY_IGNITE
from test_hosts_transformers import REFUSED_BY_TRANSFORMERS

from tools.workspace import ROOT

PAGE = ROOT / "packages" / "composer-core" / "HOSTS.md"
HOSTS = {
    "Lightning": ("lightning", "composer-lightning", REFUSED_BY_LIGHTNING),
    "transformers": ("transformers", "composer-huggingface", REFUSED_BY_TRANSFORMERS),
    "Accelerate": ("accelerate", "composer-accelerate", REFUSED_BY_ACCELERATE),
    "Ignite": ("pytorch-ignite", "composer-ignite", REFUSED_BY_IGNITE),
}
_HEAD = """# Which algorithms work where

Generated from the tests `tests/test_hosts*.py`, which train a small model for some steps inside each library and with
our `Trainer`, with the same seed and data: "=" means that the weights are equal bit for bit. Otherwise the algorithm is
refused when it is given to the host, with the reason below. `HostedRun` in a loop of your own has everything.
Two processes (DDP) give equal weights, too: tested in all four libraries with EMA, GradientClipping, LabelSmoothing,
LayerFreezing, MixUp and SAM, and in Accelerate also with FSDP2.
"""


def table() -> str:
    """Return the page."""
    reasons = list(dict.fromkeys(reason for _, _, refused in HOSTS.values() for reason in refused.values()))
    lines = [f"| algorithm | {' | '.join(HOSTS)} |", f"|---|{'---|' * len(HOSTS)}"]
    for name in sorted(CLASSES):
        cells = []
        for _, _, refused in HOSTS.values():
            cells.append(f"refused ({reasons.index(refused[name]) + 1})" if name in refused else "=")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}." for number, reason in enumerate(reasons, start=1)]
    tested = ", ".join(f"[{host}](../{package}) {version(name)}" for host, (name, package, _) in HOSTS.items())
    return "\n".join([_HEAD, *lines, "", *notes, "", f"Tested with {tested}.", ""])


def test_the_page_is_what_the_tests_say() -> None:
    assert PAGE.read_text() == table(), "run `PYTHONPATH=. python tests/test_hosts_table.py`"


if __name__ == "__main__":
    Path(PAGE).write_text(table())
