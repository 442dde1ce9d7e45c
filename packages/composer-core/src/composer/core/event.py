"""The points of a training loop at which algorithms and callbacks may act."""

from __future__ import annotations

from typing import Any

from composer.utils.string_enum import StringEnum

_MARKS = ("before_", "after_", "_start", "_end")


class Event(StringEnum):
    """A point of the training loop. The members are in the order in which a run reaches them.

    Members are looked up by name or value, case-insensitively: `Event("batch_end") is Event.BATCH_END`.

    Attributes:
        index: The position in declaration order, 0 to 39; the index into the dispatch table of the engine.
        canonical_name: The value without `before_`, `after_`, `_start` and `_end`; the same for both events of a pair.
        is_before_event: True for the first event of a pair (`BEFORE_LOSS`, `EPOCH_START`, ...).
        is_after_event: True for the second event of a pair. `INIT` and the `*_CHECKPOINT` events belong to no pair.
        is_eval: True for events of an evaluation.
        is_predict: True for events of a prediction.
    """

    INIT = "init"
    BEFORE_LOAD = "before_load"
    AFTER_LOAD = "after_load"
    FIT_START = "fit_start"

    ITERATION_START = "iteration_start"
    EPOCH_START = "epoch_start"
    BEFORE_DATALOADER = "before_dataloader"
    AFTER_DATALOADER = "after_dataloader"
    BATCH_START = "batch_start"
    BEFORE_TRAIN_BATCH = "before_train_batch"
    BEFORE_FORWARD = "before_forward"
    AFTER_FORWARD = "after_forward"
    BEFORE_LOSS = "before_loss"
    AFTER_LOSS = "after_loss"
    BEFORE_BACKWARD = "before_backward"
    AFTER_BACKWARD = "after_backward"
    AFTER_TRAIN_BATCH = "after_train_batch"
    BATCH_END = "batch_end"
    BATCH_CHECKPOINT = "batch_checkpoint"
    EPOCH_END = "epoch_end"
    EPOCH_CHECKPOINT = "epoch_checkpoint"
    ITERATION_END = "iteration_end"
    ITERATION_CHECKPOINT = "iteration_checkpoint"
    FIT_END = "fit_end"

    EVAL_BEFORE_ALL = "eval_before_all"
    EVAL_START = "eval_start"
    EVAL_BATCH_START = "eval_batch_start"
    EVAL_BEFORE_FORWARD = "eval_before_forward"
    EVAL_AFTER_FORWARD = "eval_after_forward"
    EVAL_BATCH_END = "eval_batch_end"
    EVAL_END = "eval_end"
    EVAL_AFTER_ALL = "eval_after_all"
    EVAL_STANDALONE_START = "eval_standalone_start"
    EVAL_STANDALONE_END = "eval_standalone_end"

    PREDICT_START = "predict_start"
    PREDICT_BATCH_START = "predict_batch_start"
    PREDICT_BEFORE_FORWARD = "predict_before_forward"
    PREDICT_AFTER_FORWARD = "predict_after_forward"
    PREDICT_BATCH_END = "predict_batch_end"
    PREDICT_END = "predict_end"

    index: int
    canonical_name: str
    is_before_event: bool
    is_after_event: bool
    is_eval: bool
    is_predict: bool

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.index = len(type(self).__members__)
        self.canonical_name = value
        for mark in _MARKS:
            self.canonical_name = self.canonical_name.replace(mark, "")
        self.is_before_event = "before_" in value or value.endswith("_start")
        self.is_after_event = "after_" in value or value.endswith("_end")
        self.is_eval = value.startswith("eval")
        self.is_predict = value.startswith("predict")
