"""`AlgorithmContract` takes other people's algorithms, and says what to do where it rejects one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.testing import AlgorithmContract, DatasetTransformContract


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


class Random(WithoutArguments):
    """Draws from torch's global generator."""

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        state.loss = (1 + torch.rand(())) * state.loss


ACCEPTED = [WithoutArguments(), Random(), WithOptions(3.0, 1, name=2), AsDataclass(), WithRequired(1.0)]


@pytest.mark.parametrize("algorithm", ACCEPTED, ids=lambda algorithm: type(algorithm).__name__)
def test_other_peoples_algorithms_are_accepted(algorithm: Algorithm) -> None:
    contract = contract_of(algorithm)
    contract.test_it_acts_only_at_the_events_it_names()
    contract.test_its_placement_is_declared()
    contract.test_its_repr_is_its_constructor_call()
    contract.test_the_same_seed_gives_the_same_result()
    contract.test_a_resumed_run_continues_identically()
    contract.test_a_step_that_a_scaler_skips_moves_no_weight()
    contract.test_frozen_weights_stay()


class Shrinking(WithoutArguments):
    """Shrinks all weights after each step."""

    events = frozenset({Event.BATCH_END})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        with torch.no_grad():
            for weight in state.model.parameters():
                weight.mul_(0.9)


def test_weights_that_nothing_may_move_are_watched() -> None:
    with pytest.raises(AssertionError, match=r"`Shrinking` must leave '.*weight' as it was before a step of fp16"):
        contract_of(Shrinking()).test_a_step_that_a_scaler_skips_moves_no_weight()
    with pytest.raises(AssertionError, match=r"`Shrinking` must not change '.*weight', whose `requires_grad` is False"):
        contract_of(Shrinking()).test_frozen_weights_stay()


def test_a_representation_that_lacks_an_argument_is_rejected_with_the_way_out() -> None:
    with pytest.raises(AssertionError, match=r"`repr` of `WithoutRepr` must be.*\['scale'\].*`self\.x = x`"):
        contract_of(WithoutRepr()).test_its_repr_is_its_constructor_call()


def test_one_that_declares_no_events_is_rejected_with_the_way_out() -> None:
    with pytest.raises(AssertionError, match=r"`Undeclared.events` must be a set.*got None. Set for example"):
        contract_of(Undeclared()).test_it_acts_only_at_the_events_it_names()
    with pytest.raises(AssertionError, match=r"`Wide.match` must return False at events that are not in `events`"):
        contract_of(Wide()).test_it_acts_only_at_the_events_it_names()


class Counting(WithoutArguments):
    """Its loss depends on a count that it does not save."""

    def __init__(self) -> None:
        pass

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self._count = getattr(self, "_count", 0) + 1
        state.loss = self._count * state.loss


def test_one_that_does_not_save_what_it_depends_on_is_rejected() -> None:
    class Contract(AlgorithmContract):
        def make(self) -> Algorithm:
            return Counting()

    with pytest.raises(AssertionError):
        Contract().test_a_resumed_run_continues_identically()


class Noisy(WithoutArguments):
    """Adds noise to the weights, another one on each rank."""

    events = frozenset({Event.BATCH_END})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.add_(torch.rand_like(parameter))


class NoisyContract(AlgorithmContract):
    def make(self) -> Algorithm:
        return Noisy()


def test_one_whose_ranks_drift_apart_is_rejected_with_the_way_out() -> None:
    with pytest.raises(AssertionError, match=r"(?s)^`Noisy` must leave the same weights .*broadcast.*difference: /"):
        NoisyContract().test_ranks_agree()


def test_one_that_no_package_registers_is_rejected_with_the_way_out() -> None:
    with pytest.raises(AssertionError, match=r'(?s)must be registered.*entry-points."composer.algorithms"\] WithReq'):
        contract_of(WithRequired(1.0)).test_the_entry_point_is_this_class()


def test_assertions_of_the_contract_show_the_compared_values() -> None:
    with pytest.raises(AssertionError, match=r"assert \(False, \['scale'\]\) == \(True, \[\]\)"):
        contract_of(WithoutRepr()).test_its_repr_is_its_constructor_call()


class AddsAgain(Algorithm):
    """Adds a transform in every fit, also to what other subsets return, without looking at evaluators."""

    events = frozenset({Event.FIT_START})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        dataset = state.dataloader.dataset
        getattr(dataset, "dataset", dataset).transform = functools.partial(torch.clone)


class AddsAgainContract(DatasetTransformContract):
    def make(self) -> Algorithm:
        return AddsAgain()


def test_transforms_that_reach_other_data_or_are_added_twice_are_rejected_with_the_way_out() -> None:
    contract = AddsAgainContract()
    with pytest.raises(AssertionError, match=r"must add its transform once.*Create it in `__init__`"):
        contract.test_a_second_fit_adds_nothing()
    with pytest.raises(AssertionError, match=r"must not change the examples of other.*add_training_transform`"):
        contract.test_the_validation_part_of_a_split_keeps_its_examples()
    with pytest.raises(AssertionError, match=r"must raise a ValueError at INIT, got None"):
        contract.test_a_data_set_that_is_evaluated_too_is_refused()
    with pytest.raises(AssertionError, match=r"must raise a TypeError at INIT, got None"):
        contract.test_a_loader_that_cannot_take_the_transform_is_refused_at_once()
    with pytest.raises(AssertionError, match=r"must use different random numbers, got 1 different"):
        contract.test_each_worker_draws_its_own_in_every_epoch()


def test_tests_of_data_set_transforms_cannot_be_replaced_either() -> None:
    with pytest.raises(TypeError, match=r"replaces a test of the contract"):
        type("Contract", (AddsAgainContract,), {"test_a_second_fit_adds_nothing": lambda self: None})
