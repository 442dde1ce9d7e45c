"""Write what the published ledger says of each method into its README, and the gains into that of composer-evidence.

python -m tools.measured

The text stands between two comments. It follows from the ledger in composer-evidence alone, so that a claim in a README
has an entry that `composer-evidence replay` trains again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import composer.algorithms
from composer.core import Algorithm
from composer.evidence.ledger import PUBLISHED, Ledger
from composer.evidence.page import cells, conditions, markdown, ranked
from composer.evidence.study import AA
from composer.evidence.task import load_task
from tools.markdown import folded
from tools.workspace import ROOT, Workspace

BEGIN = "<!-- measured: written by `python -m tools.measured` -->\n"
END = "<!-- end of measured -->\n"
NOT_YET = "Not yet. [composer-evidence](../composer-evidence) measures it, on a task of its own or on yours.\n"
_WHY_NOT: Mapping[str, str] = {
    "AugMix": "it changes images one by one on the host, and the images of the tasks are batches on the device",
    "BatchSizeWarmup": "its steps have fewer samples, and the ledger compares runs with as many steps",
    "ChannelsLast": "it changes the time of a step, and is part of plain training in all tasks with images",
    "ChunkedCrossEntropy": "it changes memory, not results: see its cost below",
    "Factorize": "the networks of the tasks have no layers that are large enough",
    "FusedLayerNorm": "it changes the time of a step on GPUs, not results, and the ledger is of a CPU",
    "LowPrecisionGroupNorm": "it acts in mixed precision on GPUs, and the ledger is of a CPU in fp32",
    "LowPrecisionLayerNorm": "it acts in mixed precision on GPUs, and the ledger is of a CPU in fp32",
    "NoOpModel": "it trains nothing",
    "PostHocEMA": "the averages are made after training, of any width: their choice needs data of its own",
    "RandAugment": "it changes images one by one on the host, and the images of the tasks are batches on the device",
    "ScaleSchedule": "it sets the length of a run, and each length has a tuned plain training in the ledger",
    "SequencePacking": "the text of the tasks is one stream, without documents to pack",
}
_COLUMNS = ("verdict", "effect at equal steps", "at equal time", "step time", "inference", "memory", "n / of plain")


def documents(workspace: Workspace, ledger: Ledger) -> Iterator[tuple[Path, str]]:
    """Yield each README with a measured section, and the text of that section.

    A method that could be measured, and was not yet, has a section that says so; one that the tasks cannot judge has
    one that says why.

    Args:
        workspace: The packages.
        ledger: The ledger.
    """
    tasks = ranked([ledger])
    for package in workspace.packages.values():
        listed = package.entry_points.get("composer.algorithms", {})  # transforms and modules, too
        methods = [name for name in listed if issubclass(getattr(composer.algorithms, name), Algorithm)]
        if methods:
            texts = (_of_method(method, tasks) for method in methods)
            missing = (f"{method}: {_without(method)}" if len(methods) > 1 else _without(method) for method in methods)
            yield (
                package.path / "README.md",
                "\n".join(text or other for text, other in zip(texts, missing, strict=True)),
            )
    text = _of_gains(tasks)
    if text:
        yield workspace["composer-evidence"].path / "README.md", text


def written(text: str, section: str, begin: str = BEGIN, end: str = END) -> str:
    """Return a README with the text between two comments replaced.

    Args:
        text: The README.
        section: The text between the comments.
        begin: The first comment, with its line break.
        end: The last one.

    Raises:
        ValueError: The README does not have the comments.
    """
    head, found, rest = text.partition(begin)
    if not found or end not in rest:
        raise ValueError(
            f"A README must have the lines {begin.strip()!r} and {end.strip()!r}, in the order of sections "
            f"of `tools/template`."
        )
    return f"{head}{begin}{section}{end}{rest.split(end, 1)[1]}"


def _of_method(method: str, tasks: Mapping[tuple[str, str], list[dict[str, Any]]]) -> str:
    rows, places = [], []
    for (task, _), entries in tasks.items():
        for entry in entries:
            if entry["method"] == method:
                rows.append((task, *cells(entry)[1:]))
                places.append(_about(task, [entry]))
    return markdown(("task", *_COLUMNS), rows) + "\n" + "\n\n".join(places) + "\n" if rows else ""


def _without(method: str) -> str:
    """Return the section of a method without rows: that no task can judge it, and why, or that it was not tried yet."""
    if method not in _WHY_NOT:
        return NOT_YET
    elsewhere = "[composer-evidence](../composer-evidence) measures methods on your task."
    return f"Not in the ledger: {_WHY_NOT[method]}. {elsewhere}\n"


def _of_gains(tasks: Mapping[tuple[str, str], list[dict[str, Any]]]) -> str:
    rows = [
        (task, entry["method"], *cells(entry)[2:])
        for (task, _), entries in tasks.items()
        for entry in entries
        if entry["verdict"]["word"] == "gain"
    ]
    if not rows:
        return ""
    words = [e["verdict"]["word"] for entries in tasks.values() for e in entries if e["method"] != AA]
    counts = [words.count(word) for word in _OTHERS]
    others = ", ".join(f"{count} {word}" for count, word in zip(counts, _OTHERS.values(), strict=True) if count)
    places = [_about(task, entries) for (task, _), entries in tasks.items()]
    return (
        markdown(("task", "method", *_COLUMNS[1:]), rows)
        + f"\nThe other rows: {others}. `composer-evidence table --published` prints all.\n\n"
        + folded("The tasks, their hardware, and plain training on each", "\n\n".join(places) + "\n")
    )


def _about(task: str, entries: list[dict[str, Any]]) -> str:
    return f"**{task}**: {load_task(task).summary} {conditions(entries)}"


_OTHERS = {
    "no effect found": "without a visible effect",
    "loss": "worse",
    "not judged": "not judged",
    "not applicable": "not applicable",
}


def main() -> None:
    """Write all sections."""
    for path, section in documents(Workspace(), Ledger(PUBLISHED)):
        path.write_text(written(path.read_text(encoding="utf-8"), section), encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
