"""Tables and the page, generated from entries of ledgers; and the explanation of one entry in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from composer.evidence.charts import costs, curves, effects, inline
from composer.evidence.ledger import Ledger
from composer.evidence.run import RunResult
from composer.evidence.verdicts import verdicts
from composer.recipes import Metric
from composer.report.spi import Html, el, static_page, text

_PROSE = {"method", "verdict", "variant", "settings", "best", "stack", "confirmed gains", "with"}
_HEAD = ("method", "verdict", "effect, 95 % interval", "at equal time", "step time", "inference", "memory", "n")


def ranked(ledgers: Iterable[Ledger]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the entries that count, by task and hash, the best first.

    Args:
        ledgers: The ledgers.
    """
    return {key: sorted(entries.values(), key=_order) for key, entries in verdicts(ledgers).items()}


def table(ledgers: Iterable[Ledger]) -> str:
    """Return all verdicts as tables in Markdown, each with its hardware.

    Args:
        ledgers: The ledgers.
    """
    parts = []
    for (task, hash_), entries in ranked(ledgers).items():
        rows = markdown(_HEAD, [cells(entry) for entry in entries])
        parts.append(f"**{task}** ({hash_}). {conditions(entries)}\n\n{rows}")
    return "\n".join(parts).rstrip() or "The ledger has no measurements."


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    texts = [f"| {' | '.join(line)} |\n" for line in (head, *lines)]
    return "".join([texts[0], f"|{'---|' * len(head)}\n", *texts[1:]])


def explain(ledger: Ledger, entry: dict[str, Any]) -> str:
    """Return how an entry was measured, in words.

    Args:
        ledger: Its ledger.
        entry: The entry.
    """
    lines = [f"Entry {entry['id']} about {entry['about']} of {entry.get('method') or 'plain'} on {entry['task']}"]
    lines.append(f"  task: version {entry['task_version']}, hash {entry['task_hash']}")
    lines.append(f"  made: {entry['created']} by `{entry['command']}`")
    lines.append(
        f"  on: {entry['hardware']}, {entry['threads']} thread, {entry['precision']}, "
        f"torch {entry['versions']['torch']}, source {entry['source']}"
    )
    counted = verdicts([ledger]).get((entry["task"], entry["task_hash"]), {}).get(entry.get("method", ""), {})
    if counted.get("id") == entry["id"]:
        entry = counted
    metric, comparison = Metric(**entry["metric"]), entry.get("comparison")
    if "verdict" in entry:
        lines.append(f"  verdict: {_verdict(entry, _why(entry, metric))}")
    if comparison is not None:
        effect, interval = show_effect(comparison, metric)
        test = "paired test of the same runs" if comparison["test"] == "paired" else "Welch's test"
        lines += [
            f"  effect: {effect}, 95 % interval {interval} (positive is better; {metric.title} on the {entry['part']} "
            f"part)",
            f"  n: {comparison['n']} runs (sd {metric.show(comparison['sd'])}) against {comparison['n_control']} of "
            f"plain (sd {metric.show(comparison['sd_control'])})",
            f"  p: {comparison['p']:.3g} by {test}",
        ]
        if "p_corrected" in comparison and counted is entry:
            lines += [
                f"  p: {comparison['p_corrected']:.3g} with Holm's correction for {comparison['family']} comparisons",
                f"  smallest visible effect: {metric.show(comparison['smallest_visible'])}, at a power of 0.8",
            ]
    if "plain" in entry:
        plain = entry["plain"]
        lines.append(f"  plain: {plain['variant']}, {plain['steps']} steps, {_settings(plain['settings'])}")
        lines.append(f"  method: {entry['variant']}, {entry['steps']} steps, {_settings(entry['settings'])}")
        lines += [f"    {name}({_settings(arguments)})" for name, arguments in entry["stack"]]
    if "trials" in entry:
        lines.append(f"  trials on {entry['part']}, {len(entry['seeds'])} seeds each:")
        scores = [(point, "not finite" if score is None else metric.show(score)) for point, score in entry["trials"]]
        lines += [f"    {_settings(point)}: {score}" for point, score in scores]
    lines += [f"  {name}: {' '.join(rest)}".rstrip() for name, *rest in _left_out(entry, metric)]
    count = sum(map(len, entry.get("runs", {}).values()))
    lines.append(f"  runs: {count}, each a line of {ledger.path}")
    return "\n".join(lines)


