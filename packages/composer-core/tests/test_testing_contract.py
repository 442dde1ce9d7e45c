"""`AlgorithmContract` takes other people's algorithms, and says what to do where it rejects one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.testing import AlgorithmContract


class WithoutArguments(Algorithm):
    events = frozenset({Event.AFTER_LOSS})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.loss = 2 * state.loss


class WithOptions(WithoutArguments):
    def __init__(self, scale: float = 2.0, *rest: Any, **options: Any) -> None:
        self.scale, self.rest, self.options = scale, rest, options


class WithoutRepr(WithoutArguments):
    def __init__(self, scale: float = 2.0) -> None:
        self._scale = scale


@dataclass
class AsDataclass(WithoutArguments):
    scale: float = 2.0


class WithRequired(WithoutArguments):
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Undeclared(Algorithm):
    def match(self, event: Event, state: State) -> bool:
        return event is Event.AFTER_LOSS

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.loss = 2 * state.loss


class Wide(WithoutArguments):
    def match(self, event: Event, state: State) -> bool:
        return event.is_eval


def contract_of(algorithm: Algorithm) -> AlgorithmContract:
    class Contract(AlgorithmContract):
        def make(self) -> Algorithm:
            return algorithm

    return Contract()


ACCEPTED = [WithoutArguments(), WithOptions(3.0, 1, name=2), AsDataclass(), WithRequired(1.0)]


@pytest.mark.parametrize("algorithm", ACCEPTED, ids=lambda algorithm: type(algorithm).__name__)
def test_other_peoples_algorithms_are_accepted(algorithm: Algorithm) -> None:
    contract = contract_of(algorithm)
    contract.test_it_acts_only_at_the_events_it_names()
    contract.test_its_placement_is_declared()
    contract.test_its_repr_is_its_constructor_call()
    contract.test_the_same_seed_gives_the_same_result()


def test_a_representation_that_lacks_an_argument_is_rejected_with_the_way_out() -> None:
    with pytest.raises(AssertionError, match=r"`repr` of `WithoutRepr` must be.*\['scale'\].*`self\.x = x`"):
        contract_of(WithoutRepr()).test_its_repr_is_its_constructor_call()


def test_one_that_declares_no_events_is_rejected_with_the_way_out() -> None:
    with pytest.raises(AssertionError, match=r"`Undeclared.events` must be a set.*got None. Write for example"):
        contract_of(Undeclared()).test_it_acts_only_at_the_events_it_names()
    with pytest.raises(AssertionError, match=r"`Wide.match` must be False at events that `events` does not name"):
        contract_of(Wide()).test_it_acts_only_at_the_events_it_names()


def test_one_that_no_package_registers_is_rejected_with_the_way_out() -> None:
    with pytest.raises(AssertionError, match=r'(?s)must be registered.*entry-points."composer.algorithms"\] WithReq'):
        contract_of(WithRequired(1.0)).test_the_entry_point_is_this_class()


def test_assertions_of_the_contract_show_the_compared_values() -> None:
    with pytest.raises(AssertionError, match=r"assert \(False, \['scale'\]\) == \(True, \[\]\)"):
        contract_of(WithoutRepr()).test_its_repr_is_its_constructor_call()
