"""Events: their order, names, pairs, and look-up by text."""

from __future__ import annotations

import copy
import pickle

import pytest

from composer.core import Event
from composer.utils.string_enum import StringEnum


def test_there_are_forty_events_from_init_to_predict_end() -> None:
    events = list(Event)

    assert len(events) == 40
    assert (events[0], events[-1]) == (Event.INIT, Event.PREDICT_END)
    assert list(range(40)) == [event.index for event in events]


def test_values_are_lower_cased_names() -> None:
    assert [event.name.lower() for event in Event] == [event.value for event in Event]


def test_every_before_event_has_exactly_one_after_event() -> None:
    before = sorted(event.canonical_name for event in Event if event.is_before_event)
    after = sorted(event.canonical_name for event in Event if event.is_after_event)

    assert len(set(before)) == len(before)
    # INIT and the *_CHECKPOINT events belong to no pair.
    assert before == after
    assert [e.name for e in Event if not e.is_before_event and not e.is_after_event] == [
        "INIT",
        "BATCH_CHECKPOINT",
        "EPOCH_CHECKPOINT",
        "ITERATION_CHECKPOINT",
    ]


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (Event.EPOCH_START, "epoch"),
        (Event.EPOCH_END, "epoch"),
        (Event.BEFORE_FORWARD, "forward"),
        (Event.EVAL_BEFORE_ALL, "eval_all"),
        (Event.EPOCH_CHECKPOINT, "epoch_checkpoint"),
    ],
)
def test_canonical_names_drop_the_end_of_the_pair(event: Event, expected: str) -> None:
    assert expected == event.canonical_name


@pytest.mark.parametrize("text", ["batch_end", "BATCH_END", "Batch_End"])
def test_events_are_found_by_name_and_value_in_any_case(text: str) -> None:
    assert Event(text) is Event.BATCH_END


def test_an_unknown_event_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"`Event` must be one of 'init', .*got 'batch_ends'"):
        Event("batch_ends")


def test_comparing_with_a_string_works_and_warns() -> None:
    with pytest.warns(UserWarning, match="Convert it first"):
        assert Event.INIT == "init"
    with pytest.warns(UserWarning, match="Convert it first"):
        assert Event.INIT != "no event"


def test_events_survive_copies_and_pickles() -> None:
    assert copy.deepcopy(Event.INIT) is Event.INIT
    assert pickle.loads(pickle.dumps(Event.INIT)) is Event.INIT
    assert {Event.INIT: 1}[Event("init")] == 1


def test_a_string_enum_refuses_names_and_values_in_the_wrong_case() -> None:
    with pytest.raises(ValueError, match="upper-case"):

        class _LowerName(StringEnum):
            name_ = "value"

    with pytest.raises(ValueError, match="lower-case"):

        class _UpperValue(StringEnum):
            NAME = "Value"


def test_a_string_enum_is_looked_up_by_strings_only() -> None:
    with pytest.raises(TypeError, match="must be looked up by a string, got 3"):
        Event(3)
