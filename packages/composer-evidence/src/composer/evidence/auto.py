"""All steps on a task in a given time: tune, try what applies, confirm, stack, and write a page and a recipe."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from composer.core import Algorithm
from composer.evidence.methods import make_algorithms, member_of, names_of, reason_against, training_beside
from composer.evidence.page import markdown, show_effect, write_page
from composer.evidence.run import RunResult, RunSpec, write_atomically
from composer.evidence.runner import Runner
from composer.evidence.statistics import Verdict, compare
from composer.evidence.study import Plan, Study
from composer.evidence.task import Task, digest, load_task
from composer.recipes import Metric

_QUICK_SEEDS, _QUICK_CONTROLS = 3, 6
_RESERVE = 0.5  # the share of the time for confirmations and the stack: 0.51 on Tiny Shakespeare, with 21 methods
_PLANS = (Plan(num_curves=2), Plan(num_tuning_seeds=1, num_stack_seeds=3, num_ladder_seeds=5, num_curves=1))


@dataclass(frozen=True)
class Schedule:
    """Numbers of runs and methods that fit in a time.

    Attributes:
        plan: The numbers of runs.
        methods: The methods to measure.
        left_out: The methods for which there is no time.
        hours: The expected time.
        num_runs: The expected number of runs, in runs with the full budget.
    """

    plan: Plan
    methods: Sequence[str]
    left_out: Sequence[str]
    hours: float
    num_runs: float


def make_schedule(task: Task, methods: Sequence[str], run_seconds: float, workers: int, hours: float) -> Schedule:
    """Return the largest plan, and as many methods, as fit in a time.

    Args:
        task: The task.
        methods: The methods, those to try first at the beginning.
        run_seconds: Time of a run of plain with the full budget.
        workers: Runs at the same time.
        hours: The time.

    Raises:
        ValueError: The time is too short for one method.
    """
    available = hours * 3600 * (1 - _RESERVE) * workers / run_seconds  # a number of runs with the full budget
    needed = 0.0
    for plan in _PLANS:
        fixed, each = _costs(task, plan, workers)
        count = int((available - fixed) / each)
        if count >= min(len(methods), 1 if plan is _PLANS[-1] else len(methods)):
            kept = list(methods[:count])
            runs = (fixed + each * len(kept)) / (1 - _RESERVE)
            return Schedule(plan, kept, list(methods[count:]), runs * run_seconds / workers / 3600, runs)
        needed = (fixed + each) * run_seconds / workers / (1 - _RESERVE) / 3600
    raise ValueError(
        f"`hours` must be at least {needed:.2g} for {task.name} with {workers} workers, where a run takes "
        f"{run_seconds:.3g} s, got {hours!r}. Give more time, or a task with fewer steps."
    )


def _costs(task: Task, plan: Plan, workers: int) -> tuple[float, float]:
    """Return the cost of plain and the cost of each method, in runs with the full budget."""
    lengths = sum(task.ladder)
    trials = sum(
        2 + sum(len(grid.values) - 1 for grid in variant.grid.values()) + len(variant.grid)
        for variant in task.variants.values()
    )
    plain = trials * plan.num_tuning_seeds * lengths + plan.num_controls + plan.num_seeds
    plain += plan.num_ladder_seeds * (lengths - 1)
    tuning = trials / len(task.variants) * plan.num_tuning_seeds
    return plain, tuning + plan.num_seeds + plan.num_curves + 2 * plan.repeats * workers


def run_all(
    runner: Runner, *, hours: float, methods: Sequence[str] | None = None, plan: Plan | None = None, command: str = ""
) -> Path:
    """Find out which methods pay on a task, and write a page and recipes into the folder of the ledger.

    The schedule is made in the first call and kept in the folder. After an interruption, repeat the command to
    continue; with other hours or methods, it makes a new schedule that reuses the existing runs.

    Args:
        runner: Trains the runs.
        hours: The time.
        methods: The methods to try. None: all declared ones that are installed.
        plan: The numbers of runs, with which all methods are measured. None: those that fit in the time.
        command: The command, for the entries.

    Returns:
        The page.

    Raises:
        ValueError: The time is too short for one method.
    """
    study = Study(runner, plan, command)
    names = names_of(runner.task) if methods is None else methods
    refused = {name: reason for name in names if (reason := reason_against(runner.task, [name])) is not None}
    usable = [name for name in names if name not in refused]
    schedule = _schedule(study, usable, hours, plan)
    study = Study(runner, schedule.plan, command)
    runner.expected_steps = schedule.num_runs * runner.task.steps
    runner.say(
        f"{runner.task.name}: about {schedule.hours:.2g} h; methods to measure: {len(schedule.methods)}, "
        f"not applicable: {len(refused)}, without time: {len(schedule.left_out)}. "
        f"To continue after an interruption, repeat the command."
    )
    study.tune()
    study.measure([*schedule.methods, *refused])
    for name in schedule.left_out:
        study.refuse(name, Verdict("not judged", f"no time was left within {hours:g} hours"))
    study.stack()
    write_recipe(study, runner.folder)
    return write_page([study.ledger], runner.folder / "evidence.html")


def run_quick(runner: Runner, *, minutes: float = 5.0, methods: Sequence[str] | None = None) -> str:
    """Return a rough answer: effects of methods with their defaults on plain training with its defaults.

    Nothing is tuned or confirmed, and the test part is not used, so it only says what to measure first.

    Args:
        runner: Trains the runs.
        minutes: The time.
        methods: The methods to try. None: all declared ones that are installed.

    Returns:
        A table in Markdown, with all methods that have no result, and why.
    """
    task, variant = runner.task, next(iter(runner.task.variants))

    def specs_of(name: str, count: int) -> list[RunSpec]:
        stack = () if name == "plain" else (member_of(task, name),)
        own = task.base.get(name, variant)
        return [runner.spec("validation", own, task.steps, stack=stack, seed=seed) for seed in range(count)]

    names = names_of(task) if methods is None else methods
    against = {name: reason for name in names if (reason := reason_against(task, [name])) is not None}
    elsewhere = [name for name in names if task.base.get(name, variant) != variant]
    against |= {name: ("not judged", f"it needs the variant {task.base[name]}") for name in elsewhere}
    usable = [name for name in names if name not in against]
    first = runner.results(specs_of("plain", 1), f"{task.name}: first run")[0]
    if first.status != "finished":
        raise RuntimeError(
            f"Plain training of {task.name} {first.status}: {first.message or 'its metric is not finite'}."
        )
    count = int((minutes * 60 * runner.workers / first.seconds - _QUICK_CONTROLS) / _QUICK_SEEDS)
    against |= dict.fromkeys(usable[max(0, count) :], ("not judged", f"no time was left in {minutes:g} minutes"))
    groups = {"plain": specs_of("plain", _QUICK_CONTROLS)}
    groups |= {name: specs_of(name, _QUICK_SEEDS) for name in usable[: max(0, count)]}
    runner.results([spec for group in groups.values() for spec in group], f"{task.name}: rough answer")
    results = {name: runner.results(group, name) for name, group in groups.items()}
    scores = {name: {each.spec.seed: each.score() for each in group} for name, group in results.items()}
    for name, group in results.items():
        message = next((each.message for each in group if each.message), "")
        if message or not all(map(math.isfinite, scores[name].values())):
            against[name] = ("not applicable" if message else "loss", message or "some runs diverged")
            del scores[name]
    control, seconds = scores.pop("plain"), {name: _median(group) for name, group in results.items()}
    found = compare(control, scores, higher_is_better=task.metric.higher_is_better)
    rows = [
        (
            name,
            " ".join(show_effect(vars(each), task.metric)),
            f"{each.p_corrected:.2g}",
            f"{seconds[name] / seconds['plain']:.2f}",
        )
        for name, each in sorted(found.items(), key=lambda pair: -pair[1].effect)
    ]
    head = ("method", "effect, 95 % interval", "p, corrected", "time")
    missing = "".join(f"- {name}: {word}, {why}\n" for name, (word, why) in against.items())
    return (
        f"Rough, for {task.name}: nothing was tuned or confirmed, {_QUICK_SEEDS} runs against {_QUICK_CONTROLS} of "
        f"plain ({variant}) on the validation part. Measure what looks good.\n\n{markdown(head, rows)}\n"
        f"Without a result:\n\n{missing}"
    )


def _median(results: Sequence[RunResult]) -> float:
    return statistics.median(each.train_seconds for each in results)


def _schedule(study: Study, methods: Sequence[str], hours: float, plan: Plan | None) -> Schedule:
    """Return the schedule of an earlier call of the same command, or make one from the time of the first run."""
    runner = study.runner
    asked = {"hours": hours, "methods": list(methods), "plan": None if plan is None else asdict(plan)}
    path = runner.folder / f"schedule-{digest([runner.task_hash, asked])}.json"
    if path.exists():
        values = json.loads(path.read_text(encoding="utf-8"))
        return Schedule(**{**values, "plan": Plan(**values["plan"])})
    if plan is not None:
        fixed, each = _costs(runner.task, plan, runner.workers)
        schedule = Schedule(plan, list(methods), [], hours, (fixed + each * len(methods)) / (1 - _RESERVE))
    else:
        seconds = study.first_run().seconds
        schedule = make_schedule(runner.task, methods, seconds, runner.workers, hours)
    write_atomically(path, json.dumps(asdict(schedule)))
    return schedule


def write_recipe(study: Study, folder: Path) -> Path | None:
    """Write the best confirmed gain as `recipe.yaml`.

    Args:
        study: The study.
        folder: The folder to write to.

    Returns:
        The file; None if nothing pays.
    """
    gains = [entry for entry in study.verdicts().values() if entry["verdict"]["word"] == "gain"]
    paying = [entry for entry in gains if _value(entry) > 0]
    if not paying:
        return None
    best = max(paying, key=_value)
    comparison, metric = best["comparison"], Metric(**best["metric"])
    about = (
        f"{best['method']} on {best['task']}: {show_effect(comparison, metric)[0]} in {metric.title}, n = "
        f"{comparison['n']} against {comparison['n_control']}, {best['hardware']}"
    )
    recipe = {
        "task": study.runner.reference,
        "variant": best["variant"],
        "steps": best["steps"],
        "training": best["settings"],
        "algorithms": [{name: arguments} for name, arguments in best["stack"]],
        "entry": best["id"],
    }
    path = folder / "recipe.yaml"
    write_atomically(path, f"# {about}\n{yaml.safe_dump(recipe, sort_keys=False)}")
    return path


def load_recipe(path: Path | str, teacher: torch.nn.Module | None = None) -> tuple[Any, list[Algorithm]]:
    """Return what `recipe.yaml` says: the optimization, and new algorithms for the Trainer.

    Args:
        path: The file.
        teacher: A trained network, if the recipe has a method that needs one, such as `Distillation`.

    Returns:
        An object with `optimizer(model)` and `schedule()`, and the algorithms.

    Raises:
        ValueError: `teacher` is missing.
    """

    def take_teacher() -> torch.nn.Module:
        if teacher is None:
            raise ValueError(
                "`teacher` must be a trained network, since the recipe has a method that needs one, got None."
            )
        return teacher

    recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    training: Any = load_task(recipe["task"]).variants[recipe["variant"]].training
    training = replace(training, **recipe["training"])
    stack = [(name, arguments) for member in recipe["algorithms"] for name, arguments in member.items()]
    algorithms = make_algorithms([*getattr(training, "algorithms", list)(), *stack], take_teacher)
    return training_beside(stack, training), algorithms


def _value(entry: dict[str, Any]) -> float:
    """Return the lower end of the effect at equal time if that is known, otherwise at equal steps."""
    return float((entry.get("equal_time") or entry["comparison"])["low"])
