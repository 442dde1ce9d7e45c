"""Two ranks with half of every batch each train like one process with the whole batch, where the method allows it.

Where it does not, because each rank draws random numbers of its own or looks at its own examples only, the result is
that of two runs in one process, one for each half, that go in step and average their gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from algorithm_runs import ARGUMENTS, CLASSES, LOWER_PRECISION, teacher
from rank_runs import HALVES, SEED, SIZE, WHOLE, Case, Found, climbing_apart, in_step, train

from composer.algorithms.seq_length_warmup import set_batch_sequence_length
from composer.core._registry import points
from composer.testing import deep_compare, run_on_ranks
from composer.utils import dist
from tools.workspace import Workspace

TOLERANCE = 1e-10
UNEQUAL = (0, 5), (5, SIZE)  # rows of each batch


def listed(names: str, **options: Any) -> dict[str, Case]:
    return {name: Case(name, ARGUMENTS.get(name, {}), **options) for name in names.split()}


AVERAGE = {"swa_start": "0.1dur", "swa_end": "0.7dur", "update_interval": "1ba", "schedule_swa_lr": True, "swa_lr": 0.5}
BLOCKS = ARGUMENTS["StochasticDepth"]
CROPS = {**ARGUMENTS["ProgressiveResizing"], "mode": "crop"}
# Without random numbers, and each example on its own: the same result, in whatever parts.
EXACT = listed(
    "Alibi AlternatingFlip BlurPool CautiousDecay ChannelsLast ChunkedCrossEntropy EMA Factorize FusedLayerNorm "
    "GatedLinearUnits GradientClipping Hyperball LAWA "
    "LabelSmoothing LayerFreezing LogitSoftcap LowPrecisionGroupNorm LowPrecisionLayerNorm Muon NoOpModel PostHocEMA "
    "ProgressiveResizing QKNorm SWA ScaleSchedule ScheduleFree SeqLengthWarmup SequencePacking SqueezeExcite "
    "TestTimeAugmentation WeightStandardization Whitening ZLoss"
)
EXACT |= {
    # Products of float32 are not the same in parts of another size.
    "Distillation": Case("Distillation", {"teacher": teacher().double()}),
    "EMA by epochs": Case("EMA", {"smoothing": 0.5, "half_life": None, "update_interval": "1ep"}),
    "GradientClipping by unit": Case(
        "GradientClipping", {"clipping_type": "adaptive", "clipping_threshold": 0.01, "eps": 1e-3}
    ),
    "GradientClipping by value": Case("GradientClipping", {"clipping_type": "value", "clipping_threshold": 0.01}),
    "SWA of batches": Case("SWA", AVERAGE),
}
# Each rank has draws, or statistics, of its own.
ON_ITS_PART = listed("AugMix ColOut CutMix CutOut MixUp RandAugment SelectiveBackprop StochasticDepth")
ON_ITS_PART |= {
    "ColOut of the data set": Case("ColOut", {"batch": False}),
    "EMA of batch normalization": Case("EMA", {"half_life": "2ba"}, is_batch_normalized=True),
    "GhostBatchNorm": Case("GhostBatchNorm", {"ghost_batch_size": 3}, is_batch_normalized=True),
    "GyroDropout": Case("GyroDropout", {"p": 0.5}),  # of more masks than rows
    "GyroDropout of few masks": Case("GyroDropout", {"p": 0.5, "sigma": 8, "tau": 2}),
    "MixUp of losses": Case("MixUp", {"interpolate_loss": True}),
    "ProgressiveResizing by cropping": Case("ProgressiveResizing", CROPS),
    "StochasticDepth by sample": Case("StochasticDepth", {**BLOCKS, "stochastic_method": "sample"}),
}


def swapped(number: int, *args: Any) -> torch.Tensor:
    return torch.arange(number).bitwise_xor(1)


def fixed(value: Any, *args: Any) -> Any:
    return value


def second_of_each_pair(losses: torch.Tensor, number: int, *args: Any) -> torch.Tensor:
    return torch.arange(1, number, 2)


def unchanged(image: Any, severity: float) -> Any:
    return image


def mirrored(image: Any, severity: float) -> Any:
    return image.transpose(0)  # left to right


# The same, with draws and parts that fit both halves and the whole.
AS_IF_TOGETHER = listed("ColOut CutOut StochasticDepth", is_same_seed=True)  # one draw for a batch
AS_IF_TOGETHER |= {
    "AugMix": Case("AugMix", {"augmentation_set": [unchanged]}),
    "CutMix": Case(
        "CutMix",
        patches={
            "composer.algorithms.cutmix.cutmix._gen_indices": swapped,
            "composer.algorithms.cutmix.cutmix._choose_box": partial(fixed, (2, 3, 9, 14)),
        },
    ),
    "GhostBatchNorm": Case("GhostBatchNorm", {"ghost_batch_size": 2}, is_batch_normalized=True),
    "GyroDropout": Case("GyroDropout", {"p": 0.5, "sigma": 4, "tau": 1}),
    "MixUp": Case(
        "MixUp",
        patches={
            "composer.algorithms.mixup.mixup._gen_indices": swapped,
            "composer.algorithms.mixup.mixup._gen_mixing_coef": partial(fixed, 0.3),
        },
    ),
    "ProgressiveResizing by cropping": Case("ProgressiveResizing", CROPS, is_same_seed=True),
    "RandAugment": Case("RandAugment", {"depth": 1, "augmentation_set": [mirrored]}),
    "SAM": Case("SAM", {"rho": 0.5, "interval": 2, "sync_ascent": True}),
    "SelectiveBackprop": Case(
        "SelectiveBackprop",
        ARGUMENTS["SelectiveBackprop"],
        patches={"composer.algorithms.selective_backprop.selective_backprop._choose": second_of_each_pair},
    ),
    "StochasticDepth by sample": Case("StochasticDepth", {**BLOCKS, "stochastic_method": "sample", "drop_rate": 1.0}),
}
# The first of two passes is each rank's own.
SHARP = {"SAM": Case("SAM", {"rho": 0.5, "interval": 2})}
GROUPS = {"exact": EXACT, "own": ON_ITS_PART, "together": AS_IF_TOGETHER, "sharp": SHARP}


def is_exact(name: str) -> bool:
    """Return True if the contract of an algorithm says that microbatches equal one batch, and so do ranks."""
    package = Workspace()[points("composer.algorithms")[name].dist.name]
    return not any("microbatch_reason" in file.read_text() for file in package.tests.glob("*contract*.py"))


# The sizes of BatchSizeWarmup are those of a rank, see `test_batch_sizes`. A new algorithm is exact, or its contract
# says why not and compares the ranks with each other.
NAMED = {"BatchSizeWarmup"} | {case.name for cases in GROUPS.values() for case in cases.values()}
EXACT |= listed(" ".join(name for name in CLASSES if name not in NAMED and is_exact(name)))
LABELS = [(group, label) for group, cases in GROUPS.items() for label in cases]
# They compute what the layers did that they replace, or the rows that they join; reorder memory, average besides
# training, act in evaluation only, or do nothing.
WITHOUT_TRACE = [
    ("exact", name)
    for name in (
        *("ChannelsLast", "ChunkedCrossEntropy", "EMA", "EMA by epochs", "PostHocEMA", "SequencePacking"),
        *("TestTimeAugmentation", *LOWER_PRECISION),
    )
]
WITHOUT_TRACE += [("own", "EMA of batch normalization"), ("together", "AugMix")]


def train_all() -> dict[tuple[str, str], Found]:
    """On one of two ranks."""
    rank = dist.get_global_rank()
    found = {(group, label): train(GROUPS[group][label], HALVES[rank]) for group, label in LABELS}
    return found | {("unequal", label): train(case, UNEQUAL[rank], 2) for label, case in (EXACT | ON_ITS_PART).items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[tuple[str, str], Found]]:
    """The results of two ranks."""
    return run_on_ranks(train_all, 2, timeout=180)


@pytest.fixture(scope="module")
def whole() -> Callable[[str, str], Found]:
    """The results of one process."""
    return cache(lambda group, label: train(GROUPS[group][label], WHOLE))


def assert_close(expected: Any, actual: Any, *ignored: str) -> None:
    deep_compare(expected, actual, atol=TOLERANCE, ignore_keys=["looks_for_unused", *ignored])


def differ(one: Found, other: Found) -> bool:
    """Return True if two models have different weights or layers, by more than rounding."""
    ours, theirs = one["weights"], other["weights"]
    return ours.keys() != theirs.keys() or any(
        ours[name].shape != theirs[name].shape or not torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6)
        for name in ours
    )


def test_what_is_of_one_rank_is_compared_with_the_whole_too() -> None:
    own = {case.name for case in (*ON_ITS_PART.values(), *SHARP.values())}

    assert own == {case.name for case in AS_IF_TOGETHER.values()} | {"EMA"}


@pytest.mark.parametrize("label", EXACT)
def test_halves_equal_the_whole(label: str, ranks: Any, whole: Any) -> None:
    for found in ranks:
        assert_close(whole("exact", label), found["exact", label])
        assert {torch.float64} == {weight.dtype for weight in found["exact", label]["weights"].values()}


@pytest.mark.parametrize("label", EXACT)
def test_unequal_parts_in_microbatches_equal_the_whole(label: str, ranks: Any, whole: Any) -> None:
    """5 of 8 examples in three microbatches, and 3 in two."""
    for found in ranks:
        assert_close(whole("exact", label), found["unequal", label])


@pytest.mark.parametrize("label", AS_IF_TOGETHER)
def test_halves_equal_the_whole_but_for_what_each_rank_draws_and_measures(label: str, ranks: Any, whole: Any) -> None:
    own = ["buffers"] if label == "GhostBatchNorm" else []  # the running statistics
    for found in ranks:
        assert_close(whole("together", label), found["together", label], "repr", *own)


@pytest.mark.parametrize("label", ON_ITS_PART)
def test_each_rank_acts_on_its_part_with_its_draws(label: str, ranks: Any, whole: Any) -> None:
    case = ON_ITS_PART[label]

    for expected, found in zip(in_step(case, SEED, SEED + 1), ranks, strict=True):
        assert_close(expected, found["own", label], "loss")
    assert differ(whole("own", label), ranks[0]["own", label])
    draws = not case.is_batch_normalized and label != "GyroDropout of few masks"  # which are the same on all ranks
    assert draws == differ(in_step(case, SEED, SEED)[0], ranks[0]["own", label])


def test_each_rank_climbs_along_its_own_gradient(ranks: Any, whole: Any) -> None:
    expected = climbing_apart(SHARP["SAM"])

    for found in ranks:
        assert_close(expected, found["sharp", "SAM"]["weights"])
    assert differ(whole("sharp", "SAM"), ranks[0]["sharp", "SAM"])


@pytest.mark.parametrize(("group", "label"), [pair for pair in LABELS if pair not in WITHOUT_TRACE])
def test_the_algorithm_acted(group: str, label: str, whole: Any) -> None:
    plain = train(replace(GROUPS[group][label], is_plain=True), WHOLE)

    assert differ(plain, whole(group, label))


@pytest.mark.parametrize(("group", "label"), [*LABELS, *(("unequal", label) for label in EXACT | ON_ITS_PART)])
def test_ranks_end_with_the_same_model(group: str, label: str, ranks: Any) -> None:
    first, second = (found[group, label] for found in ranks)
    # Statistics are what each rank measured; those of the first are saved.
    case = (EXACT | ON_ITS_PART | AS_IF_TOGETHER | SHARP)[label]
    own = ["buffers", "named_buffers_dict"] if case.is_batch_normalized else []

    deep_compare(first, second, ignore_keys=["repr", *own])


@pytest.mark.parametrize("label", EXACT | ON_ITS_PART)
def test_unused_parameters_are_looked_for_where_there_are_some(label: str, ranks: Any) -> None:
    """If DDP does not look for unused parameters, training fails if there are any."""
    group = "exact" if label in EXACT else "own"

    assert (label in {"LayerFreezing", "StochasticDepth", "Whitening"}) == ranks[0][group, label]["looks_for_unused"]


def test_sequences_that_are_dealt_out_anew_equal_the_whole_if_each_part_fills_whole_ones() -> None:
    batch = {"input_ids": torch.arange(8 * 16).view(8, 16)}

    def dealt(length: int, *parts: torch.Tensor) -> torch.Tensor:
        each = [set_batch_sequence_length({"input_ids": part}, length, truncate=False) for part in parts]
        return torch.cat([part["input_ids"] for part in each])

    assert torch.equal(dealt(8, batch["input_ids"]), dealt(8, *batch["input_ids"].chunk(2)))
    assert (10, 10) == (len(dealt(12, batch["input_ids"])), len(dealt(12, *batch["input_ids"].chunk(2))))
    assert not torch.equal(dealt(12, batch["input_ids"]), dealt(12, *batch["input_ids"].chunk(2)))


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_the_card_says_whether_ranks_equal_one_process(name: str) -> None:
    distribution = points("composer.algorithms")[name].dist
    assert distribution is not None
    card = (Workspace()[distribution.name].path / "README.md").read_text(encoding="utf-8")
    (found,) = re.findall(r"^\*\*Ranks\*\* (.*?)(?=\n\n|\n\*\*|\n\Z)", card, re.DOTALL | re.MULTILINE)
    text = " ".join(found.split())
    is_exact = name in {case.name for case in EXACT.values()}

    assert is_exact == text.startswith("equal one process with the whole batch")
    assert is_exact or re.match("do not equal one process with the whole batch: .+", text)
