"""`packages/composer-core/HOSTS.md`: which algorithms work in the loops of which libraries, from the tests of each.

PYTHONPATH=. python tests/test_hosts_table.py    # writes it
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from algorithm_runs import CLASSES
from test_hosted_run import ADDS_TO_THE_LOSS, PER_BATCH_OF_THE_LOADER
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
our `Trainer`, with the same seed and data: "=" means that the weights are equal bit for bit in float32, and, which is
tested with an algorithm of each kind, in bfloat16 and with two batches per step, except for the cases below. Otherwise
the algorithm is refused by the constructor of the adapter, with the reason below. `HostedRun` in a loop of your own has
everything. An algorithm that is not in the table has "=" in all columns.
"""


def names(algorithms: Iterable[str]) -> str:
    """Return a list of names in prose."""
    *first, last = [f"`{name}`" for name in algorithms]
    return f"{', '.join(first)} and {last}"


_TAIL = f"""## What "=" does not say

| | |
|---|---|
| two batches per step | {names(PER_BATCH_OF_THE_LOADER)} differ in every library: they draw or choose once per batch of the loader, our `Trainer` once for all microbatches of a step |
| bfloat16 | Accelerate and transformers return outputs in float32, so that the gradients of two losses are added before they are rounded. {names([*ADDS_TO_THE_LOSS, "MixUp(interpolate_loss=True)"])} then equal our `Trainer` with a model that returns float32 |
| two processes (DDP) | equal in all four libraries, tested with EMA, GradientClipping, LabelSmoothing, LayerFreezing, MixUp and SAM; in Accelerate and transformers also with FSDP2, up to roundings of norms. SAM equals `SAM(sync_ascent=True)` of our `Trainer`: libraries exchange the gradients of both passes |
| `torch.compile` | equal in all four and in a loop of your own, tested with the backend "eager" and with MixUp, SAM and LabelSmoothing; other backends may round differently |
"""  # noqa: E501


def table() -> str:
    """Return the page."""
    reasons = list(dict.fromkeys(reason for _, _, refused in HOSTS.values() for reason in refused.values()))
    lines = [f"| algorithm | {' | '.join(HOSTS)} |", f"|---|{'---|' * len(HOSTS)}"]
    for name in sorted(CLASSES):
        cells = []
        for _, _, refused in HOSTS.values():
            cells.append(f"refused ({reasons.index(refused[name]) + 1})" if name in refused else "=")
        if set(cells) != {"="}:  # so that a new algorithm, which works everywhere, leaves the page as it is
            lines.append(f"| {name} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}." for number, reason in enumerate(reasons, start=1)]
    tested = ", ".join(f"[{host}](../{package}) {version(name)}" for host, (name, package, _) in HOSTS.items())
    return "\n".join([_HEAD, *lines, "", *notes, "", _TAIL, f"Tested with {tested}.", ""])


def test_the_page_is_what_the_tests_say() -> None:
    assert PAGE.read_text() == table(), "run `PYTHONPATH=. python tests/test_hosts_table.py`"


if __name__ == "__main__":
    Path(PAGE).write_text(table())
