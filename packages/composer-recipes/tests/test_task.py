from __future__ import annotations

import importlib

import pytest
from recipe_runs import task_of

from composer.algorithms.ema import EMA
from composer.recipes import SGD, Runs, digits
from composer.recipes.cli import RECIPES

CASES = [(name, algorithm) for name in RECIPES for algorithm in task_of(name).algorithms]


@pytest.mark.parametrize("name", RECIPES)
def test_the_plain_recipe_has_no_algorithms_and_the_composed_one_is_the_same_but_for_them(name: str) -> None:
    task = task_of(name)

    plain, composed = task.plain(), task.composed()

    assert (name, "plain", "composed") == (task.name, plain.name, composed.name)
    assert () == tuple(plain.algorithms)
    assert [task.algorithms[key] for key in task.chosen] == [type(algorithm) for algorithm in composed.algorithms]
    for part in ("data", "network", "training", "metrics"):
        assert getattr(task, part) is getattr(plain, part) is getattr(composed, part)


@pytest.mark.parametrize("name", RECIPES)
def test_each_module_has_the_two_recipes_of_its_task(name: str) -> None:
    module = importlib.import_module(f"composer.recipes.{name}")

    assert (module.TASK.plain, module.TASK.composed) == (module.plain, module.composed)
    assert (module.Data, module.Network) == (type(module.TASK.data), type(module.TASK.network))


def test_parts_can_be_replaced() -> None:
    data, network, training = digits.Data(batch_size=7), digits.Network(width=3), SGD(lr=0.7)
    algorithms = [EMA()]

    plain = digits.plain(data, network, training)
    composed = digits.composed(data, network, training, algorithms)

    for recipe in (plain, composed):
        assert (data, network, training) == (recipe.data, recipe.network, recipe.training)
    assert algorithms == composed.algorithms
    assert [] == digits.composed(algorithms=[]).algorithms


@pytest.mark.parametrize("name", RECIPES)
def test_chosen_and_tuned_algorithms_are_available(name: str) -> None:
    task = task_of(name)

    assert task.chosen
    assert {*task.chosen, *task.tuned} <= set(task.algorithms)


@pytest.mark.parametrize(("name", "algorithm"), CASES)
def test_every_algorithm_can_be_built_with_the_tuned_arguments(name: str, algorithm: str) -> None:
    task = task_of(name)

    (made,) = task.make_algorithms([algorithm])

    assert type(made) is task.algorithms[algorithm]
    arguments = {**task.tuned.get(algorithm, {}), **task.fitted(task.data).get(algorithm, {})}
    assert repr(task.algorithms[algorithm](**arguments)) == repr(made)


def test_tuned_arguments_replace_the_defaults_of_an_algorithm() -> None:
    (made,) = digits.TASK.make_algorithms(["ema"])

    assert f"{digits.TASK.tuned['ema']['half_life']!r}" in repr(made)
    assert repr(EMA()) != repr(made)


def test_arguments_replace_those_that_suit_the_task() -> None:
    label_smoothing, mixup = digits.TASK.make_algorithms(["label_smoothing", "mixup"], {"mixup": {"alpha": 0.9}})

    assert (0.9, 0.1) == (mixup.alpha, label_smoothing.smoothing)  # type: ignore[attr-defined]


def test_nothing_is_made_of_no_names() -> None:
    assert [] == digits.TASK.make_algorithms([])


def test_an_unknown_name_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"`names` must be among blurpool, channels_last, .*, sam, .*got 'cutmix'"):
        digits.TASK.make_algorithms(["mixup", "cutmix"])


def test_errors_of_an_algorithm_are_raised() -> None:
    with pytest.raises(ValueError, match="`alpha`"):
        digits.TASK.make_algorithms(["mixup"], {"mixup": {"alpha": -1.0}})


def test_the_digits_are_trained_on_one_thread_so_that_all_machines_agree() -> None:
    assert Runs(seeds=5, threads=1) == digits.TASK.runs
