"""A study: tuning, measuring, confirming, ladders and stacks on one task, from runs that are stored and shared."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from composer.evidence.methods import TEACHER, grid_of, member_of, method_of, reason_against
from composer.evidence.run import RunResult, RunSpec, environment
from composer.evidence.runner import Runner
from composer.evidence.search import Search, SearchError, search
from composer.evidence.statistics import ALPHA, Rung, Verdict, at_equal_time, compare, compare_one, time_to_target
from composer.evidence.steptime import Round, acts_in_training, measure_in_process, step_times
from composer.evidence.task import Grid, Part, digest
from composer.evidence.verdicts import verdicts

AA = "A/A"
"""The name of the row that compares plain with plain."""

# First seeds of controls and methods, of tuning, and of choosing a stack; A/A and each confirmation have their own.
_MEASURE, _TUNE, _STACK, _FRESH = 0, 30_000, 40_000, 1_000_000
_AA_OFFSET = 5_000
_PROBE_STEPS = 4
_NUM_POINTS = 10  # evaluations in a curve
_LR_FACTORS = (0.5, 1.0, 2.0)
_KEPT = 2  # stacks that a round of the selection extends
_TIMED_TOGETHER = 6  # methods whose step times are measured in one process


@dataclass(frozen=True)
class Plan:
    """Numbers that are fixed before the first run.

    Args:
        num_seeds: Runs of each method.
        num_controls: Runs of plain that all methods share, and of method and plain in a confirmation.
        num_tuning_seeds: Runs of each trial of a search.
        num_stack_seeds: Runs of each candidate in the selection of a stack.
        num_ladder_seeds: Runs of each rung of a ladder.
        num_curves: Runs of plain and of each method that are evaluated during training on the validation part, for
            curves.
        repeats: Processes, each with runs of plain and of the methods, for a ratio of step times; 0: no ratios.
    """

    num_seeds: int = 10
    num_controls: int = 20
    num_tuning_seeds: int = 2
    num_stack_seeds: int = 4
    num_ladder_seeds: int = 10
    num_curves: int = 0
    repeats: int = 3

    def __post_init__(self) -> None:
        least = {"num_seeds": 2, "num_tuning_seeds": 1, "num_stack_seeds": 2, "num_ladder_seeds": 2}
        for name, value in {**least, "num_controls": 2, "num_curves": 0, "repeats": 0}.items():
            if getattr(self, name) < value:
                raise ValueError(f"`{name}` must be at least {value}, got {getattr(self, name)!r}.")


@dataclass(frozen=True)
class Plain:
    """Plain training at one budget, as its search found it.

    Attributes:
        variant: The variant.
        settings: Values of its training.
        steps: The budget.
        score: Mean on validation.
        num_trials: Trials of its search.
        entry: The entry about the search.
    """

    variant: str
    settings: Mapping[str, Any]
    steps: int
    score: float
    num_trials: int
    entry: str


_Results: TypeAlias = Mapping[int, tuple[RunResult, str]]
"""Seed -> a run and the label of its score."""


@dataclass(frozen=True)
class _Candidate:
    """A method or stack, ready to be measured."""

    name: str
    variant: str
    settings: Mapping[str, Any]
    stack: tuple[tuple[str, dict[str, Any]], ...]
    tuning: str  # the entry about its search
    averages: bool = False  # it averages plain's weights, so it is scored in the runs of plain


class Study:
    """The steps of measuring methods on one task. Every step reuses the runs that exist.

    Args:
        runner: Trains the runs and keeps the ledger.
        plan: Numbers of runs.
        command: The command, for the entries.
    """

    def __init__(self, runner: Runner, plan: Plan | None = None, command: str = "") -> None:
        self.runner, self.plan, self.command = runner, plan or Plan(), command
        self.task, self.ledger = runner.task, runner.ledger
        self._higher = self.task.metric.higher_is_better
        self._alone: dict[str, _Candidate] = {}  # the methods that this study has tuned

    # Plain training

    def tune(self, methods: Sequence[str] = ()) -> dict[float, Plain]:
        """Tune all variants of plain training for all budgets on validation, and return plain by its budget.

        Args:
            methods: Methods and stacks to tune, too, as `measure` does.
        """
        found = {fraction: self.plain(fraction) for fraction in self.task.ladder}
        for name, verdict in self._candidates(methods, found[1.0])[1].items():
            self.runner.say(f"{self.task.name}: {name} is not tuned: {verdict.word}, {verdict.why}")
        return found

    def plain(self, fraction: float = 1.0) -> Plain:
        """Return plain at a budget, the variant that is best at the full one; search what is not in the ledger yet.

        Args:
            fraction: The budget as a fraction of the full one.
        """
        sign = 1 if self._higher else -1
        best = max((self._tuned_variant(name, 1.0) for name in self.task.variants), key=lambda p: sign * p.score)
        return best if fraction == 1 else self._tuned_variant(best.variant, fraction)

    def first_run(self) -> RunResult:
        """Return the first run of the search at the full budget, which says how long a run takes."""
        name, variant = next(iter(self.task.variants.items()))
        settings = {key: getattr(variant.training, key) for key in variant.grid}
        spec = self.runner.spec("validation", name, self.task.steps, settings=settings, seed=_TUNE)
        return self.runner.results([spec], f"{self.task.name}: first run")[0]

    def _tuned_variant(self, name: str, fraction: float) -> Plain:
        variant, steps = self.task.variants[name], self.task.steps_of(fraction)
        start = {key: getattr(variant.training, key) for key in variant.grid}
        if fraction != 1:
            start = dict(self._tuned_variant(name, 1.0).settings)

        def runs(points: Sequence[Mapping[str, Any]]) -> list[list[tuple[RunSpec, str]]]:
            seeds = _seeds(_TUNE, self.plan.num_tuning_seeds)
            return [
                [(self.runner.spec("validation", name, steps, settings=dict(point), seed=seed), "") for seed in seeds]
                for point in points
            ]

        title = f"{self.task.name}: tune {name}, {steps} steps"
        about = {"method": "plain", "variant": name, "steps": steps, "fraction": fraction}
        entry, found = self._search(title, variant.grid, start, runs, about, None)
        return Plain(name, found.best.point, steps, found.best.score, len(found.trials), entry)

    def _search(
        self,
        title: str,
        grid: Mapping[str, Grid],
        start: Mapping[str, Any],
        runs_of: Callable[[Sequence[Mapping[str, Any]]], list[list[tuple[RunSpec, str]]]],
        about: Mapping[str, Any],
        max_trials: int | None,
    ) -> tuple[str, Search]:
        """Search on validation, and return the id of the entry about it and the result.

        The search is repeated even if there is an entry: its runs are in the ledger, so the entry is the same.

        Args:
            title: The name of this step in messages.
            grid: The values by setting.
            start: Values of the settings to begin with.
            runs_of: Returns the runs of each of some points, with the label of the score; points may share runs.
            about: Values of the entry.
            max_trials: The most points to try, besides those by which a grid is extended. None: no limit.
        """
        runs: dict[str, None] = {}

        def evaluate(points: list[dict[str, Any]]) -> list[float]:
            wanted = runs_of(points)
            specs = list({spec.id: spec for group in wanted for spec, _ in group}.values())
            results = dict(zip([spec.id for spec in specs], self.runner.results(specs, title), strict=True))
            runs.update(dict.fromkeys(results))
            if about["method"] == "plain":
                self._refuse_failures(results.values())
            return [float(np.mean([results[spec.id].score(label) for spec, label in group])) for group in wanted]

        found = search(grid, start, evaluate, higher_is_better=self._higher, max_trials=max_trials)
        values = {
            **about,
            "part": "validation",
            "seeds": [_TUNE + seed for seed in range(self.plan.num_tuning_seeds)],
            "grid": {name: list(tried) for name, tried in found.grid.items()},
            "trials": [[dict(trial.point), _number(trial.score)] for trial in found.trials],
            "best": dict(found.best.point),
            "score": found.best.score,
            "at_bound": list(found.at_bound),
            "runs": {"trials": list(runs)},
        }
        if found.at_bound:
            self.runner.say(f"{title}: the best {' and '.join(found.at_bound)} is at a bound of the search")
        return self._add("tuning", values), found

    def _refuse_divergence(self, values: Mapping[int, float]) -> None:
        """Raise an error if a run of plain on the test part diverged."""
        lost = [seed for seed, value in values.items() if not math.isfinite(value)]
        if lost:
            raise RuntimeError(
                f"Plain training of {self.task.name} must not diverge, but {len(lost)} of {len(values)} runs did. "
                f"Lower the learning rates of its grid, and increase the `version` of the task."
            )

    def _refuse_failures(self, results: Iterable[RunResult]) -> None:
        """Raise an error if a run of plain raised one: no method can be measured against that."""
        message = next((result.message for result in results if result.status == "failed"), None)
        if message is not None:
            raise RuntimeError(
                f"Plain training of {self.task.name} failed: {message}. Correct the task, and increase its `version`, "
                f"so that its runs are trained again."
            )

    # Methods

    def measure(self, methods: Sequence[str]) -> list[dict[str, Any]]:
        """Measure methods on the test part, and confirm gains on fresh seeds.

        The time to the target takes as long as the measurement of several methods: it is measured for stacks, and for
        a method that is the only one.

        Args:
            methods: Class names in `composer.algorithms`; "A+B" is a stack.

        Returns:
            The entries about the measurements and confirmations.

        Raises:
            ValueError: The ledger has measurements of this task with other numbers of runs.
        """
        self._refuse_other_numbers()
        plain = self.plain()
        candidates, refused = self._candidates(methods, plain)
        entries = [self.refuse(name, verdict) for name, verdict in refused.items()]
        rungs = [spec for _, specs in self._rungs(plain) for spec in specs]
        everything = [*candidates, self._tuned(AA, plain)]  # what another search alone would gain is in its row
        numbers = self.plan.num_seeds, self.plan.num_controls
        controls, scores = self._scores(plain, everything, _MEASURE, *numbers, rungs)
        times = self._step_times(candidates, plain)
        ladder = self.ladder(plain) if candidates else []
        measured: dict[str, dict[str, Any]] = {}
        for candidate in everything:
            name = candidate.name
            about = self._about(plain, candidate, controls, scores[name])
            if name != AA:
                about |= self._costs(controls, scores[name], times[name], ladder)
                about |= self._curves(candidate, plain)
            measured[name] = self._entry_of("measurement", about)
        judged = self.verdicts()
        gains = [c for c in everything if _gained_first(judged[c.name])]
        confirmed = [
            self._confirm(
                plain, each, measured[each.name], ladder, with_target=len(methods) == 1 or len(each.stack) > 1
            )
            for each in gains
        ]
        return [*entries, *measured.values(), *confirmed]

    def _refuse_other_numbers(self) -> None:
        """Raise an error if this task was measured with other numbers: more runs until something shows is no test."""
        plan, rows = self.plan, [entry for entry in self._own_entries("measurement") if entry["method"] == AA]
        numbers = (len(rows[-1]["scores"]), len(rows[-1]["control_scores"])) if rows else None
        if numbers not in (None, (plan.num_seeds, plan.num_controls)):
            raise ValueError(
                f"The numbers of runs must be those with which {self.task.name} was first measured in this ledger, "
                f"num_seeds={numbers[0]} and num_controls={numbers[1]}, got {plan.num_seeds} and "
                f"{plan.num_controls}. For others, begin another ledger."
            )

    def _confirm(
        self,
        plain: Plain,
        candidate: _Candidate,
        first: Mapping[str, Any],
        ladder: Sequence[Rung],
        *,
        with_target: bool,
    ) -> dict[str, Any]:
        """Measure a gain again, with seeds of method and control that nothing else uses, and return the entry.

        Nothing but costs and curves is taken from the first seeds, on which the method was selected.
        """
        count, fresh = self.plan.num_controls, self._fresh("confirmation", candidate)
        controls, scores = self._scores(plain, [candidate], fresh, count, count)
        results = scores[candidate.name]
        about = {**self._about(plain, candidate, controls, results), "confirms": first["id"]}
        if candidate.name != AA:
            about |= self._costs(controls, results, first["step_time"], ladder)
            about |= {"curves": first["curves"]} if "curves" in first else {}
            if with_target and about["comparison"] is not None and _is_better(about["comparison"]):
                about["time_to_target"] = self._time_to_target(candidate, plain, controls, results, about, fresh)
        return self._entry_of("confirmation", about)

    def _fresh(self, purpose: str, candidate: _Candidate) -> int:
        """Return the first of the seeds that one entry has for itself."""
        own = digest([self.runner.task_hash, purpose, candidate.name, dict(candidate.settings), candidate.stack])
        return _FRESH + int(own[:8], 16) % 10**9

    def _candidates(self, methods: Sequence[str], plain: Plain) -> tuple[list[_Candidate], dict[str, Verdict]]:
        """Tune methods and stacks; return them, and the verdicts about those that cannot be measured."""
        names = list(dict.fromkeys(methods))
        refused = self._reasons_against(names, plain)
        candidates = []
        for name in names:
            if name not in refused:
                try:
                    candidates.append(self._tuned(name, plain))
                except SearchError:
                    refused[name] = Verdict("loss", "all trials of its search failed or diverged")
        return candidates, refused

    def _reasons_against(self, names: Sequence[str], plain: Plain) -> dict[str, Verdict]:
        """Return why methods cannot be measured, found without training or from runs of a few steps."""
        reasons, probes = {}, {}
        for name in names:
            members = name.split("+")
            # An average of the weights may start later than the few steps of the trial run.
            tried = [member for member in members if not method_of(self.task, member).averages]
            against = reason_against(self.task, members)
            bases = {self.task.base[member] for member in members if member in self.task.base}
            if against is not None:
                reasons[name] = Verdict(*against)  # type: ignore[arg-type]
            elif len(bases) > 1:
                why = f"its members need different variants: {', '.join(sorted(bases))}"
                reasons[name] = Verdict("not applicable", why)
            elif tried:
                probes[name] = self.runner.spec(
                    "validation",
                    self._variant_of(members, plain),
                    min(_PROBE_STEPS, self.task.steps),
                    stack=tuple(member_of(self.task, member) for member in tried),
                    eval_batches=1,
                    seed=_TUNE,
                )
        results = self.runner.results(list(probes.values()), f"{self.task.name}: try methods")
        for name, result in zip(probes, results, strict=True):
            if result.status == "failed" or result.message:
                reasons[name] = Verdict("not applicable", result.message)
        return reasons

    def refuse(self, name: str, verdict: Verdict) -> dict[str, Any]:
        """Add an entry about a method that is not measured, and return it."""
        about = {"method": name, "verdict": asdict(verdict), "runs": {}}
        return self._entry_of("measurement", about)

    def _variant_of(self, members: Sequence[str], plain: Plain) -> str:
        return next((self.task.base[member] for member in members if member in self.task.base), plain.variant)

    def _tuned(self, name: str, plain: Plain) -> _Candidate:
        """Tune a method or a stack on validation, with the trials that plain had; its defaults come first."""
        members = _members(name)
        variant = self._variant_of(members, plain)
        base = plain if variant == plain.variant else self._tuned_variant(variant, 1.0)
        grid: dict[str, Grid] = {}
        start: dict[str, Any] = {}
        if len(members) == 1:  # a stack takes the arguments that were tuned for its members alone
            arguments = member_of(self.task, name)[1]
            for key, values in grid_of(self.task, name).items():
                grid[f"{name}.{key}"] = values
                start[f"{name}.{key}"] = arguments.get(key, values.values[-1])
        averages = len(members) == 1 and method_of(self.task, name).averages and variant == plain.variant
        if "lr" in base.settings and not averages:
            rate = float(base.settings["lr"])
            grid["lr"] = Grid(tuple(float(f"{factor * rate:.4g}") for factor in _LR_FACTORS))
            start["lr"] = grid["lr"].values[1]
        seeds = _seeds(_TUNE, self.plan.num_tuning_seeds)

        def runs(points: Sequence[Mapping[str, Any]]) -> list[list[tuple[RunSpec, str]]]:
            tried = [self._candidate(name, variant, base, point, "") for point in points]
            if not averages:
                return [[(self._spec_of("validation", c, base.steps, seed), "") for seed in seeds] for c in tried]
            labels = {str(i): candidate.stack[0] for i, candidate in enumerate(tried)}
            specs = [self._spec("validation", plain, seed, averages=labels) for seed in seeds]
            return [[(spec, label) for spec in specs] for label in labels]

        title = f"{self.task.name}: tune {name}"
        about = {"method": name, "variant": variant, "steps": base.steps, "fraction": 1.0}
        entry, found = self._search(title, grid, start, runs, about, base.num_trials)
        tuned = replace(self._candidate(name, variant, base, found.best.point, entry), averages=averages)
        if len(members) == 1:
            self._alone[name] = tuned
        return tuned

    def _candidate(self, name: str, variant: str, base: Plain, point: Mapping[str, Any], entry: str) -> _Candidate:
        members = _members(name)
        settings = {**base.settings, **({"lr": point["lr"]} if "lr" in point else {})}
        stack = []
        for member in members:
            algorithm, arguments = member_of(self.task, member)
            if len(members) > 1:
                arguments |= self._tuned_arguments(member)
            prefix = f"{member}."
            arguments |= {key[len(prefix) :]: value for key, value in point.items() if key.startswith(prefix)}
            stack.append((algorithm, arguments))
        return _Candidate(name, variant, settings, tuple(stack), entry)

    def _tuned_arguments(self, member: str) -> dict[str, Any]:
        """Return the tuned arguments of a method alone, from this study, else from the last search in the ledger."""
        if member in self._alone:
            return dict(self._alone[member].stack[0][1])
        entries = [e for e in self._own_entries("tuning") if e["method"] == member and e["fraction"] == 1.0]
        best: dict[str, Any] = entries[-1]["best"] if entries else {}
        prefix = f"{member}."
        return {key[len(prefix) :]: value for key, value in best.items() if key.startswith(prefix)}

    # Runs

    def _spec(self, part: Part, plain: Plain, seed: int, **others: Any) -> RunSpec:
        return self.runner.spec(part, plain.variant, plain.steps, settings=dict(plain.settings), seed=seed, **others)

    def _spec_of(self, part: Part, candidate: _Candidate, steps: int, seed: int, **others: Any) -> RunSpec:
        fields: dict[str, Any] = {"settings": dict(candidate.settings), "seed": seed, "stack": candidate.stack}
        return self.runner.spec(part, candidate.variant, steps, **{**fields, **others})

    def _results(self, specs: Sequence[RunSpec], title: str) -> _Results:
        results = self.runner.results(specs, f"{self.task.name}: {title}")
        return {result.spec.seed: (result, "") for result in results}

    def _scores(
        self,
        plain: Plain,
        candidates: Sequence[_Candidate],
        first: int,
        num_seeds: int,
        num_controls: int,
        others: Sequence[RunSpec] = (),
    ) -> tuple[_Results, dict[str, _Results]]:
        """Train controls, candidates and other runs together, and return the scores on the test part.

        Averages of plain's weights are scored in the controls.
        """
        shared = {c.name: c.stack[0] for c in candidates if c.averages}
        specs = {
            "plain": [self._spec("test", plain, seed, averages=shared) for seed in _seeds(first, num_controls)],
            **{
                candidate.name: [
                    self._spec_of("test", candidate, plain.steps, seed)
                    for seed in _seeds(first + (_AA_OFFSET if candidate.name == AA else 0), num_seeds)
                ]
                for candidate in candidates
                if candidate.name not in shared
            },
        }
        everything = [*(spec for group in specs.values() for spec in group), *others]
        self.runner.results(everything, f"{self.task.name}: measure")
        results = {name: self._results(group, name) for name, group in specs.items()}
        controls = results.pop("plain")
        self._refuse_failures(result for result, _ in controls.values())
        self._refuse_divergence(_values(controls))
        for name in shared:
            results[name] = {seed: (result, name) for seed, (result, _) in controls.items()}
        return controls, {candidate.name: results[candidate.name] for candidate in candidates}

    # Costs

    def ladder(self, plain: Plain) -> list[Rung]:
        """Return plain's complete runs of all lengths on the test part, each tuned for its length; adds an entry."""
        rungs, runs, described = [], [], []
        for own, specs in self._rungs(plain):
            results = self._results(specs, f"plain, {own.steps} steps")
            values = _values(results)
            self._refuse_divergence(values)
            rungs.append(Rung(own.steps / plain.steps, values))
            runs += [spec.id for spec in specs]
            described.append(
                {
                    "steps": own.steps,
                    "variant": own.variant,
                    "settings": dict(own.settings),
                    "scores": {str(seed): value for seed, value in values.items()},
                }
            )
        self._add("ladder", {"method": "plain", "part": "test", "rungs": described, "runs": {"rungs": runs}})
        return rungs

    def _rungs(self, plain: Plain) -> list[tuple[Plain, list[RunSpec]]]:
        """Return plain and its runs for each budget; at the full budget the runs of A/A are used."""
        rungs = []
        for fraction in self.task.ladder:
            own = plain if fraction == 1 else self.plain(fraction)
            first, count = _MEASURE, self.plan.num_ladder_seeds
            if fraction == 1:
                first, count = _MEASURE + _AA_OFFSET, self.plan.num_seeds
            rungs.append((own, [self._spec("test", own, seed) for seed in _seeds(first, count)]))
        return rungs

    def _step_times(self, candidates: Sequence[_Candidate], plain: Plain) -> dict[str, dict[str, Any] | None]:
        """Return the costs of methods beside plain, from the ledger or measured now, alone on this machine."""
        found: dict[str, dict[str, Any] | None] = dict.fromkeys(candidate.name for candidate in candidates)
        if self.plan.repeats == 0:
            return found
        base = self._spec("validation", plain, 0)
        specs = {c.name: self._spec_of("validation", c, plain.steps, 0) for c in candidates}
        place = environment(self.runner.device)["hardware"]
        keys = {name: digest([asdict(base), asdict(spec), place, self.plan.repeats]) for name, spec in specs.items()}
        known = {entry["specs_hash"]: entry["step_time"] for entry in self._own_entries("cost")}
        missing = [candidate for candidate in candidates if keys[candidate.name] not in known]
        groups = [missing[i : i + _TIMED_TOGETHER] for i in range(0, len(missing), _TIMED_TOGETHER)]
        folder = None if self.runner.data_folder is None else str(self.runner.data_folder)
        while groups:
            group = groups.pop(0)
            names = [candidate.name for candidate in group]
            self.runner.say(f"{self.task.name}: times of {', '.join(names)}, alone on this machine")
            file = self.runner.folder / "runs" / f"time-{digest([keys[name] for name in names])}.json"
            texts = [json.dumps(asdict(spec)) for spec in (base, *(specs[name] for name in names))]
            rounds: list[Round] = []
            for seed in range(self.plan.repeats):  # a process each: two processes differ more than two rounds in one
                self.runner.call(measure_in_process, (self.runner.reference, folder, texts, seed, str(file)))
                values = json.loads(file.read_text(encoding="utf-8"))
                if "error" in values:
                    self.runner.say(values["error"])
                    groups += [[candidate] for candidate in group] if len(group) > 1 else []
                    break
                rounds.append(Round(**values))
            else:
                for candidate, times in zip(group, step_times(rounds), strict=True):
                    # A method that does nothing in training has the ratio 1 by construction, whatever was measured.
                    one = {} if acts_in_training(candidate.stack) else {"ratio": 1.0, "low": 1.0, "high": 1.0}
                    costs = {**vars(times), **one}
                    key = keys[candidate.name]
                    self._add("cost", {"method": candidate.name, "specs_hash": key, "step_time": costs, "runs": {}})
                    known[key] = costs
        return {name: known.get(key) for name, key in keys.items()}

    def _costs(
        self, controls: _Results, results: _Results, times: Mapping[str, Any] | None, rungs: Sequence[Rung]
    ) -> dict[str, Any]:
        """Return the costs of a method, and its effect at equal time."""
        costs: dict[str, Any] = {"step_time": times, "equal_time": None}
        values = _values(results)
        # At the full budget, the control is the same as at equal steps.
        rungs = [Rung(1.0, _values(controls)) if rung.time == 1 else rung for rung in rungs]
        if times is not None and times["ratio"] is not None and all(map(math.isfinite, values.values())):
            found = [
                at_equal_time(values, times[each], rungs, higher_is_better=self._higher)
                for each in ("ratio", "low", "high")  # the ratio is measured, too: its range widens the interval
            ]
            costs["equal_time"] = {
                "effect": found[0][0],
                "low": min(low for _, low, _, _ in found),
                "high": max(high for _, _, high, _ in found),
                "at_most": any(at_most for *_, at_most in found),
            }
        return costs

    def _curves(self, candidate: _Candidate, plain: Plain) -> dict[str, Any]:
        """Train some runs with evaluations on the validation part, for the page, and return their ids."""
        if self.plan.num_curves == 0:
            return {}
        seeds = _seeds(_TUNE, self.plan.num_curves)
        specs = {
            "control": [self._spec("validation", plain, seed, num_curve=_NUM_POINTS) for seed in seeds],
            "method": [
                self._spec_of("validation", candidate, plain.steps, seed, num_curve=_NUM_POINTS) for seed in seeds
            ],
        }
        self.runner.results([s for group in specs.values() for s in group], f"{self.task.name}: curves")
        return {"curves": {name: [spec.id for spec in group] for name, group in specs.items()}}

    def _time_to_target(
        self,
        candidate: _Candidate,
        plain: Plain,
        controls: _Results,
        results: _Results,
        about: Mapping[str, Any],
        fresh: int,
    ) -> dict[str, Any] | None:
        """Return when the ladder of a method reaches plain's mean at the full budget, and the same for plain itself."""
        times = about.get("step_time")
        if times is None or times["ratio"] is None:
            return None
        rungs, runs, searches = [Rung(1.0, _values(results))], [], []
        for fraction in sorted((fraction for fraction in self.task.ladder if fraction < 1), reverse=True):
            try:
                short = self._tuned_rung(candidate, fraction)
            except SearchError:  # the method diverges with every rate: the ladder ends there
                break
            searches.append(short.entry)
            specs = [
                self._spec_of("test", candidate, short.steps, seed, settings=dict(short.settings))
                for seed in _seeds(fresh, self.plan.num_ladder_seeds)
            ]
            values = _values(self._results(specs, f"{candidate.name}, {short.steps} steps"))
            runs += [spec.id for spec in specs]
            if not all(map(math.isfinite, values.values())):
                break
            rungs.append(Rung(short.steps / plain.steps, values))
        if len(rungs) == 1:
            return None
        target = _values(controls)
        in_steps = time_to_target(rungs, target, higher_is_better=self._higher)
        aa = time_to_target(self.ladder(plain), target, higher_is_better=self._higher)
        return {
            "method": asdict(in_steps.scaled(times["ratio"], times["low"], times["high"])),
            "in_steps": asdict(in_steps),
            "plain_against_plain": asdict(aa),
            "rungs": [{"time": times["ratio"] * r.time, "scores": _plain_json(r.scores)} for r in rungs],
            "run_ids": runs,
            "searches": searches,
        }

    def _tuned_rung(self, candidate: _Candidate, fraction: float) -> Plain:
        """Return the settings of a method for a shorter budget: plain's at that budget, with a tuned learning rate.

        Plain has searched all its settings at every length; the method has as many trials at most.
        """
        short, full = (self._tuned_variant(candidate.variant, part) for part in (fraction, 1.0))
        if "lr" not in short.settings or candidate.averages:
            return short
        rate = short.settings["lr"] * candidate.settings["lr"] / full.settings["lr"]
        grid = {"lr": Grid(tuple(float(f"{factor * rate:.4g}") for factor in _LR_FACTORS))}
        seeds = _seeds(_TUNE, self.plan.num_tuning_seeds)

        def runs(points: Sequence[Mapping[str, Any]]) -> list[list[tuple[RunSpec, str]]]:
            tried = [{**short.settings, **point} for point in points]
            return [
                [(self._spec_of("validation", candidate, short.steps, seed, settings=each), "") for seed in seeds]
                for each in tried
            ]

        title = f"{self.task.name}: tune {candidate.name}, {short.steps} steps"
        about = {"method": candidate.name, "variant": short.variant, "steps": short.steps, "fraction": fraction}
        start = {"lr": grid["lr"].values[1]}
        entry, found = self._search(title, grid, start, runs, about, short.num_trials)
        settings = {**short.settings, **found.best.point}
        return replace(short, settings=settings, score=found.best.score, entry=entry)

    # Stacks

    def stack(self, methods: Sequence[str] | None = None, *, select: bool = True) -> list[dict[str, Any]]:
        """Choose a stack on validation, measure it on test, and leave out each of its members once.

        The selection begins with plain, and adds each method to it, with the budget shortened by the ratio of step
        times. The two best stacks go on, if the method improves them by more than one standard error of the difference:
        the best method alone may exclude all others. A stack is tried with the learning rates that were tuned for its
        members alone, and beyond while the best is the largest or the smallest, and counts with the best of them.

        Args:
            methods: The candidates. None: all methods that were better than plain in their search, but those that need
                a teacher, which is trained for longer than plain is.
            select: False: `methods` are the stack, all of them.

        Returns:
            The entries.

        Raises:
            ValueError: `select` is False, and the methods do not form a stack.
        """
        plain = self.plain()
        candidates, refused = self._candidates(self._better_alone(plain) if methods is None else methods, plain)
        tuned = {candidate.name: candidate for candidate in candidates}
        if select:
            chosen, path = self._select(tuned, plain)
        else:
            chosen, path = list(tuned), []
            refused |= self._reasons_against(["+".join(chosen)], plain) if len(chosen) > 1 else {}
            if refused or len(chosen) < 2:
                reasons = "".join(f" {name}: {verdict.why}." for name, verdict in refused.items())
                raise ValueError(f"`methods` must be two or more that form a stack, got {methods!r}.{reasons}")
        about: dict[str, Any] = {"method": "+".join(chosen), "members": chosen, "path": path, "runs": {}}
        if not chosen:
            about["verdict"] = asdict(Verdict("no effect found", "no method improved validation at equal time"))
            return [self._entry_of("stack", about)]
        entries = self.measure(["+".join(chosen)])
        if len(chosen) > 1:
            about["leave_one_out"], about["runs"] = self._leave_one_out(chosen, plain)
        about["verdict"] = self.verdicts()["+".join(chosen)]["verdict"]
        return [*entries, self._entry_of("stack", about)]

    def _select(self, tuned: Mapping[str, _Candidate], plain: Plain) -> tuple[list[str], list[dict[str, Any]]]:
        """Return the members of a stack, chosen on validation, and what was tried in each round."""
        sign = 1 if self._higher else -1
        times = self._step_times(list(tuned.values()), plain)
        ratios = {name: max(1.0, each["ratio"] or each["high"]) if each else 1.0 for name, each in times.items()}
        seeds = _seeds(_STACK, self.plan.num_stack_seeds)
        base = _values(self._results([self._spec("validation", plain, seed) for seed in seeds], "select a stack"))
        kept: list[tuple[list[str], dict[int, float]]] = [([], base)]
        best, path = kept[0], list[dict[str, Any]]()
        while kept and len(kept[0][0]) < len(tuned):
            longer: dict[frozenset[str], tuple[list[str], dict[int, float]]] = {}  # with what each of them extends
            for members, before in kept:
                for name in [name for name in tuned if name not in members]:
                    longer.setdefault(frozenset([*members, name]), ([*members, name], before))
            stacks = {"+".join(stack): (stack, before) for stack, before in longer.values()}
            conflicts = self._reasons_against(list(stacks), plain)
            tried, better = {}, []
            for together, (stack, before) in stacks.items():
                steps = max(1, round(plain.steps / math.prod(ratios[name] for name in stack)))
                after = {} if together in conflicts else self._selected([tuned[name] for name in stack], plain, steps)
                if after:
                    effect, error = _difference(after, before, sign)
                    tried[together] = [effect, error]
                    better += [(stack, after)] if effect > error else []
            kept = sorted(better, key=lambda each: sign * _mean(each[1]), reverse=True)[:_KEPT]
            best = max([best, *kept], key=lambda each: sign * _mean(each[1]))
            path.append({"tried": tried, "kept": ["+".join(stack) for stack, _ in kept]})
        return best[0], path

    def _selected(self, members: Sequence[_Candidate], plain: Plain, steps: int) -> dict[int, float]:
        """Return what a stack reaches on validation with its best learning rate; {} if it diverges with all."""
        title, sign = f"select a stack: {'+'.join(member.name for member in members)}", 1 if self._higher else -1
        tried: dict[float, dict[int, float]] = {}
        candidates = self._stacked(members, plain)
        while True:
            for candidate in candidates:
                seeds = _seeds(_STACK, self.plan.num_stack_seeds)
                specs = [self._spec_of("validation", candidate, steps, seed) for seed in seeds]
                tried[candidate.settings.get("lr", 0.0)] = _values(self._results(specs, title))
            finite = {rate: values for rate, values in tried.items() if all(map(math.isfinite, values.values()))}
            best = max(finite, key=lambda rate: sign * _mean(finite[rate]), default=0.0)
            further = 2 * best if best == max(tried) else best / 2 if best == min(tried) else 0.0
            if not further or len(members) == 1:
                return finite.get(best, {})
            candidates = self._stacked(members, plain, [further])

    def _better_alone(self, plain: Plain) -> list[str]:
        searches = [e for e in self._own_entries("tuning") if e["fraction"] == 1.0 and e["score"] is not None]
        scores = {
            e["method"]: e["score"] for e in searches if e["method"] not in ("plain", AA) and "+" not in e["method"]
        }
        sign = 1 if self._higher else -1
        better = [name for name, score in scores.items() if sign * (score - plain.score) > 0]
        return [name for name in better if TEACHER not in member_of(self.task, name)[1].values()]

    def _stacked(
        self, members: Sequence[_Candidate], plain: Plain, rates: Sequence[float] | None = None
    ) -> list[_Candidate]:
        """Return the stack of tuned methods, once for each learning rate; None: for those that were tuned for a member.

        Rates belong to an optimizer: those of members that were tuned with another one are left out.
        """
        if len(members) == 1:
            return list(members)
        names = [member.name for member in members]
        variant = self._variant_of(names, plain)
        base = plain if variant == plain.variant else self._tuned_variant(variant, 1.0)
        if rates is None:
            rates = sorted({m.settings["lr"] for m in members if m.variant == variant and "lr" in m.settings})
        points = [{"lr": rate} for rate in rates] or [{}]
        return [self._candidate("+".join(names), variant, base, point, "") for point in points]

    def _leave_one_out(self, chosen: Sequence[str], plain: Plain) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return how much is lost without each member of a stack, on the test part, and the runs."""
        full = self._tuned("+".join(chosen), plain)
        names = {member: "+".join(m for m in chosen if m != member) for member in chosen}
        stacks = {member: self._tuned(name, plain) for member, name in names.items()}
        count, fresh = self.plan.num_seeds, self._fresh("leave one out", full)
        specs = {
            name: [self._spec_of("test", stack, plain.steps, seed) for seed in _seeds(fresh, count)]
            for name, stack in {"": full, **stacks}.items()
        }
        scores = {name: _values(self._results(group, "leave one out")) for name, group in specs.items()}
        lost = {name: sum(not math.isfinite(value) for value in values.values()) for name, values in scores.items()}
        control = scores[""]
        finite = {name: values for name, values in scores.items() if name and not lost[name]}
        compared = compare(control, finite, higher_is_better=self._higher) if not lost[""] else {}
        table: dict[str, Any] = {}
        for member, without in names.items():
            found = asdict(compared[member]) if member in compared else {"lost": lost[member]}
            table[member] = {"without": without, **found}
        return _plain_json(table), {name or "stack": [spec.id for spec in group] for name, group in specs.items()}

    # Entries

    def verdicts(self) -> dict[str, dict[str, Any]]:
        """Return the entry that counts for each method, with its verdict; see `composer.evidence.verdicts`."""
        return verdicts([self.ledger]).get((self.task.name, self.runner.task_hash), {})

    def _own_entries(self, about: str) -> list[dict[str, Any]]:
        return [e for e in self.ledger.entries(about, self.task.name) if e["task_hash"] == self.runner.task_hash]

    def _about(self, plain: Plain, candidate: _Candidate, controls: _Results, results: _Results) -> dict[str, Any]:
        """Return the values of an entry about a method and its control.

        It has a verdict only if runs diverged: that of a comparison depends on the others of the ledger.
        """
        values = _values(results)
        lost = [seed for seed, value in values.items() if not math.isfinite(value)]
        judged: dict[str, Any] = {"comparison": None}
        if lost:
            messages = [f": {result.message}" for result, _ in results.values() if result.status == "failed"]
            why = f"{len(lost)} of {len(values)} runs diverged or failed{''.join(messages[:1])}"
            judged["verdict"] = asdict(Verdict("loss", why))
        else:
            found = compare_one(_values(controls), values, higher_is_better=self._higher, paired=candidate.averages)
            judged["comparison"] = found.as_json()
        return {
            "method": candidate.name,
            "part": "test",
            "variant": candidate.variant,
            "steps": plain.steps,
            "settings": dict(candidate.settings),
            "stack": [list(member) for member in candidate.stack],
            "plain": {"variant": plain.variant, "settings": dict(plain.settings), "steps": plain.steps},
            "searches": list(dict.fromkeys([plain.entry, candidate.tuning])),
            **judged,
            "scores": {str(seed): _number(value) for seed, value in values.items()},
            "control_scores": {str(seed): value for seed, value in _values(controls).items()},
            "label": next((label for _, label in results.values()), ""),
            "runs": {
                "method": [result.spec.id for result, _ in results.values()],
                "control": [result.spec.id for result, _ in controls.values()],
            },
        }

    def _entry_of(self, about: str, values: Mapping[str, Any]) -> dict[str, Any]:
        return self.ledger.entry(self._add(about, values))

    def _add(self, about: str, values: Mapping[str, Any]) -> str:
        """Add an entry, unless there is one that says the same, and return its id.

        Hardware, versions and source are those of its runs, which may be of several machines.
        """
        runs = {run for group in values["runs"].values() for run in group}
        places = self.runner.environments(sorted(runs)) or [environment(self.runner.device)]
        stable = {
            "about": about,
            "task": self.task.name,
            "task_version": self.task.version,
            "task_hash": self.runner.task_hash,
            **_plain_json(dict(values)),
        }
        for entry in reversed(self._own_entries(about)):
            if {key: value for key, value in entry.items() if key in stable} == stable:
                return str(entry["id"])
        facts = {
            **{
                key: _joined(place.get(key, "unknown") for place in places)
                for key in ("hardware", "instructions", "system", "source")
            },
            "versions": {
                name: _joined(place["versions"].get(name, "none") for place in places)
                for name in sorted({name for place in places for name in place["versions"]})
            },
            "device": self.runner.device,
            "precision": self.runner.precision,
            "threads": 1,
            "reference": self.runner.reference,
            "metric": asdict(self.task.metric),
            "command": self.command,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        return self.ledger.add("entry", {**stable, **facts})


def replay(study: Study, entry: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Train the runs of an entry again, in a ledger of their own, and compare.

    Args:
        study: The study of the entry's task.
        entry: An entry about a measurement or a confirmation.
        folder: The folder for the new runs.

    Returns:
        The entry about the replay: the new effect and interval, whether it overlaps the old one, whether all scores are
        the same, and what differs between the machine and versions of then and now.

    Raises:
        ValueError: The entry has no runs to compare, or the task has changed.
    """
    old = entry.get("comparison")
    if old is None or "method" not in entry.get("runs", {}):
        raise ValueError(f"`entry` must have runs that are compared, got {entry['id']!r} about {entry['about']}.")
    if entry["task_hash"] != study.runner.task_hash:
        raise ValueError(
            f"`entry` must be of the task as it is now, {study.runner.task_hash}, got {entry['id']!r} of "
            f"{entry['task_hash']}. Use the version of the code that the entry names."
        )
    lines = {RunResult.from_json(line).spec.id: line for line in study.ledger.lines("run")}
    specs = {
        name: [RunResult.from_json(lines[run]).spec for run in entry["runs"][name]] for name in ("control", "method")
    }
    runner = study.runner.elsewhere(folder)
    results = {name: runner.results(group, f"replay {entry['id']}: {name}") for name, group in specs.items()}
    control = {result.spec.seed: result.score() for result in results["control"]}
    scores = {result.spec.seed: result.score(entry["label"]) for result in results["method"]}
    higher = study.task.metric.higher_is_better
    found = compare_one(control, scores, higher_is_better=higher, paired=old["test"] == "paired")
    before = {**entry["scores"]}, {**entry["control_scores"]}
    after = ({str(s): v for s, v in scores.items()}, {str(s): v for s, v in control.items()})
    about = {
        "method": entry["method"],
        "replays": entry["id"],
        "part": entry["part"],
        "comparison": found.as_json(),
        "overlaps": found.low <= old["high"] and old["low"] <= found.high,
        "identical": before == after,
        "elsewhere": _changed(entry, environment(entry["device"])),
        "folder": folder.name,
        "runs": {},
    }
    return study._entry_of("replay", about)


