from __future__ import annotations

from collections.abc import Callable

import pytest
from recipe_runs import OPTIONS, Commanded, task_of

from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.recipes import Recipe, Runs, digits, run
from composer.recipes._actions import SENTENCES


class Counter(Algorithm):
    events = frozenset({Event.FIT_START, Event.BATCH_END})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        pass


class Idle(Counter):
    def match(self, event: Event, state: State) -> bool:
        return False


@pytest.mark.parametrize(
    ("recipe", "actions"),
    [
        (
            "digits",  # 3 epochs of 4 batches
            {
                "BlurPool": "put a blur into 4 strided convolutions and 0 max poolings",
                "ChannelsLast": "stored 9 of 9 convolutions channels last",
                "EMA": "averaged the weights 6 times, tested the averages 3 times",
                "LabelSmoothing": "smoothed the targets of 16 passes",  # 12 batches, 4 of them twice for SAM
                "MixUp": "mixed the images of 16 passes in pairs",
                "ProgressiveResizing": "trained 7 batches at 8x8, 2 batches at 12x12, 3 batches at 16x16",
                "SAM": "looked for the worst point nearby in 4 of 12 steps",
            },
        ),
        (
            "fashion_mnist",  # 12 batches, of which half are left; the fifth is in the second half and even
            {
                "CutMix": "exchanged squares between the images of 6 batches",
                "CutOut": "cut squares out of the images of 6 batches",
                "EMA": "averaged the weights 6 times, tested the averages 2 times",
                "GradientClipping": "clipped the gradients of 6 batches",
                "LayerFreezing": "trained 9 layers no more at the end",  # half of all but the last of 5 + 5 + 2 * 4 + 1
                "ScaleSchedule": "made the training 6 batches long",
                "SelectiveBackprop": "trained on the samples that it chose of 1 batch",
                "SqueezeExcite": "put a squeeze and excitation behind 4 convolutions",
                "WeightStandardization": "standardized the weights of 5 convolutions",
            },
        ),
        (
            "tiny_lm",  # 45 sequences
            {
                "Alibi": "replaced the position embeddings by biases of the attention",
                "EMA": "averaged the weights 6 times, tested the averages 1 time",
                "GradientClipping": "clipped the gradients of 6 batches",
                "Muon": "orthogonalized the updates of 4 hidden weights",
                "ScaleSchedule": "made the training 6 batches long",
                "SeqLengthWarmup": "trained on sequences of 8 tokens first, and of 16 at the end",
            },
        ),
        (
            "segmentation",  # 6 batches, of which 4 are left
            {
                "BlurPool": "put a blur into 1 strided convolution and 0 max poolings",
                "ChannelsLast": "stored 8 of 8 convolutions channels last",
                "EMA": "averaged the weights 4 times, tested the averages 2 times",
                "GradientClipping": "clipped the gradients of 4 batches",
                "ProgressiveResizing": "trained 3 batches at 16x16, 1 batch at 28x28",
                "ScaleSchedule": "made the training 4 batches long",
                "WeightStandardization": "standardized the weights of 7 convolutions",
            },
        ),
    ],
)
def test_actions_are_described_with_the_counts_of_the_run(
    command: Callable[[str], Commanded], recipe: str, actions: dict[str, str]
) -> None:
    assert actions == command(recipe).composed["runs"][0]["actions"]


@pytest.mark.parametrize("recipe", OPTIONS)
def test_every_algorithm_of_every_recipe_has_a_sentence(recipe: str) -> None:
    assert {kind.__name__ for kind in task_of(recipe).algorithms.values()} <= set(SENTENCES)


def test_passes_are_called_batches_where_each_batch_has_one(tiny: Callable[..., Recipe], one: Runs) -> None:
    algorithms = digits.TASK.make_algorithms(["mixup", "label_smoothing"])

    actions = run(tiny(algorithms=tuple(algorithms)), one).runs[0].actions

    assert {
        "MixUp": "mixed the images of 6 batches in pairs",
        "LabelSmoothing": "smoothed the targets of 6 batches",
    } == actions


def test_a_custom_algorithm_is_counted_event_by_event(tiny: Callable[..., Recipe], one: Runs) -> None:
    actions = run(tiny(algorithms=(Counter(), Idle())), one).runs[0].actions

    assert {"Counter": "acted 1 time at fit_start, 6 times at batch_end", "Idle": "did nothing"} == actions


def test_the_plan_lists_algorithms_but_no_callbacks_and_loggers(command: Callable[[str], Commanded]) -> None:
    composed = command("digits").composed
    plan = "\n".join(composed["plan"])

    assert all(name in plan for name in composed["runs"][0]["actions"])
    assert "logger" not in plan
    assert "callback" not in plan