def write_page(ledgers: Sequence[Ledger], output: Path) -> Path:
    """Write the page about all tasks of ledgers. It needs no network and has no scripts.

    Args:
        ledgers: The ledgers.
        output: The file.

    Returns:
        Its path.
    """
    groups = ranked(ledgers)
    links = [el("a", task, href=f"#{task}-{hash_}") for task, hash_ in groups]
    body = [
        el("p", "composer evidence", class_="kind"),
        el("h1", "Which methods pay"),
        el(
            "p",
            "Every effect is the difference to the strongest plain training that a search found, on a test part that "
            "is used once at the end of each run. A gain is confirmed with fresh seeds of method and plain; A/A "
            "compares plain with plain. No effect found says how large an effect would have been seen.",
        ),
        el("nav", el("span", links, class_="links")) if links else None,
        _answers(groups),
        el("main", [_task_section(ledgers, *key, entries) for key, entries in groups.items()]),
    ]
    return static_page("Which methods pay - composer evidence", [part for part in body if part is not None], output)


def _answers(groups: Mapping[tuple[str, str], Sequence[dict[str, Any]]]) -> Html | None:
    """Return the table that comes first: what pays on each task, and how much of plain's training its best saves."""
    rows = []
    for (task, _), entries in groups.items():
        gains = [entry for entry in entries if entry["verdict"]["word"] == "gain"]
        best = next((entry for entry in gains if entry.get("time_to_target")), None)
        saved = ["", ""] if best is None else [_crossing(best["time_to_target"][key]) for key in ("in_steps", "method")]
        names = "nothing found" if not gains else ", ".join(entry["method"] for entry in gains)
        rows.append((task, *saved, "" if best is None else best["method"], names))
    head = ("task", "plain's result in steps", "in time", "with", "confirmed gains")
    return el("div", el("h3", "What pays, and what the best saves"), _table(head, rows)) if rows else None


def _task_section(ledgers: Sequence[Ledger], task: str, hash_: str, entries: Sequence[dict[str, Any]]) -> Html:
    everything = [e for ledger in ledgers for e in ledger.entries(task=task) if e["task_hash"] == hash_]
    shown = [entry for entry in entries if entry.get("comparison") is not None]
    timed = [entry for entry in shown if entry.get("step_time") and entry["step_time"]["ratio"] is not None]
    lines, metric = _curves(ledgers, entries), Metric(**entries[0]["metric"])
    gains = [entry for entry in entries if entry["verdict"]["word"] == "gain"]
    others = [entry for entry in entries if entry not in gains]
    parts: list[Html | None] = [el("h2", task), el("p", conditions(entries), class_="small")]
    if shown:
        title = "Effect at equal steps, 95 % intervals"
        caption = el("figcaption", el("span", title, class_="title"))
        parts.append(el("figure", caption, inline(lambda: effects(shown), title), class_="wide"))
    parts.append(_table(_HEAD, [cells(entry) for entry in gains]) if gains else el("p", "No gain was confirmed."))
    parts.append(_saved(entries))
    measured = [cells(entry) for entry in others if entry in shown]
    if measured:
        parts.append(_folded(f"No effect found, or a loss: {len(measured)}", _table(_HEAD, measured)))
    unmeasured = [cells(entry)[:2] for entry in others if entry not in shown]
    if unmeasured:
        parts.append(_folded(f"Not applicable, or not judged: {len(unmeasured)}", _table(_HEAD[:2], unmeasured)))
    if timed:
        parts.append(_folded("Cost against gain", inline(lambda: costs(timed), "Cost against gain")))
    if lines:
        title = "Learning curves on the validation part"
        parts.append(_folded(title, inline(lambda: curves(entries, lines), title)))
    parts += [_ladder(everything, metric), _stacks(everything, metric), _searches(everything, metric)]
    return el("section", parts, id=f"{task}-{hash_}")