def _members(name: str) -> list[str]:
    return [] if name == AA else name.split("+")


def _gained_first(entry: Mapping[str, Any]) -> bool:
    """Return True if a method gained on its first seeds, whether that is confirmed already or not."""
    waits = entry.get("comparison") is not None and entry["verdict"]["word"] == "not judged"
    return bool(waits or entry["about"] == "confirmation")


def _is_better(compared: Mapping[str, Any]) -> bool:
    return bool(compared["effect"] > 0 and compared["p"] < ALPHA)


def _changed(entry: Mapping[str, Any], place: Mapping[str, Any]) -> list[str]:
    """Return what differs between where an entry was measured and here: on equal machines all scores are the same."""
    facts = {key: (entry.get(key), place[key]) for key in ("hardware", "instructions", "source")}
    versions = {name: (version, place["versions"].get(name)) for name, version in entry["versions"].items()}
    return [f"{key} {old} -> {new}" for key, (old, new) in (facts | versions).items() if old != new]


def _joined(values: Iterable[str]) -> str:
    return "; ".join(sorted(set(values)))


def _values(results: _Results) -> dict[int, float]:
    return {seed: result.score(label) for seed, (result, label) in results.items()}


def _seeds(first: int, count: int) -> range:
    return range(first, first + count)


def _mean(values: Mapping[int, float]) -> float:
    return float(np.mean(list(values.values())))


def _difference(values: Mapping[int, float], base: Mapping[int, float], sign: int) -> tuple[float, float]:
    """Return the mean difference of pairs of equal seeds, and its standard error."""
    differences = sign * np.array([values[seed] - base[seed] for seed in values])
    return float(differences.mean()), float(differences.std(ddof=1) / math.sqrt(len(differences)))


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain_json(values: Any) -> Any:
    """Return values as JSON reads them back, with None for numbers that are not finite."""
    if isinstance(values, Mapping):
        return {str(key): _plain_json(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_plain_json(value) for value in values]
    return _number(values) if isinstance(values, float) else values
