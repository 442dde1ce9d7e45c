"""The base class of algorithms: when it acts, and how it prints."""

from __future__ import annotations

from typing import Any

import torch

from composer.core import Algorithm, Event, State


class Scaled(Algorithm):
    events = frozenset({Event.AFTER_LOSS})

    def __init__(self, factor: float = 2.0, at: Event = Event.AFTER_LOSS) -> None:
        self.factor, self.at = factor, at

    def apply(self, event: Event, state: State, logger: Any) -> None:
        state.loss = self.factor * state.loss


def labels_of(batch: dict[str, Any]) -> Any:
    return batch["labels"]


def test_declared_events_answer_match() -> None:
    state = State(model=torch.nn.Linear(1, 1))

    assert [event for event in Event if Scaled().match(event, state)] == [Event.AFTER_LOSS]


def test_the_repr_is_a_constructor_call_without_spaces() -> None:
    assert repr(Scaled(0.5)) == "Scaled(factor=0.5,at=Event.AFTER_LOSS)"
    assert {"repr": repr(Scaled())} == Scaled().state_dict()
    assert repr(eval(repr(Scaled()))) == "Scaled(factor=2.0,at=Event.AFTER_LOSS)"  # noqa: S307 - the promise of repr


def test_a_function_is_printed_without_its_address_which_differs_in_each_process() -> None:
    assert repr(Scaled(labels_of)) == "Scaled(factor=labels_of,at=Event.AFTER_LOSS)"


def test_an_algorithm_that_does_not_keep_its_arguments_prints_plainly() -> None:
    class Hidden(Scaled):
        def __init__(self, secret: int) -> None:
            super().__init__()

    assert "Hidden object at" in repr(Hidden(1))


def test_the_needs_of_the_loop_default_to_none() -> None:
    algorithm = Scaled()

    assert (
        algorithm.find_unused_parameters,
        algorithm.backwards_create_graph,
        algorithm.required_on_load(),
    ) == (False, False, False)
