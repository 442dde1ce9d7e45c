"""Assignment of metrics to the sections and charts of a page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_COUNTERS = re.compile(r"time/(epoch|batch|sample|token|iteration)(_in_(epoch|iteration))?|trainer/.*microbatch_size")
_MACHINE = re.compile(r"(memory|cpu_|disk_|network_|(min_|max_)?(gpu|memory_percentage))")
_TITLES = {
    "samples_per_sec": "Samples per second",
    "batches_per_sec": "Batches per second",
    "tokens_per_sec": "Tokens per second",
    "flops_per_sec": "Operations per second",
    "mfu": "Model FLOPs utilization",
    "total": "Loss",
}


@dataclass(frozen=True)
class Family:
    """Metrics that share a chart.

    Attributes:
        section: "learning", "rate", "speed", "machine" or "other".
        title: The title of the chart.
        key: The subtitle of the chart.
        members: The label in the chart of each metric.
    """

    section: str
    title: str
    key: str
    members: dict[str, str]


def families(names: Iterable[str]) -> list[Family]:
    """Assign metrics to sections and charts. Counters such as `time/batch` are left out: they are x axes."""
    charts: dict[tuple[str, str, str], dict[str, str]] = {}
    for name in sorted(names):
        if not _COUNTERS.fullmatch(name):
            section, title, key, member = _place(name)
            charts.setdefault((section, title, key), {})[name] = member
    ordered = sorted(charts.items(), key=_rank)
    return [Family(section, title, key, members) for (section, title, key), members in ordered]


def _rank(item: tuple[tuple[str, str, str], dict[str, str]]) -> tuple[int, bool, bool, str]:
    (section, title, key), _ = item
    order = ("learning", "rate", "speed", "machine", "other").index(section)
    return order, not key.startswith("loss"), title != "Loss", title


def _place(name: str) -> tuple[str, str, str, str]:
    """Return section, title and subtitle of the chart of a metric, and its label there."""
    parts = name.split("/")
    if parts[0] in ("loss", "metrics") and len(parts) > 2:
        rest = "/".join(parts[2:])
        title = "Loss" if (parts[0], rest) == ("loss", "total") else _spaced(rest)
        return "learning", title, f"{parts[0]}/*/{rest}", parts[1]
    if name.startswith("lr-"):
        return "rate", "Learning rate", "lr-*", name.removeprefix("lr-")
    if parts[0] == "throughput":
        title = _TITLES.get(parts[-1], _spaced(parts[-1]))
        return "speed", title, f"throughput/*/{parts[-1]}", "per device" if "device" in parts else "all devices"
    if parts[0] == "time":
        return "speed", "Remaining time" if "remaining" in name else "Time spent", "time/*", "/".join(parts[1:])
    if _MACHINE.match(name):
        kind = re.match(r"(memory/[a-z]+|[a-z]+_[a-z]+|[a-z]+)", name)
        stem = kind[0] if kind else name
        return "machine", _spaced(stem.replace("/", " ")).capitalize(), f"{stem}*", name.removeprefix("memory/")
    head, _, last = name.rpartition("/")
    return "other", head or last, f"{head}/*" if head else "", last or name


def _spaced(name: str) -> str:
    """Return `MulticlassAccuracy` as "Multiclass accuracy"."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).replace("_", " ").split(" ")
    return " ".join(
        [words[0][:1].upper() + words[0][1:], *(word if word.isupper() else word.lower() for word in words[1:])]
    )
