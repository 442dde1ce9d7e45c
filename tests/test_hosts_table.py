"""HOSTS.md and the READMEs: which algorithms work in the loops of which libraries, from the tests of each.

PYTHONPATH=. python tests/test_hosts_table.py    # writes HOSTS.md of composer-core and the READMEs
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from algorithm_runs import CLASSES
from test_hosted_run import ADDS_TO_THE_LOSS, PER_BATCH_OF_THE_LOADER
from test_hosts import REFUSED_BY_LIGHTNING
from test_hosts_accelerate import REFUSED_BY_ACCELERATE
from test_hosts_ignite import REFUSED_BY_IGNITE
from test_hosts_transformers import REFUSED_BY_TRANSFORMERS

from tools.measured import written
from tools.workspace import ROOT, Workspace

COMMAND = "PYTHONPATH=. python tests/test_hosts_table.py"
BEGIN, END = f"<!-- hosts: written by `{COMMAND}` -->\n", "<!-- end of hosts -->\n"
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


def listed(words: Iterable[str]) -> str:
    """Return a list in prose."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def names(algorithms: Iterable[str]) -> str:
    """Return a list of names in prose."""
    return listed(f"`{name}`" for name in algorithms)


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


def sentences(algorithm: str) -> str:
    """Return what the README of an algorithm says of the libraries."""
    links = {host: f"[{host}](../{package})" for host, (_, package, _) in HOSTS.items()}
    refusals: dict[str, list[str]] = {}
    for host, (_, _, refused) in HOSTS.items():
        if algorithm in refused:
            refusals.setdefault(refused[algorithm], []).append(links.pop(host))
    equal = "[bit for bit as in our `Trainer`](../composer-core/HOSTS.md)"
    parts = [f"In {listed(links.values())} it works {equal}."] if links else []
    for reason, hosts in refusals.items():
        parts.append(f'{listed(hosts)} {"refuse" if len(hosts) > 1 else "refuses"} it: "{reason}."')
    return " ".join(parts)


def readmes() -> Iterator[tuple[Path, str]]:
    """Yield the README of each package with algorithms and of each template, and what it says of the libraries."""
    listed_in = {
        package.path: [name for name in package.entry_points.get("composer.algorithms", {}) if name in CLASSES]
        for package in Workspace().packages.values()
    }
    listed_in |= {path.parent: ["a new algorithm"] for path in ROOT.glob("tools/template/*/README.md")}
    for folder, algorithms in listed_in.items():
        if algorithms:
            found = dict.fromkeys(map(sentences, algorithms))
            text = "\n\n".join(textwrap.fill(each, 120, break_on_hyphens=False) for each in found)
            yield folder / "README.md", f"{text}\n"


def test_the_page_is_what_the_tests_say() -> None:
    assert PAGE.read_text() == table(), f"run `{COMMAND}`"


def test_the_readmes_say_where_their_algorithms_work() -> None:
    texts = {path: (path.read_text(), text) for path, text in readmes()}
    stale = [path for path, (readme, text) in texts.items() if written(readme, text, BEGIN, END) != readme]

    assert stale == [], f"run `{COMMAND}`"


if __name__ == "__main__":
    Path(PAGE).write_text(table())
    for path, text in readmes():
        path.write_text(written(path.read_text(), text, BEGIN, END))
