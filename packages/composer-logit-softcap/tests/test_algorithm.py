"""`LogitSoftcap` with the engine."""

from __future__ import annotations

import pytest
import torch

from composer.algorithms.logit_softcap import LogitSoftcap, softcap_logits
from composer.core import CHANGES_LAYERS, REPLACES_ATTENTION, REPLACES_LOSS, Algorithm, Engine, Event, Placement, State
from composer.loggers import Logger
from composer.testing import SimpleModel


def test_the_head_is_capped_at_the_start_in_training_and_evaluation() -> None:
    model = SimpleModel()
    batch = (100 * torch.randn(4, 1, 2, 2), None)
    expected = softcap_logits(model(batch), 0.5)
    state = State(model=model, max_duration="1ep", algorithms=LogitSoftcap(final=0.5, head_name="fc2"))
    Engine(state).run_event("init")

    assert torch.equal(expected, model(batch))
    assert torch.equal(expected, model.eval()(batch))


def test_it_is_required_on_load() -> None:
    assert LogitSoftcap.required_on_load()


def test_it_replaces_attention_only_if_attention_is_capped() -> None:
    assert {CHANGES_LAYERS} == LogitSoftcap().placement.provides
    assert REPLACES_ATTENTION in LogitSoftcap(attention=50.0).placement.provides
    assert REPLACES_LOSS not in LogitSoftcap(final=None, attention=50.0).placement.excludes


class Attention(Algorithm):
    """A method that replaces attention."""

    events = frozenset({Event.INIT})
    placement = Placement(provides={REPLACES_ATTENTION})

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Do nothing."""


def test_two_methods_that_replace_attention_are_refused() -> None:
    state = State(model=SimpleModel(), rank_zero_seed=0, algorithms=[Attention(), LogitSoftcap(attention=50.0)])
    with pytest.raises(ValueError, match=r"LogitSoftcap"):
        Engine(state).run_event("init")


def test_wrong_caps_are_refused_at_construction() -> None:
    with pytest.raises(ValueError, match=r"`final` must be above 0, got -1"):
        LogitSoftcap(final=-1)
    with pytest.raises(ValueError, match=r"`final` or `attention` must be a cap, got None for both"):
        LogitSoftcap(final=None)
    with pytest.raises(TypeError, match=r"`attention` must be a number, got 'high'"):
        LogitSoftcap(attention="high")  # type: ignore[arg-type]
