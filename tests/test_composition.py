"""A pair of algorithms trains alike in both orders of listing, or is refused for the declared reason.

Here are all pairs of which something is declared, and some of the others; `nox -s chaos` kills and resumes all pairs.
"""

from __future__ import annotations

import itertools
import re
import warnings
from typing import Any

import pytest
import torch
from algorithm_runs import (
    ARGUMENTS,
    CLASSES,
    LANGUAGE,
    LOWER_PRECISION,
    Captioned,
    Classifier,
    Images,
    captioned,
    choose,
    make,
    noise,
)

from composer import Trainer
from composer.algorithms.warnings import NoEffectWarning, NotIntendedUseWarning
from composer.core import ConflictError, Precision
from composer.recipes import digits as recipe
from composer.testing import deep_compare
from tools.pairs import judge, pairs, text_of
from tools.workspace import Workspace

PAIRS = {tuple(sorted((pair.first, pair.second))): pair for pair in pairs()}
FREE = [names for names, pair in PAIRS.items() if not (pair.ordered or pair.refused or pair.discouraged)]
CHOSEN = [names for names in PAIRS if names not in FREE] + FREE[::10]


def trainer_of(names: tuple[str, ...]) -> Trainer:
    """A trainer of three steps, one in each epoch."""
    is_language = bool(LANGUAGE & set(names))
    model = Captioned() if is_language else Classifier()
    keys = {"input_key": "image", "target_key": "label"} if is_language else {}
    loader = torch.utils.data.DataLoader(noise(), batch_size=8, collate_fn=captioned if is_language else None)
    return Trainer(
        model=model,
        train_dataloader=loader,
        max_duration="3ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=[make(name, keys) for name in names],
        precision=Precision.AMP_BF16 if LOWER_PRECISION & set(names) else Precision.FP32,
        progress_bar=False,
        device="cpu",
        seed=3,
    )


def train(trainer: Trainer) -> dict[str, Any]:
    before = {key: value.clone() for key, value in trainer.state.model.state_dict().items()}
    trainer.fit()
    after = trainer.state.model.state_dict()
    loss = trainer.state.total_loss_dict["loss/train/total"]
    trainer.close()
    assert torch.isfinite(torch.as_tensor(loss))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    return {"weights": after, "loss": loss}


def order_of(trainer: Trainer) -> list[tuple[Any, ...]]:
    return [(row.event, row.order, row.name) for row in trainer.engine.explain()]


@pytest.mark.parametrize("pair", CHOSEN, ids="+".join)
def test_a_pair_trains_alike_in_both_orders_or_is_refused(pair: tuple[str, str]) -> None:
    expected = judge(*(CLASSES[name](**ARGUMENTS.get(name, {})) for name in pair))
    if expected.refused:
        with pytest.raises(ConflictError, match="cannot be used together"):
            trainer_of(pair)
        return
    with warnings.catch_warnings():
        if expected.discouraged:
            warnings.simplefilter("ignore", NotIntendedUseWarning)
        if "NoOpModel" in pair:  # which leaves the other one nothing to change
            warnings.simplefilter("ignore", NoEffectWarning)
        trainer = trainer_of(pair)
        order, result = order_of(trainer), train(trainer)
        other = trainer_of(pair[::-1])
        if order_of(other) != order:  # otherwise both run the same: tests of the engine show that it keeps the order
            deep_compare(result, train(other))
        other.close()


AROUND_A_STEP = "EMA SAM LayerFreezing GradientClipping EMANesterov CautiousDecay Hyperball Muon".split()


@pytest.mark.parametrize("names", [AROUND_A_STEP, AROUND_A_STEP[::-1], sorted(AROUND_A_STEP)], ids=["0", "1", "2"])
def test_the_order_around_a_step_is_that_of_the_documentation(names: list[str]) -> None:
    text = (Workspace()["composer-core"].path / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z_]+) \| [^|]+ \| ([^|]+) \|$", text.partition("### Around a step")[2], re.MULTILINE)
    documented: dict[str, list[str]] = {}
    for event, by in rows:
        documented.setdefault(event, []).extend(name for name in re.findall("`(.*?)`", by) if name in names)

    plan = trainer_of(tuple(names)).engine.explain()

    for event, expected in documented.items():
        found = [row.name for row in plan if row.event.name == event and row.kind == "algorithm"]
        if event == "AFTER_TRAIN_BATCH":  # gradients and copies of weights: any order will do
            found, expected = sorted(found), sorted(expected)
        assert expected == [name for name in found if name in expected], event
        assert event == "EPOCH_END" or expected == found  # where EMA takes its weights back
    assert ["BEFORE_TRAIN_BATCH", "AFTER_TRAIN_BATCH", "BATCH_END", "EPOCH_END"] == list(documented)
    assert "SAM:\ntwo passes in every `interval`-th step" in str(plan)


def test_all_vision_algorithms_run_together_for_an_epoch_of_the_digits() -> None:
    chosen = choose(sorted(CLASSES.keys() - LANGUAGE - {"NoOpModel"}))
    digits = recipe.Data(train_samples=256).load()
    images, labels = digits.train
    pixels = images.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).numpy()
    loader = torch.utils.data.DataLoader(Images(pixels, labels), batch_size=64)
    model = Classifier(digits.num_classes)
    differing = {"Distillation": {"teacher": Classifier(digits.num_classes, seed=2)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotIntendedUseWarning)
        trainer = Trainer(
            model=model,
            train_dataloader=loader,
            max_duration="1ep",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            algorithms=[make(name, {}, differing.get(name)) for name in chosen],
            precision=Precision.AMP_BF16,
            progress_bar=False,
            device="cpu",
            seed=3,
        )
    before = {key: value.clone() for key, value in trainer.state.model.state_dict().items()}
    trainer.fit()
    after = trainer.state.model.state_dict()
    trainer.close()

    assert len(chosen) >= 24
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert all(torch.isfinite(value).all() for value in after.values())


def test_the_table_of_pairs_names_every_pair_that_is_ordered_refused_or_warned_of() -> None:
    text = text_of(list(PAIRS.values()))

    assert set(PAIRS) == set(itertools.combinations(sorted(CLASSES), 2))
    for pair in PAIRS.values():
        for reason in filter(None, (pair.ordered, pair.refused, pair.discouraged)):
            assert f"| {pair.first} | {pair.second} | {reason} |" in text
