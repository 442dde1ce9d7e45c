"""`Evaluator`: what is measured, how often, in which portions."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from composer.core import DataSpec, Evaluator, Event, State, Time, Timestamp, ensure_evaluator
from composer.testing import SimpleModel

DATASET = TensorDataset(torch.zeros(8, 2))
METRICS = {"MulticlassAccuracy": 1, "CrossEntropy": 2, "LanguageCrossEntropy": 3}


def evaluator(**arguments: Any) -> Evaluator:
    return Evaluator(**{"label": "test", "dataloader": DataLoader(DATASET, batch_size=4), **arguments})


def state_after(epochs: int, batches: int) -> State:
    """A state in the middle of ten epochs of two batches, one event after it was one step earlier."""
    state = State(model=SimpleModel(), max_duration="10ep", dataloader=DataLoader(DATASET, batch_size=4))
    state.previous_timestamp = Timestamp(epoch=max(epochs - 1, 0), batch=batches - 1)
    state.timestamp = Timestamp(epoch=epochs, batch=batches)
    return state


class TestConstruction:
    def test_arguments_are_keywords(self) -> None:
        with pytest.raises(TypeError, match="positional"):
            Evaluator("test", [])  # type: ignore[misc]

    def test_the_dataloader_becomes_a_spec(self) -> None:
        spec = DataSpec(DataLoader(DATASET, batch_size=4))

        assert evaluator(dataloader=spec).dataloader is spec
        assert isinstance(evaluator().dataloader, DataSpec)
        assert evaluator(dataloader={"dataloader": spec.dataloader, "num_samples": 5}).dataloader.num_samples == 5

    def test_the_rest_is_kept(self) -> None:
        actual = evaluator(label="a", subset_num_batches=3, metric_names=["b"])

        assert (
            actual.label,
            actual.subset_num_batches,
            actual.metric_names,
            actual.auto_microbatching,
        ) == ("a", 3, ["b"], False)

    def test_ensure_labels_a_dataloader_eval_and_keeps_an_evaluator(self) -> None:
        existing, loader = evaluator(), DataLoader(DATASET, batch_size=4)

        made = ensure_evaluator(loader, ["Accuracy"])

        assert ensure_evaluator(existing, ["Accuracy"]) is existing
        assert (made.label, made.metric_names) == ("eval", ["Accuracy"])
        assert made.dataloader.dataloader is loader


class TestMetricNames:
    @pytest.mark.parametrize(
        ("names", "selected"),
        [
            (None, ["MulticlassAccuracy", "CrossEntropy", "LanguageCrossEntropy"]),
            ([], []),
            (["CrossEntropy"], ["CrossEntropy", "LanguageCrossEntropy"]),
            (["^crossentropy"], ["CrossEntropy"]),
            (["language|accuracy"], ["MulticlassAccuracy", "LanguageCrossEntropy"]),
            (["Lang.*Entropy", "multi"], ["MulticlassAccuracy", "LanguageCrossEntropy"]),
        ],
    )
    def test_they_are_searched_for_in_any_case_and_keep_the_order_of_the_model(
        self, names: list[str] | None, selected: list[str]
    ) -> None:
        assert {name: METRICS[name] for name in selected} == evaluator(metric_names=names).select_metrics(METRICS)
        assert selected == list(evaluator(metric_names=names).select_metrics(METRICS))

    def test_a_name_that_selects_nothing_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, logger="composer"):
            assert evaluator(metric_names=["Acuracy"]).select_metrics({"Accuracy": 1}) == {}

        assert [record.message for record in caplog.records] == [
            "No metric of the model matches 'Acuracy' in `metric_names` of evaluator 'test'. The metrics are: Accuracy."
        ]

    @pytest.mark.parametrize("names", [("Entropy", "^Acc"), {"^Acc", "Entropy"}, dict.fromkeys(["Entropy"]).keys()])
    def test_any_collection_of_them_will_do(self, names: Any) -> None:
        made = evaluator(metric_names=names)

        assert isinstance(made.metric_names, list)
        assert set(made.metric_names) == set(names)
        assert "CrossEntropy" in made.select_metrics(METRICS)

    @pytest.mark.parametrize("names", ["Accuracy", b"Accuracy", {"Accuracy": 1}, [1], 1])
    def test_other_types_are_refused(self, names: Any) -> None:
        with pytest.raises(ValueError, match="`metric_names` should be a list of strings"):
            evaluator(metric_names=names)

    def test_what_is_no_regular_expression_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"must contain regular expressions, got '\*Entropy': nothing to repeat"):
            evaluator(metric_names=["*Entropy"])


class TestInterval:
    def test_none_leaves_it_to_the_trainer(self) -> None:
        assert evaluator().eval_interval is None

    def test_a_function_is_used_as_it_is(self) -> None:
        def always(state: State, event: Event) -> bool:
            return True

        assert evaluator(eval_interval=always).eval_interval is always

    @pytest.mark.parametrize("interval", [2, np.int64(2), "2ep", Time.from_epoch(2)])
    def test_an_interval_in_epochs_fires_at_the_end_of_an_epoch(self, interval: Any) -> None:
        due = evaluator(eval_interval=interval).eval_interval

        assert due is not None
        assert [due(state_after(n, 2 * n), Event.EPOCH_END) for n in (1, 2, 3, 4)] == [False, True, False, True]
        assert not due(state_after(2, 4), Event.BATCH_END)
        assert not due(state_after(2, 4), Event.EPOCH_CHECKPOINT)

    def test_an_interval_in_batches_fires_at_the_end_of_a_batch(self) -> None:
        due = evaluator(eval_interval="3ba").eval_interval

        assert due is not None
        assert [due(state_after(0, n), Event.BATCH_END) for n in (1, 2, 3)] == [False, False, True]

    def test_zero_is_never(self) -> None:
        due = evaluator(eval_interval=0).eval_interval

        assert due is not None
        assert not any(due(state_after(n, 2 * n), event) for n in range(1, 11) for event in Event)

    def test_it_can_be_set_later(self) -> None:
        actual = evaluator()
        actual.eval_interval = "1ep"

        assert actual.eval_interval is not None
        assert actual.eval_interval(state_after(1, 2), Event.EPOCH_END)

        actual.eval_interval = None

        assert actual.eval_interval is None


class TestMicrobatchSize:
    def test_the_default_is_the_batch_size_of_the_dataloader(self) -> None:
        batches = DataLoader(DATASET, batch_sampler=BatchSampler(SequentialSampler(DATASET), 2, drop_last=False))

        assert evaluator().device_eval_microbatch_size == 4
        assert evaluator(dataloader=batches).device_eval_microbatch_size == 2

    def test_a_number_is_kept(self) -> None:
        size = 3

        assert size == evaluator(device_eval_microbatch_size=size).device_eval_microbatch_size
        assert size == evaluator(dataloader=[], device_eval_microbatch_size=size).device_eval_microbatch_size

    def test_a_fraction_needs_a_function_that_splits_batches(self) -> None:
        with pytest.raises(ValueError, match=r"`device_eval_microbatch_size` must be an integer .* got 0\.5"):
            evaluator(device_eval_microbatch_size=0.5)
        split = DataSpec([], split_batch=lambda batch, size: [batch])

        assert 0.5 == evaluator(dataloader=split, device_eval_microbatch_size=0.5).device_eval_microbatch_size

    def test_auto_starts_with_the_batch_size(self) -> None:
        with pytest.warns(UserWarning, match="`device_eval_microbatch_size='auto'` may potentially fail"):
            actual = evaluator(device_eval_microbatch_size="auto")

        assert actual.auto_microbatching
        assert actual.device_eval_microbatch_size == 4

    def test_without_a_batch_size_batches_are_not_split(self) -> None:
        assert evaluator(dataloader=[]).device_eval_microbatch_size is None

    @pytest.mark.filterwarnings("ignore:`device_eval_microbatch_size='auto'`")
    def test_without_a_batch_size_auto_can_not_start(self) -> None:
        with pytest.raises(AttributeError, match="is 'auto', got DataLoader without one"):
            evaluator(dataloader=DataLoader(DATASET, batch_size=None), device_eval_microbatch_size="auto")

    @pytest.mark.parametrize("size", ["large", 0, -1, [4]])
    def test_other_sizes_are_refused(self, size: Any) -> None:
        with pytest.raises(ValueError, match="must be 'auto' or a positive number"):
            evaluator(device_eval_microbatch_size=size)

    def test_auto_is_refused_with_sequence_parallelism(self) -> None:
        spec = DataSpec(DataLoader(DATASET, batch_size=4))
        spec.seq_parallel_world_size = 2  # type: ignore[attr-defined]

        with pytest.raises(ValueError, match="must be a number for a dataloader with `seq_parallel_world_size`"):
            evaluator(dataloader=spec, device_eval_microbatch_size="auto")


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("label", 3, r"`label` must be a name such as 'eval', got 3"),
        ("dataloader", "data/test", r"`dataloader` must be an iterable of batches, got 'data/test'"),
        ("subset_num_batches", 0, r"`subset_num_batches` must be a positive number of batches, -1 .* got 0"),
        ("subset_num_batches", 1.5, r"`subset_num_batches` must be a positive number of batches, -1 .* got 1.5"),
        ("eval_interval", "-1ba", r"`eval_interval` must be positive, or 0 to never evaluate .* got '-1ba'"),
        ("eval_interval", "often", r"`eval_interval` must be a time, got 'often'. A time string must be"),
        ("eval_interval", [1], r"`eval_interval` must be a time such as '1ep'.* got \[1\]"),
        ("eval_interval", True, r"`eval_interval` must be a time such as '1ep'.* got True"),
        ("eval_interval", float("nan"), r"`eval_interval` must be a time such as '1ep'.* got nan"),
    ],
)
def test_what_cannot_be_evaluated_is_answered_at_construction(argument: str, value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Evaluator(**{"label": "eval", "dataloader": [torch.zeros(2, 1)], argument: value})
