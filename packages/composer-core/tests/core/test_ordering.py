"""Declared placement: who acts before whom, forwards and backwards, and what is refused."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import composer.core
from composer.algorithms.warnings import NotIntendedUseWarning
from composer.core import (
    ADDS_NORMS,
    CHANGES_LAYERS,
    EFFECTS,
    FACTORIZES_WEIGHTS,
    INTERPOLATES_LOSS,
    MIXES_TARGETS,
    PRUNES_BATCH,
    REPLACES_NORMS,
    SMOOTHS_TARGETS,
    TRANSFORMS_BATCH,
    WRAPS_OPTIMIZER,
    Algorithm,
    ConflictError,
    Engine,
    Event,
    OrderingError,
    Placement,
    State,
)
from composer.core.ordering import Ordering, opener_of
from composer.core.passes import (
    order_by_placement,
    set_filo_order,
    warn_on_discouraged,
)


class Acting(Algorithm):
    """Acts at given events, and writes its name down."""

    def __init__(
        self, name: str, events: Any, placement: Placement | None = None, ran: list[str] | None = None
    ) -> None:
        self.name = name
        self.events = None if events is None else frozenset(events)
        self._when = events
        self.placement = placement or Placement()
        self.ran = ran if ran is not None else []

    def match(self, event: Event, state: State) -> bool:
        return self.events is None or event in self.events

    def apply(self, event: Event, state: State, logger: Any) -> None:
        self.ran.append(self.name)


class Undeclared(Acting):
    """Says nothing of its events and answers through `match`."""

    def __init__(
        self, name: str, events: Any, placement: Placement | None = None, ran: list[str] | None = None
    ) -> None:
        super().__init__(name, events, placement, ran)
        self.events = None

    def match(self, event: Event, state: State) -> bool:
        return event in self._when


def run(algorithms: list[Acting], *events: Event, by_name: bool = False) -> list[str]:
    ran: list[str] = []
    for algorithm in algorithms:
        algorithm.ran = ran
    state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", dataloader=[0], algorithms=algorithms)
    engine = Engine(state)
    for event in events:
        engine.run_event(event.value if by_name else event)
    return ran


LOSS = (Event.BEFORE_LOSS, Event.AFTER_LOSS)
PRUNER = Placement(provides={PRUNES_BATCH}, before={TRANSFORMS_BATCH})
MIXER = Placement(provides={TRANSFORMS_BATCH})


@pytest.mark.parametrize("order", list(itertools.permutations("ABC")))
def test_without_declarations_the_list_decides_and_is_reversed_at_after_and_end(order: tuple[str, ...]) -> None:
    events = (*LOSS, Event.INIT, Event.EPOCH_START, Event.EPOCH_END, Event.BATCH_CHECKPOINT)
    algorithms = [Acting(name, events) for name in order]
    expected = list(order)

    for event in (Event.BEFORE_LOSS, Event.INIT, Event.EPOCH_START, Event.BATCH_CHECKPOINT):
        assert expected == run(algorithms, event)
    for event in (Event.AFTER_LOSS, Event.EPOCH_END):
        assert expected[::-1] == run(algorithms, event)


@pytest.mark.parametrize("cls", [Acting, Undeclared])
@pytest.mark.parametrize("listed", [("mixer", "pruner"), ("pruner", "mixer")])
@pytest.mark.parametrize("event", [Event.AFTER_DATALOADER, Event.BATCH_START, Event.BATCH_END])
def test_a_declared_order_holds_at_after_events_too(cls: type[Acting], listed: tuple[str, ...], event: Event) -> None:
    """Algorithms that prune the batch see clean inputs: the reversal at AFTER_DATALOADER must not put them last."""
    placements = {"mixer": MIXER, "pruner": PRUNER}
    algorithms = [cls(name, (event,), placements[name]) for name in listed]

    assert run(algorithms, event) == ["pruner", "mixer"]


@pytest.mark.parametrize("cls", [Acting, Undeclared])
@pytest.mark.parametrize("listed", [("smoother", "mixer"), ("mixer", "smoother")])
def test_what_was_done_at_before_is_undone_in_reverse_even_against_the_declared_order(
    cls: type[Acting], listed: tuple[str, ...]
) -> None:
    placements = {
        "mixer": Placement(provides={MIXES_TARGETS}),
        "smoother": Placement(provides={SMOOTHS_TARGETS}, after={MIXES_TARGETS}),
    }
    algorithms = [cls(name, LOSS, placements[name]) for name in listed]

    for by_name in (False, True):
        assert run(algorithms, *LOSS, by_name=by_name) == ["mixer", "smoother", "smoother", "mixer"]


@pytest.mark.parametrize("listed", list(itertools.permutations(["undoing 1", "undoing 2", "pruner"])))
def test_undoing_and_a_declared_order_hold_together(listed: tuple[str, ...]) -> None:
    placements = {
        "undoing 1": Placement(provides={TRANSFORMS_BATCH}),
        "undoing 2": Placement(provides={TRANSFORMS_BATCH}),
        "pruner": PRUNER,
    }
    events = {"undoing 1": LOSS, "undoing 2": LOSS, "pruner": (Event.AFTER_LOSS,)}
    algorithms = [Acting(name, events[name], placements[name]) for name in listed]
    undoing = [name for name in listed if name != "pruner"]

    assert [*undoing, "pruner", *undoing[::-1]] == run(algorithms, *LOSS)


def test_an_algorithm_that_did_not_act_at_before_keeps_its_declared_order_at_after() -> None:
    class Sometimes(Acting):
        def match(self, event: Event, state: State) -> bool:
            return event is Event.AFTER_LOSS

    algorithms = [Sometimes("mixer", LOSS, MIXER), Sometimes("pruner", LOSS, PRUNER)]

    assert run(algorithms, *LOSS) == ["pruner", "mixer"]


@pytest.mark.parametrize("listed", [("mixer", "pruner"), ("pruner", "mixer")])
def test_one_that_undoes_keeps_its_declared_order_to_one_that_acts_at_after_only(listed: tuple[str, ...]) -> None:
    given = {"mixer": ((Event.AFTER_LOSS,), MIXER), "pruner": (LOSS, PRUNER)}

    assert ["pruner", "pruner", "mixer"] == run([Acting(name, *given[name]) for name in listed], *LOSS)


def test_a_declared_order_to_one_that_acts_elsewhere_changes_nothing() -> None:
    algorithms = [
        Acting("pruner", [Event.AFTER_LOSS], PRUNER),
        Acting("mixer", [Event.BATCH_START], MIXER),
        Acting("A", [Event.AFTER_LOSS]),
    ]

    assert ["A", "pruner"] == run(algorithms, Event.AFTER_LOSS)


def test_an_algorithm_is_not_ordered_against_itself() -> None:
    placement = Placement(provides={TRANSFORMS_BATCH}, before={TRANSFORMS_BATCH})

    assert ["A"] == run([Acting("A", [Event.BATCH_START], placement)], Event.BATCH_START)


class Pruner(Acting):
    """Has a name of its own in plans."""


class Mixer(Acting):
    """The same."""


def test_the_plan_names_the_declaration_that_orders_two_algorithms() -> None:
    def reasons(events: Any, at: Event, *algorithms: tuple[type[Acting], Placement]) -> list[tuple[str, str]]:
        made = [cls(cls.__name__, events, placement) for cls, placement in algorithms]
        state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", dataloader=[0], algorithms=made)
        return [(row.name, row.reason) for row in Engine(state).explain().at(at)]

    listed, why = ((Mixer, MIXER), (Pruner, PRUNER)), "Mixer transforms batch, which Pruner precedes"
    undone = "also acted at the first event of the pair: reverse of the order there"
    declared = [("Pruner", f"before Mixer: {why}"), ("Mixer", f"after Pruner: {why}")]

    assert declared == reasons([Event.BATCH_START], Event.BATCH_START, *listed)
    assert declared == reasons([Event.AFTER_LOSS], Event.AFTER_LOSS, *listed)
    assert [("Mixer", undone), ("Pruner", undone)] == reasons(LOSS, Event.AFTER_LOSS, *listed)
    assert [("Mixer", "as listed")] == reasons(LOSS, Event.AFTER_LOSS, listed[0])


def test_what_no_declaration_orders_is_reversed_beside_a_declared_order() -> None:
    """The first in is the last out, except for the two whose order is declared."""
    algorithms = [
        Acting("prunes", [Event.AFTER_LOSS], PRUNER),
        Acting("mixes", [Event.AFTER_LOSS], MIXER),
        *(Acting(name, [Event.AFTER_LOSS]) for name in "AB"),
    ]

    assert ["B", "A", "prunes", "mixes"] == run(algorithms, Event.AFTER_LOSS)
    assert ["B", "A", "prunes", "mixes"] == run(algorithms, Event.FIT_END, Event.AFTER_LOSS)


def test_what_passes_of_the_user_reversed_at_before_is_undone_in_the_reverse_of_that() -> None:
    algorithms = [
        Acting("prunes", [Event.AFTER_LOSS], PRUNER),
        Acting("mixes", [Event.AFTER_LOSS], MIXER),
        *(Acting(name, LOSS) for name in "AB"),
    ]
    ordering = Ordering(algorithms)

    assert (3, 2, 0, 1) == ordering.backward((0, 1, 2, 3), (2, 3))
    assert (2, 3, 0, 1) == ordering.backward((0, 1, 2, 3), (3, 2))


def test_ties_keep_the_users_order() -> None:
    later = Placement(after={ADDS_NORMS})
    algorithms = [
        Acting("low precision", (Event.INIT,), later),
        Acting("first", (Event.INIT,)),
        Acting("adds norms", (Event.INIT,), Placement(provides={ADDS_NORMS})),
        Acting("last", (Event.INIT,)),
    ]

    assert run(algorithms, Event.INIT) == ["first", "adds norms", "low precision", "last"]


names = st.sampled_from(["x:a", "x:b", "x:c", "x:d"])
placements = st.builds(
    Placement,
    provides=st.frozensets(names, max_size=2),
    before=st.frozensets(names, max_size=1),
    after=st.frozensets(names, max_size=1),
)


@settings(deadline=None)
@given(st.lists(placements, max_size=6))
def test_the_order_obeys_every_declaration_or_is_refused(declared: list[Placement]) -> None:
    algorithms = [Acting(str(i), (Event.INIT, *LOSS), p) for i, p in enumerate(declared)]

    def must_precede(i: int, j: int) -> bool:
        a, b = declared[i], declared[j]
        return i != j and bool(a.provides & b.after or a.before & b.provides)

    indices = range(len(declared))
    # Reference: look for any permutation that obeys.
    obeying = [
        p
        for p in itertools.permutations(indices)
        if not any(must_precede(p[k], p[m]) for m in range(len(p)) for k in range(m + 1, len(p)))
    ]
    if not obeying:
        with pytest.raises(OrderingError):
            Ordering(algorithms)
        return
    forward = Ordering(algorithms).forward
    assert forward in obeying
    present = tuple(indices)
    assert Ordering(algorithms).backward(present, ()) in obeying
    assert Ordering(algorithms).backward(present, forward) == forward[::-1]


def test_a_cycle_is_refused_with_its_members_and_the_way_out() -> None:
    algorithms = [
        Acting("a", (Event.INIT,), Placement(provides={"x:a"}, before={"x:b"})),
        Acting("b", (Event.INIT,), Placement(provides={"x:b"}, before={"x:a"})),
    ]

    with pytest.raises(OrderingError, match=r"`Acting` must act before `Acting`.*Remove one of them"):
        run(algorithms, Event.INIT)


def test_excluded_pairs_are_refused_when_the_engine_gets_them() -> None:
    class First(Acting):
        pass

    class Second(Acting):
        pass

    refusing = First("a", (Event.INIT,), Placement(excludes={PRUNES_BATCH}))
    pruning = Second("b", (Event.INIT,), Placement(provides={PRUNES_BATCH}))

    with pytest.raises(
        ConflictError, match=r"`First` cannot be used together with `Second`, which prunes batch.*Remove"
    ):
        run([refusing, pruning], Event.INIT)
    assert issubclass(ConflictError, ValueError)


def test_an_excluded_algorithm_added_later_is_refused_at_the_next_event() -> None:
    refusing = Acting("a", (Event.INIT,), Placement(excludes={PRUNES_BATCH}))
    state = State(model=torch.nn.Linear(1, 1), max_duration="1ep", dataloader=[0], algorithms=refusing)
    engine = Engine(state)
    state.algorithms.append(Acting("b", (Event.INIT,), Placement(provides={PRUNES_BATCH})))

    with pytest.raises(ConflictError):
        engine.run_event(Event.FIT_START)


def test_discouraged_pairs_are_warned_of_once() -> None:
    both = Placement(provides={INTERPOLATES_LOSS}, discourages={INTERPOLATES_LOSS})
    algorithms = [Acting("a", (Event.BEFORE_BACKWARD,), both), Acting("b", (Event.BEFORE_BACKWARD,), both)]

    with pytest.warns(NotIntendedUseWarning, match="should not be used together") as caught:
        run(algorithms, Event.BEFORE_BACKWARD, Event.BEFORE_BACKWARD)
    assert len(caught) == 1


@pytest.mark.parametrize("reverse", [False, True])
def test_a_pair_that_only_one_of_the_two_discourages_is_warned_of(reverse: bool) -> None:
    events = (Event.BEFORE_BACKWARD,)
    algorithms = [
        Acting("a", events, Placement(provides={INTERPOLATES_LOSS})),
        Acting("b", events, Placement(discourages={INTERPOLATES_LOSS})),
    ]

    with pytest.warns(NotIntendedUseWarning, match="should not be used together") as caught:
        run(algorithms[::-1] if reverse else algorithms, *events)
    assert len(caught) == 1


@pytest.mark.parametrize("effects", [{"unknown"}, {":x"}, {"x:"}, {""}])
def test_unknown_effects_are_refused_at_class_creation(effects: set[str]) -> None:
    with pytest.raises(ValueError, match=r"`provides` must contain effects of `composer.core`.*vendor:effect"):

        class _Wrong(Acting):
            placement = Placement(provides=effects)


def test_effects_of_the_wrong_type_are_refused() -> None:
    with pytest.raises(TypeError, match="must be a set of effects, got the string 'prunes_batch'"):
        Placement(before="prunes_batch")
    with pytest.raises(TypeError, match="which are strings, got 3"):
        Placement(before={3})  # type: ignore[arg-type]


def test_the_opener_of_an_end_is_its_other_half() -> None:
    assert opener_of(Event.AFTER_LOSS) is Event.BEFORE_LOSS
    assert opener_of(Event.EVAL_AFTER_ALL) is Event.EVAL_BEFORE_ALL
    assert opener_of(Event.EPOCH_END) is Event.EPOCH_START
    assert opener_of(Event.BEFORE_LOSS) is None
    assert opener_of(Event.EPOCH_CHECKPOINT) is None


def test_the_passes_can_be_called_by_hand() -> None:
    pruner, mixer = Acting("pruner", LOSS, PRUNER), Acting("mixer", LOSS, MIXER)
    plain = Acting("plain", (Event.AFTER_LOSS,))

    assert [pruner, mixer] == order_by_placement([mixer, pruner], Event.BEFORE_LOSS)
    assert [mixer, pruner] == set_filo_order([pruner, mixer], Event.AFTER_LOSS)
    assert [plain, mixer] == set_filo_order([mixer, plain], Event.AFTER_LOSS)
    assert [mixer, plain] == set_filo_order([mixer, plain], Event.BEFORE_LOSS)
    with warnings.catch_warnings():
        assert [mixer] == warn_on_discouraged([mixer], Event.INIT)


def test_what_is_done_to_layers_of_one_kind_is_done_to_layers() -> None:
    assert CHANGES_LAYERS in Placement(provides={REPLACES_NORMS}).provides
    assert CHANGES_LAYERS in Placement(provides={FACTORIZES_WEIGHTS}).provides
    assert CHANGES_LAYERS not in Placement(provides={WRAPS_OPTIMIZER}, after={REPLACES_NORMS}).provides


def test_every_effect_is_a_constant_of_the_core_package() -> None:
    assert {getattr(composer.core, effect.upper()) for effect in EFFECTS} == EFFECTS
    assert {effect.upper() for effect in EFFECTS} <= set(composer.core.__all__)
