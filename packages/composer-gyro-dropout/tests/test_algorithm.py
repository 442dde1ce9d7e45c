"""`GyroDropout` at its events, with the engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from composer.algorithms.gyro_dropout import GyroDropout, GyroDropoutLayer
from composer.algorithms.warnings import NoEffectWarning
from composer.core import Engine, State
from composer.testing import SimpleModel, SimpleModelWithDropout

X = torch.ones(8, 64)


def started(algorithm: GyroDropout, duration: str = "8ba", length: int = 4, seed: int = 0) -> tuple[State, Engine]:
    state = State(
        model=SimpleModelWithDropout(),
        max_duration=duration,
        dataloader=[0] * length,
        algorithms=algorithm,
        rank_zero_seed=seed,
    )
    engine = Engine(state)
    engine.run_event("fit_start")
    return state, engine


def masks_by_batch(state: State, engine: Engine, batches: int) -> list[torch.Tensor]:
    found, layer = [], dropout(state)
    for _ in range(batches):
        engine.run_event("batch_start")
        found.append(layer(X))
        state.timestamp = state.timestamp.to_next_batch(samples=8)
    return found


def dropout(state: State) -> GyroDropoutLayer:
    layer = state.model.module[3]
    assert isinstance(layer, GyroDropoutLayer)
    return layer


def changes(masks: list[torch.Tensor]) -> list[int]:
    return [i for i in range(1, len(masks)) if not torch.equal(masks[i - 1], masks[i])]


def test_dropout_is_replaced_when_the_fit_starts() -> None:
    state, _ = started(GyroDropout(p=0.3, sigma=8, tau=4))
    layer = dropout(state)

    assert layer is state.model.dropout
    assert (0.3, 8, 4, True) == (layer.p, layer.sigma, layer.tau, layer.driven)
    assert 0.5 == dropout(started(GyroDropout())[0]).p


@pytest.mark.parametrize("duration", ["8ba", "2ep", "64sp"])
def test_masks_change_with_the_progress_of_the_run_in_any_unit(duration: str) -> None:
    """Eight batches of eight samples: four groups of masks for two batches each."""
    assert [2, 4, 6] == changes(masks_by_batch(*started(GyroDropout(sigma=8, tau=2), duration), batches=8))


def test_a_run_shorter_than_there_are_masks_works() -> None:
    assert [1] == changes(masks_by_batch(*started(GyroDropout(), "2ba"), batches=2))


def test_forward_passes_of_one_batch_use_the_same_masks() -> None:
    """Several microbatches are one step, and so are a pass and its repetition by activation checkpointing."""
    state, engine = started(GyroDropout(sigma=8, tau=2))
    engine.run_event("batch_start")
    layer = dropout(state)

    assert 1 == len(torch.stack([layer(X) for _ in range(20)]).unique(dim=0))


@pytest.mark.parametrize("stop", [0, 1, 3, 6])
def test_a_run_resumed_at_any_batch_uses_the_same_masks(stop: int) -> None:
    state, engine = started(GyroDropout(sigma=8, tau=2))
    first = masks_by_batch(state, engine, stop)
    saved, timestamp = copy.deepcopy(state.algorithms[0].state_dict()), state.timestamp
    expected = masks_by_batch(state, engine, 8 - stop)

    algorithm = GyroDropout(sigma=8, tau=2)
    algorithm.load_state_dict(saved)
    state, engine = started(algorithm, seed=99)
    state.timestamp = timestamp
    actual = masks_by_batch(state, engine, 8 - stop)

    assert len(first) == stop
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_a_resumed_run_knows_the_largest_shape_so_far() -> None:
    """Masks are drawn at that size, from which smaller ones are cut."""
    state, engine = started(GyroDropout(sigma=8, tau=2))
    engine.run_event("batch_start")
    dropout(state)(torch.ones(8, 100))
    expected = dropout(state)(X)

    algorithm = GyroDropout(sigma=8, tau=2)
    algorithm.load_state_dict(state.algorithms[0].state_dict())
    state, _ = started(algorithm)

    assert torch.equal(expected, dropout(state)(X))


def test_ranks_and_repeated_runs_have_the_same_masks_and_others_do_not() -> None:
    """They follow from the seed of the run, not from the state of a generator, which differs between ranks."""
    masks = []
    for manual_seed, seed in ((0, 5), (1, 5), (0, 6)):
        torch.manual_seed(manual_seed)
        masks.append(masks_by_batch(*started(GyroDropout(sigma=8, tau=2), seed=seed), batches=1)[0])

    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_a_second_fit_continues() -> None:
    state, engine = started(GyroDropout(sigma=8, tau=2), "4ba")
    masks_by_batch(state, engine, 4)
    layer = dropout(state)
    state.max_duration = "8ba"  # type: ignore[assignment]
    engine.run_event("fit_start")

    assert layer is dropout(state)
    assert [2] == changes(masks_by_batch(state, engine, 4))


def test_a_model_without_dropout_gets_a_warning() -> None:
    state = State(model=SimpleModel(), max_duration="1ba", dataloader=[0], algorithms=GyroDropout())
    with pytest.warns(NoEffectWarning, match=r"`GyroDropout` changed nothing: the model has no `torch.nn.Dropout`"):
        Engine(state).run_event("fit_start")


@pytest.mark.parametrize(
    ("arguments", "message"), [({"p": -1}, r"`p` must be in"), ({"sigma": 8}, r"`tau` must be at")]
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GyroDropout(**arguments)


def test_it_is_required_on_load_and_there_is_no_warning() -> None:
    assert GyroDropout.required_on_load()
    assert {"repr": "GyroDropout(p=None,sigma=256,tau=16)", "seed": None, "shapes": []} == GyroDropout().state_dict()
