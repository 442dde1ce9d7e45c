"""Whole studies of a tiny task: entries, refusals, replays, stacks, shards, a user's task."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from conftest import PLAN, TINY
from tiny_tasks import Load, images, tiny

from composer.evidence import Ledger, Plan, Runner, Study, load_task, replay
from composer.evidence.auto import load_recipe, make_schedule, write_recipe
from composer.evidence.cli import main
from composer.evidence.methods import TEACHER, grid_of, make_algorithms, member_of, reason_against, training_beside
from composer.evidence.page import explain, show_effect, table, write_page
from composer.evidence.run import RunResult
from composer.evidence.search import SearchError
from composer.evidence.statistics import Rung, Verdict, at_equal_time, compare
from composer.evidence.study import AA
from composer.evidence.task import source_of
from composer.recipes import SGD, Metric

METHODS = ["EMA", "Muon", "Alibi", "LabelSmoothing"]
FAST = "--seeds 3 --controls 4 --tuning-seeds 1 --stack-seeds 2 --ladder-seeds 2 --repeats 1 --workers 2".split()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, list[dict[str, Any]]]:
    """A study of the tiny task, and its entries."""
    runner = Runner(TINY, tmp_path_factory.mktemp("study"), workers=2, say=lambda _: None)
    study = Study(runner, Plan(**{**vars(PLAN), "num_curves": 1}), command="test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "_step_times", lambda candidates, plain: {each.name: dict(COSTS) for each in candidates})
        return study, study.measure(METHODS)


COSTS = {"ratio": 1.1, "low": 1.05, "high": 1.2, "inference": 1.0, "memory": 1.3}
"""The costs of a method, which a busy machine cannot measure."""


def of(entries: list[dict[str, Any]], method: str, about: str = "measurement") -> dict[str, Any]:
    return next(entry for entry in entries if entry["method"] == method and entry["about"] == about)


def test_every_method_has_an_entry_with_what_it_was_compared_with(
    measured: tuple[Study, list[dict[str, Any]]],
) -> None:
    study, entries = measured
    muon, ema, aa = of(entries, "Muon"), of(entries, "EMA"), of(entries, AA)

    assert {entry["method"] for entry in entries} == {*METHODS, AA}
    assert muon["task_hash"] == study.runner.task_hash
    assert muon["stack"][0][0] == "Muon"
    assert (muon["comparison"]["n"], muon["comparison"]["n_control"]) == (3, 4)
    assert muon["step_time"] == COSTS
    assert set(muon["equal_time"]) == {"effect", "low", "high", "at_most"}
    assert muon["versions"]["torch"]
    assert muon["source"]
    assert (muon["threads"], muon["precision"], muon["command"]) == (1, "fp32", "test")
    assert ema["comparison"]["test"] == "paired"
    assert ema["runs"]["method"] == ema["runs"]["control"]
    assert not set(aa["scores"]) & set(aa["control_scores"])
    searches = {entry["method"]: entry for entry in study.ledger.entries("tuning")}  # A/A has that of a method
    assert searches[AA]["grid"]["lr"] == searches["Muon"]["grid"]["lr"]
    assert aa["settings"]["lr"] == searches[AA]["best"]["lr"]


def test_the_numbers_of_an_entry_follow_from_its_runs(measured: tuple[Study, list[dict[str, Any]]]) -> None:
    study, entries = measured
    muon = of(entries, "Muon")
    scores = {
        line["spec"]["seed"]: line["scores"][""]
        for line in study.ledger.lines("run")
        if line["spec"]["part"] == "test" and line["spec"]["steps"] == 8 and line["spec"]["stack"]
    }
    control = {int(seed): value for seed, value in muon["control_scores"].items()}

    found = compare(control, {"Muon": scores}, higher_is_better=True)["Muon"]
    assert found.effect == pytest.approx(muon["comparison"]["effect"])
    assert found.low == pytest.approx(muon["comparison"]["low"])


def test_the_test_part_is_not_used_for_choices(measured: tuple[Study, list[dict[str, Any]]]) -> None:
    study, _ = measured
    tuning = study.ledger.entries("tuning")
    parts = {line["spec"]["part"] for line in study.ledger.lines("run") if 30_000 <= line["spec"]["seed"] < 10**6}

    assert len(tuning) >= 4
    assert {entry["part"] for entry in tuning} == parts == {"validation"}
    plain = [entry for entry in tuning if entry["method"] == "plain" and entry["fraction"] == 1]
    muon = of(tuning, "Muon", "tuning")
    assert len(muon["trials"]) <= len(plain[0]["trials"])


def test_methods_that_do_not_apply_are_refused_with_the_reason(
    measured: tuple[Study, list[dict[str, Any]]],
) -> None:
    _, entries = measured

    assert of(entries, "Alibi")["verdict"]["word"] == "not applicable"
    assert "needs tokens" in of(entries, "Alibi")["verdict"]["why"]
    assert "needs images" in of(entries, "LabelSmoothing")["verdict"]["why"]


@pytest.mark.parametrize(
    ("methods", "word", "why"),
    [
        (["Alibi"], "not applicable", "needs tokens"),
        (["MixUp"], "not judged", "budget of tiny is too short"),
        (["SAM"], "not judged", "it is slow"),
        (["NoSuchThing"], "not applicable", "installed algorithms"),
        (["EMA", "EMA"], "not applicable", "given twice|twice"),
    ],
)
def test_reasons_are_known_without_training(methods: list[str], word: str, why: str) -> None:
    against = reason_against(images(), methods)

    assert against is not None
    assert against[0] == word
    assert any(part in against[1] for part in why.split("|"))


@pytest.mark.parametrize("names", [["TwoMomenta", "SOAPMuon"], ["RowFloor", "TwoMomenta"]])
def test_options_of_one_algorithm_are_joined_in_any_order(names: list[str]) -> None:
    task = load_task("records_small")

    assert reason_against(task, names) is None
    assert reason_against(task, names[::-1]) is None
    assert not {*grid_of(task, names[0])} & {*grid_of(task, names[1]), *member_of(task, names[1])[1]}
    assert not {*grid_of(task, names[1])} & {*grid_of(task, names[0]), *member_of(task, names[0])[1]}


def test_members_that_set_the_same_argument_of_one_algorithm_are_refused() -> None:
    against = reason_against(load_task("records_small"), ["EMA", "TailReadout"])

    assert against == ("not applicable", "two members of EMA+TailReadout set `half_life` of EMA")
    assert reason_against(load_task("records_small"), ["Muon"]) == ("not judged", "it is part of plain training")


def test_arguments_that_a_method_does_not_have_are_named() -> None:
    against = reason_against(tiny(arguments={"EMA": {"nonsense": 1}}), ["EMA"])

    assert against is not None
    assert "`EMA` cannot be constructed" in against[1]
    assert "nonsense" in against[1]


def test_a_recipe_that_needs_a_teacher_asks_for_it(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    stack = [{"Distillation": {"teacher": TEACHER, "weight": 0.9}}]
    recipe = {"task": "tiny_tasks:tiny", "variant": "adamw", "training": {"lr": 0.1}, "algorithms": stack}
    path.write_text(yaml.safe_dump(recipe))
    network = torch.nn.Linear(2, 2)

    with pytest.raises(ValueError, match="`teacher` must be a trained network"):
        load_recipe(path)
    _, (distillation,) = load_recipe(path, network)
    assert distillation.teacher is network


def test_schedule_free_trains_beside_sgd_with_nesterov_momentum() -> None:
    model, stack = torch.nn.Linear(2, 2), [("ScheduleFree", {"recalibration_batches": 0})]
    (group,) = training_beside(stack, SGD(lr=0.1)).optimizer(model).param_groups

    assert SGD(lr=0.1).optimizer(model).param_groups[0]["nesterov"]
    assert (group["nesterov"], group["momentum"]) == (False, 0.9)


def test_repeating_a_measurement_trains_and_adds_nothing(
    measured: tuple[Study, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, entries = measured
    before = study.ledger.path.read_bytes()
    monkeypatch.setattr(study, "_step_times", lambda candidates, plain: {each.name: dict(COSTS) for each in candidates})

    again = study.measure(METHODS)
    assert [entry["id"] for entry in again] == [entry["id"] for entry in entries]
    assert study.ledger.path.read_bytes() == before


def test_more_runs_are_refused_once_results_were_seen(measured: tuple[Study, list[dict[str, Any]]]) -> None:
    study, _ = measured
    more = Study(study.runner, replace(PLAN, num_controls=5))
    with pytest.raises(ValueError, match="num_seeds=3 and num_controls=4, got 3 and 5"):
        more.measure(["Muon"])


def test_a_replay_gives_the_same_scores(measured: tuple[Study, list[dict[str, Any]]], tmp_path: Path) -> None:
    study, entries = measured
    found = replay(study, of(entries, "EMA"), tmp_path / "replay")

    assert found["identical"]
    assert found["overlaps"]
    assert found["replays"] == of(entries, "EMA")["id"]
    assert found["elsewhere"] == []
    assert len(list(Ledger(tmp_path / "replay").lines("run"))) == 4
    with pytest.raises(ValueError, match="runs that are compared"):
        replay(study, of(entries, "Alibi"), tmp_path / "none")
    before = {**of(entries, "EMA"), "instructions": "AVX2"}
    assert replay(study, before, tmp_path / "other")["elsewhere"] == [f"instructions AVX2 -> {found['instructions']}"]
    changed = {**of(entries, "EMA"), "task_hash": "other"}
    with pytest.raises(ValueError, match="of the task as it is now"):
        replay(study, changed, tmp_path / "none")


def test_tables_explanations_and_the_page_say_what_was_measured(
    measured: tuple[Study, list[dict[str, Any]]], tmp_path: Path
) -> None:
    study, entries = measured
    text = table([study.ledger])
    page = write_page([study.ledger], tmp_path / "page.html").read_text()
    explained = explain(study.ledger, of(entries, "Muon"))

    for method in (*METHODS, AA):
        assert f"| {method} |" in text
        assert method in page
    assert of(entries, "Muon")["hardware"] in text
    assert "3 / 4" in text
    effect, low, high = (f"{100 * of(entries, 'Muon')['comparison'][key]:+.2f}" for key in ("effect", "low", "high"))
    assert f"  effect: {effect}%, 95 % interval [{low}, {high}] (positive is better; " in explained
    assert "Welch's test" in explained
    assert "Holm's correction for 3 comparisons" in explained
    assert page.count("<svg") == 3
    assert "fill: var(--ink)" in page  # the colors of the page, in its light and its dark mode
    assert "#010101" not in page
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    assert table([Ledger(tmp_path / "empty")]) == "The ledger has no measurements."
    write_page([Ledger(tmp_path / "empty")], tmp_path / "empty.html")


def test_an_effect_that_rounds_to_zero_has_no_minus() -> None:
    accuracy = Metric("MulticlassAccuracy", "accuracy", scale=100, unit="%", digits=2)

    shown = show_effect({"effect": -0.00001, "low": -0.001, "high": 0.0}, accuracy)
    assert ("+0.00%", "[-0.10, +0.00]") == shown


WATCHER = """<!DOCTYPE html>
<iframe id="frame" style="width:400px;height:900px;border:0"></iframe><pre id="seen"></pre>
<script>
document.getElementById("frame").onload = ({target}) => {
  const page = target.contentDocument, all = (query) => [...page.querySelectorAll(query)];
  document.getElementById("seen").textContent = JSON.stringify({
    overflow: page.documentElement.scrollWidth > page.documentElement.clientWidth,
    resources: target.contentWindow.performance.getEntriesByType("resource").length,
    charts: all("svg").filter((chart) => chart.getBoundingClientRect().width > 300).length,
    smallest: Math.min(...all("svg text").map((text) => text.getBoundingClientRect().height)),
  });
};
document.getElementById("frame").src = "page.html";
</script>"""
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium or google-chrome on the PATH")
def test_the_page_fits_a_phone_and_fetches_nothing(
    measured: tuple[Study, list[dict[str, Any]]], tmp_path: Path
) -> None:
    write_page([measured[0].ledger], tmp_path / "page.html")
    (tmp_path / "watcher.html").write_text(WATCHER)
    options = "headless no-sandbox disable-gpu disable-dev-shm-usage allow-file-access-from-files no-first-run dump-dom"
    command = [str(BROWSER), *(f"--{option}" for option in options.split()), "--virtual-time-budget=10000"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "watcher.html").as_uri()]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    seen = json.loads(re.findall('<pre id="seen">(.+?)</pre>', printed)[0])

    assert (seen["overflow"], seen["resources"], seen["charts"]) == (False, 0, 3)
    assert seen["smallest"] >= 9  # pixels of a line of text


def choose(study: Study, monkeypatch: pytest.MonkeyPatch, scores: dict[str, float]) -> None:
    """Let stacks have these scores in the selection."""

    def selected(members: list[Any], plain: Any, steps: int) -> dict[int, float]:
        score = scores["+".join(member.name for member in members)]
        return {40_000 + seed: score + seed / 100 for seed in range(PLAN.num_stack_seeds)}

    monkeypatch.setattr(study, "_selected", selected)


def test_a_stack_is_chosen_on_validation_and_taken_apart_on_test(
    measured: tuple[Study, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, _ = measured
    choose(study, monkeypatch, {"Muon": 2.0, "EMA": 1.5, "Muon+EMA": 3.0})

    entries = study.stack(["Muon", "EMA"])
    stack = entries[-1]
    assert stack["members"] == ["Muon", "EMA"]
    assert [step["kept"] for step in stack["path"]] == [["Muon", "EMA"], ["Muon+EMA"]]
    assert set(stack["leave_one_out"]) == {"Muon", "EMA"}
    assert stack["leave_one_out"]["EMA"]["without"] == "Muon"
    assert of(entries, "Muon+EMA")["comparison"]["n"] == 3
    assert "Leave one out of Muon+EMA" in write_page([study.ledger], study.runner.folder / "page.html").read_text()


def test_a_selection_goes_on_with_the_second_stack_where_the_best_excludes_all_others(
    measured: tuple[Study, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, _ = measured
    scores = {"SAM": 1.8, "ScheduleFree": 2.0, "Muon": 1.9, "EMA": 1.5}
    choose(study, monkeypatch, scores | {"Muon+EMA": 3.0, "Muon+SAM": 1.8, "Muon+EMA+SAM": 2.9})
    conflict = Verdict("not applicable", "excluded")
    monkeypatch.setattr(
        study, "_reasons_against", lambda names, plain: {n: conflict for n in names if "+" in n and "ScheduleFree" in n}
    )
    monkeypatch.setattr(study, "_step_times", lambda candidates, plain: dict.fromkeys(scores))

    members, path = study._select({name: SimpleNamespace(name=name) for name in scores}, study.plain())  # type: ignore[misc]
    assert members == ["Muon", "EMA"]
    assert [step["kept"] for step in path] == [["ScheduleFree", "Muon"], ["Muon+EMA"], []]


def test_a_whole_stack_is_taken_apart_without_a_selection(measured: tuple[Study, list[dict[str, Any]]]) -> None:
    study, _ = measured
    stack = study.stack(["EMA", "Muon"], select=False)[-1]
    assert (stack["members"], stack["path"]) == (["EMA", "Muon"], [])
    assert set(stack["leave_one_out"]) == {"EMA", "Muon"}
    assert re.search(r"\n  without Muon: [-+]\d", explain(study.ledger, stack))

    with pytest.raises(ValueError, match=r"form a stack, got .*Alibi needs tokens"):
        study.stack(["EMA", "Muon", "Alibi"], select=False)
    with pytest.raises(ValueError, match="two or more"):
        study.stack(["EMA"], select=False)


def test_what_was_better_alone_may_be_stacked_unless_it_needs_a_teacher(
    measured: tuple[Study, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, _ = measured
    plain, better = study.plain(), study.plain().score + 0.1
    scores = {"A/A": better, "EMA": better, "Distillation": better, "SAM": plain.score - 0.1, "EMA+Muon": better}
    entries = [{"method": name, "fraction": 1.0, "score": score} for name, score in scores.items()]
    monkeypatch.setattr(study, "_own_entries", lambda about: entries)

    assert study._better_alone(plain) == ["EMA"]


def test_a_stack_is_tried_beyond_the_learning_rates_of_its_members(
    measured: tuple[Study, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, _ = measured
    members = study._candidates(["Muon", "EMA"], study.plain())[0]
    rates = {"Muon": 0.02, "EMA": 0.01}
    pair = [replace(each, settings={**each.settings, "lr": rates[each.name]}) for each in members]

    def results(specs: Any, title: str) -> dict[int, float]:
        tried.append(specs[0].settings["lr"])
        return {spec.seed: math.nan if tried[-1] > 0.1 else -abs(tried[-1] - best) for spec in specs}

    monkeypatch.setattr(study, "_results", results)
    monkeypatch.setattr("composer.evidence.study._values", lambda found: found)
    for best, expected in ((0.08, [0.01, 0.02, 0.04, 0.08, 0.16]), (0.003, [0.01, 0.02, 0.005, 0.0025, 0.00125])):
        tried: list[float] = []
        assert set(study._selected(pair, study.plain(), 8).values()) == {-abs(expected[3] - best)}
        assert tried == expected
    tried = []
    study._selected(pair[:1], study.plain(), 8)
    assert tried == [0.02]


def test_a_stack_is_tried_with_the_learning_rates_of_its_members(
    measured: tuple[Study, list[dict[str, Any]]],
) -> None:
    study, _ = measured
    plain = study.plain()
    muon, ema = study._candidates(["Muon", "EMA"], plain)[0]
    muon = replace(muon, settings={**muon.settings, "lr": 0.03})
    ema = replace(ema, settings={**ema.settings, "lr": 0.01})

    stacks = study._stacked([muon, ema], plain)
    assert [stack.settings["lr"] for stack in stacks] == [0.01, 0.03]
    assert [[name for name, _ in stack.stack] for stack in stacks] == [["Muon", "EMA"]] * 2

    assert study._stacked([muon], plain) == [muon]  # with its own arguments, too

    with_other_optimizer = replace(ema, variant="other")
    (stack,) = study._stacked([muon, with_other_optimizer], plain)
    assert stack.settings["lr"] == 0.03


def test_a_stack_has_the_arguments_that_this_study_found_for_its_members(
    measured: tuple[Study, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, _ = measured
    plain = study.plain()
    muon, ema = study._candidates(["Muon", "EMA"], plain)[0]
    ((_, arguments),) = ema.stack
    (stack, *_) = study._stacked([muon, ema], plain)
    assert dict(stack.stack)["EMA"] == arguments

    # Another plan has searched since, and its entry is the last one.
    other = {"method": "EMA", "fraction": 1.0, "best": {f"EMA.{name}": "other" for name in arguments}}
    monkeypatch.setattr(study, "_own_entries", lambda about: [other])
    (stack, *_) = study._stacked([muon, ema], plain)
    assert dict(stack.stack)["EMA"] == arguments


def test_nothing_is_stacked_where_nothing_improves(
    measured: tuple[Study, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, _ = measured
    monkeypatch.setattr("composer.evidence.study._difference", lambda values, base, sign: (0.1, 0.2))

    assert study.stack(["EMA"])[-1]["verdict"]["word"] == "no effect found"


def test_gains_also_of_plain_over_itself_are_judged_on_fresh_seeds(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge_all_as_gains(screening: Any, confirmation: Any = None) -> Verdict:
        return Verdict("not judged") if confirmation is None else Verdict("gain")

    monkeypatch.setattr("composer.evidence.verdicts.judge", judge_all_as_gains)
    monkeypatch.setattr("composer.evidence.study._is_better", lambda compared: True)
    monkeypatch.setattr(study, "_step_times", lambda candidates, plain: {each.name: dict(COSTS) for each in candidates})
    assert "time_to_target" not in of(study.measure(["Muon", "Alibi"]), "Muon", "confirmation")
    entries = study.measure(["Muon"])
    for method in ("Muon", AA):
        first, fresh = of(entries, method), of(entries, method, "confirmation")
        seeds = [set(entry[key]) for entry in (first, fresh) for key in ("scores", "control_scores")]

        assert fresh["confirms"] == first["id"]
        assert study.verdicts()[method]["verdict"]["word"] == "gain"
        assert not (seeds[0] | seeds[1]) & (seeds[2] | seeds[3])
    controls_of = [set(of(entries, method, "confirmation")["control_scores"]) for method in ("Muon", AA)]
    assert not controls_of[0] & controls_of[1]
    muon = of(entries, "Muon", "confirmation")
    scores = {int(seed): value for seed, value in muon["scores"].items()}
    controls = {int(seed): value for seed, value in muon["control_scores"].items()}
    ladder = [Rung(1.0, controls) if rung.time == 1 else rung for rung in study.ladder(study.plain())]
    expected = at_equal_time(scores, muon["step_time"]["ratio"], ladder, higher_is_better=True)
    assert muon["equal_time"]["effect"] == pytest.approx(expected[0])
    ends = [
        at_equal_time(scores, muon["step_time"][end], ladder, higher_is_better=True)[1:3] for end in ("low", "high")
    ]
    assert muon["equal_time"]["low"] == pytest.approx(min(low for low, _ in (expected[1:3], *ends)))
    assert muon["equal_time"]["high"] == pytest.approx(max(high for _, high in (expected[1:3], *ends)))
    reached = muon["time_to_target"]
    assert len(reached["rungs"]) == 2
    for end, factor in (("ratio", "ratio"), ("low", "low"), ("high", "high")):
        if reached["in_steps"][end] is not None:
            expected_end = reached["in_steps"][end] * muon["step_time"][factor]
            assert reached["method"][end] == pytest.approx(expected_end)
    (search,) = (study.ledger.entry(name) for name in reached["searches"])
    assert (search["method"], search["fraction"], len(search["trials"]) >= 3) == ("Muon", 0.5, True)
    specs = {RunResult.from_json(line).spec.id: line["spec"] for line in study.ledger.lines("run")}
    assert {specs[name]["settings"]["lr"] for name in reached["run_ids"]} == {search["best"]["lr"]}
    assert "Time to target" in write_page([study.ledger], study.runner.folder / "page.html").read_text()


def test_a_ladder_ends_where_runs_of_a_method_diverge(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = study.plain()
    (muon,) = study._candidates(["Muon"], plain)[0]
    trained = study._results

    def results(specs: Any, title: str) -> Any:
        found = trained(specs, title)
        lost = {seed: (replace(result, scores={"": None}), label) for seed, (result, label) in found.items()}
        return lost if "Muon" in title else found

    monkeypatch.setattr(study, "_results", results)
    controls = trained([study._spec("test", plain, seed) for seed in range(2)], "plain")
    found = study._time_to_target(muon, plain, controls, controls, {"step_time": COSTS}, 0)
    assert found is None  # the full budget alone is no ladder


def test_a_replay_of_the_published_ledger_adds_nothing_to_ones_own(
    measured: tuple[Study, list[dict[str, Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, entries = measured
    monkeypatch.setattr("composer.evidence.cli.PUBLISHED", study.ledger.path.parent)
    main(["replay", of(entries, "EMA")["id"], "--published", "--workers", "2", "--out", str(tmp_path)])

    assert not (tmp_path / "ledger.jsonl").exists()
    assert Ledger(tmp_path / "published").entries("replay")


def test_plain_training_that_fails_ends_the_study_with_its_message(runner: Callable[..., Runner]) -> None:
    with pytest.raises(RuntimeError, match="Plain training of tiny failed: KeyError: 'no such layer'"):
        Study(runner(reference="tiny_tasks:fails"), PLAN).plain()


def test_plain_training_that_diverges_on_a_shorter_rung_ends_the_study(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = study.plain()
    monkeypatch.setattr("composer.evidence.study._values", lambda results: {0: float("nan"), 1: 0.5})
    with pytest.raises(RuntimeError, match="Plain training of tiny must not diverge, but 1 of 2 runs did"):
        study.ladder(plain)


def test_a_method_whose_search_fails_is_a_loss_and_the_others_go_on(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = study._tuned

    def fail(name: str, plain: Any) -> Any:
        if name == "Muon":
            raise SearchError("All trials failed.")
        return tuned(name, plain)

    monkeypatch.setattr(study, "_tuned", fail)
    entries = study.measure(["Muon"])
    assert of(entries, "Muon")["verdict"] == {"word": "loss", "why": "all trials of its search failed or diverged"}
    assert of(entries, AA)["comparison"] is not None


def test_the_grid_of_an_average_is_extended_too(runner: Callable[..., Runner]) -> None:
    study = Study(runner(reference="tiny_tasks:smoothed"), PLAN)
    study.tune(["EMA"])
    (entry,) = (e for e in study.ledger.entries("tuning") if e["method"] == "EMA")
    best, grid = entry["best"]["EMA.smoothing"], entry["grid"]["EMA.smoothing"]
    plain = [e for e in study.ledger.entries("tuning") if e["method"] == "plain" and e["fraction"] == 1]

    assert min(grid) < best < max(grid)
    assert 2 < len(entry["trials"]) <= len(plain[0]["trials"])


def test_an_entry_names_the_machines_of_its_runs(
    measured: tuple[Study, list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, entries = measured
    first, second = of(entries, "Muon")["runs"]["method"][:2]
    elsewhere = {"hardware": "another CPU", "system": "S", "versions": {"torch": "2.6"}, "source": "x"}
    known = study.runner._known
    monkeypatch.setitem(known, first, replace(known[first], environment=elsewhere))

    alone = study.ledger.entry(study._add("note", {"method": "one", "runs": {"method": [first]}}))
    both = study.ledger.entry(study._add("note", {"method": "two", "runs": {"method": [first, second]}}))
    assert (alone["hardware"], alone["versions"]) == ("another CPU", {"torch": "2.6"})
    assert set(both["hardware"].split("; ")) == {"another CPU", known[second].environment["hardware"]}


def test_the_hash_of_a_task_has_what_its_functions_hold_and_is_the_same_in_every_process() -> None:
    def activation() -> None: ...

    def other_activation() -> int:
        return 1

    class Held:
        pass

    assert source_of(Load(1)) != source_of(Load(2))
    assert source_of(partial(load_task, activation)) != source_of(partial(load_task, other_activation))
    assert source_of(partial(load_task, Held())) == source_of(partial(load_task, Held()))


def test_the_recipe_has_the_settings_of_the_best_gain(tmp_path: Path) -> None:
    runner = Runner(TINY, tmp_path / "ledger", workers=2, say=lambda _: None)
    study = Study(runner, PLAN)
    assert write_recipe(study, tmp_path) is None
    scores = {str(seed): 0.9 + seed / 1000 for seed in range(3)}, {str(seed): 0.4 + seed / 1000 for seed in range(4)}
    entry = {
        "about": "measurement", "task": "tiny", "task_hash": runner.task_hash, "method": "Muon", "variant": "adamw",
        "steps": 8, "settings": {"lr": 0.02}, "stack": [["Muon", {"momentum": 0.9}]], "hardware": "a CPU",
        "scores": scores[0], "control_scores": scores[1], "comparison": {"test": "welch"},
        "metric": {"key": "MulticlassAccuracy", "title": "accuracy", "scale": 100, "unit": "%", "digits": 2},
    }  # fmt: skip
    first = runner.ledger.add("entry", entry)
    runner.ledger.add("entry", {**entry, "about": "confirmation", "confirms": first})

    path = write_recipe(study, tmp_path)
    assert path is not None
    assert "Muon on tiny: +49.95% in accuracy, n = 3 against 4, a CPU" in path.read_text()
    recipe = yaml.safe_load(path.read_text())
    assert recipe["algorithms"] == [{"Muon": {"momentum": 0.9}}]
    training, algorithms = load_recipe(path)
    assert training.lr == 0.02
    assert [type(algorithm).__name__ for algorithm in algorithms] == ["Muon"]


def test_a_schedule_fits_in_the_hours_or_says_how_many_are_needed() -> None:
    task, methods = tiny(), [f"M{i}" for i in range(10)]
    plenty = make_schedule(task, methods, run_seconds=1, workers=2, hours=10)
    little = make_schedule(task, methods, run_seconds=10, workers=2, hours=0.3)

    assert plenty.methods == methods
    assert plenty.plan == Plan(num_curves=2)
    assert plenty.hours < 10
    assert 0 < len(little.methods) < 10
    assert [*little.methods, *little.left_out] == methods
    assert little.hours <= 0.3
    with pytest.raises(ValueError, match="`hours` must be at least"):
        make_schedule(task, methods, run_seconds=100, workers=1, hours=0.1)


def test_a_users_task_from_the_command_to_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    line = ["run", TINY, "--hours", "1", "--methods", "EMA", "Alibi", *FAST, *out]
    main(line)
    first = (tmp_path / "out" / "ledger.jsonl").read_text()
    main(line)  # continues, and has nothing to do

    assert (tmp_path / "out" / "ledger.jsonl").read_text() == first
    assert (tmp_path / "out" / "evidence.html").exists()
    entries = Ledger(tmp_path / "out").entries("measurement")
    assert {entry["method"] for entry in entries} == {"EMA", "Alibi", AA}
    capsys.readouterr()
    main(["table", *out])
    assert "| EMA |" in capsys.readouterr().out
    main(["explain", entries[-1]["id"], *out])
    assert "Entry" in capsys.readouterr().out
    main(["replay", entries[-1]["id"], "--workers", "2", *out])
    assert "the intervals overlap; all scores are the same" in capsys.readouterr().out
    ledger = Ledger(tmp_path / "out")
    assert {entry["about"] for entry in ledger.entries()} >= {"tuning", "measurement", "ladder", "stack", "replay"}
    for entry in ledger.entries():
        main(["explain", entry["id"], *out])
    main(["page", *out])
    main(["merge", *out, str(tmp_path / "out")])
    assert "0 new lines" in capsys.readouterr().out


def test_a_rough_answer_names_all_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["run", TINY, "--quick", "--methods", "EMA", "Muon", "Alibi", "--workers", "2", "--out", str(tmp_path)])

    text = capsys.readouterr().out
    assert "Rough, for tiny: nothing was tuned or confirmed, 3 runs against 6 of plain (adamw)" in text
    assert re.search(r"\| Muon \| [-+][\d.]+% \[", text)
    assert "- Alibi: not applicable, Alibi needs tokens" in text
    assert "| EMA |" in text or "- EMA: " in text
    assert {line["spec"]["part"] for line in Ledger(tmp_path).lines("run")} == {"validation"}
    with pytest.raises(SystemExit, match="2"):
        main(["run", TINY, "--out", str(tmp_path)])
    assert "`--hours` must be given" in capsys.readouterr().err


def test_progress_says_how_long_the_whole_command_takes(runner: Callable[..., Runner]) -> None:
    said: list[str] = []
    own = runner()
    own.say, own.expected_steps = said.append, 80.0
    own.results([own.spec("validation", "adamw", 8)], "one run")

    assert re.fullmatch(r"one run: 1/1 runs, \d+ s passed, 0 s left; until the end about .+", said[-1])
    assert not said[-1].endswith(" 0 s")


def test_errors_end_the_command_with_a_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "nothing", "--out", str(tmp_path)])
    assert "`task` must be digits, fashion_mnist" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "x", "--out", str(tmp_path)])
    for line in (["measure", TINY, "Muon+NoSuchThing"], ["run", TINY, "--hours", "1", "--methods", "NoSuchThing"]):
        with pytest.raises(SystemExit, match="2"):
            main([*line, "--out", str(tmp_path)])
        assert "must be installed algorithms, got 'NoSuchThing'" in capsys.readouterr().err
    assert not (tmp_path / "ledger.jsonl").exists()
    with pytest.raises(SystemExit, match="2"):
        main(["tune", TINY, "--shard", "a", "--out", str(tmp_path)])
    assert "such as 1/4" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="75"):
        main(["tune", TINY, "--shard", "1/9999", "--tuning-seeds", "1", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("reference", "error", "message"),
    [
        ("tiny_tasks:nothing", ValueError, "has no attribute"),
        ("no_such_module:task", ValueError, "No module named"),
        ("tiny_tasks:ACCURACY", TypeError, "must be a `Task`"),
    ],
)
def test_tasks_that_are_none_are_refused(reference: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        load_task(reference)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "`steps`"),
        ({"variants": {}}, "`variants`"),
        ({"ladder": (1.0,)}, "`ladder`"),
        ({"base": {"Muon": "sgd"}}, "`base`"),
    ],
)
def test_bad_tasks_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**change)


def test_the_hash_of_a_task_changes_with_all_that_matters() -> None:
    task = tiny()
    data = task.data(None)
    hashes = {
        task.hash(data),
        tiny(version=2).hash(data),
        tiny(steps=9).hash(data),
        tiny(arguments={"EMA": {"half_life": "3ba"}}).hash(data),
        task.hash(type(data)(count=65)),
    }

    assert len(hashes) == 5
    assert task.hash(data) == tiny().hash(data)


@pytest.mark.parametrize("name", ["num_seeds", "num_controls", "num_tuning_seeds", "num_curves", "repeats"])
def test_bad_plans_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be at least"):
        Plan(**{name: -1})


def test_algorithms_are_made_from_names() -> None:
    assert type(make_algorithms([("EMA", {"half_life": "2ba"})])[0]).__name__ == "EMA"
    with pytest.raises(ValueError, match="which is not one"):
        make_algorithms([("warnings", {})])  # a module of composer-core


def test_the_built_in_tasks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["tasks"])

    text = capsys.readouterr().out
    assert "digits: A smoke test" in text
    assert "shakespeare:" in text
    assert "Muon" in text
