"""`SAM` at its events, with the engine, other algorithms and resumption."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from composer.algorithms.sam import SAM, SAMOptimizer
from composer.core import WRAPS_OPTIMIZER, Algorithm, ConflictError, Engine, Event, Placement, State
from composer.testing import SimpleModel, deep_compare, train_by_hand

LOADING = ("init", "before_load", "after_load")


def make_state(*algorithms: Algorithm, **arguments: Any) -> State:
    model = arguments.pop("model", None) or SimpleModel(num_features=4)
    arguments.setdefault("optimizers", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    return State(model=model, algorithms=algorithms, max_duration="8ba", dataloader=[0], **arguments)


def make_batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, 4, 1, 1, generator=generator), torch.tensor([0, 1] * 4)) for _ in range(number)]


@pytest.mark.parametrize("events", [LOADING, ("init", "after_load"), ("before_load",)])
def test_the_optimizer_is_wrapped_once(events: tuple[str, ...]) -> None:
    state = make_state(SAM(rho=0.3, epsilon=1e-6, interval=2))
    base = state.optimizers[0]
    engine = Engine(state)
    for event in events:
        engine.run_event(event)
    (optimizer,) = state.optimizers

    assert isinstance(optimizer, SAMOptimizer)
    assert optimizer.base_optimizer is base
    assert optimizer.param_groups[0] is base.param_groups[0]
    assert (0.3, 1e-6) == (optimizer.param_groups[0]["rho"], optimizer.param_groups[0]["epsilon"])
    assert 2 == optimizer.interval


def test_an_optimizer_that_is_wrapped_already_is_left() -> None:
    model = SimpleModel()
    optimizer = SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    state = make_state(SAM(), model=model, optimizers=optimizer)
    Engine(state).run_event("after_load")

    assert [optimizer] == state.optimizers


def test_several_optimizers_share_one_ascent() -> None:
    model = SimpleModel()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model.fc1, model.fc2)]
    state = make_state(SAM(), model=model, optimizers=optimizers)
    engine = Engine(state)
    engine.run_event("before_load")
    engine.run_event("after_load")
    first, second = state.optimizers

    assert isinstance(first, SAMOptimizer)
    assert (optimizers[0], (second,)) == (first.base_optimizer, first.others)
    assert second is optimizers[1]


def test_a_run_without_an_optimizer_is_left() -> None:
    state = make_state(SAM(), optimizers=None)
    Engine(state).run_event("after_load")

    assert [] == state.optimizers


@pytest.mark.parametrize("already_wrapped", [False, True])
def test_a_resumed_run_continues_identically_with_momentum_and_interval(already_wrapped: bool) -> None:
    """The Trainer loads between BEFORE_LOAD and AFTER_LOAD."""
    batches = make_batches(7)
    expected = make_state(SAM(rho=0.3, interval=2))
    train_by_hand(expected, batches)
    begun = make_state(SAM(rho=0.3, interval=2))
    train_by_hand(begun, batches[:3])
    saved = copy.deepcopy(begun.state_dict())

    resumed = make_state(SAM(rho=0.3, interval=2))
    engine = Engine(resumed)
    for event in LOADING if already_wrapped else LOADING[:2]:
        engine.run_event(event)
    resumed.load_state_dict(saved)
    engine.close()
    train_by_hand(resumed, batches[3:])

    assert {"SGD"} == saved["optimizers"].keys()
    assert {"momentum_buffer"} == {key for entry in saved["optimizers"]["SGD"]["state"].values() for key in entry}
    deep_compare(expected.model.state_dict(), resumed.model.state_dict())
    deep_compare(expected.state_dict()["optimizers"], resumed.state_dict()["optimizers"])


class Noise(Algorithm):
    """Adds random numbers to the inputs, as algorithms that draw for each microbatch do."""

    events = frozenset({Event.BEFORE_FORWARD})

    def __init__(self) -> None:
        self.drawn: list[torch.Tensor] = []

    def apply(self, event: Event, state: State, logger: Any) -> None:
        self.drawn.append(torch.randn_like(state.inputs))
        state.inputs = state.inputs + self.drawn[-1]


@pytest.mark.parametrize("sam_first", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_algorithms_draw_is_the_same_in_both_passes(sam_first: bool, microbatches: int) -> None:
    sam, noise = SAM(), Noise()
    state = make_state(*((sam, noise) if sam_first else (noise, sam)))
    train_by_hand(state, make_batches(2), microbatches=microbatches)
    steps = [noise.drawn[: 2 * microbatches], noise.drawn[2 * microbatches :]]

    for drawn in steps:
        deep_compare(drawn[:microbatches], drawn[microbatches:])
    assert not torch.equal(steps[0][0], steps[1][0])


def test_the_order_of_the_list_does_not_matter() -> None:
    seen = []
    for sam_first in (False, True):
        sam, noise = SAM(), Noise()
        state = make_state(*((sam, noise) if sam_first else (noise, sam)))
        train_by_hand(state, make_batches(2))
        seen.append(state.model.state_dict())

    deep_compare(*seen)


class Wrapper(Algorithm):
    """Another method that wraps the optimizer."""

    events = frozenset({Event.AFTER_LOAD})
    placement = Placement(provides={WRAPS_OPTIMIZER})

    def apply(self, event: Event, state: State, logger: Any) -> None:
        raise AssertionError("it is excluded")


@pytest.mark.parametrize("other", [SAM, Wrapper])
def test_two_algorithms_cannot_wrap_the_optimizer(other: type[Algorithm]) -> None:
    with pytest.raises(ConflictError, match=r"`SAM` .*wraps optimizer"):
        Engine(make_state(SAM(), other()))


def test_the_representation_is_the_constructor_call() -> None:
    assert "SAM(rho=0.5,epsilon=1e-12,interval=10,sync_ascent=False)" == repr(SAM(rho=0.5, interval=10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rho": -1}, "`rho` must not be negative, got -1"),
        ({"epsilon": -1e-3}, "`epsilon` must be positive, got -0.001"),
        ({"interval": 0}, "`interval` must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SAM(**arguments)