def _folded(title: str, content: Html) -> Html:
    return el("details", el("summary", title), content)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Html:
    """Return a table whose numbers and intervals stay on one line."""
    classes = [None if name in _PROSE else "nowrap" for name in head]
    header = el("thead", el("tr", [el("th", cell) for cell in head]))
    lines = [
        el("tr", [el("td", _breakable(cell), class_=class_) for cell, class_ in zip(row, classes, strict=True)])
        for row in rows
    ]
    return el("div", el("table", header, el("tbody", lines)), class_="scroll")


def _breakable(cell: str) -> Html:
    """Return text in which the name of a stack may be broken after a member."""
    return Html(re.sub(r"\+(?=[A-Z])", "+<wbr>", text(cell)))


def _saved(entries: Sequence[dict[str, Any]]) -> Html | None:
    """Return the table of the time that ladders of complete runs need to reach plain's mean at the full budget."""
    rows = []
    for entry in entries:
        times = entry.get("time_to_target")
        if times is not None:
            columns = [_crossing(times[key]) for key in ("method", "in_steps", "plain_against_plain")]
            rows.append((entry["method"], *columns))
    if not rows:
        return None
    head = ("method", "time to plain's final mean", "in steps", "plain with other seeds")
    return el("div", el("h3", "Time to target, as a fraction of plain's"), _table(head, rows))


def _crossing(values: dict[str, Any]) -> str:
    if values["ratio"] is None:
        return "not reached"
    ends = ["never" if end is None else f"{end:.2f}" for end in (values["low"], values["high"])]
    return f"{'at most ' if values['at_most'] else ''}{values['ratio']:.2f} [{ends[0]}, {ends[1]}]"


def _ladder(entries: Sequence[dict[str, Any]], metric: Metric) -> Html | None:
    ladders = [entry for entry in entries if entry["about"] == "ladder"]
    if not ladders:
        return None
    rows = []
    for rung in ladders[-1]["rungs"]:
        values = list(rung["scores"].values())
        settings = _settings(rung["settings"])
        mean = metric.show(sum(values) / len(values))
        rows.append((str(rung["steps"]), mean, str(len(values)), rung["variant"], settings))
    head = ("steps", metric.title, "n", "variant", "settings")
    return _folded("Plain at all budgets", _table(head, rows))


def _stacks(entries: Sequence[dict[str, Any]], metric: Metric) -> Html | None:
    stacks = [entry for entry in entries if entry["about"] == "stack" and entry.get("leave_one_out")]
    if not stacks:
        return None
    head = ("stack", "change", "95 % interval", "p, corrected")
    return _folded(f"Leave one out of {stacks[-1]['method']}", _table(head, _left_out(stacks[-1], metric)))


def _left_out(stack: Mapping[str, Any], metric: Metric) -> list[tuple[str, ...]]:
    """Return for each member of a stack what changes without it: the effect, its interval and p."""
    return [
        (f"without {member}", f"{values['lost']} runs diverged or failed", "", "")
        if "lost" in values
        else (f"without {member}", *show_effect(values, metric), f"{values['p_corrected']:.2g}")
        for member, values in stack.get("leave_one_out", {}).items()
    ]


def _searches(entries: Sequence[dict[str, Any]], metric: Metric) -> Html | None:
    rows = []
    for entry in entries:
        if entry["about"] == "tuning" and entry["score"] is not None:
            ends = (  # older searches could end at an edge
                (entry.get("at_edge"), "edge of the grid"),
                (entry.get("at_bound"), "bound of the search"),
            )
            notes = [f"{', '.join(names)}: {place}" for names, place in ends if names]
            best = " ".join([_settings(entry["best"]), *(f"({note})" for note in notes)])
            trials = f"{len(entry['trials'])} x {len(entry['seeds'])}"
            rows.append(
                (entry["method"], entry["variant"], str(entry["steps"]), trials, best, metric.show(entry["score"]))
            )
    if not rows:
        return None
    head = ("method", "variant", "steps", "trials x seeds", "best", "validation")
    return _folded("All searches on the validation part", _table(head, rows))


