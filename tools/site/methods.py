"""The page "Which methods for my task", from the published ledger and from what the algorithms declare."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from composer.core import Algorithm, Event
from composer.evidence.ledger import PUBLISHED, Ledger
from composer.evidence.methods import METHODS
from composer.evidence.page import cells, conditions, ranked
from composer.evidence.task import load_task
from tools import pairs
from tools.markdown import folded, table
from tools.workspace import ROOT, Workspace

_HEAD = """---
hide: [toc]
---

# Which methods for my task

A method that paid in its paper need not pay on your data. Look here, or [at their pictures](index.md#the-methods), for
candidates; then measure them on your task, against plain training that is tuned as well:
[composer-evidence](packages/composer-evidence/README.md) does that, and [a tutorial](tutorials/which_methods.md) shows
how. The engine [refuses what must not be combined](pairs.md).
The tasks are small, and **the figures of images are being measured again**, see [below](#what-was-measured).
"""
_MEASURED = """## What was measured

**The figures of images are being measured again**: plain training can be tuned further than the search did, step times
were taken beside other programs, and intervals at equal time are too narrow. [What is wrong with
them](packages/composer-evidence/README.md#what-the-ledger-says), in detail. Those of text have been measured again.

Every effect is the difference to the strongest plain training that a search found. Methods without an effect and losses
are part of the table.

- **verdict**: "gain" if a test finds one, corrected for all methods of the table (Holm), and fresh runs find it
  again; "loss" if the method is worse by the same test; else "no effect found", with the smallest effect that the
  runs would have shown with a probability of 0.8. Intervals are those of single methods, without the correction, so
  one may exclude 0 where no effect was found.
- **effect**: at the same number of steps. Averages (EMA, SWA, LAWA) are those of plain's own runs, so that small
  effects show.
- **at equal time**: against plain training that is as long as the method takes; "at most" where plain was not run as
  long.
- **n / of plain**: runs of the method and of plain training. Gains stand beside fresh runs of plain, so its mean there
  differs a little from that in the table's head.
- **A/A** compares plain training with itself: what chance alone looks like.
"""
_COLUMNS = (
    *("method", "verdict", "effect, 95 % interval", "at equal time"),
    *("step time", "inference", "memory", "n / of plain"),
)
_ANSWER_COLUMNS = (
    "data",
    "gains, confirmed on fresh seeds",
    "measured: a loss, or no effect found",
    "not measured here",
)
_METHOD_COLUMNS = ("method", "what it does", "model", "measured", "not together with")
_TITLES = {"any": "Any data", "images": "Images", "tokens": "Text"}
# What a model must have; the others take any.
MODELS = {
    "Alibi": "self-attention: BERT, GPT-2, or registered",
    "BlurPool": "convolutions or pooling with strides",
    "ChannelsLast": "convolutions in two dimensions",
    "ChunkedCrossEntropy": "a linear head",
    "Distillation": "logits like those of the teacher",
    "Factorize": "large linear layers or convolutions",
    "FusedLayerNorm": "layer normalization",
    "GatedLinearUnits": "BERT",
    "GhostBatchNorm": "batch normalization",
    "GyroDropout": "dropout",
    "LayerFreezing": "several layers",
    "LogitSoftcap": "a head or attention of transformers, or named layers",
    "LowPrecisionGroupNorm": "group normalization",
    "LowPrecisionLayerNorm": "layer normalization",
    "Muon": "hidden matrices or convolutions",
    "ProgressiveResizing": "any image size",
    "QKNorm": "attention of transformers, or named layers",
    "SOAP": "hidden matrices or convolutions",
    "SeqLengthWarmup": "any sequence length",
    "SequencePacking": "an attention mask and positions as inputs",
    "SqueezeExcite": "convolutions in two dimensions",
    "StochasticDepth": "residual blocks",
    "WeightStandardization": "convolutions",
    "Whitening": "a first convolution of small filters",
    "ZLoss": "logits of classes or tokens",
}
_IMAGES = {"AugMix", "RandAugment"}  # are not in the ledger's list of methods
_PICTURE = re.compile(r"!\[([^\]]+)\]\(images/([^)]+)\)")
_TOKENS = {"ChunkedCrossEntropy", "SequencePacking"}


def acting() -> dict[Event, list[type[Algorithm]]]:
    """Return the installed algorithms by the events at which they act."""
    result: dict[Event, list[type[Algorithm]]] = defaultdict(list)
    for cls in pairs.classes():
        for event in pairs.make(cls).events or ():
            result[event].append(cls)
    return result


def page(workspace: Workspace, results: Iterable[pairs.Pair]) -> str:
    """Return the page as Markdown.

    Args:
        workspace: The packages.
        results: How the engine treats each pair of algorithms.
    """
    cards = _cards(workspace)
    tasks = ranked([Ledger(PUBLISHED)])
    parts = [_HEAD, _answer(cards, tasks)]
    refused: dict[str, list[str]] = defaultdict(list)
    for pair in results:
        if pair.refused:
            refused[pair.first].append(pair.second)
            refused[pair.second].append(pair.first)
    parts.append("## All methods by data and model\n")
    for kind, title in _TITLES.items():
        rows = [
            (
                _linked(name, cards),
                cards[name][1],
                MODELS.get(name, "any"),
                _words(name, tasks),
                ", ".join(sorted(refused[name])),
            )
            for name in sorted(cards)
            if _kind(name) == kind
        ]
        parts.append(folded(f"{title}: {len(rows)} methods", table(_METHOD_COLUMNS, rows)))
    parts.append(_MEASURED)
    for (task, _), entries in tasks.items():
        measured = [(_linked(row[0], cards), _short(row[1]), *row[2:]) for row in map(cells, entries)]
        filled = [i for i, column in enumerate(zip(*measured, strict=True)) if any(column)]
        parts += [
            f"### {task}\n",
            f"{load_task(task).summary} {conditions(entries)}\n",
            folded(
                f"{len(entries)} rows",
                table(
                    [_COLUMNS[i] for i in filled], [[row[i].replace("|", "\\|") for i in filled] for row in measured]
                ),
            ),
            *(f"- {row[0]}: {row[1]}" for row in map(cells, entries) if _short(row[1]) != row[1]),
            "",
        ]
    return "\n".join(parts)


def gallery(workspace: Workspace) -> str:
    """Return a card of each method, with its picture and its verdicts, and two rows of buttons that choose among them.

    What a method changes is its row in the table of methods in the README of the repository.

    Args:
        workspace: The packages.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = readme.partition("| methods | packages |")[2].partition("\n\n")[0]
    groups = [re.findall(r"(?<=\| )[^|]+(?= \|)", row) for row in listed.splitlines()[2:]]
    changes = {f"change{index}": title for index, (title, _) in enumerate(groups)}
    tasks = ranked([Ledger(PUBLISHED)])
    cards = []
    for name, (place, description) in sorted(_cards(workspace).items()):
        package = workspace[Path(place).parent.name]
        kind = _kind(name)
        classes = ["images", "tokens"] if kind == "any" else [kind]
        classes += [key for key, (_, row) in zip(changes, groups, strict=True) if f"(packages/{package.name})" in row]
        picture = _PICTURE.search((package.path / "README.md").read_text(encoding="utf-8"))
        shown = f"![{picture[1]}](images/{picture[2]}){{ loading=lazy }}" if picture else ""
        found: dict[str, list[str]] = defaultdict(list)
        for (task, _), entries in tasks.items():
            for entry in entries:
                if entry["method"] == name:
                    found[entry["verdict"]["word"]].append(task)
        shown_as = {"gain": "better", "loss": "worse"}  # beside code, a loss is a function
        verdicts = " ".join(
            f"_{shown_as.get(word, word)}: {', '.join(where)}_{{ .{word.split()[0]} }}" for word, where in found.items()
        )
        text = f"{shown}\n**[{name}]({place})** {description}\n{verdicts or '_not measured_'}"
        cards.append(f'<div class="method {" ".join(classes)}" markdown>\n{text}\n</div>')
    kinds = {"images": "images", "tokens": "text"}
    rules = (
        f".gallery:has([value={value}]:checked) .method:not(.{value}) {{display: none}}" for value in (*kinds, *changes)
    )
    return "\n".join(
        [
            '<div class="gallery" markdown>',
            f"<style>{' '.join(rules)}</style>",
            _buttons("data", "any data", kinds),
            _buttons("change", "all methods", changes),
            *cards,
            "</div>",
        ]
    )


def _buttons(name: str, every: str, options: Mapping[str, str]) -> str:
    labels = [f'<label><input type="radio" name="{name}" value="all" checked>{every}</label>']
    labels += [
        f'<label><input type="radio" name="{name}" value="{value}">{options[value]}</label>' for value in options
    ]
    return f"<fieldset>{''.join(labels)}</fieldset>"


def _answer(cards: Mapping[str, tuple[str, str]], tasks: Mapping[tuple[str, str], list[dict[str, Any]]]) -> str:
    """Return the table that the page begins with: for each kind of data, what is known of each method."""
    rows = []
    for kind in ("images", "tokens"):
        results: dict[str, dict[str, bool]] = defaultdict(dict)  # by method, then task
        for (task, _), entries in tasks.items():
            for entry in entries:
                name = entry["method"]
                if load_task(task).kind == kind and name != "A/A" and entry.get("comparison") is not None:
                    results[name][task] = entry["verdict"]["word"] == "gain"
        gains = {name: where for name, where in results.items() if any(where.values())}
        found = ", ".join(f"{_linked(name, cards)} ({_where(where)})" for name, where in gains.items())
        nothing = sorted(name for name in results.keys() - gains.keys() if name in cards)
        unknown = sorted(name for name in cards if _kind(name) in (kind, "any") and name not in results)
        rows.append(
            (_TITLES[kind], found, *(", ".join(_linked(name, cards) for name in each) for each in (nothing, unknown)))
        )
    return table(_ANSWER_COLUMNS, rows)


def _where(gained: Mapping[str, bool]) -> str:
    tasks, others = ([task for task, gain in gained.items() if gain is wanted] for wanted in (True, False))
    return "; ".join([", ".join(tasks), *(f"not on {task}" for task in others)])


def _short(verdict: str) -> str:
    """Return a verdict without a long reason, which stands below the table."""
    return verdict.partition(" (")[0] if verdict.startswith("not applicable") else verdict


def _cards(workspace: Workspace) -> dict[str, tuple[str, str]]:
    """Return `{algorithm: (page, description)}`."""
    return {
        name: (f"packages/{package.name}/README.md", package.description.partition(": ")[2] or package.description)
        for package in workspace.packages.values()
        for name, value in package.entry_points.get("composer.algorithms", {}).items()
        if name in {cls.__name__ for cls in pairs.classes()}
    }


def _kind(name: str) -> str:
    if name in METHODS:
        return METHODS[name].kind
    return "images" if name in _IMAGES else "tokens" if name in _TOKENS else "any"


def _linked(name: str, cards: Mapping[str, tuple[str, str]]) -> str:
    return f"[{name}]({cards[name][0]})" if name in cards else name


def _words(name: str, tasks: Mapping[tuple[str, str], list[dict[str, Any]]]) -> str:
    found = [
        f"{task}: {entry['verdict']['word']}"
        for (task, _), entries in tasks.items()
        for entry in entries
        if entry["method"] == name
    ]
    return "; ".join(found)