def _curves(ledgers: Sequence[Ledger], entries: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return steps and values of the curves by method, plain's first, for at most eight methods."""
    wanted = {run: entry["method"] for entry in entries for run in entry.get("curves", {}).get("method", ())}
    wanted |= {run: "plain" for entry in entries for run in entry.get("curves", {}).get("control", ())}
    runs = [RunResult.from_json(line) for ledger in ledgers for line in ledger.lines("run")]
    lines: dict[str, list[Any]] = {"plain": []}
    for result in runs:
        if result.spec.id in wanted and result.curve:
            lines.setdefault(wanted[result.spec.id], []).append(result.curve)
    return {name: np.array(curves) for name, curves in list(lines.items())[:8] if curves}


def cells(entry: dict[str, Any]) -> tuple[str, ...]:
    """Return the row of an entry in the table of verdicts: method, verdict, effect, and so on.

    Args:
        entry: An entry about a measurement or a confirmation.
    """
    comparison, metric = entry.get("comparison"), Metric(**entry["metric"])
    word = _verdict(entry, re.sub(r"^\w+Error: | \(\w+\.py:\d+\)$", "", _why(entry, metric)))
    if comparison is None:
        return (entry["method"], word, "", "", "", "", "", "")
    effect, interval = show_effect(comparison, metric)
    equal, times = entry.get("equal_time"), entry.get("step_time")
    at_equal_time = ""
    if equal:
        at_equal_time = f"{'at most ' if equal['at_most'] else ''}{' '.join(show_effect(equal, metric))}"
    return (
        entry["method"],
        word,
        f"{effect} {interval}",
        at_equal_time,
        _ratio(times) if times else "",
        f"{times['inference']:.2f}" if times and "inference" in times else "",
        f"{times['memory']:.2f}" if times and "memory" in times else "",
        f"{comparison['n']} / {comparison['n_control']}",
    )


def _ratio(times: dict[str, Any]) -> str:
    interval = f"({times['low']:.2f} to {times['high']:.2f})"
    return f"not measured {interval}" if times["ratio"] is None else f"{times['ratio']:.2f} {interval}"


def _verdict(entry: dict[str, Any], why: str) -> str:
    return f"{entry['verdict']['word']} ({why})" if why else str(entry["verdict"]["word"])


def _why(entry: dict[str, Any], metric: Metric) -> str:
    why, comparison = str(entry["verdict"]["why"]), entry.get("comparison")
    if comparison is not None and why.startswith("smallest visible"):
        visible = metric.show(comparison["smallest_visible"])
        return f"smallest visible: {visible}{why[why.index(';') :] if ';' in why else ''}"
    return why


def show_effect(values: dict[str, Any], metric: Metric) -> tuple[str, str]:
    """Return an effect and its interval as text.

    Args:
        values: `effect`, `low` and `high`.
        metric: The metric, which says how to show values.
    """
    rounded = [round(metric.scale * values[key], metric.digits) + 0.0 for key in ("effect", "low", "high")]  # no -0.0
    shown = [f"{value:+.{metric.digits}f}" for value in rounded]
    return f"{shown[0]}{metric.unit}", f"[{shown[1]}, {shown[2]}]"


def conditions(entries: Sequence[dict[str, Any]]) -> str:
    """Return the conditions of measurements, which are shown with every table, as sentences.

    Args:
        entries: Entries of one task; at least one.
    """
    metric = Metric(**entries[0]["metric"])
    measured = [entry for entry in entries if entry.get("comparison") is not None]
    machines = {entry["hardware"]: entry for entry in entries}
    hardware = "; ".join(
        f"{name}, {entry['threads']} thread, {entry['precision']}, torch {entry['versions']['torch']}"
        for name, entry in machines.items()
    )
    better = "higher" if metric.higher_is_better else "lower"
    text = f"Metric: {metric.title}, {better} is better; effects are positive where a method is better. On {hardware}."
    if measured:
        plain = measured[-1]["plain"]
        controls = list({seed: c for entry in measured for seed, c in entry["control_scores"].items()}.values())
        text += (
            f" Plain: {plain['variant']}, {plain['steps']} steps, {_settings(plain['settings'])}; "
            f"{metric.show(float(np.mean(controls)), float(np.std(controls, ddof=1)))}."
        )
    return text


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def _order(entry: dict[str, Any]) -> tuple[int, float]:
    order = {"gain": 0, "no effect found": 1, "loss": 2, "not judged": 3, "not applicable": 4}
    comparison = entry.get("comparison")
    return order[entry["verdict"]["word"]], -(comparison["effect"] if comparison is not None else 0.0)
